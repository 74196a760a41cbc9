//! Handles: numbers that stand for objects, never used twice.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::{Code, Result, lock, misuse};

/// The objects of one kind that programs hold handles of.
pub(super) struct Registry<T> {
    kind: &'static str,
    first: usize,
    objects: Mutex<Objects<T>>,
}

struct Objects<T> {
    issued: usize,
    live: BTreeMap<usize, Arc<T>>,
}

impl<T> Registry<T> {
    /// Handles count up from `first`, which differs by kind and is no address.
    pub(super) const fn new(kind: &'static str, first: usize) -> Self {
        Self { kind, first, objects: Mutex::new(Objects { issued: 0, live: BTreeMap::new() }) }
    }

    /// Makes an object that may know its handle.
    pub(super) fn insert(&self, make: impl FnOnce(usize) -> T) -> Arc<T> {
        let mut objects = lock(&self.objects);
        let handle = self.first + objects.issued * 16;
        objects.issued += 1;
        let object = Arc::new(make(handle));
        objects.live.insert(handle, object.clone());
        object
    }

    /// The object of a handle that the program passes. It must be alive.
    pub(super) fn get(&self, handle: usize) -> Result<Arc<T>> {
        self.find(handle).ok_or_else(|| self.complain(handle))
    }

    /// As [`get`](Self::get); the handle is dead from now on.
    pub(super) fn remove(&self, handle: usize) -> Result<Arc<T>> {
        let removed = lock(&self.objects).live.remove(&handle);
        removed.ok_or_else(|| self.complain(handle))
    }

    /// The object of a handle, if it is alive.
    pub(super) fn find(&self, handle: usize) -> Option<Arc<T>> {
        lock(&self.objects).live.get(&handle).cloned()
    }

    /// Forgets objects without complaint, and says how many.
    pub(super) fn purge(&self, gone: impl Fn(&T) -> bool) -> u64 {
        let mut objects = lock(&self.objects);
        let before = objects.live.len();
        objects.live.retain(|_, object| !gone(object));
        (before - objects.live.len()) as u64
    }

    pub(super) fn count(&self) -> u64 {
        lock(&self.objects).live.len() as u64
    }

    fn complain(&self, handle: usize) -> Code {
        let issued = lock(&self.objects).issued;
        let kind = self.kind;
        if handle == 0 {
            return Code::INVALID_HANDLE;
        }
        if handle >= self.first && handle < self.first + issued * 16 {
            misuse(format_args!("use after free: {kind} {handle:#x} has been destroyed"));
        }
        misuse(format_args!("{handle:#x} is no {kind}"));
    }
}
