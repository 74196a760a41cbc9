//! Not tests: what the link through shared memory does here. `cargo test --release --test shm_speed -- --ignored --nocapture`

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::rig::{Rig, Setup, contents};
use tokio_rdma::{Access, Connection, Listener, RemoteRegion};

/// The two ends, each in a runtime and a thread of its own, on a CPU of its own.
fn apart<F: Future<Output = ()>>(
    server: impl FnOnce(Connection) -> F + Send + 'static,
    client: impl AsyncFnOnce(Connection) + Send + 'static,
) {
    let setup = Setup::SHM_TCP.single_threaded();
    let (told, hear) = mpsc::channel();
    let serving = std::thread::spawn(move || {
        pin_to(0);
        setup.runtime().block_on(async {
            let domain = Rig::new(setup).domain();
            let listener = Listener::bind(&domain, "127.0.0.1:0").await.unwrap();
            told.send(listener.local_address().clone()).unwrap();
            server(listener.accept().await.unwrap()).await;
        });
    });
    pin_to(1);
    setup.runtime().block_on(async {
        let domain = Rig::new(setup).domain();
        client(Connection::connect(&domain, &hear.recv().unwrap()).await.unwrap()).await;
    });
    serving.join().unwrap();
}

fn pin_to(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}

#[test]
#[ignore = "a measurement"]
fn speed_of_pipelined_sends() {
    const COUNT: usize = 300_000;
    const DEPTH: usize = 64;
    let server = |connection: Connection| async move {
        let pool = tokio_rdma::BufferPool::new(connection.domain(), 8, 128).unwrap();
        let mut receives = std::collections::VecDeque::new();
        for _ in 0..COUNT + 100 {
            while receives.len() < 128 {
                let mut receive = connection.receive(pool.try_get().unwrap());
                receive.try_post().unwrap();
                receives.push_back(receive);
            }
            if receives.pop_front().unwrap().await.is_err() {
                return;
            }
        }
    };
    apart(server, async |connection: Connection| {
        let pool = tokio_rdma::BufferPool::new(connection.domain(), 8, DEPTH).unwrap();
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let start = Instant::now();
            let mut sends = std::collections::VecDeque::new();
            for _ in 0..COUNT / 5 {
                if sends.len() == DEPTH {
                    let send: tokio_rdma::op::SendOp<_> = sends.pop_front().unwrap();
                    drop(send.await.unwrap());
                }
                let mut send = connection.send(pool.try_get().unwrap());
                send.try_post().unwrap();
                sends.push_back(send);
            }
            for send in sends {
                send.await.unwrap();
            }
            best = best.min(start.elapsed());
        }
        println!("8 B sends, pipelined: {:.2} M/s", (COUNT / 5) as f64 / best.as_secs_f64() / 1e6);
        connection.close().await;
    });
}

#[test]
#[ignore = "a measurement"]
fn speed_of_large_writes() {
    for len in [8, 4 << 10, 64 << 10, 1 << 20, 64 << 20] {
        common::run(Setup::SHM_UNIX.single_threaded(), move |rig| async move {
            let pair = rig.pair().await;
            let region = pair.server.buffer(len).expose(Access::all()).unwrap();
            let remote: RemoteRegion = region.remote();
            let mut buffer = pair.client.filled(len, 1);
            while pair.client.stats().direct == 0 {
                buffer = pair.client.write(buffer, &remote).await.unwrap();
            }
            let mut best = Duration::MAX;
            let mut longest_poll = Duration::ZERO;
            for _ in 0..(256 << 20) / len.max(4096) {
                let start = Instant::now();
                let mut writing = pin!(pair.client.write(buffer, &remote));
                buffer = std::future::poll_fn(|cx| {
                    let start = Instant::now();
                    let polled = writing.as_mut().poll(cx);
                    longest_poll = longest_poll.max(start.elapsed());
                    polled
                })
                .await
                .unwrap();
                best = best.min(start.elapsed());
            }
            let (from, mut to) = (vec![1u8; len], vec![0u8; len]);
            let mut copy = Duration::MAX;
            for _ in 0..(256 << 20) / len.max(4096) {
                let start = Instant::now();
                to.copy_from_slice(std::hint::black_box(&from));
                std::hint::black_box(&mut to);
                copy = copy.min(start.elapsed());
            }
            assert_eq!(contents(&region).len(), len);
            println!("write of {len:>8} B: {best:?}, memcpy {copy:?}, longest poll {longest_poll:?}");
        });
    }
}

#[test]
#[ignore = "a measurement"]
fn speed_of_a_first_poll() {
    common::run(Setup::SHM_UNIX.single_threaded(), |rig| async move {
        let pair = rig.pair().await;
        let region = pair.server.exposed(4096);
        let remote = region.remote();
        while pair.client.stats().direct == 0 {
            pair.client.read(pair.client.buffer(8), &remote).await.unwrap();
        }
        for len in [8, 4096] {
            let mut buffer = pair.client.buffer(len);
            let (mut best, mut pending) = (Duration::MAX, 0);
            for _ in 0..10_000 {
                let start = Instant::now();
                let mut reading = pin!(pair.client.read(buffer, &remote));
                buffer = match reading.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready(read) => {
                        best = best.min(start.elapsed());
                        read.unwrap()
                    }
                    Poll::Pending => {
                        pending += 1;
                        reading.await.unwrap()
                    }
                };
            }
            println!("read of {len} B: {best:?}, pending at the first poll {pending} of 10000");
        }
    });
}
