//! Memory of the peer, and memory lent to it, as the user sees them.

use std::ops::{Range, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::leases::{LeaseEnd, Lent, Slot, from_wall_clock};
use super::shared::Shared;
use super::wire::Token;
use crate::error::{Error, Result};
use crate::memory::{Access, Buffer, RemoteRegion};

/// Memory of the peer, lent to this side for a time.
///
/// Cheap to clone and to [`slice`](Self::slice). When the last clone is dropped, the peer is told that the memory is not needed
/// any more; [`Peer::release`](super::Peer::release) does that and waits for the answer.
#[derive(Clone, Debug)]
pub struct PeerRegion {
    place: RemoteRegion,
    loan: Arc<Loan>,
}

/// The loan itself, which slices and clones have a part in.
#[derive(Debug)]
struct Loan {
    token: Token,
    deadline: Instant,
    over: AtomicBool,
    shared: Arc<Shared>,
}

impl PeerRegion {
    /// `deadline`: when this side stops using it.
    pub(super) fn new(shared: &Arc<Shared>, token: Token, deadline: Instant) -> Self {
        let loan = Loan { token, deadline, over: AtomicBool::new(false), shared: shared.clone() };
        Self { place: token.region, loan: Arc::new(loan) }
    }

    /// Lent without being asked for: all there is to tell its end is the peer's clock.
    pub(super) fn lent(shared: &Arc<Shared>, token: Token) -> Self {
        Self::new(shared, token, from_wall_clock(token.deadline))
    }

    /// A part of it, by positions in it.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when the range ends behind the region's end, or before it starts.
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<Self> {
        Ok(Self { place: self.place.slice(range)?, loan: self.loan.clone() })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.place.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.place.is_empty()
    }

    /// What the peer lets this side do.
    pub fn access(&self) -> Access {
        self.place.access()
    }

    /// How long it can still be used; zero afterwards, and when it was released or given back.
    pub fn remaining(&self) -> Duration {
        if self.loan.over.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        self.loan.deadline.saturating_duration_since(Instant::now())
    }

    /// Where it is, for an operation that starts now.
    pub(super) fn place(&self, operation: &'static str) -> Result<RemoteRegion> {
        if self.remaining().is_zero() {
            let reason = "the time for which the peer lent this memory is over, or it was given back".to_owned();
            return Err(Error::Invalid { operation, reason });
        }
        Ok(self.place)
    }

    /// Ends the loan, once.
    pub(super) fn end(&self) -> Option<Token> {
        self.loan.end()
    }

    pub(super) fn belongs_to(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.loan.shared, shared)
    }
}

impl Loan {
    fn end(&self) -> Option<Token> {
        (!self.over.swap(true, Ordering::Relaxed)).then_some(self.token)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(token) = self.end() {
            self.shared.release(token);
        }
    }
}

/// Memory of this side that the peer may use, until its lease [ends](Self::ended) or it is [reclaimed](Self::reclaim).
///
/// The key is revoked then, by the agent's task: a peer that still uses it gets a remote access error. Dropping it revokes
/// the key first and releases the memory then.
#[derive(Debug)]
pub struct LentRegion {
    remote: RemoteRegion,
    slot: Arc<Slot>,
    shared: Arc<Shared>,
}

impl LentRegion {
    pub(super) fn new(shared: &Arc<Shared>, remote: RemoteRegion, slot: Arc<Slot>) -> Self {
        Self { remote, slot, shared: shared.clone() }
    }

    /// Length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)] // it never is
    pub fn len(&self) -> u64 {
        self.remote.len()
    }

    /// What the peer may do with it.
    pub fn access(&self) -> Access {
        self.remote.access()
    }

    /// Copies the bytes from `offset` on into `out`. While the peer may write, see
    /// [`ExposedRegion`](crate::ExposedRegion) on what is atomic.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when that ends behind the region, [`Error::Invalid`] at the very moment when the lease ends.
    pub fn copy_to(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.slot.with(|memory| match memory {
            Some(Lent::Exposed(region)) => region.copy_to(offset, out),
            Some(Lent::Back(buffer)) => {
                out.copy_from_slice(&buffer[inside("copy_to", offset, out.len(), buffer.len())?]);
                Ok(())
            }
            None => Err(ending("copy_to")),
        })
    }

    /// Copies `from` to the bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to).
    pub fn copy_from(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.slot.with(|memory| match memory {
            Some(Lent::Exposed(region)) => region.copy_from(offset, from),
            Some(Lent::Back(buffer)) => {
                let range = inside("copy_from", offset, from.len(), buffer.len())?;
                buffer[range].copy_from_slice(from);
                Ok(())
            }
            None => Err(ending("copy_from")),
        })
    }

    /// Resolves when the peer cannot use it any more, and says why. Cancel safe.
    pub async fn ended(&self) -> LeaseEnd {
        self.slot.ended().await
    }

    /// Revokes the key, if that was not done, and gives the buffer back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future revokes the key and releases the memory.
    pub async fn reclaim(self) -> Buffer {
        self.shared.leases.lock().forget(&self.remote, &self.slot);
        self.slot.reclaim().await
    }
}

impl Drop for LentRegion {
    fn drop(&mut self) {
        self.shared.leases.lock().forget(&self.remote, &self.slot);
    }
}

fn inside(operation: &'static str, offset: u64, len: usize, limit: usize) -> Result<Range<usize>> {
    let (end, limit) = (offset.saturating_add(len as u64), limit as u64);
    if end > limit {
        let hint = "the copy would end behind the region";
        return Err(Error::Limit { operation, what: "end of the range", value: end, limit, hint });
    }
    Ok(offset as usize..end as usize)
}

fn ending(operation: &'static str) -> Error {
    Error::Invalid { operation, reason: "the lease is about to end; try again".to_owned() }
}
