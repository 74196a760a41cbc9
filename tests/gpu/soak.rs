//! Kernels make bytes and check them, with every verb and at every length, in two processes and in one, and what is wrong is counted.
//! Where there are two GPUs, each side has its own.
//!
//! `TOKIO_RDMA_TEST_GPU_ROUNDS` says how many transfers; the case then takes as long as they take (`TOKIO_RDMA_TEST_CASE_SECONDS`).

use std::io::Write as _;
use std::time::Instant;

use tokio::join;
use tokio_rdma::gpu::{GpuBuffer, GpuExposedRegion, PathPolicy};
use tokio_rdma::{Access, Connection, RemoteRegion};

use crate::common::process::{Parent, Second};
use crate::common::{End, Rig};
use crate::gpu::{Gpu, fake, host_mismatches, pattern, rounds};

two_process_gpu_cases!(between_two_processes => drives, follows);

lone_gpu_cases!(in_one_process);

/// What one transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Send,
    Receive,
    Write,
    WriteWithImmediate,
    Read,
    /// From memory of the host.
    SendOfHost,
    /// To memory of the host.
    ReceiveOnHost,
}

use Verb::*;
const VERBS: [Verb; 7] = [Send, Receive, Write, WriteWithImmediate, Read, SendOfHost, ReceiveOnHost];

/// Told before each transfer, and answered by the number of mismatches that the follower has found.
#[derive(Clone, Copy, Debug)]
struct Order {
    verb: Verb,
    len: usize,
    seed: u64,
    staged: bool,
}

impl Order {
    const LEN: usize = 25;

    fn to_bytes(self) -> Vec<u8> {
        let place = VERBS.iter().position(|verb| *verb == self.verb).unwrap() as u64;
        let numbers = [place, self.len as u64, self.seed].map(u64::to_le_bytes);
        [numbers.as_flattened(), &[u8::from(self.staged)]].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let number = |at: usize| u64::from_le_bytes(bytes[8 * at..][..8].try_into().unwrap());
        Self { verb: VERBS[number(0) as usize], len: number(1) as usize, seed: number(2), staged: bytes[24] != 0 }
    }
}

/// The longest message: 64 MiB on a GPU, 5 MiB on the stand-in.
fn longest() -> usize {
    if fake().is_some() { (5 << 20) + 1 } else { 64 << 20 }
}

/// Short ones mostly, odd ones, and now and then one up to the longest.
fn length(random: &mut fastrand::Rng) -> usize {
    let most = [8, 4096, 64 << 10, 1 << 20, longest()][random.choice([0, 1, 2, 2, 3, 3, 4]).unwrap()];
    match random.u8(0..3) {
        0 => most,
        1 => random.usize(1..=most),
        _ => random.usize(most / 2..most) | 1,
    }
}

/// One side's memory: a buffer by each path, and memory for the peer.
struct Side {
    gpu: Gpu,
    end: End,
    direct: Option<GpuBuffer>,
    staged: Option<GpuBuffer>,
    region: GpuExposedRegion,
}

impl Side {
    fn new(gpu: Gpu, end: End) -> Self {
        let alloc = |policy| GpuBuffer::alloc_with(&gpu, &end.domain, longest(), policy).unwrap();
        let (direct, staged, region) =
            (alloc(PathPolicy::Direct), alloc(PathPolicy::Staged), alloc(PathPolicy::Direct));
        let region = region.expose(Access::REMOTE_READ | Access::REMOTE_WRITE).unwrap();
        Self { direct: Some(direct), staged: Some(staged), region, gpu, end }
    }

    /// The first `len` bytes of the buffer by this path, and the rest.
    fn take(&mut self, order: &Order) -> (GpuBuffer, GpuBuffer) {
        let place = if order.staged { &mut self.staged } else { &mut self.direct };
        let mut buffer = place.take().unwrap();
        let rest = buffer.split_off(order.len).unwrap();
        (buffer, rest)
    }

    fn give_back(&mut self, order: &Order, part: GpuBuffer, rest: GpuBuffer) {
        let place = if order.staged { &mut self.staged } else { &mut self.direct };
        *place = Some(part.unsplit(rest).unwrap());
    }

    /// Sends what a kernel makes.
    async fn send(&mut self, order: &Order) {
        let (mut source, rest) = self.take(order);
        self.gpu.fill(&self.gpu.stream(), &mut source, order.seed);
        let source = self.end.send(source).await.unwrap();
        self.give_back(order, source, rest);
    }

    /// Receives, and has a kernel check it.
    async fn receive(&mut self, order: &Order) -> u64 {
        let (target, rest) = self.take(order);
        let received = self.end.receive(target).await.unwrap();
        assert_eq!(received.len, order.len);
        let mismatches = self.gpu.mismatches(&received.buffer, order.len, order.seed);
        self.give_back(order, received.buffer, rest);
        mismatches
    }

    async fn receive_on_host(&self, order: &Order) -> u64 {
        let received = self.end.receive(self.end.buffer(order.len)).await.unwrap();
        host_mismatches(received.message(), order.seed)
    }

    async fn send_of_host(&self, order: &Order) {
        let source = self.end.domain.register(pattern(order.len, order.seed)).unwrap();
        self.end.send(source).await.unwrap();
    }
}

/// Carries the orders out, and adds up what both sides find wrong.
async fn drive(mut side: Side, remote: &RemoteRegion, place: &str) {
    let (mut random, start) = (fastrand::Rng::with_seed(71), Instant::now());
    let (mut wrong, mut bytes, total) = (0, 0, rounds(60));
    for round in 0..total {
        let verb = VERBS[round as usize % VERBS.len()];
        let order = Order { verb, len: length(&mut random), seed: random.u64(..), staged: random.u8(0..4) == 0 };
        wrong += transfer(&mut side, &order, remote).await;
        bytes += order.len as u64;
    }
    let seconds = start.elapsed().as_secs_f64();
    let _ = writeln!(
        std::io::stderr(),
        "gpu soak: {total} transfers {place} over {}, {} of them direct, {:.1} MiB in {seconds:.1} s on {}: {wrong} wrong bytes",
        side.end.link(),
        side.end.stats().direct,
        bytes as f64 / f64::from(1 << 20),
        side.gpu.device,
    );
    assert_eq!(wrong, 0);
    side.end.close().await;
}

async fn drives(rig: Rig, mut second: Second) {
    let gpu = Gpu::open();
    let (address, remote) = (second.hear().await, second.hear_region().await);
    let domain = rig.domain();
    let end = End::new(&domain, Connection::connect(&domain, address.as_str()).await.unwrap());
    drive(Side::new(gpu, end), &remote, "between two processes").await;
    second.end().await;
}

async fn in_one_process(rig: Rig) {
    let ((gpu, other), pair) = (Gpu::open_two(), rig.pair().await);
    let following = Side::new(other, pair.server);
    let remote = following.region.remote();
    let driving = Side::new(gpu, pair.client);
    join!(drive(driving, &remote, "in one process"), follow(following));
}

/// One transfer, seen from who decides on it.
async fn transfer(side: &mut Side, order: &Order, remote: &RemoteRegion) -> u64 {
    let end = side.end.clone();
    let tell = end.send(end.domain.register(order.to_bytes()).unwrap());
    let part = remote.slice(0..order.len as u64).unwrap();
    let mut wrong = 0;
    match order.verb {
        Send => {
            tell.await.unwrap();
            side.send(order).await;
        }
        Receive => {
            let (told, found) = join!(tell, side.receive(order));
            told.unwrap();
            wrong = found;
        }
        SendOfHost => {
            tell.await.unwrap();
            side.send_of_host(order).await;
        }
        ReceiveOnHost => {
            let (told, found) = join!(tell, side.receive_on_host(order));
            told.unwrap();
            wrong = found;
        }
        Write => {
            let (mut source, rest) = side.take(order);
            side.gpu.fill(&side.gpu.stream(), &mut source, order.seed);
            let source = end.write(source, &part).await.unwrap();
            side.give_back(order, source, rest);
            // Told when the bytes are there.
            tell.await.unwrap();
        }
        WriteWithImmediate => {
            tell.await.unwrap();
            let (mut source, rest) = side.take(order);
            side.gpu.fill(&side.gpu.stream(), &mut source, order.seed);
            let source = end.write_with_immediate(source, &part, order.seed as u32).await.unwrap();
            side.give_back(order, source, rest);
        }
        Read => {
            tell.await.unwrap();
            assert_eq!(end.receive_number().await, 0, "it is there to be read");
            let (target, rest) = side.take(order);
            let target = end.read(target, &part).await.unwrap();
            wrong = side.gpu.mismatches(&target, order.len, order.seed);
            side.give_back(order, target, rest);
            end.send_number(0).await;
        }
    }
    wrong + end.receive_number().await
}

/// Says where it is, and does its part.
async fn follows(rig: Rig, mut parent: Parent) {
    let (_, gpu) = Gpu::open_two();
    let domain = rig.domain();
    let listener = rig.listener(&domain).await;
    parent.say(&listener.local_address().to_string());
    // The memory is the domain's, and may be described before anybody has connected.
    let region = gpu.alloc(&domain, longest()).expose(Access::REMOTE_READ | Access::REMOTE_WRITE).unwrap();
    parent.say_region(&region.remote());
    let end = End::new(&domain, listener.accept().await.unwrap());
    follow(Side { region, ..Side::new(gpu, end) }).await;
    assert_eq!(parent.hear().await, None);
}

/// Does its part of each order, until the connection ends.
async fn follow(mut side: Side) {
    let end = side.end.clone();
    while let Ok(told) = end.receive(end.buffer(Order::LEN)).await {
        let order = Order::from_bytes(told.message());
        let wrong = match order.verb {
            Send => side.receive(&order).await,
            SendOfHost => side.receive(&order).await,
            Receive => {
                side.send(&order).await;
                0
            }
            ReceiveOnHost => {
                side.send(&order).await;
                0
            }
            Write => side.gpu.mismatches_in(&side.region, order.len, order.seed),
            WriteWithImmediate => {
                let notice = end.receive(end.buffer(1)).await.unwrap();
                assert_eq!((notice.len, notice.immediate), (order.len, Some(order.seed as u32)));
                side.gpu.mismatches_in(&side.region, order.len, order.seed)
            }
            Read => {
                let stream = side.gpu.stream();
                side.gpu.fill_through(&mut side.region.write_on::<u8>(&stream).unwrap(), order.seed);
                side.region.idle().await.unwrap();
                end.send_number(0).await;
                end.receive_number().await
            }
        };
        end.send_number(wrong).await;
    }
}
