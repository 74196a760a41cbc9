//! Every operation between two processes, with checked contents and measured times.
//!
//! ```text
//! cargo run --release --example quickstart                    # both processes on this machine
//! ... --example quickstart -- --role server --address 0.0.0.0:7471         # on one host
//! ... --example quickstart -- --role client --address first.example:7471   # on another
//! ```
//!
//! | file | what |
//! |---|---|
//! | `client` | the operations, one function each |
//! | `server` | the far end: receives, and tells what arrived |
//! | `wire` | what the two tell each other |
//! | `measure`, `table` | times, and how they are shown |

mod client;
#[path = "../common/mod.rs"]
mod common;
mod measure;
mod server;
mod table;
mod wire;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use tokio_rdma::{Address, Device, IntoAddress};

use crate::common::child::Server;
use crate::common::options::{open_device, server_address};

/// Runs every operation between two processes, checks what arrived, and shows how long it took.
#[derive(Parser)]
struct Options {
    /// Run only this side, for two hosts; without it, this process is the client and starts a server
    #[arg(long)]
    role: Option<Role>,

    /// Where the server listens: IP:PORT, HOST:PORT or unix:PATH; port 0 takes a free one. Without it, at the device's own address
    #[arg(long, value_parser = |text: &str| text.into_address())]
    address: Option<Address>,

    /// The file that the client moves; without it, this program's own executable
    #[arg(long)]
    file: Option<PathBuf>,

    /// The RDMA device; without it, the default one
    #[arg(long)]
    device: Option<String>,

    /// How many seconds a single step may take
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,

    /// How many seconds a server waits for its client
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400))]
    wait: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Role {
    Server,
    Client,
}

impl Options {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    fn open_device(&self) -> Result<Device> {
        open_device(self.device.as_deref())
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let (name, result) = match options.role {
        Some(Role::Server) => ("quickstart server", server::run(&options).await),
        Some(Role::Client) => ("quickstart client", client_alone(&options).await),
        None => ("quickstart", both(&options).await),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not eprintln: this must not panic when nobody listens any more.
            let _ = writeln!(io::stderr(), "{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn client_alone(options: &Options) -> Result<()> {
    let address = server_address("a client", options.address.as_ref())?;
    let file = client::load(options.file.as_deref())?;
    client::run(options, address.clone(), file).await
}

/// The client here, the server in a process of its own.
async fn both(options: &Options) -> Result<()> {
    let file = client::load(options.file.as_deref())?;
    let mut arguments = vec!["--role".to_owned(), "server".to_owned()];
    arguments.extend(options.address.iter().flat_map(|address| ["--address".to_owned(), address.to_string()]));
    arguments
        .extend(["--timeout", "--wait"].into_iter().flat_map(|name| [name.to_owned(), options.timeout.to_string()]));
    arguments.extend(options.device.iter().flat_map(|name| ["--device".to_owned(), name.clone()]));
    let (server, address) = Server::start(arguments, options.limit()).await?;
    server.finish(client::run(options, address, file).await, options.limit()).await
}
