//! What takes one process: the limits of what two can reach.

use std::hint::black_box;

use anyhow::{Result, bail};
use tokio::task::yield_now;

use crate::job::{Exchange, Found, Job, Pace};
use crate::measure::Laps;

/// Yields too short to be timed alone.
const YIELDS: u32 = 16;

/// Memory of the library's starts with a page. Two buffers that start at nearly the same place of one can take ten times as long.
const PAGE: usize = 4096;

/// Copies between the same two buffers.
pub fn copies(job: &Job) -> Result<Found> {
    let Exchange::SingleWrite { size } = job.exchange else { bail!("{:?} is no copy", job.exchange) };
    let (mut from, mut to) = (vec![1_u8; size + PAGE], vec![2_u8; size + PAGE]);
    let (from, to) = (aligned(&mut from, size), aligned(&mut to, size));
    let mut laps = Laps::start(&job.pace)?;
    loop {
        black_box(&mut *to).copy_from_slice(black_box(from));
        if !laps.lap()? {
            return laps.found();
        }
    }
}

pub async fn yields(pace: &Pace) -> Result<Found> {
    let mut laps = Laps::start(pace)?.of(YIELDS);
    loop {
        for _ in 0..YIELDS {
            yield_now().await;
        }
        if !laps.lap()? {
            return laps.found();
        }
    }
}

fn aligned(memory: &mut [u8], size: usize) -> &mut [u8] {
    let start = memory.as_ptr().align_offset(PAGE);
    &mut memory[start..start + size]
}
