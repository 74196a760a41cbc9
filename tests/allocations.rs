//! In steady state an operation allocates nothing, in any completion mode, at either end: a counting allocator watches
//! the whole process. One test at a time, so that nothing else runs beside it.

mod common;

use std::sync::{Mutex, PoisonError};

use common::{Pair, Rig, Setup, run};
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::join;
use tokio_rdma::{CompletionMode, RdmaStream, RemoteRegion};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const WARM_UP: usize = 300;

/// So often an operation is watched until it has allocated nothing.
const LOOKS: usize = 3;

/// Operations that are watched; fewer on an emulated machine.
fn counted() -> usize {
    static COUNTED: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *COUNTED.get_or_init(|| if common::rig::nic().is_some() { 500 } else { 2000 })
}

/// Held by the test that runs: a process of its own has each of them with nextest, but not with `cargo test`.
static ALONE: Mutex<()> = Mutex::new(());

macro_rules! in_mode {
    ($($test:ident: $mode:expr),+ $(,)?) => {
        $(#[test]
        fn $test() {
            watch(&[
                Setup::SOFT_TCP.mode($mode),
                Setup::SOFT_UNIX.single_threaded().mode($mode),
                Setup::SHM_UNIX.mode($mode),
                Setup::SHM_TCP.single_threaded().mode($mode),
            ]);
        })+
    };
}

in_mode! {
    the_steady_state_allocates_nothing: CompletionMode::default(),
    nor_does_it_in_event_mode: CompletionMode::Event,
    nor_does_it_while_polling: CompletionMode::Polling,
    nor_does_it_with_a_polling_thread: CompletionMode::PollingThread { cpu: None },
}

#[test]
#[ignore = "needs an RDMA NIC: cargo xtask guest test"]
fn nor_does_it_with_a_nic() {
    // Each mode once, since an emulated machine is slow.
    watch(&[
        Setup::NIC.mode(CompletionMode::default()),
        Setup::NIC.single_threaded().mode(CompletionMode::Event),
        Setup::NIC.single_threaded().mode(CompletionMode::Polling),
        Setup::NIC.mode(CompletionMode::PollingThread { cpu: None }),
    ]);
}

fn watch(setups: &[Setup]) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut failures = Vec::new();
    for setup in setups {
        for (operation, blocks) in every_operation(*setup).into_iter().filter(|(_, blocks)| *blocks > 0) {
            let place = format!("{:?}, {:?}, {} workers", setup.address, setup.mode, setup.workers);
            failures.push(format!("{operation}: {blocks} in {} ({place})", counted()));
        }
    }
    // Where they come from: `DHAT=1` writes dhat-heap.json, for https://nnethercote.github.io/dh_view/dh_view.html
    assert!(failures.is_empty(), "allocations in steady state:\n{}", failures.join("\n"));
}

/// What allocates each time that it is watched. On a busy machine an earlier connection, of a setup before this one perhaps, may
/// be taken down so late that it is counted here.
fn every_operation(setup: Setup) -> Vec<(&'static str, u64)> {
    let mut least = watched_once(setup);
    for _ in 1..LOOKS {
        if least.iter().all(|(_, blocks)| *blocks == 0) {
            break;
        }
        for ((operation, least), (again, blocks)) in least.iter_mut().zip(watched_once(setup)) {
            assert_eq!(*operation, again);
            if *least > 0 {
                println!("{operation}: {least} allocations, then {blocks}");
            }
            *least = blocks.min(*least);
        }
    }
    least
}

fn watched_once(setup: Setup) -> Vec<(&'static str, u64)> {
    let (told, found) = std::sync::mpsc::channel();
    run(setup, move |rig| async move { told.send(allocations(&rig).await).unwrap() });
    found.recv().unwrap()
}

async fn allocations(rig: &Rig) -> Vec<(&'static str, u64)> {
    let pair = rig.pair().await;
    let region = pair.server.exposed(64);
    let remote = region.remote();
    vec![
        ("round trip", round_trips(&pair).await),
        ("write", writes(&pair, &remote).await),
        ("read", reads(&pair, &remote).await),
        ("write with immediate", notices(&pair, &remote).await),
        ("atomic", atomics(&pair, &remote).await),
        ("message", messages(rig).await),
        ("stream round trip", stream_round_trips(rig).await),
        ("stream in bulk", stream_in_bulk(rig).await),
    ]
}

/// Counts the allocations from the end of the warm-up on.
#[derive(Default)]
struct Meter {
    turns: usize,
    counting: Option<(dhat::Profiler, u64)>,
}

impl Meter {
    /// Whether there is one more turn.
    fn next(&mut self) -> bool {
        if self.turns == WARM_UP {
            let profiler = match std::env::var_os("DHAT") {
                Some(_) => dhat::Profiler::builder().build(),
                None => dhat::Profiler::builder().testing().build(),
            };
            self.counting = Some((profiler, dhat::HeapStats::get().total_blocks));
        }
        self.turns += 1;
        self.turns <= WARM_UP + counted()
    }

    fn allocations(self) -> u64 {
        let (_profiler, before) = self.counting.expect("it was called often enough");
        dhat::HeapStats::get().total_blocks - before
    }
}

/// Both ends in one task: whoever answers has as many turns as whoever asks.
async fn round_trips(pair: &Pair) -> u64 {
    let mut meter = Meter::default();
    let [mut out, mut back] = [1, 2].map(|seed| pair.client.filled(64, seed));
    let [mut request, mut answer] = [3, 4].map(|seed| pair.server.filled(64, seed));
    let ask = async {
        while meter.next() {
            let (sent, received) = join!(pair.client.send(out), pair.client.receive(back));
            (out, back) = (sent.unwrap(), received.unwrap().buffer);
        }
        meter.allocations()
    };
    let reply = async {
        for _ in 0..WARM_UP + counted() {
            request = pair.server.receive(request).await.unwrap().buffer;
            answer = pair.server.send(answer).await.unwrap();
        }
        // Deregistering memory is not the steady state, so it has to wait until the counting is over.
        (request, answer)
    };
    join!(ask, reply).0
}

async fn writes(pair: &Pair, remote: &RemoteRegion) -> u64 {
    let (mut meter, mut buffer) = (Meter::default(), pair.client.buffer(64));
    while meter.next() {
        buffer = pair.client.write(buffer, remote).await.unwrap();
    }
    meter.allocations()
}

async fn reads(pair: &Pair, remote: &RemoteRegion) -> u64 {
    let (mut meter, mut buffer) = (Meter::default(), pair.client.buffer(64));
    while meter.next() {
        buffer = pair.client.read(buffer, remote).await.unwrap();
    }
    meter.allocations()
}

async fn notices(pair: &Pair, remote: &RemoteRegion) -> u64 {
    let (mut meter, mut buffer, mut target) = (Meter::default(), pair.client.buffer(64), pair.server.buffer(1));
    while meter.next() {
        let write = pair.client.write_with_immediate(buffer, remote, 1);
        let (written, notice) = join!(write, pair.server.receive(target));
        (buffer, target) = (written.unwrap(), notice.unwrap().buffer);
    }
    meter.allocations()
}

async fn atomics(pair: &Pair, remote: &RemoteRegion) -> u64 {
    let (mut meter, word) = (Meter::default(), remote.slice(..8).unwrap());
    while meter.next() {
        pair.client.fetch_add(&word, 1).await.unwrap();
        pair.client.compare_swap(&word, 0, 1).await.unwrap();
    }
    meter.allocations()
}

async fn messages(rig: &Rig) -> u64 {
    let pair = rig.pair().await;
    let (mut meter, pool) = (Meter::default(), pair.client.pool(64, 4));
    let (mut sender, mut receiver) = (pair.client.sender(2), pair.server.receiver(4, 64).unwrap());
    while meter.next() {
        sender.send(pool.get().await).await.unwrap();
        receiver.next().await.unwrap().unwrap();
    }
    meter.allocations()
}

async fn streams(rig: &Rig) -> (RdmaStream, RdmaStream) {
    let pair = rig.pair().await;
    // A reader that the machine holds up for long would be taken for none, and memory made for what it leaves unread.
    let stream = |connection| RdmaStream::builder().receive_limit(0).from_connection(connection).unwrap();
    (stream(pair.client.connection), stream(pair.server.connection))
}

async fn stream_round_trips(rig: &Rig) -> u64 {
    let (mut client, mut server) = streams(rig).await;
    let mut meter = Meter::default();
    let ask = async {
        let mut bytes = [1; 64];
        while meter.next() {
            client.write_all(&bytes).await.unwrap();
            client.read_exact(&mut bytes).await.unwrap();
        }
        meter.allocations()
    };
    let reply = async {
        let mut bytes = [0; 64];
        for _ in 0..WARM_UP + counted() {
            server.read_exact(&mut bytes).await.unwrap();
            server.write_all(&bytes).await.unwrap();
        }
    };
    join!(ask, reply).0
}

/// More than the slots hold at a time, so that credits run out and come back.
async fn stream_in_bulk(rig: &Rig) -> u64 {
    const PIECE: usize = 100_000;
    let (mut client, mut server) = streams(rig).await;
    let (mut meter, piece) = (Meter::default(), vec![1; PIECE]);
    let write = async {
        while meter.next() {
            client.write_all(&piece).await.unwrap();
        }
        meter.allocations()
    };
    let read = async {
        let mut bytes = vec![0; PIECE];
        for _ in 0..WARM_UP + counted() {
            server.read_exact(&mut bytes).await.unwrap();
        }
    };
    join!(write, read).0
}
