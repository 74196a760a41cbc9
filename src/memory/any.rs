//! Whatever an operation holds while the device uses it, as one type.

use super::piece::Piece;
use super::{Buffer, SgList, SgSegment, SharedBuffer};
use crate::error::{Error, Operation, Result};
use crate::op::role::Role;
use crate::provider::{Sge, SgeList};

/// The memory of one operation, or none. Moves without allocating, whatever is inside.
///
/// `pub` because sealed traits name it; not exported.
#[derive(Debug, Default)]
pub enum AnyBuffer {
    #[default]
    None,
    Buffer(Buffer),
    Shared(SharedBuffer),
    List(SgList),
    #[cfg(feature = "cuda")]
    Gpu(crate::gpu::GpuBuffer),
}

impl AnyBuffer {
    /// Appends the scatter/gather entries in order, without empty ones. Valid while `self` exists, wherever it moves.
    #[inline]
    pub(crate) fn push_sges(&self, sges: &mut SgeList) {
        let entry = match self {
            Self::Buffer(buffer) => buffer.piece().sge(),
            _ => return self.push_others(sges),
        };
        if let Some(entry) = entry {
            sges.push(entry);
        }
    }

    /// The entry of memory that is in one piece, or that it has none as it is empty; `None` for a list.
    #[inline]
    pub(crate) fn only_sge(&self) -> Option<Option<Sge>> {
        match self {
            Self::Buffer(buffer) => Some(buffer.piece().sge()),
            _ => self.only_sge_of_others(),
        }
    }

    #[inline(never)]
    fn only_sge_of_others(&self) -> Option<Option<Sge>> {
        match self {
            Self::None => Some(None),
            Self::Buffer(buffer) => Some(buffer.piece().sge()),
            Self::Shared(shared) => Some(shared.piece().sge()),
            Self::List(_) => None,
            #[cfg(feature = "cuda")]
            Self::Gpu(buffer) => Some(buffer.sge()),
        }
    }

    #[inline(never)]
    fn push_others(&self, sges: &mut SgeList) {
        match self {
            Self::None => {}
            Self::Buffer(buffer) => sges.extend(buffer.piece().sge()),
            Self::Shared(shared) => sges.extend(shared.piece().sge()),
            Self::List(list) => sges.extend(list.segments().iter().filter_map(|segment| segment.piece().sge())),
            #[cfg(feature = "cuda")]
            Self::Gpu(buffer) => sges.extend(buffer.sge()),
        }
    }

    /// Whether the CPU can read the bytes: only then may they go inline.
    #[inline]
    pub(crate) fn is_of_host(&self) -> bool {
        #[cfg(feature = "cuda")]
        if let Self::Gpu(_) = self {
            return false;
        }
        true
    }

    /// Whether the operation may be posted as far as the buffer is concerned: memory of a GPU has to be made ready first.
    #[inline]
    pub(crate) fn check_ready(&self, operation: &'static str, role: Role) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Self::Gpu(buffer) = self {
            return buffer.check_ready(operation, role);
        }
        let _ = (operation, role);
        Ok(())
    }

    /// How many scatter/gather entries that makes.
    #[inline]
    pub(crate) fn entries(&self) -> usize {
        self.sum(|piece| usize::from(piece.len() > 0))
    }

    /// Bytes of all parts together.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.sum(Piece::len)
    }

    /// Refuses memory that is not of the connection's domain, every part of it.
    pub(crate) fn check_domain(&self, operation: Operation, connection: u64) -> Result<()> {
        let check = |piece: &Piece| match piece.region().domain().id() {
            id if id == connection => Ok(()),
            buffer => Err(Error::ForeignBuffer { operation, buffer, connection }),
        };
        match self {
            Self::None => Ok(()),
            Self::Buffer(buffer) => check(buffer.piece()),
            Self::Shared(shared) => check(shared.piece()),
            Self::List(list) => list.segments().iter().try_for_each(|segment| check(segment.piece())),
            #[cfg(feature = "cuda")]
            Self::Gpu(buffer) => check(buffer.piece()),
        }
    }

    /// Refuses read-only memory as the target of an operation.
    pub(crate) fn check_writable(&self, operation: &'static str) -> Result<()> {
        let read_only = match self {
            Self::None | Self::Buffer(_) => None,
            Self::Shared(_) => Some(0),
            Self::List(list) => list.segments().iter().position(|segment| matches!(segment, SgSegment::Shared(_))),
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => None,
        };
        match read_only {
            Some(index) => Err(Error::Invalid {
                operation,
                reason: format!("segment {index} of the list is a SharedBuffer, which is read-only; use a Buffer"),
            }),
            None => Ok(()),
        }
    }

    /// Saturates.
    #[inline]
    fn sum(&self, of: impl Fn(&Piece) -> usize) -> usize {
        match self {
            Self::None => 0,
            Self::Buffer(buffer) => of(buffer.piece()),
            Self::Shared(shared) => of(shared.piece()),
            Self::List(list) => {
                list.segments().iter().map(|segment| of(segment.piece())).fold(0, usize::saturating_add)
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(buffer) => of(buffer.piece()),
        }
    }
}
