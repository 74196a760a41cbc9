//! Byte streams over connections: [`RdmaStream`].

mod credits;
mod engine;
mod failure;
#[cfg(feature = "futures-io")]
mod futures_io;
mod halves;
mod inbox;
mod keeper;
mod outbox;
mod settings;
mod wakers;
mod wire;

pub use self::halves::{OwnedReadHalf, OwnedWriteHalf};
pub use self::settings::StreamBuilder;

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use self::engine::Engine;
use self::settings::StreamSettings;
use self::wakers::Wakers;
use crate::address::IntoAddress;
use crate::connection::{Connection, Listener};
use crate::error::Result;
use crate::memory::ProtectionDomain;
use crate::sync::Mutex;

/// A connection as a stream of bytes in both directions, for what runs over a `TcpStream`: hyper, tonic, codecs, `tokio::io::copy`.
///
/// Both ends have to be streams. Bytes are copied once at each end, between the program's memory and registered buffers, and
/// nothing is allocated for a read or a write. To save the copies, use the operations of [`Connection`] on buffers.
///
/// ```
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// use tokio_rdma::{Device, Listener, RdmaStream};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let domain = Device::open("soft0")?.alloc_pd()?;
/// let listener = Listener::bind(&domain, "127.0.0.1:0").await?;
/// let connecting = RdmaStream::connect(&domain, listener.local_address());
/// let (mut client, mut server) = tokio::try_join!(connecting, RdmaStream::accept(&listener))?;
///
/// client.write_all(b"hello").await?;
/// client.shutdown().await?; // the end of this direction
///
/// let mut request = String::new();
/// server.read_to_string(&mut request).await?;
/// server.write_all(request.to_uppercase().as_bytes()).await?;
/// server.shutdown().await?;
///
/// let mut answer = String::new();
/// client.read_to_string(&mut answer).await?;
/// assert_eq!(answer, "HELLO");
/// # Ok(())
/// # }
/// ```
///
/// # Writing and flushing
///
/// A write returns when its bytes are copied, and they are sent at once unless credits are lacking: then they are sent, together with
/// what is written meanwhile, as soon as the peer gives credits, whether anybody polls the stream or not. `poll_flush` resolves
/// when everything is handed to the device, which needs the peer's credits; there is no need to flush.
///
/// # Writing without reading
///
/// A peer may send as many messages as it has credits for, one for each [receive slot](StreamBuilder::receive_slots).
/// When those are used up and the program does not read, the stream takes up to [`receive_limit`](StreamBuilder::receive_limit)
/// bytes (16 MiB by default) out of the slots, whatever the program is doing, as long as its runtime runs. So two ends that both write
/// before they read do not wait for each other if neither writes more than that; beyond it a writer waits until the peer reads.
/// While there is a reader, a slow one included that comes back within a millisecond, nothing is copied twice.
///
/// # The end
///
/// `shutdown` ends the writing direction: it resolves when the peer has everything, and the peer reads the end of the file behind it.
/// The other direction goes on. A stream that is dropped does the same in the background for up to
/// [`linger`](StreamBuilder::linger) (as long as the runtime runs), and then ends the connection.
///
/// # Errors
///
/// A peer that is gone without having said the end is no end of file: after the bytes that had arrived, reading fails, as writing does, with
/// [`ConnectionReset`](io::ErrorKind::ConnectionReset); with [`TimedOut`](io::ErrorKind::TimedOut) when it stopped answering;
/// with [`InvalidData`](io::ErrorKind::InvalidData) when it is no stream. [`io::Error::get_ref`] has the crate's
/// [`Error`](crate::Error). Writing after `shutdown` fails with [`BrokenPipe`](io::ErrorKind::BrokenPipe).
///
/// # Cancel safety
///
/// As of a `TcpStream`: a future of `read` or `write` that is dropped before it resolves has read or written nothing.
/// `write_all`, `read_exact` and the like may have done a part, as they document. A `shutdown` that was begun takes place in any case.
pub struct RdmaStream {
    read: OwnedReadHalf,
    write: OwnedWriteHalf,
}

/// What the halves and the task of a stream share.
#[derive(Debug)]
pub(crate) struct Shared {
    wakers: Arc<Wakers>,
    engine: Mutex<Engine>,
}

impl RdmaStream {
    /// Connects to a listener whose program makes streams of its connections.
    ///
    /// # Errors
    ///
    /// As [`Connection::connect`] and [`from_connection`](Self::from_connection).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future abandons the attempt and leaves nothing behind.
    pub async fn connect(domain: &ProtectionDomain, address: impl IntoAddress) -> Result<Self> {
        Self::builder().connect(domain, address).await
    }

    /// The listener's next connection, as a stream.
    ///
    /// # Errors
    ///
    /// As [`Listener::accept`] and [`from_connection`](Self::from_connection): the latter, [`Error::Closed`](crate::Error::Closed)
    /// for example, is about that one client.
    ///
    /// # Cancel safety
    ///
    /// No connection is lost when the future is dropped.
    pub async fn accept(listener: &Listener) -> Result<Self> {
        Self::from_connection(listener.accept().await?)
    }

    /// Makes a stream of a connection on which nothing was received or sent yet. The peer does the same, at any time.
    ///
    /// The stream has all receives of the connection, and ends it when it is dropped. A clone of it can still be used for one-sided
    /// operations.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`](crate::Error::Limit) when the connection has not enough receives, or there is no memory to be registered;
    /// [`Error::Closed`](crate::Error::Closed) when it has ended; [`Error::Invalid`](crate::Error::Invalid) outside of a tokio runtime.
    pub fn from_connection(connection: Connection) -> Result<Self> {
        Self::builder().from_connection(connection)
    }

    /// Settings for a stream.
    pub fn builder() -> StreamBuilder {
        StreamBuilder::new()
    }

    fn start(connection: Connection, settings: &StreamSettings) -> Result<Self> {
        let runtime = keeper::runtime()?;
        let wakers = Arc::<Wakers>::default();
        let engine = Mutex::new(Engine::new(connection, settings, wakers.clone())?);
        let shared = Arc::new(Shared { wakers, engine });
        keeper::spawn(&runtime, shared.clone(), settings.linger);
        let (read, write) = halves::halves(shared);
        Ok(Self { read, write })
    }

    /// The two directions, for two tasks. [`tokio::io::split`] works as well; these tell the peer when the writing one is dropped.
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        (self.read, self.write)
    }

    /// The connection underneath: its peer, its statistics, why it ended.
    pub fn connection(&self) -> Connection {
        self.read.shared().engine.lock().connection().clone()
    }
}

impl fmt::Debug for RdmaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaStream").field("connection", &self.connection()).finish_non_exhaustive()
    }
}

impl AsyncRead for RdmaStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.read).poll_read(cx, out)
    }
}

impl AsyncWrite for RdmaStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.write).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.write).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_shutdown(cx)
    }
}
