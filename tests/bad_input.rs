//! Every kind of bad input is an error whose text names the operation, the value and the limit; none is a panic,
//! and none is posted.

mod common;

use std::time::Duration;

use common::rig::AddressKind;
use common::{Pair, Rig, Setup, exercise, run};
use tokio_rdma::{
    Access, Address, BufferPool, Connection, ConnectionBuilder, Device, Error, ExposedRegion, Listener,
    QueuePairEndpoint, RemoteRegion, SgList, SharedReceiveQueue, WcStatus, soft,
};

macro_rules! tests {
    ($($name:ident),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                run(Setup::SOFT_UNIX, cases::$name);
            }
        )+
    };
}

tests!(
    lengths,
    rights,
    forged_descriptors,
    foreign_buffers,
    closed_connections,
    empty_buffers,
    splits_and_ranges,
    device_names,
    device_settings,
    addresses,
    addresses_that_cannot_be_used,
    region_descriptors,
    endpoint_descriptors,
    misaligned_and_short_atomics,
    connection_settings,
    shared_receive_queues,
    too_many_segments,
    read_only_targets,
    revoked_regions,
    private_data,
    pools_and_regions,
    exposing_and_copying,
);

/// The environment may name the default device, in a process of its own since it is everybody's.
#[test]
fn device_named_by_the_environment() {
    let test = "device_named_by_the_environment";
    common::process::alone_with(test, Setup::SOFT_UNIX, &[(tokio_rdma::DEVICE_VARIABLE, "nonsense0")], |_| async {
        blames_the_caller(Device::open_default().unwrap_err(), &["no RDMA device named \"nonsense0\"", "soft0"]);
    });
}

#[test]
fn default_device() {
    let variables = &[(tokio_rdma::DEVICE_VARIABLE, "soft0")];
    common::process::alone_with("default_device", Setup::SOFT_UNIX, variables, |_| async {
        assert_eq!(Device::open_default().unwrap().name(), "soft0");
    });
}

/// The error's text has all of these parts.
#[track_caller]
fn says(error: impl Into<Error>, parts: &[&str]) {
    let error = error.into();
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

/// Bad input is the caller's mistake, whichever way it is told.
#[track_caller]
fn blames_the_caller(error: impl Into<Error>, parts: &[&str]) {
    let error = error.into();
    assert!(error.is_caller_error(), "{error:?}");
    says(error, parts);
}

/// The same place, claimed to grant everything.
fn forged(region: &ExposedRegion) -> RemoteRegion {
    let remote = region.remote();
    RemoteRegion::new(remote.address(), remote.len(), remote.rkey(), Access::all()).unwrap()
}

mod cases {
    use super::*;

    pub async fn lengths(rig: Rig) {
        let pair = rig.pair().await;
        let one = &pair.client;
        let region = pair.server.exposed(64);
        let remote = region.remote();
        blames_the_caller(
            one.write(one.buffer(65), &remote).await.unwrap_err(),
            &["write: length is 65", "limit is 64"],
        );
        blames_the_caller(one.read(one.buffer(65), &remote).await.unwrap_err(), &["read: length is 65", "limit is 64"]);
        let noticed = one.write_with_immediate(one.buffer(65), &remote, 1).await.unwrap_err();
        blames_the_caller(noticed, &["write: length is 65", "limit is 64", "longer than the remote region"]);
        let tail = remote.slice(60..).unwrap();
        blames_the_caller(one.write(one.buffer(5), &tail).await.unwrap_err(), &["length is 5", "limit is 4"]);
        assert_eq!(one.stats().errors, 0, "none of them was posted");
        exercise(&pair).await;
    }

    pub async fn rights(rig: Rig) {
        let pair = rig.pair().await;
        let one = &pair.client;
        let only = |access| pair.server.buffer(8).expose(access).unwrap();
        let (read, write) = (only(Access::REMOTE_READ), only(Access::REMOTE_WRITE));
        let refused: [(Error, _, _); 4] = [
            (one.write(one.buffer(8), &read.remote()).await.unwrap_err().into(), "write", "REMOTE_WRITE"),
            (one.read(one.buffer(8), &write.remote()).await.unwrap_err().into(), "read", "REMOTE_READ"),
            (one.fetch_add(&read.remote(), 1).await.unwrap_err(), "fetch-and-add", "REMOTE_ATOMIC"),
            (one.compare_swap(&write.remote(), 0, 1).await.unwrap_err(), "compare-and-swap", "REMOTE_ATOMIC"),
        ];
        for (error, operation, needed) in refused {
            let granted =
                if operation == "write" || operation == "fetch-and-add" { "REMOTE_READ" } else { "REMOTE_WRITE" };
            blames_the_caller(error, &[&format!("{operation}: needs {needed}"), &format!("grants {granted}")]);
        }
        assert_eq!(one.stats().errors, 0, "none of them was posted");
        exercise(&pair).await;
    }

    pub async fn forged_descriptors(rig: Rig) {
        for missing in [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC] {
            let pair = rig.pair().await;
            let one = &pair.client;
            let region = pair.server.buffer(8).expose(Access::all() - missing).unwrap();
            let forged = forged(&region);
            let error: Error = match missing {
                Access::REMOTE_WRITE => one.write(one.buffer(8), &forged).await.unwrap_err().into(),
                Access::REMOTE_READ => one.read(one.buffer(8), &forged).await.unwrap_err().into(),
                _ => one.fetch_add(&forged, 1).await.unwrap_err(),
            };
            assert!(matches!(error, Error::Completion { status: WcStatus::RemoteAccess, .. }), "{error:?}");
            let place = format!("address {:#x}, length 8, rkey {:#x}", forged.address(), forged.rkey());
            blames_the_caller(error, &["remote access error (status 10)", &place, "does not grant this right"]);
        }
    }

    pub async fn foreign_buffers(rig: Rig) {
        let pair = rig.pair().await;
        let one = &pair.client;
        let foreign = rig.domain();
        let ids = [format!("protection domain {}", foreign.id()), format!("connection to {}", one.domain.id())];
        let parts = |operation| [operation, ids[0].as_str(), ids[1].as_str()];
        let region = pair.server.exposed(8);
        let alloc = || foreign.alloc(8).unwrap();
        blames_the_caller(one.send(alloc()).await.unwrap_err(), &parts("send: "));
        blames_the_caller(one.receive(alloc()).await.unwrap_err(), &parts("receive: "));
        blames_the_caller(one.write(alloc().freeze(), &region.remote()).await.unwrap_err(), &parts("write: "));
        blames_the_caller(one.read(alloc(), &region.remote()).await.unwrap_err(), &parts("read: "));
        let mixed = SgList::new().with(one.buffer(8)).with(alloc());
        blames_the_caller(one.send(mixed).await.unwrap_err(), &parts("send: "));
        // The same device is not enough.
        let sibling = one.device().alloc_pd().unwrap();
        blames_the_caller(
            one.send(sibling.alloc(8).unwrap()).await.unwrap_err(),
            &["send: ", "belongs to protection domain"],
        );
        exercise(&pair).await;
    }

    pub async fn closed_connections(rig: Rig) {
        let pair = rig.pair().await;
        let one = &pair.client;
        let region = pair.server.exposed(8);
        one.close().await;
        let why = "the connection is closed: closed on this side";
        says(one.send(one.buffer(8)).await.unwrap_err(), &["send: ", why]);
        says(one.receive(one.buffer(8)).await.unwrap_err(), &["receive: ", why]);
        says(one.write(one.buffer(8), &region.remote()).await.unwrap_err(), &["write: ", why]);
        says(one.read(one.buffer(8), &region.remote()).await.unwrap_err(), &["read: ", why]);
        says(one.fetch_add(&region.remote(), 1).await.unwrap_err(), &["fetch-and-add: ", why]);
        says(one.compare_swap(&region.remote(), 0, 1).await.unwrap_err(), &["compare-and-swap: ", why]);
        let mut batch = one.batch();
        let member = batch.send(one.buffer(8));
        // A member that cannot be taken is refused right away, so nothing may be left to be posted.
        if let Err(error) = batch.post().await {
            says(error, &["batch: ", why]);
        }
        says(member.await.unwrap_err(), &["send: ", why]);
    }

    pub async fn empty_buffers(rig: Rig) {
        let pair = rig.pair().await;
        let one = &pair.client;
        let region = pair.server.exposed(8);
        let parts = |operation| [operation, "length is 0", "limit is 1", "at least 1 byte"];
        blames_the_caller(one.write(one.empty(), &region.remote()).await.unwrap_err(), &parts("write: "));
        blames_the_caller(one.read(one.empty(), &region.remote()).await.unwrap_err(), &parts("read: "));
        blames_the_caller(one.write(SgList::new(), &region.remote()).await.unwrap_err(), &parts("write: "));
        blames_the_caller(one.domain.alloc(0).unwrap_err(), &["alloc: length is 0", "limit is 1"]);
        blames_the_caller(one.domain.register(Vec::new()).unwrap_err(), &["register: length is 0", "limit is 1"]);
        blames_the_caller(one.empty().expose(Access::all()).unwrap_err(), &["expose: length is 0", "limit is 1"]);
        exercise(&pair).await;
    }

    pub async fn splits_and_ranges(rig: Rig) {
        let domain = rig.domain();
        let mut buffer = domain.alloc(100).unwrap();
        blames_the_caller(buffer.split_to(101).unwrap_err(), &["split_to: ", "101", "100"]);
        blames_the_caller(buffer.split_off(usize::MAX).unwrap_err(), &["split_off: ", "18446744073709551615", "100"]);
        assert_eq!(buffer.len(), 100, "a refused split changes nothing");
        // Parts that do not meet, in the wrong order, of different memory.
        let (tail, other) = (buffer.split_off(60).unwrap(), domain.alloc(40).unwrap());
        let middle = buffer.split_off(30).unwrap();
        let error = buffer.unsplit(tail).unwrap_err();
        says_apart(&error.to_string(), "begins at");
        let (buffer, tail) = error.into_buffers();
        let error = middle.unsplit(buffer).unwrap_err();
        says_apart(&error.to_string(), "begins at");
        let (middle, buffer) = error.into_buffers();
        let error = tail.unsplit(other).unwrap_err();
        says_apart(&error.to_string(), "different memory regions");
        let (tail, _) = error.into_buffers();
        assert_eq!(buffer.unsplit(middle).unwrap().unsplit(tail).unwrap().len(), 100);

        let shared = domain.alloc(10).unwrap().freeze();
        blames_the_caller(shared.slice(5..11).unwrap_err(), &["slice: end of the range is 11", "limit is 10"]);
        blames_the_caller(shared.slice(..=usize::MAX).unwrap_err(), &["slice: ", "limit is 10"]);
        let remote = RemoteRegion::new(4096, 10, 1, Access::all()).unwrap();
        blames_the_caller(remote.slice(..11).unwrap_err(), &["slice: end of the range is 11", "limit is 10"]);
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = remote.slice(7..3).unwrap_err();
        blames_the_caller(reversed, &["slice: start of the range is 7", "limit is 3"]);
    }

    #[track_caller]
    fn says_apart(text: &str, why: &str) {
        assert!(text.starts_with("unsplit: ") && text.contains(why), "{text}");
    }

    pub async fn device_names(_: Rig) {
        for name in ["mlx5_0", "", "soft", "soft0 ", "SOFT0"] {
            let error = Device::open(name).unwrap_err();
            blames_the_caller(error, &[&format!("no RDMA device named {name:?}"), "this machine has soft0"]);
        }
        assert!(Device::list().iter().all(|device| Device::open(&device.name).is_ok()));
    }

    pub async fn device_settings(rig: Rig) {
        let device = || (rig.setup.device)();
        for count in [0, 1025, usize::MAX] {
            let error = device().completion_queues(count).open().unwrap_err();
            blames_the_caller(error, &["number of completion queues", &count.to_string(), "1024", "at least 1"]);
        }
        let mode = tokio_rdma::CompletionMode::PollingThread { cpu: Some(1 << 20) };
        blames_the_caller(device().completion_mode(mode).open().unwrap_err(), &["CPU number is 1048576"]);
    }

    pub async fn addresses(rig: Rig) {
        let domain = rig.domain();
        for text in [
            "",
            ":",
            "localhost",
            "127.0.0.1",
            "127.0.0.1:",
            "127.0.0.1:65536",
            ":80",
            "a:b",
            "unix:",
            "[::1]",
            "1.2.3.4:-1",
        ] {
            let expected = ["not a valid address", &format!("{text:?}")[..]];
            blames_the_caller(text.parse::<Address>().unwrap_err(), &expected);
            blames_the_caller(Connection::connect(&domain, text).await.unwrap_err(), &expected);
            blames_the_caller(Listener::bind(&domain, text.to_owned()).await.unwrap_err(), &expected);
        }
        for text in ["127.0.0.1:7471", "[::1]:0", "host.example:7471", "unix:/run/app.sock", "unix:relative"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    pub async fn addresses_that_cannot_be_used(rig: Rig) {
        let domain = rig.domain();
        for kind in [AddressKind::Tcp, AddressKind::Unix] {
            let rig = Rig::new(Setup { address: kind, ..rig.setup });
            let listener = rig.listener(&domain).await;
            let address = listener.local_address().to_string();
            let bare = address.trim_start_matches("unix:");
            says(Listener::bind(&domain, address.as_str()).await.unwrap_err(), &["bind ", bare, "in use"]);
        }
        says(Connection::connect(&domain, "127.0.0.1:1").await.unwrap_err(), &["connect ", "127.0.0.1:1", "refused"]);
        let nowhere = rig.path();
        let text = nowhere.display().to_string();
        says(Connection::connect(&domain, nowhere.as_path()).await.unwrap_err(), &["connect ", &text, "No such file"]);
        let deep = nowhere.join("missing").join("socket");
        says(Listener::bind(&domain, deep.as_path()).await.unwrap_err(), &["bind ", "missing", "No such file"]);
        let long = rig.path().join("x".repeat(200));
        says(Listener::bind(&domain, long.as_path()).await.unwrap_err(), &["bind ", "xxx"]);
        says(Connection::connect(&domain, long.as_path()).await.unwrap_err(), &["connect ", "xxx"]);
        let name = "no-such-host.invalid:80";
        let lookup = tokio::time::timeout(Duration::from_secs(20), Connection::connect(&domain, name)).await;
        says(lookup.expect("within the setup timeout").unwrap_err(), &["no-such-host.invalid:80"]);
    }

    pub async fn region_descriptors(_: Rig) {
        let genuine = RemoteRegion::new(0x1000, 64, 7, Access::REMOTE_READ).unwrap().to_bytes();
        for len in [0, 1, 31, 33, 64, 1 << 20] {
            let mut bytes = genuine.to_vec();
            bytes.resize(len, 0);
            let expected = ["not a valid remote region", &format!("{len} bytes instead of 32")[..]];
            blames_the_caller(RemoteRegion::from_bytes(&bytes).unwrap_err(), &expected);
        }
        let changed = |at: usize, value: u8| {
            let mut bytes = genuine;
            bytes[at] = value;
            RemoteRegion::from_bytes(&bytes)
        };
        blames_the_caller(changed(0, b'X').unwrap_err(), &["not a valid remote region", "begins with", "58"]);
        blames_the_caller(changed(4, 2).unwrap_err(), &["version 2", "knows 1"]);
        blames_the_caller(changed(8, 1).unwrap_err(), &["access 0x1", "bits outside of 0xe"]);
        blames_the_caller(changed(11, 0x80).unwrap_err(), &["access 0x80000004", "bits outside of 0xe"]);
        let mut overflow = genuine;
        overflow[16..].fill(0xff);
        blames_the_caller(RemoteRegion::from_bytes(&overflow).unwrap_err(), &["0xffffffffffffffff", "64 bits"]);
        let error = RemoteRegion::new(u64::MAX, 2, 1, Access::all()).unwrap_err();
        blames_the_caller(error, &["0xffffffffffffffff", "length 2", "64 bits"]);
        assert_eq!(changed(12, 8).unwrap().rkey(), 8, "another key is another region, which its owner refuses");
    }

    pub async fn endpoint_descriptors(_: Rig) {
        let what = "not a valid queue pair endpoint";
        blames_the_caller(QueuePairEndpoint::from_bytes(&[]).unwrap_err(), &[what, "0 bytes", "1 to 128"]);
        blames_the_caller(QueuePairEndpoint::from_bytes(&[1; 129]).unwrap_err(), &[what, "129 bytes", "1 to 128"]);
        for (text, why) in [
            ("", "0 bytes"),
            ("abc", "3 characters"),
            ("zz", "not hexadecimal"),
            ("+1", "not hexadecimal"),
            ("ää", "not hexadecimal"),
            (&"0".repeat(258), "258 characters"),
        ] {
            blames_the_caller(text.parse::<QueuePairEndpoint>().unwrap_err(), &[what, why]);
        }
    }

    pub async fn misaligned_and_short_atomics(rig: Rig) {
        let pair = rig.pair().await;
        let one = &pair.client;
        let region = pair.server.exposed(64);
        for shift in 1..8 {
            let place = region.remote().slice(shift..).unwrap();
            let modulo = format!("modulo 8 is {shift}, the limit is 0");
            let expected = |operation| [operation, modulo.as_str(), "8-byte aligned"];
            blames_the_caller(one.fetch_add(&place, 1).await.unwrap_err(), &expected("fetch-and-add: "));
            blames_the_caller(one.compare_swap(&place, 0, 1).await.unwrap_err(), &expected("compare-and-swap: "));
        }
        for len in 0..8 {
            let place = region.remote().slice(..len).unwrap();
            let limit = format!("the limit is {len}");
            blames_the_caller(one.fetch_add(&place, 1).await.unwrap_err(), &["fetch-and-add: length is 8", &limit]);
        }
        assert_eq!(one.stats().errors, 0, "none of them was posted");
        exercise(&pair).await;
    }

    pub async fn connection_settings(rig: Rig) {
        type Change = fn(ConnectionBuilder) -> ConnectionBuilder;
        let refused: [(Change, &str); 18] = [
            (|b| b.send_depth(0), "send_depth is 0, the limit is 1"),
            (|b| b.send_depth(16_385), "send_depth is 16385, the limit is 16384"),
            (|b| b.send_depth(u32::MAX), "send_depth is 4294967295"),
            (|b| b.receive_depth(0), "receive_depth is 0, the limit is 1"),
            (|b| b.receive_depth(u32::MAX), "receive_depth is 4294967295"),
            (|b| b.max_send_sge(0), "max_send_sge is 0, the limit is 1"),
            (|b| b.max_send_sge(33), "max_send_sge is 33, the limit is 32"),
            (|b| b.max_receive_sge(33), "max_receive_sge is 33, the limit is 32"),
            (|b| b.max_inline(257), "max_inline is 257, the limit is 256"),
            (|b| b.retry_count(8), "retry_count is 8, the limit is 7"),
            (|b| b.rnr_retry(255), "rnr_retry is 255, the limit is 7"),
            (|b| b.max_rd_atomic(0), "max_rd_atomic is 0, the limit is 1"),
            (|b| b.max_rd_atomic(129), "max_rd_atomic is 129, the limit is 128"),
            (|b| b.rnr_timer(Duration::ZERO), "rnr_timer in microseconds is 0, the limit is 10"),
            (|b| b.rnr_timer(Duration::from_secs(1)), "rnr_timer in microseconds is 1000000, the limit is 491520"),
            (|b| b.ack_timeout(Duration::MAX), "ack_timeout in microseconds"),
            (|b| b.keepalive(Some(Duration::ZERO)), "keepalive in milliseconds is 0, the limit is 1"),
            (|b| b.keepalive(Some(Duration::MAX)), "keepalive in milliseconds"),
        ];
        let (client, server) = (rig.domain(), rig.domain());
        let listener = rig.listener(&server).await;
        for (change, what) in refused {
            let error = change(Connection::builder(&client)).connect(listener.local_address()).await.unwrap_err();
            blames_the_caller(error, &["connect: ", what]);
            let error = Listener::builder(&client).connections(change).bind(rig.address()).await.unwrap_err();
            blames_the_caller(error, &["listen: ", what]);
            let error = change(Connection::builder(&client)).endpoint(rig.address()).await.unwrap_err();
            blames_the_caller(error, &["endpoint: ", what]);
        }
        let nobody = tokio::time::timeout(Duration::from_millis(20), listener.accept()).await;
        assert!(nobody.is_err(), "refused before anybody is called");
    }

    pub async fn shared_receive_queues(rig: Rig) {
        let (domain, other) = (rig.domain(), rig.domain());
        let srq = SharedReceiveQueue::new(&domain, 4).unwrap();
        let elsewhere = Connection::builder(&other).srq(&srq).connect(rig.address()).await.unwrap_err();
        blames_the_caller(elsewhere, &["protection domain", &domain.id().to_string(), &other.id().to_string()]);
        let apart =
            Listener::builder(&domain).srq(&srq).domain_per_connection(true).bind(rig.address()).await.unwrap_err();
        blames_the_caller(apart, &["listen", "one protection domain", "leave one of the two out"]);
        #[cfg(feature = "psk")]
        {
            let key = tokio_rdma::PreSharedKey::new([7; 32]).unwrap();
            let proving = Connection::builder(&domain).srq(&srq).pre_shared_key(key).connect(rig.address()).await;
            blames_the_caller(proving.unwrap_err(), &["pre-shared key", "receives of the connection's own"]);
        }
    }

    pub async fn too_many_segments(rig: Rig) {
        let pair = rig.pair().await;
        let one = &pair.client;
        let region = pair.server.exposed(100);
        let list = || (0..5).map(|_| one.buffer(1)).collect::<SgList>();
        let parts = |operation| [operation, "scatter/gather entries is 5, the limit is 4", "raise max_send_sge"];
        blames_the_caller(one.send(list()).await.unwrap_err(), &parts("send: "));
        blames_the_caller(one.receive(list()).await.unwrap_err(), &parts("receive: "));
        blames_the_caller(one.write(list(), &region.remote()).await.unwrap_err(), &parts("write: "));
        blames_the_caller(one.read(list(), &region.remote()).await.unwrap_err(), &parts("read: "));
        exercise(&pair).await;
    }

    pub async fn read_only_targets(rig: Rig) {
        let pair = rig.pair().await;
        let one = &pair.client;
        let region = pair.server.exposed(100);
        let list = || SgList::new().with(one.buffer(1)).with(one.buffer(1).freeze());
        let parts = |operation| [operation, "segment 1", "read-only", "use a Buffer"];
        blames_the_caller(one.receive(list()).await.unwrap_err(), &parts("receive: "));
        blames_the_caller(one.read(list(), &region.remote()).await.unwrap_err(), &parts("read: "));
        exercise(&pair).await;
    }

    pub async fn revoked_regions(rig: Rig) {
        for again in [false, true] {
            let pair: Pair = rig.pair().await;
            let region = pair.server.exposed(8);
            let stale = region.remote();
            let buffer = region.reclaim().await;
            let _exposed = again.then(|| buffer.expose(Access::all()).unwrap());
            let error = pair.client.write(pair.client.buffer(8), &stale).await.unwrap_err();
            let place = format!("address {:#x}, length 8, rkey {:#x}", stale.address(), stale.rkey());
            blames_the_caller(error, &["write failed: remote access error", &place, "unknown or revoked"]);
        }
    }

    pub async fn private_data(rig: Rig) {
        let (client, server) = (rig.domain(), rig.domain());
        let listener = rig.listener(&server).await;
        let parts = ["private data length is 55, the limit is 54", "first message"];
        let builder = || Connection::builder(&client).private_data(vec![0; 55]);
        blames_the_caller(builder().connect(listener.local_address()).await.unwrap_err(), &parts);
        blames_the_caller(builder().endpoint(rig.address()).await.unwrap_err(), &parts);
        let bound = Listener::builder(&client).connections(|settings| settings.private_data(vec![0; 55]));
        blames_the_caller(bound.bind(rig.address()).await.unwrap_err(), &parts);
    }

    pub async fn pools_and_regions(rig: Rig) {
        let mut limits = soft::default_limits();
        limits.max_region = 4096;
        let domain = rig.open(soft::device(limits, None)).alloc_pd().unwrap();
        blames_the_caller(domain.alloc(4097).unwrap_err(), &["alloc: length is 4097", "limit is 4096"]);
        blames_the_caller(domain.register(vec![0; 5000]).unwrap_err(), &["register: length is 5000", "limit is 4096"]);
        blames_the_caller(BufferPool::new(&domain, 0, 1).unwrap_err(), &["new pool: buffer length is 0", "limit is 1"]);
        blames_the_caller(BufferPool::new(&domain, 1, 0).unwrap_err(), &["new pool: count is 0", "limit is 1"]);
        blames_the_caller(
            BufferPool::new(&domain, 64, 65).unwrap_err(),
            &["new pool: length is 4160", "limit is 4096"],
        );
        blames_the_caller(BufferPool::new(&domain, usize::MAX, 2).unwrap_err(), &["new pool: length", "limit is 4096"]);
        let error = BufferPool::new(&domain, 1, u32::MAX as usize + 1).unwrap_err();
        blames_the_caller(error, &["new pool: count is 4294967296", "limit is 4294967295"]);
        says(rig.domain().alloc(1 << 45).unwrap_err(), &["alloc", "35184372088832"]);
        assert_eq!(domain.stats(), Default::default());
    }

    pub async fn exposing_and_copying(rig: Rig) {
        let domain = rig.domain();
        for access in [Access::empty(), Access::from_bits_retain(1 << 20), Access::all() | Access::from_bits_retain(1)]
        {
            let error = domain.alloc(16).unwrap().expose(access).unwrap_err();
            assert!(error.to_string().starts_with("expose: access is "), "{error}");
            let (error, buffer) = error.into_parts();
            blames_the_caller(error, &["REMOTE_READ"]);
            assert_eq!(buffer.len(), 16, "the buffer comes back");
        }
        let region = domain.alloc(16).unwrap().expose(Access::all()).unwrap();
        let mut bytes = [0; 9];
        blames_the_caller(
            region.copy_to(8, &mut bytes).unwrap_err(),
            &["copy_to: end of the range is 17", "limit is 16"],
        );
        blames_the_caller(region.copy_from(u64::MAX, &bytes).unwrap_err(), &["copy_from: ", "limit is 16"]);
        blames_the_caller(region.load(9).unwrap_err(), &["load: end of the range is 17", "limit is 16"]);
        blames_the_caller(region.store(4, 1).unwrap_err(), &["store: ", "not a multiple of 8"]);
        blames_the_caller(region.fetch_add(u64::MAX - 3, 1).unwrap_err(), &["fetch_add: ", "limit is 16"]);
        blames_the_caller(
            region.compare_exchange(1, 0, 1).unwrap_err(),
            &["compare_exchange: ", "not a multiple of 8"],
        );
    }
}
