//! The model: 64 inputs, one hidden layer with ReLU, softmax over 10 classes, and cross entropy as its loss.

use crate::digits::{CLASSES, PIXELS, Sample};

/// Neurons of the hidden layer.
pub const HIDDEN: usize = 64;

/// Weights and biases of both layers, one behind the other. Weights are stored by input: those from one input lie together,
/// so that an input that is 0, as half of the pixels are, is passed over at once.
pub const PARAMETERS: usize = PIXELS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES;

/// Where each part of the parameters lies, and of a gradient.
struct Parts<T> {
    weights1: T,
    biases1: T,
    weights2: T,
    biases2: T,
}

fn parts(all: &[f32; PARAMETERS]) -> Parts<&[f32]> {
    let (weights1, rest) = all.split_at(PIXELS * HIDDEN);
    let (biases1, rest) = rest.split_at(HIDDEN);
    let (weights2, biases2) = rest.split_at(HIDDEN * CLASSES);
    Parts { weights1, biases1, weights2, biases2 }
}

fn parts_mut(all: &mut [f32; PARAMETERS]) -> Parts<&mut [f32]> {
    let (weights1, rest) = all.split_at_mut(PIXELS * HIDDEN);
    let (biases1, rest) = rest.split_at_mut(HIDDEN);
    let (weights2, biases2) = rest.split_at_mut(HIDDEN * CLASSES);
    Parts { weights1, biases1, weights2, biases2 }
}

/// Random weights, as wide as their layers want them (He et al., 2015), and biases of 0.
pub fn initial(seed: u64) -> Box<[f32; PARAMETERS]> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut all = zeroed();
    let Parts { weights1, weights2, .. } = parts_mut(&mut all);
    for (weights, inputs) in [(weights1, PIXELS), (weights2, HIDDEN)] {
        // A uniform distribution over -w..w has the variance w^2 / 3; it is to be 2 / inputs.
        let width = (6.0 / inputs as f32).sqrt();
        weights.iter_mut().for_each(|weight| *weight = (2.0 * random.f32() - 1.0) * width);
    }
    all
}

pub fn zeroed() -> Box<[f32; PARAMETERS]> {
    Box::new([0.0; PARAMETERS])
}

/// Sets `gradient` to the mean gradient of these samples' losses, and returns the mean loss.
pub fn gradient<'a>(
    parameters: &[f32; PARAMETERS],
    samples: impl ExactSizeIterator<Item = &'a Sample>,
    gradient: &mut [f32; PARAMETERS],
) -> f32 {
    gradient.fill(0.0);
    let share = 1.0 / samples.len().max(1) as f32;
    let weights2 = parts(parameters).weights2;
    let to = parts_mut(gradient);
    let mut loss = 0.0;
    for sample in samples {
        let Activations { hidden, mut output } = forward(parameters, sample);
        loss += softmax(&mut output, sample.class);

        // Of softmax and cross entropy together: what was said minus what is true.
        let mut error = output;
        error[sample.class] -= 1.0;
        error.iter_mut().for_each(|it| *it *= share);
        add(to.biases2, 1.0, &error);

        let mut hidden_error = [0.0; HIDDEN];
        for (neuron, activation) in hidden.iter().enumerate().filter(|(_, activation)| **activation > 0.0) {
            let row = neuron * CLASSES..(neuron + 1) * CLASSES;
            add(&mut to.weights2[row.clone()], *activation, &error);
            hidden_error[neuron] = weights2[row].iter().zip(&error).map(|(weight, error)| weight * error).sum();
        }
        add(to.biases1, 1.0, &hidden_error);
        for (pixel, row) in sample.pixels.iter().zip(to.weights1.chunks_exact_mut(HIDDEN)) {
            add(row, *pixel, &hidden_error);
        }
    }
    loss * share
}

/// The share of these samples whose class the model finds.
pub fn accuracy(parameters: &[f32; PARAMETERS], samples: &[Sample]) -> f64 {
    let right = |sample: &&Sample| {
        let output = forward(parameters, sample).output;
        let best = (0..CLASSES).max_by(|a, b| output[*a].total_cmp(&output[*b]));
        best == Some(sample.class)
    };
    samples.iter().filter(right).count() as f64 / samples.len().max(1) as f64
}

struct Activations {
    hidden: [f32; HIDDEN],
    /// Before softmax.
    output: [f32; CLASSES],
}

fn forward(parameters: &[f32; PARAMETERS], sample: &Sample) -> Activations {
    let Parts { weights1, biases1, weights2, biases2 } = parts(parameters);
    let (mut hidden, mut output) = ([0.0; HIDDEN], [0.0; CLASSES]);
    hidden.copy_from_slice(biases1);
    for (pixel, row) in sample.pixels.iter().zip(weights1.chunks_exact(HIDDEN)) {
        add(&mut hidden, *pixel, row);
    }
    hidden.iter_mut().for_each(|it| *it = it.max(0.0));
    output.copy_from_slice(biases2);
    for (activation, row) in hidden.iter().zip(weights2.chunks_exact(CLASSES)) {
        add(&mut output, *activation, row);
    }
    Activations { hidden, output }
}

/// Turns scores into probabilities, and returns the loss if `class` is the truth.
fn softmax(output: &mut [f32; CLASSES], class: usize) -> f32 {
    // Less the largest one, so that no exponential overflows; the quotients stay the same.
    let largest = output.iter().copied().fold(f32::MIN, f32::max);
    let score = output[class] - largest;
    output.iter_mut().for_each(|it| *it = (*it - largest).exp());
    let sum: f32 = output.iter().sum();
    output.iter_mut().for_each(|it| *it /= sum);
    sum.ln() - score
}

/// `to += factor * from`
fn add(to: &mut [f32], factor: f32, from: &[f32]) {
    if factor != 0.0 {
        for (to, from) in to.iter_mut().zip(from) {
            *to += factor * from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digits::Digits;

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let samples = &Digits::load().unwrap().training[..8];
        // No neuron of these is about to be switched on or off, where the loss has no slope.
        let mut parameters = initial(4);
        let mut exact = zeroed();
        gradient(&parameters, samples.iter(), &mut exact);
        let mut unused = zeroed();
        let mut checked = 0;
        // Some of each part.
        for index in (0..PARAMETERS).step_by(61).chain(PARAMETERS - CLASSES..PARAMETERS) {
            // Short, so that few neurons are switched on or off on the way.
            const STEP: f32 = 1e-3;
            let middle = parameters[index];
            let [above, below] = [middle + STEP, middle - STEP].map(|value| {
                parameters[index] = value;
                gradient(&parameters, samples.iter(), &mut unused)
            });
            parameters[index] = middle;
            let slope = (above - below) / (2.0 * STEP);
            // A pixel that no sample has makes no difference.
            checked += usize::from(exact[index].abs() > 5e-3);
            let tolerance = 5e-4 + 0.02 * exact[index].abs();
            assert!((slope - exact[index]).abs() < tolerance, "{index}: {slope} by differences, {}", exact[index]);
        }
        assert!(checked > 30, "{checked} slopes were steep enough to tell");
    }

    #[test]
    fn loss_and_probabilities_stay_finite_for_huge_scores() {
        let mut output = [1e30; CLASSES];
        output[4] = -1e30;
        assert!(softmax(&mut output, 4) > 1e29);
        assert_eq!(output[4], 0.0);
        assert!((output.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }
}
