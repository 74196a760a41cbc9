//! The kernels, and launching each of them with what it takes.
// That is unsafe in cudarc: only the kernel's text knows what its arguments are.
#![allow(unsafe_code)]

mod mapped;

pub use self::mapped::Mapped;

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use tokio_rdma::gpu::{GpuRead, GpuWrite};

use crate::digits::{PIXELS, Sample};
use crate::model::PARAMETERS;
use crate::wire::GRADIENT;

const TEXT: &str = include_str!("kernels.ptx");

/// Threads of a block, as the kernels want them.
const GRADIENT_THREADS: u32 = 512;
const TAKE_THREADS: u32 = 1024;
const DESCEND_THREADS: u32 = 128;

#[derive(Clone)]
pub struct Kernels {
    stream: Arc<CudaStream>,
    gradient: CudaFunction,
    take: CudaFunction,
    descend: CudaFunction,
}

impl Kernels {
    /// For launches on this stream.
    pub fn load(stream: &Arc<CudaStream>) -> Result<Self> {
        let module = stream.context().load_module(Ptx::from_src(TEXT)).context("load the kernels")?;
        let function = |name| module.load_function(name).with_context(|| format!("find the kernel {name}"));
        Ok(Self {
            stream: stream.clone(),
            gradient: function("gradient")?,
            take: function("take")?,
            descend: function("descend")?,
        })
    }

    /// The same for launches on another stream of the same context.
    pub fn on(&self, stream: &Arc<CudaStream>) -> Self {
        Self { stream: stream.clone(), ..self.clone() }
    }

    /// Computes the gradient of those samples that are in this part of the order, and the loss behind it.
    pub fn gradient(
        &self,
        parameters: &GpuRead<'_, f32>,
        samples: &Samples,
        range: Range<usize>,
        out: &mut GpuWrite<'_, f32>,
    ) -> Result<()> {
        ensure!(parameters.len() == PARAMETERS && out.len() == GRADIENT, "no room for a gradient");
        ensure!(range.start < range.end && range.end <= samples.count, "no samples {range:?} of {}", samples.count);
        let Samples { pixels, classes, order, .. } = samples;
        let [pixels, classes, order] = [pixels.1, classes.1, order.1];
        let (first, count) = (range.start as u64, range.len() as u64);
        let arguments = [parameters.address(), pixels, classes, order, first, count, out.address()];
        // SAFETY: the kernel reads the parameters and, of the order, the range, which is in it; whatever stands there is the index of a sample.
        // It writes as many values as `out` has. The guards note its end in what they belong to, and `Values` are freed on this stream.
        unsafe { self.launch(&self.gradient, 1, GRADIENT_THREADS, &arguments) }
    }

    /// Takes a gradient out of a slot, and finds the square of its length and its loss.
    pub fn take(&self, slot: &GpuRead<'_, f32>, taken: &Floats, found: &Mapped<f64>) -> Result<()> {
        ensure!(slot.len() == GRADIENT && taken.0.len() == GRADIENT && found.len() == 2, "no room for a gradient");
        let arguments = [slot.address(), taken.1, found.address()];
        // SAFETY: the kernel reads and writes as many values as both have, and finds two. The guard notes its end, `Values` are freed on this
        // stream, and `Mapped` waits for it.
        unsafe { self.launch(&self.take, 1, TAKE_THREADS, &arguments) }
    }

    /// A step from the parameters at one index of `copies` to those at another one.
    pub fn descend(
        &self,
        copies: &mut GpuWrite<'_, f32>,
        (from, to): (usize, usize),
        gradients: &[&Arc<Floats>],
        addresses: &mut Mapped<u64>,
        rate: f32,
        broken: &Mapped<u64>,
    ) -> Result<()> {
        let room = from.max(to) + PARAMETERS <= copies.len() && from.abs_diff(to) >= PARAMETERS;
        ensure!(room && broken.len() == 1, "no room for a step from {from} to {to}");
        for (index, gradient) in gradients.iter().enumerate() {
            ensure!(gradient.0.len() == GRADIENT, "no gradient");
            addresses.set(index, gradient.1)?;
        }
        let at = |index: usize| copies.address() + (index * size_of::<f32>()) as u64;
        let (count, rate) = (gradients.len() as u64, u64::from(rate.to_bits()));
        let arguments = [at(from), at(to), addresses.address(), count, rate, broken.address()];
        let blocks = (PARAMETERS as u32).div_ceil(DESCEND_THREADS);
        // SAFETY: the kernel reads and writes the parameters at both places, which lie in `copies` and apart. It reads as many addresses as there are
        // gradients, and those: each lives until what was given to the stream before its end is done.
        unsafe { self.launch(&self.descend, blocks, DESCEND_THREADS, &arguments) }
    }

    /// # Safety
    ///
    /// The arguments are what the kernel takes, and what they point to lives until it is done.
    unsafe fn launch(&self, function: &CudaFunction, blocks: u32, threads: u32, arguments: &[u64]) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        for argument in arguments {
            launch.arg(argument);
        }
        let shape = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: passed on.
        unsafe { launch.launch(shape) }?;
        Ok(())
    }
}

/// Memory of the GPU for kernels on one stream, and its address: cudarc would look after its uses on several streams, which takes as long
/// as the kernels do. It is freed on that stream, behind what was given to it before.
pub struct Values<T>(CudaSlice<T>, u64);

pub type Floats = Values<f32>;

impl<T> Values<T> {
    fn new(slice: CudaSlice<T>) -> Self {
        let address = slice.device_ptr(slice.stream()).0;
        Self(slice, address)
    }
}

impl Floats {
    pub fn zeros(stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        Ok(Self::new(stream.alloc_zeros(len)?))
    }

    /// Waits for the kernels that were launched before. For checks.
    pub fn read(&self) -> Result<Vec<f32>> {
        let stream = self.0.stream();
        let values = stream.clone_dtoh(&self.0)?;
        stream.synchronize()?;
        Ok(values)
    }
}

/// The data set on the GPU, and an order that its samples are gone through in.
pub struct Samples {
    count: usize,
    pixels: Values<f32>,
    classes: Values<u32>,
    order: Values<u32>,
}

impl Samples {
    pub fn upload(stream: &Arc<CudaStream>, samples: &[Sample]) -> Result<Self> {
        let pixels: Vec<f32> = samples.iter().flat_map(|sample| sample.pixels).collect();
        let classes: Vec<u32> = samples.iter().map(|sample| sample.class as u32).collect();
        debug_assert_eq!(pixels.len(), samples.len() * PIXELS);
        Ok(Self {
            count: samples.len(),
            pixels: Values::new(stream.clone_htod(&pixels)?),
            classes: Values::new(stream.clone_htod(&classes)?),
            order: Values::new(stream.alloc_zeros(samples.len())?),
        })
    }

    /// For the kernels that are launched from here on.
    pub fn set_order(&mut self, order: &[u32]) -> Result<()> {
        let known = order.len() == self.count && order.iter().all(|index| (*index as usize) < self.count);
        ensure!(known, "an order of other samples");
        let stream = self.order.0.stream().clone();
        stream.memcpy_htod(order, &mut self.order.0)?;
        Ok(())
    }
}
