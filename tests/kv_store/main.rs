//! The key-value store of the examples: what it holds against writers, full tables, stopped and killed servers.
//!
//! `TOKIO_RDMA_TEST_KV_READS` says how many GETs run against a writer, instead of 20 000.

#[path = "../common/mod.rs"]
mod common;
mod processes;
#[path = "../../examples/kv_store/store/mod.rs"]
mod store;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;
use std::{env, thread};

use common::data::{differs, fill};
use common::rig::{Rig, Setup};
use common::run::SOON;
use common::within;
use store::client::Found;
use store::{Client, Server, Shape, StoreError, Table};
use tokio_rdma::{Access, Connection, RemoteRegion};

macro_rules! cases {
    ($($case:ident),+ $(,)?) => {
        mod tcp { $(#[test] fn $case() { super::common::run(super::Setup::SOFT_TCP_APART, super::$case); })+ }
        mod shm { $(#[test] fn $case() { super::common::run(super::Setup::SHM_UNIX, super::$case); })+ }
    };
}

cases!(
    values_come_and_go,
    keys_that_meet_are_kept_apart,
    a_full_table_says_so,
    what_is_too_long_is_refused,
    concurrent_writers_leave_one_of_their_values,
    a_client_that_talks_nonsense_disturbs_no_other,
    one_client_too_many_waits,
);

/// No operation takes this long here.
const LIMIT: std::time::Duration = SOON;

/// A server in this process, which goes on until the runtime ends.
async fn serve(rig: &Rig, shape: Shape) -> (Arc<Table>, String) {
    let domain = rig.domain();
    let table = Arc::new(Table::new(&domain, shape).unwrap());
    let server = Server::bind(&domain, table.clone(), rig.address(), LIMIT).await.unwrap();
    let address = server.address().to_string();
    tokio::spawn(server.serve(std::future::pending()));
    (table, address)
}

async fn connect(rig: &Rig, address: &str) -> Client {
    Client::connect(&rig.domain(), address, LIMIT).await.unwrap()
}

async fn value(client: &mut Client, key: &[u8]) -> Option<Vec<u8>> {
    client.get(key).await.unwrap().map(|found| found.value.to_vec())
}

async fn values_come_and_go(rig: Rig) {
    let (_table, address) = serve(&rig, Shape::new(64, 16, 100).unwrap()).await;
    let mut client = connect(&rig, &address).await;
    let mut other = connect(&rig, &address).await;
    assert_eq!(value(&mut client, b"key").await, None);
    assert!(!client.delete(b"key").await.unwrap());

    let first = client.put(b"key", b"one").await.unwrap();
    assert_eq!(other.get(b"key").await.unwrap(), Some(Found { version: first, value: b"one" }));
    let second = other.put(b"key", b"a longer one").await.unwrap();
    assert!(second > first);
    assert_eq!(client.get(b"key").await.unwrap(), Some(Found { version: second, value: b"a longer one" }));
    client.put(b"key", b"").await.unwrap();
    assert_eq!(value(&mut other, b"key").await, Some(vec![]));
    client.put(b"", b"of the empty key").await.unwrap();
    assert_eq!(value(&mut other, b"").await, Some(b"of the empty key".to_vec()));

    assert!(other.delete(b"key").await.unwrap());
    assert_eq!(value(&mut client, b"key").await, None);
    assert!(!client.delete(b"key").await.unwrap());
    client.put(b"key", b"again").await.unwrap();
    assert_eq!(value(&mut other, b"key").await, Some(b"again".to_vec()));
    assert_eq!((other.counts().messages, other.counts().torn), (2, 0));
}

/// So many keys whose search begins at the same slot.
fn meeting(shape: Shape, count: usize) -> Vec<Vec<u8>> {
    let first = |key: &Vec<u8>| shape.sequence(key).next().unwrap();
    let keys = (0u32..).map(|number| format!("{number}").into_bytes());
    keys.filter(|key| first(key) == 5).take(count).collect()
}

async fn keys_that_meet_are_kept_apart(rig: Rig) {
    let shape = Shape::new(64, 16, 16).unwrap();
    let (_table, address) = serve(&rig, shape).await;
    let mut client = connect(&rig, &address).await;
    let keys = meeting(shape, 8);
    for key in &keys {
        client.put(key, key).await.unwrap();
    }
    let before = client.counts().reads;
    for key in &keys {
        assert_eq!(value(&mut client, key).await.as_ref(), Some(key));
    }
    assert!(client.counts().reads - before > 8, "they share their first slot");
    // The first one's slot is where all searches begin. Those of the others go on behind it.
    assert!(client.delete(&keys[0]).await.unwrap());
    for (at, key) in keys.iter().enumerate() {
        assert_eq!(value(&mut client, key).await.is_some(), at > 0, "key {at}");
    }
    // It is free, and still no key gets into the table twice.
    client.put(&keys[7], b"new").await.unwrap();
    assert!(client.delete(&keys[7]).await.unwrap());
    assert_eq!(value(&mut client, &keys[7]).await, None);
    assert!(!client.delete(&keys[7]).await.unwrap());
    client.put(&keys[0], b"back").await.unwrap();
    assert_eq!(value(&mut client, &keys[0]).await, Some(b"back".to_vec()));
}

async fn a_full_table_says_so(rig: Rig) {
    let (_table, address) = serve(&rig, Shape::new(4, 16, 16).unwrap()).await;
    let mut client = connect(&rig, &address).await;
    for key in 0u8..4 {
        client.put(&[key], &[key]).await.unwrap();
    }
    let error = client.put(b"one more", b"").await.unwrap_err();
    assert!(matches!(error, StoreError::Full { value: 4, limit: 4 }), "{error:?}");
    assert!(error.to_string().contains("are 4, the limit is 4; delete some"), "{error}");
    assert_eq!(value(&mut client, b"one more").await, None);
    client.put(&[2], b"another value").await.unwrap();
    assert!(client.delete(&[3]).await.unwrap());
    client.put(b"one more", b"fits").await.unwrap();
    assert_eq!(value(&mut client, b"one more").await, Some(b"fits".to_vec()));
    assert_eq!(value(&mut client, &[2]).await, Some(b"another value".to_vec()));
}

async fn what_is_too_long_is_refused(rig: Rig) {
    let (table, address) = serve(&rig, Shape::new(4, 16, 100).unwrap()).await;
    let mut client = connect(&rig, &address).await;
    let (key, long) = (&[1; 16], &[2; 100]);
    client.put(key, long).await.unwrap();
    assert_eq!(value(&mut client, key).await, Some(long.to_vec()));
    let error = client.put(key, &[3; 101]).await.unwrap_err();
    let text = "put: length of the value is 101, the limit is 100; start the server with a larger --value-capacity";
    assert!(error.to_string().starts_with(text), "{error}");
    for error in [
        client.put(&[1; 17], &[]).await.unwrap_err(),
        client.get(&[1; 17]).await.unwrap_err(),
        client.delete(&[1; 17]).await.unwrap_err(),
        table.put(&[1; 17], &[]).unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::Limit { value: 17, limit: 16, .. }), "{error}");
    }
    assert_eq!((value(&mut client, key).await, client.counts().messages), (Some(long.to_vec()), 1));
}

async fn concurrent_writers_leave_one_of_their_values(rig: Rig) {
    let (_table, address) = serve(&rig, Shape::new(64, 16, 64).unwrap()).await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0u8..4 {
        let mut client = connect(&rig, &address).await;
        writers.spawn(async move {
            for round in 0u8..50 {
                for key in 0u8..8 {
                    client.put(&[key], &[writer, round]).await.unwrap();
                    let found = client.get(&[key]).await.unwrap().unwrap();
                    assert!(found.value[0] < 4 && found.value[1] < 50, "{found:?}");
                }
            }
        });
    }
    writers.join_all().await;
    let mut client = connect(&rig, &address).await;
    let mut versions = Vec::new();
    for key in 0u8..8 {
        let found = client.get(&[key]).await.unwrap().unwrap();
        assert_eq!(found.value[1], 49, "some writer's last one");
        versions.push(found.version);
    }
    versions.sort_unstable();
    versions.dedup();
    assert!(versions.len() == 8 && versions[7] == 4 * 50 * 8, "{versions:?}");
}

async fn a_client_that_talks_nonsense_disturbs_no_other(rig: Rig) {
    let (_table, address) = serve(&rig, Shape::new(64, 16, 64).unwrap()).await;
    let mut client = connect(&rig, &address).await;
    client.put(b"key", b"value").await.unwrap();
    let domain = rig.domain();
    for nonsense in [&[0xff; 40][..], &[0], &[1, 0, 200, 1], &[7; 1000]] {
        let connection = Connection::connect(&domain, address.as_str()).await.unwrap();
        // What is longer than any request does not arrive.
        let _ = connection.send(domain.register(nonsense.to_vec()).unwrap()).await;
        within(SOON, connection.closed()).await;
    }
    // Nobody but the server writes.
    let connection = Connection::connect(&domain, address.as_str()).await.unwrap();
    let (_, table) = Shape::from_bytes(connection.peer_private_data()).unwrap();
    let region = RemoteRegion::new(table.address(), table.len(), table.rkey(), Access::all()).unwrap();
    let error = connection.write(domain.register(vec![1; 64]).unwrap(), &region).await.unwrap_err();
    assert!(error.to_string().contains("remote access error"), "{error}");
    assert_eq!(value(&mut client, b"key").await, Some(b"value".to_vec()));
    client.put(b"key", b"another").await.unwrap();
}

async fn one_client_too_many_waits(rig: Rig) {
    let domain = rig.domain();
    let table = Arc::new(Table::new(&domain, Shape::new(64, 16, 64).unwrap()).unwrap());
    let server = Server::bind(&domain, table, rig.address(), LIMIT).await.unwrap().most_clients(1);
    let address = server.address().to_string();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(server.serve(async move { drop(stopped.await) }));
    let mut first = connect(&rig, &address).await;
    first.put(b"key", b"first").await.unwrap();
    let mut second = tokio::spawn({
        let domain = rig.domain();
        async move {
            let mut second = Client::connect(&domain, &address, LIMIT).await.unwrap();
            second.put(b"key", b"second").await.unwrap();
            second.close().await;
        }
    });
    // All that the first one does meanwhile comes before it.
    for _ in 0..100 {
        first.put(b"key", b"first").await.unwrap();
    }
    assert_eq!(value(&mut first, b"key").await, Some(b"first".to_vec()));
    assert!(!second.is_finished());
    first.close().await;
    within(SOON, &mut second).await.unwrap();
    stop.send(()).unwrap();
    let served = within(SOON, serving).await.unwrap().unwrap();
    assert_eq!((served.connections, served.messages, served.puts, served.failed), (2, 102, 102, 0));
}

/// How many GETs at least, by default few enough for a debug build on a busy machine.
fn reads() -> u64 {
    env::var("TOKIO_RDMA_TEST_KV_READS").ok().and_then(|reads| reads.parse().ok()).unwrap_or(20_000)
}

/// A thread writes two values as fast as it can, each different from the one before in all its bytes. Whatever a GET returns must be
/// one of them, and not older than what the last one returned.
async fn no_value_is_ever_torn(rig: Rig) {
    const LEN: usize = 232;
    // Of different lengths, so that what is behind the end of the shorter ones is seen too.
    let len = |seed: u64| LEN - (seed as usize % 3) * 8;
    let put = move |table: &Table, seed: u64| {
        let mut value = vec![0; len(seed)];
        fill(&mut value[8..], seed);
        value[..8].copy_from_slice(&seed.to_ne_bytes());
        table.put(&[seed as u8 % 2], &value).unwrap();
    };
    let (table, address) = serve(&rig, Shape::new(16, 8, LEN as u64).unwrap()).await;
    let mut client = connect(&rig, &address).await;
    put(&table, 0);
    put(&table, 1);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let writer =
        thread::spawn(move || (2..).inspect(|seed| put(&table, *seed)).find(|_| stopped.load(Relaxed)).unwrap());
    // Also when an assertion fails.
    let stopping = Stopping(stop);
    let (least, start, mut last, mut count) = (reads(), Instant::now(), [0; 2], 0);
    // Until the writer was met. Where both share a CPU that takes its time.
    while count < least || client.counts().torn == 0 {
        let read = count;
        assert!(read < least || start.elapsed() < SOON, "the writer was not met in {read} GETs, so nothing was shown");
        let key = read as usize % 2;
        let found = client.get(&[key as u8]).await.unwrap();
        let Some(Found { version, value }) = found else { panic!("read {read}: key {key} is gone") };
        let seed = u64::from_ne_bytes(value[..8].try_into().unwrap());
        assert_eq!((value.len(), seed as usize % 2), (len(seed), key), "read {read}");
        assert_eq!(differs(&value[8..], seed), None, "read {read} is torn: seed {seed}");
        assert!(version >= last[key], "read {read}: version {version} after {}", last[key]);
        last[key] = version;
        if read % 100 == 0 {
            tokio::task::yield_now().await;
        }
        count += 1;
    }
    drop(stopping);
    let (written, counts, elapsed) = (writer.join().unwrap(), client.counts(), start.elapsed());
    println!(
        "{count} GETs (TOKIO_RDMA_TEST_KV_READS) beside {written} PUTs, {elapsed:.1?}: {} Reads met the writer, {} were direct",
        counts.torn,
        client.connection().stats().direct
    );
}

/// Tells a thread to stop, however the test ends.
struct Stopping(Arc<AtomicBool>);

impl Drop for Stopping {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn no_value_is_ever_torn_over_shm() {
    common::run(Setup::SHM_UNIX, no_value_is_ever_torn);
}
