//! Links through shared memory between processes: what is left when one of them is killed at any moment, and what many of them cost.
//!
//! `TOKIO_RDMA_TEST_KILLS` and `TOKIO_RDMA_TEST_CONNECTIONS` say how many; `TOKIO_RDMA_TEST_CASE_SECONDS` makes room for more.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, fs};

use common::process::{Parent, Second, descriptors, two_processes};
use common::rig::{End, Rig, Setup};
use common::run::{SOON, eventually, within};
use tokio_rdma::{Connection, ConnectionBuilder, Link, Listener, ProtectionDomain, RemoteRegion};

/// One test at a time: they count what the process has.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

macro_rules! process_cases {
    ($($case:ident on $setup:ident: $first:ident, $second:ident;)+) => { $(
        #[test]
        fn $case() {
            let _alone = ALONE.lock();
            two_processes(stringify!($case), Setup::$setup, $first, $second);
        }
    )+ };
}

process_cases!(
    a_peer_is_killed_at_any_moment_tcp on SHM_TCP: outlives_them, is_killed;
    a_peer_is_killed_at_any_moment_unix on SHM_UNIX: outlives_them, is_killed;
    many_connections_cost_little on SHM_TCP: serves_many, connects_many;
);

fn count(variable: &str, default: usize) -> usize {
    env::var(variable).ok().and_then(|count| count.parse().ok()).unwrap_or(default)
}

/// Memory of links and of lent regions that this process has open or mapped.
fn memories() -> usize {
    let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let open = open.filter(|target| target.to_string_lossy().contains("memfd:tokio-rdma")).count();
    open + fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:tokio-rdma").count()
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Messages in both directions, and Writes into memory that the other end lends, until that fails. `well` is called when it works.
async fn busy(end: End, mut well: impl FnMut()) -> Failure {
    let region = end.exposed(64 << 10);
    let work = async {
        let own = end.domain.register(region.remote().to_bytes().to_vec())?;
        let (received, sent) = tokio::join!(end.receive(end.buffer(RemoteRegion::WIRE_LEN)), end.send(own));
        sent?;
        let theirs = RemoteRegion::from_bytes(received?.message())?;
        let mut bytes = end.filled(theirs.len() as usize, 1);
        let mut round = 0u64;
        loop {
            if round == 10 {
                assert!(end.stats().direct > 0, "the peer has lent nothing");
                well();
            }
            let number = end.domain.register(round.to_le_bytes().to_vec())?;
            let (written, received, sent) =
                tokio::join!(end.write(bytes, &theirs), end.receive(end.buffer(8)), end.send(number));
            bytes = written?;
            sent?;
            assert_eq!(received?.message(), round.to_le_bytes());
            round += 1;
        }
    };
    let failed: Result<(), Failure> = work.await;
    failed.expect_err("it goes on until it fails")
}

/// Connects, or listens, and is busy until it is killed.
async fn is_killed(rig: Rig, mut parent: Parent) {
    let domain = rig.domain();
    parent.say("ready");
    let connection = match parent.hear().await.as_deref() {
        None => return,
        Some("listen") => {
            let listener = rig.listener(&domain).await;
            parent.say(&listener.local_address().to_string());
            listener.accept().await.unwrap()
        }
        Some(address) => Connection::connect(&domain, address).await.unwrap(),
    };
    let why = busy(End::new(&domain, connection), || parent.say("well")).await;
    parent.say(&format!("ended: {why}"));
    std::future::pending().await
}

/// Each connection that is accepted is kept busy until it fails.
async fn serve(domain: ProtectionDomain, listener: Listener, served: Arc<AtomicUsize>) {
    loop {
        // Of one who was killed while it connected.
        let Ok(connection) = listener.accept().await else { continue };
        let (end, served) = (End::new(&domain, connection), Arc::clone(&served));
        served.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            busy(end, || ()).await;
            served.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// Half of the others connect to this process, and half are connected to; half die while they connect, or soon after, and half when they
/// are known to have a connection that works, which shows too that nothing of the earlier ones is in its way.
async fn outlives_them(rig: Rig, mut first: Second) {
    // There are two of these tests.
    let rounds = count("TOKIO_RDMA_TEST_KILLS", 60) / 2;
    // The moments at which somebody is killed: the same in each run.
    let mut moments = fastrand::Rng::with_seed(1);
    let (domain, served) = (rig.domain(), Arc::new(AtomicUsize::new(0)));
    let listener = rig.listener(&domain).await;
    let address = listener.local_address().to_string();
    let serving = tokio::spawn(serve(domain.clone(), listener, Arc::clone(&served)));
    assert_eq!(first.hear().await, "ready");
    let (mut before, mut connected) = (0, 0);
    for round in 0..rounds {
        let mut second = first.another();
        assert_eq!(second.hear().await, "ready");
        let mut connecting = None;
        if round % 2 == 0 {
            second.tell(&address).await;
        } else {
            second.tell("listen").await;
            let (domain, address) = (domain.clone(), second.hear().await);
            connecting = Some(tokio::spawn(async move {
                match Connection::connect(&domain, address.as_str()).await {
                    Ok(connection) => busy(End::new(&domain, connection), || ()).await,
                    Err(error) => error.into(),
                }
            }));
        }
        if round % 4 < 2 {
            assert_eq!(second.hear().await, "well");
            connected += 1;
        }
        std::thread::sleep(Duration::from_micros(moments.u64(..6000)));
        second.kill().await;
        if let Some(connecting) = connecting {
            within(SOON, connecting).await.unwrap();
        }
        // After the first of each kind, all is running that runs.
        let left = || (served.load(Ordering::SeqCst), memories(), descriptors());
        let is_over = || matches!(left(), (0, 0, open) if round < 4 || open <= before);
        eventually(is_over, || (left(), before)).await;
        if round < 4 {
            before = before.max(descriptors());
        }
    }
    assert!(connected >= rounds / 2);
    serving.abort();
    first.end().await;
}

/// What this process has, in what one connection may cost.
struct Cost {
    descriptors: usize,
    /// Private memory in use and shared memory that is mapped, in KiB.
    kib: usize,
}

impl Cost {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let private = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        let private: usize = private.trim().trim_end_matches(" kB").parse().unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let shared = maps.lines().filter(|line| line.contains("memfd:tokio-rdma")).map(|line| {
            let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            usize::from_str_radix(to, 16).unwrap() - usize::from_str_radix(from, 16).unwrap()
        });
        Self { descriptors: descriptors(), kib: private + shared.sum::<usize>() / 1024 }
    }

    /// For each of so many connections since then.
    fn check(&self, before: &Self, connections: usize, whose: &str) {
        let of_each = |now: usize, before: usize| now.saturating_sub(before) as f64 / connections as f64;
        let descriptors = of_each(self.descriptors, before.descriptors);
        let kib = of_each(self.kib, before.kib);
        println!("{connections} connections, {whose} end of each: {descriptors:.2} descriptors, {kib:.0} KiB");
        assert!(descriptors <= 3.0 && kib <= 400.0);
    }
}

/// Waits for a second in which this process uses next to no CPU time; how much it is.
async fn idles() -> Duration {
    let used = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    for _ in 0..10 {
        let before = used();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let spent = used() - before;
        if spent < Duration::from_millis(2) {
            return spent;
        }
    }
    panic!("with idle connections this process is never idle");
}

/// Otherwise each would be probed every 10 s, which is all that silent ones do.
fn unprobed(settings: ConnectionBuilder) -> ConnectionBuilder {
    settings.keepalive(None)
}

async fn serves_many(rig: Rig, mut second: Second) {
    let connections = count("TOKIO_RDMA_TEST_CONNECTIONS", 200);
    let domain = rig.domain();
    let listener = Listener::builder(&domain).connections(unprobed).bind(rig.address()).await.unwrap();
    second.tell(&listener.local_address().to_string()).await;
    let accept = async || {
        let end = End::new(&domain, listener.accept().await.unwrap());
        assert_eq!(end.link(), Link::SharedMemory);
        end.send_number(end.receive_number().await + 1).await;
        end
    };
    let first = accept().await;
    let before = Cost::now();
    let mut ends = Vec::new();
    while ends.len() < connections {
        ends.push(accept().await);
    }
    Cost::now().check(&before, connections, "the accepting");
    println!("{}", second.hear().await);
    println!("the accepting process, idle: {:?} of CPU time in 1 s", idles().await);
    println!("{}", second.hear().await);
    // They still work.
    for (number, end) in ends.iter().enumerate() {
        end.send_number(number as u64).await;
    }
    first.send_number(0).await;
    second.end().await;
}

async fn connects_many(rig: Rig, mut parent: Parent) {
    let connections = count("TOKIO_RDMA_TEST_CONNECTIONS", 200);
    let (domain, address) = (rig.domain(), parent.hear().await.unwrap());
    let connect = async |number: u64| {
        let connecting = unprobed(Connection::builder(&domain)).connect(address.as_str());
        let end = End::new(&domain, connecting.await.unwrap());
        let ((), received) = tokio::join!(end.send_number(number), end.receive_number());
        assert_eq!(received, number + 1);
        end
    };
    let first = connect(0).await;
    let before = Cost::now();
    let mut ends = Vec::new();
    while ends.len() < connections {
        ends.push(connect(ends.len() as u64).await);
    }
    Cost::now().check(&before, connections, "the connecting");
    parent.say("the connecting process has as many");
    parent.say(&format!("the connecting process, idle: {:?} of CPU time in 1 s", idles().await));
    for (number, end) in ends.iter().enumerate() {
        assert_eq!(end.receive_number().await, number as u64);
    }
    first.receive_number().await;
    assert_eq!(parent.hear().await, None);
}
