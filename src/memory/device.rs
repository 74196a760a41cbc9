//! Memory of a device, a GPU's for instance, that the CPU cannot reach: what a software NIC needs to copy from and to it.
//!
//! Addresses are the device's. Copies go through a [`Bounce`], a piece of host memory that the device can reach quickly.

#[cfg(any(test, feature = "cuda"))]
use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::dma::Segment;

/// Bytes of one [`Bounce`]. Telling a GPU to copy and learning that it has takes 5 us of this side's processor, which is 2 to 3 % of the
/// time that a socket takes for so many bytes. With half as many, 64 MiB from a GPU took 5 to 15 % longer (H200).
pub(crate) const BOUNCE: usize = 1 << 20;

/// A device's memory. Its errors mean that the device does not work any more.
pub(crate) trait DeviceMemory: Debug + Send + Sync {
    /// A bounce buffer for one direction of copies at a time. From a pool: after a start nothing is allocated.
    fn bounce(&self) -> io::Result<Box<dyn Bounce>>;

    /// What copies from `source`'s memory to this one's without the host; `None` where there is no such way.
    fn transfer(&self, source: &dyn DeviceMemory) -> io::Result<Option<Box<dyn Transfer>>>;

    /// Maps all `len` bytes of what another process [exported](Shareable::export): from then on they are addresses of this device, like
    /// its own, from and to which it copies.
    fn import(&self, memory: BorrowedFd<'_>, len: usize) -> io::Result<Box<dyn Imported>>;

    #[cfg(any(test, feature = "cuda"))]
    fn as_any(&self) -> &dyn Any;
}

/// Memory of another process, mapped for a device. Dropped when no copy uses it.
pub(crate) trait Imported: Debug + Send {
    /// Where it begins.
    fn address(&self) -> u64;
}

/// A device's memory that other processes can be given, as a whole.
pub(crate) trait Shareable: Debug + Send + Sync {
    /// Where it begins, and its length.
    fn range(&self) -> (u64, usize);

    /// A descriptor of it, which keeps it there.
    fn export(&self) -> io::Result<OwnedFd>;
}

/// Copies from one device's memory to another's, or within one. Dropping it waits for them.
pub(crate) trait Transfer: Debug + Send {
    /// Starts copying `len` bytes from the source's `from` to the target's `to`.
    fn copy(&mut self, from: u64, to: u64, len: usize) -> io::Result<()>;

    /// Waits, for as long as such a copy takes, until every copy that was started has finished.
    fn wait(&mut self) -> io::Result<()>;
}

/// [`BOUNCE`] bytes of host memory. Dropping it gives it back, once no copy uses it any more.
pub(crate) trait Bounce: Debug + Send {
    /// The host memory, at an address that is a multiple of 8. Only touched while no copy that was started is under way: see [`wait`](Self::wait).
    fn segment(&self) -> Segment;

    /// Starts copying `len` bytes from the device's `from` to the place `at` of this buffer.
    fn fetch(&mut self, from: u64, at: usize, len: usize) -> io::Result<()>;

    /// Starts copying `len` bytes from the place `at` of this buffer to the device's `to`.
    fn store(&mut self, at: usize, to: u64, len: usize) -> io::Result<()>;

    /// Waits, for as long as such a copy takes, until every copy that was started has finished:
    /// the bytes are here, or visible to all that the device starts from now on.
    fn wait(&mut self) -> io::Result<()>;
}

#[cfg(feature = "cuda")]
pub(crate) use self::piece::{DevicePiece, ExposedCount};

/// Device memory as regions and pieces of them.
#[cfg(feature = "cuda")]
mod piece {
    #![allow(unsafe_code)]

    use crate::error::{Error, Result};
    use crate::memory::backing::Memory;
    use crate::memory::chunks::Chunks;
    use crate::memory::dma::Segment;
    use crate::memory::domain::{Counted, ProtectionDomain};
    use crate::memory::piece::{Apart, Piece};
    use crate::memory::region::MemoryRegion;
    use crate::provider::{Mr, Sge};

    /// A hold on some bytes of a device's memory, like a piece of the host's: exclusive, and never dereferenced.
    pub(crate) struct DevicePiece(Piece);

    impl DevicePiece {
        /// All `len` bytes at `address`, which `mr` is the registration of. `owner` keeps them allocated, and is dropped after `mr`.
        pub(crate) fn whole(
            domain: &ProtectionDomain,
            (address, len): (u64, usize),
            mr: Mr,
            owner: Box<dyn Send + Sync>,
        ) -> Result<Self> {
            let null = || Error::Invalid { operation: "register", reason: "the address is 0".to_owned() };
            let memory = Memory::of_device(address, len, owner).ok_or_else(null)?;
            let region = MemoryRegion::registered(domain, mr, memory, Chunks::taken(), len);
            // SAFETY: the region's only chunk was taken for this piece.
            Ok(Self(unsafe { Piece::of_chunk(region, 0, len) }))
        }

        pub(crate) fn piece(&self) -> &Piece {
            &self.0
        }

        pub(crate) fn address(&self) -> u64 {
            self.0.address()
        }

        pub(crate) fn len(&self) -> usize {
            self.0.len()
        }

        /// From the start of the region.
        pub(crate) fn offset(&self) -> usize {
            (self.0.address() - self.0.region().address()) as usize
        }

        pub(crate) fn region(&self) -> &MemoryRegion {
            self.0.region()
        }

        pub(crate) fn mr(&self) -> &Mr {
            self.0.region().mr()
        }

        pub(crate) fn segment(&self) -> Segment {
            self.0.segment()
        }

        pub(crate) fn sge(&self) -> Option<Sge> {
            self.0.sge()
        }

        /// The entry for the same bytes of other memory that is registered in this one's place.
        pub(crate) fn sge_in(&self, segment: Segment) -> Option<Sge> {
            (segment.len() > 0).then(|| Sge { segment, lkey: self.0.region().lkey() })
        }

        pub(crate) fn split_off(&mut self, operation: &'static str, at: usize) -> Result<Self> {
            self.0.split_off(operation, at).map(Self)
        }

        /// Appends `tail`, if it begins where this ends.
        pub(crate) fn join(&mut self, tail: Self) -> Result<(), (Self, &'static str)> {
            self.0.join(tail.0).map_err(|(tail, why)| {
                let why = match why {
                    Apart::Region => "the buffers belong to different memory regions",
                    Apart::Chunk => "the buffers were taken from their pool one by one",
                    Apart::Bytes => "the second buffer does not begin where the first one ends",
                };
                (Self(tail), why)
            })
        }
    }

    impl std::fmt::Debug for DevicePiece {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            crate::memory::buffer::debug_piece(f, "DevicePiece", &self.0)
        }
    }

    /// Counts an exposed region of a domain.
    pub(crate) struct ExposedCount(#[allow(dead_code)] Counted);

    impl ExposedCount {
        pub(crate) fn new(domain: &ProtectionDomain) -> Self {
            Self(Counted::new(domain, |live| &live.exposed))
        }
    }
}
