//! A receive of a shared queue: a buffer for one message of any of its connections.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::task::coop;

use crate::completion::shared::SharedQueue;
use crate::completion::table::{Abandoned, Done, Outcome};
use crate::connection::ConnectionId;
use crate::error::{Error, Operation, WcStatus};
use crate::memory::{AnyBuffer, TargetBuffer};
use crate::op::core::{Ended, Finished, State};
use crate::op::role::Role;
use crate::op::typed::{Engine, Typed, common_methods};
use crate::op::{OpError, Received};
use crate::provider::WorkCompletion;

/// A posted (or about to be posted) receive of a shared queue; see [`SharedReceiveQueue::receive`](crate::SharedReceiveQueue::receive).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled or posted"]
pub struct SharedReceiveOp<B: TargetBuffer> {
    op: Typed<B, SharedOp>,
}

common_methods!(SharedReceiveOp<B: TargetBuffer>, crate::op::shared::SharedOp);

impl<B: TargetBuffer> SharedReceiveOp<B> {
    fn output(done: WorkCompletion, buffer: B) -> (ConnectionId, Received<B>) {
        (ConnectionId::new(done.source), Received::new(&done, buffer))
    }
}

impl<B: TargetBuffer> Future for SharedReceiveOp<B> {
    type Output = Result<(ConnectionId, Received<B>), OpError<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.op.poll(cx).map_ok(|(done, buffer)| Self::output(done, buffer))
    }
}

/// What carries it out; the rules are those of [`Op`](crate::op::core::Op).
#[derive(Debug)]
pub(crate) struct SharedOp {
    queue: Arc<SharedQueue>,
    buffer: Option<AnyBuffer>,
    state: State,
}

impl SharedOp {
    pub(crate) fn new(queue: Arc<SharedQueue>, buffer: AnyBuffer) -> Self {
        Self { queue, buffer: Some(buffer), state: State::New { refused: false } }
    }

    /// Checks and posts, unless that was done. After an error it can be tried again, with the same result.
    fn advance(&mut self, cx: Option<&mut Context<'_>>) -> Poll<Result<(), Error>> {
        let mut ticket = match self.state {
            State::New { .. } => {
                if let Some(Err(error)) = self.buffer.as_ref().map(|buffer| check(buffer, &self.queue)) {
                    return Poll::Ready(Err(error));
                }
                None
            }
            State::Waiting(ticket) => ticket,
            State::Posted(_) => return Poll::Ready(Ok(())),
            State::Finished => return Poll::Ready(Err(polled_after_end())),
        };
        let posted = self.queue.submit(&mut self.buffer, &mut ticket, None, cx);
        self.state = State::Waiting(ticket);
        match posted {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(key)) => {
                self.state = State::Posted(key);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(rejected)) => Poll::Ready(Err(rejected.into_error(RECEIVE.name()))),
        }
    }
}

const RECEIVE: Operation = Operation::Receive;

/// Everything that can be refused without asking the device.
pub(crate) fn check(buffer: &AnyBuffer, queue: &SharedQueue) -> Result<(), Error> {
    buffer.check_domain(RECEIVE, queue.domain.id())?;
    buffer.check_ready(RECEIVE.name(), Role::Target)?;
    buffer.check_writable(RECEIVE.name())?;
    let (entries, most) = (buffer.entries() as u64, u64::from(queue.max_sge));
    if entries > most {
        return Err(Error::Limit {
            operation: RECEIVE.name(),
            what: "number of scatter/gather entries",
            value: entries,
            limit: most,
            hint: "raise max_sge of the shared receive queue",
        });
    }
    Ok(())
}

/// What a finished receive got, or why it failed; counted.
pub(crate) fn finish(queue: &SharedQueue, buffer: AnyBuffer, outcome: Outcome) -> Finished {
    let meters = queue.domain.meters();
    let error = match outcome {
        Outcome::Completed(done) if done.status == WcStatus::Success => {
            meters.completed(RECEIVE, done.byte_len.into());
            return Ok((done, buffer));
        }
        Outcome::Completed(done) => {
            Error::Completion { operation: RECEIVE, status: done.status, vendor_error: done.vendor_error, remote: None }
        }
        Outcome::Closed(reason) => Error::Closed { operation: RECEIVE.name(), reason },
        Outcome::NotPosted(reason) => Error::Invalid { operation: RECEIVE.name(), reason: reason.to_owned() },
    };
    meters.failed(RECEIVE, &error);
    Err(OpError::new(error, Some(buffer)))
}

fn polled_after_end() -> Error {
    let reason = "the future was polled after it had finished".to_owned();
    Error::Invalid { operation: RECEIVE.name(), reason }
}

impl Engine for SharedOp {
    fn operation(&self) -> &'static str {
        RECEIVE.name()
    }

    fn role(&self) -> Role {
        Role::Target
    }

    fn unposted(&mut self) -> Option<&mut AnyBuffer> {
        match self.state {
            State::New { .. } | State::Waiting(_) => self.buffer.as_mut(),
            _ => None,
        }
    }

    fn refuse(&mut self, error: Error) -> OpError<AnyBuffer> {
        if let State::Waiting(Some(ticket)) = std::mem::replace(&mut self.state, State::Finished) {
            self.queue.receive.leave(ticket);
        }
        OpError::new(error, self.buffer.take())
    }

    fn poll(&mut self, cx: &mut Context<'_>, done: &mut Done<AnyBuffer>) -> Poll<Ended> {
        if let Err(error) = ready!(self.advance(Some(cx))) {
            self.state = State::Finished;
            self.queue.domain.meters().failed(RECEIVE, &error);
            return Poll::Ready(Err(OpError::new(error, self.buffer.take())));
        }
        let State::Posted(key) = self.state else {
            return Poll::Ready(Err(OpError::new(polled_after_end(), None)));
        };
        // For the same reasons as any operation, see `Op`.
        let budget = ready!(coop::poll_proceed(cx));
        let mut ended = self.queue.receive.poll_done(key, Some(cx));
        if ended.is_pending() && self.queue.look() {
            ended = self.queue.receive.poll_done(key, None);
        }
        let ended = ready!(ended);
        budget.made_progress();
        self.queue.taken();
        self.state = State::Finished;
        let Some((buffer, outcome)) = ended else {
            return Poll::Ready(Err(OpError::new(polled_after_end(), None)));
        };
        let (completion, buffer) = finish(&self.queue, buffer, outcome)?;
        *done = Done { owner: Some(buffer), outcome: Some(Outcome::Completed(completion)) };
        Poll::Ready(Ok(()))
    }

    fn try_post(&mut self) -> Result<(), Error> {
        match self.advance(None) {
            Poll::Ready(result) => result,
            Poll::Pending => Err(Error::QueueFull { operation: RECEIVE, depth: self.queue.receive.depth() }),
        }
    }

    fn is_posted(&self) -> bool {
        matches!(self.state, State::Posted(_))
    }

    fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self.state {
            State::Posted(key) => self.queue.receive.poll_ended(key, cx),
            State::New { .. } | State::Waiting(_) => Poll::Pending,
            State::Finished => Poll::Ready(()),
        }
    }

    fn expire(&mut self, after: Duration) -> Finished {
        let table = &self.queue.receive;
        let buffer = match std::mem::replace(&mut self.state, State::Finished) {
            State::Posted(key) => match table.abandon(key) {
                Abandoned::Done(buffer, outcome) => return finish(&self.queue, buffer, outcome),
                Abandoned::Parked(buffer) => Some(buffer),
                Abandoned::Held | Abandoned::Gone => None,
            },
            State::Waiting(ticket) => {
                ticket.into_iter().for_each(|ticket| table.leave(ticket));
                self.buffer.take()
            }
            State::New { .. } | State::Finished => self.buffer.take(),
        };
        let hint = match buffer {
            Some(_) => "it was still waiting for its turn, and will not be posted",
            None => "it stays posted, and its buffer quarantined, until a message has used it",
        };
        let error = Error::Timeout { operation: RECEIVE.name(), after, hint: hint.into() };
        self.queue.domain.meters().failed(RECEIVE, &error);
        Err(OpError::new(error, buffer))
    }
}

impl Drop for SharedOp {
    fn drop(&mut self) {
        match self.state {
            State::Waiting(Some(ticket)) => self.queue.receive.leave(ticket),
            State::Posted(key) => drop(self.queue.receive.abandon(key)),
            _ => {}
        }
    }
}
