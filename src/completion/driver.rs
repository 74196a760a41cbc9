//! The driver of a completion queue: the task (or thread) that looks when no operation's future does.
//!
//! It sleeps on the completion channel's descriptor in tokio's reactor. Before sleeping it arms the channel and looks once more,
//! so a completion that arrives in between is found: no timer is needed, and there is none.

use std::future::poll_fn;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures::task::AtomicWaker;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::affinity::pin_this_thread;
use crate::completion::company::Company;
use crate::completion::mode::CompletionMode;
use crate::completion::queue::{CompletionQueue, advance};
use crate::error::{CloseReason, Error, Result};

/// Channel events acknowledged in one go: `ibv_ack_cq_events(3)` takes a mutex and advises batching.
const ACKNOWLEDGE_BATCH: u32 = 64;

/// Wakes a sleeping driver from user space: an operation has just started to wait, or a look needs a follow-up.
#[derive(Debug, Default)]
pub(crate) struct Kick {
    asleep: AtomicBool,
    kicked: AtomicBool,
    stopped: AtomicBool,
    waker: AtomicWaker,
}

impl Kick {
    /// Makes a sleeping driver look; costs one load when it is awake.
    pub(crate) fn wake(&self) {
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.kicked.store(true, Ordering::SeqCst);
            self.waker.wake();
        }
    }

    /// Whether the driver is looking, or about to.
    pub(crate) fn awake(&self) -> bool {
        !self.asleep.load(Ordering::SeqCst)
    }

    /// Ends the driver, for good.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    fn stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}

/// At every so-many-th turn of the spinning loop the runtime gets to ask for I/O events and to poll the future of `block_on`:
/// another device's driver may sleep in the same reactor, and wait for what this one's peer has just sent.
const REACTOR_TURNS: u32 = 8;

/// The completion channel's descriptor in the reactor; the queue it belongs to outlives it by construction (declared first, dropped first).
struct Channel {
    fd: AsyncFd<RawFd>,
    unacknowledged: u32,
    queue: Arc<CompletionQueue>,
}

impl Channel {
    #[allow(unsafe_code)]
    fn register(queue: &Arc<CompletionQueue>) -> Result<Self> {
        let raw = queue.device().fd().as_raw_fd();
        // SAFETY: the descriptor belongs to `queue`, which this struct keeps open for longer than the registration:
        // `fd` is declared before `queue`, so it is deregistered first.
        let fd = unsafe { AsyncFd::register_with_interest(raw, Interest::READABLE) }
            .map_err(|error| Error::io("register", "the completion channel with tokio", error.into()))?;
        Ok(Self { fd, unacknowledged: 0, queue: queue.clone() })
    }

    /// Reads all pending events, so that the next one is an edge again.
    fn take_events(&mut self) -> Result<()> {
        let events = self.queue.device().read_events()?;
        self.queue.counters.events.fetch_add(u64::from(events), Ordering::Relaxed);
        self.unacknowledged += events;
        if self.unacknowledged >= ACKNOWLEDGE_BATCH {
            self.acknowledge();
        }
        Ok(())
    }

    fn acknowledge(&mut self) {
        if self.unacknowledged > 0 {
            self.queue.device().acknowledge(std::mem::take(&mut self.unacknowledged));
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Destroying a completion queue waits for every event that was read to be acknowledged.
        self.acknowledge();
    }
}

/// Starts a driver for `queue` unless one runs. Call it inside of a tokio runtime.
pub(crate) fn ensure(queue: &Arc<CompletionQueue>) -> Result<()> {
    if queue.driven.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    let guard = Driven(queue.clone());
    match queue.mode() {
        CompletionMode::PollingThread { cpu } => {
            std::thread::Builder::new()
                .name("rdma-cq".into())
                .spawn(move || poll_forever(&guard.0, cpu))
                .map_err(|error| Error::io("start", "the polling thread", error))?;
        }
        CompletionMode::Polling => {
            tokio::spawn(async move {
                while !guard.0.kick.stopped() {
                    guard.0.look();
                    std::thread::yield_now();
                    tokio::task::yield_now().await;
                }
            });
        }
        CompletionMode::Event => spawn_sleeper(guard, Duration::ZERO)?,
        CompletionMode::Adaptive { spin } => spawn_sleeper(guard, spin)?,
    }
    Ok(())
}

/// While it lives, the queue is looked after. Dropped with its task: by `stop`, or because the runtime ends.
struct Driven(Arc<CompletionQueue>);

impl Drop for Driven {
    fn drop(&mut self) {
        self.0.driven.store(false, Ordering::SeqCst);
        // Without a driver nobody would ever end these.
        self.0.fail_all(&if self.0.kick.stopped() { CloseReason::Local } else { CloseReason::RuntimeGone });
    }
}

fn spawn_sleeper(guard: Driven, spin: Duration) -> Result<()> {
    let channel = Channel::register(&guard.0)?;
    tokio::spawn(async move {
        let queue = guard.0.clone();
        if let Err(error) = drive(channel, spin).await {
            tracing::error!(%error, "completion channel failed");
            queue.fail_all(&CloseReason::Device(error.to_string().into()));
        }
        drop(guard);
    });
    Ok(())
}

/// Looks; when something was found, lets the woken tasks run and looks again; when nothing was found for `spin`, sleeps.
async fn drive(mut channel: Channel, spin: Duration) -> Result<()> {
    let queue = channel.queue.clone();
    let mut found = 0;
    let mut quiet_since = None;
    let (mut turns, mut taken) = (0, 0);
    let mut company = Company::default();
    while !queue.kick.stopped() {
        if found > 0 {
            let_them_run(&queue).await;
            quiet_since = None;
        } else if queue.device().take_worked() || queue.counters.taken.load(Ordering::Relaxed) != taken {
            quiet_since = None;
        }
        taken = queue.counters.taken.load(Ordering::Relaxed);
        if !spin.is_zero() && !company.is_a_crowd() && keep_looking(&mut quiet_since, spin) {
            advance(&queue.counters.spins, 1);
            let in_memory = queue.device().lives_in_memory();
            if in_memory {
                found = company.look(&queue);
                if found > 0 {
                    continue;
                }
            }
            // Other processes, then other tasks: a peer on the same CPU could not answer otherwise,
            // and before it has had its turn there is nothing new to see.
            if !in_memory || company.is_expected() {
                company.make_way();
            }
            turns = (turns + 1) % REACTOR_TURNS;
            match turns {
                0 => tokio::task::yield_now().await,
                _ => to_the_back().await,
            }
            found = queue.look();
            continue;
        }
        queue.kick.asleep.store(true, Ordering::SeqCst);
        queue.device().arm()?;
        found = queue.look_after_arming();
        if found == 0 {
            sleep(&mut channel, &queue).await?;
            quiet_since = None;
        }
        queue.kick.asleep.store(false, Ordering::SeqCst);
        if found == 0 {
            found = queue.look();
        }
    }
    Ok(())
}

/// The tasks just woken run first: what they send carries our acknowledgements along.
///
/// A task of this runtime is behind us in the queue by now. If nobody took a completion when we are next, whoever waits
/// is on another thread, or is the future of `block_on`, which only gets its turn when the queue is empty: a real yield then.
async fn let_them_run(queue: &CompletionQueue) {
    let taken = queue.counters.taken.load(Ordering::Relaxed);
    to_the_back().await;
    if queue.counters.taken.load(Ordering::Relaxed) == taken {
        tokio::task::yield_now().await;
    }
}

/// Whether the last completion is less than `spin` ago.
fn keep_looking(quiet_since: &mut Option<Instant>, spin: Duration) -> bool {
    let now = Instant::now();
    now.duration_since(*quiet_since.get_or_insert(now)) < spin
}

/// Lets the tasks that are ready run, and nothing else. `tokio::task::yield_now` also has the runtime ask for I/O events,
/// a system call that need not be made at every turn of the spinning loop.
async fn to_the_back() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Until the channel is readable, a queue pair has failed, or somebody kicks.
async fn sleep(channel: &mut Channel, queue: &CompletionQueue) -> Result<()> {
    let fd = &channel.fd;
    let ready = poll_fn(|cx| {
        queue.kick.waker.register(cx.waker());
        let failed = queue.device().wake_at_failure(cx);
        if queue.kick.kicked.swap(false, Ordering::SeqCst) || queue.kick.stopped() || failed {
            return Poll::Ready(Ok(None));
        }
        fd.poll_read_ready(cx).map_ok(Some)
    });
    let guard = ready.await.map_err(|error| Error::io("wait for", "the completion channel", error))?;
    if let Some(mut guard) = guard {
        // Before the events are read: one that arrives from now on is a new edge.
        guard.clear_ready();
        drop(guard);
        queue.counters.wakeups.fetch_add(1, Ordering::Relaxed);
        channel.take_events()?;
    }
    Ok(())
}

fn poll_forever(queue: &CompletionQueue, cpu: Option<usize>) {
    match (cpu, &queue.cpus) {
        (Some(cpu), _) => pin_this_thread(&[cpu]),
        (None, Some(cpus)) => pin_this_thread(cpus),
        (None, None) => {}
    }
    while !queue.kick.stopped() {
        if queue.look() == 0 {
            std::thread::yield_now();
        }
    }
}
