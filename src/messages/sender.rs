//! Sends with a bound on how many are on their way.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::sink::Sink;

use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::memory::{Buffer, SourceBuffer};
use crate::op::{OpError, SendOp};

/// A sink of buffers, each of which is sent as one message; made by [`Connection::sender`].
///
/// It takes a buffer when fewer than its bound are on their way, so a peer that is slow to receive holds it up. Messages are sent in order,
/// at once: flushing waits until the peer has all of them. A buffer is dropped when the device has let go of it; one of a
/// [`BufferPool`](crate::BufferPool) goes back there. Closing flushes, and leaves the connection open.
///
/// # Errors
///
/// An error that starting a send returns, a length for example, is about that buffer alone, if the connection works.
/// One that comes later is the connection's end.
///
/// # Cancel safety
///
/// Dropping the sender is safe: what was taken is still sent, except what waits for a slot of the send queue.
pub struct Sender<B: SourceBuffer = Buffer> {
    connection: Connection,
    /// In the order of sending; the last `unposted` of them are not with the device yet.
    sends: VecDeque<Send<B>>,
    unposted: usize,
    most: usize,
}

#[derive(Debug)]
enum Send<B: SourceBuffer> {
    Going(SendOp<B>),
    Gone(Result<B, OpError<B>>),
}

impl Connection {
    /// A sink for messages, of which at most `in_flight` (at least 1) are on their way.
    pub fn sender<B: SourceBuffer>(&self, in_flight: usize) -> Sender<B> {
        Sender { connection: self.clone(), sends: VecDeque::new(), unposted: 0, most: in_flight.max(1) }
    }
}

impl<B: SourceBuffer> Sender<B> {
    /// The connection.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Messages on their way.
    pub fn in_flight(&self) -> usize {
        self.sends.len()
    }

    /// Posts what is not posted, in order, and takes what has ended.
    fn advance(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let posted = self.sends.len() - self.unposted;
        for send in self.sends.iter_mut().skip(posted) {
            if let Send::Going(op) = send {
                match Pin::new(&mut *op).poll(cx) {
                    Poll::Ready(done) => *send = Send::Gone(done),
                    Poll::Pending if op.is_posted() => {}
                    Poll::Pending => break,
                }
            }
            self.unposted -= 1;
        }
        while self.sends.len() > self.unposted {
            let Some(first) = self.sends.front_mut() else { break };
            if let Send::Going(op) = first {
                match Pin::new(op).poll(cx) {
                    Poll::Ready(done) => *first = Send::Gone(done),
                    Poll::Pending => break,
                }
            }
            if let Some(Send::Gone(Err(error))) = self.sends.pop_front() {
                self.sends.clear();
                self.unposted = 0;
                return Err(error.into());
            }
        }
        Ok(())
    }
}

impl<B: SourceBuffer> Sink<B> for Sender<B> {
    type Error = Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if self.sends.len() < self.most && self.unposted == 0 {
            return Poll::Ready(Ok(()));
        }
        self.advance(cx)?;
        if self.sends.len() < self.most { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn start_send(mut self: Pin<&mut Self>, buffer: B) -> Result<()> {
        let mut op = self.connection.send(buffer);
        // Behind others that wait it waits as well: the order is that of starting.
        if self.unposted > 0 {
            self.unposted += 1;
        } else {
            match op.try_post() {
                Ok(()) => {}
                Err(error) if waits(&error) => self.unposted += 1,
                Err(error) => return Err(error),
            }
        }
        self.sends.push_back(Send::Going(op));
        Ok(())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.advance(cx)?;
        if self.sends.is_empty() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.poll_flush(cx)
    }
}

/// Whether the operation can be posted later.
fn waits(error: &Error) -> bool {
    match error {
        Error::QueueFull { .. } => true,
        #[cfg(feature = "cuda")]
        Error::Gpu(error) => matches!(**error, crate::gpu::GpuError::Busy { .. }),
        _ => false,
    }
}

impl<B: SourceBuffer> fmt::Debug for Sender<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender")
            .field("connection", &self.connection)
            .field("in_flight", &self.sends.len())
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}
