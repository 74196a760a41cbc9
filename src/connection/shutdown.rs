//! Ends in good order: of a connection, and of a listener with all that it let in.

use std::future::poll_fn;
use std::time::Duration;

use crate::completion::pair::QueuePair;
use crate::completion::table::Ticket;
use crate::connection::{Connection, Listener};
use crate::error::CloseReason;

impl Connection {
    /// Ends the connection in good order: what was posted, or waited for a slot, is carried out first; then it closes as
    /// [`close`](Self::close) does, and the peer is told. Resolves to the reason of the end, which is [`CloseReason::Local`] unless something
    /// else came first.
    ///
    /// What has not got into that line yet is not waited for: an operation whose GPU is still at work, or the rest of a
    /// [`Sender`](crate::messages::Sender), which is to be flushed first.
    ///
    /// Sends, writes, reads and atomics that start after this wait in line, and end in [`Error::Closed`](crate::Error::Closed).
    /// Receives go on until the end. What the *peer* has under way then is cut off, since nobody here can know of its requests: so the one who
    /// has had the last answer shuts down, and the other one waits for [`closed`](Self::closed).
    ///
    /// A peer that posts no receives, or does not answer, holds this up for as long as
    /// [`rnr_retry`](crate::ConnectionBuilder::rnr_retry) and [`ack_timeout`](crate::ConnectionBuilder::ack_timeout) allow. So does, without limit, an
    /// operation of this side that waits for a slot and is kept, but not polled any more: await it, or drop it first. So bound this:
    ///
    /// ```
    /// # use tokio_rdma::{CloseReason, Connection, Device, Listener};
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tokio_rdma::Result<()> {
    /// # let domain = Device::open("soft0")?.alloc_pd()?;
    /// # let listener = Listener::bind(&domain, "127.0.0.1:0").await?;
    /// # let connecting = Connection::connect(&domain, listener.local_address());
    /// # let (client, server) = tokio::try_join!(connecting, listener.accept())?;
    /// let mut last = server.receive(domain.alloc(64)?);
    /// last.try_post()?;
    /// client.send(domain.register(b"goodbye".to_vec())?).try_post()?;
    /// if tokio::time::timeout(Duration::from_secs(5), client.shutdown()).await.is_err() {
    ///     client.close().await;
    /// }
    /// assert_eq!(last.await?.message(), b"goodbye");
    /// assert_eq!(server.closed().await, CloseReason::Peer);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropping the future while operations are still under way takes it back: the connection stays open, and what waited behind goes on.
    pub async fn shutdown(&self) -> CloseReason {
        let mut line = Line { pair: &self.inner.pair, ticket: None };
        let taken = poll_fn(|cx| line.pair.send.take_all_places(&mut line.ticket, cx)).await;
        if taken.is_ok() {
            // All places are taken, so nothing was posted meanwhile, and is not before this.
            line.pair.close(CloseReason::Local);
            line.pair.send.return_places(line.pair.send.depth());
        }
        self.closed().await
    }
}

/// Leaves the line when it is dropped.
struct Line<'a> {
    pair: &'a QueuePair,
    ticket: Option<Ticket>,
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.pair.send.leave(ticket);
        }
    }
}

impl Listener {
    /// Lets nobody in any more, and frees the address as soon as the runtime gets to it. [`accept`](Self::accept) still yields the clients that
    /// were connected or about to be, and then [`Error::Closed`](crate::Error::Closed) with [`CloseReason::Local`];
    /// [`incoming`](Self::incoming) ends. Idempotent.
    pub fn stop(&self) {
        self.shared.stopped.send_replace(true);
    }

    /// Ends a service in good order: [`stop`](Self::stop)s, waits up to `grace` for every connection of this listener to end, and closes
    /// those that have not. Returns how many it had to close; 0 is the end in good order.
    ///
    /// It tells the tasks that serve the connections nothing: they end when their peers have had their answer, or when the
    /// program tells them (a `CancellationToken` of tokio-util, say) and they [`shutdown`](Connection::shutdown) their connections.
    /// Connections that nobody has accepted are closed at once.
    ///
    /// ```
    /// # use tokio_rdma::{Connection, Device, Listener};
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tokio_rdma::Result<()> {
    /// # let domain = Device::open("soft0")?.alloc_pd()?;
    /// let listener = Listener::bind(&domain, "127.0.0.1:0").await?;
    /// # let stop = async { Connection::connect(&domain, listener.local_address()).await };
    /// # tokio::pin!(stop);
    /// loop {
    ///     tokio::select! {
    ///         accepted = listener.accept() => {
    ///             let connection = accepted?;
    ///             tokio::spawn(async move {
    ///                 // ... serve it ...
    ///                 connection.shutdown().await
    ///             });
    ///         }
    ///         _ = &mut stop => break, // tokio::signal::ctrl_c(), say
    ///     }
    /// }
    /// let cut_off = listener.shutdown(Duration::from_secs(30)).await;
    /// assert_eq!(cut_off, 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, the listener stays stopped, and no connection that was accepted is closed.
    pub async fn shutdown(&self, grace: Duration) -> usize {
        self.stop();
        let good_order = async {
            self.turn_away().await;
            self.shared.open.ended().await;
        };
        if tokio::time::timeout(grace, good_order).await.is_ok() {
            return 0;
        }
        // Of the handshakes under way nobody will take the result. Those who wait to be accepted are open, so they are closed with the others,
        // even while somebody keeps the future of an `accept` that would have taken them.
        self.task.abort();
        self.shared.open.refuse();
        self.shared.open.close().await
    }

    /// Closes whoever is not accepted, until nobody more can come.
    async fn turn_away(&self) {
        while let Ok(connection) = self.accept().await {
            drop(connection);
        }
    }
}
