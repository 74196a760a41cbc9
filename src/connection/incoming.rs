//! A listener's connections as a stream.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::stream::Stream;

use crate::connection::{Connection, Listener};
use crate::error::{CloseReason, Error, Result};

/// The connections of a [`Listener`]; made by [`Listener::incoming`]. Dropping it stops listening.
///
/// # Cancel safety
///
/// No connection is lost when a future of `next` is dropped.
#[derive(Debug)]
pub struct Incoming {
    listener: Listener,
    ended: bool,
}

impl Listener {
    /// The listener's connections as a [`Stream`], for what takes one, as servers of tonic do. It goes on until it is dropped, or ends after
    /// [`stop`](Listener::stop); [`Error::Closed`] is its last item when the runtime of [`bind`](Listener::bind) is gone.
    pub fn incoming(self) -> Incoming {
        Incoming { listener: self, ended: false }
    }
}

impl Incoming {
    /// The listener: its address, its counters.
    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// The listener, to accept from.
    pub fn into_listener(self) -> Listener {
        self.listener
    }
}

impl Stream for Incoming {
    type Item = Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.listener.poll_accept(cx).map(|accepted| {
            self.ended = accepted.is_err();
            match accepted {
                Err(Error::Closed { reason: CloseReason::Local, .. }) => None,
                accepted => Some(accepted),
            }
        })
    }
}
