//! Peers that are not this crate's: a program of the crate async-rdma, in both roles, and a C program of rdma-core.
//!
//! `TOKIO_RDMA_TEST_ASYNC_RDMA` is the program of `peers/async-rdma`, built; `TOKIO_RDMA_TEST_PINGPONG` is `ibv_rc_pingpong`.

use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio_rdma::async_rdma::{Endpoint, LeaseEnd, Listener, Peer, PeerBuilder};
use tokio_rdma::{Access, CloseReason, Error, Mtu, WcStatus};

use crate::Nic;

const MINUTE: Duration = Duration::from_secs(60);

/// As the peer's program fills its regions.
fn pattern(seed: u8) -> Vec<u8> {
    (0..4096).map(|at| (at * 7 / 3) as u8 ^ seed).collect()
}

/// The program that the variable names; nothing where the machine was not prepared.
fn program(variable: &str) -> Option<Command> {
    let Some(path) = std::env::var_os(variable) else {
        println!("skipped: {variable} names no program to talk to");
        return None;
    };
    let mut command = Command::new(path);
    command.kill_on_drop(true).stdin(Stdio::null()).stdout(Stdio::null());
    Some(command)
}

/// A program of async-rdma that carries these steps out.
fn peer(nic: &Nic, role: &str, address: impl ToString, steps: &str) -> Option<Child> {
    let mut command = program("TOKIO_RDMA_TEST_ASYNC_RDMA")?;
    command.args([role, &address.to_string()]).args(steps.split(' '));
    command.env("RDMA_DEV", &nic.name).env("RDMA_GID_INDEX", "1").env("RDMA_MTU", "512");
    Some(command.spawn().unwrap())
}

/// A port that nobody else is likely to take meanwhile.
fn free_port(address: &str) -> SocketAddr {
    let taken = TcpListener::bind((address, 0)).unwrap();
    taken.local_addr().unwrap()
}

/// Tries until the other program listens.
async fn patiently<T, F: Future<Output = Result<T, Error>>>(connect: impl Fn() -> F) -> T {
    let start = Instant::now();
    loop {
        match connect().await {
            Err(Error::Io { cause, .. })
                if cause.kind() == std::io::ErrorKind::ConnectionRefused && start.elapsed().as_secs() < 20 =>
            {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            other => return other.unwrap(),
        }
    }
}

fn settings(nic: &Nic) -> PeerBuilder {
    Peer::builder(&nic.domain()).budget(1 << 20)
}

/// A peer that listens, and one that connects.
async fn both(nic: &Nic, steps: &str) -> Option<[(Peer, Child); 2]> {
    let address = free_port(&nic.address);
    let listening = peer(nic, "listen", address, steps)?;
    let connected = patiently(|| settings(nic).connect(address)).await;
    let listener = settings(nic).listen(format!("{}:0", nic.address)).await.unwrap();
    let connecting = peer(nic, "connect", listener.local_address(), steps)?;
    let accepted = listener.accept().await.unwrap();
    Some([(connected, listening), (accepted, connecting)])
}

async fn finished(mut child: Child) {
    let status = tokio::time::timeout(MINUTE / 2, child.wait()).await.unwrap().unwrap();
    assert!(status.success(), "the peer: {status}");
}

fn bytes(peer: &Peer, bytes: impl Into<Vec<u8>>) -> tokio_rdma::Buffer {
    peer.domain().register(bytes.into()).unwrap()
}

on_nic! {
    async fn messages_go_both_ways_between_us_and_async_rdma(nic) {
        let Some(both) = both(&nic, "echo echo echo send").await else { return };
        for (peer, child) in both {
            let longest: Vec<u8> = pattern(3)[..512].to_vec();
            for (message, immediate) in [(&b"x"[..], None), (b"hello", Some(0xfeed_0001)), (&longest, None)] {
                match immediate {
                    Some(immediate) => peer.send_with_immediate(bytes(&peer, message), immediate).await.unwrap(),
                    None => peer.send(bytes(&peer, message)).await.unwrap(),
                };
                let echo = peer.receive().await.unwrap();
                assert_eq!((&echo[..], echo.immediate()), (message, immediate));
            }
            assert_eq!(peer.receive().await.unwrap()[..], *b"from the peer");
            let last = peer.receive().await.unwrap();
            assert_eq!((&last[..], last.immediate()), (&b"with an immediate"[..], Some(0x0102_0304)));
            finished(child).await;
            assert_eq!(peer.stats().refused, 0);
        }
    }

    async fn many_messages_at_once_find_room_at_async_rdma(nic) {
        const COUNT: u8 = 60;
        let steps = vec!["echo"; COUNT.into()].join(" ");
        let Some(both) = both(&nic, &steps).await else { return };
        for (peer, child) in both {
            let sends = (0..COUNT).map(|at| peer.send(bytes(&peer, vec![at; 100])));
            let echoes = async {
                let mut seen = Vec::new();
                for _ in 0..COUNT {
                    let echo = peer.receive().await.unwrap();
                    assert!(echo.len() == 100 && echo.iter().all(|&byte| byte == echo[0]));
                    seen.push(echo[0]);
                }
                seen.sort_unstable();
                assert!(seen.iter().copied().eq(0..COUNT), "each once");
            };
            let (sent, ()) = tokio::join!(futures::future::try_join_all(sends), echoes);
            sent.unwrap();
            finished(child).await;
        }
    }

    async fn memory_goes_both_ways_between_us_and_async_rdma(nic) {
        let Some(both) = both(&nic, "request lend borrow return").await else { return };
        for (peer, child) in both {
            // Its memory, asked for by us, while it uses ours, asked for by it.
            let region = peer.request_region(4096, 64, MINUTE).await.unwrap();
            let written = peer.write(bytes(&peer, pattern(9)), &region).await.unwrap();
            let read = peer.read(peer.domain().alloc(4096).unwrap(), &region).await.unwrap();
            assert!(read[..] == written[..]);
            assert_eq!(peer.fetch_add(&region.slice(8..16).unwrap(), 1).await.unwrap().to_le_bytes(), written[8..16]);
            peer.release(region).await.unwrap();

            // Its memory, lent by it.
            let region = peer.receive_region().await.unwrap();
            let read = peer.read(peer.domain().alloc(region.len() as usize).unwrap(), &region).await.unwrap();
            assert!(read[..] == pattern(2)[..]);
            drop(region);
            peer.send(bytes(&peer, *b"used")).await.unwrap();

            // Our memory, lent by us, released and then given back.
            for (seed, end) in [(4, LeaseEnd::Released), (5, LeaseEnd::Returned)] {
                let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
                let lent = peer.lend(bytes(&peer, pattern(seed)), rights, MINUTE).await.unwrap();
                assert_eq!(peer.receive().await.unwrap()[..], *b"used");
                assert_eq!(lent.ended().await, end);
                let expected: Vec<u8> = pattern(seed).into_iter().map(|byte| byte.wrapping_add(1)).collect();
                assert!(lent.reclaim().await[..] == expected[..], "{end:?}");
            }
            finished(child).await;
            assert_eq!(peer.stats().refused, 0);
        }
    }

    async fn writes_with_immediates_are_noticed_by_both(nic) {
        let Some(both) = both(&nic, "notify").await else { return };
        for (peer, child) in both {
            assert_eq!(peer.receive_write_immediate().await.unwrap(), 0x0506_0708);
            let region = peer.request_region(4096, 64, MINUTE).await.unwrap();
            peer.write_with_immediate(bytes(&peer, pattern(8)), &region, 0x0a0b_0c0d).await.unwrap();
            finished(child).await;
        }
    }

    async fn raw_connections_to_async_rdma_are_plain_ones(nic) {
        let address = free_port(&nic.address);
        let Some(child) = peer(&nic, "listen", address, "raw-echo raw-echo") else { return };
        let connection = patiently(|| settings(&nic).connect_raw(address)).await;
        for seed in [1, 2] {
            let mut echo = connection.receive(connection.domain().alloc(64).unwrap());
            echo.try_post().unwrap();
            let message = connection.domain().register(pattern(seed)[..64].to_vec()).unwrap();
            // Its immediates have the bytes in the other order.
            connection.send_with_immediate(message, 0x0102_0304u32.swap_bytes()).await.unwrap();
            let echo = echo.await.unwrap();
            assert_eq!((echo.message(), echo.immediate), (&pattern(seed)[..64], Some(0x0102_0305u32.swap_bytes())));
        }
        finished(child).await;
    }

    async fn memory_that_async_rdma_asks_for_comes_back_with_what_it_wrote(nic) {
        let Some(both) = both(&nic, "fill").await else { return };
        for (peer, child) in both {
            assert!(peer.receive_returned().await.unwrap()[..] == pattern(6)[..]);
            assert_eq!((peer.stats().regions, peer.stats().budget_used), (0, 0));
            finished(child).await;
        }
    }

    async fn async_rdma_cannot_use_what_was_lent_after_its_time(nic) {
        let Some(both) = both(&nic, "borrow-late").await else { return };
        for (peer, child) in both {
            let lent = peer.lend(bytes(&peer, pattern(7)), Access::all(), Duration::from_millis(300)).await.unwrap();
            assert_eq!(lent.ended().await, LeaseEnd::Expired);
            // Its write fails there, which it checks, and changes nothing here.
            finished(child).await;
            assert!(lent.reclaim().await[..] == pattern(7)[..]);
        }
    }

    async fn without_a_budget_async_rdma_is_told_by_its_own_timeout(nic) {
        let address = free_port(&nic.address);
        let Some(child) = peer(&nic, "listen", address, "denied") else { return };
        let peer = patiently(|| Peer::builder(&nic.domain()).connect(address)).await;
        peer.send(bytes(&peer, *b"go on")).await.unwrap();
        finished(child).await;
        assert_eq!((peer.stats().refused, peer.stats().regions), (1, 0));
    }

    async fn a_killed_peer_of_async_rdma_is_noticed(nic) {
        let address = free_port(&nic.address);
        let Some(mut child) = peer(&nic, "listen", address, "echo echo stay") else { return };
        let quick = || settings(&nic).connection(|it| it.keepalive(Some(Duration::from_secs(1))).retry_count(2));
        let peer = patiently(|| quick().connect(address)).await;
        let start = Instant::now();
        for round in 0..2 {
            peer.send(bytes(&peer, *b"alive")).await.unwrap();
            assert!(round > 0 || start.elapsed() < Duration::from_secs(1), "nobody waits for a second");
            assert_eq!(peer.receive().await.unwrap()[..], *b"alive");
            // Meanwhile it is probed, which it must not notice.
            tokio::time::sleep(Duration::from_millis(2500)).await;
        }
        let waiting = peer.receive();
        child.start_kill().unwrap();
        let start = Instant::now();
        assert!(matches!(waiting.await, Err(Error::Closed { .. })));
        assert_eq!(peer.closed().await, CloseReason::Failed(WcStatus::RetryExceeded));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }

    async fn ipv6_and_clients_that_say_nothing(nic) {
        let listener = settings(&nic).connection(|it| it.setup_timeout(Duration::from_secs(2))).listen("[::1]:0");
        let listener: Listener = listener.await.unwrap();
        let _silent = TcpStream::connect(listener.local_address()).await.unwrap();
        let mut wrong = TcpStream::connect(listener.local_address()).await.unwrap();
        wrong.write_all(&[0xff; 22]).await.unwrap();
        let Some(child) = peer(&nic, "connect", listener.local_address(), "send") else { return };
        // Nobody has to wait for those two.
        let peer = listener.accept().await.unwrap();
        assert_eq!(peer.receive().await.unwrap()[..], *b"from the peer");
        peer.receive().await.unwrap();
        finished(child).await;
        let start = Instant::now();
        while listener.failed_handshakes() < 2 {
            assert!(start.elapsed() < Duration::from_secs(5), "the silent client is not given up");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn servers_that_say_nothing_or_too_little_are_given_up(nic) {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connecting = settings(&nic).connection(|it| it.setup_timeout(Duration::from_millis(300)));
        let error = connecting.connect(silent.local_addr().unwrap()).await.map(drop).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        let short = async {
            let _first = silent.accept().await.unwrap();
            let (mut stream, _) = silent.accept().await.unwrap();
            stream.read_exact(&mut [0; 22]).await.unwrap();
            stream.write_all(b"too short").await.unwrap();
        };
        let (error, ()) = tokio::join!(settings(&nic).connect(silent.local_addr().unwrap()), short);
        let error = error.map(drop).unwrap_err();
        assert!(matches!(error, Error::Handshake { .. }), "{error}");
        // Nor are both told what their path does not carry: the guest's is 1500 bytes.
        if let Err(error) = settings(&nic).mtu(Mtu::B4096).endpoint() {
            assert!(matches!(error, Error::Limit { what: "path MTU", value: 4096, limit: 256.., .. }), "{error}");
        }
    }

    async fn rdma_cores_pingpong_plays_with_us(nic) {
        const ROUNDS: usize = 200;
        let Some(mut command) = program("TOKIO_RDMA_TEST_PINGPONG") else { return };
        let address = free_port(&nic.address);
        let arguments = format!("-d {} -g 1 -m 1024 -s 4096 -n {ROUNDS} -p {}", nic.name, address.port());
        let mut child = command.args(arguments.split(' ')).stdout(Stdio::piped()).spawn().unwrap();
        let domain = nic.domain();
        let ours = Peer::builder(&domain).mtu(Mtu::B1024).endpoint().unwrap();
        // Both ends say `lid:queue pair:sequence:gid` in hexadecimal, with a zero behind it.
        let mut stream = patiently(|| async {
            TcpStream::connect(address).await.map_err(|cause| Error::Io { operation: "", target: String::new(), cause })
        }).await;
        let Endpoint { queue_pair, lid, gid, sequence, .. } = ours.endpoint();
        let said = format!("{lid:04x}:{queue_pair:06x}:{sequence:06x}:{:032x}\0", u128::from_be_bytes(gid));
        stream.write_all(said.as_bytes()).await.unwrap();
        let mut heard = [0; 52];
        stream.read_exact(&mut heard).await.unwrap();
        stream.write_all(b"done\0").await.unwrap();
        let heard = std::str::from_utf8(&heard[..51]).unwrap();
        let [lid, number, sequence, gid] = heard.split(':').collect::<Vec<_>>()[..] else { panic!("{heard}") };
        let hex = |text| u32::from_str_radix(text, 16).unwrap();
        let gid = Ipv6Addr::from(u128::from_str_radix(gid, 16).unwrap()).octets();
        let remote = Endpoint::new(hex(number), hex(lid) as u16, gid).unwrap().with_sequence(hex(sequence)).unwrap();
        let connection = ours.connect_raw(&remote).unwrap();
        let mut ball = domain.register(pattern(1)).unwrap();
        for _ in 0..ROUNDS {
            let mut pong = connection.receive(domain.alloc(4096).unwrap());
            pong.try_post().unwrap();
            ball = connection.send(ball).await.unwrap();
            assert_eq!(pong.await.unwrap().len, 4096);
        }
        let mut printed = String::new();
        child.stdout.take().unwrap().read_to_string(&mut printed).await.unwrap();
        finished(child).await;
        assert!(printed.contains(&format!("{ROUNDS} iters")), "{printed}");
    }
}
