//! Connections as byte streams: every byte once, in order, whatever is polled when.

use std::future::Future;
use std::io::IoSlice;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::join;
use tokio_rdma::RdmaStream;
use tokio_rdma::stream::StreamBuilder;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use crate::common::run::SOON;
use crate::common::{Pair, Rig, assert_pattern, eventually, holds_for, pattern, poll_once, within, yields};

core_cases!(
    both_write_8_mib_before_either_reads,
    many_streams_at_once_carry_random_chunks,
    small_messages_go_back_and_forth,
);
cases!(
    one_credit_is_enough,
    a_stream_runs_with_every_combination_of_small_settings,
    ends_with_different_settings_meet,
    a_short_send_queue_is_enough,
    a_slow_reader_holds_the_writer_up,
    a_writer_goes_on_when_the_reader_comes_back,
    what_lacked_credits_goes_without_being_polled,
    cancelled_reads_lose_nothing,
    cancelled_writes_write_nothing,
    nothing_to_read_or_write_is_no_work,
    gathered_writes_keep_their_order,
    copies_in_both_directions,
    codecs_work,
    halves_run_in_two_tasks,
    one_sided_operations_go_beside_a_stream,
    any_interleaving_keeps_every_byte,
);

const MIB: usize = 1 << 20;

/// A stream of each end.
pub fn streams(pair: &Pair, settings: StreamBuilder) -> (RdmaStream, RdmaStream) {
    streams_with(pair, settings.clone(), settings)
}

fn streams_with(pair: &Pair, client: StreamBuilder, server: StreamBuilder) -> (RdmaStream, RdmaStream) {
    let client = client.from_connection(pair.client.connection.clone()).unwrap();
    (client, server.from_connection(pair.server.connection.clone()).unwrap())
}

async fn both_write_8_mib_before_either_reads(rig: Rig) {
    let (mut one, mut other) = streams(&rig.pair().await, RdmaStream::builder());
    let (left, right) = (pattern(8 * MIB, 1), pattern(8 * MIB, 2));
    let (written, written_too) = join!(one.write_all(&left), other.write_all(&right));
    written.unwrap();
    written_too.unwrap();
    let (mut from_left, mut from_right) = (vec![0; 8 * MIB], vec![0; 8 * MIB]);
    let (read, read_too) = join!(one.read_exact(&mut from_right), other.read_exact(&mut from_left));
    read.unwrap();
    read_too.unwrap();
    assert_pattern(&from_left, 1);
    assert_pattern(&from_right, 2);
}

/// Writes the pattern in chunks of random length.
async fn write_chunks(mut out: impl AsyncWrite + Unpin, len: usize, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let bytes = pattern(len, seed);
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let (chunk, after) = rest.split_at(random.usize(1..=rest.len().min(50_000)));
        out.write_all(chunk).await.unwrap();
        rest = after;
        match random.u8(..8) {
            0 => out.flush().await.unwrap(),
            1 => tokio::task::yield_now().await,
            _ => {}
        }
    }
    out.shutdown().await.unwrap();
}

/// Reads to the end in chunks of random length, and compares.
async fn read_chunks(mut inward: impl AsyncRead + Unpin, len: usize, seed: u64) {
    let mut random = fastrand::Rng::with_seed(!seed);
    let mut bytes = Vec::new();
    let mut chunk = vec![0; 60_000];
    loop {
        let most = random.usize(1..=chunk.len());
        match inward.read(&mut chunk[..most]).await.unwrap() {
            0 => break,
            count => bytes.extend_from_slice(&chunk[..count]),
        }
        if random.u8(..8) == 0 {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(bytes.len(), len);
    assert_pattern(&bytes, seed);
}

/// Both directions of both ends, to the end.
async fn exchange(one: RdmaStream, other: RdmaStream, len: usize, seed: u64) {
    let (read, write) = one.into_split();
    let (read_too, write_too) = other.into_split();
    join!(
        write_chunks(write, len, seed),
        write_chunks(write_too, len, seed + 1),
        read_chunks(read, len, seed + 1),
        read_chunks(read_too, len, seed),
    );
}

async fn many_streams_at_once_carry_random_chunks(rig: Rig) {
    let count = if rig.on_nic() { 8 } else { 64 };
    let (client, server) = (rig.domain(), rig.domain());
    let mut tasks = Vec::new();
    for number in 0..count {
        let pair = rig.connect(&client, &server).await;
        let (one, other) = streams(&pair, RdmaStream::builder().receive_slots(4).send_buffers(2).frame_len(8192));
        tasks.push(tokio::spawn(exchange(one, other, 300_000, 2 * number)));
    }
    for task in join_all(tasks).await {
        task.unwrap();
    }
}

async fn small_messages_go_back_and_forth(rig: Rig) {
    let (mut client, mut server) = streams(&rig.pair().await, RdmaStream::builder());
    let echo = tokio::spawn(async move {
        let mut bytes = [0; 64];
        while server.read_exact(&mut bytes).await.is_ok() {
            server.write_all(&bytes).await.unwrap();
        }
    });
    for round in 0..500 {
        let sent = pattern(64, round);
        client.write_all(&sent).await.unwrap();
        let mut back = [0; 64];
        client.read_exact(&mut back).await.unwrap();
        assert_eq!(back[..], sent[..]);
    }
    client.shutdown().await.unwrap();
    within(SOON, echo).await.unwrap();
}

async fn one_credit_is_enough(rig: Rig) {
    let settings = RdmaStream::builder().receive_slots(1).send_buffers(1).frame_len(1000);
    let (one, other) = streams(&rig.pair().await, settings.clone());
    exchange(one, other, 200_000, 1).await;
    // And without a place for what nobody reads.
    let (one, other) = streams(&rig.pair().await, settings.receive_limit(0));
    exchange(one, other, 200_000, 3).await;
}

async fn a_stream_runs_with_every_combination_of_small_settings(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    for slots in 1..5 {
        for buffers in [1, 3] {
            for limit in [0, 100, MIB] {
                let settings = RdmaStream::builder().receive_slots(slots).send_buffers(buffers).receive_limit(limit);
                let (one, other) = streams(&rig.connect(&client, &server).await, settings.frame_len(64));
                within(SOON, exchange(one, other, 5000, u64::from(slots))).await;
            }
        }
    }
}

async fn ends_with_different_settings_meet(rig: Rig) {
    let small = RdmaStream::builder().frame_len(100).receive_slots(2).send_buffers(1);
    let large = RdmaStream::builder().frame_len(100_000).receive_slots(30).send_buffers(20);
    let (one, other) = streams_with(&rig.pair().await, small.clone(), large.clone());
    exchange(one, other, 100_000, 1).await;
    let (one, other) = streams_with(&rig.pair().await, large, small);
    exchange(one, other, 100_000, 3).await;
}

async fn a_short_send_queue_is_enough(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(1)).await;
    let (one, other) = streams(&pair, RdmaStream::builder().frame_len(5000));
    exchange(one, other, 500_000, 1).await;
}

async fn a_slow_reader_holds_the_writer_up(rig: Rig) {
    const FRAME: usize = 1000;
    let settings = RdmaStream::builder().frame_len(FRAME).receive_slots(4).send_buffers(2).receive_limit(10 * FRAME);
    let (mut one, mut other) = streams(&rig.pair().await, settings);
    let bytes = pattern(100 * FRAME, 1);
    let mut taken = 0;
    // The slots, the limit, and what waits for credits on this side.
    let most = (4 + 10 + 1) * FRAME;
    while taken < most {
        taken += within(SOON, one.write(&bytes[taken..(taken + FRAME).min(most)])).await.unwrap();
    }
    let mut refused = Box::pin(one.write(&bytes[taken..]));
    holds_for(Duration::from_millis(30), || poll_once(&mut refused).is_pending()).await;
    drop(refused);
    let writing = async {
        one.write_all(&bytes[taken..]).await.unwrap();
        one.shutdown().await.unwrap();
    };
    let reading = async {
        let mut all = Vec::new();
        let mut piece = [0; 700];
        loop {
            match other.read(&mut piece).await.unwrap() {
                0 => break,
                count => all.extend_from_slice(&piece[..count]),
            }
            yields(3).await;
        }
        assert_eq!(all.len(), bytes.len());
        assert_pattern(&all, 1);
    };
    within(SOON, async { join!(writing, reading) }).await;
}

/// The reader's last poll leaves a waker behind that nobody answers.
async fn a_writer_goes_on_when_the_reader_comes_back(rig: Rig) {
    let (mut one, mut other) = streams(&rig.pair().await, RdmaStream::builder().receive_slots(4).frame_len(4096));
    for round in 0..20 {
        let mut byte = [0; 1];
        assert!(poll_once(&mut Box::pin(other.read(&mut byte))).is_pending());
        let sent = pattern(100_000, round);
        // More than the slots hold, so somebody else than the reader has to take it in.
        within(SOON, one.write_all(&sent)).await.unwrap();
        let mut received = vec![0; sent.len()];
        within(SOON, other.read_exact(&mut received)).await.unwrap();
        assert_pattern(&received, round);
    }
}

async fn what_lacked_credits_goes_without_being_polled(rig: Rig) {
    for slots in [1, 2, 4] {
        let settings = RdmaStream::builder().frame_len(100).receive_slots(slots).receive_limit(0);
        let (mut one, mut other) = streams(&rig.pair().await, settings);
        // The receive behind this message is one that nobody has waited for.
        other.write_all(b"x").await.unwrap();
        assert_eq!(one.read_u8().await.unwrap(), b'x');
        // The last message finds no slot and waits here: it was written, so it arrives, though nobody comes back for it.
        let bytes = pattern(100 * (slots as usize + 1), 1);
        for piece in bytes.chunks(100) {
            within(SOON, one.write_all(piece)).await.unwrap();
        }
        let mut received = vec![0; bytes.len()];
        within(SOON, other.read_exact(&mut received)).await.unwrap();
        assert_pattern(&received, 1);
        drop(one);
    }
}

async fn cancelled_reads_lose_nothing(rig: Rig) {
    let (one, mut other) = streams(&rig.pair().await, RdmaStream::builder().receive_slots(3).frame_len(500));
    let writing = tokio::spawn(write_chunks(one, 200_000, 1));
    let mut random = fastrand::Rng::with_seed(2);
    let mut all = Vec::new();
    let mut piece = [0; 900];
    loop {
        // Polled once or twice, and dropped if that was not enough.
        let most = random.usize(1..=piece.len());
        let mut read = Box::pin(other.read(&mut piece[..most]));
        let mut done = poll_once(&mut read);
        if done.is_pending() && random.bool() {
            tokio::task::yield_now().await;
            done = poll_once(&mut read);
        }
        drop(read);
        match done {
            std::task::Poll::Ready(count) => match count.unwrap() {
                0 => break,
                count => all.extend_from_slice(&piece[..count]),
            },
            std::task::Poll::Pending => tokio::task::yield_now().await,
        }
    }
    assert_eq!(all.len(), 200_000);
    assert_pattern(&all, 1);
    writing.await.unwrap();
}

async fn cancelled_writes_write_nothing(rig: Rig) {
    let (mut one, other) = streams(&rig.pair().await, RdmaStream::builder().receive_slots(3).frame_len(500));
    let reading = tokio::spawn(read_chunks(other, 200_000, 1));
    let bytes = pattern(200_000, 1);
    let mut random = fastrand::Rng::with_seed(2);
    let mut at = 0;
    while at < bytes.len() {
        let end = bytes.len().min(at + random.usize(1..3000));
        let mut write = Box::pin(one.write(&bytes[at..end]));
        let done = poll_once(&mut write);
        drop(write);
        match done {
            std::task::Poll::Ready(count) => at += count.unwrap(),
            // One that was pending and took something would put these bytes into the stream twice.
            std::task::Poll::Pending => tokio::task::yield_now().await,
        }
    }
    one.shutdown().await.unwrap();
    within(SOON, reading).await.unwrap();
}

async fn nothing_to_read_or_write_is_no_work(rig: Rig) {
    let (mut one, mut other) = streams(&rig.pair().await, RdmaStream::builder());
    for _ in 0..1000 {
        assert_eq!(one.write(&[]).await.unwrap(), 0);
        assert_eq!(one.write_vectored(&[IoSlice::new(&[]), IoSlice::new(&[])]).await.unwrap(), 0);
        assert_eq!(other.read(&mut []).await.unwrap(), 0);
    }
    one.flush().await.unwrap();
    one.write_all(b"x").await.unwrap();
    assert_eq!(other.read(&mut []).await.unwrap(), 0);
    assert_eq!(other.read_u8().await.unwrap(), b'x');
}

async fn gathered_writes_keep_their_order(rig: Rig) {
    let (mut one, mut other) = streams(&rig.pair().await, RdmaStream::builder().frame_len(64));
    assert!(one.is_write_vectored());
    // What is written before the peer has said hello waits.
    other.write_all(b"x").await.unwrap();
    one.read_u8().await.unwrap();
    let bytes = pattern(500, 1);
    let parts = [&bytes[..1], &[], &bytes[1..64], &bytes[64..300], &[], &bytes[300..]].map(IoSlice::new);
    let count = one.write_vectored(&parts).await.unwrap();
    assert!(count > 64, "more than one message's worth: {count}");
    one.write_all(&bytes[count..]).await.unwrap();
    one.shutdown().await.unwrap();
    let mut received = Vec::new();
    other.read_to_end(&mut received).await.unwrap();
    assert_eq!(received.len(), 500);
    assert_pattern(&received, 1);
}

async fn copies_in_both_directions(rig: Rig) {
    let (client, mut near) = streams(&rig.pair().await, RdmaStream::builder());
    let (mut far, server) = streams(&rig.pair().await, RdmaStream::builder());
    let proxy = tokio::spawn(async move { copy_bidirectional(&mut near, &mut far).await.unwrap() });
    exchange(client, server, MIB, 1).await;
    assert_eq!(within(SOON, proxy).await.unwrap(), (MIB as u64, MIB as u64));
}

async fn codecs_work(rig: Rig) {
    let (one, other) = streams(&rig.pair().await, RdmaStream::builder().frame_len(300));
    let mut out = Framed::new(one, LengthDelimitedCodec::new());
    let mut inward = Framed::new(other, LengthDelimitedCodec::new());
    let writing = async {
        for len in 0..400usize {
            out.feed(Bytes::from(pattern(7 * len, len as u64))).await.unwrap();
        }
        SinkExt::<Bytes>::close(&mut out).await.unwrap();
    };
    let reading = async {
        for len in 0..400usize {
            let message = inward.next().await.unwrap().unwrap();
            assert_eq!(message.len(), 7 * len);
            assert_pattern(&message, len as u64);
        }
        assert!(inward.next().await.is_none());
    };
    join!(writing, reading);
}

async fn halves_run_in_two_tasks(rig: Rig) {
    let (one, other) = streams(&rig.pair().await, RdmaStream::builder().receive_slots(2));
    let (read, write) = one.into_split();
    let (read_too, write_too) = tokio::io::split(other);
    let spawn = |task: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>| tokio::spawn(task);
    let tasks = [
        spawn(Box::pin(write_chunks(write, 3 * MIB, 1))),
        spawn(Box::pin(write_chunks(write_too, 3 * MIB, 2))),
        spawn(Box::pin(read_chunks(read, 3 * MIB, 2))),
        spawn(Box::pin(read_chunks(read_too, 3 * MIB, 1))),
    ];
    for task in tasks {
        within(SOON, task).await.unwrap();
    }
}

async fn one_sided_operations_go_beside_a_stream(rig: Rig) {
    let pair = rig.pair().await;
    let (mut one, mut other) = streams(&pair, RdmaStream::builder().frame_len(2000));
    let region = pair.server.exposed(4096);
    let beside = async {
        for seed in 0..50 {
            pair.client.write(pair.client.filled(4096, seed), &region.remote()).await.unwrap();
            assert_pattern(&pair.client.fetch(&region.remote()).await, seed);
        }
    };
    join!(beside, write_chunks(&mut one, 300_000, 1), read_chunks(&mut other, 300_000, 1));
    drop((one, other));
    let closed = || pair.client.close_reason().is_some() && pair.server.close_reason().is_some();
    eventually(closed, || "a stream that is dropped ends its connection").await;
}

/// What proptest finds is shrunk over fresh connections.
async fn any_interleaving_keeps_every_byte(rig: Rig) {
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let count = if rig.on_nic() { 8 } else { 64 };
    let mut runner = TestRunner::new(ProptestConfig { cases: count, failure_persistence: None, ..Default::default() });
    let (client, server) = (rig.domain(), rig.domain());
    let steps = (
        1u32..4,
        1u32..3,
        prop_oneof![Just(0usize), Just(300), Just(MIB)],
        proptest::collection::vec((0u8..6, 1usize..400), 1..80),
    );
    for _ in 0..count {
        let tree = steps.new_tree(&mut runner).unwrap();
        let (slots, buffers, limit, steps) = tree.current();
        let pair = rig.connect(&client, &server).await;
        let settings = RdmaStream::builder().receive_slots(slots).send_buffers(buffers).receive_limit(limit);
        let (one, other) = streams(&pair, settings.frame_len(100));
        let told = format!("slots {slots}, buffers {buffers}, limit {limit}, steps {steps:?}");
        let interleaved = std::panic::AssertUnwindSafe(within(SOON, interleave(one, other, &steps)));
        if let Err(panic) = futures::FutureExt::catch_unwind(interleaved).await {
            eprintln!("failed with {told}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Polls each step once: writes, reads and flushes of both ends. Then everything that was written is read.
async fn interleave(mut one: RdmaStream, mut other: RdmaStream, steps: &[(u8, usize)]) {
    let source = [pattern(40_000, 1), pattern(40_000, 2)];
    let (mut sent, mut got) = ([0; 2], [Vec::new(), Vec::new()]);
    let mut piece = [0; 400];
    for &(action, len) in steps {
        let side = usize::from(action % 2);
        let stream = if side == 0 { &mut one } else { &mut other };
        match action / 2 {
            0 => {
                if let std::task::Poll::Ready(count) =
                    poll_once(&mut Box::pin(stream.write(&source[side][sent[side]..sent[side] + len])))
                {
                    sent[side] += count.unwrap();
                }
            }
            1 => {
                if let std::task::Poll::Ready(count) = poll_once(&mut Box::pin(stream.read(&mut piece[..len]))) {
                    let count = count.unwrap();
                    got[1 - side].extend_from_slice(&piece[..count]);
                }
            }
            _ => drop(poll_once(&mut Box::pin(stream.flush()))),
        }
        if len % 3 == 0 {
            tokio::task::yield_now().await;
        }
    }
    let finish = |stream: RdmaStream, mut got: Vec<u8>| async move {
        let (mut read, mut write) = stream.into_split();
        let reading = async {
            read.read_to_end(&mut got).await.unwrap();
            got
        };
        let (got, ended) = join!(reading, write.shutdown());
        ended.unwrap();
        got
    };
    let [from_one, from_other] = got;
    let (from_other, from_one) = join!(finish(one, from_other), finish(other, from_one));
    assert_eq!([from_one.len(), from_other.len()], sent);
    assert_pattern(&from_one, 1);
    assert_pattern(&from_other, 2);
}
