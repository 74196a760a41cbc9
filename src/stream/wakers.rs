//! Who is woken when something happened to a stream. Wakers call no code of the stream, and take no lock of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use futures::task::AtomicWaker;

/// The waker of the operations that are next in line: whoever waits for the stream is woken.
#[derive(Debug)]
pub(super) struct Wakers {
    pub reader: AtomicWaker,
    pub writer: AtomicWaker,
    /// Something happened since the stream last took in what there was.
    pub news: AtomicBool,
    pub keeper: Arc<Keeper>,
}

impl Default for Wakers {
    fn default() -> Self {
        let nobody = AtomicWaker::new;
        // The receives that a stream begins with were not asked yet.
        Self { reader: nobody(), writer: nobody(), news: AtomicBool::new(true), keeper: Arc::default() }
    }
}

impl Wakers {
    /// Both halves: something has ended.
    pub(super) fn wake_halves(&self) {
        self.reader.wake();
        self.writer.wake();
    }
}

impl Wake for Wakers {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.news.store(true, Ordering::SeqCst);
        self.wake_halves();
        if self.keeper.wanted.load(Ordering::SeqCst) {
            self.keeper.task.wake();
        }
    }
}

/// The waker of the stream's task alone, and what the halves tell it.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    pub task: AtomicWaker,
    /// It has to know of everything that happens.
    pub wanted: AtomicBool,
    /// The read half is gone: with the other one the stream is.
    pub read_dropped: AtomicBool,
    /// The write half is gone: what was written is followed by the end.
    pub write_dropped: AtomicBool,
}

impl Keeper {
    pub(super) fn tell(&self, flag: &AtomicBool) {
        flag.store(true, Ordering::SeqCst);
        self.task.wake();
    }

    pub(super) fn waker(self: &Arc<Self>) -> Waker {
        self.clone().into()
    }
}

impl Wake for Keeper {
    fn wake(self: Arc<Self>) {
        self.task.wake();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.task.wake();
    }
}
