//! Behaviour across the files of this folder: who owns which bytes, and that everything comes back.

mod buffers;
mod exposed;
mod operands;
mod pools;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use super::*;
use crate::error::Error;

#[test]
fn public_types_move_between_threads() {
    fn check<T: Send + Sync + Unpin + 'static>() {}
    check::<ProtectionDomain>();
    check::<MemoryRegion>();
    check::<OwnedMemory>();
    check::<Buffer>();
    check::<SharedBuffer>();
    check::<BufferPool>();
    check::<Get>();
    check::<ExposedRegion>();
    check::<Reclaim>();
    check::<SgList>();
    check::<UnsplitError>();
    check::<ExposeError>();
    check::<AnyBuffer>();
}

/// Operation, value and limit of an error that should be about a limit.
fn limit_of(error: Error) -> (&'static str, u64, u64) {
    match error {
        Error::Limit { operation, value, limit, .. } => (operation, value, limit),
        other => panic!("{other}"),
    }
}

/// Counts its wake-ups.
#[derive(Default)]
pub(super) struct Counter(pub(super) AtomicUsize);

impl Wake for Counter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

pub(super) fn poll<F: Future + Unpin>(future: &mut F, wakes: &Arc<Counter>) -> Poll<F::Output> {
    std::pin::Pin::new(future).poll(&mut Context::from_waker(&Waker::from(wakes.clone())))
}
