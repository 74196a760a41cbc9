//! What the agent, the user's handles and regions share.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Notify, Semaphore};

use super::calls::Calls;
use super::leases::Leases;
use super::settings::Settings;
use super::wire::{HEADER, Request, Response, Token, immediate};
use crate::connection::Connection;
use crate::error::{CloseReason, Error, Result};
use crate::memory::{Buffer, BufferPool, SgList, SgSegment};
use crate::sync::Mutex;

/// Receives that each end keeps posted. There are no credits: whoever sends more finds the other end not ready.
pub(super) const RECEIVES: usize = 10;

/// Requests of this side that may be unanswered at a time; the rest of the peer's receives are for what this side answers.
pub(super) const REQUESTS: usize = 8;

/// Answers that may be on their way at a time; with that many the peer's requests wait.
pub(super) const ANSWERS: usize = 64;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) connection: Connection,
    pub(super) settings: Settings,
    pub(super) calls: Calls,
    pub(super) leases: Mutex<Leases>,
    /// Memory of the peer to be released; nobody waits for the answers.
    pub(super) releases: Mutex<VecDeque<Token>>,
    /// Wakes the agent for releases and for other deadlines.
    pub(super) wake: Notify,
    /// Requests of the peer that were not answered as it asked.
    pub(super) refused: AtomicU64,
    headers: BufferPool,
    turn: Semaphore,
}

/// An answer and the segments that were sent, or the error and the segments unless the device has them.
pub(super) type Called = Result<(Response, Vec<SgSegment>), (Error, Option<Vec<SgSegment>>)>;

impl Shared {
    pub(super) fn new(connection: Connection, settings: Settings) -> Result<Arc<Self>> {
        // Some to spare for those of cancelled requests, which the device still has.
        let headers = BufferPool::new(connection.domain(), HEADER, 2 * REQUESTS + ANSWERS)?;
        Ok(Arc::new(Self {
            leases: Mutex::new(Leases::new(settings.budget)),
            connection,
            settings,
            calls: Calls::new(),
            releases: Mutex::default(),
            wake: Notify::new(),
            refused: AtomicU64::new(0),
            headers,
            turn: Semaphore::new(REQUESTS),
        }))
    }

    /// Sends a request, with data behind it or an immediate beside it perhaps, and waits for the answer.
    pub(super) async fn call(
        &self,
        operation: &'static str,
        request: Request,
        data: Vec<SgSegment>,
        with: Option<u32>,
    ) -> Called {
        let Ok(_turn) = self.turn.acquire().await else { return Err((self.closed(operation), Some(data))) };
        let Some(mut call) = self.calls.register() else { return Err((self.closed(operation), Some(data))) };
        let header = match self.header(&request.encode(call.id)) {
            Ok(header) => header,
            Err(error) => return Err((error, Some(data))),
        };
        let list = std::iter::once(header.into()).chain(data).collect::<SgList>();
        let sending = match with {
            Some(with) => self.connection.send_with_immediate(list, immediate(with)),
            None => self.connection.send(list),
        };
        let limit = self.settings.answer_timeout;
        let data = match sending.timeout(limit).await {
            Ok(list) => without_header(list),
            Err(failed) => {
                let (error, list) = failed.into_parts();
                return Err((error, list.map(without_header)));
            }
        };
        match tokio::time::timeout(limit, call.answer()).await {
            Ok(Some(response)) => Ok((response, data)),
            Ok(None) => Err((self.closed(operation), Some(data))),
            Err(_) => {
                let hint = "the peer has the request, and has not answered it".into();
                Err((Error::Timeout { operation, after: limit, hint }, Some(data)))
            }
        }
    }

    /// A registered copy of a request or an answer.
    pub(super) fn header(&self, bytes: &[u8]) -> Result<Buffer> {
        let mut buffer = match self.headers.try_get() {
            Some(buffer) => buffer,
            None => self.connection.domain().alloc(HEADER)?,
        };
        let mut header = buffer.split_to(bytes.len())?;
        header.copy_from_slice(bytes);
        Ok(header)
    }

    /// Has memory of the peer released, soon.
    pub(super) fn release(&self, token: Token) {
        self.releases.lock().push_back(token);
        self.wake.notify_one();
    }

    /// What an operation gets that comes too late.
    pub(super) fn closed(&self, operation: &'static str) -> Error {
        let reason = self.connection.close_reason().unwrap_or(CloseReason::Local);
        Error::Closed { operation, reason }
    }

    /// The peer broke the protocol, so nothing it says can be relied upon.
    pub(super) fn broken(&self, why: &str) -> Error {
        tracing::warn!(peer = self.connection.peer(), why, "the peer broke async-rdma's protocol");
        let reason = CloseReason::Protocol(why.into());
        self.connection.end(reason.clone());
        Error::Closed { operation: "exchange with the peer", reason }
    }

    /// The answer is to another question.
    pub(super) fn unexpected(&self, operation: &'static str, response: &Response) -> Error {
        self.broken(&format!("{operation}: it answered {response:?}"))
    }

    /// Counts and tells what the peer does not get.
    pub(super) fn refuse(&self, what: std::fmt::Arguments<'_>) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(peer = self.connection.peer(), "refused: {what}");
    }
}

fn without_header(list: SgList) -> Vec<SgSegment> {
    let mut segments = list.into_segments();
    if !segments.is_empty() {
        segments.remove(0);
    }
    segments
}
