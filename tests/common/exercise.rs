//! Every kind of transfer once, in both directions, with checked contents.

use tokio::join;
use tokio_rdma::SgList;

use super::rig::{Pair, contents};
use super::run::{SOON, within};
use super::{assert_pattern, pattern};

/// Shows that a connection works, whatever happened on it before.
pub async fn exercise(pair: &Pair) {
    exercise_singly(pair).await;
    within(SOON, async {
        for (one, other) in pair.directions() {
            let region = other.exposed(64);
            let mut batch = one.batch();
            let write = batch.write_unsignaled(one.filled(64, 6), &region.remote());
            let add = batch.fetch_add(&region.remote().slice(8..16).unwrap(), 1);
            batch.post().await.unwrap();
            let (write, add) = join!(write, add);
            assert_pattern(&write.unwrap(), 6);
            assert_eq!(add.unwrap().to_ne_bytes(), pattern(64, 6)[8..16]);
        }
    })
    .await;
}

/// Without the batch, which needs two slots.
pub async fn exercise_singly(pair: &Pair) {
    within(SOON, async {
        for (one, other) in pair.directions() {
            let (received, sent) = join!(other.receive(other.buffer(3000)), one.send(one.filled(3000, 1)));
            assert_pattern(received.unwrap().message(), 1);
            assert_eq!(sent.unwrap().len(), 3000);

            let list = SgList::new().with(one.filled(10, 2)).with(one.filled(20, 3).freeze());
            let (received, sent) = join!(other.receive(other.buffer(30)), one.send_with_immediate(list, 77));
            let received = received.unwrap();
            sent.unwrap();
            assert_pattern(&received.message()[..10], 2);
            assert_pattern(&received.message()[10..], 3);
            assert_eq!(received.immediate, Some(77));

            let region = other.exposed(4096);
            one.write(one.filled(4096, 4), &region.remote()).await.unwrap();
            assert_pattern(&contents(&region), 4);
            assert_pattern(&one.read(one.buffer(4096), &region.remote()).await.unwrap(), 4);

            let (noticed, written) = join!(
                other.receive(other.buffer(1)),
                one.write_with_immediate(one.filled(4096, 5), &region.remote(), u32::MAX)
            );
            written.unwrap();
            let noticed = noticed.unwrap();
            assert_eq!((noticed.immediate, noticed.in_buffer, noticed.len), (Some(u32::MAX), false, 4096));
            assert_pattern(&contents(&region), 5);

            region.store(8, 40).unwrap();
            let word = region.remote().slice(8..16).unwrap();
            assert_eq!(one.fetch_add(&word, 2).await.unwrap(), 40);
            assert_eq!(one.compare_swap(&word, 42, 43).await.unwrap(), 42);
            assert_eq!(region.load(8).unwrap(), 43);
        }
    })
    .await;
}
