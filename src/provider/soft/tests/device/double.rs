//! A device that is none: its memory lies at addresses that nobody can dereference, and a thread carries its copies out late.

use std::io;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::memory::device::{BOUNCE, Bounce, DeviceMemory};
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
    under_way: AtomicUsize,
    /// Copies until one fails; negative: never.
    left: AtomicI64,
    failing: Mutex<Failing>,
    delay: Duration,
}

/// A bounce's bytes, and how many copies use them.
#[derive(Debug)]
struct Place {
    words: Vec<u64>,
    segment: Segment,
    pending: Mutex<(usize, bool)>,
    done: Condvar,
}

#[derive(Debug)]
struct Job {
    place: Arc<Place>,
    at: usize,
    device: u64,
    len: usize,
    fetch: bool,
    fails: bool,
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
            under_way: AtomicUsize::new(0),
            left: AtomicI64::new(-1),
            failing: Mutex::new(Failing::Start),
            delay,
        });
        let copier = Arc::clone(&shared);
        std::thread::spawn(move || work.into_iter().for_each(|job| copier.carry_out(&job)));
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
        let at = (address - BASE) as usize;
        self.shared.memory.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(in super::super) fn get(&self, address: u64, len: usize) -> Vec<u8> {
        let at = (address - BASE) as usize;
        self.shared.memory.lock().unwrap()[at..at + len].to_vec()
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

    pub(super) fn copies(&self) -> usize {
        self.shared.copies.load(Ordering::SeqCst)
    }
}

impl Shared {
    fn fails(&self) -> Option<Failing> {
        let counted = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| (left > 0).then(|| left - 1));
        (counted == Err(0)).then(|| *self.failing.lock().unwrap())
    }

    fn carry_out(&self, job: &Job) {
        std::thread::sleep(self.delay);
        if !job.fails {
            let place = job.place.segment.slice(job.at, job.len).unwrap();
            let at = (job.device - BASE) as usize;
            let mut memory = self.memory.lock().unwrap();
            let device = &mut memory[at..at + job.len];
            if job.fetch {
                place.copy_from(device);
            } else {
                let mut bytes = Vec::new();
                place.append_to(&mut bytes);
                device.copy_from_slice(&bytes);
            }
        }
        let mut pending = job.place.pending.lock().unwrap();
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        pending.0 -= 1;
        pending.1 |= job.fails;
        job.place.done.notify_all();
    }
}

impl DeviceMemory for Double {
    fn bounce(&self) -> io::Result<Box<dyn Bounce>> {
        let mut words = vec![u64::from_ne_bytes([SCRIBBLE; 8]); BOUNCE / 8];
        let segment = Segment::new(words.as_mut_ptr().cast(), BOUNCE);
        let place = Place { words, segment, pending: Mutex::default(), done: Condvar::new() };
        let now = self.shared.bounces.fetch_add(1, Ordering::SeqCst) + 1;
        self.shared.most_bounces.fetch_max(now, Ordering::SeqCst);
        let jobs = self.jobs.lock().unwrap().clone();
        Ok(Box::new(DoubleBounce { shared: Arc::clone(&self.shared), jobs, place: Arc::new(place) }))
    }
}

impl DoubleBounce {
    fn start(&self, fetch: bool, at: usize, device: u64, len: usize) -> io::Result<()> {
        assert!(at + len <= BOUNCE && device >= BASE);
        self.shared.copies.fetch_add(1, Ordering::SeqCst);
        let failing = self.shared.fails();
        if failing == Some(Failing::Start) {
            return Err(broken());
        }
        if fetch {
            self.place.segment.slice(at, len).unwrap().copy_from(&vec![SCRIBBLE; len]);
        }
        self.place.pending.lock().unwrap().0 += 1;
        self.shared.under_way.fetch_add(1, Ordering::SeqCst);
        let place = Arc::clone(&self.place);
        self.jobs.send(Job { place, at, device, len, fetch, fails: failing.is_some() }).map_err(|_| broken())
    }
}

impl Bounce for DoubleBounce {
    fn segment(&self) -> Segment {
        assert_eq!(self.place.words.len() * 8, BOUNCE);
        self.place.segment
    }

    fn fetch(&mut self, from: u64, at: usize, len: usize) -> io::Result<()> {
        self.start(true, at, from, len)
    }

    fn store(&mut self, at: usize, to: u64, len: usize) -> io::Result<()> {
        self.start(false, at, to, len)
    }

    fn wait(&mut self) -> io::Result<()> {
        let mut pending = self.place.pending.lock().unwrap();
        while pending.0 > 0 {
            pending = self.place.done.wait(pending).unwrap();
        }
        if pending.1 { Err(broken()) } else { Ok(()) }
    }
}

impl Drop for DoubleBounce {
    fn drop(&mut self) {
        self.shared.bounces.fetch_sub(1, Ordering::SeqCst);
    }
}
