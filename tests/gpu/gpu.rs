//! The GPU that there is, its kernels, and what they compute on the host.

use std::collections::HashMap;
use std::io::Write as _;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use fake_cuda::Fake;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice, GpuExposedRegion, GpuRead, GpuWrite, PathPolicy};
use tokio_rdma::{Access, ProtectionDomain};

use crate::common::End;

/// The kernels, in source.
const KERNELS: &str = include_str!("kernels.ptx");

/// Some blocks of threads, which go over any number of bytes together.
const GRID: LaunchConfig = LaunchConfig { grid_dim: (128, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
const ONE_THREAD: LaunchConfig = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };

/// The stand-in, unless a real driver is used. It is loaded before anything looks for a driver.
pub fn fake() -> Option<Fake> {
    static DRIVER: OnceLock<Option<Fake>> = OnceLock::new();
    *DRIVER.get_or_init(|| {
        let asked = std::env::var("TOKIO_RDMA_TEST_GPU").is_ok_and(|kind| kind == "fake");
        if !asked && a_driver_is_installed() {
            return None;
        }
        Some(fake_cuda::load().expect("the stand-in driver is built with these tests"))
    })
}

pub fn a_driver_is_installed() -> bool {
    // SAFETY: the library is NVIDIA's, whose initialisers are made to run at any time.
    unsafe { libloading::Library::new("libcuda.so.1") }.is_ok()
}

/// Says, past what libtest captures, why a case does not run.
pub fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

/// The stand-in for a case that needs its knobs or its counters; says so where there is none.
pub fn fake_only() -> Option<Fake> {
    let fake = fake();
    if fake.is_none() {
        skipped("needs the stand-in driver, and this is a real one; TOKIO_RDMA_TEST_GPU=fake takes the other");
    }
    fake
}

/// How many GPUs there are.
pub fn count() -> usize {
    fake();
    GpuDevice::count()
}

/// A GPU, with the kernels loaded. Cheap to clone.
#[derive(Clone)]
pub struct Gpu {
    pub device: GpuDevice,
    /// Loaded ahead, since loading one waits for what the GPU is at.
    kernels: Arc<HashMap<&'static str, CudaFunction>>,
}

impl Deref for Gpu {
    type Target = GpuDevice;

    fn deref(&self) -> &GpuDevice {
        &self.device
    }
}

impl Gpu {
    pub fn open() -> Self {
        Self::open_ordinal(0)
    }

    /// The first GPU, and the second one where there are two.
    pub fn open_two() -> (Self, Self) {
        let first = Self::open();
        let second = if count() > 1 { Self::open_ordinal(1) } else { first.clone() };
        (first, second)
    }

    pub fn open_ordinal(ordinal: usize) -> Self {
        fake();
        let device = GpuDevice::open(ordinal).unwrap();
        let module = device.context().load_module(Ptx::from_src(KERNELS)).unwrap();
        let names = ["fill", "check", "add_f32", "spin", "fault"];
        let kernels = names.map(|name| (name, module.load_function(name).unwrap()));
        Self { device, kernels: Arc::new(kernels.into()) }
    }

    fn kernel(&self, name: &str) -> CudaFunction {
        self.kernels[name].clone()
    }

    pub fn stream(&self) -> Arc<CudaStream> {
        self.device.context().new_stream().unwrap()
    }

    pub fn alloc(&self, domain: &ProtectionDomain, len: usize) -> GpuBuffer {
        GpuBuffer::alloc(&self.device, domain, len).unwrap()
    }

    pub fn alloc_staged(&self, domain: &ProtectionDomain, len: usize) -> GpuBuffer {
        GpuBuffer::alloc_with(&self.device, domain, len, PathPolicy::Staged).unwrap()
    }

    /// A buffer that a kernel is filling with the pattern of this seed.
    pub fn filled(&self, domain: &ProtectionDomain, len: usize, seed: u64) -> GpuBuffer {
        let mut buffer = self.alloc(domain, len);
        self.fill(&self.stream(), &mut buffer, seed);
        buffer
    }

    pub fn exposed(&self, end: &End, len: usize) -> GpuExposedRegion {
        self.alloc(&end.domain, len).expose(Access::all()).unwrap()
    }

    /// Launches `fill`.
    pub fn fill(&self, stream: &Arc<CudaStream>, buffer: &mut GpuBuffer, seed: u64) {
        self.fill_through(&mut buffer.write_on::<u8>(stream).unwrap(), seed);
    }

    /// The same through a guard, on its stream.
    pub fn fill_through(&self, bytes: &mut GpuWrite<'_, u8>, seed: u64) {
        let (kernel, stream, len) = (self.kernel("fill"), bytes.stream().clone(), bytes.len() as u64);
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(bytes).arg(&len).arg(&seed);
        // SAFETY: the kernel takes these arguments, and writes `len` bytes of the buffer.
        unsafe { launch.launch(GRID) }.unwrap();
    }

    /// The same without telling the buffer.
    pub fn fill_secretly(&self, stream: &Arc<CudaStream>, buffer: &mut GpuBuffer, seed: u64) {
        let (kernel, address, len) = (self.kernel("fill"), buffer.address(), buffer.len() as u64);
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(&address).arg(&len).arg(&seed);
        // SAFETY: as above; that the buffer is kept until then is the caller's business.
        unsafe { launch.launch(GRID) }.unwrap();
    }

    /// Launches `spin`.
    pub fn spin(&self, stream: &Arc<CudaStream>, time: Duration) {
        let kernel = self.kernel("spin");
        let nanoseconds = time.as_nanos() as u64;
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(&nanoseconds);
        // SAFETY: the kernel takes this argument, and touches no memory.
        unsafe { launch.launch(ONE_THREAD) }.unwrap();
    }

    /// Launches `fault`, after which the context cannot be used any more.
    pub fn fault(&self, stream: &Arc<CudaStream>) {
        let kernel = self.kernel("fault");
        // SAFETY: the kernel takes no arguments; the error that it causes is the GPU's to contain.
        unsafe { stream.launch_builder(&kernel).launch(ONE_THREAD) }.unwrap();
    }

    /// Launches `check` on the first `len` bytes, on the guard's stream.
    pub fn check(&self, bytes: &GpuRead<'_, u8>, len: usize, seed: u64) -> Verdict {
        assert!(len <= bytes.len());
        let (kernel, stream) = (self.kernel("check"), bytes.stream().clone());
        let mut mismatches = stream.alloc_zeros::<u64>(1).unwrap();
        let len = len as u64;
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(bytes).arg(&len).arg(&seed).arg(&mut mismatches);
        // SAFETY: the kernel takes these arguments, and reads `len` bytes of the buffer.
        unsafe { launch.launch(GRID) }.unwrap();
        Verdict { stream, mismatches }
    }

    /// A reader that takes its time: after `time` it checks all bytes.
    pub fn check_late(&self, buffer: &GpuBuffer, time: Duration, seed: u64) -> Verdict {
        let stream = self.stream();
        let bytes = buffer.read_on::<u8>(&stream).unwrap();
        self.spin(&stream, time);
        self.check(&bytes, bytes.len(), seed)
    }

    /// A producer that takes its time.
    pub fn fill_late(&self, buffer: &mut GpuBuffer, time: Duration, seed: u64) {
        let stream = self.stream();
        self.spin(&stream, time);
        self.fill(&stream, buffer, seed);
    }

    /// How many of the first `len` bytes are not the pattern's, as a kernel on a new stream finds.
    pub fn mismatches(&self, buffer: &GpuBuffer, len: usize, seed: u64) -> u64 {
        let stream = self.stream();
        self.check(&buffer.read_on::<u8>(&stream).unwrap(), len, seed).mismatches()
    }

    /// The same for exposed memory.
    pub fn mismatches_in(&self, region: &GpuExposedRegion, len: usize, seed: u64) -> u64 {
        let stream = self.stream();
        self.check(&region.read_on::<u8>(&stream).unwrap(), len, seed).mismatches()
    }

    /// The bytes, copied to the host.
    pub fn contents(&self, buffer: &GpuBuffer) -> Vec<u8> {
        let stream = self.stream();
        stream.clone_dtoh(&buffer.read_on::<u8>(&stream).unwrap()).unwrap()
    }
}

/// What a `check` finds, once it has run.
pub struct Verdict {
    stream: Arc<CudaStream>,
    mismatches: CudaSlice<u64>,
}

impl Verdict {
    /// Waits for it.
    pub fn mismatches(self) -> u64 {
        self.stream.clone_dtoh(&self.mismatches).unwrap()[0]
    }
}

/// What `fill` makes, on the host.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// What `check` finds, on the host.
pub fn host_mismatches(bytes: &[u8], seed: u64) -> u64 {
    let expected = pattern(bytes.len(), seed);
    bytes.iter().zip(&expected).filter(|(found, expected)| found != expected).count() as u64
}

/// How many transfers a soak makes, if the environment says so.
pub fn rounds(usual: u64) -> u64 {
    std::env::var("TOKIO_RDMA_TEST_GPU_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(usual)
}
