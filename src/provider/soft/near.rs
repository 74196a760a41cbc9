//! Peers in the same process: payload in a device's memory does not go through the socket. The frame carries a number instead,
//! under which the sender offers the memory, and the receiver has the device copy from there.
//!
//! ```text
//! sender's tx ── offer ──▶ Offers ◀── take ── receiver's rx ──▶ one copy, device to device
//!        └── frame with the offer's number ── socket ──┘
//! ```
//!
//! A queue pair has a random name that it tells its peer in the handshake. Two in one process that have told each other their names are
//! peers. Who claims a name that it has overheard gets nothing: an offer is only taken by the one whose name its maker was told.
//!
//! Memory that is offered is the sender's until it is taken, and while the copy runs. A sender that ends takes its offers back, and waits
//! for the copies under way; so whoever has taken an offer goes on without waiting for anything but copies.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::keys::{Hold, Key};
use crate::error::{CloseReason, Result, WcStatus};
use crate::memory::device::DeviceMemory;
use crate::memory::dma::Segment;
use crate::provider::SgeList;
use crate::random;
use crate::sync::Mutex;

/// A queue pair's name in the handshake; 0 is nobody's.
pub(super) type Name = u128;

/// What the queue pairs of this process offer, by their names.
static PROCESS: std::sync::Mutex<Option<HashMap<Name, Weak<Offers>>>> = std::sync::Mutex::new(None);

fn process() -> std::sync::MutexGuard<'static, Option<HashMap<Name, Weak<Offers>>>> {
    PROCESS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// What one queue pair offers its peer.
#[derive(Debug)]
pub(super) struct Offers {
    name: Name,
    peer: OnceLock<Name>,
    list: Mutex<List>,
    /// Offers taken whose copies have not finished.
    taken: AtomicUsize,
    /// Bytes that the peer has copied from here.
    moved: AtomicU64,
    /// What the peer found wrong with an offer.
    fault: OnceLock<CloseReason>,
}

#[derive(Debug, Default)]
struct List {
    /// The oldest first, with their numbers.
    offers: VecDeque<(u64, Offer)>,
    next: u64,
    closed: bool,
}

/// Memory of a device that the peer may copy from.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    pub device: Arc<dyn DeviceMemory>,
    pub place: Place,
}

#[derive(Clone, Debug)]
pub(super) enum Place {
    /// All of a request's list.
    Request { sges: SgeList, len: usize },
    /// Granted memory, which the peer reads; its key may be revoked by the time.
    Granted { key: Arc<Key>, memory: Segment },
}

impl Place {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Request { len, .. } => *len,
            Self::Granted { memory, .. } => memory.len(),
        }
    }
}

/// Keeps an offer's memory from being taken back.
#[derive(Debug)]
pub(super) struct Taken {
    offers: Arc<Offers>,
    _key: Option<Hold>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.offers.taken.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Why there is no such offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gone {
    /// The peer has ended, or is about to.
    Closed,
    /// The key of the memory was revoked.
    Revoked,
    /// It was never made.
    Unknown,
}

/// A queue pair and its peer, in one process.
#[derive(Debug)]
pub(super) struct Near {
    own: Arc<Offers>,
    peer: Arc<Offers>,
}

impl Offers {
    /// Gives a queue pair a name.
    pub(super) fn open() -> Result<Arc<Self>> {
        let name = Name::from_ne_bytes(random::bytes()?);
        let offers = Arc::new(Self {
            name,
            peer: OnceLock::new(),
            list: Mutex::default(),
            taken: AtomicUsize::new(0),
            moved: AtomicU64::new(0),
            fault: OnceLock::new(),
        });
        process().get_or_insert_default().insert(name, Arc::downgrade(&offers));
        Ok(offers)
    }

    pub(super) fn name(&self) -> Name {
        self.name
    }

    /// The queue pair has met its peer: whether that is in this process.
    pub(super) fn meet(self: Arc<Self>, peer: Name) -> Option<Near> {
        // Also where it is elsewhere: from now on nobody else can claim to be this one's peer.
        self.peer.set(peer).ok()?;
        let found = process().as_ref().and_then(|names| names.get(&peer)?.upgrade())?;
        let is_ours = found.name != self.name && found.peer.get().is_none_or(|name| *name == self.name);
        is_ours.then_some(Near { own: self, peer: found })
    }
}

impl Drop for Offers {
    fn drop(&mut self) {
        if let Some(names) = process().as_mut() {
            names.remove(&self.name);
        }
    }
}

impl Near {
    /// Offers memory; the number is for the frame.
    pub(super) fn offer(&self, offer: Offer) -> u64 {
        let mut list = self.own.list.lock();
        let number = list.next;
        list.next += 1;
        if !list.closed {
            list.offers.push_back((number, offer));
        }
        number
    }

    /// Takes back what the peer has not heard of.
    pub(super) fn withdraw(&self, number: u64) {
        let mut list = self.own.list.lock();
        let at = list.offers.iter().position(|(other, _)| *other == number);
        let withdrawn = at.and_then(|at| list.offers.remove(at));
        drop(list);
        drop(withdrawn);
    }

    /// Takes back everything, and waits until nothing is copied from this side's memory any more.
    pub(super) fn close(&self) {
        let mut list = self.own.list.lock();
        list.closed = true;
        let offers = std::mem::take(&mut list.offers);
        drop(list);
        drop(offers);
        let mut spins = 0;
        while self.own.taken.load(Ordering::SeqCst) != 0 {
            // Whoever has taken one waits for copies and for nothing else; if it lost its core, give it ours.
            spins += 1;
            if spins < 100 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    /// Takes what the peer offers under this number.
    pub(super) fn take(&self, number: u64) -> std::result::Result<(Offer, Taken), Gone> {
        if self.peer.peer.get() != Some(&self.own.name) {
            return Err(Gone::Unknown);
        }
        let mut list = self.peer.list.lock();
        if list.closed {
            return Err(Gone::Closed);
        }
        let at = list.offers.iter().position(|(other, _)| *other == number).ok_or(Gone::Unknown)?;
        let (_, offer) = list.offers.remove(at).ok_or(Gone::Unknown)?;
        // Under the lock: whoever closes sees either the offer or that it was taken.
        self.peer.taken.fetch_add(1, Ordering::SeqCst);
        drop(list);
        let mut taken = Taken { offers: Arc::clone(&self.peer), _key: None };
        if let Place::Granted { key, .. } = &offer.place {
            let hold = key.hold().ok_or_else(|| {
                self.complain(CloseReason::Failed(WcStatus::RemoteAccess));
                Gone::Revoked
            });
            taken._key = Some(hold?);
        }
        Ok((offer, taken))
    }

    /// An offer that was taken and is not done with. In the meantime its owner may take it back.
    pub(super) fn give_back(&self, number: u64, offer: Offer, taken: Taken) {
        let mut list = self.peer.list.lock();
        if !list.closed {
            list.offers.push_front((number, offer));
        }
        drop(list);
        drop(taken);
    }

    /// So many bytes of the peer's were copied.
    pub(super) fn count(&self, bytes: usize) {
        self.peer.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that were copied, in both directions.
    pub(super) fn moved(&self) -> u64 {
        self.own.moved.load(Ordering::Relaxed).wrapping_add(self.peer.moved.load(Ordering::Relaxed))
    }

    /// Tells the peer why an offer of its is the end, before the link tells it that this side ends.
    pub(super) fn complain(&self, fault: CloseReason) {
        let _ = self.peer.fault.set(fault);
    }

    /// What the peer has complained about.
    pub(super) fn fault(&self) -> Option<&CloseReason> {
        self.own.fault.get()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::fd::BorrowedFd;
    use std::time::Duration;

    use super::*;
    use crate::memory::device::{Bounce, Imported, Transfer};

    #[derive(Debug)]
    struct NoDevice;

    impl DeviceMemory for NoDevice {
        fn bounce(&self) -> io::Result<Box<dyn Bounce>> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn transfer(&self, _: &dyn DeviceMemory) -> io::Result<Option<Box<dyn Transfer>>> {
            Ok(None)
        }

        fn import(&self, _: BorrowedFd<'_>, _: usize) -> io::Result<Box<dyn Imported>> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }

    fn offer() -> Offer {
        Offer { device: Arc::new(NoDevice), place: Place::Request { sges: SgeList::new(), len: 8 } }
    }

    fn pair() -> (Near, Near) {
        let (one, other) = (Offers::open().unwrap(), Offers::open().unwrap());
        let names = (one.name(), other.name());
        (one.meet(names.1).unwrap(), other.meet(names.0).unwrap())
    }

    #[test]
    fn offers_are_taken_once_and_by_the_peer() {
        let (one, other) = pair();
        let number = one.offer(offer());
        assert_eq!(one.take(number).unwrap_err(), Gone::Unknown);
        assert!(other.take(number).is_ok());
        assert_eq!(other.take(number).unwrap_err(), Gone::Unknown);
        let number = one.offer(offer());
        one.withdraw(number);
        assert_eq!(other.take(number).unwrap_err(), Gone::Unknown);
    }

    #[test]
    fn a_name_that_was_overheard_gives_nothing() {
        let first = Offers::open().unwrap();
        // Before the peer has said who it is.
        let stranger = Offers::open().unwrap().meet(first.name()).unwrap();
        let second = Offers::open().unwrap();
        let other = second.clone().meet(first.name()).unwrap();
        let one = first.meet(second.name()).unwrap();
        let number = one.offer(offer());
        assert_eq!(stranger.take(number).unwrap_err(), Gone::Unknown);
        let theirs = stranger.offer(offer());
        assert_eq!(one.take(theirs).unwrap_err(), Gone::Unknown);
        assert!(other.take(number).is_ok());
        let late = Offers::open().unwrap();
        assert!(late.meet(one.own.name()).is_none(), "it has its peer");
        let mirrored = Offers::open().unwrap();
        let own = mirrored.name();
        assert!(mirrored.meet(own).is_none());
    }

    #[test]
    fn who_has_a_peer_elsewhere_has_none_here() {
        let one = Offers::open().unwrap();
        let name = one.name();
        assert!(one.clone().meet(12345).is_none());
        assert!(Offers::open().unwrap().meet(name).is_none());
    }

    #[test]
    fn names_of_the_gone_are_forgotten() {
        let gone = Offers::open().unwrap().name();
        assert!(Offers::open().unwrap().meet(gone).is_none());
        assert!(Offers::open().unwrap().meet(0).is_none());
        assert!(!process().as_ref().unwrap().contains_key(&gone));
    }

    #[test]
    fn closing_takes_back_and_waits_for_copies() {
        let (one, other) = pair();
        let (first, second) = (one.offer(offer()), one.offer(offer()));
        let (_, taken) = other.take(first).unwrap();
        let closing = std::thread::spawn(move || one.close());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!closing.is_finished());
        drop(taken);
        closing.join().unwrap();
        assert_eq!(other.take(second).unwrap_err(), Gone::Closed);
    }
}
