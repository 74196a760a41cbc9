//! Receives that are kept posted.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::stream::{FusedStream, Stream};

use crate::connection::Connection;
use crate::error::{CloseReason, Error, Result};
use crate::memory::{Buffer, BufferPool, Get};
use crate::op::{ReceiveOp, Received};

/// The messages of a connection; made by [`Connection::receiver`].
///
/// It ends (`None`) when the connection was closed, on either side; [`Connection::close_reason`] tells by whom. Any other end is an error
/// first. Messages that had arrived before come first.
///
/// # Cancel safety
///
/// A future of `next` that is dropped has taken no message. Dropping the receiver leaves its receives posted: the messages that go
/// there are lost. Messages that were taken live on.
pub struct Receiver {
    connection: Connection,
    pool: BufferPool,
    /// In the order of posting.
    receives: VecDeque<ReceiveOp<Buffer>>,
    /// The next buffer that comes back, while most of them are with the program.
    returning: Option<Get>,
    ended: bool,
}

impl Connection {
    /// Keeps `count` receives of `size` bytes each posted, and yields what they get. They are posted when this returns. The receiver should have
    /// all receives of the connection: messages go to the receives in the order in which those were posted.
    ///
    /// A [`Message`] that is held keeps its buffer: with all of them held the peer has to wait, as with any receiver that is not ready.
    /// Buffers that came back are posted when the receiver is polled, and nothing is allocated for it.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when `count` or `size` is 0, or `count` above the connection's
    /// [`receive_depth`](crate::ConnectionBuilder::receive_depth); [`Error::Io`] when there is no memory;
    /// [`Error::QueueFull`] when other receives are in the way; [`Error::Closed`]; [`Error::SharedReceiveQueue`] when the
    /// connection has one: the receiver of that gets its messages.
    pub fn receiver(&self, count: usize, size: usize) -> Result<Receiver> {
        self.check_receives("make a receiver")?;
        let depth = self.receive_depth() as usize;
        if count > depth {
            return Err(Error::Limit {
                operation: "make a receiver",
                what: "count",
                value: count as u64,
                limit: depth as u64,
                hint: "raise receive_depth of the connection",
            });
        }
        let mut receiver = Receiver {
            connection: self.clone(),
            pool: BufferPool::new(self.domain(), size, count)?,
            receives: VecDeque::with_capacity(count),
            returning: None,
            ended: false,
        };
        while let Some(buffer) = receiver.pool.try_get() {
            receiver.post(buffer)?;
        }
        Ok(receiver)
    }
}

impl Receiver {
    /// The connection.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    fn post(&mut self, buffer: Buffer) -> Result<()> {
        let mut receive = self.connection.receive(buffer);
        receive.try_post()?;
        self.receives.push_back(receive);
        Ok(())
    }

    /// Posts the buffers that have come back.
    fn post_returned(&mut self, cx: &mut Context<'_>) -> Result<()> {
        loop {
            let buffer = match &mut self.returning {
                Some(get) => match Pin::new(get).poll(cx) {
                    Poll::Ready(buffer) => {
                        self.returning = None;
                        buffer
                    }
                    Poll::Pending => return Ok(()),
                },
                None => match self.pool.try_get() {
                    Some(buffer) => buffer,
                    // Woken for each buffer only where the peer would run out of receives.
                    None if 2 * self.receives.len() <= self.pool.capacity() => {
                        self.returning = Some(self.pool.get());
                        continue;
                    }
                    None => return Ok(()),
                },
            };
            self.post(buffer)?;
        }
    }

    fn end(&mut self, error: Error) -> Option<Result<Message>> {
        self.ended = true;
        self.receives.clear();
        self.returning = None;
        match error {
            Error::Closed { reason: CloseReason::Peer | CloseReason::Local, .. } => None,
            error => Some(Err(error)),
        }
    }
}

impl Stream for Receiver {
    type Item = Result<Message>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        let posted = this.post_returned(cx);
        match this.receives.front_mut() {
            Some(first) => match Pin::new(first).poll(cx) {
                Poll::Ready(received) => {
                    this.receives.pop_front();
                    Poll::Ready(match received {
                        Ok(received) => Some(Ok(Message::new(received))),
                        Err(error) => this.end(error.into()),
                    })
                }
                // The first one may have got its message before a later one was refused.
                Poll::Pending => match posted {
                    Ok(()) => Poll::Pending,
                    Err(error) => Poll::Ready(this.end(error)),
                },
            },
            None => match posted {
                Ok(()) => Poll::Pending,
                Err(error) => Poll::Ready(this.end(error)),
            },
        }
    }
}

impl FusedStream for Receiver {
    fn is_terminated(&self) -> bool {
        self.ended
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver")
            .field("connection", &self.connection)
            .field("posted", &self.receives.len())
            .field("count", &self.pool.capacity())
            .finish_non_exhaustive()
    }
}

/// A message, in the buffer that it was received into. Dropping it gives that back to its [`Receiver`]
/// or [`SharedReceiver`](super::SharedReceiver).
#[derive(Debug)]
pub struct Message {
    received: Received<Buffer>,
}

impl Message {
    pub(super) fn new(received: Received<Buffer>) -> Self {
        Self { received }
    }

    /// The 32 bits that were sent along, if any.
    pub fn immediate(&self) -> Option<u32> {
        self.received.immediate
    }

    /// If this is the notice of a Write with immediate, how many bytes that wrote. The message itself is empty then.
    pub fn written(&self) -> Option<usize> {
        (!self.received.in_buffer).then_some(self.received.len)
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.received.message()
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        self
    }
}
