//! Send and Receive: contents, order, immediate data, scatter/gather.

use std::time::Duration;

use futures::future::join_all;
use tokio::join;
use tokio_rdma::SgList;

use crate::common::run::SOON;
use crate::common::{Rig, assert_pattern, exercise, pattern, within};

/// Around one byte, one word, one page, the software link's fragments, and more than a socket takes at a time.
const SIZES: [usize; 5] = [1, 7, 4096, 65_537, 10 << 20];

core_cases!(
    every_size_arrives_whole,
    a_thousand_pipelined_messages_arrive_in_order,
    round_trips_need_no_timer,
    every_operation_works,
);
cases!(
    a_shorter_message_leaves_the_rest_of_the_buffer_alone,
    segments_are_gathered_and_scattered,
    more_segments_than_fit_inline_work,
    an_empty_message_is_a_message,
    immediate_data_is_there_when_sent_and_only_then,
    both_directions_at_once,
    a_shared_buffer_goes_to_many_peers_at_once,
    messages_meet_their_receives_in_order,
    large_buffers_can_be_made_again_and_again,
    messages_that_are_held_do_not_change,
);

async fn every_size_arrives_whole(rig: Rig) {
    let pair = rig.pair().await;
    let most = pair.client.max_message();
    for (seed, len) in (1..).zip(SIZES.into_iter().filter(|&len| len as u64 <= most)) {
        for (from, to) in pair.directions() {
            let (source, target) = (from.filled(len, seed), to.buffer(len));
            let addresses = (source.address(), target.address());
            let (received, sent) = join!(to.receive(target), from.send(source));
            let (received, sent) = (received.unwrap(), sent.unwrap());
            assert_eq!((received.len, received.immediate, received.in_buffer), (len, None, true));
            assert_pattern(received.message(), seed);
            assert_pattern(&sent, seed);
            assert_eq!((sent.address(), received.buffer.address()), addresses, "the very buffers come back");
        }
    }
}

async fn every_operation_works(rig: Rig) {
    exercise(&rig.pair().await).await;
}

async fn a_thousand_pipelined_messages_arrive_in_order(rig: Rig) {
    const COUNT: u64 = 1000;
    let pair = rig.pair().await;
    let sends = (0..COUNT).map(|number| {
        let from = &pair.client;
        let len = 8 + (number as usize * 37) % 200;
        let mut buffer = from.filled(len, number);
        buffer[..8].copy_from_slice(&number.to_le_bytes());
        from.send(buffer)
    });
    let receive = async {
        let to = &pair.server;
        // Several posted ahead, and in between none: both ways of meeting a message.
        let mut expected = 0;
        while expected < COUNT {
            let window: Vec<_> = (0..50).map(|_| to.receive(to.buffer(256))).collect();
            for received in join_all(window).await {
                let received = received.unwrap();
                let message = received.message();
                assert_eq!(message[..8], expected.to_le_bytes());
                assert_eq!(message.len(), 8 + (expected as usize * 37) % 200);
                assert_eq!(message[8..], pattern(message.len(), expected)[8..]);
                expected += 1;
            }
        }
    };
    let (sent, ()) = join!(join_all(sends), receive);
    assert!(sent.into_iter().all(|sent| sent.is_ok()));
    assert_eq!((pair.client.stats().sends, pair.server.stats().receives), (COUNT, COUNT));
}

/// A wake-up that is lost once is found by no timer: there is none, so this would hang.
async fn round_trips_need_no_timer(rig: Rig) {
    const COUNT: u64 = 300;
    let pair = rig.pair().await;
    let server = pair.server.clone();
    let echo = tokio::spawn(async move {
        let mut buffer = server.buffer(64);
        for _ in 0..COUNT {
            buffer = server.receive(buffer).await.unwrap().buffer;
            buffer = server.send(buffer).await.unwrap();
        }
    });
    let client = &pair.client;
    let (mut out, mut back) = (client.buffer(64), client.buffer(64));
    for round in 0..COUNT {
        out[..8].copy_from_slice(&round.to_le_bytes());
        let (received, sent) = join!(client.receive(back), client.send(out));
        (back, out) = (received.unwrap().buffer, sent.unwrap());
        assert_eq!(back[..], out[..]);
        if round % 100 == 99 {
            // Long enough for every driver to have gone to sleep.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    within(SOON, echo).await.unwrap();
}

async fn a_shorter_message_leaves_the_rest_of_the_buffer_alone(rig: Rig) {
    let pair = rig.pair().await;
    let (received, sent) =
        join!(pair.server.receive(pair.server.filled(100, 1)), pair.client.send(pair.client.filled(13, 2)));
    let received = received.unwrap();
    sent.unwrap();
    assert_eq!((received.len, received.buffer.len()), (13, 100));
    assert_pattern(received.message(), 2);
    assert_eq!(received.buffer[13..], pattern(100, 1)[13..]);
}

async fn segments_are_gathered_and_scattered(rig: Rig) {
    let pair = rig.pair().await;
    let (from, to) = (&pair.client, &pair.server);
    let whole = pattern(70_000, 9);
    let gather = [1, 69_000, 0, 999];
    let scatter = [333, 0, 66_000, 4000];
    let mut rest = &whole[..];
    let source: SgList = gather
        .iter()
        .map(|&len| {
            if len == 0 {
                return from.empty().into();
            }
            let (part, after) = rest.split_at(len);
            rest = after;
            let buffer = from.domain.register(part.to_vec()).unwrap();
            if len % 2 == 0 { tokio_rdma::SgSegment::from(buffer.freeze()) } else { buffer.into() }
        })
        .collect();
    assert_eq!((source.len(), source.len_bytes()), (4, 70_000));
    let target: SgList = scatter.iter().map(|&len| if len == 0 { to.empty() } else { to.buffer(len) }).collect();

    let (received, sent) = join!(to.receive(target), from.send(source));
    let (received, sent) = (received.unwrap(), sent.unwrap());
    assert_eq!(sent.len_bytes(), 70_000);
    assert_eq!((received.len, received.buffer.len()), (70_000, 4));
    let mut arrived = Vec::new();
    received.buffer.iter().for_each(|segment| arrived.extend_from_slice(segment));
    assert_eq!(arrived[..70_000], whole[..]);
    assert_eq!(arrived[70_000..], [0; 333], "behind the message nothing changes");
}

async fn more_segments_than_fit_inline_work(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.max_send_sge(16).max_receive_sge(16)).await;
    let (from, to) = (&pair.client, &pair.server);
    let source: SgList = (0..16).map(|at| from.filled(100 + at, at as u64)).collect();
    let target: SgList = (0..16).map(|at| to.buffer(100 + at)).collect();
    let (received, sent) = join!(to.receive(target), from.send(source));
    sent.unwrap();
    for (at, segment) in (0..).zip(received.unwrap().buffer.iter()) {
        assert_pattern(segment, at);
    }
}

async fn an_empty_message_is_a_message(rig: Rig) {
    let pair = rig.pair().await;
    for (from, to) in pair.directions() {
        // An empty buffer, an empty list, a list of empty buffers, each into room and into none.
        let (received, sent) = join!(to.receive(to.filled(10, 1)), from.send(from.empty()));
        let received = received.unwrap();
        assert_eq!((received.len, received.in_buffer, received.message()), (0, true, &[][..]));
        assert_pattern(&received.buffer, 1);
        assert_eq!(sent.unwrap().len(), 0);

        let (received, sent) = join!(to.receive(SgList::new()), from.send_with_immediate(SgList::new(), 5));
        let received = received.unwrap();
        assert_eq!((received.len, received.immediate), (0, Some(5)));
        sent.unwrap();

        let (received, sent) = join!(to.receive(to.empty()), from.send(SgList::new().with(from.empty())));
        assert_eq!(received.unwrap().len, 0);
        assert_eq!(sent.unwrap().len(), 1);
    }
    exercise(&pair).await;
}

async fn immediate_data_is_there_when_sent_and_only_then(rig: Rig) {
    const COUNT: u32 = 1000;
    let pair = rig.pair().await;
    let mut random = fastrand::Rng::with_seed(1);
    // 0 and the largest value are values, too, and each byte of it has its place.
    let expected: Vec<Option<u32>> = (0..COUNT)
        .map(|at| match at {
            0 => Some(0),
            1 => Some(u32::MAX),
            2 => Some(0x0102_0304),
            _ => random.bool().then(|| random.u32(..)),
        })
        .collect();
    let send = async {
        let mut buffer = pair.client.buffer(4);
        for immediate in &expected {
            buffer = match immediate {
                Some(immediate) => pair.client.send_with_immediate(buffer, *immediate).await.unwrap(),
                None => pair.client.send(buffer).await.unwrap(),
            };
        }
    };
    let receive = async {
        let mut buffer = pair.server.buffer(4);
        for (at, immediate) in expected.iter().enumerate() {
            let received = pair.server.receive(buffer).await.unwrap();
            assert_eq!(received.immediate, *immediate, "message {at}");
            buffer = received.buffer;
        }
    };
    join!(send, receive);
}

async fn both_directions_at_once(rig: Rig) {
    const COUNT: u64 = 200;
    let pair = rig.pair().await;
    let one_way = |(from, to): (&crate::common::End, &crate::common::End)| {
        let (from, to) = (from.clone(), to.clone());
        async move {
            let send = async {
                for number in 0..COUNT {
                    from.send(from.filled(5000, number)).await.unwrap();
                }
            };
            let receive = async {
                for number in 0..COUNT {
                    assert_pattern(to.receive(to.buffer(5000)).await.unwrap().message(), number);
                }
            };
            join!(send, receive);
        }
    };
    let [there, back] = pair.directions().map(|direction| tokio::spawn(one_way(direction)));
    there.await.unwrap();
    back.await.unwrap();
}

async fn a_shared_buffer_goes_to_many_peers_at_once(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    let mut pairs = Vec::new();
    for _ in 0..4 {
        pairs.push(rig.connect(&client, &server).await);
    }
    let page = pairs[0].client.filled(100_000, 3).freeze();
    let transfers = pairs.iter().map(|pair| async {
        let (received, sent) = join!(pair.server.receive(pair.server.buffer(100_000)), pair.client.send(page.clone()));
        assert_pattern(received.unwrap().message(), 3);
        drop(sent.unwrap());
    });
    join_all(transfers).await;
    assert_eq!(page.try_into_buffer().expect("every clone came back").len(), 100_000);
}

async fn messages_meet_their_receives_in_order(rig: Rig) {
    let pair = rig.pair().await;
    let (from, to) = (&pair.client, &pair.server);
    let mut first = to.receive(to.buffer(8));
    let mut second = to.receive(to.buffer(8));
    // Posted in the other order than made: posting is what counts.
    second.try_post().unwrap();
    first.try_post().unwrap();
    from.send_number(1).await;
    from.send_number(2).await;
    let (first, second) = join!(first, second);
    assert_eq!(second.unwrap().message(), 1u64.to_le_bytes());
    assert_eq!(first.unwrap().message(), 2u64.to_le_bytes());
}

/// A second region of this size once failed elsewhere, since the first one's range was still taken.
async fn large_buffers_can_be_made_again_and_again(rig: Rig) {
    let pair = rig.pair().await;
    let (from, to) = (&pair.client, &pair.server);
    let len = (44 << 20).min(pair.client.max_message() as usize);
    for round in 0..2u8 {
        let (mut source, target) = (from.buffer(len), to.buffer(len));
        source[len - 1] = round + 1;
        let (received, sent) = join!(to.receive(target), from.send(source));
        sent.unwrap();
        assert_eq!(received.unwrap().message()[len - 1], round + 1);
    }
    assert_eq!(from.domain.stats().live_regions, 0);
    assert_eq!(to.domain.stats().live_regions, 0);
}

/// Released in any order, while the sender goes on: what somebody still holds is never overwritten.
async fn messages_that_are_held_do_not_change(rig: Rig) {
    const COUNT: u64 = 500;
    let pair = rig.pair().await;
    let server = pair.server.clone();
    let receiving = tokio::spawn(async move {
        let pool = server.pool(300, 24);
        let mut random = fastrand::Rng::with_seed(12);
        let mut held = Vec::new();
        for number in 0..COUNT {
            if held.len() == 20 {
                let (old, received): (u64, tokio_rdma::op::Received<_>) = held.swap_remove(random.usize(..20));
                assert_pattern(received.message(), old);
            }
            held.push((number, server.receive(pool.get().await).await.unwrap()));
        }
        held.iter().for_each(|(number, received)| assert_pattern(received.message(), *number));
    });
    let sends = (0..COUNT).map(|number| pair.client.send(pair.client.filled(300, number)));
    for sent in join_all(sends).await {
        sent.unwrap();
    }
    within(SOON, receiving).await.unwrap();
}
