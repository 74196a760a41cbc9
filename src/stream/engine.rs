//! A stream's bookkeeping and its operations: what whoever polls the stream carries on, for both directions.

mod inward;

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use tokio::io::ReadBuf;

use crate::connection::Connection;
use crate::error::{CloseReason, Error, Result};
use crate::memory::{Buffer, BufferPool};
use crate::op::ReceiveOp;
use crate::stream::credits::Credits;
use crate::stream::failure::{self, io_error};
use crate::stream::inbox::Inbox;
use crate::stream::outbox::Outbox;
use crate::stream::settings::StreamSettings;
use crate::stream::wakers::Wakers;
use crate::stream::wire::{HELLO_LEN, Hello, Kind};

const READ: &str = "read from the stream";
const WRITE: &str = "write to the stream";

/// How far this side is with saying that it writes no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    No,
    /// As soon as everything before it is posted.
    Wanted,
    Posted,
}

#[derive(Debug)]
pub(super) struct Engine {
    connection: Connection,
    wakers: Arc<Wakers>,
    /// Of `wakers`: for the receive that is next, and for sends.
    anybody: Waker,
    /// For the receive whose end means that the peer may have no credits left.
    keeper: Waker,
    /// In the order of posting.
    receives: VecDeque<ReceiveOp<Buffer>>,
    /// Receives that were taken so far: the number of the first of `receives`.
    taken: u64,
    /// The number of the receive that wakes the keeper.
    watched: u64,
    credits: Credits,
    inbox: Inbox,
    outbox: Outbox,
    /// The peer has said hello.
    met: bool,
    /// The peer writes no more.
    peer_ended: bool,
    end: End,
    /// Nobody has the stream any more.
    closing: bool,
    failed: Option<CloseReason>,
    /// Times that somebody read: whether anybody does, the keeper asks.
    pub reads: u64,
}

impl Engine {
    pub(super) fn new(connection: Connection, settings: &StreamSettings, wakers: Arc<Wakers>) -> Result<Self> {
        let slots = settings.receive_slots;
        let receives = settings.receives();
        let domain = connection.domain();
        let pool = BufferPool::new(domain, settings.frame_len, (receives + settings.send_buffers) as usize)?;
        let mut hello = domain.alloc(HELLO_LEN)?;
        hello.copy_from_slice(&Hello { frame_len: settings.frame_len as u32, slots }.encode());
        let frame_len = (settings.frame_len as u64).min(connection.max_message()) as usize;
        let message = hello.split_to(HELLO_LEN)?;
        let (sends, patience) = (settings.sends() as usize, settings.send_buffers / 2);
        let outbox = Outbox::new(connection.clone(), pool.clone(), hello, frame_len, sends, patience);
        let mut engine = Self {
            anybody: wakers.clone().into(),
            keeper: wakers.keeper.waker(),
            wakers,
            receives: VecDeque::with_capacity(receives as usize),
            taken: 0,
            watched: 0,
            credits: Credits::new(slots),
            inbox: Inbox::new(slots as usize, settings.receive_limit),
            outbox,
            met: false,
            peer_ended: false,
            end: End::No,
            closing: false,
            failed: None,
            reads: 0,
            connection,
        };
        for _ in 0..receives {
            // One each, by construction; the others are for sending.
            if let Some(buffer) = pool.try_get() {
                let mut receive = engine.connection.receive(buffer);
                receive.try_post()?;
                engine.receives.push_back(receive);
            }
        }
        engine.outbox.start(message)?;
        engine.watch();
        Ok(engine)
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Bytes, or the end (nothing is added to `out`), if there are any.
    pub(super) fn read(&mut self, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.inbox.len() > 0 {
            self.reads += 1;
            while let Some(buffer) = self.inbox.read(out) {
                self.free(buffer);
            }
            if self.credits.due() {
                self.push_out();
            } else {
                self.watch();
            }
            return Poll::Ready(Ok(()));
        }
        match &self.failed {
            _ if self.peer_ended => Poll::Ready(Ok(())),
            // What had arrived before is read first.
            Some(reason) if self.receives.is_empty() => Poll::Ready(Err(io_error(READ, reason))),
            _ => Poll::Pending,
        }
    }

    /// Takes in what has arrived, until there are bytes to read.
    pub(super) fn advance_for_reader(&mut self, wanted: usize) {
        self.reads += 1;
        // A task that has much to do comes here more often than messages do.
        if !self.wakers.news.swap(false, Ordering::SeqCst) && self.failed.is_none() {
            return;
        }
        let credits = self.credits.available();
        self.take_in(wanted);
        self.push_out();
        if self.credits.available() > credits || self.failed.is_some() {
            self.wakers.writer.wake();
        }
    }

    /// Copies what fits now, as much of it as there are credits for, and one buffer more. Nothing fits: `Pending`.
    pub(super) fn write(&mut self, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if let Err(error) = self.check_writable() {
            return Poll::Ready(Err(error));
        }
        let mut copied = 0;
        for buf in bufs {
            let mut rest = &buf[..];
            while !rest.is_empty() {
                let count = match self.outbox.fill(rest, &mut Context::from_waker(&self.anybody)) {
                    Ok(count) => count,
                    Err(error) => {
                        self.fail(failure::reason(error, &self.connection));
                        return self.wrote(copied);
                    }
                };
                rest = &rest[count..];
                copied += count;
                if count == 0 {
                    // A full buffer that can go makes room for another.
                    let before = self.credits.available();
                    self.push_out();
                    if self.credits.available() == before {
                        return self.wrote(copied);
                    }
                }
            }
        }
        self.push_out();
        self.wrote(copied)
    }

    fn wrote(&self, copied: usize) -> Poll<io::Result<usize>> {
        match (&self.failed, copied) {
            (Some(reason), 0) => Poll::Ready(Err(io_error(WRITE, reason))),
            (None, 0) => Poll::Pending,
            _ => Poll::Ready(Ok(copied)),
        }
    }

    /// Whether there is any use in writing.
    pub(super) fn check_writable(&self) -> io::Result<()> {
        match &self.failed {
            Some(reason) => Err(io_error(WRITE, reason)),
            None if self.end > End::No => Err(failure::after_shutdown()),
            None => Ok(()),
        }
    }

    /// Takes in what has arrived, credits above all, and sends what it can.
    pub(super) fn advance_for_writer(&mut self) {
        let unread = self.inbox.len();
        self.take_in(usize::MAX);
        self.push_out();
        if self.inbox.len() > unread || self.peer_ended || self.failed.is_some() {
            self.wakers.reader.wake();
        }
    }

    /// Everything that was written is with the device.
    pub(super) fn flushed(&self) -> Poll<io::Result<()>> {
        match &self.failed {
            _ if self.outbox.is_posted() => Poll::Ready(Ok(())),
            Some(reason) => Poll::Ready(Err(io_error("flush the stream", reason))),
            None => Poll::Pending,
        }
    }

    /// No more will be written. Whoever says so need not come back: the end goes now, or the keeper sends it.
    pub(super) fn want_end(&mut self) {
        if self.end == End::No {
            self.end = End::Wanted;
            self.push_out();
        }
    }

    /// Everything that was written, and the end, is with the peer.
    pub(super) fn ended(&mut self) -> Poll<io::Result<()>> {
        if self.failed.is_none() && self.end == End::Posted {
            while !self.outbox.is_empty() {
                match self.outbox.reap(&mut Context::from_waker(&self.anybody)) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(())) => {}
                    Poll::Ready(Err(error)) => {
                        self.fail(failure::reason(error, &self.connection));
                        break;
                    }
                }
            }
        }
        match &self.failed {
            None if self.end < End::Posted => Poll::Pending,
            None => Poll::Ready(Ok(())),
            // The peer had read to the end, or needs no more: it is gone, and took the last acknowledgement along.
            Some(CloseReason::Peer) if self.end == End::Posted && self.peer_ended => Poll::Ready(Ok(())),
            // Its end may be among what has arrived, which is taken in first.
            Some(CloseReason::Peer) if self.end == End::Posted && !self.receives.is_empty() => Poll::Pending,
            Some(reason) => Poll::Ready(Err(io_error("shut the stream down", reason))),
        }
    }

    /// Whether messages could be moved out of their slots, or are still to be taken.
    pub(super) fn can_spill(&self) -> bool {
        self.inbox.can_spill()
    }

    /// Whether the peer has used what it was lent, so that it can write only if somebody reads. Wakes the keeper then, or later.
    pub(super) fn starves(&mut self) -> bool {
        if self.failed.is_some() || self.peer_ended {
            return false;
        }
        let Some(last) = self.credits.lent().checked_sub(1) else { return true };
        let waker = if last == 0 { &self.anybody } else { &self.keeper };
        let cx = &mut Context::from_waker(waker);
        self.watched = self.taken + u64::from(last);
        self.receives.get(last as usize).is_some_and(|receive| receive.poll_ended(cx).is_ready())
    }

    /// Moves unread messages out of their slots, as far as the limit allows. Returns whether there may be more to do at once.
    pub(super) fn spill(&mut self) -> bool {
        self.advance_for_writer();
        let mut moved = false;
        while let Some(buffer) = self.inbox.spill() {
            self.free(buffer);
            moved = true;
        }
        self.push_out();
        moved || self.has_arrived()
    }

    /// Nobody has the stream any more: what was not read never will be, and the keeper carries on until the end is said.
    pub(super) fn close(&mut self) {
        self.closing = true;
        self.inbox.discard();
        self.want_end();
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Has the keeper woken in time: when the peer runs out of credits, and, while something is to be sent, at every event.
    fn watch(&mut self) {
        let small = self.credits.lent() <= 1;
        let unsent = self.unsent();
        let keeper = &self.wakers.keeper;
        // It has a look of its own once: whoever is at it now may have no turn left to leave a waker behind.
        let newly = !keeper.wanted.swap(small || unsent, Ordering::SeqCst);
        // The first receive in line wakes whoever waits, so another one has to wake the keeper.
        let unread = small || self.watched <= self.taken;
        if (unsent && (newly || self.has_arrived())) || (unread && self.starves() && self.can_spill()) {
            self.wakers.keeper.task.wake();
        }
    }

    /// Whether a message is there to be taken. Whoever waits is woken by the next one otherwise.
    fn has_arrived(&self) -> bool {
        let cx = &mut Context::from_waker(&self.anybody);
        self.receives.front().is_some_and(|receive| receive.poll_ended(cx).is_ready())
    }

    /// Whether something is to be sent that could not be sent yet, or nobody but the keeper is left to see the end.
    fn unsent(&self) -> bool {
        let due = self.credits.due() && !self.peer_ended;
        self.closing || self.failed.is_none() && (!self.outbox.is_posted() || due || self.end == End::Wanted)
    }

    /// Sends what can be sent: data as far as there are credits, then the end; credits with it, or alone when they are due.
    fn push_out(&mut self) {
        if let Err(error) = self.try_push_out() {
            self.fail(failure::reason(error, &self.connection));
        }
        self.watch();
    }

    fn try_push_out(&mut self) -> Result<(), Error> {
        while self.failed.is_none() && self.outbox.poll_room(&mut Context::from_waker(&self.anybody))?.is_ready() {
            if self.outbox.has_data() && self.credits.available() > 0 {
                self.credits.spend();
                self.outbox.post_data(self.credits.lend())?;
            } else if self.credits.due() && !self.peer_ended {
                self.outbox.post_bare(Kind::Credits, self.credits.lend())?;
            } else if self.end == End::Wanted && !self.outbox.has_data() {
                self.outbox.post_bare(Kind::End, self.credits.lend())?;
                self.end = End::Posted;
            } else {
                break;
            }
        }
        Ok(())
    }

    /// The stream is over, and nothing more is to be taken in.
    fn stop(&mut self, reason: CloseReason) {
        self.fail(reason);
        self.receives.clear();
    }

    /// The stream is over, but for what has arrived. The first reason counts.
    fn fail(&mut self, reason: CloseReason) {
        if self.failed.is_none() {
            tracing::debug!(peer = self.connection.peer(), %reason, "stream ended");
            self.connection.end(reason.clone());
            self.failed = Some(reason);
            self.wakers.wake_halves();
            self.wakers.keeper.task.wake();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.connection.end(CloseReason::Local);
    }
}
