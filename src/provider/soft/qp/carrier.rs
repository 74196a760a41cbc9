//! Copies from one device's memory to another's, in pieces, of which two are under way.

use std::io;
use std::time::{Duration, Instant};

use crate::memory::device::Transfer;
use crate::memory::dma::Segment;

/// After so long, and what is under way by then, others get their turn.
pub(super) const TURN: Duration = Duration::from_micros(500);

/// Bytes of one copy between devices, of which two are under way. It begins with the shortest, which is over within half of the [`TURN`]
/// even where the driver goes through the host (38 GB/s between two H200), and grows while pieces take little time (370 GB/s by NVLink,
/// 1600 GB/s within one), since each costs 2 us between copies and 5 us to start.
const PIECE: std::ops::RangeInclusive<usize> = 8 << 20..=64 << 20;

/// Chooses the length of the pieces.
#[derive(Debug)]
pub(super) struct Carrier {
    piece: usize,
}

impl Default for Carrier {
    fn default() -> Self {
        Self { piece: *PIECE.start() }
    }
}

impl Carrier {
    /// Copies what both lists have in common, or as much as there is time for; the next piece is on its way before the one before it is
    /// waited for. How much was copied, which after an error means nothing, and the outcome. `more` makes a second transfer like the first.
    pub(super) fn copy(
        &mut self,
        first: Box<dyn Transfer>,
        mut more: impl FnMut() -> io::Result<Option<Box<dyn Transfer>>>,
        (from, to): (&[Segment], &[Segment]),
        turn: Instant,
    ) -> (usize, io::Result<()>) {
        let mut copied = 0;
        let outcome = self.copy_pieces(first, &mut more, (from, to), turn, &mut copied);
        (copied, outcome)
    }

    fn copy_pieces(
        &mut self,
        first: Box<dyn Transfer>,
        more: &mut impl FnMut() -> io::Result<Option<Box<dyn Transfer>>>,
        (from, to): (&[Segment], &[Segment]),
        turn: Instant,
        copied: &mut usize,
    ) -> io::Result<()> {
        let (mut idle, mut busy): (_, Option<Box<dyn Transfer>>) = (Some(first), None);
        let mut started = Instant::now();
        for (from, to) in runs(from, to, self.piece) {
            let mut transfer = match idle.take() {
                Some(transfer) => transfer,
                None => match more()? {
                    Some(transfer) => transfer,
                    None => break,
                },
            };
            transfer.copy(from.address(), to.address(), from.len())?;
            *copied += from.len();
            if let Some(mut before) = busy.replace(transfer) {
                before.wait()?;
                idle = Some(before);
                self.tune(started.elapsed());
                started = Instant::now();
            }
            if turn.elapsed() >= TURN {
                break;
            }
        }
        let last = busy.map_or(Ok(()), |mut last| last.wait());
        self.tune(started.elapsed());
        last
    }

    /// Chooses the length of the next message's pieces by how long one took.
    fn tune(&mut self, taken: Duration) {
        let next = if taken > TURN / 2 {
            self.piece / 2
        } else if taken < TURN / 5 {
            self.piece * 2
        } else {
            self.piece
        };
        self.piece = next.clamp(*PIECE.start(), *PIECE.end());
    }
}

/// Pairs of parts of the same length, at most `most`, which together are all that both lists have in common.
fn runs<'a>(from: &'a [Segment], to: &'a [Segment], most: usize) -> impl Iterator<Item = (Segment, Segment)> + 'a {
    let rest = |piece: Segment, len: usize| piece.slice(len, piece.len() - len).filter(|rest| rest.len() > 0);
    let (mut from, mut to) = (from.iter().copied(), to.iter().copied());
    let (mut source, mut target) = (from.next(), to.next());
    std::iter::from_fn(move || {
        let (one, other) = (source?, target?);
        let len = one.len().min(other.len()).min(most);
        source = rest(one, len).or_else(|| from.next());
        target = rest(other, len).or_else(|| to.next());
        Some((one.slice(0, len)?, other.slice(0, len)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_both_lists() {
        let segment = |at: usize, len| Segment::new(std::ptr::without_provenance_mut(at), len);
        let from = [segment(100, 10), segment(200, 5)];
        let to = [segment(1000, 3), segment(2000, 8), segment(3000, 4)];
        let seen = |most| runs(&from, &to, most).map(|(a, b)| (a.address(), b.address(), a.len())).collect::<Vec<_>>();
        assert_eq!(seen(100), [(100, 1000, 3), (103, 2000, 7), (200, 2007, 1), (201, 3000, 4)]);
        assert_eq!(seen(4)[1..4], [(103, 2000, 4), (107, 2004, 3), (200, 2007, 1)]);
        assert_eq!(runs(&[], &[], 1).count(), 0);
    }
}
