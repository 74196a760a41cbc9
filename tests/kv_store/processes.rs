//! The example as its users start it: servers that are stopped or killed, and the load generator.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio_rdma::soft::LinkPolicy;
use tokio_rdma::{Device, Link};

use crate::LIMIT;
use crate::common::run::SOON;
use crate::common::{example, process, within};
use crate::store::client::Found;
use crate::store::{Client, StoreError};

/// The example, as a server in a process of its own. Killed when dropped.
struct Process {
    child: Child,
    address: String,
}

impl Process {
    async fn start(link: &str) -> Option<Self> {
        let mut command = Command::new(example::build("kv_store")?);
        command.args(["--role", "server", "--address", "127.0.0.1:0", "--slots", "64", "--key-capacity", "16"]);
        command.env("TOKIO_RDMA_LINK", link).env("TOKIO_RDMA_DEVICE", "soft0");
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        within(SOON, stdout.read_line(&mut line)).await.unwrap();
        let address =
            line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("it says {line:?}")).to_owned();
        Some(Self { child, address })
    }

    /// A client of it with 8 values that it has read, so that it knows its way to the memory. No step takes longer than this.
    async fn client(&self, links: LinkPolicy, limit: Duration) -> Client {
        let domain = Device::builder("soft0").links(links).open().unwrap().alloc_pd().unwrap();
        let mut client = Client::connect(&domain, &self.address, limit).await.unwrap();
        for key in 0u8..8 {
            client.put(&[key], &[key; 100]).await.unwrap();
        }
        all_are_there(&mut client).await;
        client
    }
}

async fn all_are_there(client: &mut Client) {
    for key in 0u8..8 {
        let found = client.get(&[key]).await.unwrap().unwrap();
        assert_eq!(found.value, [key; 100]);
    }
}

fn block_on(case: impl Future<Output = ()>) {
    // Before the clock runs: building takes as long as it does.
    if example::build("kv_store").is_none() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(within(5 * SOON, case));
}

/// No step of a client here; far above what one takes on a busy machine, far below what a connection waits for a peer that is silent.
const SHORT: Duration = Duration::from_millis(1500);

#[test]
fn over_shared_memory_gets_need_no_running_server() {
    block_on(async {
        let Some(server) = Process::start("shm").await else { return };
        let mut client = server.client(LinkPolicy::SharedMemory, SHORT).await;
        assert_eq!(client.connection().link(), Link::SharedMemory);
        process::stop(&server.child).await;
        let before = client.connection().stats().direct;
        for _ in 0..100 {
            all_are_there(&mut client).await;
        }
        assert!(client.connection().stats().direct - before >= 800);
        assert_eq!(client.get(b"absent").await.unwrap(), None);
        // To change anything takes the server.
        let error = client.put(&[0], b"new").await.unwrap_err();
        assert!(matches!(error, StoreError::NoAnswer { operation: "put", .. }), "{error}");
        process::resume(&server.child);
        let version = client.put(&[0], b"newer").await.unwrap();
        assert_eq!(client.get(&[0]).await.unwrap(), Some(Found { version, value: b"newer" }));
    });
}

/// The software device's end of a socket is in the server's process. This is what tells the test above from one that shows nothing.
#[test]
fn over_sockets_gets_wait_for_the_server() {
    block_on(async {
        let Some(server) = Process::start("sockets").await else { return };
        let mut client = server.client(LinkPolicy::Sockets, SHORT).await;
        assert_eq!(client.connection().link(), Link::Tcp);
        process::stop(&server.child).await;
        let error = client.get(&[0]).await.unwrap_err();
        assert!(matches!(error, StoreError::Rdma(tokio_rdma::Error::Timeout { .. })), "{error}");
        process::resume(&server.child);
        all_are_there(&mut client).await;
    });
}

fn a_killed_server_is_an_error(link: &'static str, links: LinkPolicy) {
    block_on(async move {
        let Some(mut server) = Process::start(link).await else { return };
        let (mut getting, mut putting) = (server.client(links, LIMIT).await, server.client(links, LIMIT).await);
        let gets = tokio::spawn(async move {
            loop {
                if let Err(error) = getting.get(&[1]).await {
                    return error;
                }
                tokio::task::consume_budget().await;
            }
        });
        let puts = tokio::spawn(async move {
            loop {
                if let Err(error) = putting.put(&[1], &[1; 100]).await {
                    return error;
                }
            }
        });
        server.child.kill().await.unwrap();
        let killed = Instant::now();
        for failing in [gets, puts] {
            let error = within(SOON, failing).await.unwrap();
            assert!(matches!(error, StoreError::Rdma(_)), "{error:?}");
        }
        assert!(killed.elapsed() < Duration::from_secs(8), "{:?}", killed.elapsed());
    });
}

#[test]
fn a_killed_server_is_an_error_over_tcp() {
    a_killed_server_is_an_error("sockets", LinkPolicy::Sockets);
}

#[test]
fn a_killed_server_is_an_error_over_shm() {
    a_killed_server_is_an_error("shm", LinkPolicy::SharedMemory);
}

/// The example's output. It is killed when that takes too long.
async fn output(link: &str, arguments: &[&str]) -> Option<(bool, String)> {
    let mut command = Command::new(example::build("kv_store")?);
    command.env("TOKIO_RDMA_LINK", link).env("TOKIO_RDMA_DEVICE", "soft0").args(arguments).kill_on_drop(true);
    let output = within(3 * SOON, command.output()).await.unwrap();
    let said = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
}

#[test]
fn one_command_runs_it_all() {
    block_on(async {
        for (link, name) in [("sockets", "tcp"), ("shm", "shm")] {
            let load = ["--seconds", "1", "--clients", "2", "--keys", "50", "--read-share", "0.5"];
            let Some((succeeded, said)) = output(link, &load).await else { return };
            assert!(succeeded && said.contains(&format!("device soft0 (software), link {name}")), "{said}");
            for row in ["| GET, by Read ", "| PUT, by message "] {
                let line = said.lines().find(|line| line.starts_with(row)).unwrap_or_else(|| panic!("{said}"));
                let count: u64 = line.split('|').nth(2).unwrap().trim().parse().unwrap();
                assert!(count > 0, "{said}");
            }
        }
        // What was not done has no times.
        let Some((succeeded, said)) = output("shm", &["--seconds", "1", "--keys", "50", "--read-share", "1"]).await
        else {
            return;
        };
        let puts = said.lines().find(|line| line.starts_with("| PUT, by message ")).unwrap_or_else(|| panic!("{said}"));
        assert!(succeeded && puts.matches(" - ").count() == 5, "{said}");
    });
}

#[test]
fn a_load_generator_fails_with_its_server() {
    block_on(async {
        let Some(mut server) = Process::start("sockets").await else { return };
        let address = server.address.clone();
        let single = |arguments: [&'static str; 2]| {
            let address = address.clone();
            async move { output("sockets", &["--role", "client", "--address", &address, arguments[0], arguments[1]]).await }
        };
        assert_eq!(single(["--put", "key=a value"]).await.unwrap(), (true, String::new()));
        assert_eq!(single(["--get", "key"]).await.unwrap(), (true, "a value\n".to_owned()));
        assert_eq!(single(["--delete", "key"]).await.unwrap(), (true, String::new()));
        assert_eq!(single(["--get", "key"]).await.unwrap(), (false, String::new()));

        let loading = async {
            let load = ["--keys", "20", "--value-size", "16", "--seconds", "60"];
            output("sockets", &[&["--role", "client", "--address", &address], &load[..]].concat()).await
        };
        // When its clients are there, it is at work.
        let killing = async {
            let mut other = server.client(LinkPolicy::Sockets, LIMIT).await;
            let stored = async {
                while other.get(b"key-00000019").await.unwrap().is_none() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            within(SOON, stored).await;
            server.child.kill().await.unwrap();
            Instant::now()
        };
        let (loaded, killed) = tokio::join!(loading, killing);
        let (succeeded, said) = loaded.unwrap();
        assert!(!succeeded && said.contains("kv_store client: ") && !said.contains("panicked"), "{said}");
        assert!(killed.elapsed() < Duration::from_secs(10), "{:?}: {said}", killed.elapsed());
    });
}

#[test]
fn what_cannot_be_done_is_said() {
    block_on(async {
        for (arguments, words) in [
            (&["--keys", "100000000"][..], "the limit is"),
            (&["--value-size", "4"], "4 is not in 8.."),
            (&["--read-share", "2"], "expected a number from 0 to 1"),
            (&["--device", "mlx9_9"], "no RDMA device named \"mlx9_9\""),
            (&["--role", "client"], "--address"),
            (&["--get", "key"], "--role client"),
            (&["--role", "client", "--address", "127.0.0.1:1"], "no connection to the server at 127.0.0.1:1"),
            (&["--slots", "16"], "delete some, or start the server with more --slots"),
            (&["--value-capacity", "64"], "length of the value is 128, the limit is 64"),
        ] {
            let Some((succeeded, said)) = output("sockets", arguments).await else { return };
            assert!(!succeeded && said.contains(words) && !said.contains("panicked"), "{arguments:?}: {said}");
        }
    });
}
