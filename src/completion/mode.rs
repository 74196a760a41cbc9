//! How completions are waited for.

use std::time::Duration;

/// How a completion queue's driver waits. Chosen per device, for all of its completion queues.
///
/// Waking a thread on another CPU costs 20 to 40 us on virtual machines (1 to 2 us when both share a CPU), looking costs
/// well under 1 us: short waits are worth looking for, long ones are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompletionMode {
    /// Sleep on the completion channel whenever nothing is there. Least CPU, highest latency.
    Event,
    /// Look, letting other tasks and other processes run in between, until nothing came for `spin`; then sleep. The default.
    /// Where other programs keep the CPU busy it sleeps at once: the scheduler prefers who is woken to who has been looking.
    Adaptive {
        /// How long to look after the last completion.
        spin: Duration,
    },
    /// Never sleep: a task that looks, and yields to the other tasks of its runtime and to other processes in between.
    /// Uses a whole CPU from the first connection until the device is closed.
    Polling,
    /// Never sleep: a thread of its own that looks, pinned to `cpu` when given. Uses that whole CPU
    /// from the first connection until the device is closed.
    PollingThread {
        /// The CPU's number, as in `/sys/devices/system/cpu`.
        cpu: Option<usize>,
    },
}

impl CompletionMode {
    /// Twice the cost of a wake-up on another CPU: by then spinning has lost, and by less than sleeping would have.
    pub const DEFAULT_SPIN: Duration = Duration::from_micros(50);
}

impl Default for CompletionMode {
    fn default() -> Self {
        Self::Adaptive { spin: Self::DEFAULT_SPIN }
    }
}
