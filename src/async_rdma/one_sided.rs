//! Operations on the peer's memory, in which its program takes no part.

use super::region::PeerRegion;
use super::{Peer, wire};
use crate::error::{Error, Result};
use crate::memory::{RemoteRegion, SourceBuffer, TargetBuffer};
use crate::op::OpError;

impl Peer {
    /// Writes the whole buffer to the start of `region`.
    ///
    /// # Errors
    ///
    /// [`OpError`] with the buffer: [`Error::Invalid`] when the region's time is over, and what [`Connection::write`](crate::Connection::write) gives.
    ///
    /// # Cancel safety
    ///
    /// See [`Connection`](crate::Connection).
    pub async fn write<B: SourceBuffer>(&self, buffer: B, region: &PeerRegion) -> Result<B, OpError<B>> {
        match self.place("write", region) {
            Ok(place) => self.inner.shared.connection.write(buffer, &place).await,
            Err(error) => Err(OpError::new(error, Some(buffer))),
        }
    }

    /// Like [`write`](Self::write), and then tells the peer's program, which gets `immediate` from its `receive_write_imm`.
    pub async fn write_with_immediate<B: SourceBuffer>(
        &self,
        buffer: B,
        region: &PeerRegion,
        immediate: u32,
    ) -> Result<B, OpError<B>> {
        match self.place("write", region) {
            Ok(place) => {
                self.inner.shared.connection.write_with_immediate(buffer, &place, wire::immediate(immediate)).await
            }
            Err(error) => Err(OpError::new(error, Some(buffer))),
        }
    }

    /// The next notice of a write of the peer, by its immediate.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] when the connection has ended and none is left.
    ///
    /// # Cancel safety
    ///
    /// None is lost when the future is dropped.
    pub async fn receive_write_immediate(&self) -> Result<u32> {
        self.next("receive a notice", &self.inner.outlet.notices).await
    }

    /// Fills the whole buffer from the start of `region`.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    ///
    /// # Cancel safety
    ///
    /// See [`Connection`](crate::Connection).
    pub async fn read<B: TargetBuffer>(&self, buffer: B, region: &PeerRegion) -> Result<B, OpError<B>> {
        match self.place("read", region) {
            Ok(place) => self.inner.shared.connection.read(buffer, &place).await,
            Err(error) => Err(OpError::new(error, Some(buffer))),
        }
    }

    /// Replaces the first 8 bytes of `region` by `swap` if they equal `compare`; resolves to the value before.
    /// Errors and cancel safety as for [`Connection::compare_swap`](crate::Connection::compare_swap), and [`Error::Invalid`] when the region's time is over.
    pub async fn compare_swap(&self, region: &PeerRegion, compare: u64, swap: u64) -> Result<u64> {
        let place = self.place("compare-and-swap", region)?;
        self.inner.shared.connection.compare_swap(&place, compare, swap).await
    }

    /// Adds to the first 8 bytes of `region`; resolves to the value before. Otherwise as [`compare_swap`](Self::compare_swap).
    pub async fn fetch_add(&self, region: &PeerRegion, add: u64) -> Result<u64> {
        let place = self.place("fetch-and-add", region)?;
        self.inner.shared.connection.fetch_add(&place, add).await
    }

    fn place(&self, operation: &'static str, region: &PeerRegion) -> Result<RemoteRegion> {
        if !region.belongs_to(&self.inner.shared) {
            return Err(Error::Invalid { operation, reason: "the region is of another peer".to_owned() });
        }
        region.place(operation)
    }
}
