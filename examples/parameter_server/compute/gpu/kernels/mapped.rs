//! A few words of the host's memory that the GPU reaches: for what is too little to be copied.
// The GPU writes into it, which no reference may hide.
#![allow(unsafe_code)]

use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;

use anyhow::{Result, ensure};
use cudarc::driver::{CudaStream, DeviceRepr, PinnedHostSlice, ValidAsZeroBits, sys};

/// Page-locked memory that kernels on one stream read and write at the same address. All zero at first.
pub struct Mapped<T> {
    stream: Arc<CudaStream>,
    memory: PinnedHostSlice<T>,
    address: u64,
}

impl<T: DeviceRepr + ValidAsZeroBits + Copy + Default> Mapped<T> {
    pub fn new(stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: written as a whole before anybody reads it.
        let mut memory = unsafe { stream.context().alloc_pinned_with_flags::<T>(len, flags) }?;
        let start = memory.as_mut_ptr()?;
        for index in 0..len {
            // SAFETY: one of the `len` values, which nobody else knows of yet.
            unsafe { start.add(index).write(T::default()) };
        }
        // With unified addressing, which every driver for 64 bits has, the GPU knows it by this address too.
        let address = start.expose_provenance() as u64;
        Ok(Self { stream: stream.clone(), memory, address })
    }

    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// For kernels on the stream.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// What the last kernel that the caller has awaited left there.
    pub fn get(&self, index: usize) -> Result<T> {
        let place = self.place(index)?;
        // SAFETY: inside of the memory; a device may have written it, which a volatile read allows for.
        Ok(unsafe { place.read_volatile() })
    }

    /// For the kernels that are launched from here on. Those before, the caller has awaited.
    pub fn set(&mut self, index: usize, value: T) -> Result<()> {
        let place = self.place(index)?;
        // SAFETY: inside of the memory, which nobody else on the host has while this is borrowed mutably.
        unsafe { place.write_volatile(value) };
        Ok(())
    }

    fn place(&self, index: usize) -> Result<*mut T> {
        ensure!(index < self.len(), "index {index} of {} values", self.len());
        Ok(with_exposed_provenance_mut::<T>(self.address as usize).wrapping_add(index))
    }
}

impl<T> Drop for Mapped<T> {
    /// A kernel that nobody awaited may still use it. After an error of the GPU none does.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}
