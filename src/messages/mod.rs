//! Whole messages as streams and sinks: [`Receiver`], [`SharedReceiver`], [`Sender`].
//!
//! ```
//! use futures::{SinkExt, StreamExt};
//! use tokio_rdma::{BufferPool, Connection, Device, Listener};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tokio_rdma::Result<()> {
//! let domain = Device::open("soft0")?.alloc_pd()?;
//! let listener = Listener::bind(&domain, "127.0.0.1:0").await?;
//! let connecting = Connection::connect(&domain, listener.local_address());
//! let (client, server) = tokio::try_join!(connecting, listener.accept())?;
//!
//! let mut messages = server.receiver(8, 4096)?; // 8 receives of 4 KiB, posted from now on
//! let mut sender = client.sender(4); // 4 messages on their way at most
//! let pool = BufferPool::new(&domain, 4096, 8)?;
//! for number in 0..3 {
//!     let mut buffer = pool.get().await;
//!     buffer.fill(number);
//!     sender.send(buffer.split_to(10)?).await?;
//! }
//! for number in 0..3 {
//!     let message = messages.next().await.expect("the connection is open")?;
//!     assert_eq!(message[..], [number; 10]);
//! } // its buffer is received into again
//! # Ok(())
//! # }
//! ```

mod receiver;
mod sender;
mod shared;

pub use self::receiver::{Message, Receiver};
pub use self::sender::Sender;
pub use self::shared::SharedReceiver;
