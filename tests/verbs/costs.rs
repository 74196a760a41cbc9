//! What a connection costs: system calls per operation, wake-ups while nothing happens, and no wake-up that is lost.

use std::collections::{BTreeMap, VecDeque};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tokio_rdma::{Access, CompletionMode, Connection, ConnectionStats, Device, Listener, ProtectionDomain};

use crate::faults::{again, role};
use crate::{Nic, nic};

const OPERATIONS: &str = "TOKIO_RDMA_TEST_OPERATIONS";

impl Nic {
    async fn connected_in(&self, mode: CompletionMode) -> (Connection, Connection) {
        let domain = Device::builder(&self.name).completion_mode(mode).open().unwrap().alloc_pd().unwrap();
        let quiet = |domain: &ProtectionDomain| Connection::builder(domain).keepalive(None);
        let listener = Listener::builder(&domain).connections(|it| it.keepalive(None));
        let listener = listener.bind(format!("{}:0", self.address)).await.unwrap();
        tokio::try_join!(quiet(&domain).connect(listener.local_address()), listener.accept()).unwrap()
    }
}

/// Writes of 8 bytes, one after the other.
async fn writes(client: &Connection, server: &Connection, count: u64) {
    let region = server.domain().alloc(64).unwrap().expose(Access::REMOTE_WRITE).unwrap();
    let (remote, mut buffer) = (region.remote(), client.domain().alloc(8).unwrap());
    for _ in 0..count {
        buffer = client.write(buffer, &remote).await.unwrap();
    }
}

/// How often each system call is made for so many writes, in a process of its own.
fn system_calls(test: &str, operations: u64) -> BTreeMap<String, i64> {
    let report = format!("/tmp/calls-{operations}");
    let this = again(test, "operations");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-c", "-q", "-U", "calls,name", "-o", &report]).arg(this.get_program()).args(this.get_args());
    strace.env(crate::faults::ROLE, "operations").env(OPERATIONS, operations.to_string());
    assert!(strace.stdout(Stdio::null()).status().unwrap().success());
    let text = std::fs::read_to_string(&report).unwrap();
    let lines = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let calls = words.next()?.parse().ok()?;
        Some((words.next()?.to_owned(), calls))
    });
    lines.filter(|(name, _)| name != "total").collect()
}

on_nic! {
    async fn polling_makes_no_system_call_but_the_devices_own_doorbell(nic) {
        const NAME: &str = "costs::polling_makes_no_system_call_but_the_devices_own_doorbell";
        if role().as_deref() == Some("operations") {
            let (client, server) = nic.connected_in(CompletionMode::Polling).await;
            let count = std::env::var(OPERATIONS).unwrap().parse().unwrap();
            return writes(&client, &server, count).await;
        }
        const MORE: u64 = 500;
        let (few, many) = (system_calls(NAME, 100), system_calls(NAME, 100 + MORE));
        // Between two looks the polling task lets others run; and where the clock is no vDSO's, tokio asks the kernel.
        let idle = ["sched_yield", "epoll_wait", "clock_gettime"];
        let more: BTreeMap<_, _> = many
            .iter()
            .map(|(name, calls)| (name.as_str(), calls - few.get(name).copied().unwrap_or(0)))
            .filter(|(name, more)| !idle.contains(name) && *more >= MORE as i64 / 10)
            .collect();
        println!("{more:?} more calls for {MORE} more writes");
        // rdma-core's rxe tells the kernel of each post by a write to the device.
        assert_eq!(more.keys().copied().collect::<Vec<_>>(), ["write"], "{more:?}");
        let doorbells = more["write"];
        assert!((doorbells - MORE as i64).abs() < MORE as i64 / 10, "{doorbells} for {MORE}");
    }

    async fn nothing_wakes_up_while_nothing_happens(nic) {
        let wakeups = || -> u64 {
            let switches = |task: std::fs::DirEntry| {
                let status = std::fs::read_to_string(task.path().join("status")).unwrap();
                let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
                line.trim().parse::<u64>().unwrap()
            };
            std::fs::read_dir("/proc/self/task").unwrap().map(|task| switches(task.unwrap())).sum()
        };
        for mode in [CompletionMode::default(), CompletionMode::Event] {
            // With the default keepalive, whose probes are 10 s apart.
            let domain = Device::builder(&nic.name).completion_mode(mode).open().unwrap().alloc_pd().unwrap();
            let listener = Listener::bind(&domain, format!("{}:0", nic.address)).await.unwrap();
            let connecting = Connection::connect(&domain, listener.local_address());
            let (client, server) = tokio::try_join!(connecting, listener.accept()).unwrap();
            writes(&client, &server, 100).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
            let before = wakeups();
            tokio::time::sleep(Duration::from_secs(4)).await;
            let woken = wakeups() - before;
            // This test's own sleep is one of them.
            assert!(woken <= 4, "{mode:?}: {woken} wake-ups in 4 s");
        }
    }
}

/// Messages to which there is one answer, which makes 8 operations. A lost wake-up is not made up for by the next message, since
/// that waits for the answer.
const BURST: u64 = 3;

/// One end: takes turns with the other one, sending `out` messages and then waiting for `incoming` ones, or the other way round.
async fn take_turns(connection: &Connection, out: u64, incoming: u64, first: bool, bursts: u64) -> ConnectionStats {
    let domain = connection.domain();
    let mut buffers: Vec<_> = (0..out).map(|_| Some(domain.alloc(8).unwrap())).collect();
    let post = |buffer| {
        let mut receive = connection.receive(buffer);
        receive.try_post().unwrap();
        receive
    };
    let mut expected: VecDeque<_> = (0..2 * incoming).map(|_| post(domain.alloc(8).unwrap())).collect();
    for turn in 0..2 * bursts {
        if (turn % 2 == 0) == first {
            for buffer in &mut buffers {
                *buffer = Some(connection.send(buffer.take().unwrap()).await.unwrap());
            }
        } else {
            for _ in 0..incoming {
                let received = expected.pop_front().unwrap().await.unwrap();
                expected.push_back(post(received.buffer));
            }
        }
    }
    connection.stats()
}

fn on_a_thread(work: impl Future<Output = ()> + Send + 'static) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    std::thread::spawn(move || runtime.block_on(work));
}

/// Between the last look that found nothing and the arming of the channel a completion may come: nothing but the look after the
/// arming finds it. (`TOKIO_RDMA_TEST_WAITS` sets how many operations; a million takes minutes.) No timer runs that would hide
/// a lost one; a thread outside of the runtimes ends the test if one is.
#[test]
#[ignore = "needs an RDMA NIC: cargo xtask guest test"]
fn waiting_loses_no_wake_up() {
    let operations: u64 = std::env::var("TOKIO_RDMA_TEST_WAITS").map_or(50_000, |it| it.parse().unwrap());
    let bursts = operations / (2 * BURST + 2);
    let (address, addressed) = tokio::sync::oneshot::channel();
    let (done, waiting) = std::sync::mpsc::channel();
    // A device for each end, so that neither looks for the other.
    let open = || {
        let device = Device::builder(&nic().name).completion_mode(CompletionMode::Event).open();
        device.unwrap().alloc_pd().unwrap()
    };
    let (start, of_server) = (Instant::now(), done.clone());
    on_a_thread(async move {
        let listener = Listener::builder(&open()).connections(|it| it.keepalive(None));
        let listener = listener.bind(format!("{}:0", nic().address)).await.unwrap();
        address.send(listener.local_address().clone()).unwrap();
        let connection = listener.accept().await.unwrap();
        of_server.send(take_turns(&connection, 1, BURST, false, bursts).await).unwrap();
        // The client still waits for what was sent last.
        connection.closed().await;
    });
    on_a_thread(async move {
        let connecting = Connection::builder(&open()).keepalive(None);
        let connection = connecting.connect(&addressed.await.unwrap()).await.unwrap();
        done.send(take_turns(&connection, BURST, 1, true, bursts).await).unwrap();
    });
    let stats = [(); 2].map(|()| waiting.recv_timeout(Duration::from_secs(500)).expect("a wake-up was lost"));
    let done: u64 = stats.iter().map(|it| it.sends + it.receives).sum();
    let wakeups: u64 = stats.iter().map(|it| it.wakeups).sum();
    println!("{done} operations, {wakeups} wake-ups by the channel, in {:?}", start.elapsed());
    assert!(done >= operations, "{stats:?}");
    assert!(wakeups > bursts, "the channel was hardly used: {stats:?}");
}
