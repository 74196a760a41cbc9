//! How the two ends of a connection without RDMA CM make sure that they are connected to each other: each sends the other
//! the numbers of both queue pairs.
//!
//! A queue pair acknowledges what fits its expectations, whoever sent it, and takes packets for repetitions that have never
//! been sent. So only a message that says who wrote it, and to whom, tells that the right peer is there.

use std::cell::UnsafeCell;

use tokio::sync::Notify;

use super::memory::{Mr, Pd};
use crate::error::{Result, WcStatus};
use crate::memory::dma::Segment;
use crate::provider::{Sge, SgeList};
use crate::sync::Mutex;

/// Begins a greeting.
const MAGIC: [u8; 8] = *b"rdmahi\0\x01";

/// Bytes of a greeting: the magic number, then number and first packet sequence number of sender and receiver.
const LEN: usize = 24;

/// Where a greeting comes from, or goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) number: u32,
    pub(super) sequence: u32,
}

fn encode(from: End, to: End) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    let fields = [from.number, from.sequence, to.number, to.sequence].map(u32::to_be_bytes);
    for (place, part) in bytes.chunks_exact_mut(4).zip(MAGIC.chunks_exact(4).chain(fields.iter().map(|it| &it[..]))) {
        place.copy_from_slice(part);
    }
    bytes
}

/// Registered memory for one greeting each way. Kept by the queue pair, which is destroyed before it.
#[derive(Debug)]
pub(super) struct Greeting {
    // Field order: deregistered before it is freed.
    registration: Mr,
    memory: Box<UnsafeCell<[[u8; LEN]; 2]>>,
}

// SAFETY: what is in the cell is read and written by `&mut self` methods, and by the device in between.
unsafe impl Sync for Greeting {}

impl Greeting {
    pub(super) fn new(pd: &Pd) -> Result<Self> {
        let memory = Box::new(UnsafeCell::new([[0; LEN]; 2]));
        let registration = pd.register(Segment::new(memory.get().cast(), 2 * LEN))?;
        Ok(Self { registration, memory })
    }

    fn place(&self, index: usize) -> Segment {
        Segment::new(self.memory.get().cast::<u8>().wrapping_add(index * LEN), LEN)
    }

    fn entries(&self, index: usize) -> SgeList {
        SgeList::from_iter([Sge { segment: self.place(index), lkey: self.registration.lkey() }])
    }

    /// What to send, written down.
    pub(super) fn outgoing(&mut self, from: End, to: End) -> SgeList {
        self.memory.get_mut()[0] = encode(from, to);
        self.entries(0)
    }

    /// Where to receive.
    pub(super) fn incoming(&mut self) -> SgeList {
        self.memory.get_mut()[1] = [0; LEN];
        self.entries(1)
    }

    /// Whether what was received is `from`'s, and meant for `to`; otherwise what it is.
    pub(super) fn check(&mut self, from: End, to: End) -> std::result::Result<(), String> {
        let received = self.memory.get_mut()[1];
        if received == encode(from, to) {
            return Ok(());
        }
        if received[..MAGIC.len()] != MAGIC {
            return Err("what answers speaks another language; is it a tokio-rdma program?".to_owned());
        }
        let number = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| received[at + byte]));
        Err(format!("queue pair {:#x} answers, which is connected to {:#x}", number(8), number(16)))
    }
}

/// Marks the work requests of greetings: no op table has a pair of this number.
const MARK: u64 = 0xffff_ffff << 32;

/// The id of a greeting's work request. Rounds are told apart, since completions of an earlier one can come late.
pub(super) fn id(round: u16, received: bool) -> u64 {
    MARK | u64::from(round) << 1 | u64::from(received)
}

pub(super) fn is_id(id: u64) -> bool {
    id & MARK == MARK
}

/// What has become of the current round's two work requests.
#[derive(Debug, Default)]
pub(super) struct Greeted {
    state: Mutex<(u16, [Option<WcStatus>; 2])>,
    changed: Notify,
}

impl Greeted {
    /// `heard`: the peer's greeting has come in an earlier round, and is not sent again.
    pub(super) fn begin(&self, round: u16, heard: bool) {
        *self.state.lock() = (round, [None, heard.then_some(WcStatus::Success)]);
    }

    /// Whether the peer's greeting has come.
    pub(super) fn heard(&self) -> bool {
        self.state.lock().1[1] == Some(WcStatus::Success)
    }

    /// A completion of one of them.
    pub(super) fn completed(&self, id: u64, status: WcStatus) {
        let mut state = self.state.lock();
        if u64::from(state.0) == (id & !MARK) >> 1 {
            state.1[(id & 1) as usize] = Some(status);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Both have succeeded, or the sending has failed (whose status says more than the receiving's).
    pub(super) async fn done(&self) -> WcStatus {
        loop {
            let [sent, received] = self.state.lock().1;
            match (sent, received) {
                (Some(WcStatus::Success), Some(status)) => return status,
                (Some(status), _) if status != WcStatus::Success => return status,
                _ => self.changed.notified().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: End = End { number: 1, sequence: 2 };
    const B: End = End { number: 3, sequence: 4 };

    #[test]
    fn a_greeting_names_both_ends() {
        let bytes = encode(A, B);
        assert_eq!(bytes[..8], MAGIC);
        assert_eq!(bytes[8..], [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4]);
    }

    #[test]
    fn ids_are_no_operations() {
        use crate::completion::pair::{Side, WrId};
        use crate::completion::table::Key;
        for received in [false, true] {
            assert!(is_id(id(u16::MAX, received)));
        }
        let key = Key::from_bits(u64::MAX);
        for pair in [0, (crate::completion::pair::MAX_PAIRS - 2) as u32] {
            assert!(!is_id(WrId { pair, side: Side::Receive, key }.to_bits()));
        }
    }

    #[tokio::test]
    async fn only_both_of_the_current_round_make_a_success() {
        let greeted = Greeted::default();
        greeted.begin(1, false);
        greeted.completed(id(0, false), WcStatus::RetryExceeded);
        greeted.completed(id(1, true), WcStatus::Success);
        let waiting = tokio::time::timeout(std::time::Duration::ZERO, greeted.done()).await;
        assert!(waiting.is_err(), "{waiting:?}");
        greeted.completed(id(1, false), WcStatus::Success);
        assert_eq!(greeted.done().await, WcStatus::Success);
        greeted.begin(2, false);
        greeted.completed(id(2, true), WcStatus::Flushed);
        greeted.completed(id(2, false), WcStatus::RetryExceeded);
        assert_eq!(greeted.done().await, WcStatus::RetryExceeded);
        assert!(!greeted.heard());
        greeted.begin(3, true);
        greeted.completed(id(3, false), WcStatus::Success);
        assert!(greeted.heard());
        assert_eq!(greeted.done().await, WcStatus::Success);
    }
}
