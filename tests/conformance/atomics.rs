//! Compare-and-swap and fetch-and-add.

use std::sync::Arc;

use futures::future::join_all;
use tokio::join;
use tokio_rdma::RemoteRegion;

use crate::common::{End, Rig};

core_cases!(both_atomics_tell_the_value_before);
cases!(
    two_connections_and_the_owner_add_up,
    two_connections_swap_one_after_the_other,
    many_in_flight_keep_their_order,
    addition_wraps_around
);

async fn both_atomics_tell_the_value_before(rig: Rig) {
    let pair = rig.pair().await;
    for (one, other) in pair.directions() {
        let region = other.exposed(24);
        region.store(8, 5).unwrap();
        let word = region.remote().slice(8..16).unwrap();
        assert_eq!(one.fetch_add(&word, 10).await.unwrap(), 5);
        assert_eq!(one.compare_swap(&word, 5, 99).await.unwrap(), 15, "not equal: no swap");
        assert_eq!(region.load(8).unwrap(), 15);
        assert_eq!(one.compare_swap(&word, 15, u64::MAX - 1).await.unwrap(), 15);
        assert_eq!(region.load(8).unwrap(), u64::MAX - 1);
        assert_eq!((region.load(0).unwrap(), region.load(16).unwrap()), (0, 0), "the neighbours are left alone");
    }
}

async fn addition_wraps_around(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(8);
    region.store(0, u64::MAX).unwrap();
    assert_eq!(pair.client.fetch_add(&region.remote(), 3).await.unwrap(), u64::MAX);
    assert_eq!(region.load(0).unwrap(), 2);
}

async fn two_connections_and_the_owner_add_up(rig: Rig) {
    const COUNT: u64 = 500;
    let (client, server) = (rig.domain(), rig.domain());
    let (first, second) = (rig.connect(&client, &server).await, rig.connect(&client, &server).await);
    let region = Arc::new(first.server.exposed(8));
    let remote = region.remote();
    let add = |end: End, step: u64, count: u64| {
        tokio::spawn(async move {
            for _ in 0..count / 10 {
                for before in join_all((0..10).map(|_| end.fetch_add(&remote, step))).await {
                    before.unwrap();
                }
            }
        })
    };
    let third = rig.connect(&client, &server).await;
    let owner = if rig.on_nic() {
        // Beside what the CPU does, a NIC's atomics are in one piece only with IBV_ATOMIC_GLOB, which the emulated one has not.
        add(third.client.clone(), 1_000_000, 10 * COUNT)
    } else {
        let region = Arc::clone(&region);
        tokio::task::spawn_blocking(move || {
            for _ in 0..10 * COUNT {
                region.fetch_add(0, 1_000_000).unwrap();
            }
        })
    };
    let (one, two, owner) = join!(add(first.client.clone(), 1, COUNT), add(second.client.clone(), 1000, COUNT), owner);
    one.unwrap();
    two.unwrap();
    owner.unwrap();
    assert_eq!(region.load(0).unwrap(), COUNT + 1000 * COUNT + 1_000_000 * 10 * COUNT);
}

async fn two_connections_swap_one_after_the_other(rig: Rig) {
    const COUNT: u64 = 200;
    let (client, server) = (rig.domain(), rig.domain());
    let (first, second) = (rig.connect(&client, &server).await, rig.connect(&client, &server).await);
    let region = first.server.exposed(8);
    let remote = region.remote();
    let count_up = |end: End| {
        tokio::spawn(async move {
            let (mut value, mut swaps) = (0, 0);
            while swaps < COUNT {
                let found = end.compare_swap(&remote, value, value + 1).await.unwrap();
                swaps += u64::from(found == value);
                value = if found == value { value + 1 } else { found };
            }
        })
    };
    let (one, two) = join!(count_up(first.client.clone()), count_up(second.client.clone()));
    one.unwrap();
    two.unwrap();
    assert_eq!(region.load(0).unwrap(), 2 * COUNT, "each successful swap counts once");
}

async fn many_in_flight_keep_their_order(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(8);
    let word: RemoteRegion = region.remote();
    let before = join_all((0..300).map(|_| pair.client.fetch_add(&word, 2))).await;
    for (at, before) in (0..).zip(before) {
        assert_eq!(before.unwrap(), 2 * at);
    }
    assert_eq!(pair.client.stats().atomics, 300);
}
