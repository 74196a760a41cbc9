//! Connecting with a bootstrap of one's own: endpoints that are exchanged by any means.

use std::time::{Duration, Instant};

use tokio::join;
use tokio_rdma::{Connection, Error, PendingConnection, ProtectionDomain, QueuePairEndpoint};

use crate::common::rig::AddressKind;
use crate::common::run::SOON;
use crate::common::{End, Pair, Rig, exercise, within};

cases!(
    both_orders_of_calling_work,
    endpoints_survive_their_text_form,
    private_data_goes_both_ways,
    a_wrong_endpoint_is_refused,
    garbage_is_refused,
    a_peer_that_does_not_call_is_a_timeout,
    an_endpoint_that_is_dropped_leaves_nothing,
    a_stranger_does_not_get_in_the_way,
);

async fn pending(rig: &Rig, domain: &ProtectionDomain) -> PendingConnection {
    Connection::builder(domain).setup_timeout(Duration::from_secs(10)).endpoint(rig.address()).await.unwrap()
}

async fn both_orders_of_calling_work(rig: Rig) {
    for order in 0..6 {
        let (one, other) = (rig.domain(), rig.domain());
        let (here, there) = (pending(&rig, &one).await, pending(&rig, &other).await);
        let (of_here, of_there) = (here.endpoint().clone(), there.endpoint().clone());
        // Which of them listens is up to them, so each is late in turn, by various times.
        let pause = |late| tokio::time::sleep(Duration::from_millis(if late { 15 * (order / 2) } else { 0 }));
        let (here, there) = within(SOON, async {
            join!(
                async {
                    pause(order % 2 == 0).await;
                    here.connect(&of_there).await
                },
                async {
                    pause(order % 2 == 1).await;
                    there.connect(&of_here).await
                }
            )
        })
        .await;
        exercise(&Pair { client: End::new(&one, here.unwrap()), server: End::new(&other, there.unwrap()) }).await;
    }
}

async fn endpoints_survive_their_text_form(rig: Rig) {
    let (one, other) = (rig.domain(), rig.domain());
    let (here, there) = (pending(&rig, &one).await, pending(&rig, &other).await);
    assert_ne!(here.endpoint(), there.endpoint());
    assert!(here.endpoint().as_bytes().len() <= QueuePairEndpoint::MAX_LEN);
    let of_here: QueuePairEndpoint = here.endpoint().to_string().parse().unwrap();
    let of_there = QueuePairEndpoint::from_bytes(there.endpoint().as_bytes()).unwrap();
    assert_eq!((&of_here, &of_there), (here.endpoint(), there.endpoint()));
    let (here, there) = within(SOON, async { join!(here.connect(&of_there), there.connect(&of_here)) }).await;
    exercise(&Pair { client: End::new(&one, here.unwrap()), server: End::new(&other, there.unwrap()) }).await;
}

async fn private_data_goes_both_ways(rig: Rig) {
    let (one, other) = (rig.domain(), rig.domain());
    let here = Connection::builder(&one).private_data(*b"here").endpoint(rig.address()).await.unwrap();
    let there = Connection::builder(&other).private_data(*b"there").endpoint(rig.address()).await.unwrap();
    let (of_here, of_there) = (here.endpoint().clone(), there.endpoint().clone());
    let (here, there) = within(SOON, async { join!(here.connect(&of_there), there.connect(&of_here)) }).await;
    assert_eq!(here.unwrap().peer_private_data(), b"there");
    assert_eq!(there.unwrap().peer_private_data(), b"here");
}

async fn a_wrong_endpoint_is_refused(rig: Rig) {
    let domain = rig.domain();
    // The third one is alive, but waits for somebody else.
    let builder = || Connection::builder(&domain).setup_timeout(Duration::from_millis(300));
    for _ in 0..6 {
        let here = builder().endpoint(rig.address()).await.unwrap();
        let there = builder().endpoint(rig.address()).await.unwrap();
        let third = builder().endpoint(rig.address()).await.unwrap();
        let (of_here, of_third) = (here.endpoint().clone(), third.endpoint().clone());
        let (here, there, third) = within(SOON, async {
            // In a circle: nobody's idea of its peer is the peer's idea of it.
            let of_there = there.endpoint().clone();
            join!(here.connect(&of_there), there.connect(&of_third), third.connect(&of_here))
        })
        .await;
        for attempt in [here, there, third] {
            let error = attempt.unwrap_err();
            assert!(matches!(error, Error::Handshake { .. } | Error::Timeout { .. } | Error::Io { .. }), "{error:?}");
        }
    }
    // One's own endpoint is no peer's.
    let here = builder().endpoint(rig.address()).await.unwrap();
    let own = here.endpoint().clone();
    within(SOON, here.connect(&own)).await.unwrap_err();
}

async fn garbage_is_refused(rig: Rig) {
    let domain = rig.domain();
    let mut random = fastrand::Rng::with_seed(6);
    let genuine = pending(&rig, &domain).await.endpoint().as_bytes().to_vec();
    let cut = &genuine[..genuine.len() - 1];
    let mut samples = vec![vec![0], vec![0xff; 128], genuine[..1].to_vec(), genuine[..9].to_vec(), cut.to_vec()];
    for _ in 0..30 {
        samples.push((0..random.usize(1..=128)).map(|_| random.u8(..)).collect());
    }
    for bytes in samples {
        let garbage = QueuePairEndpoint::from_bytes(&bytes).unwrap();
        let here = Connection::builder(&domain)
            .setup_timeout(Duration::from_millis(200))
            .endpoint(rig.address())
            .await
            .unwrap();
        let error = within(SOON, here.connect(&garbage)).await.unwrap_err();
        // A path that is cut short is another path, at which nobody is.
        let elsewhere = rig.setup.address == AddressKind::Unix && bytes == cut;
        assert!(elsewhere || matches!(error, Error::Descriptor { .. }), "{bytes:02x?}: {error:?}");
    }
    assert!(QueuePairEndpoint::from_bytes(&[]).is_err());
    assert!(QueuePairEndpoint::from_bytes(&[0; 129]).is_err());
}

async fn a_peer_that_does_not_call_is_a_timeout(rig: Rig) {
    let domain = rig.domain();
    let limit = Duration::from_millis(100);
    for _ in 0..6 {
        let here = Connection::builder(&domain).setup_timeout(limit).endpoint(rig.address()).await.unwrap();
        let there = pending(&rig, &domain).await;
        let start = Instant::now();
        let error = within(SOON, here.connect(there.endpoint())).await.unwrap_err();
        assert!(matches!(error, Error::Timeout { operation: "connect", .. }), "{error:?}");
        assert!(start.elapsed() >= limit);
    }
}

async fn an_endpoint_that_is_dropped_leaves_nothing(rig: Rig) {
    let (one, other) = (rig.domain(), rig.domain());
    for _ in 0..6 {
        let here =
            Connection::builder(&one).setup_timeout(Duration::from_millis(200)).endpoint(rig.address()).await.unwrap();
        let there = pending(&rig, &other).await;
        let of_there = there.endpoint().clone();
        drop(there);
        within(SOON, here.connect(&of_there)).await.unwrap_err();
    }
    assert_eq!((one.stats(), other.stats()), Default::default());
}

/// Somebody connects to an endpoint's place without knowing its secret, before the peer does.
async fn a_stranger_does_not_get_in_the_way(rig: Rig) {
    for _ in 0..4 {
        let (one, other) = (rig.domain(), rig.domain());
        let address = rig.address();
        let here = Connection::builder(&one).endpoint(address).await.unwrap();
        let there = pending(&rig, &other).await;
        let (of_here, of_there) = (here.endpoint().clone(), there.endpoint().clone());
        // A third party guesses the nonce wrong, with everything else right.
        let forge = |endpoint: &QueuePairEndpoint| {
            let mut bytes = endpoint.as_bytes().to_vec();
            let at = 5.min(bytes.len() - 1);
            bytes[at] ^= 0x40;
            QueuePairEndpoint::from_bytes(&bytes).unwrap()
        };
        let builder = || Connection::builder(&other).setup_timeout(Duration::from_millis(200));
        let stranger = builder().endpoint(rig.address()).await.unwrap();
        let forged = forge(&of_here);
        let (here, there, stranger) = within(SOON, async {
            join!(
                here.connect(&of_there),
                async {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    there.connect(&of_here).await
                },
                stranger.connect(&forged)
            )
        })
        .await;
        stranger.unwrap_err();
        exercise(&Pair { client: End::new(&one, here.unwrap()), server: End::new(&other, there.unwrap()) }).await;
    }
}
