//! Allocation, registration, and what splitting makes of a buffer.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

use super::limit_of;
use crate::error::Error;
use crate::memory::domain::test_domain;
use crate::memory::*;

#[test]
fn alloc_is_zeroed_and_aligned() {
    let pd = test_domain();
    for len in [1, 4095, 4096, 100_000] {
        let buffer = pd.alloc(len).unwrap();
        assert_eq!(buffer.len(), len);
        assert_eq!(buffer.address() % 4096, 0);
        assert!(buffer.iter().all(|&byte| byte == 0));
        assert_eq!((buffer.region().len(), buffer.region().address()), (len, buffer.address()));
    }
    assert_eq!(pd.stats(), DomainStats::default());
}

#[test]
fn register_keeps_the_allocation() {
    let pd = test_domain();
    let mut vec = Vec::with_capacity(100);
    vec.extend_from_slice(b"some bytes");
    let address = vec.as_ptr() as u64;
    let buffer = pd.register(vec).unwrap();
    assert_eq!((buffer.address(), &buffer[..]), (address, &b"some bytes"[..]));

    let boxed: Box<[u8]> = vec![7; 33].into();
    let address = boxed.as_ptr() as u64;
    let buffer = pd.register(boxed).unwrap();
    assert_eq!((buffer.address(), &buffer[..]), (address, &[7; 33][..]));
}

#[test]
fn lengths_that_cannot_be_registered_are_errors() {
    let pd = test_domain();
    let max = pd.limits().max_region;
    assert_eq!(limit_of(pd.alloc(0).unwrap_err()), ("alloc", 0, 1));
    assert_eq!(limit_of(pd.alloc(max as usize + 1).unwrap_err()), ("alloc", max + 1, max));
    assert_eq!(limit_of(pd.alloc(usize::MAX).unwrap_err()), ("alloc", u64::MAX, max));
    assert_eq!(limit_of(pd.register(Vec::new()).unwrap_err()), ("register", 0, 1));
    for (len, count) in [(0, 1), (1, 0), (usize::MAX, 1), (usize::MAX, usize::MAX), (1 << 40, 1 << 20), (1, 1 << 40)] {
        assert!(matches!(BufferPool::new(&pd, len, count), Err(Error::Limit { .. })), "{len} x {count}");
    }
    assert_eq!(pd.stats(), DomainStats::default());
}

/// Leaks nothing, and tells when it is dropped.
struct Owner {
    memory: NonNull<[u8]>,
    pd: ProtectionDomain,
    dropped: Arc<AtomicUsize>,
}

// SAFETY: it owns what it points to.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        assert_eq!(self.pd.stats().live_regions, 1, "a region is counted until its memory is gone");
        self.dropped.fetch_add(1, Ordering::SeqCst);
        // SAFETY: made by `Box::into_raw` below.
        drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
    }
}

#[test]
fn a_foreign_owner_goes_with_the_last_handle() {
    let pd = test_domain();
    let dropped = Arc::new(AtomicUsize::new(0));
    let memory = NonNull::new(Box::into_raw(vec![3u8; 64].into_boxed_slice())).unwrap();
    let owner = Owner { memory, pd: pd.clone(), dropped: dropped.clone() };
    // SAFETY: the owner keeps the 64 bytes, and nobody else uses them.
    let mut buffer = unsafe { pd.register_raw(memory.cast(), 64, owner) }.unwrap();
    let tail = buffer.split_off(10).unwrap().freeze();
    let region = tail.region().clone();
    drop(buffer);
    drop(tail);
    assert_eq!((dropped.load(Ordering::SeqCst), pd.stats().live_buffers, pd.stats().live_regions), (0, 0, 1));
    drop(region);
    assert_eq!((dropped.load(Ordering::SeqCst), pd.stats().live_regions), (1, 0));
}

#[test]
fn splits_outside_are_errors_and_change_nothing() {
    let pd = test_domain();
    let mut buffer = pd.alloc(10).unwrap();
    for at in [11, usize::MAX] {
        assert_eq!(limit_of(buffer.split_to(at).unwrap_err()), ("split_to", at as u64, 10));
        assert_eq!(limit_of(buffer.split_off(at).unwrap_err()), ("split_off", at as u64, 10));
    }
    assert_eq!(buffer.len(), 10);
    assert!(buffer.split_to(0).unwrap().is_empty());
    assert!(buffer.split_off(10).unwrap().is_empty());
    let shared = buffer.freeze();
    assert_eq!(limit_of(shared.slice(3..11).unwrap_err()), ("slice", 11, 10));
    assert_eq!(&shared.slice(3..).unwrap()[..], [0; 7]);
}

#[test]
fn unsplit_only_joins_neighbours() {
    let pd = test_domain();
    let pool = BufferPool::new(&pd, 64, 2).unwrap();
    let (low, high) = (pool.try_get().unwrap(), pool.try_get().unwrap());
    assert_eq!(low.address() + 64, high.address());
    let error = low.unsplit(high).unwrap_err();
    assert!(error.to_string().contains("one by one"), "{error}");

    let (mut low, high) = error.into_buffers();
    let mut tail = low.split_off(20).unwrap();
    let last = tail.split_off(20).unwrap();
    let error = low.unsplit(last).unwrap_err();
    assert!(error.to_string().contains("ends at"), "{error}");
    let (low, last) = error.into_buffers();
    assert_eq!(low.unsplit(tail).unwrap().unsplit(last).unwrap().len(), 64);

    let error = Error::from(high.unsplit(pd.alloc(8).unwrap()).unwrap_err());
    assert!(matches!(error, Error::Invalid { operation: "unsplit", .. }), "{error}");
    assert_eq!(pool.available(), 2);
}

#[test]
fn only_the_last_owner_gets_a_buffer_back() {
    let pd = test_domain();
    let shared = pd.register(vec![1, 2, 3]).unwrap().freeze();
    let clone = shared.clone();
    let shared = shared.try_into_buffer().unwrap_err();
    drop(clone);
    let mut buffer = shared.try_into_buffer().unwrap();
    buffer[0] = 9;
    assert_eq!(&buffer[..], [9, 2, 3]);
}

#[test]
fn debug_does_not_show_contents() {
    let pd = test_domain();
    let buffer = pd.register(vec![0x5a; 3]).unwrap();
    let (address, lkey) = (buffer.address(), buffer.region().lkey());
    assert_eq!(format!("{buffer:?}"), format!("Buffer {{ address: {address:#x}, len: 3, lkey: {lkey:#x} }}"));
}

#[derive(Clone, Debug)]
enum Step {
    SplitTo(prop::sample::Index, prop::sample::Index),
    SplitOff(prop::sample::Index, prop::sample::Index),
    Unsplit(prop::sample::Index, prop::sample::Index),
    Fill(prop::sample::Index, u8),
    Drop(prop::sample::Index),
}

fn any_step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        (index(), index()).prop_map(|(a, b)| Step::SplitTo(a, b)),
        (index(), index()).prop_map(|(a, b)| Step::SplitOff(a, b)),
        (index(), index()).prop_map(|(a, b)| Step::Unsplit(a, b)),
        (index(), any::<u8>()).prop_map(|(a, b)| Step::Fill(a, b)),
        index().prop_map(Step::Drop),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 256 }, ..ProptestConfig::default() })]

    /// Each buffer with the bytes that it should have, as a Vec, and its place in the original.
    #[test]
    fn pieces_behave_as_vecs(steps in prop::collection::vec(any_step(), 1..40), pooled: bool) {
        let pd = test_domain();
        let pool = BufferPool::new(&pd, 100, 1).unwrap();
        let whole = if pooled { pool.try_get().unwrap() } else { pd.register(vec![0; 100]).unwrap() };
        let base = whole.address();
        let mut pieces = vec![(whole, vec![0u8; 100])];
        for step in steps {
            if pieces.is_empty() {
                break;
            }
            let count = pieces.len();
            match step {
                Step::SplitTo(which, at) => {
                    let (buffer, model) = &mut pieces[which.index(count)];
                    let at = at.index(model.len() + 1);
                    let rest = model.split_off(at);
                    let head = (buffer.split_to(at).unwrap(), std::mem::replace(model, rest));
                    pieces.push(head);
                }
                Step::SplitOff(which, at) => {
                    let (buffer, model) = &mut pieces[which.index(count)];
                    let at = at.index(model.len() + 1);
                    let tail = (buffer.split_off(at).unwrap(), model.split_off(at));
                    pieces.push(tail);
                }
                Step::Unsplit(first, second) => {
                    let (first, mut first_model) = pieces.swap_remove(first.index(count));
                    if pieces.is_empty() {
                        pieces.push((first, first_model));
                        continue;
                    }
                    let (second, second_model) = pieces.swap_remove(second.index(count - 1));
                    let neighbours = first.address() + first.len() as u64 == second.address();
                    match first.unsplit(second) {
                        Ok(joined) => {
                            prop_assert!(neighbours);
                            first_model.extend(second_model);
                            pieces.push((joined, first_model));
                        }
                        Err(error) => {
                            prop_assert!(!neighbours);
                            let (first, second) = error.into_buffers();
                            pieces.push((first, first_model));
                            pieces.push((second, second_model));
                        }
                    }
                }
                Step::Fill(which, value) => {
                    let (buffer, model) = &mut pieces[which.index(count)];
                    buffer.fill(value);
                    model.fill(value);
                }
                Step::Drop(which) => drop(pieces.swap_remove(which.index(count))),
            }
            for (buffer, model) in &pieces {
                prop_assert_eq!(&buffer[..], &model[..]);
                prop_assert!(buffer.address() >= base && buffer.address() + buffer.len() as u64 <= base + 100);
            }
            prop_assert_eq!(pd.stats().live_buffers, usize::from(!pieces.is_empty()));
        }
        drop(pieces);
        prop_assert_eq!(pool.available(), 1);
        drop(pool);
        prop_assert_eq!(pd.stats(), DomainStats::default());
    }
}
