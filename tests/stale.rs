//! Completions that come late.

use std::time::Duration;

use tokio_rdma::soft::{self, Faults};
use tokio_rdma::{Connection, Device, Listener};

/// The number of a closed connection is given to the next one; what the device still had to say of the first
/// must not end an operation of the second.
#[tokio::test]
async fn late_completions_of_a_closed_connection_hit_nobody() {
    let late = Duration::from_millis(300)..Duration::from_millis(301);
    let faulty =
        soft::device(soft::default_limits(), Some(Faults::seeded(1).delay_completions(late, 1.0))).open().unwrap();
    let client = faulty.alloc_pd().unwrap();
    let server = Device::open("soft0").unwrap().alloc_pd().unwrap();
    let listener = Listener::bind(&server, "127.0.0.1:0").await.unwrap();
    let address = listener.local_address().clone();
    let (one, peer_one) = tokio::join!(Connection::connect(&client, address.clone()), listener.accept());
    let (one, _peer_one) = (one.unwrap(), peer_one.unwrap());
    let mut first = one.receive(client.alloc(64).unwrap());
    first.try_post().unwrap();
    one.close().await;
    first.await.unwrap_err();
    drop(one);
    let (two, peer_two) = tokio::join!(Connection::connect(&client, address), listener.accept());
    let (two, _peer_two) = (two.unwrap(), peer_two.unwrap());
    let mut second = two.receive(client.alloc(64).unwrap());
    second.try_post().unwrap();
    let ended = tokio::time::timeout(Duration::from_millis(800), second).await;
    assert!(ended.is_err(), "{ended:?}");
}
