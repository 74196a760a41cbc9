//! Attempts to connect that are given up: whatever has been made by then is gone again, in the kernel too.

use std::future::Future;
use std::time::{Duration, Instant};

use tokio_rdma::{Connection, Listener, ProtectionDomain};

use crate::Nic;
use crate::faults::resources;

/// What the kernel has of the device, and what this process has open.
fn counts(nic: &Nic) -> (String, usize) {
    (resources(&nic.name), std::fs::read_dir("/proc/self/fd").unwrap().count())
}

async fn come_back(nic: &Nic, before: &(String, usize)) {
    let start = Instant::now();
    while counts(nic) != *before {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}, and before it was {before:?}", counts(nic));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// `None` when it takes longer.
async fn for_a_while<T>(patience: Duration, attempt: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(patience, attempt).await.ok()
}

/// How long a connection takes to set up here, once what a process makes once has been made.
async fn usual(nic: &Nic, domain: &ProtectionDomain) -> Duration {
    let listener = Listener::bind(domain, format!("{}:0", nic.address)).await.unwrap();
    let mut start = Instant::now();
    for _ in 0..2 {
        start = Instant::now();
        let connecting = Connection::connect(domain, listener.local_address());
        drop(tokio::try_join!(connecting, listener.accept()).unwrap());
    }
    start.elapsed()
}

/// Parts of the usual time, from none of it to more than all.
const STEPS: u32 = 24;

on_nic! {
    async fn connects_and_accepts_leave_nothing_wherever_they_are_dropped(nic) {
        let (client, server) = (nic.domain(), nic.domain());
        let usual = usual(&nic, &client).await;
        drop(nic.connected().await);
        let before = {
            // Until that has settled.
            let mut last = counts(&nic);
            loop {
                tokio::time::sleep(Duration::from_millis(300)).await;
                let now = counts(&nic);
                if now == last {
                    break now;
                }
                last = now;
            }
        };
        let mut connected = 0;
        for step in 0..STEPS {
            let part = usual * step * 3 / (2 * STEPS);
            // The client's future is dropped.
            let listener = Listener::bind(&server, format!("{}:0", nic.address)).await.unwrap();
            let connecting = Connection::connect(&client, listener.local_address());
            connected += u32::from(for_a_while(part, connecting).await.is_some());
            // The handshake at the other end is, by its own limit or with its listener.
            let settings = Listener::builder(&server).connections(|it| it.setup_timeout(part.max(Duration::from_millis(1))));
            let listener = settings.domain_per_connection(true).bind(format!("{}:0", nic.address)).await.unwrap();
            for_a_while(usual, Connection::connect(&client, listener.local_address())).await;
        }
        assert!(connected < STEPS, "no attempt was given up");
        come_back(&nic, &before).await;
    }

    async fn endpoints_leave_nothing_wherever_they_are_dropped(nic) {
        let domain = nic.domain();
        let local = format!("{}:0", nic.address);
        drop(nic.connected().await);
        let endpoint = || Connection::builder(&domain).endpoint(&*local);
        drop((endpoint().await.unwrap(), endpoint().await.unwrap()));
        tokio::time::sleep(Duration::from_millis(300)).await;
        let before = counts(&nic);
        for step in 0..STEPS {
            let patience = Duration::from_millis(step.into()) * 2;
            if let Some(one) = for_a_while(patience, endpoint()).await {
                // Its peer never calls.
                let two = endpoint().await.unwrap();
                assert!(for_a_while(patience, one.unwrap().connect(two.endpoint())).await.is_none());
            }
        }
        come_back(&nic, &before).await;
    }
}
