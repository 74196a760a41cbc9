//! Two devices in one process, driven through the provider's calls alone.

mod adversity;
mod crowd;
mod device;
mod engine;
mod errors;
mod flow;
mod hostile;
mod operations;
mod patience;
mod setup;
mod shm;
mod speed;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{Context, Cq, Faults, Grant, LinkPolicy, Mr, Pd, Qp, default_limits};
use crate::address::Address;
use crate::error::WcStatus;
use crate::memory::Access;
use crate::memory::dma::Segment;
use crate::provider::{
    DeviceLimits, Link, QpConfig, ReceiveRequest, RemoteAddress, SendRequest, Sge, SgeList, WorkCompletion, WrOp,
};
use crate::sync::Mutex;

const PATIENCE: Duration = Duration::from_secs(20);

fn config() -> QpConfig {
    QpConfig {
        send_depth: 128,
        receive_depth: 128,
        max_send_sge: 8,
        max_receive_sge: 8,
        max_inline: 64,
        retry_count: 7,
        rnr_retry: 7,
        rnr_timer: Duration::from_millis(1),
        ack_timeout: Duration::from_secs(2),
        max_rd_atomic: 16,
        path_mtu: 4096,
        guarded: false,
        srq: None,
    }
}

/// One end of a connection.
struct Side {
    qp: Qp,
    cq: Cq,
    pd: Pd,
    ctx: Context,
    /// What the queue pair may touch lives until it is gone.
    memory: Mutex<Vec<Arc<Vec<u64>>>>,
}

#[derive(Clone)]
struct Options {
    link: Link,
    configs: [QpConfig; 2],
    limits: [DeviceLimits; 2],
    faults: [Option<Faults>; 2],
}

impl Default for Options {
    fn default() -> Self {
        Self {
            link: Link::Unix,
            configs: [config(), config()],
            limits: [default_limits(), default_limits()],
            faults: [None, None],
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn unix_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("soft-nic-{}-{number}.sock", std::process::id()))
}

fn address(link: Link) -> Address {
    match link {
        Link::Unix | Link::SharedMemory => Address::Unix(unix_path()),
        _ => "127.0.0.1:0".parse().unwrap(),
    }
}

/// A device whose connections are links of this kind.
fn device_for(link: Link, limits: DeviceLimits, faults: Option<Faults>) -> (Context, Pd, Cq) {
    let links = if link == Link::SharedMemory { LinkPolicy::SharedMemory } else { LinkPolicy::Sockets };
    let ctx = Context::open(limits, faults, links).unwrap();
    let (pd, cq) = (ctx.alloc_pd().unwrap(), ctx.create_cq(1 << 16).unwrap());
    (ctx, pd, cq)
}

fn device(limits: DeviceLimits, faults: Option<Faults>) -> (Context, Pd, Cq) {
    device_for(Link::Tcp, limits, faults)
}

impl Options {
    fn connect(self) -> (Side, Side) {
        let [limits_a, limits_b] = self.limits;
        let [faults_a, faults_b] = self.faults;
        let (ctx_a, pd_a, cq_a) = device_for(self.link, limits_a, faults_a);
        let (ctx_b, pd_b, cq_b) = device_for(self.link, limits_b, faults_b);
        let (a, b) = runtime().block_on(async {
            let acceptor = ctx_b.listen(&address(self.link)).await.unwrap();
            let connecting = ctx_a.connect(&pd_a, &cq_a, &self.configs[0], acceptor.local_address(), b"hi");
            let accepting = async {
                let incoming = acceptor.accept().await.unwrap();
                incoming.accept(&pd_b, &cq_b, &self.configs[1], |_| Ok(b"ho".to_vec())).await
            };
            tokio::join!(connecting, accepting)
        });
        let ((qp_a, info_a), (qp_b, info_b)) = (a.unwrap(), b.unwrap());
        assert_eq!((info_a.private_data.as_slice(), info_b.private_data.as_slice()), (&b"ho"[..], &b"hi"[..]));
        assert_eq!(info_a.link, self.link);
        (Side::new(qp_a, cq_a, pd_a, ctx_a), Side::new(qp_b, cq_b, pd_b, ctx_b))
    }
}

fn pair(link: Link) -> (Side, Side) {
    Options { link, ..Options::default() }.connect()
}

/// Registered memory, read and written only through raw copies.
struct Memory {
    device: Option<Arc<device::Double>>,
    mr: Mr,
    segment: Segment,
    words: Arc<Vec<u64>>,
}

impl Memory {
    fn new(side: &Side, len: usize) -> Self {
        let memory = Self::of(&side.pd, len);
        side.memory.lock().push(Arc::clone(&memory.words));
        memory
    }

    fn of(pd: &Pd, len: usize) -> Self {
        let mut words = vec![0u64; len.div_ceil(8)];
        let segment = Segment::new(words.as_mut_ptr().cast(), len);
        Self { device: None, mr: pd.register(segment).unwrap(), segment, words: Arc::new(words) }
    }

    fn pattern(side: &Side, len: usize, seed: u8) -> Self {
        let memory = Self::new(side, len);
        memory.set(0, &pattern(len, seed));
        memory
    }

    fn set(&self, offset: usize, bytes: &[u8]) {
        let place = self.segment.slice(offset, bytes.len()).unwrap();
        match &self.device {
            Some(device) => device.put(place.address(), bytes),
            None => place.copy_from(bytes),
        }
    }

    fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        let place = self.segment.slice(offset, len).unwrap();
        match &self.device {
            Some(device) => device.get(place.address(), len),
            None => {
                let mut out = Vec::new();
                place.append_to(&mut out);
                out
            }
        }
    }

    fn all(&self) -> Vec<u8> {
        self.get(0, self.segment.len())
    }

    fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { segment: self.segment.slice(offset, len).unwrap(), lkey: self.mr.lkey() }
    }

    fn whole(&self) -> SgeList {
        SgeList::from_slice(&[self.sge(0, self.segment.len())])
    }

    fn grant(&self, side: &Side, access: Access) -> Grant {
        side.pd.grant(&self.mr, self.segment, access).unwrap()
    }

    fn remote(&self, grant: &Grant, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.segment.address() + offset, rkey: grant.rkey() }
    }
}

/// Bytes in which every block of 1 KiB differs, so that misplaced ones are found.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    let block: Vec<u8> = (0..1024u32).map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed).collect();
    let mut out = Vec::with_capacity(len + block.len());
    while out.len() < len {
        let number = (out.len() as u32).to_le_bytes();
        out.extend_from_slice(&number);
        out.extend_from_slice(&block[number.len()..]);
    }
    out.truncate(len);
    out
}

fn request(wr_id: u64, op: WrOp, sges: SgeList) -> SendRequest {
    SendRequest { wr_id, op, sges, signaled: true, inline: false }
}

impl Side {
    fn new(qp: Qp, cq: Cq, pd: Pd, ctx: Context) -> Self {
        Self { qp, cq, pd, ctx, memory: Mutex::default() }
    }

    fn post(&self, wr_id: u64, op: WrOp, sges: SgeList) {
        self.qp.post_send(&[request(wr_id, op, sges)]).unwrap();
    }

    fn send(&self, wr_id: u64, sges: SgeList) {
        self.post(wr_id, WrOp::Send { imm: None, patience: 0 }, sges);
    }

    fn receive(&self, wr_id: u64, sges: SgeList) {
        self.qp.post_receive(&[ReceiveRequest { wr_id, sges }]).unwrap();
    }

    fn poll(&self, out: &mut Vec<WorkCompletion>) -> usize {
        let mut batch = [WorkCompletion::default(); 32];
        let count = self.cq.poll(&mut batch).unwrap();
        out.extend_from_slice(&batch[..count]);
        count
    }
}

/// Polls both sides until there are that many completions on each.
fn collect(sides: [(&Side, usize); 2]) -> [Vec<WorkCompletion>; 2] {
    let mut out = [Vec::new(), Vec::new()];
    let start = Instant::now();
    loop {
        for ((side, _), out) in sides.iter().zip(&mut out) {
            side.poll(out);
        }
        if sides.iter().zip(&out).all(|((_, wanted), have)| have.len() >= *wanted) {
            return out;
        }
        assert!(start.elapsed() < PATIENCE, "only {out:?}; {:?}", sides.map(|(side, _)| side.qp.close_reason()));
    }
}

/// Polls one side only: the other is served by its engine.
fn collect_one(side: &Side, wanted: usize) -> Vec<WorkCompletion> {
    let mut out = Vec::new();
    wait_until(|| {
        side.poll(&mut out);
        out.len() >= wanted
    });
    out
}

fn wait_until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

/// Tries a few times: a busy machine may hold it up, a timer holds it up each time.
#[track_caller]
fn takes_less_than(limit: Duration, attempt: impl FnMut() -> Duration) {
    const TRIES: usize = 5;
    let too_long: Vec<_> = std::iter::repeat_with(attempt).take(TRIES).take_while(|took| *took >= limit).collect();
    assert!(too_long.len() < TRIES, "{too_long:?}, and not once less than {limit:?}");
}

fn statuses(completions: &[WorkCompletion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

#[track_caller]
fn assert_success(completions: &[WorkCompletion], ids: impl IntoIterator<Item = u64>) {
    let wanted: Vec<_> = ids.into_iter().map(|id| (id, WcStatus::Success)).collect();
    assert_eq!(statuses(completions), wanted);
}
