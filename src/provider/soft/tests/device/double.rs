//! A device that is none: its memory lies at addresses that nobody can dereference, and a thread carries its copies out late.

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::memory::device::{BOUNCE, Bounce, DeviceMemory, Imported, Transfer};
use crate::memory::dma::Segment;

/// Where the memory seems to be. Whoever takes it for the host's gets a fault.
const BASE: u64 = 0x7_0000_0000_0000;

/// What a bounce holds while a fetch is under way.
const SCRIBBLE: u8 = 0xee;

/// When a device that fails does so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failing {
    Start,
    Wait,
}

#[derive(Debug)]
pub(in super::super) struct Double {
    shared: Arc<Shared>,
    jobs: Mutex<Sender<Job>>,
}

#[derive(Debug)]
struct Shared {
    memory: Mutex<Vec<u8>>,
    used: AtomicUsize,
    bounces: AtomicUsize,
    most_bounces: AtomicUsize,
    copies: AtomicUsize,
    transfers: AtomicUsize,
    under_way: AtomicUsize,
    /// Copies until one fails; negative: never.
    left: AtomicI64,
    failing: Mutex<Failing>,
    /// Copies from other devices do not need the host.
    reaches_others: AtomicBool,
    delay: Duration,
}

/// Copies that have not finished, and whether one failed.
#[derive(Debug, Default)]
struct Pending {
    state: Mutex<(usize, bool)>,
    done: Condvar,
}

impl Pending {
    fn finished(&self, failed: bool) {
        let mut state = self.state.lock().unwrap();
        state.0 -= 1;
        state.1 |= failed;
        self.done.notify_all();
    }

    fn wait(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        while state.0 > 0 {
            state = self.done.wait(state).unwrap();
        }
        if state.1 { Err(broken()) } else { Ok(()) }
    }
}

/// A bounce's bytes, and what uses them.
#[derive(Debug)]
struct Place {
    words: Vec<u64>,
    segment: Segment,
    pending: Pending,
}

struct Job {
    copy: Box<dyn FnOnce(&Shared) + Send>,
    finished: Box<dyn FnOnce(bool) + Send>,
    fails: bool,
}

#[derive(Debug)]
struct DoubleTransfer {
    source: Arc<Shared>,
    target: Arc<Shared>,
    jobs: Sender<Job>,
    pending: Arc<Pending>,
}

#[derive(Debug)]
struct DoubleBounce {
    shared: Arc<Shared>,
    jobs: Sender<Job>,
    place: Arc<Place>,
}

fn broken() -> io::Error {
    io::Error::other("the double has fallen off the bus")
}

impl Double {
    /// Each copy takes at least `delay`.
    pub(super) fn new(size: usize, delay: Duration) -> Arc<Self> {
        let (jobs, work) = channel::<Job>();
        let shared = Arc::new(Shared {
            memory: Mutex::new(vec![0; size]),
            used: AtomicUsize::new(0),
            bounces: AtomicUsize::new(0),
            most_bounces: AtomicUsize::new(0),
            copies: AtomicUsize::new(0),
            transfers: AtomicUsize::new(0),
            reaches_others: AtomicBool::new(true),
            under_way: AtomicUsize::new(0),
            left: AtomicI64::new(-1),
            failing: Mutex::new(Failing::Start),
            delay,
        });
        let copier = Arc::clone(&shared);
        std::thread::spawn(move || work.into_iter().for_each(|job| copier.carry_out(job)));
        Arc::new(Self { shared, jobs: Mutex::new(jobs) })
    }

    /// `len` bytes of the device.
    pub(super) fn alloc(&self, len: usize) -> Segment {
        // With a gap, in which nothing must be written.
        let at = self.shared.used.fetch_add(len.next_multiple_of(64) + 64, Ordering::SeqCst);
        assert!(at + len <= self.shared.memory.lock().unwrap().len(), "the double is too small");
        Segment::new(std::ptr::without_provenance_mut((BASE as usize) + at), len)
    }

    pub(in super::super) fn put(&self, address: u64, bytes: &[u8]) {
        self.shared.set_bytes(address, bytes);
    }

    pub(in super::super) fn get(&self, address: u64, len: usize) -> Vec<u8> {
        self.shared.bytes(address, len)
    }

    /// From the `nth` copy on (from now, counted from 1) all fail.
    pub(super) fn break_at(&self, nth: i64, failing: Failing) {
        *self.shared.failing.lock().unwrap() = failing;
        self.shared.left.store(nth - 1, Ordering::SeqCst);
    }

    pub(super) fn bounces(&self) -> usize {
        self.shared.bounces.load(Ordering::SeqCst)
    }

    pub(super) fn most_bounces(&self) -> usize {
        self.shared.most_bounces.load(Ordering::SeqCst)
    }

    /// Copies that were started and have not finished.
    pub(super) fn under_way(&self) -> usize {
        self.shared.under_way.load(Ordering::SeqCst)
    }

    /// From now on the host has to help.
    pub(super) fn cut_off(&self) {
        self.shared.reaches_others.store(false, Ordering::SeqCst);
    }

    /// Copies from other devices' memory.
    pub(super) fn transfers(&self) -> usize {
        self.shared.transfers.load(Ordering::SeqCst)
    }

    pub(super) fn copies(&self) -> usize {
        self.shared.copies.load(Ordering::SeqCst)
    }
}

impl Shared {
    fn fails(&self) -> Option<Failing> {
        let counted = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| (left > 0).then(|| left - 1));
        (counted == Err(0)).then(|| *self.failing.lock().unwrap())
    }

    /// Gives a copy to the thread; `copy` is not called when it fails.
    fn start(
        &self,
        jobs: &Sender<Job>,
        pending: &Pending,
        finished: impl FnOnce(bool) + Send + 'static,
        copy: impl FnOnce(&Shared) + Send + 'static,
    ) -> io::Result<()> {
        let failing = self.fails();
        if failing == Some(Failing::Start) {
            return Err(broken());
        }
        pending.state.lock().unwrap().0 += 1;
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let job = Job { copy: Box::new(copy), finished: Box::new(finished), fails: failing.is_some() };
        jobs.send(job).map_err(|_| broken())
    }

    fn carry_out(&self, job: Job) {
        std::thread::sleep(self.delay);
        if !job.fails {
            (job.copy)(self);
        }
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        (job.finished)(job.fails);
    }

    fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let at = (address - BASE) as usize;
        self.memory.lock().unwrap()[at..at + len].to_vec()
    }

    fn set_bytes(&self, address: u64, bytes: &[u8]) {
        let at = (address - BASE) as usize;
        self.memory.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl DeviceMemory for Double {
    fn bounce(&self) -> io::Result<Box<dyn Bounce>> {
        let mut words = vec![u64::from_ne_bytes([SCRIBBLE; 8]); BOUNCE / 8];
        let segment = Segment::new(words.as_mut_ptr().cast(), BOUNCE);
        let place = Place { words, segment, pending: Pending::default() };
        let now = self.shared.bounces.fetch_add(1, Ordering::SeqCst) + 1;
        self.shared.most_bounces.fetch_max(now, Ordering::SeqCst);
        let jobs = self.jobs.lock().unwrap().clone();
        Ok(Box::new(DoubleBounce { shared: Arc::clone(&self.shared), jobs, place: Arc::new(place) }))
    }

    fn transfer(&self, source: &dyn DeviceMemory) -> io::Result<Option<Box<dyn Transfer>>> {
        let source = source.as_any().downcast_ref::<Self>().unwrap();
        if !self.shared.reaches_others.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let (source, target) = (Arc::clone(&source.shared), Arc::clone(&self.shared));
        let jobs = self.jobs.lock().unwrap().clone();
        Ok(Some(Box::new(DoubleTransfer { source, target, jobs, pending: Arc::default() })))
    }

    fn import(&self, _: BorrowedFd<'_>, _: usize) -> io::Result<Box<dyn Imported>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl DoubleBounce {
    fn start(&self, at: usize, len: usize, copy: impl FnOnce(&Shared, Segment) + Send + 'static) -> io::Result<()> {
        self.shared.copies.fetch_add(1, Ordering::SeqCst);
        let (place, finished) = (self.place.segment.slice(at, len).unwrap(), Arc::clone(&self.place));
        let finished = move |failed| finished.pending.finished(failed);
        self.shared.start(&self.jobs, &self.place.pending, finished, move |shared| copy(shared, place))
    }
}

impl Transfer for DoubleTransfer {
    fn copy(&mut self, from: u64, to: u64, len: usize) -> io::Result<()> {
        self.target.transfers.fetch_add(1, Ordering::SeqCst);
        let (pending, source) = (Arc::clone(&self.pending), Arc::clone(&self.source));
        let finished = move |failed| pending.finished(failed);
        self.target.start(&self.jobs, &self.pending, finished, move |target| {
            let bytes = source.bytes(from, len);
            target.set_bytes(to, &bytes);
        })
    }

    fn wait(&mut self) -> io::Result<()> {
        self.pending.wait()
    }
}

impl Drop for DoubleTransfer {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

impl Bounce for DoubleBounce {
    fn segment(&self) -> Segment {
        assert_eq!(self.place.words.len() * 8, BOUNCE);
        self.place.segment
    }

    fn fetch(&mut self, from: u64, at: usize, len: usize) -> io::Result<()> {
        let place = self.place.segment.slice(at, len).unwrap();
        place.copy_from(&vec![SCRIBBLE; len]);
        self.start(at, len, move |device, place| place.copy_from(&device.bytes(from, len)))
    }

    fn store(&mut self, at: usize, to: u64, len: usize) -> io::Result<()> {
        self.start(at, len, move |device, place| {
            let mut bytes = Vec::new();
            place.append_to(&mut bytes);
            device.set_bytes(to, &bytes);
        })
    }

    fn wait(&mut self) -> io::Result<()> {
        self.place.pending.wait()
    }
}

impl Drop for DoubleBounce {
    fn drop(&mut self) {
        self.shared.bounces.fetch_sub(1, Ordering::SeqCst);
    }
}
