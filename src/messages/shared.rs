//! Receives of a shared queue that are kept posted.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::stream::Stream;

use crate::completion::shared::Mailbox;
use crate::completion::table::Ticket;
use crate::connection::ConnectionId;
use crate::error::{Error, Operation, Result};
use crate::memory::{AnyBuffer, Buffer, BufferPool, Get};
use crate::messages::Message;
use crate::op::Received;
use crate::op::shared::{check, finish};
use crate::srq::SharedReceiveQueue;

/// The messages of all connections of a [`SharedReceiveQueue`], each with the [`Connection::id`](crate::Connection::id) of the connection it came by;
/// made by [`SharedReceiveQueue::receiver`].
///
/// It goes on until it is dropped. A connection that ends is no item: [`Connection::closed`](crate::Connection::closed) tells of that. The receive
/// that it may have taken with it is posted again, and a tracing event says so.
///
/// # Cancel safety
///
/// A future of `next` that is dropped has taken no message. Dropping the receiver leaves its receives posted: the messages that go
/// there are lost. Messages that were taken live on.
pub struct SharedReceiver {
    srq: SharedReceiveQueue,
    pool: BufferPool,
    mailbox: Arc<Mailbox>,
    /// Receives that are posted, or have got a message that was not taken yet.
    out: usize,
    /// The next buffer that comes back, while most of them are with the program.
    returning: Option<Get>,
    /// A buffer for which the queue has no place, and its own place in the line for one.
    unposted: Option<AnyBuffer>,
    ticket: Option<Ticket>,
    /// An error of posting was told.
    failed: bool,
}

impl SharedReceiveQueue {
    /// Keeps `count` receives of `size` bytes each posted, and yields what they get. They are posted when this returns.
    /// Several receivers may share the queue: each message goes to the one whose receive is next.
    ///
    /// A [`Message`] that is held keeps its buffer: with all of them held the peers have to wait, as with any receiver that is not ready.
    /// Buffers that came back are posted when the receiver is polled, and nothing is allocated for it.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when `count` or `size` is 0, or `count` above the [`capacity`](Self::capacity); [`Error::Io`] when there is no memory;
    /// [`Error::QueueFull`] when other receives are in the way.
    pub fn receiver(&self, count: usize, size: usize) -> Result<SharedReceiver> {
        if count > self.capacity() {
            return Err(Error::Limit {
                operation: "make a receiver",
                what: "count",
                value: count as u64,
                limit: self.capacity() as u64,
                hint: "raise the capacity of the shared receive queue",
            });
        }
        let full = || Error::QueueFull { operation: Operation::Receive, depth: self.capacity() };
        // Before any is posted: what is posted gets messages, even if the receiver is none.
        if self.posted() + count > self.capacity() {
            return Err(full());
        }
        let mut receiver = SharedReceiver {
            srq: self.clone(),
            pool: BufferPool::new(self.domain(), size, count)?,
            mailbox: Arc::new(Mailbox::new(count)),
            out: 0,
            returning: None,
            unposted: None,
            ticket: None,
            failed: false,
        };
        while let Some(buffer) = receiver.pool.try_get() {
            if receiver.post(buffer, None)?.is_pending() {
                return Err(full());
            }
        }
        Ok(receiver)
    }
}

impl SharedReceiver {
    /// The shared receive queue.
    pub fn srq(&self) -> &SharedReceiveQueue {
        &self.srq
    }

    fn post(&mut self, buffer: Buffer, cx: Option<&mut Context<'_>>) -> Result<Poll<()>> {
        let buffer = AnyBuffer::Buffer(buffer);
        check(&buffer, self.srq.queue())?;
        self.unposted = Some(buffer);
        self.post_on(cx)
    }

    /// Posts what is not posted yet, or waits for a place.
    fn post_on(&mut self, mut cx: Option<&mut Context<'_>>) -> Result<Poll<()>> {
        if self.unposted.is_none() {
            return Ok(Poll::Ready(()));
        }
        let (queue, mailbox) = (self.srq.queue(), Some(&self.mailbox));
        // The mailbox wakes; the task of its own is only for the line.
        let mut posted = queue.submit(&mut self.unposted, &mut self.ticket, mailbox, None);
        if posted.is_pending() && cx.is_some() {
            posted = queue.submit(&mut self.unposted, &mut self.ticket, mailbox, cx.take());
        }
        match posted {
            Poll::Ready(Ok(_)) => {
                self.out += 1;
                Ok(Poll::Ready(()))
            }
            Poll::Ready(Err(rejected)) => Err(rejected.into_error(Operation::Receive.name())),
            Poll::Pending => Ok(Poll::Pending),
        }
    }

    /// Posts the buffers that have come back.
    fn post_returned(&mut self, cx: &mut Context<'_>) -> Result<()> {
        while self.post_on(Some(cx))?.is_ready() {
            let buffer = match &mut self.returning {
                Some(get) => match Pin::new(get).poll(cx) {
                    Poll::Ready(buffer) => {
                        self.returning = None;
                        buffer
                    }
                    Poll::Pending => break,
                },
                None => match self.pool.try_get() {
                    Some(buffer) => buffer,
                    // Woken for each buffer only where the peers would run out of receives.
                    None if 2 * self.out <= self.pool.capacity() => {
                        self.returning = Some(self.pool.get());
                        continue;
                    }
                    None => break,
                },
            };
            if self.post(buffer, Some(cx))?.is_pending() {
                break;
            }
        }
        Ok(())
    }

    /// What has arrived first, unless that is a receive that failed: its buffer is back in the pool then, and posted with the others.
    fn take(&mut self, cx: &mut Context<'_>) -> Option<(ConnectionId, Message)> {
        while let Some(key) = self.mailbox.next(cx) {
            let queue = self.srq.queue();
            let Some((buffer, outcome)) = queue.collect(key) else { continue };
            self.out -= 1;
            queue.taken();
            match finish(queue, buffer, outcome) {
                Ok((done, AnyBuffer::Buffer(buffer))) => {
                    return Some((ConnectionId::new(done.source), Message::new(Received::new(&done, buffer))));
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "a connection ended with a receive of the shared queue"),
            }
        }
        None
    }
}

impl Stream for SharedReceiver {
    type Item = Result<(ConnectionId, Message)>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        // Messages first: posting may fail for reasons that do not concern them.
        let mut taken = this.take(cx);
        if taken.is_none() && this.srq.queue().look() {
            taken = this.take(cx);
        }
        let posted = this.post_returned(cx);
        match (taken, posted) {
            (Some(message), _) => Poll::Ready(Some(Ok(message))),
            // With nothing posted, nothing will ever come; trying again at each poll would be a loop without end.
            (None, Err(_)) if this.failed && this.out == 0 => Poll::Ready(None),
            (None, Err(error)) => {
                this.failed = true;
                Poll::Ready(Some(Err(error)))
            }
            (None, Ok(())) => Poll::Pending,
        }
    }
}

impl Drop for SharedReceiver {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.srq.queue().receive.leave(ticket);
        }
        self.srq.queue().close(&self.mailbox);
    }
}

impl fmt::Debug for SharedReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiver")
            .field("srq", &self.srq)
            .field("posted", &self.out)
            .field("count", &self.pool.capacity())
            .finish_non_exhaustive()
    }
}
