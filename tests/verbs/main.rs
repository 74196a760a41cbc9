//! What only RDMA NICs have: RDMA CM, keys and limits of a real device, its events. Needs a NIC, or the kernel's Soft-RoCE:
//! `cargo xtask guest test` runs it over that. The conformance suite has what every device must do.
//!
//! `TOKIO_RDMA_TEST_NIC=device@address` names a device of this machine and one of its IP addresses.

/// A test on the NIC, bounded in time.
macro_rules! on_nic {
    ($(async fn $name:ident($nic:ident) $body:block)*) => {$(
        #[test]
        #[ignore = "needs an RDMA NIC: cargo xtask guest test"]
        fn $name() {
            let $nic = $crate::nic();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let done = runtime.block_on(async { tokio::time::timeout(std::time::Duration::from_secs(120), async $body).await });
            assert!(done.is_ok(), "not done within two minutes");
        }
    )*};
}

mod costs;
mod faults;
#[cfg(feature = "async-rdma")]
mod foreign;
mod links;

use std::time::{Duration, Instant};

use tokio_rdma::{
    Access, CloseReason, Connection, Device, Error, Link, Listener, ProtectionDomain, Provider, WcStatus,
};

struct Nic {
    name: String,
    address: String,
}

fn nic() -> Nic {
    let named = std::env::var("TOKIO_RDMA_TEST_NIC").expect("TOKIO_RDMA_TEST_NIC=device@address");
    let (name, address) = named.split_once('@').expect("TOKIO_RDMA_TEST_NIC=device@address");
    Nic { name: name.to_owned(), address: address.to_owned() }
}

impl Nic {
    fn domain(&self) -> ProtectionDomain {
        Device::open(&self.name).unwrap().alloc_pd().unwrap()
    }

    async fn connected(&self) -> (Connection, Connection) {
        let domain = self.domain();
        let listener = Listener::bind(&domain, format!("{}:0", self.address)).await.unwrap();
        let connecting = Connection::connect(&domain, listener.local_address());
        tokio::try_join!(connecting, listener.accept()).unwrap()
    }
}

/// Two ends meet, the second one so much later. Whether a message went each way.
async fn meet(nic: &Nic, late: Duration) -> bool {
    let domain = nic.domain();
    let local = format!("{}:0", nic.address);
    let settings = || Connection::builder(&domain).retry_count(0).ack_timeout(Duration::from_millis(33));
    let one = settings().endpoint(&*local).await.unwrap();
    let two = settings().endpoint(&*local).await.unwrap();
    let (to_one, to_two) = (one.endpoint().clone(), two.endpoint().clone());
    let second = async {
        tokio::time::sleep(late).await;
        two.connect(&to_one).await
    };
    let (one, two) = tokio::try_join!(one.connect(&to_two), second).unwrap();
    for (from, to) in [(&one, &two), (&two, &one)] {
        let mut receive = to.receive(domain.alloc(8).unwrap());
        receive.try_post().unwrap();
        match from.send(domain.register(b"met".to_vec()).unwrap()).await {
            Ok(_) => assert_eq!(receive.await.unwrap().message(), b"met"),
            Err(error) => match error.error() {
                Error::Completion { status: WcStatus::RetryExceeded, .. } => return false,
                other => panic!("{other}"),
            },
        }
    }
    true
}

on_nic! {
    async fn the_default_device_is_the_nic_and_says_so(nic) {
        let device = Device::open_default().unwrap();
        assert_eq!(device.provider(), Provider::Verbs);
        let list = Device::list();
        assert_eq!(device.name(), list[0].name);
        assert!(list.iter().any(|info| info.name == nic.name), "{list:?}");
        assert!(Device::list().iter().any(|info| info.name == "soft0"));
    }

    async fn every_operation_carries_its_bytes(nic) {
        let (client, server) = nic.connected().await;
        assert_eq!((client.link(), client.provider()), (Link::Roce, Provider::Verbs));
        assert_eq!(client.max_rd_atomic(), 16);
        let domain = client.domain();

        let mut receive = server.receive(domain.alloc(64).unwrap());
        receive.try_post().unwrap();
        client.send_with_immediate(domain.register(b"hello".to_vec()).unwrap(), 0x0102_0304).await.unwrap();
        let received = receive.await.unwrap();
        assert_eq!((received.message(), received.immediate), (&b"hello"[..], Some(0x0102_0304)));

        let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let shared = domain.alloc(1 << 20).unwrap().expose(all).unwrap();
        let remote = shared.remote();
        let bytes: Vec<u8> = (0..1 << 20).map(|at: u32| ((at * 7) >> 3) as u8).collect();
        client.write(domain.register(bytes.clone()).unwrap(), &remote).await.unwrap();
        let back = client.read(domain.alloc(1 << 20).unwrap(), &remote).await.unwrap();
        assert!(back[..] == bytes[..], "1 MiB there and back");

        shared.store(8, 40).unwrap();
        let word = remote.slice(8..16).unwrap();
        assert_eq!(client.fetch_add(&word, 2).await.unwrap(), 40);
        assert_eq!(client.compare_swap(&word, 42, 7).await.unwrap(), 42);
        assert_eq!(shared.load(8).unwrap(), 7);
    }

    async fn long_reads_and_writes_are_split(nic) {
        let (client, server) = nic.connected().await;
        let (domain, most) = (client.domain().clone(), client.max_message() as usize);
        assert!(most <= 16 << 20, "{most} bytes in one message are too many for this test");
        let len = most + 4097;
        let shared = server.domain().alloc(len).unwrap().expose(Access::REMOTE_READ | Access::REMOTE_WRITE).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| ((at * 7) >> 3) as u8).collect();
        client.write(domain.register(bytes.clone()).unwrap(), &shared.remote()).await.unwrap();
        let back = client.read(domain.alloc(len).unwrap(), &shared.remote()).await.unwrap();
        assert!(back[..] == bytes[..], "{len} bytes there and back");
        let error = client.send(domain.alloc(len).unwrap()).await.unwrap_err();
        assert!(matches!(error.error(), Error::Limit { .. }), "{error}");
    }

    async fn threads_can_be_near_the_device(nic) {
        let vectors = Device::open(&nic.name).unwrap().completion_vectors();
        assert!(vectors >= 1);
        let last = Device::builder(&nic.name).completion_vector(vectors - 1).completion_queues(3).open().unwrap();
        let domain = last.alloc_pd().unwrap();
        let listener = Listener::bind(&domain, format!("{}:0", nic.address)).await.unwrap();
        for _ in 0..3 {
            tokio::try_join!(Connection::connect(&domain, listener.local_address()), listener.accept()).unwrap();
        }
        let error = Device::builder(&nic.name).completion_vector(vectors).open().unwrap_err();
        assert!(matches!(error, Error::Limit { what: "completion vector", .. }), "{error}");
        let cpus_of = |name: &str| -> Vec<String> {
            let named = |task: &std::path::Path| std::fs::read_to_string(task.join("comm")).unwrap().trim() == name;
            let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
            let allowed = |task: std::path::PathBuf| {
                let status = std::fs::read_to_string(task.join("status")).unwrap();
                status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
            };
            tasks.filter(|task| named(task)).map(allowed).collect()
        };
        drop((last, domain, listener));
        let pinned = Device::builder(&nic.name).pin_to_local_cpus();
        match Device::open(&nic.name).unwrap().local_cpus() {
            Ok(cpus) => {
                let _pinned = pinned.open().unwrap();
                assert!(!cpus.is_empty());
                let expected = cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
                println!("near {}: {expected}", nic.name);
                assert!(!cpus_of("rdma-events").is_empty());
            }
            // A Soft-RoCE device on a virtual cable is nowhere.
            Err(unknown) => {
                assert!(unknown.to_string().contains(&nic.name), "{unknown}");
                assert_eq!(pinned.open().unwrap_err().to_string(), unknown.to_string());
            }
        }
    }

    async fn processes_can_be_started_while_memory_is_registered(nic) {
        let (client, server) = nic.connected().await;
        let shared = server.domain().register(vec![7; 100]).unwrap().expose(Access::REMOTE_READ).unwrap();
        for round in 0..10 {
            let small: Vec<_> = (0..20).map(|_| client.domain().register(vec![round; 100]).unwrap()).collect();
            // The child's pages are copies; this side's must still be those that the device knows.
            let child = std::process::Command::new("/bin/true").status().unwrap();
            assert!(child.success());
            let read = client.read(client.domain().register(vec![0; 100]).unwrap(), &shared.remote()).await.unwrap();
            assert_eq!(read[..], [7; 100]);
            assert!(small.iter().all(|buffer| buffer[..] == [round; 100]));
        }
    }

    async fn what_soft_roce_cannot_is_said_and_not_tried(nic) {
        let error = nic.domain().supports_dmabuf().unwrap_err();
        assert!(matches!(&error, Error::Io { cause, .. } if cause.raw_os_error() == Some(libc::EOPNOTSUPP)), "{error}");
    }

    async fn memory_comes_and_goes_without_end(nic) {
        let domain = nic.domain();
        for at in 0..70_000_usize {
            drop(domain.register(vec![1; 1 + at * 37 % 9000]).unwrap_or_else(|error| panic!("after {at}: {error}")));
        }
    }

    async fn round_trips_need_no_timer(nic) {
        let (client, server) = nic.connected().await;
        let domain = client.domain().clone();
        let echo = async {
            let posted = || {
                let mut receive = server.receive(domain.alloc(64).unwrap());
                receive.try_post().unwrap();
                receive
            };
            let mut next = posted();
            for _ in 0..ROUNDS {
                let got = next.await.unwrap();
                next = posted();
                server.send(domain.register(got.message().to_vec()).unwrap()).await.unwrap();
            }
        };
        const ROUNDS: u32 = 2_000;
        let mut slow = 0;
        let ask = async {
            for round in 0..ROUNDS {
                let start = Instant::now();
                let mut answer = client.receive(domain.alloc(64).unwrap());
                answer.try_post().unwrap();
                client.send(domain.register(round.to_le_bytes().to_vec()).unwrap()).await.unwrap();
                assert_eq!(answer.await.unwrap().message(), round.to_le_bytes());
                slow += u32::from(start.elapsed() > Duration::from_millis(50));
            }
        };
        tokio::join!(echo, ask);
        assert!(slow < 20, "{slow} of {ROUNDS} round trips took more than 50 ms");
    }

    async fn a_revoked_key_ends_the_connection_with_the_reason(nic) {
        let (client, server) = nic.connected().await;
        let domain = client.domain();
        let shared = domain.alloc(4096).unwrap().expose(Access::REMOTE_WRITE).unwrap();
        let remote = shared.remote();
        client.write(domain.alloc(4096).unwrap(), &remote).await.unwrap();
        let buffer = shared.reclaim().await;
        assert_eq!(buffer.len(), 4096);
        let failed = client.write(domain.alloc(4096).unwrap(), &remote).await.unwrap_err();
        match failed.error() {
            Error::Completion { status: WcStatus::RemoteAccess, remote: Some(target), .. } => {
                assert_eq!((target.address, target.rkey), (remote.address(), remote.rkey()));
            }
            other => panic!("{other}"),
        }
        assert_eq!(client.closed().await, CloseReason::Failed(WcStatus::RemoteAccess));
        // Some devices do not tell the responder why, but the initiator closes.
        server.closed().await;
    }

    async fn closing_tells_the_peer_and_gives_buffers_back(nic) {
        let (client, server) = nic.connected().await;
        let domain = client.domain().clone();
        let mut waiting = server.receive(domain.alloc(64).unwrap());
        waiting.try_post().unwrap();
        let start = Instant::now();
        client.close().await;
        assert_eq!(server.closed().await, CloseReason::Peer);
        let failed = waiting.await.unwrap_err();
        assert!(matches!(failed.error(), Error::Closed { reason: CloseReason::Peer, .. }), "{}", failed.error());
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        drop((client, server, failed));
        assert_eq!(domain.stats().live_buffers, 0);
        assert_eq!(domain.stats().live_regions, 0);
    }

    async fn nobody_listens_and_foreign_addresses_are_told(nic) {
        let domain = nic.domain();
        let error = Connection::connect(&domain, format!("{}:9", nic.address)).await.unwrap_err();
        assert!(matches!(&error, Error::Io { cause, .. } if cause.kind() == std::io::ErrorKind::ConnectionRefused), "{error}");
        let error = Listener::bind(&domain, "192.0.2.7:0").await.unwrap_err();
        assert!(error.to_string().contains(&nic.address), "the device's addresses are named: {error}");
        let error = Listener::bind(&domain, "unix:/tmp/x").await.unwrap_err();
        assert!(error.to_string().contains("give an IP address"), "{error}");
        let _taken = Listener::bind(&domain, format!("{}:7471", nic.address)).await.unwrap();
        let error = Listener::bind(&domain, format!("{}:7471", nic.address)).await.unwrap_err();
        assert!(matches!(&error, Error::Io { cause, .. } if cause.kind() == std::io::ErrorKind::AddrInUse), "{error}");
    }

    async fn endpoints_connect_in_either_order(nic) {
        for late in [false, true] {
            let domain = nic.domain();
            let local = format!("{}:0", nic.address);
            let one = Connection::builder(&domain).private_data(b"one").endpoint(&*local).await.unwrap();
            let two = Connection::builder(&domain).private_data(b"two").endpoint(&*local).await.unwrap();
            let (to_one, to_two) = (one.endpoint().clone(), two.endpoint().clone());
            let second = async {
                if late {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                }
                two.connect(&to_one).await
            };
            let (one, two) = tokio::try_join!(one.connect(&to_two), second).unwrap();
            assert_eq!((one.peer_private_data(), two.peer_private_data()), (&b"two"[..], &b"one"[..]));
            let mut receive = two.receive(domain.alloc(8).unwrap());
            receive.try_post().unwrap();
            one.send(domain.register(b"met".to_vec()).unwrap()).await.unwrap();
            assert_eq!(receive.await.unwrap().message(), b"met");
        }
    }

    async fn a_greeting_heard_in_a_round_that_fails_is_not_lost(nic) {
        // Without retries a round is over at its first silence, so that the peer's greeting often comes in the middle of one.
        for late in 0..12 {
            // Nor has a message any, and a NIC of software may be held up for longer than its timeout; not each time.
            let mut tries = 5;
            while !meet(&nic, Duration::from_millis(100 + 7 * late)).await {
                tries -= 1;
                assert!(tries > 0, "{late}: no connection carried a message each way");
            }
        }
    }

    async fn the_runtime_keeps_its_pace_while_connecting_and_closing(nic) {
        let ticks = std::rc::Rc::new(std::cell::Cell::new(0u32));
        let ticking = {
            let ticks = ticks.clone();
            async move {
                let mut ticker = tokio::time::interval(Duration::from_millis(10));
                loop {
                    ticker.tick().await;
                    ticks.set(ticks.get() + 1);
                }
            }
        };
        let start = Instant::now();
        let work = async {
            for _ in 0..10 {
                let (client, server) = nic.connected().await;
                client.close().await;
                server.closed().await;
            }
        };
        tokio::select! { _ = ticking => {}, _ = work => {} }
        let expected = start.elapsed().as_millis() as u32 / 10;
        assert!(ticks.get() * 10 >= expected * 9, "{} ticks of {expected}", ticks.get());
    }

    async fn nothing_is_left_behind_in_any_order_of_dropping(nic) {
        let counts = || {
            let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
            (count("/proc/self/fd"), count("/proc/self/task"), faults::resources(&nic.name))
        };
        drop(nic.connected().await);
        tokio::time::sleep(Duration::from_millis(200)).await;
        let before = counts();
        for order in 0..7 {
            let domain = nic.domain();
            let listener = Listener::bind(&domain, format!("{}:0", nic.address)).await.unwrap();
            let connecting = Connection::connect(&domain, listener.local_address());
            let (client, server) = tokio::try_join!(connecting, listener.accept()).unwrap();
            let mut receive = server.receive(domain.alloc(64).unwrap());
            receive.try_post().unwrap();
            let sent = client.send(domain.alloc(8).unwrap()).await.unwrap();
            // Completions and events that nobody gets to read, and a message that nobody receives.
            let mut unread = client.send(domain.alloc(8).unwrap());
            unread.try_post().unwrap();
            let exposed = domain.alloc(64).unwrap().expose(Access::REMOTE_READ).unwrap();
            let mut things: Vec<Box<dyn std::any::Any>> = vec![
                Box::new(client),
                Box::new(domain),
                Box::new(listener),
                Box::new(receive),
                Box::new(server),
                Box::new((sent, exposed)),
                Box::new(unread),
            ];
            things.rotate_left(order);
            let start = Instant::now();
            drop(things);
            assert!(start.elapsed() < Duration::from_secs(1), "order {order}: {:?}", start.elapsed());
        }
        // The driver tasks end when the runtime gets to them.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(counts(), before, "descriptors, threads, and what the kernel has of the device");
    }
}
