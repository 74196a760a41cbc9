//! What goes wrong with real devices: a peer that is killed, memory that may not be locked, a device that disappears.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio_rdma::{CloseReason, Connection, Device, Error, Listener};

use crate::Nic;

/// Tells this program, run again, what to be.
pub const ROLE: &str = "TOKIO_RDMA_TEST_ROLE";

/// This program once more, as the one test `name`, which does what `role` says.
pub fn again(name: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--include-ignored", "--exact", name, "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// What the kernel has of a device: the counts of its domains, queues, queue pairs, regions and ids.
pub fn resources(device: &str) -> String {
    let shown = Command::new("rdma").args(["resource", "show", device]).output().unwrap();
    assert!(shown.status.success(), "{shown:?}");
    // Its number in front changes when it is made anew.
    let text = String::from_utf8(shown.stdout).unwrap();
    text.split_once(device).expect("the device's line").1.trim().to_owned()
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Accepts one connection and then does nothing.
async fn serve(nic: &Nic) {
    let domain = nic.domain();
    let listener = Listener::bind(&domain, format!("{}:0", nic.address)).await.unwrap();
    println!("\nlistening on {}", listener.local_address());
    let _connection = listener.accept().await.unwrap();
    std::future::pending::<()>().await;
}

/// A server in a process of its own, and its address.
fn server(test: &str) -> (Killed, String) {
    let mut child = Killed(again(test, "server").stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let address = lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("listening on ")?.to_owned()));
    (child, address.expect("the server says where it listens"))
}

/// A command that changes the machine, which only the guest may: it is a machine for nothing else.
pub fn change(command: &str) {
    let status = Command::new("/bin/sh").args(["-c", command]).status().unwrap();
    assert!(status.success(), "{command}: {status}");
}

/// Removes a device under load: everything ends, with the reason.
async fn lose(nic: &Nic) {
    let (client, server) = nic.connected().await;
    let domain = client.domain().clone();
    let receives: Vec<_> = (0..8)
        .map(|_| {
            let mut receive = server.receive(domain.alloc(64).unwrap());
            receive.try_post().unwrap();
            receive
        })
        .collect();
    let writing = async { while client.send(domain.alloc(64).unwrap()).await.is_ok() {} };
    let removing = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        Command::new("rdma").args(["link", "delete", &nic.name]).spawn().unwrap()
    };
    let start = Instant::now();
    // The kernel finishes when the last user of the device is gone, so nobody waits for the command here.
    let (_, _deleting) = tokio::join!(writing, removing);
    for receive in receives {
        drop(receive.await);
    }
    let reasons = (client.closed().await, server.closed().await);
    assert!(matches!(reasons.0, CloseReason::Device(_) | CloseReason::Peer), "{reasons:?}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}, {reasons:?}", start.elapsed());
}

on_nic! {
    async fn a_killed_peer_ends_everything_and_another_can_be_connected_to(nic) {
        if role().as_deref() == Some("server") {
            serve(&nic).await;
        }
        const NAME: &str = "faults::a_killed_peer_ends_everything_and_another_can_be_connected_to";
        let domain = nic.domain();
        for _ in 0..2 {
            let (mut child, address) = server(NAME);
            let client = Connection::connect(&domain, &*address).await.unwrap();
            // Nobody posts a receive there, so they wait for that without limit.
            let pending: Vec<_> = (0..32).map(|_| {
                let mut send = client.send(domain.alloc(64).unwrap());
                send.try_post().unwrap();
                send
            }).collect();
            let start = Instant::now();
            child.0.kill().unwrap();
            for send in pending {
                let failed = send.await.unwrap_err();
                assert!(matches!(failed.error(), Error::Closed { .. } | Error::Completion { .. }), "{}", failed.error());
            }
            client.closed().await;
            assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        }
    }

    async fn an_idle_connection_hears_of_a_killed_peer(nic) {
        if role().as_deref() == Some("server") {
            serve(&nic).await;
        }
        let (mut child, address) = server("faults::an_idle_connection_hears_of_a_killed_peer");
        let domain = nic.domain();
        let client = Connection::connect(&domain, &*address).await.unwrap();
        child.0.kill().unwrap();
        assert_eq!(client.closed().await, CloseReason::Peer, "the kernel closes for the dead");
    }

    async fn too_little_lockable_memory_is_told_with_both_numbers(nic) {
        if role().as_deref() == Some("locked") {
            let domain = nic.domain();
            let error = domain.alloc(1 << 20).unwrap_err().to_string();
            for part in ["1048576 bytes", "soft 65536 bytes", "hard 65536 bytes", "ulimit -l"] {
                assert!(error.contains(part), "{part:?} is not in: {error}");
            }
            assert_eq!(domain.alloc(16 << 10).unwrap().len(), 16 << 10, "what the limit allows still works");
            return;
        }
        // As somebody else, since root is above the limit.
        let mut child = again("faults::too_little_lockable_memory_is_told_with_both_numbers", "locked");
        child.uid(1000);
        // SAFETY: nothing but one system call between fork and exec.
        unsafe {
            child.pre_exec(|| {
                let limit = libc::rlimit { rlim_cur: 64 << 10, rlim_max: 64 << 10 };
                match libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        assert!(child.stdout(Stdio::null()).status().unwrap().success());
    }

    async fn a_device_that_disappears_ends_everything(_nic) {
        let removable = std::env::var("TOKIO_RDMA_TEST_REMOVABLE").expect("TOKIO_RDMA_TEST_REMOVABLE=device@address@interface");
        let parts: Vec<&str> = removable.split('@').collect();
        let (device, address, interface) = (parts[0], parts[1], parts[2]);
        let second = Nic { name: device.to_owned(), address: address.to_owned() };
        match role().as_deref() {
            Some("traffic") => return lose(&second).await,
            Some("works") => return crate::links::works(&second).await,
            _ => {}
        }
        const NAME: &str = "faults::a_device_that_disappears_ends_everything";
        for _ in 0..2 {
            // In a process of its own: librdmacm keeps a device open once it has used it, and the kernel waits for that.
            assert!(again(NAME, "traffic").stdout(Stdio::null()).status().unwrap().success());
            let gone = Instant::now();
            while Device::list().iter().any(|info| info.name == device) {
                assert!(gone.elapsed() < Duration::from_secs(20), "the device does not go");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            change(&format!("timeout 20 rdma link add {device} type rxe netdev {interface}"));
        }
        // And the device that is back works.
        assert!(again(NAME, "works").stdout(Stdio::null()).status().unwrap().success());
    }
}
