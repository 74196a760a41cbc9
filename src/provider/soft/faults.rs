//! Faults on purpose, for testing the code above the NIC: late completions, missing receives, lost peers.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::WcStatus;
use crate::sync::Mutex;

/// A moment of connection setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HandshakeStep {
    /// The sockets are connected; nothing was said yet.
    Connected,
    /// The connecting side has sent its request.
    RequestSent,
    /// The listening side has read the request.
    RequestReceived,
    /// The listening side has sent its reply.
    ReplySent,
    /// The connecting side has confirmed.
    ReadySent,
}

/// Faults that the software NIC injects, drawn from a seed: the same seed gives the same sequence of decisions.
///
/// ```
/// use std::time::Duration;
/// use tokio_rdma::soft::Faults;
///
/// let faults = Faults::seeded(7).delay_completions(Duration::ZERO..Duration::from_millis(2), 0.3).rnr(0.05);
/// # drop(faults);
/// ```
#[derive(Clone, Debug)]
pub struct Faults {
    seed: u64,
    delay: Option<(Range<Duration>, f64)>,
    reorder: bool,
    fail: Option<(u64, WcStatus)>,
    rnr: f64,
    die_at: Option<HandshakeStep>,
    die_after: Option<u64>,
    apart: bool,
}

impl Faults {
    /// No faults yet; what is added below draws from this seed.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, delay: None, reorder: false, fail: None, rnr: 0.0, die_at: None, die_after: None, apart: false }
    }

    /// Holds completions back for a random time in `range`, each with this probability.
    /// Completions of one queue pair keep their order; those of different ones overtake each other.
    pub fn delay_completions(mut self, range: Range<Duration>, probability: f64) -> Self {
        self.delay = Some((range, probability));
        self
    }

    /// Hands completions out in random order across queue pairs; those of one queue pair keep theirs.
    pub fn reorder_across_queue_pairs(mut self) -> Self {
        self.reorder = true;
        self
    }

    /// The `nth` signaled completion of a send queue of the device, counted from 1, fails with `status`
    /// although the peer carried the request out, and its queue pair ends.
    pub fn fail_completion(mut self, nth: u64, status: WcStatus) -> Self {
        self.fail = Some((nth, status));
        self
    }

    /// With this probability, a message that needs a receive finds none, although one is posted.
    pub fn rnr(mut self, probability: f64) -> Self {
        self.rnr = probability;
        self
    }

    /// This side closes the socket at this step of every connection setup.
    pub fn die_at(mut self, step: HandshakeStep) -> Self {
        self.die_at = Some(step);
        self
    }

    /// The link of a connection is cut, without a goodbye, once this side has sent `bytes` of payload over it.
    pub fn die_after_bytes(mut self, bytes: u64) -> Self {
        self.die_after = Some(bytes);
        self
    }

    /// A peer in the same process is treated as one in another: memory of GPUs goes through the socket.
    pub fn keep_apart(mut self) -> Self {
        self.apart = true;
        self
    }
}

/// Faults at work in an opened device. Each kind of decision has a sequence of its own,
/// so that how the kinds interleave does not change any of them.
#[derive(Debug)]
pub(super) struct FaultState {
    faults: Faults,
    delay: Mutex<Random>,
    reorder: Mutex<Random>,
    rnr: Mutex<Random>,
    completions: AtomicU64,
}

impl FaultState {
    pub(super) fn new(faults: Faults) -> Self {
        let random = |kind: u64| Mutex::new(Random(faults.seed ^ kind.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let (delay, reorder, rnr) = (random(1), random(2), random(3));
        Self { faults, delay, reorder, rnr, completions: AtomicU64::new(0) }
    }

    /// For how long the next completion is held back.
    pub(super) fn delays(&self) -> Option<Duration> {
        let (range, probability) = self.faults.delay.as_ref()?;
        let mut random = self.delay.lock();
        let (hit, place) = (random.hits(*probability), random.unit());
        hit.then(|| range.start + range.end.saturating_sub(range.start).mul_f64(place))
    }

    pub(super) fn keeps_apart(&self) -> bool {
        self.faults.apart
    }

    /// A random number with which to choose the next completion.
    pub(super) fn reorders(&self) -> Option<u64> {
        self.faults.reorder.then(|| self.reorder.lock().next())
    }

    pub(super) fn fails_completion(&self) -> Option<WcStatus> {
        let (nth, status) = self.faults.fail?;
        (self.completions.fetch_add(1, Ordering::Relaxed) + 1 == nth).then_some(status)
    }

    pub(super) fn pretends_rnr(&self) -> bool {
        self.faults.rnr > 0.0 && self.rnr.lock().hits(self.faults.rnr)
    }

    pub(super) fn dies_at(&self, step: HandshakeStep) -> bool {
        self.faults.die_at == Some(step)
    }

    pub(super) fn cut_after(&self) -> Option<u64> {
        self.faults.die_after
    }
}

/// SplitMix64: small, and good enough to draw faults from.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0.0..1.0`.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn hits(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_decides_the_same() {
        let decisions = |seed| {
            let range = Duration::from_micros(10)..Duration::from_millis(1);
            let faults = Faults::seeded(seed).delay_completions(range, 0.5).rnr(0.3).reorder_across_queue_pairs();
            let state = FaultState::new(faults);
            (0..200).map(|_| (state.delays(), state.pretends_rnr(), state.reorders())).collect::<Vec<_>>()
        };
        assert_eq!(decisions(1), decisions(1));
        assert_ne!(decisions(1), decisions(2));
        let hits = decisions(3).iter().filter(|(delay, ..)| delay.is_some()).count();
        assert!((60..140).contains(&hits), "{hits}");
    }

    #[test]
    fn the_kinds_do_not_disturb_each_other() {
        let state = |faults: Faults| FaultState::new(faults.rnr(0.5));
        let alone = state(Faults::seeded(9));
        let mixed = state(Faults::seeded(9).reorder_across_queue_pairs());
        for _ in 0..100 {
            mixed.reorders();
            assert_eq!(alone.pretends_rnr(), mixed.pretends_rnr());
        }
    }
}
