//! The handwritten digits: what is trained on, what is held out, and which samples a ticket stands for.

use std::ops::Range;

use anyhow::{Context, Result, ensure};

/// Pixels of a picture, 8 x 8.
pub const PIXELS: usize = 64;

/// What a picture can show.
pub const CLASSES: usize = 10;

/// One row for each picture: its pixels, 0 to 16 each, and then its class. See the README beside it.
const ROWS: &[u8] = include_bytes!("data/digits.bin");

/// The darkest pixel.
const DARKEST: u8 = 16;

/// Chooses what is held out, the same for every run and every process.
const HELD_OUT_SEED: u64 = 20;

/// One picture in this many is held out.
const HELD_OUT: usize = 5;

/// A picture and what it shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// 0 to 1 each.
    pub pixels: [f32; PIXELS],
    pub class: usize,
}

/// All pictures, in two parts without a picture in common.
pub struct Digits {
    pub training: Vec<Sample>,
    pub held_out: Vec<Sample>,
}

impl Digits {
    pub fn load() -> Result<Self> {
        let mut samples = parse(ROWS)?;
        fastrand::Rng::with_seed(HELD_OUT_SEED).shuffle(&mut samples);
        let held_out = samples.split_off(samples.len() - samples.len() / HELD_OUT);
        Ok(Self { training: samples, held_out })
    }
}

fn parse(rows: &[u8]) -> Result<Vec<Sample>> {
    let rows = rows.chunks_exact(PIXELS + 1);
    let rest = rows.remainder().len();
    ensure!(rest == 0, "read the digits: {rest} bytes are left over; a row has {}", PIXELS + 1);
    let sample = |(index, row): (usize, &[u8])| {
        let (pixels, class) = row.split_first_chunk::<PIXELS>().context("a short row")?;
        let class = class[0];
        let darkest = pixels.iter().max().copied().unwrap_or(0);
        ensure!(darkest <= DARKEST, "read the digits: row {index} has a pixel of {darkest}, the limit is {DARKEST}");
        ensure!(usize::from(class) < CLASSES, "read the digits: row {index} has class {class}, the limit is 9");
        Ok(Sample { pixels: pixels.map(|pixel| f32::from(pixel) / f32::from(DARKEST)), class: usize::from(class) })
    };
    rows.enumerate().map(sample).collect()
}

/// Which samples a ticket stands for. Tickets count batches from the start of the training; each epoch goes once through all
/// samples, in an order of its own. Every process comes to the same answer, so that a ticket is all that has to be sent.
pub struct Batches {
    samples: usize,
    batch: usize,
    seed: u64,
    /// The epoch that was asked for last, and its order.
    order: Option<(u64, Vec<u32>)>,
}

/// A ticket's samples.
#[derive(Clone, Debug)]
pub struct Batch<'a> {
    /// Seed and epoch. Whatever has the same ones has the same order.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub epoch: (u64, u64),
    /// Indices of all samples, as the epoch goes through them.
    pub order: &'a [u32],
    /// Which of them.
    pub range: Range<usize>,
}

impl Batch<'_> {
    pub fn indices(&self) -> impl ExactSizeIterator<Item = usize> {
        self.order[self.range.clone()].iter().map(|index| *index as usize)
    }
}

impl Batches {
    /// `samples` and `batch` are at least 1.
    pub fn new(samples: usize, batch: usize, seed: u64) -> Self {
        Self { samples, batch: batch.clamp(1, samples), seed, order: None }
    }

    pub fn per_epoch(&self) -> u64 {
        self.samples.div_ceil(self.batch) as u64
    }

    /// A ticket's samples; the last ticket of an epoch may have fewer.
    pub fn of(&mut self, ticket: u64) -> Batch<'_> {
        let (epoch, index) = (ticket / self.per_epoch(), ticket % self.per_epoch());
        let known = self.order.take().filter(|(known, _)| *known == epoch);
        let (_, order) = self.order.insert(known.unwrap_or_else(|| {
            let mut order: Vec<u32> = (0..self.samples as u32).collect();
            // The seeds of epochs lie far apart, also for seeds of runs that follow each other.
            let seed = self.seed ^ epoch.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            fastrand::Rng::with_seed(seed).shuffle(&mut order);
            (epoch, order)
        }));
        let start = index as usize * self.batch;
        Batch { epoch: (self.seed, epoch), order, range: start..self.samples.min(start + self.batch) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_whole_and_have_every_class() {
        let digits = Digits::load().unwrap();
        assert_eq!((digits.training.len(), digits.held_out.len()), (1438, 359));
        for part in [&digits.training, &digits.held_out] {
            for class in 0..CLASSES {
                let count = part.iter().filter(|sample| sample.class == class).count();
                assert!(count * CLASSES * 2 > part.len(), "{count} of {} show {class}", part.len());
            }
        }
    }

    #[test]
    fn damaged_rows_are_refused() {
        assert!(parse(&ROWS[..100]).unwrap_err().to_string().contains("left over"));
        for (at, value, words) in [(3, 17, "pixel of 17"), (64, 10, "class 10")] {
            let mut row = ROWS[..65].to_vec();
            row[at] = value;
            assert!(parse(&row).unwrap_err().to_string().contains(words));
        }
    }

    #[test]
    fn an_epoch_takes_every_sample_once_in_an_order_of_its_own() {
        let mut batches = Batches::new(100, 32, 7);
        assert_eq!(batches.per_epoch(), 4);
        let mut epoch = |number: u64| -> Vec<usize> {
            (number * 4..number * 4 + 4).flat_map(|ticket| batches.of(ticket).indices().collect::<Vec<_>>()).collect()
        };
        let (first, second) = (epoch(0), epoch(1));
        assert_ne!(first, second);
        // Whatever a server says is a ticket.
        assert!(Batches::new(1, 1, 7).of(u64::MAX).indices().eq([0]));
        for mut order in [first, second] {
            order.sort_unstable();
            assert!(order.into_iter().eq(0..100));
        }
    }
}
