//! Many links through shared memory on one completion queue, more than are looked at each time.

use super::*;

/// So many that most only ring.
const LINKS: usize = 100;

/// Everybody is connected to one device's only completion queue.
struct Crowd {
    hub: Side,
    /// The hub's ends but the last one, which is `hub`'s own, with what they may touch.
    ends: Vec<Qp>,
    memories: Vec<Memory>,
    spokes: Vec<Side>,
}

impl Crowd {
    fn meet(links: usize, bytes: usize) -> Self {
        let (ctx, pd, cq) = device_for(Link::SharedMemory, default_limits(), None);
        let (mut ends, mut spokes) = (Vec::new(), Vec::new());
        runtime().block_on(async {
            let acceptor = ctx.listen(&address(Link::SharedMemory)).await.unwrap();
            for _ in 0..links {
                let (ctx_of, pd_of, cq_of) = device_for(Link::SharedMemory, default_limits(), None);
                let config = config();
                let connecting = ctx_of.connect(&pd_of, &cq_of, &config, acceptor.local_address(), b"");
                let accepting = async { acceptor.accept().await?.accept(&pd, &cq, &config, |_| Ok(Vec::new())).await };
                let (spoke, end) = tokio::try_join!(connecting, accepting).unwrap();
                spokes.push(Side::new(spoke.0, cq_of, pd_of, ctx_of));
                ends.push(end.0);
            }
        });
        let memories = (0..links).map(|_| Memory::of(&pd, bytes)).collect();
        let hub = Side::new(ends.pop().unwrap(), cq, pd, ctx);
        Self { hub, ends, memories, spokes }
    }

    fn end(&self, at: usize) -> &Qp {
        self.ends.get(at).unwrap_or(&self.hub.qp)
    }

    fn receive(&self, at: usize) {
        let sges = self.memories[at].whole();
        self.end(at).post_receive(&[ReceiveRequest { wr_id: at as u64, sges }]).unwrap();
    }

    /// Goes to sleep, as a program does that finds nothing.
    fn sleeps(&self) {
        let mut out = Vec::new();
        wait_until(|| {
            self.hub.cq.arm().unwrap();
            self.hub.cq.acknowledge(self.hub.cq.read_events().unwrap());
            self.hub.poll(&mut out);
            !super::engine::readable(&self.hub.cq, Duration::ZERO)
        });
        assert!(out.is_empty(), "{out:?}");
    }

    /// A message of one spoke wakes the hub and arrives.
    fn says(&self, at: usize, source: &Memory) {
        self.receive(at);
        self.sleeps();
        self.spokes[at].send(0, source.whole());
        assert!(super::engine::readable(&self.hub.cq, PATIENCE), "link {at}");
        let (mut came, mut sent) = (Vec::new(), Vec::new());
        wait_until(|| {
            self.hub.poll(&mut came);
            self.spokes[at].poll(&mut sent);
            !came.is_empty() && !sent.is_empty()
        });
        assert_success(&came, [at as u64]);
        assert_success(&sent, [0]);
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // Before the memory that they use.
        self.ends.clear();
    }
}

/// By its bell, and not because the engine looks now and then.
#[test]
fn each_of_many_wakes_who_sleeps() {
    let crowd = Crowd::meet(LINKS, 8);
    let sources: Vec<_> = crowd.spokes.iter().map(|spoke| Memory::new(spoke, 8)).collect();
    let before = crowd.hub.ctx.stats().engine_drives.load(Ordering::Relaxed);
    // Each is watched for a while and then gives way, several times; the first ones all the time.
    for round in 0..5 * LINKS {
        for at in [round * 7 % LINKS, round % 3] {
            crowd.says(at, &sources[at]);
        }
    }
    let served = crowd.hub.ctx.stats().engine_drives.load(Ordering::Relaxed) - before;
    assert!(served < LINKS as u64, "the engine served {served} of {} messages", 10 * LINKS);
}

/// Those that give way have rung, and nobody has slept since.
#[test]
fn who_gives_way_while_somebody_looks_is_heard_later() {
    let crowd = Crowd::meet(LINKS, 8);
    let sources: Vec<_> = crowd.spokes.iter().map(|spoke| Memory::new(spoke, 8)).collect();
    for _ in 0..3 {
        crowd.sleeps();
        let (mut came, mut sent) = (Vec::new(), Vec::new());
        for (at, source) in sources.iter().enumerate() {
            crowd.receive(at);
            crowd.spokes[at].send(0, source.whole());
            wait_until(|| {
                crowd.hub.poll(&mut came);
                crowd.spokes[at].poll(&mut sent);
                came.len() > at && sent.len() > at
            });
        }
        assert_success(&came, 0..LINKS as u64);
        for (at, source) in sources.iter().enumerate() {
            crowd.says(at, source);
        }
    }
}

/// More than the rings hold, in both directions and at the same time: links that nobody watches wait for room, too.
#[test]
fn all_of_many_are_heard_while_somebody_looks() {
    const BYTES: usize = 400_000;
    let crowd = Crowd::meet(LINKS, BYTES);
    let targets: Vec<_> = crowd.spokes.iter().map(|spoke| Memory::new(spoke, BYTES)).collect();
    let sources: Vec<_> = crowd.spokes.iter().map(|spoke| Memory::pattern(spoke, BYTES, 1)).collect();
    let source = Memory::of(&crowd.hub.pd, BYTES);
    source.set(0, &pattern(BYTES, 2));
    for at in 0..LINKS {
        crowd.receive(at);
        crowd.spokes[at].receive(1, targets[at].whole());
        crowd.spokes[at].send(2, sources[at].whole());
        let send = WrOp::Send { imm: None, patience: 0 };
        crowd.end(at).post_send(&[request((LINKS + at) as u64, send, source.whole())]).unwrap();
    }
    let mut at_hub = Vec::new();
    let mut at_spokes = vec![Vec::new(); LINKS];
    wait_until(|| {
        crowd.hub.poll(&mut at_hub);
        crowd.spokes.iter().zip(&mut at_spokes).for_each(|(spoke, out)| {
            spoke.poll(out);
        });
        at_hub.len() == 2 * LINKS && at_spokes.iter().all(|out| out.len() == 2)
    });
    assert!(at_hub.iter().chain(at_spokes.iter().flatten()).all(|it| it.status == WcStatus::Success));
    assert!(crowd.memories.iter().all(|memory| memory.all() == pattern(BYTES, 1)));
    assert!(targets.iter().all(|memory| memory.all() == pattern(BYTES, 2)));
    drop(crowd);
}

/// Links come and go while others are in use: whoever takes a place is heard.
#[test]
fn who_takes_the_place_of_another_is_heard() {
    let mut crowd = Crowd::meet(LINKS, 8);
    for last in (1..LINKS).rev().step_by(3) {
        let at = last * 5 % crowd.ends.len();
        let of_hub = crowd.spokes.pop().unwrap();
        drop((crowd.ends.swap_remove(at), crowd.spokes.swap_remove(at)));
        crowd.spokes.push(of_hub);
        let own = crowd.spokes.len() - 1;
        for at in [0, own / 2, own] {
            let source = Memory::new(&crowd.spokes[at], 8);
            crowd.says(at, &source);
        }
    }
}

/// Each has a bell of its own, and a full one cannot be rung.
#[test]
fn a_peer_that_fills_its_bell_keeps_nobody_else_from_ringing() {
    let crowd = Crowd::meet(2, 8);
    let source = Memory::new(&crowd.spokes[1], 8);
    for _ in 0..100 {
        let bell = crowd.ends[0].shared().wire.as_ref().unwrap().own_bell();
        let _ = rustix::io::read(bell, &mut [0; 8]);
        assert_eq!(rustix::io::write(bell, &(u64::MAX - 1).to_ne_bytes()), Ok(8));
        crowd.says(1, &source);
    }
}
