//! What to measure.

use std::str::FromStr;

#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub iterations: usize,
}

impl Spec {
    pub const OPERATION: &'static str = "pubsub_lat";
    /// A message is a number.
    pub const SIZE: usize = size_of::<u64>();
    pub const IN_FLIGHT: usize = 1;

    /// Rounds before what counts.
    pub fn warm_up(&self) -> usize {
        (self.iterations / 10).max(50)
    }
}

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = format!("{}:{}:{}:", Self::OPERATION, Self::SIZE, Self::IN_FLIGHT);
        match text.strip_prefix(&known).map(str::parse) {
            Some(Ok(iterations @ 1..)) => Ok(Self { iterations }),
            _ => Err(format!("{text:?} is not {known}COUNT, with a positive COUNT")),
        }
    }
}
