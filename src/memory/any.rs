//! Whatever an operation holds while the device uses it, as one type.

use super::piece::Piece;
use super::{Buffer, SgList, SgSegment, SharedBuffer};
use crate::error::{Error, Operation, Result};
use crate::provider::SgeList;

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
}

impl AnyBuffer {
    /// Appends the scatter/gather entries in order, without empty ones. Valid while `self` exists, wherever it moves.
    pub(crate) fn push_sges(&self, sges: &mut SgeList) {
        let mut push = |piece: &Piece| {
            if let Some(sge) = piece.sge() {
                sges.push(sge);
            }
        };
        match self {
            Self::None => {}
            Self::Buffer(buffer) => push(buffer.piece()),
            Self::Shared(shared) => push(shared.piece()),
            Self::List(list) => list.segments().iter().for_each(|segment| push(segment.piece())),
        }
    }

    /// How many scatter/gather entries that makes.
    pub(crate) fn entries(&self) -> usize {
        self.pieces().filter(|piece| piece.len() > 0).count()
    }

    /// Bytes of all parts together.
    pub(crate) fn len(&self) -> usize {
        self.pieces().map(Piece::len).fold(0, usize::saturating_add)
    }

    /// Refuses memory that is not of the connection's domain, every part of it.
    pub(crate) fn check_domain(&self, operation: Operation, connection: u64) -> Result<()> {
        match self.pieces().map(|piece| piece.region().domain().id()).find(|&id| id != connection) {
            Some(buffer) => Err(Error::ForeignBuffer { operation, buffer, connection }),
            None => Ok(()),
        }
    }

    /// Refuses read-only memory as the target of an operation.
    pub(crate) fn check_writable(&self, operation: &'static str) -> Result<()> {
        let read_only = match self {
            Self::None | Self::Buffer(_) => None,
            Self::Shared(_) => Some(0),
            Self::List(list) => list.segments().iter().position(|segment| matches!(segment, SgSegment::Shared(_))),
        };
        match read_only {
            Some(index) => Err(Error::Invalid {
                operation,
                reason: format!("segment {index} of the list is a SharedBuffer, which is read-only; use a Buffer"),
            }),
            None => Ok(()),
        }
    }

    fn pieces(&self) -> impl Iterator<Item = &Piece> {
        let (single, list): (_, &[SgSegment]) = match self {
            Self::None => (None, &[]),
            Self::Buffer(buffer) => (Some(buffer.piece()), &[]),
            Self::Shared(shared) => (Some(shared.piece()), &[]),
            Self::List(list) => (None, list.segments()),
        };
        single.into_iter().chain(list.iter().map(SgSegment::piece))
    }
}
