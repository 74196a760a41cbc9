//! Two processes that wake each other through eventfds, each asleep in `epoll` meanwhile; without any runtime.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use anyhow::{Context, Result, bail, ensure};
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tokio_rdma::Address;

use super::announce;
use crate::job::{Found, Pace, Usage};
use crate::measure::{Laps, Meter};

pub fn serve(at: &Address) -> Result<Usage> {
    let listener = UnixListener::bind(path(at)?)?;
    announce(at)?;
    let (stream, _) = listener.accept()?;
    let [into, out] = receive(&stream)?;
    let end = End::new(into, out, stream)?;
    let meter = Meter::start()?;
    while end.wait()? {
        end.wake()?;
    }
    meter.read()
}

pub fn measure(pace: &Pace, at: &Address) -> Result<Found> {
    let stream = UnixStream::connect(path(at)?)?;
    let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let (there, back) = (event()?, event()?);
    send(&stream, [&there, &back])?;
    let end = End::new(back, there, stream)?;
    let mut laps = Laps::start(pace)?.of(2);
    loop {
        end.wake()?;
        ensure!(end.wait()?, "the server has gone");
        if !laps.lap()? {
            return laps.found();
        }
    }
}

const WOKEN: u64 = 0;
const GONE: u64 = 1;

struct End {
    into: OwnedFd,
    out: OwnedFd,
    epoll: OwnedFd,
    /// Closed when the process ends, which tells the other one.
    _stream: UnixStream,
}

impl End {
    fn new(into: OwnedFd, out: OwnedFd, stream: UnixStream) -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &into, epoll::EventData::new_u64(WOKEN), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &stream, epoll::EventData::new_u64(GONE), epoll::EventFlags::IN)?;
        Ok(Self { into, out, epoll, _stream: stream })
    }

    fn wake(&self) -> Result<()> {
        rustix::io::write(&self.out, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    /// `false`: the other side has ended.
    fn wait(&self) -> Result<bool> {
        let mut events = Vec::with_capacity(2);
        epoll::wait(&self.epoll, spare_capacity(&mut events), None)?;
        if events.iter().all(|event: &epoll::Event| event.data.u64() == GONE) {
            return Ok(false);
        }
        rustix::io::read(&self.into, &mut [0_u8; size_of::<u64>()])?;
        Ok(true)
    }
}

fn path(at: &Address) -> Result<&std::path::Path> {
    match at {
        Address::Unix(path) => Ok(path),
        other => bail!("{other} is no path"),
    }
}

/// Both descriptors, with a byte to carry them.
fn send(stream: &UnixStream, fds: [&OwnedFd; 2]) -> Result<()> {
    let fds = fds.map(AsFd::as_fd);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ensure!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)), "no room for two descriptors");
    rustix::net::sendmsg(stream, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::empty())?;
    Ok(())
}

fn receive(stream: &UnixStream) -> Result<[OwnedFd; 2]> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
        _ => Vec::new(),
    });
    let mut next = || fds.next().context("the client sent no descriptors");
    Ok([next()?, next()?])
}
