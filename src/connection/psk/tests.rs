//! Peers that announce a key and then do something else than prove it.

use std::time::Duration;

use tokio::join;

use super::exchange::LONGEST;
use super::*;
use crate::connection::{ConnectionBuilder, Listener};
use crate::error::{CloseReason, WcStatus};
use crate::memory::{Access, ProtectionDomain};
use crate::{Address, Device, random};

const SOON: Duration = Duration::from_secs(20);
/// So that nobody is turned away for want of time while a test waits.
const LATER: Duration = Duration::from_secs(60);

fn key() -> PreSharedKey {
    PreSharedKey::new([7; 32]).unwrap()
}

fn domain() -> ProtectionDomain {
    Device::open("soft0").unwrap().alloc_pd().unwrap()
}

/// One that turns away whoever has not proved the key after `setup`.
async fn listener(domain: &ProtectionDomain, setup: Duration) -> Listener {
    let settings = |it: ConnectionBuilder| it.pre_shared_key(key()).setup_timeout(setup);
    Listener::builder(domain).connections(settings).bind("127.0.0.1:0").await.unwrap()
}

/// A connection to a listener that has a key, of a client that says it has one too, and is to prove it.
async fn stranger(domain: &ProtectionDomain, address: &Address) -> Connection {
    let prepared = Connection::builder(domain).pre_shared_key(key()).prepare("connect").unwrap();
    let room = prepared.reserve().unwrap();
    let (device, queue) = (prepared.device.clone(), room.queue().clone());
    let connecting =
        device.context().connect(domain.provider(), queue.device(), &prepared.config, address, &prepared.hello);
    prepared.establish(room, connecting.await.unwrap()).unwrap()
}

async fn hear(connection: &Connection) -> Vec<u8> {
    let received = connection.receive(connection.domain().alloc(LONGEST).unwrap()).await.unwrap();
    received.message().to_vec()
}

async fn say(connection: &Connection, message: Vec<u8>) {
    connection.send(connection.domain().register(message).unwrap()).await.unwrap();
}

/// The listener has turned so many away, and serves who has the key.
async fn turned_away(listener: &Listener, count: u64) {
    tokio::time::timeout(SOON, async {
        while listener.failed_handshakes() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let domain = domain();
        let connecting = Connection::builder(&domain).pre_shared_key(key()).connect(listener.local_address());
        let (client, server) = join!(connecting, listener.accept());
        let (client, server) = (client.unwrap(), server.unwrap());
        let (sent, received) =
            join!(client.send(domain.alloc(1).unwrap()), server.receive(server.domain().alloc(1).unwrap()));
        sent.unwrap();
        received.unwrap();
    })
    .await
    .unwrap();
    assert_eq!(listener.failed_handshakes(), count);
}

/// What a client that has the key said in the exchange.
async fn overheard(listener: &Listener, here: &ProtectionDomain) -> Vec<u8> {
    let onward = stranger(here, listener.local_address()).await;
    let challenge = hear(&onward).await;
    let client = proof::Prover::new(&key(), [b"", b""]);
    let mine: proof::Nonce = random::bytes().unwrap();
    let proof = client.prove(Role::Client, challenge[1..].try_into().unwrap(), &mine);
    let response = [&[2][..], &mine, &proof].concat();
    say(&onward, response.clone()).await;
    assert_eq!(hear(&onward).await[0], 3, "the first time it is good");
    say(&onward, vec![4]).await;
    listener.accept().await.unwrap();
    response
}

#[tokio::test]
async fn what_was_overheard_is_worth_nothing_the_second_time() {
    let (here, there) = (domain(), domain());
    let listener = listener(&there, LATER).await;
    let response = overheard(&listener, &here).await;
    let again = stranger(&here, listener.local_address()).await;
    hear(&again).await;
    say(&again, response).await;
    assert_eq!(hear(&again).await, [5], "rejected");
    assert_eq!(tokio::time::timeout(SOON, again.closed()).await.unwrap(), CloseReason::Peer);
    turned_away(&listener, 1).await;
}

#[tokio::test]
async fn a_challenge_that_is_sent_back_is_no_response() {
    let (here, there) = (domain(), domain());
    let listener = listener(&there, LATER).await;
    let mirror = stranger(&here, listener.local_address()).await;
    let challenge = hear(&mirror).await;
    let mut response = vec![2];
    response.extend_from_slice(&challenge[1..]);
    response.resize(LONGEST, 0);
    say(&mirror, response).await;
    assert_eq!(hear(&mirror).await, [5]);
    turned_away(&listener, 1).await;
}

#[tokio::test]
async fn whoever_says_nothing_is_turned_away_in_time() {
    let (here, there) = (domain(), domain());
    // As long as the two strangers are waited for; whoever has the key takes less.
    let listener = listener(&there, Duration::from_secs(1)).await;
    let silent = stranger(&here, listener.local_address()).await;
    let hesitant = stranger(&here, listener.local_address()).await;
    hear(&hesitant).await;
    for stranger in [&silent, &hesitant] {
        assert_eq!(tokio::time::timeout(SOON, stranger.closed()).await.unwrap(), CloseReason::Peer);
    }
    turned_away(&listener, 2).await;
}

#[tokio::test]
async fn nonsense_is_no_proof() {
    let (here, there) = (domain(), domain());
    let listener = listener(&there, LATER).await;
    let nonsense = [vec![], vec![2], vec![9; 65], vec![2; 64], vec![4], vec![3; 33], vec![2; 66], vec![0; 4096]];
    let count = nonsense.len() as u64;
    for message in nonsense {
        let stranger = stranger(&here, listener.local_address()).await;
        let message = match message.len() {
            0 => here.alloc(1).unwrap().split_to(0).unwrap(),
            _ => here.register(message).unwrap(),
        };
        // Before that the listener does not listen.
        hear(&stranger).await;
        // One that is too long fails at the sender, too.
        let _ = stranger.send(message).await;
        tokio::time::timeout(SOON, stranger.closed()).await.unwrap();
    }
    turned_away(&listener, count).await;
}

#[tokio::test]
async fn no_memory_is_within_reach_before_the_proof() {
    let (here, there) = (domain(), domain());
    let listener = listener(&there, LATER).await;
    let secret = there.alloc(64).unwrap().expose(Access::all()).unwrap();
    for attempt in 0..3 {
        let thief = stranger(&here, listener.local_address()).await;
        let error = match attempt {
            0 => thief.read(here.alloc(64).unwrap(), &secret.remote()).await.unwrap_err().into(),
            1 => thief.write(here.alloc(64).unwrap(), &secret.remote()).await.unwrap_err().into(),
            _ => thief.fetch_add(&secret.remote(), 1).await.unwrap_err(),
        };
        let Error::Completion { status, .. } = error else { panic!("{error:?}") };
        assert_eq!(status, WcStatus::RemoteAccess, "attempt {attempt}");
    }
    turned_away(&listener, 3).await;
    // The same key opens the same memory to who has proved.
    let connecting = Connection::builder(&here).pre_shared_key(key()).connect(listener.local_address());
    let (client, server) = join!(connecting, listener.accept());
    let (client, _server) = (client.unwrap(), server.unwrap());
    client.read(here.alloc(64).unwrap(), &secret.remote()).await.unwrap();
}

#[tokio::test]
async fn a_server_that_proves_nothing_is_found_out() {
    for message in [vec![3; 33], vec![1; 33], vec![3]] {
        let (here, there) = (domain(), domain());
        let prepared = Connection::builder(&there).pre_shared_key(key()).prepare("listen").unwrap();
        let acceptor = prepared.device.context().listen(&"127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = acceptor.local_address().clone();
        let pretending = async {
            let incoming = acceptor.accept().await.unwrap();
            let room = prepared.reserve().unwrap();
            let queue = room.queue().clone();
            let reply = |_: &[u8]| Ok(prepared.hello.clone());
            let accepted = incoming.accept(there.provider(), queue.device(), &prepared.config, reply).await.unwrap();
            let server = prepared.establish(room, accepted).unwrap();
            let mut response = server.receive(there.alloc(LONGEST).unwrap());
            response.try_post().unwrap();
            say(&server, [&[1][..], &[0; 32]].concat()).await;
            response.await.unwrap();
            say(&server, message.clone()).await;
            server
        };
        let connecting = Connection::builder(&here).pre_shared_key(key()).setup_timeout(SOON).connect(&address);
        let (error, server) = join!(connecting, pretending);
        let error = error.unwrap_err();
        let Error::Authentication { reason, .. } = &error else { panic!("{error:?}") };
        let unproved = message[0] == 3 && message.len() == 33;
        let expected = if unproved { AuthenticationFailure::Unproved } else { AuthenticationFailure::NoProof };
        assert_eq!(*reason, expected, "{error}");
        tokio::time::timeout(SOON, server.closed()).await.unwrap();
    }
}
