//! Not tests: what operations cost here. `cargo test --release speed -- --ignored --nocapture --test-threads 1`

use super::*;

fn ping_pong(link: Link, len: usize) -> Duration {
    let (a, b) = pair(link);
    let (at_a, at_b) = (Memory::new(&a, len), Memory::new(&b, len));
    let mut out = Vec::with_capacity(64);
    quickest(|| {
        for (from, to, source, target) in [(&a, &b, &at_a, &at_b), (&b, &a, &at_b, &at_a)] {
            to.receive(1, target.whole());
            from.send(2, source.whole());
            out.clear();
            while !out.iter().any(|c: &WorkCompletion| c.wr_id == 1) {
                to.poll(&mut out);
            }
        }
    })
}

/// The best of many short batches: a busy machine only disturbs the others.
fn quickest(mut round: impl FnMut()) -> Duration {
    const BATCH: u32 = 200;
    let batches = (0..200).map(|_| {
        let start = Instant::now();
        (0..BATCH).for_each(|_| round());
        start.elapsed() / BATCH
    });
    batches.min().unwrap_or_default()
}

#[test]
#[ignore = "a measurement"]
fn speed_of_a_ping_pong() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        for len in [8, 4096] {
            println!("{link} {len:>7} B: {:?} a round trip", ping_pong(link, len));
        }
    }
}

/// Repeats 64 MiB of work; the best rate in GB/s.
fn best_rate(mut work: impl FnMut(usize)) -> f64 {
    const BYTES: usize = 64 << 20;
    let times = (0..30).map(|_| {
        let start = Instant::now();
        work(BYTES);
        start.elapsed()
    });
    BYTES as f64 / times.min().unwrap_or_default().as_secs_f64() / 1e9
}

#[test]
#[ignore = "a measurement"]
fn speed_of_writes() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        for len in [64 << 10, 1 << 20] {
            let (a, b) = pair(link);
            let exposed = Memory::new(&b, len);
            let grant = exposed.grant(&b, Access::all());
            let local = Memory::new(&a, len);
            let (mut out, mut ignored) = (Vec::new(), Vec::new());
            let rate = best_rate(|bytes| {
                let (mut posted, mut finished) = (0, 0);
                while finished < bytes / len {
                    while posted < bytes / len && posted - finished < 16 {
                        a.post(1, WrOp::Write { remote: exposed.remote(&grant, 0), imm: None }, local.whole());
                        posted += 1;
                    }
                    b.poll(&mut ignored);
                    finished += a.poll(&mut out);
                    out.clear();
                }
            });
            println!("{link} {len:>7} B: {rate:.2} GB/s in one thread");
        }
    }
}

/// What the same bytes cost on bare sockets, in one thread.
#[test]
#[ignore = "a measurement"]
fn speed_of_bare_sockets() {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::epoll;

    fn run(name: &str, mut a: impl Read + Write + AsFd, mut b: impl Read + Write + AsFd) {
        // As every runtime has it: the sockets are registered, which costs a little at each arrival.
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &a, epoll::EventData::new_u64(1), flags).unwrap();
        epoll::add(&epoll, &b, epoll::EventData::new_u64(2), flags).unwrap();
        for len in [8, 4096] {
            let (out, mut back) = (vec![0; len], vec![0; len]);
            let time = quickest(|| {
                a.write_all(&out).unwrap();
                b.read_exact(&mut back).unwrap();
                b.write_all(&out).unwrap();
                a.read_exact(&mut back).unwrap();
            });
            println!("{name} {len:>7} B: {time:?} a round trip");
        }
        rustix::io::ioctl_fionbio(&a, true).unwrap();
        rustix::io::ioctl_fionbio(&b, true).unwrap();
        for len in [64 << 10, 1 << 20] {
            let (out, mut back) = (vec![0; len], vec![0; len]);
            let rate = best_rate(|bytes| {
                let (mut written, mut read) = (0, 0);
                while read < bytes {
                    while let Ok(count) = a.write(&out[..len.min(bytes - written)]) {
                        written += count;
                        if written == bytes {
                            break;
                        }
                    }
                    while let Ok(count) = b.read(&mut back) {
                        read += count;
                        if read == bytes {
                            break;
                        }
                    }
                }
            });
            println!("{name} {len:>7} B: {rate:.2} GB/s in one thread");
        }
    }
    let (a, b) = UnixStream::pair().unwrap();
    run("unix", a, b);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let a = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (b, _) = listener.accept().unwrap();
    a.set_nodelay(true).unwrap();
    b.set_nodelay(true).unwrap();
    run("tcp", a, b);
}

/// One-sided reads while the target's program does something else: its engine serves them.
#[test]
#[ignore = "a measurement"]
fn speed_of_unattended_reads() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        let (a, b) = pair(link);
        let exposed = Memory::new(&b, 4096);
        let grant = exposed.grant(&b, Access::all());
        let local = Memory::new(&a, 4096);
        let mut out = Vec::new();
        let time = quickest(|| {
            a.post(1, WrOp::Read { remote: exposed.remote(&grant, 0) }, local.whole());
            out.clear();
            while a.poll(&mut out) == 0 {
                std::thread::yield_now();
            }
        });
        println!("{link}    4096 B: {time:?} an unattended read");
    }
}

/// Small messages one after the other, as many as the queues hold at a time.
#[test]
#[ignore = "a measurement"]
fn speed_of_pipelined_sends() {
    const COUNT: u64 = 100_000;
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        let (a, b) = pair(link);
        let (source, target) = (Memory::new(&a, 8), Memory::new(&b, 8));
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        let times = (0..20).map(|_| {
            let start = Instant::now();
            let (mut posted, mut done, mut expected, mut came) = (0, 0, 0, 0);
            while came < COUNT || done < COUNT {
                while expected < COUNT && expected - came < 128 {
                    b.receive(1, target.whole());
                    expected += 1;
                }
                while posted < COUNT && posted - done < 64 && posted < expected {
                    a.send(2, source.whole());
                    posted += 1;
                }
                came += b.poll(&mut received) as u64;
                done += a.poll(&mut sent) as u64;
                received.clear();
                sent.clear();
            }
            start.elapsed()
        });
        let best = times.min().unwrap_or_default();
        println!("{link}       8 B: {:.2} M messages/s in one thread", COUNT as f64 / best.as_secs_f64() / 1e6);
    }
}
