//! Nothing is left behind: no descriptor, no thread, no memory, no file; and no order of dropping things matters.

use std::any::Any;
use std::time::{Duration, Instant};

use tokio_rdma::{CompletionMode, Device, Listener};

use crate::common::process::{descriptors, threads};
use crate::common::rig::{AddressKind, Setup};
use crate::common::run::SOON;
use crate::common::{End, Rig, eventually, exercise, poll_once, within};

lone_cases!(
    dropping_in_every_order,
    devices_come_and_go,
    failed_attempts_leave_nothing,
    a_runtime_that_ends_leaves_nothing,
    stopping_in_every_mode,
);

/// Waits until as much is open and running as at the start.
struct Start {
    descriptors: usize,
    threads: usize,
}

impl Start {
    fn now() -> Self {
        Self { descriptors: descriptors(), threads: threads() }
    }

    async fn comes_back(&self) {
        eventually(
            || descriptors() <= self.descriptors && threads() <= self.threads,
            || {
                let open = |entry: std::io::Result<std::fs::DirEntry>| std::fs::read_link(entry.unwrap().path());
                let open: Vec<_> = std::fs::read_dir("/proc/self/fd").unwrap().map(open).collect();
                (descriptors(), self.descriptors, threads(), self.threads, open)
            },
        )
        .await;
    }
}

/// The kinds of handles that a program holds, in any order it likes.
const KINDS: usize = 7;

/// One of each kind, with operations in every state. The other end comes along as an eighth, dropped last.
async fn handles(rig: &Rig) -> ([Option<Box<dyn Any>>; KINDS], End) {
    let device: Device = rig.device();
    let domain = device.alloc_pd().unwrap();
    let other = rig.domain();
    let pair = rig.connect(&domain, &other).await;
    let listener = Listener::bind(&domain, rig.address()).await.unwrap();
    let client = pair.client;
    let exposed = client.exposed(4096);
    let theirs = pair.server.exposed(4096);
    let pool = client.pool(64, 4);
    let buffers = (client.buffer(64), client.filled(64, 1).freeze(), pool.try_get(), pool.clone());

    let finished = client.write(client.buffer(8), &theirs.remote());
    let finished = tokio::spawn(finished).await.unwrap().unwrap();
    let mut done = client.write(client.buffer(8), &theirs.remote());
    done.try_post().unwrap();
    let mut receive = client.receive(pool.try_get().unwrap());
    receive.try_post().unwrap();
    let mut send = Box::pin(client.send(client.buffer(8)).timeout(SOON));
    assert!(poll_once(&mut send).is_pending());
    let mut add = client.fetch_add(&theirs.remote(), 1);
    add.try_post().unwrap();
    let mut batch = client.batch();
    let member = batch.send(client.buffer(8));
    let unpolled = client.read(client.buffer(8), &theirs.remote());
    let closed = Box::pin({
        let connection = client.connection.clone();
        // A clone of the handle; the connection closes when the last one goes.
        async move { connection.closed().await }
    });
    let futures = (finished, done, receive, send, add, batch, member, (unpolled, pool.get(), closed));
    let connection = client.connection;
    drop(client.domain);
    let all: [Option<Box<dyn Any>>; KINDS] = [
        Some(Box::new(connection)),
        Some(Box::new(listener)),
        Some(Box::new(domain)),
        Some(Box::new(device)),
        Some(Box::new(buffers)),
        Some(Box::new((exposed, theirs))),
        Some(Box::new(futures)),
    ];
    (all, pair.server)
}

async fn dropping_in_every_order(rig: Rig) {
    // The first round starts what a process starts once.
    let (all, server) = handles(&rig).await;
    drop((all, server));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let start = Start::now();
    let mut random = fastrand::Rng::with_seed(13);
    // Each pair of kinds in each order, and a sample of the 5040 orders of all.
    let pairs =
        (0..KINDS).flat_map(|first| (0..KINDS).filter(move |&last| last != first).map(move |last| (first, last)));
    let orders = pairs.map(Some).chain((0..150).map(|_| None));
    for ends in orders {
        let mut order: Vec<usize> = (0..KINDS).collect();
        random.shuffle(&mut order);
        if let Some((first, last)) = ends {
            order.retain(|&kind| kind != first && kind != last);
            order.insert(0, first);
            order.push(last);
        }
        let (mut all, server) = handles(&rig).await;
        let domain = server.domain.clone();
        let begin = Instant::now();
        for &kind in &order {
            drop(all[kind].take());
            if random.u8(..4) == 0 {
                tokio::task::yield_now().await;
            }
        }
        assert!(begin.elapsed() < Duration::from_secs(1), "{order:?} took {:?}", begin.elapsed());
        within(SOON, server.closed()).await;
        drop(server);
        eventually(|| domain.stats() == Default::default(), || (domain.stats(), order.clone())).await;
    }
    start.comes_back().await;
    assert_no_sockets_left(&rig);
}

/// A Unix socket's path goes with its listener.
fn assert_no_sockets_left(rig: &Rig) {
    let path = rig.path();
    let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

async fn devices_come_and_go(rig: Rig) {
    exercise(&rig.pair().await).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let start = Start::now();
    for _ in 0..50 {
        exercise(&rig.pair().await).await;
        // And devices that are never used.
        let domain = rig.domain();
        drop(domain.alloc(100).unwrap());
    }
    start.comes_back().await;
    assert_no_sockets_left(&rig);
}

async fn failed_attempts_leave_nothing(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    exercise(&rig.connect(&client, &server).await).await;
    let listener = rig.listener(&server).await;
    let address = listener.local_address().clone();
    drop(rig.connect(&client, &server).await);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let start = Start::now();
    for turns in 0..60 {
        // Abandoned at various points.
        tokio::select! {
            biased;
            connected = tokio_rdma::Connection::connect(&client, &address) => drop(connected.unwrap()),
            () = crate::common::yields(turns) => {}
        }
        // Refused by this side, and by nobody being there.
        let builder = || tokio_rdma::Connection::builder(&client);
        builder().send_depth(0).connect(&address).await.unwrap_err();
        let nowhere = match rig.setup.address {
            AddressKind::Nic => format!("{}:9", crate::common::rig::nic().unwrap().1),
            AddressKind::Tcp => "127.0.0.1:1".to_owned(),
            AddressKind::Unix => format!("unix:{}", rig.path().display()),
        };
        builder().connect(nowhere.as_str()).await.unwrap_err();
        Listener::bind(&server, &address).await.unwrap_err();
        // An endpoint whose peer never calls.
        let timeout = Duration::from_millis(2);
        let endpoint = builder().setup_timeout(timeout).endpoint(rig.address()).await.unwrap();
        let other = builder().endpoint(rig.address()).await.unwrap();
        endpoint.connect(other.endpoint()).await.unwrap_err();
    }
    while let Ok(accepted) = tokio::time::timeout(Duration::from_millis(100), listener.accept()).await {
        drop(accepted.unwrap());
    }
    start.comes_back().await;
    assert_eq!((client.stats(), server.stats()), Default::default());
}

async fn a_runtime_that_ends_leaves_nothing(rig: Rig) {
    let round = |setup: Setup| {
        let runtime = setup.runtime();
        runtime.block_on(async {
            let rig = Rig::new(setup);
            let (all, server) = handles(&rig).await;
            // A task that holds everything, and never ends.
            tokio::spawn(async move {
                let _held = server;
                std::future::pending::<()>().await
            });
            drop(all);
        });
    };
    // Threads that end when joined: those of this runtime's pool stay for a while.
    let on_a_thread = |setup| std::thread::spawn(move || round(setup)).join().unwrap();
    let setup = rig.setup;
    on_a_thread(setup);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let start = Start::now();
    for at in 0..10 {
        let setup = Setup { workers: at % 3, ..setup };
        on_a_thread(setup);
    }
    start.comes_back().await;
}

async fn stopping_in_every_mode(rig: Rig) {
    exercise(&rig.pair().await).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let start = Start::now();
    let modes = [
        CompletionMode::Event,
        CompletionMode::default(),
        CompletionMode::Polling,
        CompletionMode::PollingThread { cpu: None },
        CompletionMode::PollingThread { cpu: Some(0) },
    ];
    for mode in modes {
        let open =
            || (rig.setup.device)().completion_mode(mode).completion_queues(2).open().unwrap().alloc_pd().unwrap();
        let pair = rig.connect(&open(), &open()).await;
        exercise(&pair).await;
        drop(pair);
        start.comes_back().await;
    }
}
