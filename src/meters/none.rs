//! Nobody collects anything.

use crate::error::{CloseReason, Error, Operation};
use crate::provider::{Link, QpCounters};

#[derive(Clone, Debug)]
pub(crate) struct Meters;

#[rustfmt::skip]
impl Meters {
    #[inline(always)] pub(crate) fn new(_: &str) -> Self { Self }
    #[inline(always)] pub(crate) fn completed(&self, _: Operation, _: u64) {}
    #[inline(always)] pub(crate) fn failed(&self, _: Operation, _: &Error) {}
    #[inline(always)] pub(crate) fn slot_wait(&self) {}
    #[inline(always)] pub(crate) fn opened(&self, _: Link) {}
    #[inline(always)] pub(crate) fn closed(&self, _: &CloseReason, _: QpCounters) {}
    #[inline(always)] pub(crate) fn handshake_failed(&self) {}
    #[inline(always)] pub(super) fn registered(&self, _: usize) {}
    #[inline(always)] pub(super) fn deregistered(&self, _: usize) {}
    #[cfg(feature = "cuda")]
    #[inline(always)] pub(crate) fn gpu_wait(&self, _: super::GpuWait) {}
}
