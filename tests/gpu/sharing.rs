//! Memory of GPUs between two processes that share memory: each one's GPU copies from and to the other's by itself.

use std::time::Duration;

use tokio_rdma::gpu::{GpuBuffer, GpuExposedRegion, PathPolicy};
use tokio_rdma::{Access, Connection, Error, RemoteRegion, WcStatus};

use crate::common::process::{Parent, Second, test_name, two_processes};
use crate::common::{End, Rig, Setup};
use crate::gpu::{Gpu, fake, skipped};

const LEN: usize = 3 << 20;

macro_rules! shared_cases {
    ($($case:ident => $follower:ident);+ $(;)?) => {$(
        #[test]
        fn $case() {
            let name = test_name(concat!(module_path!(), "::", stringify!($case)));
            two_processes(
                name,
                Setup::SHM_TCP,
                |rig, second| async { drives(rig, second, async |it| cases::$case(it).await).await },
                |rig, parent| async { follows(rig, parent, async |it| cases::$follower(it).await).await },
            );
        }
    )+};
}

shared_cases! {
    what_was_used_once_is_used_directly => checks_what_was_written;
    parts_go_through_the_queue => lends_a_part;
    memory_that_was_taken_back_is_out_of_reach => takes_back;
    a_peer_that_is_gone_leaves_nothing_behind => outlives;
}

/// Who uses the other one's memory.
struct Driver {
    gpu: Gpu,
    end: End,
    remote: RemoteRegion,
    second: Second,
}

/// Who lends it. Where there are two GPUs, it is on the other one.
struct Follower {
    gpu: Gpu,
    end: End,
    region: GpuExposedRegion,
    /// Behind the memory that is lent, in the same allocation.
    rest: Option<GpuBuffer>,
    parent: Parent,
}

async fn drives(rig: Rig, mut second: Second, case: impl AsyncFnOnce(Driver)) {
    let gpu = Gpu::open();
    let (address, remote) = (second.hear().await, second.hear_region().await);
    let domain = rig.domain();
    let end = End::new(&domain, Connection::connect(&domain, address.as_str()).await.unwrap());
    if !gpu.capabilities().shareable {
        skipped("this GPU's memory cannot be given to other processes");
        return second.kill().await;
    }
    case(Driver { gpu, end, remote, second }).await;
}

async fn follows(rig: Rig, parent: Parent, case: impl AsyncFnOnce(Follower)) {
    let (_, gpu) = Gpu::open_two();
    let domain = rig.domain();
    let listener = rig.listener(&domain).await;
    parent.say(&listener.local_address().to_string());
    let split = test_case().ends_with("parts_go_through_the_queue");
    let mut memory = gpu.filled(&domain, LEN, 1);
    memory.idle().await.unwrap();
    let rest = split.then(|| memory.split_off(LEN / 2).unwrap());
    let region = memory.expose(Access::all()).unwrap();
    parent.say_region(&region.remote());
    let end = End::new(&domain, listener.accept().await.unwrap());
    case(Follower { gpu, end, region, rest, parent }).await;
}

/// The case that this process was started for.
fn test_case() -> String {
    std::env::args().find(|argument| argument.contains("sharing::")).unwrap()
}

impl Driver {
    /// Writes the pattern of this seed, or part of it.
    async fn write(&self, len: usize, seed: u64) -> Result<(), WcStatus> {
        let source = self.gpu.filled(&self.end.domain, len, seed);
        let written = self.end.write(source, &self.remote.slice(..len as u64).unwrap()).await;
        written.map(drop).map_err(|failed| match failed.error() {
            Error::Completion { status, .. } => *status,
            other => panic!("{other}"),
        })
    }

    /// Bytes that differ from the pattern.
    async fn read(&self, seed: u64) -> u64 {
        let len = self.remote.len() as usize;
        let target = self.end.read(self.gpu.alloc(&self.end.domain, len), &self.remote).await.unwrap();
        self.gpu.mismatches(&target, len, seed)
    }

    fn direct(&self) -> u64 {
        self.end.stats().direct
    }

    async fn ends(self) {
        self.end.close().await;
        self.second.end().await;
    }
}

mod cases {
    use super::*;

    /// The first use of a key goes through the queue, and has the peer lend its memory.
    pub async fn what_was_used_once_is_used_directly(it: Driver) {
        assert_eq!(it.read(1).await, 0);
        assert_eq!(it.direct(), 0);
        // What the peer has sent since comes before this.
        it.end.send_number(0).await;
        assert_eq!(it.end.receive_number().await, 0);
        for seed in 2..10 {
            it.write(LEN, seed).await.unwrap();
            it.write(5, seed).await.unwrap();
            assert_eq!(it.read(seed).await, 0);
            it.end.send_number(seed).await;
            assert_eq!(it.end.receive_number().await, seed, "the peer has found another number of wrong bytes");
        }
        assert_eq!(it.direct(), 24);
        let bytes = it.end.stats().bytes_between_gpus;
        assert_eq!(bytes, 8 * (2 * LEN as u64 + 5));
        // To and from the host's memory, and what is no read or write, through the queue.
        let host = it.end.write(it.end.filled(1000, 3), &it.remote.slice(..1000).unwrap()).await.unwrap();
        it.end.read(host, &it.remote.slice(..1000).unwrap()).await.unwrap();
        let staged = GpuBuffer::alloc_with(&it.gpu, &it.end.domain, LEN, PathPolicy::Staged).unwrap();
        it.end.read(staged, &it.remote).await.unwrap();
        it.end.fetch_add(&it.remote.slice(..8).unwrap(), 1).await.unwrap();
        assert_eq!(it.direct(), 24);
        it.end.send_number(u64::MAX).await;
        it.ends().await;
    }

    pub async fn checks_what_was_written(it: Follower) {
        loop {
            let seed = it.end.receive_number().await;
            match seed {
                u64::MAX => break,
                0 => it.end.send_number(0).await,
                seed => it.end.send_number(seed + it.gpu.mismatches_in(&it.region, LEN, seed)).await,
            }
        }
        it.end.closed().await;
    }

    /// The rest of the allocation is nobody else's business.
    pub async fn parts_go_through_the_queue(it: Driver) {
        for _ in 0..5 {
            assert_eq!(it.read(1).await, 0);
            it.end.send_number(0).await;
            it.end.receive_number().await;
        }
        assert_eq!(it.direct(), 0);
        it.ends().await;
    }

    pub async fn lends_a_part(it: Follower) {
        for _ in 0..5 {
            it.end.receive_number().await;
            it.end.send_number(0).await;
        }
        assert!(it.rest.is_some());
        it.end.closed().await;
    }

    pub async fn memory_that_was_taken_back_is_out_of_reach(mut it: Driver) {
        while it.direct() < 3 {
            it.write(LEN, 2).await.unwrap();
        }
        it.second.tell("take it back").await;
        it.second.hear().await;
        assert_eq!(it.write(LEN, 3).await, Err(WcStatus::RemoteAccess));
        assert_eq!(it.direct(), 3);
        it.second.tell("").await;
        it.second.end().await;
    }

    pub async fn takes_back(mut it: Follower) {
        it.parent.hear().await.unwrap();
        let address = it.region.remote().address();
        let allocations = || fake().map(|fake| fake.get("cuMemCreate"));
        let before = allocations();
        let memory = it.region.reclaim().unwrap();
        assert_eq!(memory.address(), address);
        assert_eq!(allocations(), before.map(|before| before + 1), "other memory is there now");
        it.parent.say("taken back");
        it.parent.hear().await.unwrap();
        assert_eq!(it.gpu.mismatches(&memory, LEN, 2), 0, "what the peer wrote before, and nothing after");
    }

    pub async fn a_peer_that_is_gone_leaves_nothing_behind(it: Driver) {
        while it.direct() < 3 {
            it.write(LEN, 2).await.unwrap();
        }
        let Driver { gpu, end, remote, second } = it;
        second.kill().await;
        // What the link had mapped is there until it ends; then there is an error, and no fault.
        let until = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            let source = gpu.filled(&end.domain, LEN, 3);
            match end.write(source, &remote).await {
                Ok(_) => assert!(tokio::time::Instant::now() < until, "the peer was killed long ago"),
                Err(_) => break,
            }
        }
        let buffer = gpu.filled(&end.domain, LEN, 4);
        assert_eq!(gpu.mismatches(&buffer, LEN, 4), 0);
    }

    pub async fn outlives(mut it: Follower) {
        it.parent.hear().await;
    }
}
