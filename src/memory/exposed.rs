//! Memory that a peer may use.
#![allow(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::task::{Context, Poll};

use super::buffer::Buffer;
use super::cells::Cells;
use super::domain::Counted;
use super::piece::Piece;
use super::range::at_most;
use super::{Access, MemoryRegion, ProtectionDomain, RemoteRegion};
use crate::error::{Error, Result};
use crate::provider::Grant;

/// Memory that peers may read, write or change atomically, as far as its [`Access`] goes, without this side taking part.
///
/// Made by [`Buffer::expose`], which takes the buffer: since a peer may change the bytes at any time, there is no `&[u8]` to them.
/// They are copied out and in, or used as 64-bit atomics. [`reclaim`](Self::reclaim) gives the buffer back. Dropping it
/// revokes the key first and releases the memory then; a peer that still uses the key gets a remote access error.
///
/// ```
/// # async fn demo(pd: &tokio_rdma::ProtectionDomain) -> tokio_rdma::Result<()> {
/// use tokio_rdma::Access;
///
/// let exposed = pd.alloc(4096)?.expose(Access::REMOTE_READ | Access::REMOTE_ATOMIC)?;
/// let _for_the_peer = exposed.remote().to_bytes();
///
/// exposed.copy_from(8, b"published")?;
/// exposed.fetch_add(0, 1)?;
///
/// let buffer = exposed.reclaim().await;
/// assert_eq!(&buffer[8..17], b"published");
/// # Ok(())
/// # }
/// ```
///
/// # What is atomic
///
/// [`copy_to`](Self::copy_to) and [`copy_from`](Self::copy_from) may run at the same time as each other and as a peer's operations
/// without undefined behaviour, but they are not atomic as a whole: a copy may contain parts of the old bytes and of the new.
/// Agree with the peer on who writes when, or put a sequence number beside the data.
///
/// [`load`](Self::load), [`store`](Self::store), [`fetch_add`](Self::fetch_add) and
/// [`compare_exchange`](Self::compare_exchange) are sequentially consistent among the threads of this process.
/// They are atomic with a peer's atomics where the device's atomics are coherent with the CPU's: always with the software device;
/// with a NIC only where its `atomic_cap` is `IBV_ATOMIC_GLOB`. Otherwise let everybody, this process too,
/// use the NIC's atomics.
///
/// Offsets are in bytes from the start of the region, as a peer that holds the [`RemoteRegion`] counts them.
pub struct ExposedRegion {
    // Field order: revoked, then given back, then no longer counted.
    grant: Grant,
    piece: Piece,
    counted: Counted,
    access: Access,
}

impl Buffer {
    /// Opens this memory to peers whose connection belongs to the same domain and that get to know
    /// the [`RemoteRegion`] of it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when `access` grants nothing, [`Error::Limit`] when the buffer is empty, or the device's error.
    /// The [`ExposeError`] gives the buffer back; `?` turns it into the plain error.
    pub fn expose(self, access: Access) -> Result<ExposedRegion, ExposeError> {
        match grant(self.piece(), access) {
            Ok(grant) => {
                let piece = self.into_piece();
                let counted = Counted::new(piece.region().domain(), |live| &live.exposed);
                Ok(ExposedRegion { grant, piece, counted, access })
            }
            Err(error) => Err(ExposeError { error, buffer: self }),
        }
    }
}

fn grant(piece: &Piece, access: Access) -> Result<Grant> {
    const EXPOSE: &str = "expose";
    if access.is_empty() || !Access::all().contains(access) {
        let reason = format!("access is {access}; name at least one of {}, and nothing else", Access::all());
        return Err(Error::Invalid { operation: EXPOSE, reason });
    }
    let domain = piece.region().domain();
    domain.check_length(EXPOSE, piece.len() as u64)?;
    let grant = domain.provider().grant(piece.region().mr(), piece.segment(), access)?;
    if domain.provider().shares_pages() {
        // Where that does not work, for want of descriptors for instance, peers use the memory in the other way.
        let writable = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        piece.share_pages(writable).into_iter().for_each(|pages| grant.set_pages(pages));
    }
    Ok(grant)
}

impl ExposedRegion {
    /// The description for the peer. See there whom to give it to.
    pub fn remote(&self) -> RemoteRegion {
        let (address, len) = (self.piece.address(), self.piece.len() as u64);
        RemoteRegion::of_local(address, len, self.grant.rkey(), self.access)
    }

    /// Length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)] // it never is
    pub fn len(&self) -> u64 {
        self.piece.len() as u64
    }

    /// What peers may do.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The region that this memory is a part of.
    pub fn region(&self) -> &MemoryRegion {
        self.piece.region()
    }

    /// The domain whose connections can reach this memory.
    pub fn domain(&self) -> &ProtectionDomain {
        self.counted.domain()
    }

    /// Copies the bytes from `offset` on into `out`, all of which is filled.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when that ends behind the region; nothing was copied.
    pub fn copy_to(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let at = self.check("copy_to", offset, out.len())?;
        self.cells().read(at, out);
        Ok(())
    }

    /// Copies `from` to the bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when that ends behind the region; nothing was copied.
    pub fn copy_from(&self, offset: u64, from: &[u8]) -> Result<()> {
        let at = self.check("copy_from", offset, from.len())?;
        self.cells().write(at, from);
        Ok(())
    }

    /// The 64-bit value at `offset`, in this host's byte order.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when it ends behind the region, [`Error::Invalid`] when its address is not a multiple of 8.
    pub fn load(&self, offset: u64) -> Result<u64> {
        Ok(self.word("load", offset)?.load(SeqCst))
    }

    /// Sets the 64-bit value at `offset`.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn store(&self, offset: u64, value: u64) -> Result<()> {
        self.word("store", offset)?.store(value, SeqCst);
        Ok(())
    }

    /// Adds to the 64-bit value at `offset`, wrapping around, and returns what it was before.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn fetch_add(&self, offset: u64, add: u64) -> Result<u64> {
        Ok(self.word("fetch_add", offset)?.fetch_add(add, SeqCst))
    }

    /// Replaces the 64-bit value at `offset` by `new` if it is `current`. The inner result is `Ok` with the old value when it was,
    /// and `Err` with the value found when it was not.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn compare_exchange(&self, offset: u64, current: u64, new: u64) -> Result<Result<u64, u64>> {
        Ok(self.word("compare_exchange", offset)?.compare_exchange(current, new, SeqCst, SeqCst))
    }

    /// Revokes the key and gives the buffer back. From then on no peer reaches it; one that tries gets a remote access error.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future, as dropping the region, revokes the key and releases the memory.
    pub fn reclaim(self) -> Reclaim {
        Reclaim { region: Some(self) }
    }

    fn cells(&self) -> Cells<'_> {
        // SAFETY: the piece is exclusive, and this type reaches its bytes through cells only.
        unsafe { Cells::new(self.piece.ptr(), self.piece.len()) }
    }

    fn check(&self, operation: &'static str, offset: u64, len: usize) -> Result<usize> {
        let end = offset.saturating_add(len as u64);
        at_most(operation, "end of the range", end, self.len())?;
        Ok(offset as usize)
    }

    fn word(&self, operation: &'static str, offset: u64) -> Result<&AtomicU64> {
        let at = self.check(operation, offset, size_of::<u64>())?;
        self.cells().word(at).ok_or_else(|| Error::Invalid {
            operation,
            reason: format!("address {:#x} is not a multiple of 8", self.piece.address() + offset),
        })
    }
}

impl fmt::Debug for ExposedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ExposedRegion").field(&self.remote()).finish()
    }
}

/// The future of [`ExposedRegion::reclaim`].
#[derive(Debug)]
#[must_use = "futures do nothing unless you `.await` or poll them"]
pub struct Reclaim {
    region: Option<ExposedRegion>,
}

impl Future for Reclaim {
    type Output = Buffer;

    /// Polled again after it was ready, it stays pending.
    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Buffer> {
        // The providers that exist revoke without waiting. It is a future so that one that has to wait fits in.
        let Some(region) = self.region.take() else { return Poll::Pending };
        region.grant.revoke();
        Poll::Ready(Buffer::from_piece(region.piece))
    }
}

/// [`Buffer::expose`] failed, and gives the buffer back.
#[derive(Debug)]
pub struct ExposeError {
    error: Error,
    buffer: Buffer,
}

impl ExposeError {
    /// What went wrong.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// What went wrong, and the buffer.
    pub fn into_parts(self) -> (Error, Buffer) {
        (self.error, self.buffer)
    }
}

impl fmt::Display for ExposeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for ExposeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl From<ExposeError> for Error {
    fn from(failed: ExposeError) -> Self {
        failed.error
    }
}
