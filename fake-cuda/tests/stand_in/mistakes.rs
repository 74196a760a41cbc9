//! What a program must not do ends it, with a reason.

use super::common::{Driver, end_of};
use cudarc::driver::{CudaContext, DevicePtr, result, sys};

const ABORT: i32 = 6;
const SEGMENTATION_FAULT: i32 = 11;

#[test]
fn freed_memory_is_not_copied() {
    let end = end_of("mistakes::freed_memory_is_not_copied", &[], || {
        let (_driver, _) = Driver::stand_in();
        let context = CudaContext::new(0).unwrap();
        let _stream = context.new_stream().unwrap();
        // SAFETY: none; that is what this is about.
        unsafe {
            let address = result::malloc_sync(100).unwrap();
            result::free_sync(address).unwrap();
            let _ = result::memcpy_dtoh_sync(&mut [0_u8; 100], address);
        }
    });
    assert_eq!(end.signal(), Some(ABORT), "{}", end.errors());
    assert!(end.said("use after free: 100 bytes"), "{}", end.errors());
}

#[test]
fn a_queued_copy_does_not_survive_its_memory() {
    let end = end_of("mistakes::a_queued_copy_does_not_survive_its_memory", &[], || {
        let (_driver, fake) = Driver::stand_in();
        let context = CudaContext::new(0).unwrap();
        let (copies, frees) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        fake.set("copy_delay_us", 400_000);
        // SAFETY: none; that is what this is about.
        unsafe {
            let address = result::malloc_async(frees.cu_stream(), 100).unwrap();
            result::memcpy_dtod_async(address, address, 50, copies.cu_stream()).unwrap();
            result::free_async(address, frees.cu_stream()).unwrap();
            frees.synchronize().unwrap();
            // That others have the memory now makes it no better.
            assert_eq!(result::malloc_async(frees.cu_stream(), 100), Ok(address));
        }
        let _ = copies.synchronize();
    });
    assert_eq!(end.signal(), Some(ABORT), "{}", end.errors());
    assert!(end.said("use after free: a queued operation"), "{}", end.errors());
}

#[test]
fn nothing_is_copied_beyond_the_end() {
    let end = end_of("mistakes::nothing_is_copied_beyond_the_end", &[], || {
        let (_driver, _) = Driver::stand_in();
        let _context = CudaContext::new(0).unwrap();
        // SAFETY: none; that is what this is about.
        unsafe {
            let address = result::malloc_sync(100).unwrap();
            let _ = result::memcpy_htod_sync(address + 1, &[0_u8; 100]);
        }
    });
    assert_eq!(end.signal(), Some(ABORT), "{}", end.errors());
    assert!(end.said("out of bounds: 100 bytes"), "{}", end.errors());
}

#[test]
fn a_destroyed_event_is_not_recorded() {
    let end = end_of("mistakes::a_destroyed_event_is_not_recorded", &[], || {
        let (_driver, _) = Driver::stand_in();
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        // SAFETY: none; that is what this is about.
        unsafe {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
            result::event::destroy(event).unwrap();
            let _ = result::event::record(event, stream.cu_stream());
        }
    });
    assert_eq!(end.signal(), Some(ABORT), "{}", end.errors());
    assert!(end.said("use after free: event"), "{}", end.errors());
}

#[test]
fn a_destroyed_stream_is_not_used() {
    let end = end_of("mistakes::a_destroyed_stream_is_not_used", &[], || {
        let (_driver, _) = Driver::stand_in();
        let _context = CudaContext::new(0).unwrap();
        // SAFETY: none; that is what this is about.
        unsafe {
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
            result::stream::destroy(stream).unwrap();
            let _ = result::stream::synchronize(stream);
        }
    });
    assert_eq!(end.signal(), Some(ABORT), "{}", end.errors());
    assert!(end.said("use after free: stream"), "{}", end.errors());
}

/// Reads device memory as if it were the program's. Returns what it read, where that works.
fn read_through_the_device_address() -> u8 {
    let (_driver, _) = Driver::stand_in();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let buffer = stream.clone_htod(&[42_u8; 100]).unwrap();
    stream.synchronize().unwrap();
    let (address, _used) = buffer.device_ptr(&stream);
    // SAFETY: none, unless the stand-in shows its memory; that is what this is about.
    unsafe { (address as *const u8).add(99).read_volatile() }
}

#[test]
fn the_cpu_does_not_reach_the_device() {
    let end = end_of("mistakes::the_cpu_does_not_reach_the_device", &[], || {
        read_through_the_device_address();
    });
    assert_eq!(end.signal(), Some(SEGMENTATION_FAULT), "{}", end.errors());
}

#[test]
fn the_cpu_reaches_the_device_if_it_may() {
    let visible = [("FAKE_CUDA_HOST_VISIBLE", "1")];
    let end = end_of("mistakes::the_cpu_reaches_the_device_if_it_may", &visible, || {
        assert_eq!(read_through_the_device_address(), 42);
    });
    assert!(end.survived(), "{}", end.errors());
}

#[test]
fn freed_memory_is_overwritten_and_used_again() {
    let (driver, _) = Driver::stand_in();
    {
        let context = CudaContext::new(0).unwrap();
        context.bind_to_thread().unwrap();
        // SAFETY: what is read is memory that was allocated, if not written.
        unsafe {
            let first = result::malloc_sync(5000).unwrap();
            result::memset_d8_sync(first, 1, 5000).unwrap();
            result::free_sync(first).unwrap();
            let second = result::malloc_sync(5000).unwrap();
            let mut bytes = [0_u8; 5000];
            result::memcpy_dtoh_sync(&mut bytes, second).unwrap();
            result::free_sync(second).unwrap();
            assert_eq!(first, second);
            assert_eq!(bytes, [0xDD; 5000]);
        }
    }
    assert!(driver.is_clean());
}
