//! Reads and writes that are longer than the device's longest message.

use tokio::join;
use tokio_rdma::{Access, Error, RemoteRegion, SgList, WcStatus, soft};

use crate::common::rig::contents;
use crate::common::{Pair, Rig, assert_pattern, eventually, exercise};

soft_cases!(
    every_length_and_list_is_cut_right,
    order_is_as_with_one_message,
    more_pieces_than_places_are_refused,
    dropping_them_leaves_nothing,
    a_piece_that_fails_is_the_error_of_the_whole,
);

/// Messages of at most 4096 bytes, and room for 8 of them in the send queues.
async fn short_messages(rig: &Rig) -> Pair {
    let mut limits = soft::default_limits();
    limits.max_message = 4096;
    let domain = || rig.open(soft::device(limits.clone(), None)).alloc_pd().unwrap();
    rig.connect_with((&domain(), |it| it.send_depth(8)), (&domain(), |it| it.send_depth(8))).await
}

async fn every_length_and_list_is_cut_right(rig: Rig) {
    let pair = short_messages(&rig).await;
    let (client, server) = (&pair.client, &pair.server);
    let region = server.exposed(9 * 4096);
    let remote = region.remote();
    for len in [4097, 8192, 12_345, 8 * 4096] {
        let list = SgList::new().with(client.filled(100, 1)).with(client.buffer(len - 100));
        client.write(list, &remote).await.unwrap();
        let source = client.write(client.filled(len, 5), &remote).await.unwrap();
        assert_pattern(&source, 5);
        assert_pattern(&contents(&region)[..len], 5);
        assert_pattern(&client.read(client.buffer(len), &remote).await.unwrap(), 5);
        let first = 4000;
        let two = SgList::new().with(client.buffer(first)).with(client.buffer(len - first));
        let read: Vec<u8> = client.read(two, &remote).await.unwrap().iter().flat_map(|part| part.to_vec()).collect();
        assert_pattern(&read, 5);
    }
}

async fn order_is_as_with_one_message(rig: Rig) {
    let pair = short_messages(&rig).await;
    let (client, server) = (&pair.client, &pair.server);
    let region = server.exposed(9 * 4096);
    let remote = region.remote();
    // What is posted behind a long write arrives behind it, and so do the other members of a batch.
    for seed in 10..20 {
        let mut write = client.write(client.filled(5 * 4096, seed), &remote);
        write.try_post().unwrap();
        let (received, sent) = join!(server.receive(server.buffer(8)), client.send(client.buffer(8)));
        received.unwrap();
        sent.unwrap();
        assert_pattern(&contents(&region)[..5 * 4096], seed);
        write.await.unwrap();

        let mut batch = client.batch();
        let write = batch.write_unsignaled(client.filled(5 * 4096, seed + 100), &remote);
        let send = batch.send(client.buffer(8));
        assert_eq!(batch.len(), 2);
        let (received, posted) = join!(server.receive(server.buffer(8)), batch.post());
        posted.unwrap();
        received.unwrap();
        assert_pattern(&contents(&region)[..5 * 4096], seed + 100);
        write.await.unwrap();
        send.await.unwrap();
    }
}

async fn more_pieces_than_places_are_refused(rig: Rig) {
    let pair = short_messages(&rig).await;
    let client = &pair.client;
    let region = pair.server.exposed(9 * 4096);
    let remote = region.remote();
    let error = client.write(client.buffer(8 * 4096 + 1), &remote).await.unwrap_err();
    assert!(matches!(error.error(), Error::Limit { value: 32_769, limit: 32_768, .. }), "{error}");
    assert!(error.to_string().contains("send_depth"), "{error}");
    exercise(&pair).await;
}

async fn dropping_them_leaves_nothing(rig: Rig) {
    let pair = short_messages(&rig).await;
    let client = &pair.client;
    let region = pair.server.exposed(9 * 4096);
    let remote = region.remote();
    for _ in 0..50 {
        let mut write = client.write(client.buffer(6 * 4096), &remote);
        write.try_post().unwrap_or_else(|error| assert!(matches!(error, Error::QueueFull { .. }), "{error}"));
        drop(write);
        drop(client.batch().write(client.buffer(6 * 4096), &remote));
    }
    eventually(|| client.stats().in_flight == 0, || client.stats()).await;
    eventually(|| client.stats().live_slots == 0, || client.stats()).await;
    exercise(&pair).await;
}

async fn a_piece_that_fails_is_the_error_of_the_whole(rig: Rig) {
    let pair = short_messages(&rig).await;
    let client = &pair.client;
    let region = pair.server.exposed(9 * 4096);
    let remote = region.remote();
    let short = RemoteRegion::new(remote.address() + 4 * 4096, 6 * 4096, remote.rkey(), Access::all()).unwrap();
    let error = client.write(client.filled(6 * 4096, 7), &short).await.unwrap_err();
    let failed = matches!(error.error(), Error::Completion { status: WcStatus::RemoteAccess, remote: Some(it), .. }
        if it.address == short.address() && it.length == 6 * 4096);
    assert!(failed, "{error}");
    assert_pattern(&error.into_parts().1.unwrap(), 7);
}
