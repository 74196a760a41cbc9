//! The messages by which two ends prove their key to each other.
//!
//! ```text
//! client                                             server
//!        ◀────────────────────────── its number ───
//!   ─── its number, the client's proof ───────────▶  lets the client in
//!   lets the server in  ◀──────── the server's proof ───
//!   ─── done ─────────────────────────────────────▶
//! ```
//!
//! The client proves first: who only asks gets nothing to try guesses on. Neither end has the connection before the
//! other one lets it in, so what its program does first is not refused. Whoever finds a proof wrong says so, and closes.

use std::time::Duration;

use super::proof::{NONCE, Nonce, PROOF, Prover};
use super::{AuthenticationFailure, Role, failure};
use crate::connection::Connection;
use crate::error::{Error, Operation, Result, WcStatus};
use crate::memory::Buffer;
use crate::op::{OpError, ReceiveOp, Received};
use crate::random;

/// Each message begins with what it is.
const CHALLENGE: u8 = 1;
const RESPONSE: u8 = 2;
const PROVED: u8 = 3;
const DONE: u8 = 4;
const REJECTED: u8 = 5;

/// How long a peer has to take the message that it is rejected, for which it has a place if it is no stranger to all this.
const FAREWELL: Duration = Duration::from_millis(200);

/// The longest, a response.
pub(super) const LONGEST: usize = 1 + NONCE + PROOF;

pub(super) async fn prove(connection: &Connection, role: Role, prover: &Prover) -> Result<()> {
    let mut talk = Talk::new(connection)?;
    match role {
        Role::Client => client(&mut talk, prover).await,
        Role::Server => server(&mut talk, prover).await,
    }
}

async fn server(talk: &mut Talk<'_>, prover: &Prover) -> Result<()> {
    let mine: Nonce = random::bytes()?;
    talk.listen()?;
    talk.say(CHALLENGE, &[&mine]).await?;
    let response: [u8; NONCE + PROOF] = talk.hear(RESPONSE).await?;
    let (theirs, proof) = split(&response);
    if !prover.check(Role::Client, &mine, &theirs, proof) {
        return talk.reject().await;
    }
    talk.admit()?;
    talk.listen()?;
    talk.say(PROVED, &[&prover.prove(Role::Server, &mine, &theirs)]).await?;
    talk.hear::<0>(DONE).await.map(drop)
}

async fn client(talk: &mut Talk<'_>, prover: &Prover) -> Result<()> {
    talk.listen()?;
    let mine: Nonce = random::bytes()?;
    let theirs: Nonce = talk.hear(CHALLENGE).await?;
    talk.listen()?;
    talk.say(RESPONSE, &[&mine, &prover.prove(Role::Client, &theirs, &mine)]).await?;
    let proof: [u8; PROOF] = talk.hear(PROVED).await?;
    if !prover.check(Role::Server, &theirs, &mine, &proof) {
        return talk.reject().await;
    }
    talk.admit()?;
    talk.say(DONE, &[]).await
}

fn split(response: &[u8; NONCE + PROOF]) -> (Nonce, &[u8]) {
    let (nonce, proof) = response.split_at(NONCE);
    let mut own = [0; NONCE];
    own.copy_from_slice(nonce);
    (own, proof)
}

/// One end's messages, of which there is one each way at a time.
struct Talk<'a> {
    connection: &'a Connection,
    /// Where the next message goes.
    buffer: Option<Buffer>,
    receive: Option<ReceiveOp<Buffer>>,
}

impl<'a> Talk<'a> {
    fn new(connection: &'a Connection) -> Result<Self> {
        Ok(Self { connection, buffer: Some(connection.domain().alloc(LONGEST)?), receive: None })
    }

    /// Before the peer is asked for a message, there is a place for it.
    fn listen(&mut self) -> Result<()> {
        if let Some(buffer) = self.buffer.take() {
            let mut receive = self.connection.receive(buffer);
            receive.try_post()?;
            self.receive = Some(receive);
        }
        Ok(())
    }

    async fn say(&self, what: u8, parts: &[&[u8]]) -> Result<()> {
        let mut message = vec![what];
        message.extend(parts.iter().copied().flatten());
        let message = self.connection.domain().register(message)?;
        self.connection.send(message).await.map(drop).map_err(|error| self.lost(error))
    }

    /// The next message, which has to be this one.
    async fn hear<const N: usize>(&mut self, what: u8) -> Result<[u8; N]> {
        let Some(receive) = self.receive.take() else { return Err(self.failure(AuthenticationFailure::NoProof)) };
        let received: Received<Buffer> = receive.await.map_err(|error| self.lost(error))?;
        let message = received.message();
        let heard = match message.split_first() {
            Some((&kind, body)) if kind == what && received.immediate.is_none() => body.try_into().ok(),
            Some((&REJECTED, [])) => return Err(self.failure(AuthenticationFailure::Rejected)),
            _ => None,
        };
        self.buffer = Some(received.buffer);
        heard.ok_or_else(|| self.failure(AuthenticationFailure::NoProof))
    }

    fn admit(&self) -> Result<()> {
        self.connection.inner.pair.admit()
    }

    /// Tells the peer that its proof is wrong, and says so.
    async fn reject(&self) -> Result<()> {
        // What counts is this side's own finding, whether or not the peer hears of it.
        let _ = tokio::time::timeout(FAREWELL, self.say(REJECTED, &[])).await;
        Err(self.failure(AuthenticationFailure::Unproved))
    }

    fn failure(&self, reason: AuthenticationFailure) -> Error {
        failure(self.connection, reason)
    }

    /// The connection has ended before there was a proof.
    fn lost(&self, error: OpError<Buffer>) -> Error {
        let too_long = WcStatus::LocalLength;
        match error.into() {
            Error::Completion { operation: Operation::Receive, status, .. } if status == too_long => {
                self.failure(AuthenticationFailure::NoProof)
            }
            error => Error::Handshake {
                step: "prove the pre-shared key",
                peer: self.connection.peer().to_owned(),
                reason: error.to_string(),
            },
        }
    }
}
