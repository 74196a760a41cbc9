//! The task of each peer: keeps receives posted, answers requests, hands answers on, ends leases.

use std::collections::{HashSet, VecDeque};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::OptionFuture;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, sleep_until};

use super::inbox::{Inbox, Message};
use super::leases::{LeaseEnd, Memory, deadline, wall_clock};
use super::region::PeerRegion;
use super::shared::{ANSWERS, RECEIVES, REQUESTS, Shared};
use super::wire::{Frame, HEADER, Request, Response, Token, immediate};
use crate::error::{CloseReason, Error, Result};
use crate::memory::{Access, Buffer, BufferPool, ProtectionDomain};
use crate::op::{ReceiveOp, Received, SendOp};

/// Messages for which there is no room yet: as many as a peer may send at a time.
const DOOR: usize = RECEIVES;

/// Larger alignments than a page's are for nobody who asks over a network.
const LARGEST_ALIGN: u64 = 4096;

/// `enum` of the answers to a region that was sent.
pub(super) const REGION_TAKEN: u32 = 0;
pub(super) const REGION_TOO_LATE: u32 = 1;
pub(super) const REGION_REFUSED: u32 = 2;

enum Event {
    Received(Received<Buffer>),
    /// The user took a message, and others wait for its place.
    Room,
    /// A lease ends.
    Due,
    Nothing,
}

pub(super) struct Agent {
    shared: Arc<Shared>,
    pool: BufferPool,
    receives: VecDeque<ReceiveOp<Buffer>>,
    answers: VecDeque<SendOp<Buffer>>,
    inbox: Inbox,
    /// Not answered yet, so that whoever sent them waits.
    door: VecDeque<(u64, Message)>,
    /// Requests to release memory of the peer that it has not answered yet.
    releasing: HashSet<u64>,
}

impl Agent {
    /// With its receives posted: the peer may send at any time.
    pub(super) fn new(shared: Arc<Shared>, inbox: Inbox) -> Result<Self> {
        let settings = &shared.settings;
        let count = RECEIVES + DOOR + settings.backlog;
        let pool = BufferPool::new(shared.connection.domain(), HEADER + settings.max_message, count)?;
        let mut this = Self {
            shared,
            pool,
            receives: VecDeque::new(),
            answers: VecDeque::new(),
            inbox,
            door: VecDeque::new(),
            releasing: HashSet::new(),
        };
        for _ in 0..RECEIVES {
            this.post_receive()?;
        }
        Ok(this)
    }

    pub(super) async fn run(mut self) {
        let error = loop {
            if let Err(error) = self.step().await {
                break error;
            }
        };
        // Usually that is how the end of the connection looks from here.
        if self.shared.connection.close_reason().is_none() {
            tracing::warn!(peer = self.shared.connection.peer(), %error, "cannot go on, so the connection ends");
            self.shared.connection.end(CloseReason::Local);
        }
        self.shared.calls.close();
        let memory = self.shared.leases.lock().close();
        for memory in memory {
            memory.end(LeaseEnd::Closed).await;
        }
    }

    async fn step(&mut self) -> Result<()> {
        self.release_regions()?;
        match self.next().await? {
            Event::Received(received) => {
                // Before anything is answered: an answer lets the peer send again. Where that fails, what came is not lost.
                let posted = self.post_receive();
                self.received(received).await?;
                posted
            }
            Event::Room => self.admit(),
            Event::Due => {
                let due = self.shared.leases.lock().due(Instant::now());
                for memory in due {
                    memory.end(LeaseEnd::Expired).await;
                }
                Ok(())
            }
            Event::Nothing => Ok(()),
        }
    }

    /// What happens next. Cancel safe.
    async fn next(&mut self) -> Result<Event> {
        let alarm = self.shared.leases.lock().next_deadline();
        let Self { shared, receives, answers, inbox, door, .. } = self;
        tokio::select! {
            received = front(receives), if answers.len() < ANSWERS => Ok(Event::Received(received?)),
            sent = front(answers), if !answers.is_empty() => {
                sent?;
                Ok(Event::Nothing)
            }
            _ = inbox.messages.reserve(), if !door.is_empty() => Ok(Event::Room),
            () = shared.wake.notified() => Ok(Event::Nothing),
            Some(()) = OptionFuture::from(alarm.map(sleep_until)) => Ok(Event::Due),
        }
    }

    /// The user holds buffers of the pool for as long as it likes, and then others take their place.
    fn post_receive(&mut self) -> Result<()> {
        let buffer = match self.pool.try_get() {
            Some(buffer) => buffer,
            None => self.shared.connection.domain().alloc(self.pool.buffer_len())?,
        };
        let mut receive = self.shared.connection.receive(buffer);
        receive.try_post()?;
        self.receives.push_back(receive);
        Ok(())
    }

    async fn received(&mut self, received: Received<Buffer>) -> Result<()> {
        if !received.in_buffer {
            let notice = immediate(received.immediate.unwrap_or_default());
            if self.inbox.notices.try_send(notice).is_err() {
                self.shared.refuse(format_args!("notice {notice:#x}: {} wait already", self.shared.settings.backlog));
            }
            return Ok(());
        }
        match Frame::decode(received.message()) {
            Ok(Frame::Request(id, Request::Data { length })) => {
                let mut buffer = received.buffer;
                let mut data = buffer.split_off(HEADER)?;
                // Not longer than the buffer: it was compared with what came.
                data.split_off(length as usize)?;
                self.message(id, Message::new(data, received.immediate.map(immediate)))
            }
            Ok(Frame::Request(id, request)) => self.request(id, request).await,
            Ok(Frame::Response(id, response)) => {
                self.releasing.remove(&id);
                // Nobody waits for the memory any more that came too late.
                if let Err(Response::Alloc(token)) = self.shared.calls.complete(id, response) {
                    self.shared.release(token);
                }
                Ok(())
            }
            Err(error) => Err(self.shared.broken(&error.to_string())),
        }
    }

    /// Answered when it has its place: a peer that sends faster than the user receives waits.
    fn message(&mut self, id: u64, message: Message) -> Result<()> {
        if self.door.len() == DOOR {
            self.shared.refuse(format_args!("a message of {} bytes: nobody receives them", message.len()));
            return Ok(());
        }
        self.door.push_back((id, message));
        self.admit()
    }

    /// Lets those in that there is room for.
    fn admit(&mut self) -> Result<()> {
        while let Some((id, message)) = self.door.pop_front() {
            match self.inbox.messages.try_send(message) {
                Ok(()) => self.answer(id, Response::Data { status: 0 })?,
                Err(TrySendError::Full(message)) => {
                    self.door.push_front((id, message));
                    break;
                }
                // The user's handle is gone, and so is the connection, soon.
                Err(TrySendError::Closed(_)) => {}
            }
        }
        Ok(())
    }

    async fn request(&mut self, id: u64, request: Request) -> Result<()> {
        match request {
            Request::Alloc { size, align, lease } => match self.allocate(size, align, lease) {
                Ok(token) => self.answer(id, Response::Alloc(token)),
                Err(why) => {
                    // The protocol has no answer that says no. Without one, the peer's program gets an error in time.
                    self.shared.refuse(format_args!("{size} bytes of memory, aligned to {align}: {why}"));
                    Ok(())
                }
            },
            Request::Release(token) => {
                let memory = self.shared.leases.lock().take(&token);
                if let Some(memory) = memory {
                    memory.end(LeaseEnd::Released).await;
                }
                self.answer(id, Response::Release { status: 0 })
            }
            Request::Lend(token) => {
                let region = PeerRegion::lent(&self.shared, token);
                let status = match self.inbox.regions.try_send(region) {
                    Ok(()) => REGION_TAKEN,
                    Err(refused) => {
                        // The peer keeps it, so it is not to be released.
                        refused.into_inner().end();
                        self.shared.refuse(format_args!("a region: {} wait already", self.shared.settings.backlog));
                        REGION_REFUSED
                    }
                };
                self.answer(id, Response::Region { status })
            }
            Request::Return(token) => {
                let status = self.returned(&token).await;
                self.answer(id, Response::Region { status })
            }
            Request::Data { .. } => Ok(()),
        }
    }

    /// Memory for the peer, within what the user allows.
    fn allocate(&self, size: u64, align: u64, lease: Duration) -> std::result::Result<Token, String> {
        let Shared { connection, settings, leases, .. } = &*self.shared;
        if !align.is_power_of_two() || align > LARGEST_ALIGN {
            return Err(format!("alignments are powers of two, up to {LARGEST_ALIGN}"));
        }
        if size == 0 || !leases.lock().affords(size) {
            let (spent, budget) = (leases.lock().spent(), settings.budget);
            return Err(format!("{spent} of the budget's {budget} bytes are in use; PeerBuilder::budget sets it"));
        }
        let lease = lease.min(settings.longest_lease);
        let region = expose(connection.domain(), size).map_err(|error| error.to_string())?;
        let token = Token { region: region.remote(), deadline: wall_clock(lease) };
        let refused = leases.lock().insert(Memory::Asked(region), token.region, deadline(lease));
        refused.map(|()| token).map_err(|_| "the connection has ended".to_owned())
    }

    /// Memory of this side comes back: what the peer asked for goes to the user, what the user lent is the user's.
    async fn returned(&mut self, token: &Token) -> u32 {
        let leases = &self.shared.leases;
        let asked_for = leases.lock().was_asked_for(token);
        let place = self.inbox.returned.try_reserve();
        if asked_for && place.is_err() {
            self.shared.refuse(format_args!("memory that comes back: {} wait already", self.shared.settings.backlog));
            return REGION_REFUSED;
        }
        let memory = leases.lock().take(token);
        match (memory, place) {
            (Some(Memory::Asked(region)), Ok(place)) => {
                place.send(region.reclaim().await);
                REGION_TAKEN
            }
            (Some(memory), _) => {
                memory.end(LeaseEnd::Returned).await;
                REGION_TAKEN
            }
            (None, _) => REGION_TOO_LATE,
        }
    }

    fn answer(&mut self, id: u64, response: Response) -> Result<()> {
        self.push(&response.encode(id))
    }

    /// Sends what nobody waits for.
    fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let mut sending = self.shared.connection.send(self.shared.header(bytes)?);
        match sending.try_post() {
            // It waits for its turn in the queue when its own has come here.
            Ok(()) | Err(Error::QueueFull { .. }) => self.answers.push_back(sending),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Tells the peer which memory is not needed any more.
    fn release_regions(&mut self) -> Result<()> {
        // No more than a call may have unanswered: the peer keeps few receives posted, and its answers need some of this side's.
        while self.releasing.len() < REQUESTS && self.answers.len() < ANSWERS {
            let Some(token) = self.shared.releases.lock().pop_front() else { break };
            let id = self.shared.calls.id();
            self.releasing.insert(id);
            self.push(&Request::Release(token).encode(id))?;
        }
        Ok(())
    }
}

impl Drop for Agent {
    /// The runtime may have ended before the connection did.
    fn drop(&mut self) {
        self.shared.calls.close();
        let memory = self.shared.leases.lock().close();
        memory.into_iter().for_each(Memory::abandon);
    }
}

fn expose(domain: &ProtectionDomain, size: u64) -> Result<crate::memory::ExposedRegion> {
    // The device's limit, which is below what a length can be.
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    Ok(domain.alloc(size)?.expose(Access::all())?)
}

/// The first of the operations, which ends before the others do. Cancel safe.
async fn front<F: Future + Unpin>(operations: &mut VecDeque<F>) -> F::Output {
    let output = poll_fn(|cx| match operations.front_mut() {
        Some(operation) => Pin::new(operation).poll(cx),
        None => std::task::Poll::Pending,
    });
    let output = output.await;
    operations.pop_front();
    output
}
