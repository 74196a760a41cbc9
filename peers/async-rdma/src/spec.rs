//! What to measure.

use std::fmt;
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    SendLat,
    SendRawLat,
    WriteLat,
    ReadLat,
    WriteBw,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SendLat => "send_lat",
            Self::SendRawLat => "send_raw_lat",
            Self::WriteLat => "write_lat",
            Self::ReadLat => "read_lat",
            Self::WriteBw => "write_bw",
        })
    }
}

impl FromStr for Op {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::SendLat, Self::SendRawLat, Self::WriteLat, Self::ReadLat, Self::WriteBw];
        all.into_iter().find(|op| op.to_string() == text).ok_or_else(|| format!("{text:?} is no operation"))
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub op: Op,
    pub size: usize,
    pub inflight: usize,
    pub iterations: usize,
}

impl Spec {
    /// Rounds before what counts.
    pub fn warm_up(&self) -> usize {
        (self.iterations / 10).max(50)
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{}", self.op, self.size, self.inflight, self.iterations)
    }
}

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let [op, size, inflight, iterations] = text.split(':').collect::<Vec<_>>()[..] else {
            return Err("expected operation:size:inflight:iterations".to_owned());
        };
        let number = |text: &str| match text.parse() {
            Ok(number @ 1..) => Ok(number),
            _ => Err(format!("{text:?} is no positive number")),
        };
        let (size, inflight, iterations) = (number(size)?, number(inflight)?, number(iterations)?);
        Ok(Self { op: op.parse()?, size, inflight, iterations })
    }
}
