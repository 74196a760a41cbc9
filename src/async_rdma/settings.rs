//! What a peer may cost.

use std::time::Duration;

/// See the methods of [`PeerBuilder`](super::PeerBuilder), which say why.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub max_message: usize,
    pub budget: u64,
    pub longest_lease: Duration,
    pub backlog: usize,
    pub answer_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_message: 512,
            budget: 0,
            longest_lease: Duration::from_secs(3600),
            backlog: 256,
            answer_timeout: Duration::from_secs(5),
        }
    }
}
