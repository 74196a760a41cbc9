//! Who is measured in the guest, and the shell that runs a server and a client there.

use std::fmt;

/// The device of both ends, and its address.
const DEVICE: &str = "rxe0";
const ADDRESS: &str = "10.1.1.1";

/// What the job begins with. `pair` runs a server until it listens, then a client; `alone` a single program. Each prints
/// what the measuring program had to say between two lines that [`results`](super::results) looks for.
pub const SHELL: &str = r#"
listens() { # READY or a TCP port in hexadecimal
  case $1 in
    READY) grep -q READY /tmp/server ;;
    *) grep -q ":$1 .* 0A " /proc/net/tcp /proc/net/tcp6 ;;
  esac
}
pair() { # LABEL, what listens() wants, SERVER, CLIENT
  timeout 60 $3 > /tmp/server 2>&1 & server=$!
  tries=0
  until listens $2 || [ $tries = 2000 ]; do tries=$((tries + 1)); usleep 10000; done
  timeout 60 $4 > /tmp/client 2>&1; status=$?
  kill $server 2> /dev/null; wait $server 2> /dev/null
  echo; echo "guest: case $1"; cat /tmp/client; [ $status = 0 ] || tail -n 3 /tmp/server; echo "guest: status $status"
}
alone() { # LABEL, PROGRAM
  timeout 60 $2 > /tmp/client 2>&1; status=$?
  echo; echo "guest: case $1"; cat /tmp/client; echo "guest: status $status"
}
"#;

/// `op:size:in_flight:count`, as the programs take it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    pub op: &'static str,
    pub size: u32,
    pub in_flight: u32,
    pub count: u32,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{}", self.op, self.size, self.in_flight, self.count)
    }
}

/// One way to run a spec.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Contender {
    /// The library, with these settings of `benches/verbs`.
    Ours(&'static str),
    /// `peers/c/verbs.c`, with these settings.
    C(&'static str),
    /// perftest's program, with these options.
    Perftest(&'static str),
    AsyncRdma,
}

/// perftest's programs that the guest needs.
pub const PERFTEST: [&str; 4] = ["ib_send_lat", "ib_write_lat", "ib_read_lat", "ib_write_bw"];

impl Contender {
    /// A line of the job: server and client in two processes.
    pub fn pair(self, label: &str, spec: &Spec, port: u16) -> String {
        match self {
            Self::Perftest(options) => {
                let tool = Self::tool(spec);
                let depth = if tool == "ib_write_bw" { format!(" -t {}", spec.in_flight) } else { String::new() };
                let (size, count) = (spec.size, spec.count);
                // -F: a processor whose frequency varies is a warning only. -x 1: the RoCE v2 address over IPv4.
                let command =
                    format!("{tool} -d {DEVICE} -x 1 -m 1024 -F -p {port} -s {size} -n {count}{depth} {options}");
                format!("pair '{label}' {port:04X} '{command}' '{command} 127.0.0.1'\n")
            }
            Self::AsyncRdma | Self::C(_) => {
                let program = self.program();
                format!(
                    "pair '{label}' {port:04X} '{program} server 127.0.0.1:{port} {spec}' '{program} client 127.0.0.1:{port} {spec}'\n"
                )
            }
            Self::Ours(_) => {
                let program = self.program();
                format!(
                    "pair '{label}' READY '{program} server {ADDRESS}:{port} {spec}' '{program} client {ADDRESS}:{port} {spec}'\n"
                )
            }
        }
    }

    /// perftest's program for a spec.
    pub fn tool(spec: &Spec) -> &'static str {
        match spec.op {
            "send_lat" => "ib_send_lat",
            "read_lat" => "ib_read_lat",
            "write_bw" => "ib_write_bw",
            _ => "ib_write_lat",
        }
    }

    /// A line of the job: both ends in one process, for ours and the C loop.
    pub fn alone(self, label: &str, spec: &Spec, port: u16) -> String {
        format!("alone '{label}' '{} local {ADDRESS}:{port} {spec}'\n", self.program())
    }

    fn program(self) -> String {
        let (name, settings) = match self {
            Self::Ours(settings) => ("ours", settings),
            Self::C(settings) => ("c-loop", settings),
            Self::AsyncRdma => ("async-rdma-peer", "RDMA_GID_INDEX=1 RDMA_MTU=1024"),
            Self::Perftest(_) => ("", ""),
        };
        format!("env RDMA_DEV={DEVICE} {settings} /programs/{name}")
    }
}
