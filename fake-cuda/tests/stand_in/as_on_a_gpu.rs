//! What holds on the stand-in as on a GPU: with `FAKE_CUDA=off` these tests run on the machine's own driver.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use super::common::{Driver, Kernels, pattern};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, LaunchConfig, PushKernelArg, result};

const LEN: usize = 1 << 20;

const CAN_FLUSH: sys::CUdevice_attribute = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES;

fn launch() -> LaunchConfig {
    LaunchConfig { grid_dim: (64, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 }
}

/// An attribute of an address.
fn attribute<T: Default>(address: u64, which: sys::CUpointer_attribute) -> Result<T, CUresult> {
    let mut value = T::default();
    // SAFETY: `T` is the attribute's type.
    let status = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), which, address) };
    if status == CUresult::CUDA_SUCCESS { Ok(value) } else { Err(status) }
}

/// Whether a NIC can reach an address, whether it is managed, and where it is.
fn class(address: u64) -> Result<(bool, bool, u32), CUresult> {
    use sys::CUpointer_attribute::*;
    Ok((
        attribute::<u8>(address, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE)? != 0,
        attribute::<u8>(address, CU_POINTER_ATTRIBUTE_IS_MANAGED)? != 0,
        attribute::<u32>(address, CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?,
    ))
}

const HOST: u32 = 1;
const DEVICE: u32 = 2;

#[test]
fn bytes_go_to_the_device_and_back() {
    let driver = Driver::any();
    {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let sent = pattern(1, LEN);
        let there = stream.clone_htod(&sent).unwrap();
        let copied = stream.record_event(None).unwrap();
        let other = stream.clone_dtod(&there).unwrap();
        let mut pinned = pinned_bytes(&context);
        stream.memcpy_dtoh(&other, &mut pinned).unwrap();
        stream.synchronize().unwrap();
        assert!(copied.is_complete());
        assert_eq!(pinned.as_slice().unwrap(), sent);
        assert_eq!(stream.clone_dtoh(&there).unwrap(), sent);
    }
    assert!(driver.is_clean());
}

fn pinned_bytes(context: &Arc<CudaContext>) -> cudarc::driver::PinnedHostSlice<u8> {
    // SAFETY: bytes may be of any value.
    unsafe { context.alloc_pinned_with_flags(LEN, 0) }.unwrap()
}

#[test]
fn kernels_do_what_they_say() {
    let driver = Driver::any();
    {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let len = LEN as u64 - 3;
        let seed = u64::MAX - 5;

        let mut out = stream.alloc_zeros::<u8>(LEN).unwrap();
        let fill = kernels.get("fill");
        // SAFETY: the arguments are those that the kernel declares, and `out` has more than `len` bytes.
        unsafe { stream.launch_builder(&fill).arg(&mut out).arg(&len).arg(&seed).launch(launch()) }.unwrap();
        let mut bytes = stream.clone_dtoh(&out).unwrap();
        assert_eq!(bytes[..LEN - 3], pattern(seed, LEN - 3));
        assert_eq!(bytes[LEN - 3..], [0; 3], "nothing behind the end");

        for at in [0, 77, LEN - 4] {
            bytes[at] ^= 0x40;
        }
        let wrong = stream.clone_htod(&bytes).unwrap();
        let mut mismatches = stream.clone_htod(&[10_u64]).unwrap();
        let check = kernels.get("check");
        // SAFETY: as above; `mismatches` has 8 bytes.
        unsafe {
            let mut builder = stream.launch_builder(&check);
            builder.arg(&wrong).arg(&len).arg(&seed).arg(&mut mismatches).launch(launch())
        }
        .unwrap();
        assert_eq!(stream.clone_dtoh(&mismatches).unwrap(), [13]);

        let numbers: Vec<f32> = (0..1000_u16).map(f32::from).collect();
        let mut sum = stream.clone_htod(&numbers).unwrap();
        let x = stream.clone_htod(&vec![0.5_f32; 1000]).unwrap();
        let add = kernels.get("add_f32");
        // SAFETY: as above; both have 1000 numbers.
        unsafe { stream.launch_builder(&add).arg(&mut sum).arg(&x).arg(&1000_u64).launch(launch()) }.unwrap();
        let expected: Vec<f32> = numbers.iter().map(|number| number + 0.5).collect();
        assert_eq!(stream.clone_dtoh(&sum).unwrap(), expected);
    }
    assert!(driver.is_clean());
}

/// Starts a kernel that takes `time`.
fn spin(stream: &Arc<CudaStream>, kernels: &Kernels, time: Duration) {
    let nanoseconds = time.as_nanos() as u64;
    let spin = kernels.get("spin");
    // SAFETY: the argument is the one that the kernel declares.
    unsafe { stream.launch_builder(&spin).arg(&nanoseconds).launch(LaunchConfig::for_num_elems(1)) }.unwrap();
}

#[test]
fn streams_run_by_themselves_and_wait_for_each_other() {
    let driver = Driver::any();
    {
        let context = CudaContext::new(0).unwrap();
        let (slow, quick) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let kernels = Kernels::load(&context);
        spin(&slow, &kernels, Duration::from_millis(1));
        slow.synchronize().unwrap();

        let time = Duration::from_millis(300);
        let started = Instant::now();
        spin(&slow, &kernels, time);
        let spun = slow.record_event(None).unwrap();
        let beside = quick.record_event(None).unwrap();
        beside.synchronize().unwrap();
        assert!(!spun.is_complete(), "a launch does not wait");
        quick.wait(&spun).unwrap();
        let after = quick.record_event(None).unwrap();
        assert!(!after.is_complete());
        after.synchronize().unwrap();
        assert!(spun.is_complete());
        assert!(started.elapsed() >= time);
    }
    assert!(driver.is_clean());
}

#[test]
fn streams_call_functions_and_write_and_await_numbers() {
    extern "C" fn double(number: *mut std::ffi::c_void) {
        // SAFETY: the test gives a number of this type that outlives the stream's work.
        let number = unsafe { AtomicU32::from_ptr(number.cast()) };
        number.store(number.load(SeqCst) * 2, SeqCst);
    }

    let driver = Driver::any();
    {
        let context = CudaContext::new(0).unwrap();
        let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        context.bind_to_thread().unwrap();
        // SAFETY: the memory is freed when the streams are idle, and touched by the CPU only as atomics.
        unsafe {
            let page = result::malloc_host(4096, 0).unwrap();
            page.cast::<u32>().write(0);
            let (address, number) = (page as u64, AtomicU32::from_ptr(page.cast()));
            let at_least = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
            sys::cuStreamWaitValue32_v2(second.cu_stream(), address, 42, at_least).result().unwrap();
            let flush = at_least | sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_FLUSH as u32;
            if context.attribute(CAN_FLUSH).unwrap() == 0 {
                let status = sys::cuStreamWaitValue32_v2(first.cu_stream(), address, 0, flush);
                assert_eq!(status, CUresult::CUDA_ERROR_NOT_SUPPORTED);
            }
            let waited = second.record_event(None).unwrap();
            assert!(!waited.is_complete());
            sys::cuStreamWriteValue32_v2(first.cu_stream(), address, 21, 0).result().unwrap();
            result::stream::launch_host_function(first.cu_stream(), double, page).unwrap();
            second.synchronize().unwrap();
            first.synchronize().unwrap();
            assert_eq!(number.load(SeqCst), 42);
            assert!(waited.is_complete());
            result::free_host(page).unwrap();
        }
    }
    assert!(driver.is_clean());
}

#[test]
fn memory_says_what_it_is() {
    let driver = Driver::any();
    {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();

        // SAFETY: nobody uses these but their own functions, and each is freed once.
        unsafe {
            let device = result::malloc_sync(1 << 20).unwrap();
            assert_eq!(class(device), Ok((true, false, DEVICE)));
            assert_eq!(class(device + 4096), Ok((true, false, DEVICE)), "inside, too");
            result::free_sync(device).unwrap();

            let managed = result::malloc_managed(1 << 16, sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL).unwrap();
            assert_eq!(class(managed), Ok((false, true, DEVICE)));
            result::free_sync(managed).unwrap();

            let pinned = result::malloc_host(1 << 16, 0).unwrap();
            assert_eq!(class(pinned as u64), Ok((false, false, HOST)));
            result::free_host(pinned).unwrap();

            let mut pages = vec![0_u8; 1 << 16];
            let address: *mut u8 = pages.as_mut_ptr();
            assert_eq!(class(address as u64), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "the driver does not know it");
            sys::cuMemHostRegister_v2(address.cast(), pages.len(), 0).result().unwrap();
            assert_eq!(class(address as u64), Ok((false, false, HOST)));
            sys::cuMemHostUnregister(address.cast()).result().unwrap();
        }

        let pool = stream.alloc_zeros::<u8>(1 << 16).unwrap();
        let (address, _used) = pool.device_ptr(&stream);
        assert_eq!(class(address), Ok((false, false, DEVICE)));
    }
    assert!(driver.is_clean());
}

#[test]
fn mapped_memory_says_whether_a_nic_reaches_it() {
    let driver = Driver::any();
    {
        let context = CudaContext::new(0).unwrap();
        context.bind_to_thread().unwrap();
        for gdr in [0, 1] {
            // SAFETY: the structure is plain numbers; what is made is used as its functions want, and undone.
            unsafe {
                let mut properties: sys::CUmemAllocationProp = std::mem::zeroed();
                properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
                properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
                properties.allocFlags.gpuDirectRDMACapable = gdr;
                let mut size = 0;
                let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
                sys::cuMemGetAllocationGranularity(&mut size, &properties, least).result().unwrap();

                let (mut memory, mut address) = (0, 0);
                sys::cuMemCreate(&mut memory, size, &properties, 0).result().unwrap();
                sys::cuMemAddressReserve(&mut address, size, 0, 0, 0).result().unwrap();
                sys::cuMemMap(address, size, 0, memory, 0).result().unwrap();
                sys::cuMemRelease(memory).result().unwrap();
                assert_eq!(class(address), Ok((gdr != 0, false, DEVICE)));

                let mut retained = 0;
                sys::cuMemRetainAllocationHandle(&mut retained, address as *mut _).result().unwrap();
                sys::cuMemGetAllocationPropertiesFromHandle(&mut properties, retained).result().unwrap();
                assert_eq!(properties.allocFlags.gpuDirectRDMACapable, gdr);
                sys::cuMemRelease(retained).result().unwrap();

                let on = 1_u32;
                let which = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
                let status = sys::cuPointerSetAttribute((&raw const on).cast(), which, address);
                assert_eq!(status, CUresult::CUDA_ERROR_NOT_SUPPORTED);

                sys::cuMemUnmap(address, size).result().unwrap();
                sys::cuMemAddressFree(address, size).result().unwrap();
            }
        }
    }
    assert!(driver.is_clean());
}

/// A descriptor of a range of memory.
pub fn export(address: u64, len: usize) -> Result<OwnedFd, CUresult> {
    let mut fd = -1;
    let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    // SAFETY: the handle of this kind is an `int`, and the descriptor, if there is one, nobody else's.
    unsafe {
        match sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), address, len, kind, 0) {
            CUresult::CUDA_SUCCESS => Ok(OwnedFd::from_raw_fd(fd)),
            status => Err(status),
        }
    }
}

#[test]
fn memory_is_exported_by_whole_pages() {
    let driver = Driver::any();
    {
        let context = CudaContext::new(0).unwrap();
        context.bind_to_thread().unwrap();
        // SAFETY: freed below, once the descriptors are closed.
        let address = unsafe { result::malloc_sync(4 << 20) }.unwrap();
        let whole = export(address, 4 << 20).unwrap();
        let inner = export(address + 4096, 8192).unwrap();
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        assert_eq!(export(address + 512, 4096).unwrap_err(), invalid);
        assert_eq!(export(address, 4097).unwrap_err(), invalid);
        drop((whole, inner));

        let stream = context.new_stream().unwrap();
        let pool = stream.alloc_zeros::<u8>(1 << 16).unwrap();
        let (in_pool, used) = pool.device_ptr(&stream);
        drop(export(in_pool, 1 << 16).unwrap());
        assert_eq!(export(in_pool + 4096, 4096).unwrap_err(), invalid, "of a pool, only all of it");
        drop(used);
        // SAFETY: nothing uses it any more.
        unsafe { result::free_sync(address) }.unwrap();
    }
    assert!(driver.is_clean());
}

#[test]
fn two_devices_have_addresses_of_their_own() {
    let driver = Driver::any();
    if CudaContext::device_count().unwrap() < 2 {
        println!("skipped: this machine has one GPU");
        return;
    }
    {
        let sent = pattern(2, LEN);
        let (first, second) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
        let (one, two) = (first.new_stream().unwrap(), second.new_stream().unwrap());
        assert_ne!(first.uuid().unwrap().bytes, second.uuid().unwrap().bytes);
        let here = one.clone_htod(&sent).unwrap();
        let mut there = two.alloc_zeros::<u8>(LEN).unwrap();
        let ordinal = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        assert_eq!(attribute(here.device_ptr(&one).0, ordinal), Ok(0_i32));
        assert_eq!(attribute(there.device_ptr(&two).0, ordinal), Ok(1_i32));
        two.memcpy_dtod(&here, &mut there).unwrap();
        assert_eq!(two.clone_dtoh(&there).unwrap(), sent);
    }
    assert!(driver.is_clean());
}

#[test]
fn a_fault_is_the_end_of_its_context() {
    let end = super::common::end_of("as_on_a_gpu::a_fault_is_the_end_of_its_context", &[], || {
        let driver = Driver::any();
        {
            let context = CudaContext::new(0).unwrap();
            let stream = context.new_stream().unwrap();
            let event = context.new_event(None).unwrap();
            let kernels = Kernels::load(&context);
            let fault = kernels.get("fault");
            let mut buffer = stream.alloc_zeros::<u8>(16).unwrap();
            // SAFETY: the kernel has no arguments. What it breaks is the context.
            unsafe { stream.launch_builder(&fault).launch(LaunchConfig::for_num_elems(1)) }.unwrap();

            let illegal = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
            assert_eq!(stream.synchronize().unwrap_err().0, illegal);
            assert_eq!(event.record(&stream).unwrap_err().0, illegal);
            assert_eq!(event.try_is_complete().unwrap_err().0, illegal);
            assert_eq!(stream.memcpy_htod(&[1], &mut buffer).unwrap_err().0, illegal);
            assert_eq!(context.synchronize().unwrap_err().0, illegal);
        }
        // The next context is a new one; and what the broken one refused to free is gone with it.
        if std::env::var_os("FAKE_CUDA").is_none() {
            let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
            assert_eq!(stream.clone_dtoh(&stream.clone_htod(&[7]).unwrap()).unwrap(), [7]);
            drop(stream);
            assert!(driver.is_clean());
        }
    });
    assert!(end.survived(), "{}", end.errors());
}
