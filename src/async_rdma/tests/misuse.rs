//! A peer that breaks the protocol, floods, or does not answer.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::wire_level::Bytes;
use super::{MINUTE, buffer, until};
use crate::async_rdma::wire::{Frame, HEADER, Request, Response, Token};
use crate::{Access, CloseReason, Error, RemoteRegion};

const SOON: Duration = Duration::from_millis(200);

#[tokio::test]
async fn bytes_that_mean_nothing_end_the_connection_with_the_reason() {
    for bytes in [&b""[..], b"nonsense", &[7; 200], &[0; 20], &Response::Data { status: 0 }.encode(1)[..23]] {
        let (peer, other) = Bytes::beside(|it| it).await;
        other.say(bytes).await;
        assert!(matches!(peer.closed().await, CloseReason::Protocol(_)), "{bytes:?}");
        assert!(matches!(peer.receive().await, Err(Error::Closed { reason: CloseReason::Protocol(_), .. })));
    }
}

#[tokio::test]
async fn messages_that_are_too_long_end_the_connection() {
    let (peer, other) = Bytes::beside(|it| it.max_message(100)).await;
    let mut message = Request::Data { length: 101 }.encode(1).to_vec();
    message.extend([0; 101]);
    let sent = other.connection.send(other.connection.domain().register(message).unwrap()).await;
    assert!(sent.is_err());
    peer.closed().await;
}

#[tokio::test]
async fn answers_to_other_questions_end_the_connection() {
    let (peer, mut other) = Bytes::beside(|it| it).await;
    let answering = async {
        let Ok(Frame::Request(id, _)) = Frame::decode(&other.hear().await) else { panic!() };
        other.say(&Response::Region { status: 0 }.encode(id)).await;
    };
    let (sent, ()) = tokio::join!(peer.send(buffer(&peer, b"data")), answering);
    let failed = sent.unwrap_err();
    assert!(matches!(failed.error(), Error::Closed { reason: CloseReason::Protocol(_), .. }), "{failed}");
    assert_eq!(failed.into_buffer().unwrap()[..], *b"data");
}

#[tokio::test]
async fn a_peer_that_says_no_or_gives_too_little_is_an_error_and_no_end() {
    let (peer, mut other) = Bytes::beside(|it| it).await;
    let answers = async {
        let short = Token { region: RemoteRegion::new(4096, 63, 1, Access::all()).unwrap(), deadline: MINUTE };
        for answer in [Response::Data { status: 9 }, Response::Region { status: 2 }, Response::Alloc(short)] {
            let Ok(Frame::Request(id, _)) = Frame::decode(&other.hear().await) else { panic!() };
            other.say(&answer.encode(id)).await;
        }
        // What is too short is of no use.
        assert!(matches!(Frame::decode(&other.hear().await), Ok(Frame::Request(_, Request::Release(_)))));
    };
    let asking = async {
        let failed = peer.send(buffer(&peer, b"data")).await.unwrap_err();
        assert!(matches!(failed.error(), Error::Refused { .. }), "{failed}");
        let failed = peer.lend(buffer(&peer, b"mine"), Access::REMOTE_READ, MINUTE).await.unwrap_err();
        assert!(matches!(failed.error(), Error::Refused { .. }), "{failed}");
        assert_eq!(failed.into_buffer().unwrap()[..], *b"mine", "revoked and given back");
        let error = peer.request_region(64, 8, MINUTE).await.map(drop).unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
    };
    tokio::join!(asking, answers);
    assert_eq!((peer.close_reason(), peer.stats().regions), (None, 0));
}

#[tokio::test]
async fn a_peer_that_does_not_answer_is_waited_for_no_longer_than_told() {
    let (peer, mut other) = Bytes::beside(|it| it.answer_timeout(SOON)).await;
    let failed = peer.send(buffer(&peer, b"anybody?")).await.unwrap_err();
    assert!(matches!(failed.error(), Error::Timeout { after: SOON, .. }), "{failed}");
    assert_eq!(failed.into_buffer().unwrap()[..], *b"anybody?");
    // Too late, and for nobody: ignored.
    let Ok(Frame::Request(id, _)) = Frame::decode(&other.hear().await) else { panic!() };
    other.say(&Response::Data { status: 0 }.encode(id)).await;
    let message = [&Request::Data { length: 1 }.encode(3)[..], b"x"].concat();
    other.say(&message).await;
    assert_eq!(peer.receive().await.unwrap()[..], *b"x");
}

#[tokio::test]
async fn messages_that_nobody_receives_are_bounded() {
    let (peer, mut other) = Bytes::beside(|it| it.backlog(3)).await;
    let message = [&Request::Data { length: 1 }.encode(3)[..], b"x"].concat();
    for _ in 0..20 {
        other.say(&message).await;
    }
    // 3 are kept, 10 wait unanswered, 7 are lost and told.
    until(|| peer.stats().refused == 7).await;
    for _ in 0..3 {
        other.hear().await;
    }
    for _ in 0..13 {
        peer.receive().await.unwrap();
    }
    for _ in 0..10 {
        other.hear().await;
    }
    assert!(tokio::time::timeout(SOON, peer.receive()).await.is_err());
    assert_eq!(peer.close_reason(), None);
}

#[tokio::test]
async fn regions_and_notices_that_nobody_receives_are_bounded() {
    let (peer, mut other) = Bytes::beside(|it| it.backlog(2).budget(1 << 20)).await;
    let token = Token { region: RemoteRegion::new(4096, 64, 1, Access::all()).unwrap(), deadline: MINUTE };
    for expected in [0, 0, 2, 2] {
        assert_eq!(other.request(1, Request::Lend(token)).await, Response::Region { status: expected });
    }
    for expected in [0, 0, 2, 2] {
        let Response::Alloc(token) = other.request(2, Request::Alloc { size: 9, align: 1, lease: MINUTE }).await else {
            panic!("no token")
        };
        assert_eq!(other.request(3, Request::Return(token)).await, Response::Region { status: expected });
    }
    let empty = other.connection.domain().alloc(1).unwrap().split_off(1).unwrap();
    let place = RemoteRegion::new(0, 0, 0, Access::REMOTE_WRITE).unwrap();
    other.connection.write_with_immediate(empty, &place, 1 << 24).await.unwrap();
    assert_eq!(peer.receive_write_immediate().await.unwrap(), 1);
    assert_eq!((peer.stats().refused, peer.close_reason()), (4, None));
}

/// Whatever a peer sends is answered, ignored, or ends the connection: nothing panics, and nothing is handed out beyond the budget.
#[test]
fn any_conversation_is_survived() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let token = (0u64..3, 0u64..3, 0u32..3, 0u64..3).prop_map(|(address, length, rkey, secs)| Token {
        region: RemoteRegion::new(address, length, rkey, Access::all()).unwrap(),
        deadline: Duration::from_secs(secs),
    });
    let frame = (0u64..4, 0u8..9, token, any::<[u64; 2]>()).prop_map(|(id, kind, token, [a, b])| match kind {
        0 => Request::Alloc { size: a % 9000, align: 1 << (b % 14), lease: Duration::from_millis(b % 50) }
            .encode(id)
            .to_vec(),
        1 => Request::Release(token).encode(id).to_vec(),
        2 => Request::Lend(token).encode(id).to_vec(),
        3 => Request::Return(token).encode(id).to_vec(),
        4 => [&Request::Data { length: a % 600 }.encode(id)[..], &vec![1; (b % 500) as usize]].concat(),
        5 => Response::Alloc(token).encode(id),
        6 => Response::Release { status: a }.encode(id),
        7 => Response::Region { status: a as u32 }.encode(id),
        _ => a.to_le_bytes().to_vec(),
    });
    let conversation = proptest::collection::vec(frame, 1..30);
    let mut runner = TestRunner::new(Config::with_cases(64));
    let done = runner.run(&conversation, |messages| {
        runtime.block_on(async {
            let (peer, other) = Bytes::beside(|it| it.backlog(2).budget(16 << 10)).await;
            for message in messages {
                assert!(message.len() <= HEADER + 512);
                let buffer = other.connection.domain().register(message).unwrap();
                if other.connection.send(buffer).await.is_err() {
                    break;
                }
            }
            assert!(peer.stats().budget_used <= 16 << 10);
            // It works, or it says why not.
            match tokio::time::timeout(SOON / 10, peer.closed()).await {
                Ok(reason) => assert!(matches!(reason, CloseReason::Protocol(_)), "{reason}"),
                Err(_) => assert_eq!(peer.close_reason(), None),
            }
        });
        Ok(())
    });
    done.unwrap();
}
