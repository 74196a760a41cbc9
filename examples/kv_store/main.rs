//! A key-value store whose GETs are RDMA Reads of the server's memory; and a load generator for it.
//!
//! ```text
//! cargo run --release --example kv_store                        # a server process, and 4 clients for 5 seconds
//! ... --example kv_store -- --clients 8 --read-share 0.5 --keys 1000 --value-size 1024 --distribution uniform
//! ... --example kv_store -- --role server --address 0.0.0.0:7471            # on one host
//! ... --example kv_store -- --role client --address first.example:7471      # on another
//! ... --example kv_store -- --role client --address first.example:7471 --put name=value
//! ... --example kv_store -- --role client --address first.example:7471 --get name
//! ```
//!
//! On one host the clients read the server's memory through the link `shm`, without its process: GETs go on while it is stopped (SIGSTOP).
//! Over sockets the software device is a thread of the server's process, so there they wait for it. An RDMA NIC needs no process.
//!
//! The load generator ends with status 0 only if every operation succeeded, every value was whole and of its key, and no
//! client saw a key go back to an older version.
//!
//! | file | what |
//! |---|---|
//! | `store` | the store: how it works, and why a GET is right although a Read is not atomic |
//! | `load`, `report` | the load generator, and its table |

#[path = "../common/mod.rs"]
mod common;
mod load;
mod report;
mod store;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use tokio_rdma::{Address, Device, IntoAddress};

use crate::common::child;
use crate::common::options::{open_device, server_address};
use crate::load::Load;
use crate::store::server::MOST_CLIENTS;
use crate::store::{Client, Server, Shape, Table};

/// Runs a key-value store whose GETs are RDMA Reads, and puts load on it.
#[derive(Parser)]
struct Options {
    /// Run only this side, for two hosts; without it, this process is the clients and starts a server
    #[arg(long)]
    role: Option<Role>,

    /// Where the server listens: IP:PORT, HOST:PORT or unix:PATH; port 0 takes a free one. Without it, at the device's own address
    #[arg(long, value_parser = |text: &str| text.into_address())]
    address: Option<Address>,

    /// The RDMA device; without it, the default one
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// How many seconds a single operation may take
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,

    /// Server: how many keys there is room for; a power of two is taken [default: twice --keys]
    #[arg(long, value_name = "N")]
    slots: Option<u64>,

    /// Server: the longest key in bytes [default: that of the load generator]
    #[arg(long, value_name = "B")]
    key_capacity: Option<u64>,

    /// Server: the longest value in bytes [default: --value-size]
    #[arg(long, value_name = "B")]
    value_capacity: Option<u64>,

    /// Server: how many clients it serves at a time, each with memory for four requests of the longest kind; more wait for their turn
    #[arg(long, value_name = "N", default_value_t = MOST_CLIENTS as u32, value_parser = clap::value_parser!(u32).range(1..=65536))]
    most_clients: u32,

    /// Server: end when standard input does
    #[arg(long, hide = true)]
    until_eof: bool,

    /// Client: print the value of a key, instead of putting load on the server; status 1 if it is not there
    #[arg(long, value_name = "KEY", group = "single")]
    get: Option<String>,

    /// Client: store a value
    #[arg(long, value_name = "KEY=VALUE", group = "single", value_parser = pair)]
    put: Option<(String, String)>,

    /// Client: take a key out; status 1 if it is not there
    #[arg(long, value_name = "KEY", group = "single")]
    delete: Option<String>,

    #[command(flatten)]
    load: Load,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
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

    fn shape(&self) -> Result<Shape> {
        let slots = self.slots.unwrap_or(self.load.keys.saturating_mul(2));
        let key_capacity = self.key_capacity.unwrap_or(load::longest_name(&self.load));
        Ok(Shape::new(slots, key_capacity, self.value_capacity.unwrap_or(self.load.value_size))?)
    }

    /// The command line of a server for this load.
    fn of_server(&self, shape: Shape) -> Vec<String> {
        let mut arguments = vec!["--role".to_owned(), "server".to_owned(), "--until-eof".to_owned()];
        let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        add("--slots", shape.slots().to_string());
        add("--key-capacity", shape.key_capacity().to_string());
        add("--value-capacity", shape.value_capacity().to_string());
        add("--timeout", self.timeout.to_string());
        add("--most-clients", self.most_clients.max(self.load.clients).to_string());
        if let Some(address) = &self.address {
            add("--address", address.to_string());
        }
        if let Some(device) = &self.device {
            add("--device", device.clone());
        }
        arguments
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let (name, result) = match options.role {
        Some(Role::Server) => ("kv_store server", serve(&options).await.map(|()| true)),
        Some(Role::Client) => ("kv_store client", client(&options).await),
        None => ("kv_store", both(&options).await.map(|()| true)),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // Not eprintln: this must not panic when nobody listens any more.
            let _ = writeln!(io::stderr(), "{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until Ctrl-C, or until whoever started this process is gone.
async fn serve(options: &Options) -> Result<()> {
    let device = options.open_device()?;
    let domain = device.alloc_pd()?;
    let table = Arc::new(Table::new(&domain, options.shape()?)?);
    let address = options.address.clone().map_or_else(|| device.local_address(0), Ok)?;
    let server = Server::bind(&domain, table, address, options.limit()).await;
    let server =
        server.context("cannot listen; --address names another place")?.most_clients(options.most_clients as usize);
    child::announce(server.address())?;
    let served = server.serve(stopped(options.until_eof)).await?;
    // Whoever started it may be gone.
    let _ = writeln!(
        io::stdout(),
        "connections: {}, of which failed: {}; messages: {}, for PUTs: {}, for DELETEs: {}",
        served.connections,
        served.failed,
        served.messages,
        served.puts,
        served.deletes
    );
    Ok(())
}

/// Resolves when the server is to end.
async fn stopped(until_eof: bool) {
    let interrupted = tokio::signal::ctrl_c();
    if !until_eof {
        let _ = interrupted.await;
        return;
    }
    // Ctrl-C reaches all processes of a terminal. A server that a client started ends when that client has ended its work.
    tokio::spawn(interrupted);
    child::let_go().await;
}

/// Whether a single key was there; the load generator says yes.
async fn client(options: &Options) -> Result<bool> {
    let address = server_address("a client", options.address.as_ref())?;
    let domain = options.open_device()?.alloc_pd()?;
    if options.get.is_none() && options.put.is_none() && options.delete.is_none() {
        load::run(&domain, address, &options.load, options.limit()).await?.print()?;
        return Ok(true);
    }
    let client = Client::connect(&domain, address, options.limit()).await;
    let mut client = client.with_context(|| format!("no connection to the server at {address}"))?;
    let mut existed = true;
    if let Some(key) = &options.get {
        match client.get(key.as_bytes()).await? {
            Some(found) => writeln!(io::stdout(), "{}", found.value.escape_ascii()).context("print")?,
            None => existed = false,
        }
    }
    if let Some((key, value)) = &options.put {
        client.put(key.as_bytes(), value.as_bytes()).await?;
    }
    if let Some(key) = &options.delete {
        existed = client.delete(key.as_bytes()).await?;
    }
    client.close().await;
    Ok(existed)
}

/// The clients here, the server in a process of its own.
async fn both(options: &Options) -> Result<()> {
    if options.get.is_some() || options.put.is_some() || options.delete.is_some() {
        bail!("a single key needs a server that stays: --role server there, and --role client --address ADDRESS here");
    }
    let domain = options.open_device()?.alloc_pd()?;
    let (server, address) = child::Server::start(options.of_server(options.shape()?), options.limit()).await?;
    let outcome = load::run(&domain, &address, &options.load, options.limit()).await;
    server.finish(outcome, options.limit()).await?.print()
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

#[test]
fn the_command_line_is_consistent() {
    use clap::CommandFactory;
    Options::command().debug_assert();
    for wrong in [&["--read-share", "1.1"][..], &["--read-share", "NaN"], &["--clients", "0"], &["--value-size", "7"]] {
        assert!(Options::try_parse_from([&["kv_store"], wrong].concat()).is_err(), "{wrong:?}");
    }
    let options = Options::try_parse_from(["kv_store", "--keys", "1000", "--value-size", "100"]).unwrap();
    assert_eq!(options.shape().unwrap(), Shape::new(2048, 12, 100).unwrap());
}
