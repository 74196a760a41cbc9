//! Its tests: what to call them with, and what to read of their results.

use std::fmt;

use anyhow::{Result, bail};

use crate::job::{Exchange, Pace};

#[derive(Clone, Copy, PartialEq)]
pub struct Test {
    transport: Transport,
    kind: Kind,
    sleeping: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Transport {
    Tcp,
    /// Shared memory.
    Posix,
    /// That, and `process_vm_readv` for long messages.
    PosixCma,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    AmLat,
    AmBw,
    TagLat,
    PutLat,
    PutBw,
    Get,
}

impl Test {
    pub const TCP_GET: Self = Self::polling(Transport::Tcp, Kind::Get);
    pub const POSIX_AM_LAT: Self = Self::polling(Transport::Posix, Kind::AmLat);
    pub const POSIX_AM_LAT_SLEEPING: Self = Self { sleeping: true, ..Self::POSIX_AM_LAT };
    pub const POSIX_AM_BW: Self = Self::polling(Transport::Posix, Kind::AmBw);
    pub const POSIX_CMA_TAG_LAT: Self = Self::polling(Transport::PosixCma, Kind::TagLat);
    pub const POSIX_PUT_LAT: Self = Self::polling(Transport::Posix, Kind::PutLat);
    pub const POSIX_PUT_BW: Self = Self::polling(Transport::Posix, Kind::PutBw);
    pub const POSIX_GET: Self = Self::polling(Transport::Posix, Kind::Get);

    const fn polling(transport: Transport, kind: Kind) -> Self {
        Self { transport, kind, sleeping: false }
    }

    /// The transport under test and nothing beside it; the variables must be UCX's own names.
    pub(super) fn environment(&self) -> impl Iterator<Item = &'static str> {
        let transport: &[_] = match self.transport {
            Transport::Tcp => &["UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo"],
            Transport::Posix => &["UCX_TLS=posix,self"],
            Transport::PosixCma => &["UCX_TLS=posix,cma,self"],
        };
        transport.iter().chain(&["UCX_WARN_UNUSED_ENV_VARS=n"]).copied()
    }

    /// As many operations as take about the time.
    pub(super) fn arguments(&self, exchange: &Exchange, pace: &Pace) -> Result<String> {
        let size = match *exchange {
            Exchange::OneWay { size }
            | Exchange::Sends { size }
            | Exchange::BatchedSends { size }
            | Exchange::Read { size }
            | Exchange::ReadAtOnce { size }
            | Exchange::SameWrite { chunk: size } => size,
            Exchange::WriteSeen => size_of::<u64>(),
            other => bail!("UCX is not measured with {other:?}"),
        };
        let duration = self.nanoseconds(size);
        let [count, warm_up] = [pace.measured, pace.warm_up].map(|time| (time.as_nanos() / duration).max(1));
        let wait = if self.sleeping { "sleep" } else { "poll" };
        Ok(format!("-t {} -s {size} -n {count} -w {warm_up} -E {wait}", self.name()))
    }

    /// What an operation takes, or twice or thrice that: where others have work too it takes a hundred times as long, and all of them
    /// together shall still end.
    fn nanoseconds(&self, size: usize) -> u128 {
        let copied = size as u128 / 10;
        match (self.transport, self.kind) {
            // It is 1 to 3 ms at any size.
            (Transport::Tcp, _) => 2_000_000,
            _ if self.sleeping => 40_000,
            (_, Kind::AmLat | Kind::TagLat | Kind::PutLat) => 1_000 + copied,
            (_, Kind::AmBw | Kind::PutBw) => 300 + copied,
            (_, Kind::Get) => 100 + copied,
        }
    }

    /// The column of its CSV. A median is in microseconds, one way where messages go both ways.
    pub(super) fn column(&self) -> &'static str {
        if self.is_rate() { "overall_mr" } else { "50.0_percentile_lat" }
    }

    /// By what its value is to be multiplied. Its own MB are of 2^20 bytes, so those are made from operations a second.
    pub(super) fn unit(&self, exchange: &Exchange) -> Result<f64> {
        match *exchange {
            _ if !self.is_rate() => Ok(1.0),
            Exchange::SameWrite { chunk } => Ok(chunk as f64 / 1e6),
            Exchange::Sends { .. } | Exchange::BatchedSends { .. } => Ok(1e-6),
            other => bail!("{other:?} is no rate"),
        }
    }

    fn is_rate(&self) -> bool {
        matches!(self.kind, Kind::AmBw | Kind::PutBw)
    }

    fn name(&self) -> &'static str {
        match self.kind {
            Kind::AmLat => "ucp_am_lat",
            Kind::AmBw => "ucp_am_bw",
            Kind::TagLat => "tag_lat",
            Kind::PutLat => "ucp_put_lat",
            Kind::PutBw => "ucp_put_bw",
            Kind::Get => "ucp_get",
        }
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transport = match self.transport {
            Transport::Tcp => "tcp",
            Transport::Posix => "posix",
            Transport::PosixCma => "posix+cma",
        };
        write!(f, "UCX {transport} {}{}", self.name(), if self.sleeping { ", sleeping" } else { "" })
    }
}
