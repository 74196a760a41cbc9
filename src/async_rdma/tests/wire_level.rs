//! Against an end that is made of bytes: what exactly goes over the wire, and when.

use super::{MINUTE, buffer, connected, over};
use crate::async_rdma::wire::{Frame, HEADER, Request, Response, Token};
use crate::async_rdma::{LeaseEnd, Peer, PeerBuilder};
use crate::op::ReceiveOp;
use crate::{Access, Buffer, Connection};

/// The other end: sees and sends bytes.
pub(super) struct Bytes {
    pub connection: Connection,
    receives: std::collections::VecDeque<ReceiveOp<Buffer>>,
}

impl Bytes {
    pub(super) async fn beside(settings: impl FnOnce(PeerBuilder) -> PeerBuilder) -> (Peer, Self) {
        let (here, connection) = connected().await;
        let mut this = Self { connection, receives: Default::default() };
        (0..10).for_each(|_| this.post());
        (over(here, settings), this)
    }

    fn post(&mut self) {
        let mut receive = self.connection.receive(self.connection.domain().alloc(1024).unwrap());
        receive.try_post().unwrap();
        self.receives.push_back(receive);
    }

    /// The next message.
    pub(super) async fn hear(&mut self) -> Vec<u8> {
        let received = self.receives.pop_front().unwrap().await.unwrap();
        self.post();
        received.message().to_vec()
    }

    pub(super) async fn say(&self, bytes: &[u8]) {
        let mut buffer = self.connection.domain().register([bytes, b"."].concat()).unwrap();
        self.connection.send(buffer.split_to(bytes.len()).unwrap()).await.unwrap();
    }

    pub(super) async fn request(&mut self, id: u64, request: Request) -> Response {
        self.say(&request.encode(id)).await;
        match Frame::decode(&self.hear().await).unwrap() {
            Frame::Response(answered, response) if answered == id => response,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_message_and_its_answer() {
    let (peer, mut bytes) = Bytes::beside(|it| it).await;
    let other_end = async {
        let message = bytes.hear().await;
        assert_eq!(message.len(), HEADER + 5);
        assert_eq!((&message[..4], &message[12..24]), (&[0; 4][..], &[3, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0][..]));
        assert!(message[24..HEADER].iter().all(|&byte| byte == 0), "padded");
        assert_eq!(message[HEADER..], *b"hello");
        let mut answer = vec![1, 0, 0, 0];
        answer.extend(&message[4..12]);
        answer.extend([3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.say(&answer).await;
    };
    let (sent, ()) = tokio::join!(peer.send(buffer(&peer, b"hello")), other_end);
    sent.unwrap();

    let mut message = Request::Data { length: 3 }.encode(0x1122).to_vec();
    // What follows the announced length is none of the message.
    message.extend(b"oh!..");
    bytes.say(&message).await;
    assert_eq!(bytes.hear().await, b"\x01\0\0\0\x22\x11\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(peer.receive().await.unwrap()[..], *b"oh!");
}

#[tokio::test]
async fn a_region_that_nobody_waits_for_any_more_is_released() {
    let (peer, mut bytes) = Bytes::beside(|it| it).await;
    let mut asking = Box::pin(peer.request_region(64, 8, MINUTE));
    let message = tokio::select! {
        _ = &mut asking => panic!("nobody answered"),
        message = bytes.hear() => message,
    };
    drop(asking);
    let Ok(Frame::Request(id, Request::Alloc { size: 64, align: 8, lease: MINUTE })) = Frame::decode(&message) else {
        panic!("{message:?}")
    };
    let shared = bytes.connection.domain().alloc(64).unwrap().expose(Access::all()).unwrap();
    let token = Token { region: shared.remote(), deadline: MINUTE };
    bytes.say(&Response::Alloc(token).encode(id)).await;
    assert!(matches!(Frame::decode(&bytes.hear().await), Ok(Frame::Request(_, Request::Release(it))) if it == token));
}

#[tokio::test]
async fn a_token_opens_what_it_says_and_nothing_after_its_release() {
    let (peer, mut bytes) = Bytes::beside(|it| it.budget(4096)).await;
    let Response::Alloc(token) = bytes.request(5, Request::Alloc { size: 100, align: 64, lease: MINUTE }).await else {
        panic!("no token")
    };
    assert_eq!(token.region.len(), 100);
    let other = bytes.connection.domain().alloc(100).unwrap();
    bytes.connection.write(other, &token.region).await.unwrap();
    // Its key with another place is another token.
    let wrong = Token { region: token.region.slice(1..).unwrap(), ..token };
    assert_eq!(bytes.request(6, Request::Release(wrong)).await, Response::Release { status: 0 });
    assert_eq!(peer.stats().regions, 1);
    assert_eq!(bytes.request(7, Request::Return(wrong)).await, Response::Region { status: 1 });
    assert_eq!(bytes.request(8, Request::Release(token)).await, Response::Release { status: 0 });
    assert_eq!(peer.stats().regions, 0);
    let failed = bytes.connection.write(bytes.connection.domain().alloc(1).unwrap(), &token.region).await;
    assert!(failed.is_err(), "the key was revoked");
}

#[tokio::test]
async fn a_key_is_dead_when_its_lease_is_over_whatever_the_peer_thinks() {
    let (peer, mut bytes) = Bytes::beside(|it| it).await;
    let lending = peer.lend(buffer(&peer, b"secret"), Access::all(), std::time::Duration::from_millis(50));
    let taking = async {
        let Ok(Frame::Request(id, Request::Lend(token))) = Frame::decode(&bytes.hear().await) else { panic!() };
        bytes.say(&Response::Region { status: 0 }.encode(id)).await;
        token
    };
    let (lent, token) = tokio::join!(lending, taking);
    let lent = lent.unwrap();
    assert_eq!(lent.ended().await, LeaseEnd::Expired);
    let late = bytes.connection.write(bytes.connection.domain().alloc(6).unwrap(), &token.region).await;
    assert!(late.is_err());
    assert_eq!(lent.reclaim().await[..], *b"secret", "untouched");
}

#[tokio::test]
async fn a_write_with_immediate_is_a_notice() {
    let (peer, mut bytes) = Bytes::beside(|it| it.budget(4096)).await;
    let Response::Alloc(token) = bytes.request(5, Request::Alloc { size: 100, align: 64, lease: MINUTE }).await else {
        panic!("no token")
    };
    let data = bytes.connection.domain().alloc(10).unwrap();
    // On the wire its bytes are little-endian.
    bytes.connection.write_with_immediate(data, &token.region, u32::from_be_bytes([77, 0, 0, 0])).await.unwrap();
    assert_eq!(peer.receive_write_immediate().await.unwrap(), 77);
}
