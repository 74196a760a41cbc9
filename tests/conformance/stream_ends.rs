//! How byte streams end: in good order, by halves, and otherwise.

use std::future::{Future, poll_fn};
use std::io::{ErrorKind, Result};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::join;
use tokio::task::coop;
use tokio_rdma::{CloseReason, Error, RdmaStream, WcStatus};

use crate::common::process::{Parent, Second};
use crate::common::run::SOON;
use crate::common::{Pair, Rig, assert_pattern, eventually, holds_for, pattern, poll_once, within};
use crate::streams::streams;

cases!(
    one_direction_ends_and_the_other_goes_on,
    the_end_comes_after_everything,
    shutdown_waits_until_the_peer_has_everything,
    a_peer_that_left_with_everything_fails_no_shutdown,
    a_shutdown_that_was_begun_takes_place,
    a_shutdown_that_was_begun_and_dropped_loses_nothing,
    writing_after_shutdown_fails,
    a_dropped_stream_still_sends_what_was_written,
    a_dropped_write_half_ends_its_direction,
    a_dropped_stream_gives_up_after_its_linger_time,
    a_peer_that_is_dropped_fails_the_writer,
    a_write_after_a_failed_send_says_why,
    a_closed_connection_is_no_end_of_file,
    bytes_before_the_failure_are_read,
    nothing_is_left_behind,
    a_peer_that_is_no_stream_is_told_from_one,
    what_the_protocol_forbids_ends_the_stream,
    settings_out_of_range_are_refused,
);
process_cases!(
    killed_while_a_stream_is_read => reads_until_the_kill, serves_a_stream;
    killed_while_a_stream_is_written => writes_until_the_kill, serves_a_stream;
);

/// The crate's error inside of an I/O error.
fn inner(error: &std::io::Error) -> &Error {
    error.get_ref().expect("it has a source").downcast_ref().expect("of this crate")
}

fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    let error = result.unwrap_err();
    inner(&error);
    error.kind()
}

async fn pair_of_streams(rig: &Rig) -> (Pair, RdmaStream, RdmaStream) {
    let pair = rig.pair().await;
    let (one, other) = streams(&pair, RdmaStream::builder().frame_len(1000));
    (pair, one, other)
}

async fn one_direction_ends_and_the_other_goes_on(rig: Rig) {
    let (_pair, mut one, mut other) = pair_of_streams(&rig).await;
    one.write_all(&pattern(5000, 1)).await.unwrap();
    one.shutdown().await.unwrap();
    let mut request = Vec::new();
    other.read_to_end(&mut request).await.unwrap();
    assert_eq!(request.len(), 5000);
    assert_pattern(&request, 1);
    for round in 0..50 {
        // The end stays the end.
        assert_eq!(other.read(&mut [0; 8]).await.unwrap(), 0);
        other.write_all(&pattern(3000, round)).await.unwrap();
        let mut answer = [0; 3000];
        one.read_exact(&mut answer).await.unwrap();
        assert_pattern(&answer, round);
    }
    other.shutdown().await.unwrap();
    assert_eq!(one.read(&mut [0; 8]).await.unwrap(), 0);
    one.shutdown().await.unwrap();
}

async fn the_end_comes_after_everything(rig: Rig) {
    let (_pair, mut one, mut other) = pair_of_streams(&rig).await;
    let bytes = pattern(100_000, 1);
    let writing = async {
        one.write_all(&bytes).await.unwrap();
        one.shutdown().await.unwrap();
        drop(one);
    };
    let mut received = Vec::new();
    let (_, read) = join!(writing, other.read_to_end(&mut received));
    assert_eq!(read.unwrap(), 100_000);
    assert_pattern(&received, 1);
}

async fn shutdown_waits_until_the_peer_has_everything(rig: Rig) {
    let pair = rig.pair().await;
    let (mut one, mut other) = streams(&pair, RdmaStream::builder().frame_len(100).receive_slots(2).receive_limit(0));
    one.write_all(&pattern(300, 1)).await.unwrap();
    let mut ending = Box::pin(one.shutdown());
    // The third message has no place over there.
    holds_for(Duration::from_millis(20), || poll_once(&mut ending).is_pending()).await;
    let mut received = [0; 300];
    let (ended, read) = within(SOON, async { join!(ending, other.read_exact(&mut received)) }).await;
    ended.unwrap();
    read.unwrap();
    // Everything is there: the connection may go.
    pair.client.close().await;
    assert_eq!(other.read(&mut [0; 1]).await.unwrap(), 0);
    assert_pattern(&received, 1);
}

/// The peer's end lies behind unread bytes, and giving back their credits shows that the peer is gone.
async fn a_peer_that_left_with_everything_fails_no_shutdown(rig: Rig) {
    let pair = rig.pair().await;
    let (mut one, mut other) = streams(&pair, RdmaStream::builder().frame_len(100).receive_slots(2).receive_limit(0));
    one.write_all(b"all").await.unwrap();
    let _begun = poll_once(&mut pin!(one.shutdown()));
    let mut received = Vec::new();
    within(SOON, other.read_to_end(&mut received)).await.unwrap();
    assert_eq!(received, b"all");
    within(SOON, other.write_all(&pattern(200, 1))).await.unwrap();
    within(SOON, other.shutdown()).await.unwrap();
    drop(other);
    within(SOON, pair.client.closed()).await;
    let mut bytes = vec![0; 100];
    one.read_exact(&mut bytes).await.unwrap();
    within(SOON, one.shutdown()).await.unwrap();
    within(SOON, one.read_to_end(&mut bytes)).await.unwrap();
    assert_pattern(&bytes, 1);
}

/// The task has no turn left at the poll that begins it, and there is no other poll.
async fn a_shutdown_that_was_begun_takes_place(rig: Rig) {
    let (_pair, mut one, mut other) = pair_of_streams(&rig).await;
    one.write_all(b"last").await.unwrap();
    let mut received = [0; 4];
    other.read_exact(&mut received).await.unwrap();
    // Nothing is left to be sent, so nothing but the shutdown has the end sent.
    one.flush().await.unwrap();
    poll_fn(|cx| {
        while let Poll::Ready(turn) = coop::poll_proceed(cx) {
            turn.made_progress();
        }
        assert!(pin!(one.shutdown()).poll(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    assert_eq!(within(SOON, other.read(&mut received)).await.unwrap(), 0);
    assert_eq!(kind(one.write(b"x").await), ErrorKind::BrokenPipe);
}

async fn a_shutdown_that_was_begun_and_dropped_loses_nothing(rig: Rig) {
    let pair = rig.pair().await;
    let settings = RdmaStream::builder().frame_len(1000).receive_slots(2).receive_limit(0);
    let (mut one, mut other) = streams(&pair, settings);
    // Three messages, of which two have a place.
    one.write_all(&pattern(3000, 1)).await.unwrap();
    assert!(poll_once(&mut Box::pin(one.shutdown())).is_pending());
    drop(one);
    let mut received = Vec::new();
    within(SOON, other.read_to_end(&mut received)).await.unwrap();
    assert_eq!(received.len(), 3000);
    assert_pattern(&received, 1);
}

async fn writing_after_shutdown_fails(rig: Rig) {
    let (_pair, mut one, mut other) = pair_of_streams(&rig).await;
    one.shutdown().await.unwrap();
    one.shutdown().await.unwrap();
    one.flush().await.unwrap();
    assert_eq!(kind(one.write(b"x").await), ErrorKind::BrokenPipe);
    assert_eq!(kind(one.write(b"").await), ErrorKind::BrokenPipe);
    assert_eq!(other.read(&mut [0; 1]).await.unwrap(), 0);
}

async fn a_dropped_stream_still_sends_what_was_written(rig: Rig) {
    let pair = rig.pair().await;
    let settings = RdmaStream::builder().frame_len(1000).receive_slots(2).receive_limit(0);
    let (mut one, mut other) = streams(&pair, settings);
    // Three messages, of which two have a place.
    one.write_all(&pattern(3000, 1)).await.unwrap();
    drop(one);
    let mut received = Vec::new();
    within(SOON, other.read_to_end(&mut received)).await.unwrap();
    assert_eq!(received.len(), 3000);
    assert_pattern(&received, 1);
    assert_eq!(within(SOON, pair.server.closed()).await, CloseReason::Peer);
}

async fn a_dropped_write_half_ends_its_direction(rig: Rig) {
    let (_pair, one, mut other) = pair_of_streams(&rig).await;
    let (mut read, mut write) = one.into_split();
    write.write_all(b"last").await.unwrap();
    drop(write);
    let mut received = Vec::new();
    within(SOON, other.read_to_end(&mut received)).await.unwrap();
    assert_eq!(received, b"last");
    other.write_all(b"more").await.unwrap();
    let mut answer = [0; 4];
    within(SOON, read.read_exact(&mut answer)).await.unwrap();
    drop(read);
    eventually(|| other.connection().close_reason().is_some(), || "with the second half the connection goes").await;
}

async fn a_dropped_stream_gives_up_after_its_linger_time(rig: Rig) {
    let pair = rig.pair().await;
    let settings = RdmaStream::builder().frame_len(100).receive_slots(1).receive_limit(0);
    let (mut one, mut other) = streams(&pair, settings.linger(Duration::from_millis(50)));
    for _ in 0..2 {
        one.write_all(&pattern(100, 1)).await.unwrap();
    }
    drop(one);
    within(SOON, pair.client.closed()).await;
    // What had arrived is read, and then it is no end.
    let mut received = Vec::new();
    assert_eq!(kind(other.read_to_end(&mut received).await), ErrorKind::ConnectionReset);
    assert_eq!(received.len(), 100);
}

async fn a_peer_that_is_dropped_fails_the_writer(rig: Rig) {
    let (pair, mut one, other) = pair_of_streams(&rig).await;
    drop(other);
    within(SOON, pair.client.closed()).await;
    // It may be told of the end first.
    let writing = async {
        loop {
            if let Err(error) = one.write_all(&[0; 10_000]).await {
                return error;
            }
        }
    };
    let error = within(SOON, writing).await;
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(matches!(inner(&error), Error::Closed { reason: CloseReason::Peer, .. }), "{error}");
    assert_eq!(one.read(&mut [0; 1]).await.unwrap(), 0, "it said that it writes no more");
}

async fn a_write_after_a_failed_send_says_why(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.rnr_retry(1).rnr_timer(Duration::from_millis(1))).await;
    // A peer that says hello, and has a place for this side's hello alone.
    let mut inbox = pair.server.receive(pair.server.buffer(100));
    inbox.try_post().unwrap();
    let settings = RdmaStream::builder().send_buffers(1);
    let mut one = settings.from_connection(pair.client.connection.clone()).unwrap();
    let hello = pair.server.domain.register(HELLO.to_vec()).unwrap();
    pair.server.send_with_immediate(hello, 3 << 30).await.unwrap();
    inbox.await.unwrap();
    let writing = async {
        loop {
            if let Err(error) = one.write(&[0; 100]).await {
                return error;
            }
        }
    };
    let error = within(SOON, writing).await;
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    let cause = CloseReason::Failed(WcStatus::RnrRetryExceeded);
    assert!(matches!(inner(&error), Error::Closed { reason, .. } if *reason == cause), "{error}");
}

async fn a_closed_connection_is_no_end_of_file(rig: Rig) {
    let (pair, mut one, mut other) = pair_of_streams(&rig).await;
    let mut byte = [0; 1];
    let mut reading = Box::pin(other.read(&mut byte));
    assert!(poll_once(&mut reading).is_pending());
    pair.client.close().await;
    assert_eq!(kind(within(SOON, reading).await), ErrorKind::ConnectionReset);
    assert_eq!(kind(other.write(b"x").await), ErrorKind::ConnectionReset);
    assert_eq!(kind(other.shutdown().await), ErrorKind::ConnectionReset);
    assert_eq!(kind(one.read(&mut [0; 1]).await), ErrorKind::ConnectionAborted);
}

async fn bytes_before_the_failure_are_read(rig: Rig) {
    let (pair, mut one, mut other) = pair_of_streams(&rig).await;
    one.write_all(&pattern(4000, 1)).await.unwrap();
    one.flush().await.unwrap();
    // The peer has them once this many receives have ended there.
    eventually(|| pair.client.stats().bytes_sent >= 4000 || sent(&one), || pair.client.stats()).await;
    pair.client.close().await;
    within(SOON, pair.server.closed()).await;
    // The writing direction finds out first.
    assert_eq!(kind(other.write_all(&[0; 100_000]).await), ErrorKind::ConnectionReset);
    let mut received = Vec::new();
    assert_eq!(kind(other.read_to_end(&mut received).await), ErrorKind::ConnectionReset);
    assert_eq!(received.len(), 4000);
    assert_pattern(&received, 1);
}

/// Whether the device is done with all sends of this stream: nothing is in flight but its receives.
fn sent(stream: &RdmaStream) -> bool {
    stream.connection().stats().in_flight <= 20
}

async fn nothing_is_left_behind(rig: Rig) {
    let pair = rig.pair().await;
    let before = [pair.client.domain.stats(), pair.server.domain.stats()];
    let (mut one, mut other) = streams(&pair, RdmaStream::builder());
    one.write_all(&pattern(1 << 20, 1)).await.unwrap();
    other.read_exact(&mut [0; 1000]).await.unwrap();
    drop((one, other));
    let after = || [pair.client.domain.stats(), pair.server.domain.stats()];
    eventually(|| format!("{:?}", after()) == format!("{before:?}"), after).await;
}

async fn a_peer_that_is_no_stream_is_told_from_one(rig: Rig) {
    for immediate in [None, Some(0), Some(u32::MAX)] {
        let pair = rig.pair().await;
        let mut stream = RdmaStream::from_connection(pair.server.connection.clone()).unwrap();
        let message = pair.client.filled(100, 1);
        match immediate {
            None => pair.client.send(message).await.map(drop).unwrap(),
            Some(bits) => pair.client.send_with_immediate(message, bits).await.map(drop).unwrap(),
        }
        let error = within(SOON, stream.read(&mut [0; 1])).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(matches!(inner(&error), Error::Closed { reason: CloseReason::Protocol(_), .. }), "{error}");
        assert_eq!(kind(stream.write(b"x").await), ErrorKind::InvalidData);
        within(SOON, pair.client.closed()).await;
    }
}

const HELLO: [u8; 16] = *b"rdmastr\x01\x00\x00\x10\x00\x00\x00\x00\x04";

async fn what_the_protocol_forbids_ends_the_stream(rig: Rig) {
    const DATA: u32 = 0;
    const CREDITS: u32 = 1 << 30;
    const END: u32 = 2 << 30;
    // After the hello, and what is said of it. The hello gives 4 credits, all of which may be spent by then.
    let cases: [(&[u32], &str); 6] = [
        (&[3 << 30], "hello"),
        (&[DATA | 5], "credits"),
        (&[CREDITS | 5], "credits"),
        (&[END, DATA], "after the end"),
        (&[END, END], "second end"),
        (&[DATA; 3], "without a credit"),
    ];
    for (messages, said) in cases {
        let pair = rig.pair().await;
        let settings = RdmaStream::builder().receive_slots(2).receive_limit(0);
        let mut stream = settings.from_connection(pair.server.connection.clone()).unwrap();
        let mut inbox = pair.client.receive(pair.client.buffer(100));
        inbox.try_post().unwrap();
        let hello = pair.client.domain.register(HELLO.to_vec()).unwrap();
        pair.client.send_with_immediate(hello, 3 << 30).await.unwrap();
        for bits in messages {
            // The stream may end before the last of them.
            let _ = pair.client.send_with_immediate(pair.client.filled(10, 1), *bits).await;
        }
        // The writing direction takes in whatever there is.
        let flushing = async {
            loop {
                if let Err(error) = stream.write_all(&[0; 1 << 16]).await {
                    return error;
                }
            }
        };
        let error = within(SOON, flushing).await;
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(error.to_string().contains(said), "{error}, for {messages:?}");
    }
}

async fn settings_out_of_range_are_refused(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.receive_depth(10)).await;
    let of = || RdmaStream::builder().receive_slots(2);
    for settings in [
        RdmaStream::builder().receive_slots(7),
        of().receive_slots(0),
        of().receive_slots(u32::MAX),
        of().send_buffers(0),
        of().send_buffers(u32::MAX >> 2),
        of().frame_len(15),
        of().frame_len(usize::MAX),
    ] {
        let error = settings.clone().from_connection(pair.client.connection.clone()).unwrap_err();
        assert!(matches!(error, Error::Limit { .. }), "{error}");
        let again = settings.connect(&pair.client.domain, "127.0.0.1:1").await;
        assert!(again.is_err());
    }
    // None of that has used the connection.
    let (mut one, mut other) = streams(&pair, of().receive_slots(6));
    one.write_all(b"x").await.unwrap();
    assert_eq!(other.read_u8().await.unwrap(), b'x');
}

async fn serves_a_stream(rig: Rig, mut parent: Parent) {
    let listener = rig.listener(&rig.domain()).await;
    parent.say(&listener.local_address().to_string());
    let mut stream = RdmaStream::accept(&listener).await.unwrap();
    stream.write_all(&pattern(10_000, 1)).await.unwrap();
    assert_eq!(parent.hear().await, None);
}

async fn meet(rig: &Rig, second: &mut Second) -> RdmaStream {
    let address = second.hear().await;
    let mut stream = RdmaStream::connect(&rig.domain(), address.as_str()).await.unwrap();
    let mut greeting = [0; 10_000];
    stream.read_exact(&mut greeting).await.unwrap();
    assert_pattern(&greeting, 1);
    stream
}

async fn reads_until_the_kill(rig: Rig, mut second: Second) {
    let mut stream = meet(&rig, &mut second).await;
    let mut byte = [0; 1];
    let mut reading = Box::pin(stream.read(&mut byte));
    assert!(poll_once(&mut reading).is_pending());
    second.kill().await;
    assert_eq!(kind(within(SOON, reading).await), ErrorKind::ConnectionReset);
    assert_eq!(kind(stream.write(b"x").await), ErrorKind::ConnectionReset);
}

async fn writes_until_the_kill(rig: Rig, mut second: Second) {
    let mut stream = meet(&rig, &mut second).await;
    let writing = tokio::spawn(async move {
        loop {
            if let Err(error) = stream.write_all(&[0; 100_000]).await {
                return (stream, error);
            }
        }
    });
    tokio::task::yield_now().await;
    second.kill().await;
    let (mut stream, error) = within(SOON, writing).await.unwrap();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    inner(&error);
    assert_eq!(kind(stream.read(&mut [0; 1]).await), ErrorKind::ConnectionReset);
}
