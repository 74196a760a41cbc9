//! The two directions of a stream.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop;

use crate::stream::Shared;

/// The reading direction of an [`RdmaStream`](crate::RdmaStream); made by its [`into_split`](crate::RdmaStream::into_split).
///
/// Dropping it leaves the writing direction as it is.
#[derive(Debug)]
pub struct OwnedReadHalf {
    shared: Arc<Shared>,
}

/// The writing direction of an [`RdmaStream`](crate::RdmaStream); made by its [`into_split`](crate::RdmaStream::into_split).
///
/// Dropping it shuts this direction down: what was written still goes to the peer, and then the end.
#[derive(Debug)]
pub struct OwnedWriteHalf {
    shared: Arc<Shared>,
}

pub(super) fn halves(shared: Arc<Shared>) -> (OwnedReadHalf, OwnedWriteHalf) {
    (OwnedReadHalf { shared: shared.clone() }, OwnedWriteHalf { shared })
}

impl Drop for OwnedReadHalf {
    fn drop(&mut self) {
        let keeper = &self.shared.wakers.keeper;
        keeper.tell(&keeper.read_dropped);
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        let keeper = &self.shared.wakers.keeper;
        keeper.tell(&keeper.write_dropped);
    }
}

impl OwnedReadHalf {
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl AsyncRead for OwnedReadHalf {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if out.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let turn = ready!(coop::poll_proceed(cx));
        let Shared { wakers, engine } = &*self.shared;
        let mut read = engine.lock().read(out);
        if read.is_pending() {
            // Before the last look, so that nothing that comes after it is missed.
            wakers.reader.register(cx.waker());
            let mut engine = engine.lock();
            engine.advance_for_reader(out.remaining());
            read = engine.read(out);
        }
        if read.is_ready() {
            turn.made_progress();
        }
        read
    }
}

impl OwnedWriteHalf {
    /// Does what can be done now, or has the task woken when there is more.
    fn poll_with<T>(
        &self,
        cx: &mut Context<'_>,
        mut attempt: impl FnMut(&mut super::engine::Engine) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let turn = ready!(coop::poll_proceed(cx));
        let Shared { wakers, engine } = &*self.shared;
        let mut done = attempt(&mut engine.lock());
        if done.is_pending() {
            wakers.writer.register(cx.waker());
            let mut engine = engine.lock();
            engine.advance_for_writer();
            done = attempt(&mut engine);
        }
        if done.is_ready() {
            turn.made_progress();
        }
        done
    }
}

impl AsyncWrite for OwnedWriteHalf {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if bufs.iter().all(|buf| buf.is_empty()) {
            return Poll::Ready(self.shared.engine.lock().check_writable().map(|()| 0));
        }
        self.poll_with(cx, |engine| engine.write(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_with(cx, |engine| engine.flushed())
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.engine.lock().want_end();
        self.poll_with(cx, |engine| engine.ended())
    }
}
