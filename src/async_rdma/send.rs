//! Messages, sent and received.

use super::Peer;
use super::inbox::Message;
use super::wire::{Request, Response};
use crate::error::{Error, Result};
use crate::memory::{AnyBuffer, SgList, SgSegment, SourceBuffer};
use crate::op::OpError;

impl Peer {
    /// Sends a message. Resolves when the peer's program has it.
    ///
    /// It is one message there. (A program of async-rdma splits what it sends itself at its own limit; this side never splits.)
    ///
    /// # Errors
    ///
    /// [`OpError`] with the buffer: [`Error::Limit`] when it is empty, which the protocol has no message for, or longer than
    /// [`max_message`](super::PeerBuilder::max_message); [`Error::Timeout`] when the peer does not answer in time;
    /// [`Error::Closed`]; and what [`Connection::send`](crate::Connection::send) gives.
    ///
    /// # Cancel safety
    ///
    /// See [`Peer`]: a message that was posted still arrives.
    pub async fn send<B: SourceBuffer>(&self, buffer: B) -> Result<B, OpError<B>> {
        self.send_message(buffer, None).await
    }

    /// Like [`send`](Self::send), with 32 bits that arrive beside the message.
    pub async fn send_with_immediate<B: SourceBuffer>(&self, buffer: B, immediate: u32) -> Result<B, OpError<B>> {
        self.send_message(buffer, Some(immediate)).await
    }

    async fn send_message<B: SourceBuffer>(&self, buffer: B, immediate: Option<u32>) -> Result<B, OpError<B>> {
        const SEND: &str = "send";
        let shared = &self.inner.shared;
        let any = buffer.into_any();
        let (length, limit) = (any.len() as u64, shared.settings.max_message as u64);
        let refused = match length {
            0 => Some((1, "the protocol has no empty message; 1 byte is the least")),
            _ if length > limit => Some((limit, "split it, or raise max_message at both ends")),
            _ => None,
        };
        if let Some((limit, hint)) = refused {
            let error = Error::Limit { operation: SEND, what: "length", value: length, limit, hint };
            return Err(OpError::new(error, B::from_any(any)));
        }
        if !any.is_of_host() {
            let reason = "a message of this protocol begins with a header in host memory: copy the bytes to a Buffer";
            let error = Error::Invalid { operation: SEND, reason: reason.to_owned() };
            return Err(OpError::new(error, B::from_any(any)));
        }
        let (kind, segments) = Kind::take_apart(any);
        match shared.call(SEND, Request::Data { length }, segments, immediate).await {
            Ok((Response::Data { status: 0 }, segments)) => match B::from_any(kind.put_together(segments)) {
                Some(buffer) => Ok(buffer),
                None => Err(OpError::new(shared.broken("the buffer came back as another type"), None)),
            },
            Ok((response, segments)) => {
                let error = match response {
                    Response::Data { status } => Error::Refused { operation: SEND, reason: format!("status {status}") },
                    other => shared.unexpected(SEND, &other),
                };
                Err(OpError::new(error, B::from_any(kind.put_together(segments))))
            }
            Err((error, segments)) => {
                Err(OpError::new(error, segments.and_then(|segments| B::from_any(kind.put_together(segments)))))
            }
        }
    }

    /// The next message of the peer, in the order in which they came.
    ///
    /// The peer's program is answered when the message has its place among [`backlog`](super::PeerBuilder::backlog) ones here; when
    /// that many wait, its sends wait too, and fail after its own limit of 5 s.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] when the connection has ended and no message is left.
    ///
    /// # Cancel safety
    ///
    /// No message is lost when the future is dropped.
    pub async fn receive(&self) -> Result<Message> {
        self.next("receive", &self.inner.outlet.messages).await
    }
}

/// How the user gave what is sent.
#[derive(Clone, Copy)]
enum Kind {
    One,
    List,
}

impl Kind {
    fn take_apart(buffer: AnyBuffer) -> (Self, Vec<SgSegment>) {
        match buffer {
            AnyBuffer::None => (Self::List, Vec::new()),
            AnyBuffer::Buffer(buffer) => (Self::One, vec![buffer.into()]),
            AnyBuffer::Shared(shared) => (Self::One, vec![shared.into()]),
            AnyBuffer::List(list) => (Self::List, list.into_segments()),
            // Refused before.
            #[cfg(feature = "cuda")]
            AnyBuffer::Gpu(_) => (Self::List, Vec::new()),
        }
    }

    fn put_together(self, mut segments: Vec<SgSegment>) -> AnyBuffer {
        match (self, segments.pop()) {
            (Self::One, Some(SgSegment::Buffer(buffer))) => AnyBuffer::Buffer(buffer),
            (Self::One, Some(SgSegment::Shared(shared))) => AnyBuffer::Shared(shared),
            (_, last) => AnyBuffer::List(segments.into_iter().chain(last).collect::<SgList>()),
        }
    }
}
