//! The kernels of the parameter server (`examples/parameter_server/compute/gpu/kernels/kernels.cu`), for the CPU.

use super::memory::{self, Range};
use super::{Code, Result};

const PIXELS: usize = 64;
const HIDDEN: usize = 64;
const CLASSES: usize = 10;

/// Where each part of the parameters lies, and of a gradient. Behind a gradient stands its loss.
const BIASES1: usize = PIXELS * HIDDEN;
const WEIGHTS2: usize = BIASES1 + HIDDEN;
const BIASES2: usize = WEIGHTS2 + HIDDEN * CLASSES;
const PARAMETERS: usize = BIASES2 + CLASSES;

#[derive(Clone, Copy)]
pub(super) enum Kernel {
    Gradient,
    Take,
    Descend,
}

pub(super) enum Launch {
    Gradient { parameters: Range, pixels: u64, classes: u64, order: Range, count: usize, out: Range },
    Take { slot: Range, taken: Range, found: Range },
    Descend { from: Range, to: Range, gradients: Range, count: usize, rate: f32, broken: Range },
}

impl Kernel {
    pub(super) fn of_name(name: &str) -> Option<Self> {
        Some(match name {
            "gradient" => Self::Gradient,
            "take" => Self::Take,
            "descend" => Self::Descend,
            _ => return None,
        })
    }

    /// Reads the arguments, as the kernel declares them.
    pub(super) fn prepare(self, argument: impl Fn(usize) -> Result<u64>) -> Result<Launch> {
        let floats = |index, count: usize| Ok(memory::range(argument(index)?, count * size_of::<f32>()));
        Ok(match self {
            Self::Gradient => {
                let (first, count) = (argument(4)?, argument(5)? as usize);
                let order = argument(3)? + first * size_of::<u32>() as u64;
                Launch::Gradient {
                    parameters: floats(0, PARAMETERS)?,
                    pixels: argument(1)?,
                    classes: argument(2)?,
                    order: memory::range(order, count * size_of::<u32>()),
                    count,
                    out: floats(6, PARAMETERS + 1)?,
                }
            }
            Self::Take => Launch::Take {
                slot: floats(0, PARAMETERS + 1)?,
                taken: floats(1, PARAMETERS + 1)?,
                found: memory::range(argument(2)?, 2 * size_of::<f64>()),
            },
            Self::Descend => {
                let count = argument(3)? as usize;
                Launch::Descend {
                    from: floats(0, PARAMETERS)?,
                    to: floats(1, PARAMETERS)?,
                    gradients: memory::range(argument(2)?, count * size_of::<u64>()),
                    count,
                    rate: f32::from_bits(argument(4)? as u32),
                    broken: memory::range(argument(5)?, size_of::<u64>()),
                }
            }
        })
    }
}

impl Launch {
    pub(super) fn run(&self) -> Result {
        match *self {
            Self::Gradient { parameters, pixels, classes, order, count, out } => {
                let parameters: Vec<f32> = read(parameters, PARAMETERS)?;
                let order: Vec<u32> = read(order, count)?;
                let mut gradient = vec![0.0; PARAMETERS + 1];
                for sample in order {
                    let at = pixels + u64::from(sample) * (PIXELS * size_of::<f32>()) as u64;
                    let pixels: Vec<f32> = read(memory::range(at, PIXELS * size_of::<f32>()), PIXELS)?;
                    let at = classes + u64::from(sample) * size_of::<u32>() as u64;
                    let class: Vec<u32> = read(memory::range(at, size_of::<u32>()), 1)?;
                    add_sample(&mut gradient, &parameters, &pixels, class[0] as usize, 1.0 / count as f32);
                }
                write(out, &gradient)
            }
            Self::Take { slot, taken, found } => {
                let values: Vec<f32> = read(slot, PARAMETERS + 1)?;
                write(taken, &values)?;
                let square: f64 = values[..PARAMETERS].iter().map(|value| f64::from(*value).powi(2)).sum();
                write(found, &[square, f64::from(values[PARAMETERS])])
            }
            Self::Descend { from, to, gradients, count, rate, broken } => {
                let mut parameters: Vec<f32> = read(from, PARAMETERS)?;
                for address in read::<u64>(gradients, count)? {
                    let gradient: Vec<f32> = read(memory::range(address, PARAMETERS * size_of::<f32>()), PARAMETERS)?;
                    parameters.iter_mut().zip(&gradient).for_each(|(parameter, slope)| *parameter -= rate * slope);
                }
                write(to, &parameters)?;
                if parameters.iter().all(|parameter| parameter.is_finite()) { Ok(()) } else { write(broken, &[1u64]) }
            }
        }
    }
}

/// Adds a sample's share of the gradient and of the loss.
fn add_sample(gradient: &mut [f32], parameters: &[f32], pixels: &[f32], class: usize, share: f32) {
    let mut hidden: Vec<f32> = parameters[BIASES1..WEIGHTS2].to_vec();
    for (pixel, weights) in pixels.iter().zip(parameters[..BIASES1].chunks_exact(HIDDEN)) {
        hidden.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += pixel * weight);
    }
    hidden.iter_mut().for_each(|sum| *sum = sum.max(0.0));
    let weight2 = |neuron: usize, output: usize| parameters[WEIGHTS2 + neuron * CLASSES + output];
    let score = |output: usize| -> f32 {
        parameters[BIASES2 + output] + (0..HIDDEN).map(|neuron| hidden[neuron] * weight2(neuron, output)).sum::<f32>()
    };
    let scores: Vec<f32> = (0..CLASSES).map(score).collect();
    let largest = scores.iter().copied().fold(f32::MIN, f32::max);
    let powers: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f32 = powers.iter().sum();
    gradient[PARAMETERS] += share * (sum.ln() - (scores[class] - largest));
    let mut back = [0.0; HIDDEN];
    for output in 0..CLASSES {
        let error = share * (powers[output] / sum - f32::from(output == class));
        gradient[BIASES2 + output] += error;
        for neuron in (0..HIDDEN).filter(|neuron| hidden[*neuron] > 0.0) {
            gradient[WEIGHTS2 + neuron * CLASSES + output] += hidden[neuron] * error;
            back[neuron] += weight2(neuron, output) * error;
        }
    }
    gradient[BIASES1..WEIGHTS2].iter_mut().zip(&back).for_each(|(sum, back)| *sum += back);
    for (pixel, row) in pixels.iter().zip(gradient[..BIASES1].chunks_exact_mut(HIDDEN)) {
        row.iter_mut().zip(&back).for_each(|(sum, back)| *sum += pixel * back);
    }
}

/// The values that a range has when this is called.
fn read<T: Copy>(range: Range, count: usize) -> Result<Vec<T>> {
    memory::with([range], |[start]| {
        let start: *mut T = start.cast();
        if !start.is_aligned() {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        // SAFETY: `with` gives `count` values that are alive as long as the closure runs, aligned; all bits are values of numbers. The host may
        // write them at the same time, as it may on a GPU.
        Ok((0..count).map(|index| unsafe { start.add(index).read_volatile() }).collect())
    })
}

fn write<T: Copy>(range: Range, values: &[T]) -> Result {
    memory::with([range], |[start]| {
        let start: *mut T = start.cast();
        if !start.is_aligned() {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        for (index, value) in values.iter().enumerate() {
            // SAFETY: as in `read`; the caller's range has as many values.
            unsafe { start.add(index).write_volatile(*value) };
        }
        Ok(())
    })
}
