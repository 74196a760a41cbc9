//! The rows: what is compared with what, where, and what is aimed at.

mod shm;

use std::fmt;
use std::time::Duration;

use crate::job::{Exchange, Job, Mode, Pace, Subject};
use crate::ucx::Test;

pub struct Row {
    pub name: String,
    pub link: Link,
    pub exchange: Exchange,
    pub placement: Placement,
    pub ours: Mode,
    pub peer: Option<Peer>,
    pub aim: Option<Aim>,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Link {
    Tcp,
    Unix,
    /// Shared memory; the peers that have none use Unix sockets.
    Shm,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Placement {
    /// Server on one, client on another.
    TwoCores,
    /// Both on the same.
    OneCore,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Peer {
    Subject(Subject),
    Ucx(Test),
    /// That, and a turn of a tokio runtime on top.
    UcxAndYield(Test),
    Iceoryx2,
}

#[derive(Clone, Copy)]
pub enum Aim {
    /// With this much slack for noise on top.
    RatioAtMost(f64, f64),
    RatioAtLeast(f64),
    ValueAtMost(f64),
    ValueAtLeast(f64),
}

const BOTH: [Placement; 2] = [Placement::TwoCores, Placement::OneCore];
const LINKS: [Link; 3] = [Link::Tcp, Link::Unix, Link::Shm];

pub fn rows() -> Vec<Row> {
    let mut rows = Rows(Vec::new());
    beside_sockets(&mut rows);
    shm::beside_shared_memory(&mut rows);
    rows.0
}

struct Rows(Vec<Row>);

impl Rows {
    #[allow(clippy::too_many_arguments)] // a line of a table
    fn add(
        &mut self,
        name: String,
        link: Link,
        exchange: Exchange,
        placements: &[Placement],
        ours: Mode,
        peer: Option<Peer>,
        aim: Option<Aim>,
    ) {
        for &placement in placements {
            self.0.push(Row { name: name.clone(), link, exchange, placement, ours, peer, aim });
        }
    }
}

fn beside_sockets(rows: &mut Rows) {
    let sockets = Some(Peer::Subject(Subject::Sockets));
    for size in [8, 64, 4096] {
        let aim = (size != 64).then_some(Aim::RatioAtMost(1.3, 0.0));
        for link in LINKS {
            let name = format!("send/receive {} {link}", Bytes(size));
            rows.add(name, link, Exchange::RoundTrip { size }, &BOTH, Mode::Adaptive, sockets, aim);
        }
    }
    for chunk in [64 << 10, 1 << 20] {
        for link in LINKS {
            let name = format!("write {} {link}", Bytes(chunk));
            let aim = Some(Aim::RatioAtLeast(0.9));
            rows.add(name, link, Exchange::Write { chunk }, &BOTH, Mode::Adaptive, sockets, aim);
        }
    }
    for size in [8, 4096] {
        for link in LINKS {
            let name = format!("read {} {link}", Bytes(size));
            rows.add(name, link, Exchange::Read { size }, &BOTH, Mode::Adaptive, sockets, None);
        }
        let (name, aim) = (format!("read {} tcp, UCX", Bytes(size)), Some(Aim::RatioAtMost(0.01, 0.0)));
        rows.add(name, Link::Tcp, Exchange::Read { size }, &BOTH, Mode::Adaptive, Some(Peer::Ucx(Test::TCP_GET)), aim);
    }
    let small = Exchange::RoundTrip { size: 64 };
    for link in LINKS {
        let (event, aim) = (Some(Peer::Subject(Subject::Ours(Mode::Event))), Some(Aim::RatioAtMost(1.0, 0.05)));
        let name = format!("adaptive, event 64 B {link}");
        rows.add(name, link, small, &[Placement::OneCore], Mode::Adaptive, event, aim);
        let name = format!("polling 64 B {link}");
        rows.add(name, link, small, &[Placement::TwoCores], Mode::Polling, sockets, None);
    }
    let aim = Some(Aim::ValueAtMost(0.5));
    for link in [Link::Tcp, Link::Shm] {
        rows.add(format!("idle connection {link}"), link, Exchange::Idle, &BOTH, Mode::Adaptive, None, aim);
    }
}

impl Row {
    pub fn unit(&self) -> &'static str {
        match self.exchange {
            Exchange::RoundTrip { .. } => "us, round trip",
            Exchange::OneWay { .. } | Exchange::WriteSeen => "us, one way",
            Exchange::Read { .. } | Exchange::ReadAtOnce { .. } | Exchange::SingleWrite { .. } => "us",
            Exchange::Write { .. } | Exchange::SameWrite { .. } => "MB/s",
            Exchange::Sends { .. } | Exchange::BatchedSends { .. } => "M/s",
            Exchange::Idle => "% of a CPU",
        }
    }

    pub fn peer_name(&self) -> Option<String> {
        Some(match (self.peer?, self.link) {
            (Peer::Ucx(test), _) => test.to_string(),
            (Peer::UcxAndYield(test), _) => format!("{test} + yield_now"),
            (Peer::Iceoryx2, _) => "iceoryx2 pub-sub".to_owned(),
            (Peer::Subject(Subject::EventFd), _) => "eventfd + epoll".to_owned(),
            (Peer::Subject(Subject::Copy), _) => "hot memcpy".to_owned(),
            (Peer::Subject(Subject::Yield), _) => "tokio yield_now".to_owned(),
            (Peer::Subject(Subject::Sockets), Link::Tcp) => "tokio TcpStream".to_owned(),
            (Peer::Subject(Subject::Sockets), Link::Unix | Link::Shm) => "tokio UnixStream".to_owned(),
            (Peer::Subject(Subject::Ours(mode)), _) => format!("ours, {mode:?} mode").to_lowercase(),
        })
    }

    pub fn job(&self, subject: Subject, quick: bool) -> Job {
        Job { subject, exchange: self.exchange, pace: self.pace(quick) }
    }

    pub fn pace(&self, quick: bool) -> Pace {
        let milliseconds = match (self.exchange, quick) {
            (Exchange::Idle, false) => 2000,
            (Exchange::Write { .. } | Exchange::SameWrite { .. }, false) => 350,
            (Exchange::Sends { .. } | Exchange::BatchedSends { .. }, false) => 350,
            (_, false) => 150,
            (_, true) => 20,
        };
        Pace {
            warm_up: Duration::from_millis(if quick { 5 } else { 50 }),
            measured: Duration::from_millis(milliseconds),
            warm_up_bytes: if quick { 4 << 20 } else { 32 << 20 },
        }
    }
}

impl Placement {
    /// The server's and the client's.
    pub fn on(self, cpus: &[usize]) -> Option<(usize, usize)> {
        match (self, cpus) {
            (Self::TwoCores, &[first, second, ..]) => Some((first, second)),
            (Self::OneCore, &[first, ..]) => Some((first, first)),
            _ => None,
        }
    }
}

impl Aim {
    /// `None` where the ratio is unknown.
    pub fn met(self, ours: f64, ratio: Option<f64>) -> Option<bool> {
        match self {
            Self::RatioAtMost(most, slack) => Some(ratio? <= most + slack),
            Self::RatioAtLeast(least) => Some(ratio? >= least),
            Self::ValueAtMost(most) => Some(ours <= most),
            Self::ValueAtLeast(least) => Some(ours >= least),
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RatioAtMost(most, 0.0) => write!(f, "ratio <= {most}"),
            Self::RatioAtMost(most, slack) => write!(f, "ratio <= {most} (+{slack} noise)"),
            Self::RatioAtLeast(least) => write!(f, "ratio >= {least}"),
            Self::ValueAtMost(most) => write!(f, "ours <= {most}"),
            Self::ValueAtLeast(least) => write!(f, "ours >= {least}"),
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Shm => "shm",
        })
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::TwoCores { "2 cores" } else { "1 core" })
    }
}

struct Bytes(usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 20 => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes >= 1 << 10 => write!(f, "{} KiB", bytes >> 10),
            bytes => write!(f, "{bytes} B"),
        }
    }
}
