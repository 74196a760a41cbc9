//! Descriptors that go through a Unix socket, beside bytes (SCM_RIGHTS, unix(7)). Nothing here waits.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Most descriptors in one message.
pub(in super::super) const DESCRIPTORS: usize = 2;

/// Sends bytes, the first of which carries the descriptors; how many there was room for.
pub(super) fn send(socket: impl AsFd, bytes: &[u8], attached: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !attached.is_empty() && !control.push(SendAncillaryMessage::ScmRights(attached)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// Reads once: how many bytes, and what came with them. What there is no number for is lost on the way.
pub(super) fn receive(socket: impl AsFd, out: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let read = recvmsg(socket, &mut [IoSliceMut::new(out)], &mut control, flags)?;
    let mut received = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            received.extend(descriptors);
        }
    }
    Ok((read.bytes, received))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;

    #[test]
    fn descriptors_arrive_with_the_first_byte_and_are_not_inherited() {
        let (here, there) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(receive(&there, &mut [0; 4]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(send(&here, b"much", &[file.as_fd(); 16]).is_err());
        assert_eq!(send(&here, b"four", &[file.as_fd(); DESCRIPTORS]).unwrap(), 4);
        let (len, received) = receive(&there, &mut [0; 3]).unwrap();
        assert_eq!((len, received.len()), (3, DESCRIPTORS));
        assert!(received.iter().all(|fd| fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC)));
        let (len, received) = receive(&there, &mut [0; 3]).unwrap();
        assert_eq!((len, received.len()), (1, 0));
        drop(here);
        assert_eq!(receive(&there, &mut [0; 3]).unwrap().0, 0);
    }
}
