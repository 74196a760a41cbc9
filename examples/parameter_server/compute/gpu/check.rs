//! That the kernels compute what the CPU does, for whichever driver is there. On the stand-in of the tests that tries the way to the kernels
//! and back; on a GPU it tries the kernels.

use std::time::Instant;

use anyhow::{Result, ensure};
use tokio_rdma::Device;
use tokio_rdma::gpu::GpuBuffer;

use super::Gpu;
use super::keeper::GpuKeeper;
use super::worker::GpuWorker;
use crate::compute::{Compute, Copies, Keeper, Slot, Taken};
use crate::digits::{Batch, Batches, Digits};
use crate::model::{self, PARAMETERS};

/// The most that a value may differ by. The largest ones of a gradient are about 1, and sums of a batch are rounded in other places.
const TOLERANCE: f32 = 1e-5;

/// Rounds that are timed.
const ROUNDS: u32 = 500;

/// Checks the kernels, prints what was seen, and how long a round takes from the launch to the end that the host sees.
pub async fn check_kernels(device: &Device, gpu: Gpu) -> Result<()> {
    let domain = device.alloc_pd()?;
    let digits = Digits::load()?;
    let (mut worker, keeper) = (GpuWorker::new(&gpu)?, GpuKeeper::new(gpu));
    let (mut parameters, mut gradient) = worker.alloc(&domain)?;
    let mut worst = 0.0f32;
    for (seed, samples) in [(1, 1), (2, 16), (3, 31), (4, 32), (5, 33), (6, 500), (7, 1024)] {
        let initial = model::initial(seed);
        put(&worker, &mut parameters, &initial[..])?;
        let mut batches = Batches::new(digits.training.len(), samples, seed);
        // The last one of an epoch has fewer samples.
        for ticket in [0, 1, batches.per_epoch() - 1] {
            let batch = batches.of(ticket);
            worker.begin(&parameters, &batch, &mut gradient)?;
            let found = get(&worker, &gradient)?;
            let expected = on_cpu(&initial, &digits, &batch);
            worst = worst.max(farthest(&found, &expected));
            ensure!(worst <= TOLERANCE, "batch {ticket} of {samples} samples: it is off by {worst}");
            put(&worker, &mut gradient, &vec![f32::NAN; found.len()])?;
            worker.begin(&parameters, &batch, &mut gradient)?;
            ensure!(
                get(&worker, &gradient)? == found,
                "batch {ticket} of {samples} samples: it differs when computed again"
            );
        }
    }
    println!("gradient: off by {worst:.1e} at most, and the same each time");

    let mut slot = keeper.slot(&domain)?;
    let first = slot_with(&worker, &mut slot, &get(&worker, &gradient)?).await?;
    let second = slot_with(&worker, &mut slot, &vec![0.5; PARAMETERS + 1]).await?;
    ensure!((second.norm - (PARAMETERS as f64 * 0.25).sqrt()).abs() < 1e-6 && second.loss == 0.5, "a wrong length");
    let bad = slot_with(&worker, &mut slot, &[&[f32::NAN][..], &vec![0.0; PARAMETERS]].concat()).await?;
    ensure!(bad.norm.is_nan() && bad.loss == 0.0, "a gradient that is no number has the length {}", bad.norm);
    println!("take: lengths, losses and NaN are found");

    let initial = model::initial(9);
    let mut copies = keeper.copies(&domain, 6, &initial)?;
    ensure!(copies.descend(7, &[&first.gradient, &second.gradient], 0.25).await?, "the step ends nowhere");
    let (one, other) = (first.gradient.read()?, second.gradient.read()?);
    let expected: Vec<f32> =
        initial.iter().zip(one.iter().zip(&other)).map(|(it, (one, other))| it - 0.25 * one - 0.25 * other).collect();
    let off = farthest(&copies.parameters(7)?[..], &expected);
    ensure!(off <= TOLERANCE && copies.parameters(6)? == initial, "a step is off by {off}");
    // More than there is room for at first, and than a block of the kernel has threads.
    ensure!(copies.descend(8, &[&second.gradient; 130], 1.0 / 1024.0).await?, "a long step ends nowhere");
    let long: Vec<f32> = copies.parameters(7)?.iter().map(|it| it - 130.0 * 0.5 / 1024.0).collect();
    ensure!(farthest(&copies.parameters(8)?[..], &long) <= TOLERANCE, "a step with 130 gradients is wrong");
    ensure!(!copies.descend(9, &[&bad.gradient], 0.25).await?, "parameters that are not finite were not noticed");
    println!("descend: off by {off:.1e} at most; what is not finite is noticed");

    time(&mut worker, &parameters, &mut gradient, &mut slot, &mut copies).await
}

async fn time(
    worker: &mut GpuWorker,
    parameters: &GpuBuffer,
    gradient: &mut GpuBuffer,
    slot: &mut <GpuKeeper as Keeper>::Slot,
    copies: &mut <GpuKeeper as Keeper>::Copies,
) -> Result<()> {
    let shown = |what, started: Instant| {
        println!("{what}: {:.1} us", started.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS));
    };
    let mut batches = Batches::new(1438, 32, 1);
    let started = Instant::now();
    for _ in 0..ROUNDS {
        worker.begin(parameters, &batches.of(3), gradient)?;
        gradient.idle().await?;
    }
    shown("gradient of 32 samples", started);
    let zeros = slot_with(worker, slot, &[0.0; PARAMETERS + 1]).await?;
    let started = Instant::now();
    for _ in 0..ROUNDS {
        slot.take().await?;
    }
    shown("take", started);
    let started = Instant::now();
    for version in 0..u64::from(ROUNDS) {
        copies.descend(11 + version, &[&zeros.gradient; 4], 0.25).await?;
    }
    shown("descend with 4 gradients", started);
    Ok(())
}

/// As if a worker had written it.
async fn slot_with(
    worker: &GpuWorker,
    slot: &mut <GpuKeeper as Keeper>::Slot,
    values: &[f32],
) -> Result<Taken<<GpuKeeper as Keeper>::Gradient>> {
    let stream = &worker.gpu().stream;
    stream.memcpy_htod(values, &mut slot.memory.write_on::<f32>(stream)?)?;
    let taken = slot.take().await?;
    let same = taken.gradient.read()?.iter().zip(values).all(|(one, other)| one.to_bits() == other.to_bits());
    ensure!(same, "what was taken is not what was there");
    Ok(taken)
}

fn put(worker: &GpuWorker, buffer: &mut GpuBuffer, values: &[f32]) -> Result<()> {
    let stream = &worker.gpu().stream;
    stream.memcpy_htod(values, &mut buffer.write_on::<f32>(stream)?)?;
    Ok(())
}

fn get(worker: &GpuWorker, buffer: &GpuBuffer) -> Result<Vec<f32>> {
    let stream = &worker.gpu().stream;
    let values = stream.clone_dtoh(&buffer.read_on::<f32>(stream)?)?;
    stream.synchronize()?;
    Ok(values)
}

/// The gradient and the loss.
fn on_cpu(parameters: &[f32; PARAMETERS], digits: &Digits, batch: &Batch<'_>) -> Vec<f32> {
    let mut gradient = model::zeroed();
    let samples = batch.indices().map(|index| &digits.training[index]);
    let loss = model::gradient(parameters, samples, &mut gradient);
    [&gradient[..], &[loss]].concat()
}

/// The largest difference; infinite if there is one that is no number.
fn farthest(found: &[f32], expected: &[f32]) -> f32 {
    let differences = found.iter().zip(expected).map(|(found, expected)| (found - expected).abs());
    let worst = differences.fold(0.0, |worst: f32, it| if it.is_nan() { f32::INFINITY } else { worst.max(it) });
    if found.len() == expected.len() { worst } else { f32::INFINITY }
}
