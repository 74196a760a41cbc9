//! Whether the two ends of a connection may talk to each other: both have proved the same pre-shared key, or neither has one.
//!
//! Each says in its hello whether it has a key, so that the absence of one is found at both ends, and named. The proof itself goes
//! over the connection, as its first messages, which works with every provider; until then no key to memory opens anything.

#[cfg(feature = "psk")]
mod exchange;
#[cfg(feature = "psk")]
mod key;
#[cfg(feature = "psk")]
mod proof;
#[cfg(all(test, feature = "psk"))]
mod tests;

#[cfg(feature = "psk")]
pub use self::key::PreSharedKey;

use std::fmt;

use crate::connection::Connection;
use crate::error::{Error, Result};

/// There is none.
#[cfg(not(feature = "psk"))]
#[derive(Clone, Debug)]
pub(super) enum PreSharedKey {}

/// Why two ends have not proved to each other that they have the same pre-shared key. Neither learns more than this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AuthenticationFailure {
    /// The peer has a pre-shared key and wants it proved; this side was given none.
    NoKeyHere,
    /// This side has a pre-shared key; the peer was given none.
    NoKeyThere,
    /// The peer's proof does not fit this side's key: it has another one, or does not know it.
    Unproved,
    /// The peer has found that this side's proof does not fit its key: the two have different ones.
    Rejected,
    /// The peer sent something else than a proof.
    NoProof,
}

impl fmt::Display for AuthenticationFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoKeyHere => "it wants a pre-shared key proved, and this side has none; set pre_shared_key",
            Self::NoKeyThere => "this side has a pre-shared key, and the peer has none",
            Self::Unproved => "its proof does not fit this side's pre-shared key",
            Self::Rejected => "this side's proof does not fit the peer's pre-shared key",
            Self::NoProof => "it sent something else than a proof of the pre-shared key",
        })
    }
}

/// The end that a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Proves first.
    Client,
    Server,
}

/// Whether this side may talk to the peer. `ours` is the private data of this side.
pub(super) async fn check(connection: &Connection, role: Role, ours: &[u8], key: Option<&PreSharedKey>) -> Result<()> {
    let theirs = &connection.inner.hello;
    match key {
        None if theirs.keyed => Err(failure(connection, AuthenticationFailure::NoKeyHere)),
        None => Ok(()),
        Some(_) if !theirs.keyed => Err(failure(connection, AuthenticationFailure::NoKeyThere)),
        #[cfg(feature = "psk")]
        Some(key) => {
            let private_data = match role {
                Role::Client => [ours, &theirs.user],
                Role::Server => [&theirs.user, ours],
            };
            exchange::prove(connection, role, &proof::Prover::new(key, private_data)).await
        }
        #[cfg(not(feature = "psk"))]
        Some(key) => {
            let _ = (role, ours);
            match *key {}
        }
    }
}

fn failure(connection: &Connection, reason: AuthenticationFailure) -> Error {
    Error::Authentication { peer: connection.peer().to_owned(), reason }
}
