//! Memory of the peer that this side uses, and memory of this side that the peer does.

use std::time::Duration;

use super::Peer;
use super::agent::{REGION_TAKEN, REGION_TOO_LATE};
use super::leases::{Memory, Slot, bounded, deadline, wall_clock};
use super::region::{LentRegion, PeerRegion};
use super::wire::{Request, Response, Token};
use crate::error::{Error, Result};
use crate::memory::{Access, Buffer};
use crate::op::OpError;

impl Peer {
    /// Asks the peer for memory: `len` bytes, aligned to `align`, for this time. It is the peer's program that allocates it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when the peer does not answer, [`Error::Closed`].
    ///
    /// # Cancel safety
    ///
    /// See [`Peer`].
    pub async fn request_region(&self, len: u64, align: u64, lease: Duration) -> Result<PeerRegion> {
        const REQUEST: &str = "request a region";
        let shared = &self.inner.shared;
        // From before it is asked for, so that this side never uses it longer than the peer grants it.
        let (lease, until) = (bounded(lease), deadline(lease));
        let response = self.call(REQUEST, Request::Alloc { size: len, align, lease }).await?;
        let Response::Alloc(token) = response else { return Err(shared.unexpected(REQUEST, &response)) };
        let region = PeerRegion::new(shared, token, until);
        if region.len() < len {
            let reason = format!("the peer gave {} bytes instead of {len}", region.len());
            return Err(Error::Refused { operation: REQUEST, reason });
        }
        Ok(region)
    }

    /// The next region that the peer lends by itself.
    ///
    /// Its time is over at a moment that the peer's clock told, so both hosts' clocks should agree.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] when the connection has ended and no region is left.
    ///
    /// # Cancel safety
    ///
    /// No region is lost when the future is dropped.
    pub async fn receive_region(&self) -> Result<PeerRegion> {
        self.next("receive a region", &self.inner.outlet.regions).await
    }

    /// Tells the peer that its memory is not needed any more, and waits for its answer. Other clones and slices of the region
    /// are worth nothing afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when it was given up already or is another peer's, [`Error::Timeout`], [`Error::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is sent, the region's lease runs out by itself.
    pub async fn release(&self, region: PeerRegion) -> Result<()> {
        const RELEASE: &str = "release";
        let token = self.end(RELEASE, &region)?;
        match self.call(RELEASE, Request::Release(token)).await? {
            Response::Release { .. } => Ok(()),
            response => Err(self.inner.shared.unexpected(RELEASE, &response)),
        }
    }

    /// Gives memory of the peer back to the peer's program, with what was written there. Otherwise as [`release`](Self::release).
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release), and [`Error::Refused`] when the peer does not take it.
    ///
    /// # Cancel safety
    ///
    /// As [`release`](Self::release).
    pub async fn give_back(&self, region: PeerRegion) -> Result<()> {
        const GIVE_BACK: &str = "give a region back";
        let token = self.end(GIVE_BACK, &region)?;
        match self.call(GIVE_BACK, Request::Return(token)).await? {
            Response::Region { status: REGION_TAKEN } => Ok(()),
            response => Err(self.not_taken(GIVE_BACK, &response)),
        }
    }

    fn end(&self, operation: &'static str, region: &PeerRegion) -> Result<Token> {
        let foreign = !region.belongs_to(&self.inner.shared);
        let token = if foreign { None } else { region.end() };
        token.ok_or_else(|| {
            let reason = if foreign { "the region is of another peer" } else { "the region was given up before" };
            Error::Invalid { operation, reason: reason.to_owned() }
        })
    }

    /// Lends the buffer to the peer's program, which gets it from its `receive_remote_mr`. Resolves when it has it.
    ///
    /// The key is revoked when the lease ends, whatever the peer does then.
    ///
    /// # Errors
    ///
    /// [`OpError`] with the buffer: what [`Buffer::expose`] gives, [`Error::Refused`] when the peer does not take it,
    /// [`Error::Timeout`], [`Error::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future revokes the key and releases the memory.
    pub async fn lend(&self, buffer: Buffer, access: Access, lease: Duration) -> Result<LentRegion, OpError<Buffer>> {
        const LEND: &str = "lend";
        let shared = &self.inner.shared;
        let exposed = buffer.expose(access).map_err(|failed| {
            let (error, buffer) = failed.into_parts();
            OpError::new(error, Some(buffer))
        })?;
        let remote = exposed.remote();
        let slot = Slot::new(exposed);
        let lent = LentRegion::new(shared, remote, slot.clone());
        let inserted = shared.leases.lock().insert(Memory::Lent(slot), remote, deadline(lease));
        if inserted.is_err() {
            return Err(OpError::new(shared.closed(LEND), Some(lent.reclaim().await)));
        }
        // The agent's alarm may be for a later one.
        shared.wake.notify_one();
        let token = Token { region: remote, deadline: wall_clock(lease) };
        let error = match self.call(LEND, Request::Lend(token)).await {
            Ok(Response::Region { status: REGION_TAKEN }) => return Ok(lent),
            Ok(response) => self.not_taken(LEND, &response),
            Err(error) => error,
        };
        Err(OpError::new(error, Some(lent.reclaim().await)))
    }

    /// The next memory that the peer [asked](super::PeerBuilder::budget) for, wrote to, and gives back to this program.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] when the connection has ended and none is left.
    ///
    /// # Cancel safety
    ///
    /// None is lost when the future is dropped.
    pub async fn receive_returned(&self) -> Result<Buffer> {
        self.next("receive memory that comes back", &self.inner.outlet.returned).await
    }

    /// The peer's program does not take the region.
    fn not_taken(&self, operation: &'static str, response: &Response) -> Error {
        let reason = match response {
            Response::Region { status: REGION_TOO_LATE } => "too late".to_owned(),
            Response::Region { status } => format!("its agent failed ({status})"),
            other => return self.inner.shared.unexpected(operation, other),
        };
        Error::Refused { operation, reason }
    }
}
