//! Buffers come back: the same memory with the same bytes, in every kind of error.

use futures::future::join_all;
use tokio::join;
use tokio_rdma::op::OpError;
use tokio_rdma::{Access, Buffer, CloseReason, Error, RemoteRegion, SgList, SharedBuffer, WcStatus};

use crate::common::{End, Pair, Rig, assert_pattern, eventually};

cases!(
    refused_before_posting,
    on_a_closed_connection,
    flushed_when_this_side_closes,
    flushed_when_the_peer_closes,
    flushed_when_another_operation_fails,
    in_the_error_of_a_failed_completion,
    lists_and_shared_buffers_too,
    refused_by_try_post,
    question_mark_drops_it,
    pooled_buffers_return_to_their_pool,
);

/// Remembers a buffer, to see that it is the one that came back.
struct Memo {
    address: u64,
    len: usize,
    seed: u64,
}

fn memo(end: &End, len: usize, seed: u64) -> (Buffer, Memo) {
    let buffer = end.filled(len, seed);
    let memo = Memo { address: buffer.address(), len, seed };
    (buffer, memo)
}

impl Memo {
    #[track_caller]
    fn matches(&self, buffer: Option<Buffer>) {
        let buffer = buffer.expect("the buffer comes back");
        assert_eq!((buffer.address(), buffer.len()), (self.address, self.len));
        assert_pattern(&buffer, self.seed);
    }

    #[track_caller]
    fn came_back(&self, error: OpError<Buffer>, expected: impl FnOnce(&Error) -> bool) {
        let (error, buffer) = error.into_parts();
        assert!(expected(&error), "{error:?}");
        self.matches(buffer);
    }
}

/// One operation of each kind that takes a buffer, started and awaited; none of them succeeds.
async fn all_fail(end: &End, remote: &RemoteRegion, expected: impl Fn(&Error) -> bool) {
    let (buffer, of_send) = memo(end, 10, 1);
    let send = end.send(buffer);
    let (buffer, of_imm) = memo(end, 10, 2);
    let imm = end.send_with_immediate(buffer, 0);
    let (buffer, of_receive) = memo(end, 10, 3);
    let receive = end.receive(buffer);
    let (buffer, of_write) = memo(end, 10, 4);
    let write = end.write(buffer, remote);
    let (buffer, of_notice) = memo(end, 10, 5);
    let notice = end.write_with_immediate(buffer, remote, 0);
    let (buffer, of_read) = memo(end, 10, 6);
    let read = end.read(buffer, remote);
    let (send, imm, receive, write, notice, read, add, swap) =
        join!(send, imm, receive, write, notice, read, end.fetch_add(remote, 1), end.compare_swap(remote, 0, 1));
    of_send.came_back(send.unwrap_err(), &expected);
    of_imm.came_back(imm.unwrap_err(), &expected);
    of_receive.came_back(receive.unwrap_err(), &expected);
    of_write.came_back(write.unwrap_err(), &expected);
    of_notice.came_back(notice.unwrap_err(), &expected);
    of_read.came_back(read.unwrap_err(), &expected);
    assert!(expected(&add.unwrap_err()));
    assert!(expected(&swap.unwrap_err()));
}

/// Nothing of them is left in the queue pair.
fn nothing_left(end: &End) {
    let stats = end.stats();
    assert_eq!((stats.live_slots, stats.in_flight, stats.waiting), (0, 0, 0));
}

async fn refused_before_posting(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let none = pair.server.buffer(8).expose(Access::REMOTE_ATOMIC).unwrap();
    let short = pair.server.exposed(8);
    let access = |error: &Error| matches!(error, Error::Access { .. });
    let limit = |error: &Error| matches!(error, Error::Limit { value: 9, limit: 8, .. });
    let (buffer, memo_of) = memo(one, 9, 1);
    memo_of.came_back(one.write(buffer, &none.remote()).await.unwrap_err(), access);
    let (buffer, memo_of) = memo(one, 9, 2);
    memo_of.came_back(one.read(buffer, &none.remote()).await.unwrap_err(), access);
    let (buffer, memo_of) = memo(one, 9, 3);
    memo_of.came_back(one.write(buffer, &short.remote()).await.unwrap_err(), limit);
    let (buffer, memo_of) = memo(one, 9, 4);
    memo_of.came_back(one.read(buffer, &short.remote()).await.unwrap_err(), limit);
    let (buffer, memo_of) = memo(&pair.server, 9, 5);
    let foreign = |error: &Error| matches!(error, Error::ForeignBuffer { .. });
    memo_of.came_back(one.send(buffer).await.unwrap_err(), foreign);
    let (buffer, memo_of) = memo(&pair.server, 9, 6);
    memo_of.came_back(one.receive(buffer).await.unwrap_err(), foreign);
    crate::common::exercise(&pair).await;
}

async fn on_a_closed_connection(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(10);
    pair.client.close().await;
    all_fail(&pair.client, &region.remote(), |error| matches!(error, Error::Closed { reason: CloseReason::Local, .. }))
        .await;
    nothing_left(&pair.client);
    let here = pair.client.exposed(10);
    pair.server.closed().await;
    all_fail(&pair.server, &here.remote(), |error| matches!(error, Error::Closed { reason: CloseReason::Peer, .. }))
        .await;
    nothing_left(&pair.server);
}

/// The operations are behind a send that nobody receives, so none of them has run when the connection ends.
async fn pending_ones_fail(pair: &Pair, end: impl AsyncFnOnce(&Pair), expected: impl Fn(&Error) -> bool) {
    let one = &pair.client;
    let region = pair.server.exposed(10);
    let (buffer, of_blocking) = memo(one, 10, 9);
    let mut blocking = one.send(buffer);
    blocking.try_post().unwrap();
    let remote = region.remote();
    let (blocking, (), ()) = join!(blocking, all_fail(one, &remote, &expected), async {
        eventually(|| one.stats().in_flight == 9, || one.stats()).await;
        end(pair).await;
    });
    of_blocking.came_back(blocking.unwrap_err(), &expected);
    nothing_left(one);
    assert_eq!(crate::common::rig::contents(&region), [0; 10]);
}

async fn flushed_when_this_side_closes(rig: Rig) {
    let pair = rig.pair().await;
    let closed = |error: &Error| matches!(error, Error::Closed { reason: CloseReason::Local, .. });
    pending_ones_fail(&pair, async |pair| pair.client.close().await, closed).await;
}

async fn flushed_when_the_peer_closes(rig: Rig) {
    let pair = rig.pair().await;
    let closed = |error: &Error| matches!(error, Error::Closed { reason: CloseReason::Peer, .. });
    pending_ones_fail(&pair, async |pair| pair.server.close().await, closed).await;
}

async fn flushed_when_another_operation_fails(rig: Rig) {
    let pair = rig.pair().await;
    let untold = rig.on_nic();
    let closed = |error: &Error| match error {
        Error::Closed { reason: CloseReason::Failed(WcStatus::RemoteAccess), .. } => true,
        // Soft-RoCE has no event for a refused request.
        Error::Closed { reason: CloseReason::Peer | CloseReason::Protocol(_), .. } => untold,
        _ => false,
    };
    // The peer uses a key that is no good, which ends both queue pairs.
    let forged = RemoteRegion::new(0x1000, 8, 0xdead, Access::all()).unwrap();
    let misuse = async |pair: &Pair| {
        pair.server.write(pair.server.buffer(8), &forged).await.unwrap_err();
    };
    pending_ones_fail(&pair, misuse, closed).await;
}

/// What receiver and sender are told of a message that is longer than the buffer.
pub fn too_long(rig: &Rig) -> [WcStatus; 2] {
    // rxe_resp.c of Linux 6.1 answers as if the receive itself were malformed.
    if rig.on_nic() {
        [WcStatus::LocalQpOperation, WcStatus::RemoteOperation]
    } else {
        [WcStatus::LocalLength, WcStatus::RemoteInvalidRequest]
    }
}

async fn in_the_error_of_a_failed_completion(rig: Rig) {
    let status =
        |expected| move |error: &Error| matches!(error, Error::Completion { status, .. } if *status == expected);
    let forged = RemoteRegion::new(0x1000, 10, 0xdead, Access::all()).unwrap();
    let pair = rig.pair().await;
    let (buffer, of_write) = memo(&pair.client, 10, 1);
    of_write.came_back(pair.client.write(buffer, &forged).await.unwrap_err(), status(WcStatus::RemoteAccess));

    let pair = rig.pair().await;
    let (buffer, of_read) = memo(&pair.client, 10, 2);
    of_read.came_back(pair.client.read(buffer, &forged).await.unwrap_err(), status(WcStatus::RemoteAccess));

    // The receive's buffer is too short: both sides learn of it.
    let pair = rig.pair().await;
    let (buffer, of_send) = memo(&pair.client, 11, 3);
    let target = pair.server.buffer(10);
    let address = target.address();
    let (received, sent) = join!(pair.server.receive(target), pair.client.send(buffer));
    let [at_receiver, at_sender] = too_long(&rig);
    of_send.came_back(sent.unwrap_err(), status(at_sender));
    let (error, target) = received.unwrap_err().into_parts();
    assert!(status(at_receiver)(&error), "{error}");
    assert!(error.is_caller_error());
    assert_eq!(target.unwrap().address(), address);
}

async fn lists_and_shared_buffers_too(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    pair.client.close().await;
    let list: SgList = (0..6).map(|at| one.filled(10, at)).collect();
    let list = one.send(list).await.unwrap_err().into_buffer().expect("the list comes back");
    (0..6).zip(list.iter()).for_each(|(seed, segment)| assert_pattern(segment, seed));
    let shared: SharedBuffer = one.filled(10, 7).freeze();
    let back = one.send(shared.clone()).await.unwrap_err().into_buffer().expect("the shared buffer comes back");
    assert_eq!(back.address(), shared.address());
    drop(back);
    assert!(shared.try_into_buffer().is_ok(), "no hidden clone is left");
}

async fn refused_by_try_post(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(8);
    let (buffer, of_write) = memo(one, 9, 1);
    let mut write = one.write(buffer, &region.remote());
    assert!(matches!(write.try_post(), Err(Error::Limit { value: 9, limit: 8, .. })));
    // "The future gives the buffer back when it is polled."
    of_write.matches(write.await.unwrap_err().into_buffer());
    one.close().await;
    let (buffer, of_send) = memo(one, 9, 2);
    let mut send = one.send(buffer);
    assert!(matches!(send.try_post(), Err(Error::Closed { .. })));
    of_send.matches(send.await.unwrap_err().into_buffer());
}

async fn question_mark_drops_it(rig: Rig) {
    async fn attempt(end: &End) -> tokio_rdma::Result<()> {
        end.send(end.buffer(8)).await?;
        Ok(())
    }
    let pair = rig.pair().await;
    pair.client.close().await;
    let before = pair.client.domain.stats();
    assert!(matches!(attempt(&pair.client).await, Err(Error::Closed { .. })));
    assert_eq!(pair.client.domain.stats(), before);
}

async fn pooled_buffers_return_to_their_pool(rig: Rig) {
    let pair = rig.pair().await;
    let (one, other) = (&pair.client, &pair.server);
    let pools = (one.pool(100, 10), other.pool(100, 10));
    let before = (one.domain.stats(), other.domain.stats());
    let transfers = (0..100).map(|_| async {
        let (source, target) = join!(pools.0.get(), pools.1.get());
        let (sent, received) = join!(one.send(source), other.receive(target));
        sent.unwrap();
        received.unwrap();
    });
    join_all(transfers).await;
    assert_eq!((pools.0.available(), pools.1.available()), (10, 10));
    assert_eq!((one.domain.stats(), other.domain.stats()), before);
}
