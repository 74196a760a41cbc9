//! What arrives.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use super::Engine;
use crate::error::{CloseReason, Result};
use crate::memory::Buffer;
use crate::op::Received;
use crate::stream::failure;
use crate::stream::wire::{self, Hello, Kind};

impl Engine {
    /// Takes in what has arrived, until that many bytes are unread.
    pub(super) fn take_in(&mut self, wanted: usize) {
        while self.inbox.len() < wanted {
            let Some(receive) = self.receives.front_mut() else { break };
            match Pin::new(receive).poll(&mut Context::from_waker(&self.anybody)) {
                Poll::Pending => break,
                Poll::Ready(received) => {
                    self.receives.pop_front();
                    self.taken += 1;
                    match received {
                        Ok(received) => self.accept(received),
                        Err(error) => self.stop(failure::reason(error.into(), &self.connection)),
                    }
                }
            }
        }
        // The next message leaves no waker behind unless it was asked for.
        if self.inbox.len() >= wanted {
            self.wakers.news.store(true, Ordering::SeqCst);
        }
    }

    fn accept(&mut self, received: Received<Buffer>) {
        if let Err(why) = self.try_accept(received) {
            self.stop(CloseReason::Protocol(why.into()));
        }
    }

    fn try_accept(&mut self, received: Received<Buffer>) -> Result<(), &'static str> {
        let immediate = received.immediate.filter(|_| received.in_buffer);
        let (kind, credits) =
            wire::parse(immediate.ok_or("a message that is no stream's; does the peer use RdmaStream?")?);
        if (kind == Kind::Hello) == self.met {
            return Err("hello is the first message, and no other");
        }
        if kind == Kind::Hello {
            let hello = Hello::decode(received.message())?;
            self.met = true;
            self.credits.meet(hello.slots);
            self.outbox.meet(hello.frame_len as usize);
            self.post(received.buffer);
            return Ok(());
        }
        self.credits.gain(credits)?;
        match kind {
            Kind::Data if self.peer_ended => return Err("data after the end"),
            Kind::Data => {
                self.credits.hold()?;
                match received.len {
                    0 => self.free(received.buffer),
                    len => self.inbox.push(received.buffer, len),
                }
            }
            Kind::End if self.peer_ended => return Err("a second end"),
            Kind::End => {
                self.peer_ended = true;
                self.post(received.buffer);
            }
            Kind::Credits | Kind::Hello => self.post(received.buffer),
        }
        Ok(())
    }

    /// A data slot is free again.
    pub(super) fn free(&mut self, buffer: Buffer) {
        self.post(buffer);
        self.credits.release();
    }

    fn post(&mut self, buffer: Buffer) {
        if self.failed.is_some() {
            return;
        }
        let mut receive = self.connection.receive(buffer);
        match receive.try_post() {
            Ok(()) => {
                self.receives.push_back(receive);
                if self.receives.len() == 1 {
                    // There was none to leave a waker with.
                    self.wakers.news.store(true, Ordering::SeqCst);
                }
            }
            Err(error) => self.fail(failure::reason(error, &self.connection)),
        }
    }
}
