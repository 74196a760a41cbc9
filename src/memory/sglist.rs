//! Scatter/gather lists.

use std::ops::Deref;

use super::piece::Piece;
use super::{Buffer, SharedBuffer};

/// One segment of an [`SgList`].
#[derive(Debug)]
#[non_exhaustive]
pub enum SgSegment {
    /// Memory that may be read and written.
    Buffer(Buffer),
    /// Memory that may only be read.
    Shared(SharedBuffer),
}

impl SgSegment {
    pub(super) fn piece(&self) -> &Piece {
        match self {
            Self::Buffer(buffer) => buffer.piece(),
            Self::Shared(shared) => shared.piece(),
        }
    }
}

impl Deref for SgSegment {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Shared(shared) => shared,
        }
    }
}

impl From<Buffer> for SgSegment {
    fn from(buffer: Buffer) -> Self {
        Self::Buffer(buffer)
    }
}

impl From<SharedBuffer> for SgSegment {
    fn from(shared: SharedBuffer) -> Self {
        Self::Shared(shared)
    }
}

/// Several buffers that one operation uses one after the other: gathered into one message when sent or written,
/// filled in order when received or read into.
///
/// How many segments one operation takes is the connection's limit (at most the device's
/// [`max_sge`](crate::DeviceLimits::max_sge)); empty segments do not count. An operation gives its list back, to be used again:
/// only making one allocates.
///
/// ```
/// # fn demo(pd: &tokio_rdma::ProtectionDomain) -> tokio_rdma::Result<()> {
/// use tokio_rdma::SgList;
///
/// let header = pd.register(vec![1; 16])?;
/// let body = pd.register(vec![2; 1000])?.freeze();
/// let message = SgList::new().with(header).with(body);
/// assert_eq!((message.len(), message.len_bytes()), (2, 1016));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct SgList {
    segments: Vec<SgSegment>,
}

impl SgList {
    /// A list without segments.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a segment.
    pub fn push(&mut self, segment: impl Into<SgSegment>) {
        self.segments.push(segment.into());
    }

    /// The list with a segment appended.
    #[must_use]
    pub fn with(mut self, segment: impl Into<SgSegment>) -> Self {
        self.push(segment);
        self
    }

    /// Number of segments.
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether there are no segments.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Length of all segments together, in bytes.
    pub fn len_bytes(&self) -> usize {
        self.iter().map(|segment| segment.len()).fold(0, usize::saturating_add)
    }

    pub(super) fn segments(&self) -> &[SgSegment] {
        &self.segments
    }

    /// The segments in order.
    pub fn iter(&self) -> std::slice::Iter<'_, SgSegment> {
        self.segments.iter()
    }

    /// The segments in order; the parts that are [`Buffer`]s can be written.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, SgSegment> {
        self.segments.iter_mut()
    }

    /// Takes the list apart.
    pub fn into_segments(self) -> Vec<SgSegment> {
        self.segments
    }
}

impl<S: Into<SgSegment>> FromIterator<S> for SgList {
    fn from_iter<I: IntoIterator<Item = S>>(segments: I) -> Self {
        Self { segments: segments.into_iter().map(Into::into).collect() }
    }
}

impl<S: Into<SgSegment>> Extend<S> for SgList {
    fn extend<I: IntoIterator<Item = S>>(&mut self, segments: I) {
        self.segments.extend(segments.into_iter().map(Into::into));
    }
}

impl IntoIterator for SgList {
    type Item = SgSegment;
    type IntoIter = std::vec::IntoIter<SgSegment>;

    fn into_iter(self) -> Self::IntoIter {
        self.segments.into_iter()
    }
}

impl<'a> IntoIterator for &'a SgList {
    type Item = &'a SgSegment;
    type IntoIter = std::slice::Iter<'a, SgSegment>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a> IntoIterator for &'a mut SgList {
    type Item = &'a mut SgSegment;
    type IntoIter = std::slice::IterMut<'a, SgSegment>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}
