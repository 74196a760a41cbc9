//! Who is held up by whom: nobody by somebody else's blocking code, and no timer by this crate.

use std::io::{Write, stderr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tokio_rdma::{Access, Buffer, CloseReason, CompletionMode, Connection, Listener, ProtectionDomain};

use crate::common::process::{Parent, Second};
use crate::common::rig::Setup;
use crate::common::run::SOON;
use crate::common::{End, Rig, assert_pattern, within};

cases!(
    one_sided_operations_need_no_program_at_the_target,
    a_ticker_goes_on_during_ten_thousand_round_trips,
    a_ticker_goes_on_while_connections_come_and_go,
    a_socket_keeps_its_pace_during_round_trips,
);
process_cases!(
    the_target_process_sleeps => reads_of_a_sleeping_process, sleeps_in_blocking_code;
);

/// The target's runtime has one thread, and that thread is stuck in user code until the initiator is done.
async fn one_sided_operations_need_no_program_at_the_target(rig: Rig) {
    let client = rig.domain();
    let (announce, announced) = oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let stuck = Arc::new(AtomicBool::new(false));
    let flag = stuck.clone();
    let (open, address) = (rig.setup, rig.address());
    let target = thread::spawn(move || {
        open.single_threaded().runtime().block_on(async move {
            let server = (open.device)().completion_mode(CompletionMode::default()).open().unwrap().alloc_pd().unwrap();
            let listener = Listener::bind(&server, address).await.unwrap();
            let region = server.alloc(1 << 20).unwrap().expose(Access::all()).unwrap();
            announce.send((listener.local_address().clone(), region.remote())).unwrap();
            let _connection = listener.accept().await.unwrap();
            flag.store(true, Ordering::SeqCst);
            // Not `.await`: this thread does nothing else until it is told.
            released.recv_timeout(Duration::from_secs(60)).expect("the initiator is done in time");
            flag.store(false, Ordering::SeqCst);
            let mut bytes = vec![0; 1 << 20];
            region.copy_to(0, &mut bytes).unwrap();
            bytes
        })
    });
    let (address, remote) = announced.await.unwrap();
    let end = End::new(&client, Connection::connect(&client, &address).await.unwrap());
    while !stuck.load(Ordering::SeqCst) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    within(SOON, async {
        for round in 0..20 {
            end.write(end.filled(1 << 20, round), &remote).await.unwrap();
            assert_pattern(&end.read(end.buffer(1 << 20), &remote).await.unwrap(), round);
        }
        let word = remote.slice(..8).unwrap();
        let before = end.fetch_add(&word, 1).await.unwrap();
        assert_eq!(end.compare_swap(&word, before + 1, before).await.unwrap(), before + 1);
    })
    .await;
    assert!(stuck.load(Ordering::SeqCst), "the target's program took no part in it");
    release.send(()).unwrap();
    assert_pattern(&target.join().unwrap(), 19);
}

async fn reads_of_a_sleeping_process(rig: Rig, mut second: Second) {
    let address = second.hear().await;
    let remote = second.hear_region().await;
    let client = rig.domain();
    let end = End::new(&client, Connection::connect(&client, address.as_str()).await.unwrap());
    assert_eq!(second.hear().await, "asleep");
    let start = Instant::now();
    within(SOON, async {
        end.write(end.filled(100_000, 1), &remote).await.unwrap();
        assert_pattern(&end.read(end.buffer(100_000), &remote).await.unwrap(), 1);
        end.fetch_add(&remote, 1).await.unwrap();
        end.compare_swap(&remote, 0, 1).await.unwrap();
    })
    .await;
    assert!(start.elapsed() < NAP / 2, "as long as the nap, or nearly: {:?}", start.elapsed());
    assert_eq!(second.hear().await, "awake");
    second.end().await;
}

const NAP: Duration = Duration::from_secs(2);

async fn sleeps_in_blocking_code(rig: Rig, mut parent: Parent) {
    let Setup { device, .. } = rig.setup;
    let server = device().open().unwrap().alloc_pd().unwrap();
    let listener = rig.listener(&server).await;
    let region = server.alloc(100_000).unwrap().expose(Access::all()).unwrap();
    parent.say(&listener.local_address().to_string());
    parent.say_region(&region.remote());
    let _connection = listener.accept().await.unwrap();
    parent.say("asleep");
    // Every worker of this runtime, and the thread that it is driven from.
    let naps: Vec<_> = (0..rig.setup.workers).map(|_| tokio::spawn(async { thread::sleep(NAP) })).collect();
    thread::sleep(NAP);
    for nap in naps {
        nap.await.unwrap();
    }
    parent.say("awake");
    assert_eq!(parent.hear().await, None);
}

const TICK: Duration = Duration::from_millis(10);

/// A ticker on the thread of a runtime, and one on a thread of its own, which nothing but the machine holds up.
struct Pace {
    ticks: [Arc<AtomicU64>; 2],
    here: JoinHandle<()>,
    elsewhere: Option<(oneshot::Sender<()>, thread::JoinHandle<()>)>,
}

impl Pace {
    fn start() -> Self {
        let ticks: [Arc<AtomicU64>; 2] = Default::default();
        let here = tokio::spawn(tick(ticks[0].clone()));
        let (stop, stopped) = oneshot::channel();
        let ticking = tick(ticks[1].clone());
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                tokio::select! { () = ticking => {}, _ = stopped => {} }
            });
        });
        Self { ticks, here, elsewhere: Some((stop, thread)) }
    }

    /// How many ticks both make during this.
    async fn during(&self, work: impl Future<Output = ()>) -> [u64; 2] {
        let count = || self.ticks.each_ref().map(|ticks| ticks.load(Ordering::Relaxed));
        let (start, before) = (Instant::now(), count());
        work.await;
        assert!(start.elapsed() >= 5 * TICK, "the work is too short to say anything: {:?}", start.elapsed());
        let after = count();
        [after[0] - before[0], after[1] - before[1]]
    }
}

async fn tick(count: Arc<AtomicU64>) {
    let mut interval = tokio::time::interval(TICK);
    // A tick that is missed altogether is not made up for.
    interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        interval.tick().await;
        count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Pace {
    fn drop(&mut self) {
        self.here.abort();
        if let Some((stop, thread)) = self.elsewhere.take() {
            let _ = stop.send(());
            thread.join().unwrap();
        }
    }
}

/// On a busy machine no thread runs all the time, so what counts is how a ticker beside the work fares compared with one on
/// a thread of its own, at the same time; and a few tries are allowed. Code that blocks misses each time.
async fn ticker_goes_on(rig: &Rig, work: impl AsyncFnOnce(Rig, Pace) -> [u64; 2] + Copy + Send + 'static) {
    let setup = rig.setup.single_threaded();
    let mut tries = Vec::new();
    while tries.len() < 5 {
        let thread = tokio::task::spawn_blocking(move || {
            setup.runtime().block_on(async move { work(Rig::new(setup), Pace::start()).await })
        });
        let [ticks, possible] = thread.await.unwrap();
        // Past what libtest captures.
        let _ = writeln!(stderr(), "note: {ticks} ticks, where {possible} were possible");
        if ticks as f64 >= 0.9 * possible as f64 {
            return;
        }
        tries.push((ticks, possible));
    }
    panic!("ticks, and how many were possible: {tries:?}");
}

async fn a_ticker_goes_on_during_ten_thousand_round_trips(rig: Rig) {
    ticker_goes_on(&rig, async |rig: Rig, pace: Pace| pace.during(round_trips(rig, 10_000)).await).await;
}

async fn round_trips(rig: Rig, count: u64) {
    let pair = rig.pair().await;
    let server = pair.server.clone();
    let echo = tokio::spawn(async move {
        let (mut next, mut back) = (server.buffer(64), server.buffer(64));
        for _ in 0..count {
            let received = server.receive(next).await.unwrap();
            back.copy_from_slice(received.message());
            next = received.buffer;
            back = server.send(back).await.unwrap();
        }
    });
    let client = &pair.client;
    let (mut out, mut back) = (client.buffer(64), client.buffer(64));
    for round in 0..count {
        out[..8].copy_from_slice(&round.to_le_bytes());
        let (received, sent) = tokio::join!(client.receive(back), client.send(out));
        (back, out) = (received.unwrap().buffer, sent.unwrap());
        assert_eq!(back[..], out[..]);
    }
    echo.await.unwrap();
}

/// Devices and memory are there before: opening the one and registering the other holds up who does it, and they say so.
async fn a_ticker_goes_on_while_connections_come_and_go(rig: Rig) {
    ticker_goes_on(&rig, async |rig: Rig, pace: Pace| {
        let (client, server) = (rig.domain(), rig.domain());
        let mut buffers = (client.alloc(64).unwrap(), server.alloc(64).unwrap());
        pace.during(async {
            let start = Instant::now();
            let mut count = 0;
            while count < 3 || start.elapsed() < 30 * TICK {
                buffers = come_and_go(&rig, (&client, &server), buffers).await;
                count += 1;
            }
        })
        .await
    })
    .await;
}

/// A listener comes, and a connection, carries a message, is closed by one end and dropped by the other.
async fn come_and_go(
    rig: &Rig,
    (client, server): (&ProtectionDomain, &ProtectionDomain),
    (out, back): (Buffer, Buffer),
) -> (Buffer, Buffer) {
    let pair = rig.connect(client, server).await;
    let mut receive = pair.server.receive(back);
    receive.try_post().unwrap();
    let out = pair.client.send(out).await.unwrap();
    let back = receive.await.unwrap().buffer;
    pair.client.close().await;
    assert_eq!(pair.server.closed().await, CloseReason::Peer);
    (out, back)
}

/// A byte goes back and forth between two sockets of the same thread. Each way of it needs the runtime to ask for I/O events,
/// which a driver that is never out of work must leave it the time for.
async fn a_socket_keeps_its_pace_during_round_trips(rig: Rig) {
    const ROUND_TRIPS: u64 = 2000;
    let setup = rig.setup.single_threaded();
    let thread = tokio::task::spawn_blocking(move || {
        setup.runtime().block_on(async move {
            let passes = Arc::new(AtomicU64::new(0));
            let (mut one, other) = UnixStream::pair().unwrap();
            one.write_u8(1).await.unwrap();
            for mut socket in [one, other] {
                let passes = passes.clone();
                tokio::spawn(async move {
                    while let Ok(byte) = socket.read_u8().await {
                        passes.fetch_add(1, Ordering::Relaxed);
                        socket.write_u8(byte).await.unwrap();
                    }
                });
            }
            round_trips(Rig::new(setup), ROUND_TRIPS).await;
            passes.load(Ordering::Relaxed)
        })
    });
    let passes = thread.await.unwrap();
    // A round trip takes a few turns of tasks, and the runtime asks after 61 of them at the latest.
    assert!(passes >= ROUND_TRIPS / 50, "{passes} times in {ROUND_TRIPS} round trips");
}
