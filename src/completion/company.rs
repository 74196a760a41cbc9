//! Whether other threads want this one's CPU, for a driver that looks instead of sleeping.

use std::time::{Duration, Instant};

use crate::completion::queue::CompletionQueue;

/// Where a look is a matter of nanoseconds, asking that each time costs several times as much; and where a peer runs on the
/// same CPU, not asking costs it its turn.
#[derive(Debug, Default)]
pub(super) struct Company {
    /// The last one who was made way for took its turn.
    present: bool,
    turns: u32,
    /// The last turn was long, and may have been an accident.
    warned: bool,
    /// Until when more want it than it can serve, as far as is known, and for how long that was assumed.
    crowd: Option<(Instant, Duration)>,
}

impl Company {
    /// Giving way to nobody takes 0.1 to 0.3 us, and somebody's turn at least 1 us.
    const TURN: Duration = Duration::from_nanos(700);
    /// When nobody was there: so many turns, of [`LOOKS`](Self::LOOKS) each, until the next question.
    const ALONE: u32 = 8;
    /// A look takes some tens of nanoseconds; other tasks wait for so many of them.
    const LOOKS: u32 = 4;
    /// A peer's turn takes less. Who takes longer has work of its own, and more than there is time for: such a scheduler prefers
    /// who was asleep and is woken to who has been looking.
    const WORK: Duration = Duration::from_micros(500);
    /// For how long there is no looking then: this at first, twice as long each time that it is no better afterwards.
    const CROWD: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(640)];

    /// Looks a few times if nobody else wants the CPU.
    pub(super) fn look(&self, queue: &CompletionQueue) -> usize {
        if self.present {
            return 0;
        }
        for _ in 1..Self::LOOKS {
            let found = queue.look();
            if found > 0 {
                return found;
            }
            std::hint::spin_loop();
        }
        0
    }

    pub(super) fn is_expected(&mut self) -> bool {
        self.turns = (self.turns + 1) % Self::ALONE;
        self.present || self.turns == 0
    }

    pub(super) fn make_way(&mut self) {
        let before = Instant::now();
        std::thread::yield_now();
        self.took_turn(before, before.elapsed());
    }

    fn took_turn(&mut self, before: Instant, turn: Duration) {
        self.present = turn > Self::TURN;
        let warned = std::mem::replace(&mut self.warned, turn > Self::WORK);
        if self.warned && warned {
            let [first, longest] = Self::CROWD;
            let (now, last) = (before + turn, self.crowd);
            let again = last.filter(|(until, length)| now.saturating_duration_since(*until) < *length);
            let length = again.map_or(first, |(_, length)| (2 * length).min(longest));
            self.crowd = Some((now + length, length));
        }
    }

    /// Whether looking only costs the turns that others want.
    pub(super) fn is_a_crowd(&self) -> bool {
        self.crowd.is_some_and(|(until, _)| Instant::now() < until)
    }
}

#[cfg(all(test, not(rdma_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_is_left_alone_for_longer_each_time() {
        let mut company = Company::default();
        let mut now = Instant::now();
        let mut left_alone = |company: &mut Company, turn: u64, pause: u64| {
            now += Duration::from_millis(pause);
            company.took_turn(now, Duration::from_millis(turn));
            company.crowd.map(|(until, _)| until.saturating_duration_since(now).as_millis())
        };
        assert_eq!(left_alone(&mut company, 0, 0), None);
        assert!(!company.is_a_crowd());
        // One long turn may be an accident.
        assert_eq!(left_alone(&mut company, 4, 0), None);
        assert_eq!(left_alone(&mut company, 0, 10), None);
        assert_eq!(left_alone(&mut company, 4, 10), None);
        assert_eq!(left_alone(&mut company, 4, 10), Some(24));
        // It is no better as soon as it is looked at again.
        for expected in [40, 80, 160, 320, 640, 640, 640] {
            let pause = company.crowd.unwrap().1.as_millis() as u64 + 5;
            assert_eq!(left_alone(&mut company, 1, pause), Some(expected + 1));
        }
        // A peer's turn changes nothing, and later it is another crowd.
        assert_eq!(left_alone(&mut company, 0, 700), Some(0));
        assert_eq!(left_alone(&mut company, 1, 700), Some(0));
        assert_eq!(left_alone(&mut company, 1, 10), Some(21));
    }
}
