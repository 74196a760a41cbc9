//! What may cross threads, and what may move while it is polled. All of it is checked when this compiles.

use tokio_rdma::op::*;
use tokio_rdma::*;

fn send<T: Send + ?Sized>() {}
fn sync<T: Sync + ?Sized>() {}
fn unpin<T: Unpin + ?Sized>() {}
fn unwinds<T: std::panic::UnwindSafe>() {}
fn owned<T: 'static>() {}
fn error<T: std::error::Error + Send + Sync + 'static>() {}
fn debug<T: std::fmt::Debug>() {}

macro_rules! handles {
    ($($type:ty),+ $(,)?) => {
        $(
            send::<$type>();
            sync::<$type>();
            unpin::<$type>();
            owned::<$type>();
            debug::<$type>();
        )+
    };
}

#[test]
fn handles_and_values_are_send_sync_and_unpin() {
    handles!(
        Device,
        DeviceBuilder,
        DeviceInfo,
        DeviceLimits,
        Provider,
        Link,
        CompletionMode,
        Address,
        Mtu,
        ProtectionDomain,
        DomainStats,
        MemoryRegion,
        OwnedMemory,
        Access,
        RemoteRegion,
        RemoteTarget,
        Buffer,
        SharedBuffer,
        BufferPool,
        SgList,
        SgSegment,
        ExposedRegion,
        Connection,
        ConnectionBuilder,
        ConnectionId,
        ConnectionStats,
        Listener,
        ListenerBuilder,
        Incoming,
        RdmaStream,
        stream::StreamBuilder,
        stream::OwnedReadHalf,
        stream::OwnedWriteHalf,
        messages::Message,
        messages::Receiver,
        messages::SharedReceiver,
        SharedReceiveQueue,
        SharedReceiveQueueBuilder,
        messages::Sender<Buffer>,
        messages::Sender<SgList>,
        PendingConnection,
        QueuePairEndpoint,
        Batch,
        Received<Buffer>,
        Received<SgList>,
        CloseReason,
        AuthenticationFailure,
        WcStatus,
        Operation,
        topology::Topology,
        topology::PciAddress,
        topology::PciPath,
        topology::Ranking,
        soft::Faults,
        soft::HandshakeStep,
    );
}

#[cfg(feature = "psk")]
#[test]
fn nor_are_keys_and_they_are_not_printed() {
    handles!(PreSharedKey);
    let key = PreSharedKey::new("correct horse battery staple").unwrap();
    assert_eq!(format!("{key:?}"), "PreSharedKey(..)");
    assert!(PreSharedKey::new("too short").unwrap_err().to_string().contains("the limit is 16"));
}

#[cfg(feature = "async-rdma")]
#[test]
fn what_talks_to_async_rdma_is_no_exception() {
    use tokio_rdma::async_rdma::*;
    handles!(Peer, PeerBuilder, PeerStats, PendingPeer, Endpoint, Message, PeerRegion, LentRegion, LeaseEnd);
    // The name is the crate's own listener's, too.
    handles!(tokio_rdma::async_rdma::Listener);
    fn check(domain: &ProtectionDomain, peer: &Peer, region: PeerRegion, lent: LentRegion) {
        fn spawns<T: Send>(_: impl Future<Output = T> + Send) {}
        let buffer = || domain.alloc(1).unwrap();
        let minute = std::time::Duration::from_secs(60);
        spawns(Peer::connect(domain, "127.0.0.1:1"));
        spawns(Peer::builder(domain).listen("127.0.0.1:1"));
        spawns(peer.send(buffer()));
        spawns(peer.receive());
        spawns(peer.request_region(1, 1, minute));
        spawns(peer.receive_region());
        spawns(peer.write(buffer(), &region));
        spawns(peer.read(buffer(), &region));
        spawns(peer.fetch_add(&region, 1));
        spawns(peer.release(region.clone()));
        spawns(peer.give_back(region.clone()));
        spawns(peer.lend(buffer(), Access::REMOTE_READ, minute));
        spawns(lent.ended());
        spawns(lent.reclaim());
    }
    let _ = check;
}

#[test]
fn operations_can_be_spawned_and_moved() {
    handles!(
        SendOp<Buffer>,
        SendOp<SharedBuffer>,
        SendOp<SgList>,
        WriteOp<Buffer>,
        WriteOp<SharedBuffer>,
        WriteOp<SgList>,
        ReadOp<Buffer>,
        ReadOp<SgList>,
        ReceiveOp<Buffer>,
        ReceiveOp<SgList>,
        SharedReceiveOp<Buffer>,
        SharedReceiveOp<SgList>,
        CompareSwapOp,
        FetchAddOp,
        PostBatch,
        Get,
        Reclaim,
    );
    // A deadline holds tokio's timer, which is pinned when it is polled.
    fn timer<T: Send + Sync + 'static + std::fmt::Debug>() {}
    timer::<Timeout<SendOp<Buffer>>>();
    timer::<Timeout<ReceiveOp<SgList>>>();
    timer::<Timeout<SharedReceiveOp<Buffer>>>();
    timer::<Timeout<FetchAddOp>>();
}

#[test]
fn async_functions_can_be_spawned() {
    fn check(domain: &ProtectionDomain, listener: &Listener, connection: &Connection, endpoint: QueuePairEndpoint) {
        fn spawns<T: Send>(_: impl Future<Output = T> + Send) {}
        spawns(Connection::connect(domain, "127.0.0.1:1"));
        spawns(Connection::builder(domain).connect("127.0.0.1:1"));
        spawns(Connection::builder(domain).endpoint("127.0.0.1:0"));
        spawns(async { Connection::builder(domain).endpoint("127.0.0.1:0").await.unwrap().connect(&endpoint).await });
        spawns(Listener::bind(domain, "127.0.0.1:0"));
        spawns(listener.accept());
        spawns(connection.close());
        spawns(connection.closed());
        spawns(connection.shutdown());
        spawns(listener.shutdown(std::time::Duration::ZERO));
        spawns(RdmaStream::connect(domain, "127.0.0.1:1"));
        spawns(RdmaStream::accept(listener));
        spawns(RdmaStream::builder().connect(domain, "127.0.0.1:1"));
    }
    let _ = check;
}

#[test]
fn errors_are_errors() {
    error::<Error>();
    error::<OpError<Buffer>>();
    error::<OpError<SharedBuffer>>();
    error::<OpError<SgList>>();
    error::<BatchError>();
    error::<ExposeError>();
    error::<UnsplitError>();
    // What `?` needs in a function that returns this crate's error, or anybody's.
    fn converts<E: Into<Error>>() {}
    converts::<OpError<Buffer>>();
    converts::<BatchError>();
    converts::<ExposeError>();
    converts::<UnsplitError>();
}

/// `thread::spawn` and `catch_unwind` around a program's own code need not be told that a buffer is fine.
#[test]
fn plain_values_are_unwind_safe() {
    unwinds::<RemoteRegion>();
    unwinds::<QueuePairEndpoint>();
    unwinds::<Address>();
    unwinds::<CloseReason>();
    unwinds::<WcStatus>();
    unwinds::<ConnectionStats>();
    unwinds::<DomainStats>();
}

#[test]
fn small_values_are_copied_and_compared() {
    fn small<T: Copy + Eq + std::hash::Hash + Send + Sync>() {}
    small::<RemoteRegion>();
    small::<Access>();
    small::<WcStatus>();
    small::<Operation>();
    small::<ConnectionId>();
    small::<Provider>();
    small::<Link>();
    fn clones<T: Clone + Eq>() {}
    clones::<QueuePairEndpoint>();
    clones::<Address>();
    clones::<CloseReason>();
    clones::<DeviceInfo>();
    clones::<DeviceLimits>();
    fn shared<T: Clone + Send + Sync>() {}
    shared::<Connection>();
    shared::<SharedReceiveQueue>();
    shared::<Device>();
    shared::<ProtectionDomain>();
    shared::<BufferPool>();
    shared::<SharedBuffer>();
    shared::<MemoryRegion>();
}
