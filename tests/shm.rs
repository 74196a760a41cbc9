//! What is special about links through shared memory: which operations are carried out without the peer, and that nobody can tell
//! them from the others by what they do.

mod common;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::data::{fill, pattern};
use common::process::{Parent, Second};
use common::rig::{End, Pair, Rig, Setup, contents, usual};
use tokio_rdma::{
    Access, CloseReason, CompletionMode, Connection, ConnectionBuilder, Error, ExposedRegion, Link, RemoteRegion,
    SgList, WcStatus,
};

macro_rules! cases {
    ($($case:ident),+ $(,)?) => {
        mod unix { $(#[test] fn $case() { super::common::run(super::Setup::SHM_UNIX, super::$case); })+ }
        mod tcp_event { $(#[test] fn $case() {
            super::common::run(super::Setup::SHM_TCP.mode(super::CompletionMode::Event).single_threaded(), super::$case);
        })+ }
    };
}

cases!(
    one_sided_operations_are_direct_once_the_peer_has_lent_its_memory,
    large_ones_are_direct_too,
    large_ones_go_on_beside_many_other_links,
    memory_that_shares_its_pages_goes_through_the_link,
    what_waits_behind_a_send_is_not_done_before_it,
    a_revoked_region_is_out_of_reach_and_keeps_its_contents,
    revoking_while_the_peer_writes_is_exact,
    atomics_of_both_ends_add_up,
    a_read_is_ready_at_its_first_poll,
    many_regions_are_used_at_a_time,
    lists_are_gathered_and_scattered,
    a_long_queue_of_them_shows_that_the_link_lives,
);

/// A pair, with memory of the server that the client has used once.
async fn lent(rig: &Rig, len: usize) -> (Pair, ExposedRegion, RemoteRegion) {
    let pair = rig.pair().await;
    assert_eq!((pair.client.link(), pair.client.link().to_string()), (Link::SharedMemory, "shm".to_owned()));
    let region = pair.server.exposed(len);
    let remote = region.remote();
    use_until_direct(&pair.client, &remote).await;
    (pair, region, remote)
}

/// The region is lent when its key is used first, and that arrives when it does.
async fn use_until_direct(client: &End, remote: &RemoteRegion) {
    let before = client.stats().direct;
    common::within(common::run::SOON, async {
        while client.stats().direct == before {
            client.read(client.buffer(8), remote).await.unwrap();
        }
    })
    .await;
}

fn direct(connection: &Connection) -> u64 {
    connection.stats().direct
}

async fn one_sided_operations_are_direct_once_the_peer_has_lent_its_memory(rig: Rig) {
    let (pair, region, remote) = lent(&rig, 4096).await;
    let before = direct(&pair.client);
    pair.client.write(pair.client.filled(4000, 7), &remote).await.unwrap();
    assert_eq!(contents(&region)[..4000], pattern(4000, 7));
    region.copy_from(3, b"written here").unwrap();
    assert_eq!(&pair.client.fetch(&remote).await[3..15], b"written here");
    let place = remote.slice(8..16).unwrap();
    region.store(8, 5).unwrap();
    assert_eq!(pair.client.fetch_add(&place, 3).await.unwrap(), 5);
    assert_eq!(pair.client.compare_swap(&place, 8, 9).await.unwrap(), 8);
    assert_eq!(pair.client.compare_swap(&place, 8, 1).await.unwrap(), 9);
    assert_eq!((region.load(8).unwrap(), direct(&pair.client) - before), (9, 5));
    // With a notice it takes part in the peer's receives.
    let mut receiving = pair.server.receive(pair.server.buffer(8));
    receiving.try_post().unwrap();
    pair.client.write_with_immediate(pair.client.filled(100, 8), &remote, 77).await.unwrap();
    assert_eq!(receiving.await.unwrap().immediate, Some(77));
    assert_eq!(contents(&region)[..100], pattern(100, 8));
    assert_eq!((direct(&pair.client) - before, direct(&pair.server)), (5, 0));
}

async fn large_ones_are_direct_too(rig: Rig) {
    const LEN: usize = (5 << 20) + 13;
    let (pair, region, remote) = lent(&rig, LEN).await;
    let before = direct(&pair.client);
    pair.client.write(pair.client.filled(LEN, 3), &remote).await.unwrap();
    assert!(contents(&region) == pattern(LEN, 3));
    region.copy_from(LEN as u64 - 4, b"last").unwrap();
    let read = pair.client.fetch(&remote).await;
    assert!(read[..LEN - 4] == pattern(LEN, 3)[..LEN - 4] && read.ends_with(b"last"));
    assert_eq!(direct(&pair.client) - before, 2);
}

/// More than one turn takes, over links that were not in use for so long that nobody looks at them.
async fn large_ones_go_on_beside_many_other_links(rig: Rig) {
    const LINKS: u64 = 40;
    const LEN: usize = 700_000;
    let (client, server) = (rig.domain(), rig.domain());
    let mut links = Vec::new();
    for _ in 0..LINKS {
        let pair = rig.connect(&client, &server).await;
        let region = pair.server.exposed(LEN);
        use_until_direct(&pair.client, &region.remote()).await;
        links.push((pair, region));
    }
    for (seed, (pair, region)) in (0..).zip(&links) {
        let before = direct(&pair.client);
        pair.client.write(pair.client.filled(LEN, seed), &region.remote()).await.unwrap();
        assert!(contents(region) == pattern(LEN, seed));
        assert!(pair.client.fetch(&region.remote()).await == pattern(LEN, seed));
        assert_eq!(direct(&pair.client) - before, 2);
    }
}

/// Not one answer of the peer is needed while they are carried out, and it does not count as lost.
async fn a_long_queue_of_them_shows_that_the_link_lives(rig: Rig) {
    const LEN: usize = 256 << 10;
    const COUNT: u32 = 1200;
    let hasty = |end: ConnectionBuilder| end.ack_timeout(Duration::from_millis(25)).retry_count(0).send_depth(COUNT);
    let pair = rig.pair_with(hasty, usual).await;
    let region = pair.server.exposed(LEN);
    use_until_direct(&pair.client, &region.remote()).await;
    let before = direct(&pair.client);
    let mut batch = pair.client.batch();
    let writes: Vec<_> = (0..COUNT).map(|_| batch.write(pair.client.buffer(LEN), &region.remote())).collect();
    batch.post().await.unwrap();
    for write in writes {
        write.await.unwrap();
    }
    assert_eq!(direct(&pair.client) - before, COUNT.into());
}

async fn memory_that_shares_its_pages_goes_through_the_link(rig: Rig) {
    let pair = rig.pair().await;
    let registered = pair.server.domain.register(vec![7u8; 5000]).unwrap();
    let mut half = pair.server.buffer(4096);
    let tail = half.split_off(2048).unwrap();
    let pooled = pair.server.pool(1000, 4).try_get().unwrap();
    for buffer in [registered, half, tail, pooled] {
        let region = buffer.expose(Access::all()).unwrap();
        for round in 0..20 {
            pair.client.write(pair.client.filled(900, round), &region.remote()).await.unwrap();
            assert_eq!(contents(&region)[..900], pattern(900, round));
        }
    }
    assert_eq!(direct(&pair.client), 0);
}

/// A Send that finds no receive holds up all behind it, though nothing keeps this side from writing.
async fn what_waits_behind_a_send_is_not_done_before_it(rig: Rig) {
    let (pair, region, remote) = lent(&rig, 4096).await;
    let mut send = pair.client.send(pair.client.filled(10, 1));
    send.try_post().unwrap();
    let mut write = pair.client.write(pair.client.filled(4096, 2), &remote);
    write.try_post().unwrap();
    let mut add = pair.client.fetch_add(&remote, 1);
    add.try_post().unwrap();
    // The other direction works, so everything has had its chance.
    for number in 0..50 {
        let (sent, received) = tokio::join!(pair.server.send_number(number), pair.client.receive_number());
        assert_eq!((sent, received), ((), number));
    }
    assert!(contents(&region).iter().all(|byte| *byte == 0));
    let received = pair.server.receive(pair.server.buffer(10)).await.unwrap();
    assert_eq!(received.message(), pattern(10, 1));
    let (sent, written, old) = tokio::join!(send, write, add);
    assert!(sent.is_ok() && written.is_ok());
    assert_eq!(old.unwrap().to_ne_bytes(), pattern(4096, 2)[..8]);
    assert_eq!(contents(&region)[8..], pattern(4096, 2)[8..]);
}

async fn a_revoked_region_is_out_of_reach_and_keeps_its_contents(rig: Rig) {
    let (pair, region, remote) = lent(&rig, 10_000).await;
    pair.client.write(pair.client.filled(10_000, 5), &remote).await.unwrap();
    let mut buffer = region.reclaim().await;
    assert!(buffer[..] == pattern(10_000, 5));
    buffer[0] ^= 1;
    let error = pair.client.write(pair.client.filled(10_000, 6), &remote).await.unwrap_err();
    assert!(matches!(error.error(), Error::Completion { status: WcStatus::RemoteAccess, .. }), "{error}");
    buffer[0] ^= 1;
    assert!(buffer[..] == pattern(10_000, 5));
    // The same memory again, for somebody else, under another key.
    let pair = rig.connect(&pair.client.domain, &pair.server.domain).await;
    let region = buffer.expose(Access::REMOTE_READ).unwrap();
    use_until_direct(&pair.client, &region.remote()).await;
    assert!(pair.client.fetch(&region.remote()).await == pattern(10_000, 5));
}

/// What was reported as written is there after the region was taken back, and nothing comes later.
async fn revoking_while_the_peer_writes_is_exact(rig: Rig) {
    for round in 0..20u64 {
        let (pair, region, remote) = lent(&rig, 8192).await;
        let client = pair.client.clone();
        let writing = tokio::spawn(async move {
            let mut done = 0u64;
            let mut buffer = client.buffer(8);
            loop {
                buffer.copy_from_slice(&(done + 1).to_ne_bytes());
                match client.write(buffer, &remote).await {
                    Ok(returned) => buffer = returned,
                    Err(error) => return (done, error.to_string()),
                }
                done += 1;
                if done % 64 == 0 {
                    tokio::task::yield_now().await;
                }
            }
        });
        common::eventually(|| region.load(0).unwrap() > 500 + round * 100, || region.load(0)).await;
        let buffer = region.reclaim().await;
        let found = u64::from_ne_bytes(buffer[..8].try_into().unwrap());
        let (done, why) = writing.await.unwrap();
        assert_eq!(found, done, "{why}");
        assert_eq!(u64::from_ne_bytes(buffer[..8].try_into().unwrap()), done);
    }
}

async fn atomics_of_both_ends_add_up(rig: Rig) {
    const COUNT: u64 = 3000;
    let (pair, region, remote) = lent(&rig, 4096).await;
    let client = pair.client.clone();
    let theirs = tokio::spawn(async move {
        for _ in 0..COUNT {
            client.fetch_add(&remote, 1).await.unwrap();
        }
    });
    for step in 0..COUNT {
        region.fetch_add(0, 1).unwrap();
        if step % 100 == 0 {
            tokio::task::yield_now().await;
        }
    }
    theirs.await.unwrap();
    assert_eq!(region.load(0).unwrap(), 2 * COUNT);
    assert!(direct(&pair.client) >= COUNT);
}

async fn a_read_is_ready_at_its_first_poll(rig: Rig) {
    let (pair, region, remote) = lent(&rig, 4096).await;
    let mut bytes = vec![0; 4096];
    fill(&mut bytes, 9);
    region.copy_from(0, &bytes).unwrap();
    let mut ready = 0;
    for _ in 0..100 {
        let mut read = pin!(pair.client.read(pair.client.buffer(4096), &remote));
        match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(read) => {
                assert_eq!(read.unwrap()[..], bytes);
                ready += 1;
            }
            Poll::Pending => drop(read.await.unwrap()),
        }
    }
    // Somebody else may be looking at that moment, and tokio's budget for a task's turn may be used up.
    assert!(ready > 50, "{ready} of 100");
}

/// More than there are slots.
async fn many_regions_are_used_at_a_time(rig: Rig) {
    let pair = rig.pair().await;
    let mut regions: Vec<_> = (0..80).map(|_| pair.server.exposed(4096)).collect();
    for round in 0..6 {
        for (at, region) in regions.iter().enumerate() {
            pair.client.write(pair.client.filled(64, round * 100 + at as u64), &region.remote()).await.unwrap();
        }
        for (at, region) in regions.iter().enumerate() {
            assert_eq!(contents(region)[..64], pattern(64, round * 100 + at as u64));
        }
        // Slots become free for others.
        for _ in 0..10 {
            regions.remove(0).reclaim().await;
        }
    }
    assert!(direct(&pair.client) > 32);
}

async fn lists_are_gathered_and_scattered(rig: Rig) {
    let (pair, region, remote) = lent(&rig, 4096).await;
    let before = direct(&pair.client);
    let bytes = pattern(300, 4);
    let part = |range: std::ops::Range<usize>| pair.client.domain.register(bytes[range].to_vec()).unwrap();
    let mut list = SgList::new();
    list.push(part(0..1));
    list.push(part(1..200));
    list.push(part(200..300));
    pair.client.write(list, &remote).await.unwrap();
    assert_eq!(contents(&region)[..300], bytes);
    let mut list = SgList::new();
    for len in [100, 3, 197] {
        list.push(pair.client.buffer(len));
    }
    let list = pair.client.read(list, &remote).await.unwrap();
    let read: Vec<u8> = list.into_segments().into_iter().flat_map(|segment| segment.to_vec()).collect();
    assert_eq!(read, bytes);
    assert_eq!(direct(&pair.client) - before, 2);
}

/// Writes a growing number into the region that the first process tells of, until it may not any more, and says why.
async fn writes_until_refused(rig: Rig, mut parent: Parent) {
    let domain = rig.domain();
    let address = parent.hear().await.unwrap();
    let client = End::new(&domain, Connection::connect(&domain, address.as_str()).await.unwrap());
    let text = parent.hear().await.unwrap();
    let bytes: Vec<u8> =
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect();
    let remote = RemoteRegion::from_bytes(&bytes).unwrap();
    let mut buffer = client.buffer(remote.len() as usize);
    let mut number = 0u64;
    let why = loop {
        number += 1;
        buffer.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&number.to_ne_bytes()));
        match client.write(buffer, &remote).await {
            Ok(returned) => buffer = returned,
            Err(error) => break error.to_string(),
        }
    };
    parent.say(&format!("{} {why}", client.stats().direct));
    assert_eq!(parent.hear().await, None);
}

/// A region that the second process is writing to, at full speed.
async fn written_to(rig: &Rig, second: &mut Second) -> (End, ExposedRegion) {
    let domain = rig.domain();
    let listener = rig.listener(&domain).await;
    second.tell(&listener.local_address().to_string()).await;
    let server = End::new(&domain, listener.accept().await.unwrap());
    let region = server.exposed(64 << 10);
    second.tell(&region.remote().to_bytes().map(|byte| format!("{byte:02x}")).concat()).await;
    common::eventually(|| region.load(0).unwrap() > 1000, || region.load(0)).await;
    (server, region)
}

/// The first word of memory in which each word that was written whole is the same.
fn number(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes[..8].try_into().unwrap())
}

async fn takes_back_from_a_killed_process(rig: Rig, mut second: Second) {
    let (server, region) = written_to(&rig, &mut second).await;
    second.kill().await;
    let reason = common::within(common::run::SOON, server.closed()).await;
    assert!(matches!(reason, CloseReason::LinkLost(_)), "{reason}");
    let buffer = region.reclaim().await;
    assert!(number(&buffer) > 1000);
}

async fn takes_back_from_a_stopped_process(rig: Rig, mut second: Second) {
    let (_server, region) = written_to(&rig, &mut second).await;
    second.stop().await;
    let start = Instant::now();
    let buffer = region.reclaim().await;
    assert!(start.elapsed() < common::run::SOON, "{:?}", start.elapsed());
    let before = buffer.to_vec();
    second.resume();
    let said = second.hear().await;
    let (direct, why) = said.split_once(' ').unwrap();
    assert!(direct.parse::<u64>().unwrap() > 900, "{said}");
    // It learns so from the slot, or from the owner, or from the end of the link if it was stopped while it copied.
    assert!(why.contains("remote access") || why.contains("closed") || why.contains("retry"), "{said}");
    assert!(buffer[..] == before[..], "the memory changed after it was taken back");
    second.end().await;
}

macro_rules! process_cases {
    ($($case:ident => $first:ident),+ $(,)?) => { $(
        #[test]
        fn $case() {
            common::process::two_processes(stringify!($case), Setup::SHM_TCP, $first, writes_until_refused);
        }
    )+ };
}

process_cases!(
    a_killed_writer => takes_back_from_a_killed_process,
    a_stopped_writer => takes_back_from_a_stopped_process,
);
