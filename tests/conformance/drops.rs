//! Futures dropped at any point: the device finishes what it has, and nobody gets the memory before that.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rdma::{Buffer, BufferPool, RemoteRegion};

use crate::common::run::SOON;
use crate::common::{End, Rig, assert_pattern, eventually, exercise, fill, within, yields};

cases!(
    a_thousand_dropped_among_a_thousand_kept,
    memory_of_a_dropped_read_is_not_written_later,
    a_dropped_receive_keeps_its_buffer_until_the_message_came,
    dropping_what_was_never_polled_does_nothing,
    connecting_and_accepting_can_be_dropped,
);

const LEN: usize = 4096;
const SLOTS: u64 = 16;

/// Kept and dropped operations of every kind at once. Each buffer holds a pattern that says whose it is.
async fn a_thousand_dropped_among_a_thousand_kept(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(32)).await;
    let (client, server) = (pair.client.clone(), pair.server.clone());
    let written = server.exposed(LEN * SLOTS as usize);
    let read = server.exposed_filled(LEN, READ_SEED);
    let counter = server.exposed(8);
    let pools = Pools { sources: client.pool(LEN, 48), targets: client.pool(LEN, 48) };
    let arrivals = server.pool(LEN, 64);
    // What a connection makes for itself when it is first needed exists before the counts are taken.
    exercise(&pair).await;
    let before = (client.domain.stats(), server.domain.stats());

    let receiving = Receiving::start(&server, &arrivals);
    let watching = watch(&pools.targets);
    let added = Arc::new(AtomicU64::new(0));
    let work = Work {
        end: client.clone(),
        pools,
        written: written.remote(),
        read: read.remote(),
        counter: counter.remote(),
        added,
    };
    within(Duration::from_secs(80), work.run(fastrand::Rng::with_seed(46))).await;

    watching.stop().await;
    receiving.stop(&client).await;
    for end in [&client, &server] {
        eventually(|| end.stats().live_slots == 0, || end.stats()).await;
        assert_eq!((end.stats().in_flight, end.stats().errors), (0, 0));
    }
    eventually(|| work.pools.full() && arrivals.available() == 64, || (client.stats(), server.stats())).await;
    assert_eq!((client.domain.stats(), server.domain.stats()), before);
    // Each place holds one whole write, whoever's it was, and the counter what was added for certain, or more.
    for place in 0..SLOTS {
        let mut bytes = vec![0; LEN];
        written.copy_to(place * LEN as u64, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0) || is_whole(&bytes), "place {place} is a mixture");
    }
    assert!(counter.load(0).unwrap() >= work.added.load(Ordering::SeqCst));
    exercise(&pair).await;
}

const READ_SEED: u64 = 0x5eed;

/// A message that says its own seed in its first 8 bytes.
fn mark(bytes: &mut [u8], seed: u64) {
    fill(bytes, seed);
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
}

fn is_whole(bytes: &[u8]) -> bool {
    let mut expected = vec![0; bytes.len()];
    mark(&mut expected, u64::from_le_bytes(bytes[..8].try_into().unwrap()));
    bytes == expected
}

struct Pools {
    sources: BufferPool,
    targets: BufferPool,
}

impl Pools {
    fn full(&self) -> bool {
        self.sources.available() == self.sources.capacity() && self.targets.available() == self.targets.capacity()
    }
}

struct Work {
    end: End,
    pools: Pools,
    written: RemoteRegion,
    read: RemoteRegion,
    counter: RemoteRegion,
    added: Arc<AtomicU64>,
}

impl Work {
    /// Until a thousand operations were dropped before their end, and as many were kept.
    async fn run(&self, mut random: fastrand::Rng) {
        let dropped = Arc::new(AtomicU64::new(0));
        let room = Arc::new(Semaphore::new(100));
        let mut kept = JoinSet::new();
        let mut seed = 0;
        while dropped.load(Ordering::SeqCst) < 1000 || seed < 2000 {
            seed += 1;
            let permit = room.clone().acquire_owned().await.unwrap();
            // `None`: kept. Otherwise the number of turns that other tasks get before it is dropped.
            let patience = if seed % 2 == 0 { None } else { Some([0, 1, 2, 5, 20][random.usize(..5)]) };
            let operation = self.operation(random.u8(..6), seed, random.u64(..SLOTS));
            let dropped = dropped.clone();
            kept.spawn(async move {
                match patience {
                    None => operation.await,
                    Some(0) => {
                        // Never polled.
                        dropped.fetch_add(1, Ordering::SeqCst);
                    }
                    Some(turns) => tokio::select! {
                        biased;
                        () = operation => {}
                        () = yields(turns) => { dropped.fetch_add(1, Ordering::SeqCst); }
                    },
                }
                drop(permit);
            });
            while let Some(done) = kept.try_join_next() {
                done.unwrap();
            }
        }
        kept.join_all().await;
    }

    fn operation(&self, kind: u8, seed: u64, place: u64) -> impl Future<Output = ()> + Send + 'static {
        let (end, sources, targets) = (self.end.clone(), self.pools.sources.clone(), self.pools.targets.clone());
        let (read, counter, added) = (self.read, self.counter, self.added.clone());
        let written = self.written.slice(place * LEN as u64..(place + 1) * LEN as u64).unwrap();
        async move {
            let source = async {
                let mut buffer = sources.get().await;
                mark(&mut buffer, seed);
                buffer
            };
            match kind {
                0 => check_source(end.send(source.await).await.unwrap(), seed),
                1 => check_source(end.send_with_immediate(source.await, seed as u32).await.unwrap(), seed),
                2 => check_source(end.write(source.await, &written).await.unwrap(), seed),
                3 => {
                    let source = source.await;
                    check_source(end.write_with_immediate(source, &written, seed as u32).await.unwrap(), seed);
                }
                4 => assert_pattern(&end.read(targets.get().await, &read).await.unwrap(), READ_SEED),
                _ => {
                    end.fetch_add(&counter, 1).await.unwrap();
                    added.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    }
}

fn check_source(buffer: Buffer, seed: u64) {
    assert!(is_whole(&buffer) && buffer[..8] == seed.to_le_bytes(), "the source of operation {seed} was changed");
}

/// Whatever the pool hands out belongs to whoever got it: it must not change while it is held.
fn watch(pool: &BufferPool) -> Watching {
    let (pool, stop) = (pool.clone(), Arc::new(AtomicBool::new(false)));
    let stopped = stop.clone();
    let task = tokio::spawn(async move {
        let mut rounds = 0u64;
        while !stopped.load(Ordering::SeqCst) {
            let mut held = [pool.get().await, pool.get().await];
            for (at, buffer) in (0..).zip(&mut held) {
                fill(buffer, rounds * 2 + at);
            }
            if rounds % 8 == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await
            } else {
                yields(5).await
            }
            for (at, buffer) in (0..).zip(&held) {
                assert_pattern(buffer, rounds * 2 + at);
            }
            rounds += 1;
        }
        rounds
    });
    Watching { stop, task }
}

struct Watching {
    stop: Arc<AtomicBool>,
    task: JoinHandle<u64>,
}

impl Watching {
    async fn stop(self) {
        self.stop.store(true, Ordering::SeqCst);
        let rounds = within(SOON, self.task).await.unwrap();
        assert!(rounds >= 10, "only {rounds} rounds of watching");
    }
}

/// Receives whatever comes, and now and then drops all receives that it has posted.
struct Receiving {
    server: End,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Receiving {
    fn start(server: &End, pool: &BufferPool) -> Self {
        let (end, pool, stop) = (server.clone(), pool.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(47);
            while !stopped.load(Ordering::SeqCst) {
                let mut posted = Vec::new();
                for _ in 0..16 {
                    let receive = end.receive(pool.get().await);
                    posted.push(Box::pin(receive));
                }
                let keep = random.usize(..=16);
                for (at, receive) in posted.into_iter().enumerate() {
                    tokio::select! {
                        received = receive => {
                            let received = received.unwrap();
                            if received.in_buffer && received.len == LEN {
                                assert!(is_whole(received.message()), "a message is a mixture");
                            }
                        }
                        () = yields(if at < keep { 200 } else { 1 }) => {}
                    }
                }
            }
        });
        Self { server: server.clone(), stop, task }
    }

    /// Uses up the receives that are still posted.
    async fn stop(self, client: &End) {
        self.stop.store(true, Ordering::SeqCst);
        within(SOON, self.task).await.unwrap();
        while self.server.stats().in_flight > 0 {
            let mut send = client.send(client.empty());
            send.try_post().unwrap();
            // Whether it finds the last of them, or one too many was sent: then the receive for it comes here.
            tokio::select! {
                sent = send => drop(sent.unwrap()),
                () = async {
                    eventually(|| self.server.stats().in_flight == 0, || self.server.stats()).await;
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    self.server.receive(self.server.buffer(1)).await.unwrap();
                } => {}
            }
        }
    }
}

async fn memory_of_a_dropped_read_is_not_written_later(rig: Rig) {
    const LEN: usize = 1 << 20;
    let pair = rig.pair().await;
    let client = &pair.client;
    let region = pair.server.exposed_filled(LEN, 1);
    let remote = region.remote();
    exercise(&pair).await;
    let before = client.domain.stats();
    let pool = client.pool(LEN, 2);
    for round in 0..30u64 {
        let mut read = client.read(pool.get().await, &remote);
        read.try_post().unwrap();
        if round % 3 == 0 {
            tokio::time::sleep(Duration::from_micros(50)).await;
        }
        drop(read);
        // The pool's next buffers, and memory fresh from the allocator, are nobody else's.
        let mut fresh = [client.buffer(LEN), client.buffer(LEN), pool.get().await];
        fresh.iter_mut().for_each(|buffer| fill(buffer, 100 + round));
        tokio::time::sleep(Duration::from_millis(2)).await;
        fresh.iter().for_each(|buffer| assert_pattern(buffer, 100 + round));
    }
    eventually(|| pool.available() == 2, || client.stats()).await;
    drop(pool);
    eventually(|| client.stats().live_slots == 0, || client.stats()).await;
    assert_eq!(client.domain.stats(), before);
}

async fn a_dropped_receive_keeps_its_buffer_until_the_message_came(rig: Rig) {
    let pair = rig.pair().await;
    let pool = pair.server.pool(64, 2);
    let mut receive = pair.server.receive(pool.try_get().unwrap());
    receive.try_post().unwrap();
    drop(receive);
    let mut held = pool.try_get().expect("the other one is free");
    assert!(pool.try_get().is_none(), "the device still has it");
    fill(&mut held, 9);
    pair.client.send(pair.client.filled(64, 1)).await.unwrap();
    eventually(|| pool.available() == 1, || pair.server.stats()).await;
    assert_pattern(&held, 9);
    assert_pattern(&pool.try_get().unwrap(), 1);
    assert_eq!(pair.server.stats().live_slots, 0);
    exercise(&pair).await;
}

async fn dropping_what_was_never_polled_does_nothing(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(8);
    let remote = region.remote();
    let client = &pair.client;
    let before = (client.stats(), client.domain.stats());
    drop(client.send(client.buffer(8)));
    drop(client.receive(client.buffer(8)));
    drop(client.write(client.filled(8, 1), &remote));
    drop(client.read(client.buffer(8), &remote));
    drop(client.batch());
    drop(client.write(client.filled(8, 1), &remote).timeout(SOON));
    assert_eq!((client.stats().live_slots, client.domain.stats()), (before.0.live_slots, before.1));
    drop(client.fetch_add(&remote, 1));
    drop(client.compare_swap(&remote, 0, 1).timeout(SOON));
    exercise(&pair).await;
    assert_eq!(region.load(0).unwrap(), 0);
}

async fn connecting_and_accepting_can_be_dropped(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    let listener = rig.listener(&server).await;
    let address = listener.local_address().clone();
    for turns in [0, 1, 2, 3, 5, 10, 50, 200] {
        tokio::select! {
            biased;
            connected = tokio_rdma::Connection::connect(&client, &address) => drop(connected.unwrap()),
            () = yields(turns) => {}
        }
        tokio::select! {
            biased;
            accepted = listener.accept() => drop(accepted.unwrap()),
            () = yields(turns) => {}
        }
    }
    // Connections that nobody took at the other end may be in the queue; they are closed, a fresh one is not.
    let connected = tokio_rdma::Connection::builder(&client).private_data(*b"fresh").connect(&address).await.unwrap();
    let accepted = within(SOON, async {
        loop {
            let accepted = listener.accept().await.unwrap();
            if accepted.peer_private_data() == b"fresh" {
                return accepted;
            }
        }
    })
    .await;
    let pair = crate::common::Pair { client: End::new(&client, connected), server: End::new(&server, accepted) };
    exercise(&pair).await;
}
