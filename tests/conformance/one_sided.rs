//! Write and Read: contents, order, notices.

use futures::future::join_all;
use tokio::join;
use tokio_rdma::{Access, SgList};

use crate::common::rig::contents;
use crate::common::{Rig, assert_pattern, pattern, poll_once};

const SIZES: [usize; 5] = [1, 7, 4096, 65_537, 10 << 20];

core_cases!(writes_and_reads_of_every_size, bytes_are_in_place_when_the_notice_arrives);
cases!(
    slices_aim_at_their_part_only,
    segments_are_gathered_and_scattered,
    a_bare_notice_needs_no_bytes,
    a_read_sees_the_write_before_it,
    completions_come_in_the_order_of_posting,
    many_reads_in_flight_each_get_their_own_bytes,
    the_smaller_limit_of_reads_in_flight_counts,
    reclaimed_memory_has_what_the_peer_wrote,
    this_side_may_copy_while_the_peer_writes,
);

async fn writes_and_reads_of_every_size(rig: Rig) {
    let pair = rig.pair().await;
    let most = pair.client.max_message();
    for (seed, len) in (1..).zip(SIZES.into_iter().filter(|&len| len as u64 <= most)) {
        for (one, other) in pair.directions() {
            let region = other.exposed(len);
            let (source, target) = (one.filled(len, seed), one.buffer(len));
            let addresses = (source.address(), target.address());
            let source = one.write(source, &region.remote()).await.unwrap();
            assert_pattern(&contents(&region), seed);
            let target = one.read(target, &region.remote()).await.unwrap();
            assert_pattern(&target, seed);
            assert_eq!((source.address(), target.address()), addresses, "the very buffers come back");
        }
    }
}

async fn bytes_are_in_place_when_the_notice_arrives(rig: Rig) {
    const LEN: usize = 20_000;
    let pair = rig.pair().await;
    let region = pair.server.exposed(LEN);
    let remote = region.remote();
    let writer = async {
        let half = remote.slice(LEN as u64 / 2..).unwrap();
        for round in 0..100u32 {
            // A plain write first: it, too, is in place when the notice of a later one arrives.
            let seed = u64::from(round);
            let mut plain = pair.client.write(pair.client.filled(LEN / 2, seed), &remote);
            plain.try_post().unwrap();
            let noticed = pair.client.write_with_immediate(pair.client.filled(LEN / 2, seed + 1), &half, round);
            let (plain, noticed) = join!(plain, noticed);
            assert_pattern(&plain.unwrap(), seed);
            noticed.unwrap();
            assert_eq!(pair.client.receive_number().await, seed, "the reader has looked");
        }
    };
    let reader = async {
        for round in 0..100u32 {
            let notice = pair.server.receive(pair.server.filled(10, 99)).await.unwrap();
            assert_eq!((notice.immediate, notice.in_buffer, notice.len), (Some(round), false, LEN / 2));
            assert!(notice.message().is_empty());
            assert_pattern(&notice.buffer, 99);
            let bytes = contents(&region);
            assert_pattern(&bytes[..LEN / 2], round.into());
            assert_pattern(&bytes[LEN / 2..], u64::from(round) + 1);
            pair.server.send_number(round.into()).await;
        }
    };
    join!(writer, reader);
}

async fn slices_aim_at_their_part_only(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed_filled(1000, 1);
    let part = region.remote().slice(123..456).unwrap();
    pair.client.write(pair.client.filled(300, 2), &part).await.unwrap();
    let mut expected = pattern(1000, 1);
    expected[123..423].copy_from_slice(&pattern(300, 2));
    assert_eq!(contents(&region), expected);

    let tail = region.remote().slice(999..).unwrap();
    assert_eq!(pair.client.fetch(&tail).await, expected[999..]);
    // A buffer shorter than the region reads its start.
    let start = pair.client.read(pair.client.buffer(5), &region.remote()).await.unwrap();
    assert_eq!(start[..], expected[..5]);
}

async fn segments_are_gathered_and_scattered(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(70_000);
    let whole = pattern(70_000, 4);
    let parts = [&whole[..3], &whole[3..60_001], &whole[60_001..]];
    let source: SgList = parts.iter().map(|part| one.domain.register(part.to_vec()).unwrap().freeze()).collect();
    one.write(source, &region.remote()).await.unwrap();
    assert_eq!(contents(&region), whole);

    let target: SgList = [65_000, 1, 4990, 9].into_iter().map(|len| one.buffer(len)).collect();
    let target = one.read(target, &region.remote()).await.unwrap();
    let read: Vec<u8> = target.iter().flat_map(|segment| segment.to_vec()).collect();
    assert_eq!(read, whole);
}

async fn a_bare_notice_needs_no_bytes(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed_filled(8, 1);
    let (notice, written) = join!(
        pair.server.receive(SgList::new()),
        pair.client.write_with_immediate(pair.client.empty(), &region.remote(), 0)
    );
    let notice = notice.unwrap();
    assert_eq!((notice.immediate, notice.len, notice.in_buffer), (Some(0), 0, false));
    written.unwrap();
    assert_pattern(&contents(&region), 1);
}

async fn a_read_sees_the_write_before_it(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(100_000);
    for round in 0..20 {
        let mut write = one.write(one.filled(100_000, round), &region.remote());
        let mut read = one.read(one.buffer(100_000), &region.remote());
        write.try_post().unwrap();
        read.try_post().unwrap();
        let (write, read) = join!(write, read);
        write.unwrap();
        assert_pattern(&read.unwrap(), round);
    }
}

/// Contents are not asserted: what a read sees of a later write, the specification leaves open without a fence.
async fn completions_come_in_the_order_of_posting(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(1 << 20);
    for round in 0..10 {
        let mut read = one.read(one.buffer(1 << 20), &region.remote());
        let mut write = one.write(one.filled(8, round), &region.remote());
        let mut add = one.fetch_add(&region.remote(), 0);
        read.try_post().unwrap();
        write.try_post().unwrap();
        add.try_post().unwrap();
        add.await.unwrap();
        assert!(poll_once(&mut read).is_ready(), "the read was posted first");
        assert!(poll_once(&mut write).is_ready(), "the write was posted before the atomic");
    }
}

async fn many_reads_in_flight_each_get_their_own_bytes(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(100 * 1000);
    for part in 0..100u64 {
        region.copy_from(part * 1000, &pattern(1000, part)).unwrap();
    }
    let reads = (0..100u64).rev().map(|part| {
        let remote = region.remote().slice(part * 1000..(part + 1) * 1000).unwrap();
        async move { assert_pattern(&one.read(one.buffer(1000), &remote).await.unwrap(), part) }
    });
    join_all(reads).await;
}

async fn the_smaller_limit_of_reads_in_flight_counts(rig: Rig) {
    let pair = rig.pair_with(|settings| settings.max_rd_atomic(3), |settings| settings.max_rd_atomic(100)).await;
    assert_eq!((pair.client.max_rd_atomic(), pair.server.max_rd_atomic()), (3, 3));
    let usual = rig.pair().await;
    assert_eq!(usual.client.max_rd_atomic(), 16, "the default, and not 1");
    for (one, other) in pair.directions() {
        let region = other.exposed_filled(64, 8);
        let remote = region.remote();
        let reads = (0..50).map(|_| one.read(one.buffer(64), &remote));
        for read in join_all(reads).await {
            assert_pattern(&read.unwrap(), 8);
        }
    }
}

async fn reclaimed_memory_has_what_the_peer_wrote(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.buffer(5000).expose(Access::REMOTE_WRITE).unwrap();
    pair.client.write(pair.client.filled(5000, 6), &region.remote()).await.unwrap();
    assert_eq!(pair.server.domain.stats().live_exposed, 1);
    let buffer = region.reclaim().await;
    assert_pattern(&buffer, 6);
    assert_eq!(pair.server.domain.stats().live_exposed, 0);
}

async fn this_side_may_copy_while_the_peer_writes(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(1 << 16);
    let remote = region.remote();
    let writes = async {
        for round in 0..50u64 {
            let mut buffer = pair.client.buffer(1 << 16);
            buffer.fill(round as u8 + 1);
            pair.client.write(buffer, &remote).await.unwrap();
        }
    };
    let copies = tokio::task::spawn_blocking(move || {
        // Any mixture of rounds may be seen, but bytes that nobody wrote may not.
        for _ in 0..200 {
            assert!(contents(&region).iter().all(|&byte| byte <= 50));
        }
        region
    });
    let ((), region) = join!(writes, copies);
    assert!(contents(&region.unwrap()).iter().all(|&byte| byte == 50));
}
