//! Measuring, within a bounded time: what registering memory costs, and what each path carries.
//!
//! Both ends are in this process, so what is measured is the way through the device and the host, not a network.

pub mod picture;
pub mod text;

#[cfg(feature = "cuda")]
mod gpu;
mod path;
mod registration;

use std::time::{Duration, Instant};

use serde::Serialize;
use tokio_rdma::doctor::GpuDirectReport;
use tokio_rdma::{Device, Provider};

/// How long all of it may take.
const BUDGET: Duration = Duration::from_secs(20);

/// What was measured.
#[derive(Default, Serialize)]
pub struct Figures {
    pub registrations: Vec<Registration>,
    pub paths: Vec<Path>,
    /// What could not be measured, and why.
    pub left_out: Vec<String>,
}

/// What it costs to register memory of one size.
#[derive(Serialize)]
pub struct Registration {
    pub device: String,
    pub bytes: usize,
    pub median_us: f64,
}

/// A way from memory to memory.
#[derive(Serialize)]
pub struct Path {
    /// For people.
    pub name: String,
    pub device: String,
    /// `host` or `gpu`.
    pub memory: &'static str,
    /// What carries the bytes: a link, or of a GPU's memory the path.
    pub by: String,
    pub points: Vec<Point>,
}

/// Messages of one size.
#[derive(Serialize)]
pub struct Point {
    pub bytes: usize,
    /// From posting one alone until the receiver may use it, on the GPU where it is the GPU's.
    pub median_us: f64,
    /// With several in flight; 1 MB is 1e6 bytes.
    pub megabytes_per_second: f64,
}

/// Measures what there is. What fails is told in the figures.
pub fn run(report: &GpuDirectReport) -> Figures {
    let mut figures = Figures::default();
    let deadline = Instant::now() + BUDGET;
    // The chain's own NIC comes first, in case that time runs out.
    let chosen: Vec<_> = report.chain.nic.iter().cloned().chain(["soft0".to_owned()]).collect();
    let listed = Device::list().into_iter().filter(|it| it.provider == Provider::Verbs).map(|it| it.name);
    let others: Vec<_> = listed.filter(|name| !chosen.contains(name)).collect();
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Err(error) => figures.left_out.push(format!("everything: no runtime could be started: {error}")),
        Ok(runtime) => runtime.block_on(async {
            on_host(&chosen, deadline, &mut figures).await;
            on_gpu(report, &chosen, deadline, &mut figures).await;
            on_host(&others, deadline, &mut figures).await;
        }),
    }
    figures
}

async fn on_host(devices: &[String], deadline: Instant, figures: &mut Figures) {
    for device in devices {
        registration::measure(device, deadline, figures);
        path::host(device, deadline, figures).await;
    }
}

#[cfg(feature = "cuda")]
async fn on_gpu(report: &GpuDirectReport, devices: &[String], deadline: Instant, figures: &mut Figures) {
    let chosen = report.gpus.iter().find(|gpu| Some(&gpu.name) == report.chain.gpu.as_ref());
    match chosen.and_then(|gpu| gpu.cuda_ordinal) {
        Some(ordinal) => gpu::measure(ordinal, devices, deadline, figures).await,
        None => figures.left_out.push("memory of a GPU: CUDA shows none".to_owned()),
    }
}

#[cfg(not(feature = "cuda"))]
async fn on_gpu(_: &GpuDirectReport, _: &[String], _: Instant, figures: &mut Figures) {
    figures.left_out.push("memory of a GPU: this build has no feature `cuda`".to_owned());
}

/// The middle one.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
