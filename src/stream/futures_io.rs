//! The I/O traits of the futures crate, beside tokio's.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::io::{AsyncRead, AsyncWrite};
use tokio::io::ReadBuf;

use crate::stream::{OwnedReadHalf, OwnedWriteHalf, RdmaStream};

macro_rules! reads {
    ($($type:ty),+) => {$(
        impl AsyncRead for $type {
            fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut [u8]) -> Poll<io::Result<usize>> {
                let mut out = ReadBuf::new(out);
                ready!(tokio::io::AsyncRead::poll_read(self, cx, &mut out))?;
                Poll::Ready(Ok(out.filled().len()))
            }
        }
    )+};
}
reads!(RdmaStream, OwnedReadHalf);

macro_rules! writes {
    ($($type:ty),+) => {$(
        impl AsyncWrite for $type {
            fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
                tokio::io::AsyncWrite::poll_write(self, cx, buf)
            }

            fn poll_write_vectored(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                bufs: &[IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                tokio::io::AsyncWrite::poll_write_vectored(self, cx, bufs)
            }

            fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                tokio::io::AsyncWrite::poll_flush(self, cx)
            }

            fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                tokio::io::AsyncWrite::poll_shutdown(self, cx)
            }
        }
    )+};
}
writes!(RdmaStream, OwnedWriteHalf);

#[cfg(test)]
mod tests {
    use futures::io::{AsyncReadExt, AsyncWriteExt};

    use crate::{Device, Listener, RdmaStream};

    #[tokio::test]
    async fn both_directions_and_the_end() {
        let domain = Device::open("soft0").unwrap().alloc_pd().unwrap();
        let listener = Listener::bind(&domain, "127.0.0.1:0").await.unwrap();
        let connecting = RdmaStream::connect(&domain, listener.local_address());
        let (client, server) = tokio::join!(connecting, RdmaStream::accept(&listener));
        let (mut client, (mut read, mut write)) = (client.unwrap(), server.unwrap().into_split());
        client.write_all(b"there").await.unwrap();
        client.close().await.unwrap();
        let mut bytes = Vec::new();
        read.read_to_end(&mut bytes).await.unwrap();
        write.write_all(&bytes).await.unwrap();
        write.close().await.unwrap();
        let mut back = Vec::new();
        client.read_to_end(&mut back).await.unwrap();
        assert_eq!(back, b"there");
    }
}
