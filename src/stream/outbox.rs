//! What was written and is not with the peer yet.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::memory::{Buffer, BufferPool};
use crate::op::SendOp;
use crate::stream::wire::{Kind, immediate};

#[derive(Debug)]
pub(super) struct Outbox {
    connection: Connection,
    pool: BufferPool,
    /// Longest payload of a message, in bytes.
    frame_len: usize,
    filling: Option<Filling>,
    /// In order; the device has all of them but perhaps the last, which then waits for a slot of the send queue.
    sends: VecDeque<SendOp<Buffer>>,
    most_sends: usize,
    /// While no more messages than these are with the device and not with the peer, nothing waits for their buffers.
    patience: u32,
    /// An empty buffer, for messages that are nothing but their immediate data.
    bare: Buffer,
}

#[derive(Debug)]
struct Filling {
    buffer: Buffer,
    len: usize,
}

impl Outbox {
    pub(super) fn new(
        connection: Connection,
        pool: BufferPool,
        bare: Buffer,
        frame_len: usize,
        most_sends: usize,
        patience: u32,
    ) -> Self {
        let sends = VecDeque::with_capacity(most_sends);
        Self { connection, pool, frame_len, filling: None, sends, most_sends, patience, bare }
    }

    /// Says hello.
    pub(super) fn start(&mut self, hello: Buffer) -> Result<()> {
        self.post(hello, Kind::Hello, 0)
    }

    /// The peer takes messages up to this length.
    pub(super) fn meet(&mut self, frame_len: usize) {
        self.frame_len = self.frame_len.min(frame_len);
    }

    /// Copies as much as there is room for in the buffer that is being filled, and returns how much that is.
    /// `Err` when a send has failed whose buffer would have been the next.
    pub(super) fn fill(&mut self, bytes: &[u8], cx: &mut Context<'_>) -> Result<usize> {
        if self.filling.is_none() {
            self.filling = self.free_buffer(cx)?.map(|buffer| Filling { buffer, len: 0 });
        }
        let Some(Filling { buffer, len }) = &mut self.filling else { return Ok(0) };
        let count = bytes.len().min(buffer.len() - *len);
        buffer[*len..*len + count].copy_from_slice(&bytes[..count]);
        *len += count;
        Ok(count)
    }

    /// Whether bytes wait to be posted.
    pub(super) fn has_data(&self) -> bool {
        self.filling.as_ref().is_some_and(|filling| filling.len > 0)
    }

    /// Whether everything is with the device.
    pub(super) fn is_posted(&self) -> bool {
        !self.has_data() && self.sends.back().is_none_or(SendOp::is_posted)
    }

    /// Whether everything is with the peer.
    pub(super) fn is_empty(&self) -> bool {
        !self.has_data() && self.sends.is_empty()
    }

    /// Resolves when one more message can be posted.
    pub(super) fn poll_room(&mut self, cx: &mut Context<'_>) -> Result<Poll<()>> {
        if let Some(last) = self.sends.back_mut().filter(|last| !last.is_posted()) {
            match Pin::new(&mut *last).poll(cx) {
                Poll::Ready(sent) => {
                    self.sends.pop_back();
                    sent?;
                }
                Poll::Pending if !last.is_posted() => return Ok(Poll::Pending),
                Poll::Pending => {}
            }
        }
        while self.sends.len() >= self.most_sends {
            match self.reap(cx) {
                Poll::Ready(sent) => sent?,
                Poll::Pending => return Ok(Poll::Pending),
            }
        }
        Ok(Poll::Ready(()))
    }

    /// Posts a message of the bytes that were filled in. There is room for it.
    pub(super) fn post_data(&mut self, credits: u32) -> Result<()> {
        let Some(Filling { mut buffer, len }) = self.filling.take() else { return Ok(()) };
        let count = len.min(self.frame_len);
        let message = buffer.split_to(count)?;
        if len > count {
            // The peer's slots are shorter than ours.
            self.filling = Some(Filling { buffer, len: len - count });
        }
        self.post(message, Kind::Data, credits)
    }

    /// Posts a message without a payload.
    pub(super) fn post_bare(&mut self, kind: Kind, credits: u32) -> Result<()> {
        let message = self.bare.split_to(0)?;
        self.post(message, kind, credits)
    }

    /// Lets go of the oldest message, once the peer has it.
    pub(super) fn reap(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let Some(first) = self.sends.front_mut() else { return Poll::Ready(Ok(())) };
        let sent = ready!(Pin::new(first).poll(cx));
        self.sends.pop_front();
        Poll::Ready(sent.map(drop).map_err(Error::from))
    }

    fn post(&mut self, message: Buffer, kind: Kind, credits: u32) -> Result<()> {
        let patience = match kind {
            Kind::Data | Kind::Credits => self.patience,
            // Whoever shuts the stream down waits for it.
            Kind::End | Kind::Hello => 0,
        };
        let mut send = self.connection.send_patiently(message, immediate(kind, credits), patience);
        match send.try_post() {
            Ok(()) | Err(Error::QueueFull { .. }) => {}
            Err(error) => return Err(error),
        }
        self.sends.push_back(send);
        Ok(())
    }

    /// A send buffer, perhaps one that the peer has just got the contents of.
    fn free_buffer(&mut self, cx: &mut Context<'_>) -> Result<Option<Buffer>> {
        loop {
            let buffer = self.pool.try_get();
            if buffer.is_some() || self.sends.is_empty() {
                return Ok(buffer);
            }
            match self.reap(cx) {
                Poll::Ready(sent) => sent?,
                Poll::Pending => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;
    use crate::connection::Listener;
    use crate::device::Device;
    use crate::error::WcStatus;

    #[tokio::test]
    async fn a_failed_send_is_told_of_by_whoever_wants_its_buffer() {
        let domain = Device::builder("soft0").open().unwrap().alloc_pd().unwrap();
        let listener = Listener::bind(&domain, "127.0.0.1:0").await.unwrap();
        let connecting = Connection::builder(&domain).rnr_retry(0).connect(listener.local_address());
        let (connection, _peer) = tokio::try_join!(connecting, listener.accept()).unwrap();
        let pool = BufferPool::new(&domain, 8, 1).unwrap();
        let mut outbox = Outbox::new(connection, pool, domain.alloc(1).unwrap(), 8, 1, 0);
        let filled = outbox.fill(b"12345678", &mut Context::from_waker(std::task::Waker::noop()));
        assert_eq!(filled.unwrap(), 8);
        // The peer has posted no receive.
        outbox.post_data(0).unwrap();
        let failing = poll_fn(|cx| match outbox.fill(b"9", cx) {
            Ok(0) => Poll::Pending,
            other => Poll::Ready(other),
        });
        let error = tokio::time::timeout(Duration::from_secs(20), failing).await.unwrap().unwrap_err();
        assert!(matches!(error, Error::Completion { status: WcStatus::RnrRetryExceeded, .. }), "{error}");
    }
}
