//! Knobs, failures and counters of the stand-in.

use std::ffi::CStr;
use std::time::{Duration, Instant};

use super::common::{Driver, Kernels};
use cudarc::driver::sys::{
    CUdevice_attribute_enum as Attribute, CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget, CUresult,
    cuDeviceGetPCIBusId, cuFlushGPUDirectRDMAWrites,
};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg, result};

#[test]
fn events_answer_late() {
    let (driver, fake) = Driver::stand_in();
    {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let event = context.new_event(None).unwrap();
        assert!(event.is_complete(), "it waits for nothing yet");
        fake.set("event_polls", 3);
        event.record(&stream).unwrap();
        stream.synchronize().unwrap();
        let answers: Vec<_> = (0..5).map(|_| event.is_complete()).collect();
        assert_eq!(answers, [false, false, false, true, true]);
    }
    assert!(driver.is_clean());
}

#[test]
fn copies_and_kernels_take_their_time() {
    let (driver, fake) = Driver::stand_in();
    {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let mut buffer = stream.alloc_zeros::<u8>(64).unwrap();
        let kernels = Kernels::load(&context);
        let fill = kernels.get("fill");
        stream.synchronize().unwrap();
        fake.set("copy_delay_us", 200_000);
        fake.set("kernel_delay_us", 100_000);

        let started = Instant::now();
        stream.memcpy_htod(&[1; 64], &mut buffer).unwrap();
        // SAFETY: the arguments are those that the kernel declares.
        unsafe {
            let config = LaunchConfig::for_num_elems(64);
            stream.launch_builder(&fill).arg(&mut buffer).arg(&64_u64).arg(&0_u64).launch(config)
        }
        .unwrap();
        assert!(!stream.record_event(None).unwrap().is_complete());
        stream.synchronize().unwrap();
        assert!(started.elapsed() >= Duration::from_millis(300));
        assert_eq!(stream.clone_dtoh(&buffer).unwrap(), super::common::pattern(0, 64));
    }
    assert!(driver.is_clean());
}

#[test]
fn the_nth_call_fails() {
    let (driver, fake) = Driver::stand_in();
    {
        let context = CudaContext::new(0).unwrap();
        fake.fail("cuStreamCreate", 2, CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32);
        let _first = context.new_stream().unwrap();
        assert_eq!(context.new_stream().unwrap_err().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let stream = context.new_stream().unwrap();

        fake.fail("copy", 2, CUresult::CUDA_ERROR_LAUNCH_FAILED as u32);
        let buffer = stream.clone_htod(&[1, 2, 3]).unwrap();
        let mut bytes = [0; 3];
        assert_eq!(stream.memcpy_dtoh(&buffer, &mut bytes).unwrap_err().0, CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!(bytes, [0; 3], "a copy that failed has copied nothing");
        assert_eq!(stream.synchronize().unwrap_err().0, CUresult::CUDA_ERROR_LAUNCH_FAILED);
    }
    assert!(driver.is_clean());
}

#[test]
fn counters_count() {
    let (driver, fake) = Driver::stand_in();
    assert!(driver.is_clean());
    {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let calls = fake.get("cuMemcpyHtoDAsync_v2");
        let first = stream.clone_htod(&[1_u8; 1000]).unwrap();
        let second = stream.clone_dtod(&first).unwrap();
        stream.clone_dtoh(&second).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(fake.get("cuMemcpyHtoDAsync_v2"), calls + 1);
        assert_eq!(["copies_h2d", "copies_d2d", "copies_d2h"].map(|name| fake.get(name)), [1, 1, 1]);
        assert_eq!(["bytes_h2d", "bytes_d2d", "bytes_d2h"].map(|name| fake.get(name)), [1000; 3]);
        assert_eq!(["live_allocations", "live_bytes", "live_streams"].map(|name| fake.get(name)), [2, 2000, 1]);
        // SAFETY: bytes may be of any value.
        let pinned = unsafe { context.alloc_pinned::<u8>(100) }.unwrap();
        assert_eq!(fake.get("live_host_allocations"), 1);
        drop(pinned);

        // SAFETY: nobody uses it, nor frees it.
        unsafe { result::malloc_sync(10) }.unwrap();
        assert!(!driver.is_clean());
    }
    assert_eq!(fake.get("leaked"), 1, "it ended with its context");
    assert_eq!(fake.get("live_allocations"), 0);
}

#[test]
fn a_device_is_what_the_knobs_say() {
    let (driver, fake) = Driver::stand_in();
    {
        let context = CudaContext::new(1).unwrap();
        assert_eq!(context.compute_capability().unwrap(), (9, 0));
        fake.set("compute_capability", 87);
        assert_eq!(context.compute_capability().unwrap(), (8, 7));
        let ordering = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
        assert_eq!(context.attribute(ordering).unwrap(), 100);
        for value in [0, 200] {
            fake.set("writes_ordering", value);
            assert_eq!(context.attribute(ordering).unwrap(), value as i32);
        }
        fake.set("gdr", 0);
        assert_eq!(context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED).unwrap(), 0);
        fake.set("dmabuf", 0);
        assert_eq!(context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED).unwrap(), 0);
    }
    assert!(driver.is_clean());
}

#[test]
fn descriptors_are_counted_until_they_are_closed() {
    let (driver, fake) = Driver::stand_in();
    {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        fake.set("memory_pools", 0);
        assert!(!CudaContext::new(0).unwrap().has_async_alloc());
        // SAFETY: freed below.
        let address = unsafe { result::malloc_sync(10_000) }.unwrap();
        let pages = super::as_on_a_gpu::export(address, 12_288).expect("the last page may be a part");
        let page = super::as_on_a_gpu::export(address + 8192, 4096).unwrap();
        assert_eq!(fake.get("open_handles"), 2);
        drop(pages);
        assert_eq!(fake.get("open_handles"), 1);
        drop(page);
        assert_eq!(super::as_on_a_gpu::export(address, 16_384).unwrap_err(), CUresult::CUDA_ERROR_INVALID_VALUE);
        fake.set("dmabuf", 0);
        assert_eq!(super::as_on_a_gpu::export(address, 4096).unwrap_err(), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!(fake.get("open_handles"), 0);
        // SAFETY: allocated above; nothing uses it.
        unsafe { result::free_sync(address) }.unwrap();
        drop(stream);
    }
    assert!(driver.is_clean());
}

fn flush() -> CUresult {
    let target = CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
    let scope = CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
    // SAFETY: no memory is passed.
    unsafe { cuFlushGPUDirectRDMAWrites(target, scope) }
}

#[test]
fn flushes_are_counted_where_they_work() {
    let (driver, fake) = Driver::stand_in();
    {
        let context = CudaContext::new(0).unwrap();
        context.bind_to_thread().unwrap();
        assert_eq!(flush(), CUresult::CUDA_SUCCESS);
        assert_eq!(flush(), CUresult::CUDA_SUCCESS);
        assert_eq!(fake.get("flushes"), 2);
        fake.set("flush_options", 0);
        assert_eq!(flush(), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!(fake.get("flushes"), 2);
    }
    assert!(driver.is_clean());
}

#[test]
fn pageable_memory_is_free_once_the_call_returns_and_pinned_is_not() {
    let (driver, fake) = Driver::stand_in();
    {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let mut there = stream.alloc_zeros::<u8>(4).unwrap();
        // SAFETY: written below, before it is read.
        let mut pinned = unsafe { context.alloc_pinned_with_flags::<u8>(4, 0) }.unwrap();
        pinned.as_mut_slice().unwrap().fill(0);
        fake.set("copy_delay_us", 150_000);

        let mut pageable = vec![1, 2, 3, 4];
        stream.memcpy_htod(&pageable, &mut there).unwrap();
        pageable.fill(9);
        stream.memcpy_dtoh(&there, &mut pinned).unwrap();
        assert_eq!(fake.get("copies_d2h"), 0, "pinned memory is copied later");
        stream.memcpy_dtoh(&there, &mut pageable).unwrap();
        assert_eq!(pageable, [1, 2, 3, 4], "pageable memory is copied now");
        assert_eq!(pinned.as_slice().unwrap(), pageable);
    }
    assert!(driver.is_clean());
}

#[test]
fn many_threads_share_it() {
    let (driver, fake) = Driver::stand_in();
    {
        let context = CudaContext::new(0).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let context = context.clone();
                scope.spawn(move || {
                    for round in 0..20 {
                        let stream = context.new_stream().unwrap();
                        let sent = super::common::pattern(thread * 100 + round, 3000 + round as usize);
                        let there = stream.clone_dtod(&stream.clone_htod(&sent).unwrap()).unwrap();
                        assert_eq!(stream.clone_dtoh(&there).unwrap(), sent);
                    }
                });
            }
        });
        assert_eq!(fake.get("copies_h2d"), 160);
    }
    assert!(driver.is_clean());
}

#[test]
fn memory_runs_out() {
    let variables = [("FAKE_CUDA_MEMORY", "4194304")];
    let end = super::common::end_of("hooks::memory_runs_out", &variables, || {
        let (_driver, _) = Driver::stand_in();
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let most = stream.alloc_zeros::<u8>(1 << 20).unwrap();
        let none = stream.alloc_zeros::<u8>(4 << 20).unwrap_err();
        assert_eq!(none.0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        drop(most);
    });
    assert!(end.survived(), "{}", end.errors());
}

#[test]
fn devices_are_where_the_variable_says() {
    let variables = [("FAKE_CUDA_PCI_BUS_IDS", "0000:03:00.0,0001:AB:1f.0"), ("FAKE_CUDA_DEVICES", "3")];
    let end = super::common::end_of("hooks::devices_are_where_the_variable_says", &variables, || {
        let (_driver, _) = Driver::stand_in();
        let id = |device| {
            let mut id = [0; 20];
            // SAFETY: there is room for the 20 bytes that are allowed.
            unsafe { cuDeviceGetPCIBusId(id.as_mut_ptr(), 20, device) }.result().unwrap();
            // SAFETY: the driver ends what it writes with a zero.
            unsafe { CStr::from_ptr(id.as_ptr()) }.to_str().unwrap().to_owned()
        };
        result::init().unwrap();
        assert_eq!([0, 1, 2].map(id), ["0000:03:00.0", "0001:AB:1F.0", "0000:37:00.0"]);
    });
    assert!(end.survived(), "{}", end.errors());
}

#[test]
fn there_may_be_no_device() {
    let end = super::common::end_of("hooks::there_may_be_no_device", &[("FAKE_CUDA_DEVICES", "0")], || {
        let (_driver, _) = Driver::stand_in();
        assert_eq!(CudaContext::new(0).unwrap_err().0, CUresult::CUDA_ERROR_NO_DEVICE);
    });
    assert!(end.survived(), "{}", end.errors());
}
