//! What registering memory costs: pinning its pages and telling the NIC of them.

use std::time::{Duration, Instant};

use anyhow::Result;
use tokio_rdma::Device;

use super::{Figures, Registration, median};

/// From a page to what a large model's layer takes, by factors of 4.
const SIZES: [usize; 9] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
/// Of one size.
const TIME: Duration = Duration::from_millis(200);
const ROUNDS: usize = 51;

/// Each size on this device, until one is refused: the limit of locked memory, say.
pub fn measure(device: &str, deadline: Instant, figures: &mut Figures) {
    let largest = available_memory() / 8;
    for bytes in SIZES {
        let refused = if bytes > largest {
            format!("an eighth of the memory that is free is {largest} bytes")
        } else if Instant::now() > deadline {
            "no time was left".to_owned()
        } else {
            match times(device, bytes) {
                Ok(times) => {
                    let median_us = median(times);
                    figures.registrations.push(Registration { device: device.to_owned(), bytes, median_us });
                    continue;
                }
                Err(error) => format!("{error:#}"),
            }
        };
        figures.left_out.push(format!("registering {bytes} bytes and more on {device}: {refused}"));
        return;
    }
}

/// In microseconds each.
fn times(device: &str, bytes: usize) -> Result<Vec<f64>> {
    let domain = Device::open(device)?.alloc_pd()?;
    let start = Instant::now();
    let mut times = Vec::new();
    // Its pages are there already, as those of a program's data are.
    let mut memory = vec![1u8; bytes];
    while times.is_empty() || (start.elapsed() < TIME && times.len() < ROUNDS) {
        let posted = Instant::now();
        let buffer = domain.register(memory)?;
        times.push(posted.elapsed().as_secs_f64() * 1e6);
        drop(buffer);
        memory = vec![1u8; bytes];
    }
    Ok(times)
}

/// What Linux says it can give without swapping.
fn available_memory() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
    kilobytes.map_or(1 << 30, |kilobytes| kilobytes << 10)
}
