//! A port that goes down, and comes up again. Whoever uses the device does so in a process of its own: librdmacm keeps a
//! device open once it has used it, and then the kernel cannot remove it.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio_rdma::{Access, CloseReason, Connection, Error, Listener, WcStatus};

use crate::Nic;
use crate::faults::{again, change, role};

/// The device that may be taken apart, and its network interface.
fn removable() -> (Nic, String) {
    let named = std::env::var("TOKIO_RDMA_TEST_REMOVABLE").expect("TOKIO_RDMA_TEST_REMOVABLE=device@address@interface");
    let parts: Vec<&str> = named.split('@').collect();
    (Nic { name: parts[0].to_owned(), address: parts[1].to_owned() }, parts[2].to_owned())
}

/// The interface, up again whatever happens.
struct Interface(String);

impl Interface {
    fn down(name: &str) -> Self {
        change(&format!("/sbin/ip link set {name} down"));
        Self(name.to_owned())
    }

    fn up(self) {}
}

impl Drop for Interface {
    fn drop(&mut self) {
        change(&format!("/sbin/ip link set {} up", self.0));
    }
}

on_nic! {
    async fn a_port_that_stays_down_ends_connections_with_that_reason(_nic) {
        let (nic, interface) = removable();
        const NAME: &str = "links::a_port_that_stays_down_ends_connections_with_that_reason";
        match role().as_deref() {
            None => {
                assert!(again(NAME, "loses").stdout(Stdio::null()).status().unwrap().success());
                // Soft-RoCE of Linux 6.1 sends no connection request any more after a message of RDMA CM has found the port
                // down (its queue pair 1 stays in error), so the device is made anew.
                let (name, make) = (&nic.name, format!("rdma link add {} type rxe netdev {interface}", nic.name));
                change(&format!("timeout 20 rdma link delete {name} && {make}"));
                assert!(again(NAME, "works").stdout(Stdio::null()).status().unwrap().success());
                return;
            }
            Some("works") => return works(&nic).await,
            _ => {}
        }
        let domain = nic.domain();
        let address = format!("{}:0", nic.address);
        let short = Duration::from_millis(60);
        let listener = Listener::builder(&domain)
            .connections(|it| it.ack_timeout(short).retry_count(1).keepalive(Some(Duration::from_millis(100))))
            .bind(&*address).await.unwrap();
        let connecting = Connection::builder(&domain).ack_timeout(short).retry_count(1).keepalive(None);
        let connecting = connecting.connect(listener.local_address());
        let (client, server) = tokio::try_join!(connecting, listener.accept()).unwrap();
        let shared = domain.alloc(64).unwrap().expose(Access::REMOTE_WRITE).unwrap();
        client.write(domain.alloc(8).unwrap(), &shared.remote()).await.unwrap();
        let mut idle = server.receive(domain.alloc(8).unwrap());
        idle.try_post().unwrap();

        let start = Instant::now();
        let down = Interface::down(&interface);
        let error = client.write(domain.alloc(8).unwrap(), &shared.remote()).await.unwrap_err();
        let told = match error.error() {
            // Soft-RoCE gives up at once, for want of a route.
            Error::Completion { status, .. } => [WcStatus::RetryExceeded, WcStatus::LocalQpOperation].contains(status),
            _ => false,
        };
        assert!(told, "{error}");
        let reason = client.closed().await;
        let text = format!("port 1 of {} is down", nic.name);
        assert!(matches!(&reason, CloseReason::LinkLost(why) if **why == *text), "{reason:?}");
        // The other end is silent, and finds out by its keepalive.
        let error = idle.await.unwrap_err();
        assert!(matches!(error.error(), Error::Closed { reason: CloseReason::LinkLost(_), .. }), "{error}");
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        down.up();
    }

    async fn a_port_that_is_down_for_a_moment_ends_nothing(_nic) {
        let (nic, interface) = removable();
        if role().is_none() {
            let child = again("links::a_port_that_is_down_for_a_moment_ends_nothing", "goes on").stdout(Stdio::null()).status();
            assert!(child.unwrap().success());
            return;
        }
        let (client, _server) = nic.connected().await;
        let domain = client.domain().clone();
        let shared = domain.alloc(64).unwrap().expose(Access::REMOTE_WRITE).unwrap();
        client.write(domain.alloc(8).unwrap(), &shared.remote()).await.unwrap();
        let down = Interface::down(&interface);
        // Nothing is posted meanwhile: of Soft-RoCE it would fail at once, of a NIC run into the retry budget.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(client.close_reason(), None);
        down.up();
        tokio::time::sleep(Duration::from_millis(500)).await;
        client.write(domain.alloc(8).unwrap(), &shared.remote()).await.unwrap();
    }
}

/// The device can be connected to, and writes.
pub async fn works(nic: &Nic) {
    // Addresses take a moment to come back.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (client, _server) = nic.connected().await;
    let domain = client.domain();
    let shared = domain.alloc(8).unwrap().expose(Access::REMOTE_WRITE).unwrap();
    client.write(domain.alloc(8).unwrap(), &shared.remote()).await.unwrap();
}
