//! A software NIC: reliable-connected queue pairs over stream sockets (TCP, Unix), with the rules of the hardware.
//!
//! ```text
//!   post_send ── tx: send queue ──▶ frames ──▶ sendmsg ─────▶ socket ─────▶ the peer's rx
//!                                                                             │ places payload, checks keys
//!   poll ◀── CQ ring ◀── tx: retire ◀── acknowledgements, responses ◀── tx ◀──┘ CQEs of receives
//! ```
//!
//! There is no thread between a program and its socket: posting writes, polling reads. The engine thread of a device
//! steps in only where nobody polls. Which file does what:
//!
//! | file | what |
//! |---|---|
//! | `context` | the device: protection domains, registrations, grants |
//! | `keys` | which key names which memory; revocation |
//! | `cq` | completion queues; polling makes progress |
//! | `qp` | queue pairs: `post`, `tx` (send queue, responses), `rx` (parser), `queue` (rings) |
//! | `srq` | receive queues of several queue pairs |
//! | `qp/tx` | `framing`, `writing`, and `lifting`: payload out of a device's memory |
//! | `qp/rx` | `responder`, `landing`: payload into a device's memory, and `carrying`: out of the memory of a peer in this process |
//! | `wire` | the frames |
//! | `engine`, `linger` | the thread; the last words of closed links |
//! | `handshake`, `connect`, `rendezvous` | connection setup |
//! | `near` | device memory that peers in one process copy from directly |
//! | `shm`, `wires` | the link through shared memory, in place of the socket; those of a completion queue |
//! | `faults` | fault injection |

mod connect;
mod context;
mod cq;
mod engine;
mod faults;
mod handshake;
mod keys;
mod linger;
mod near;
mod qp;
mod rendezvous;
mod shm;
mod srq;
#[cfg(test)]
mod tests;
mod wire;
mod wires;

pub(crate) use self::connect::{Acceptor, Incoming};
pub use self::context::default_limits;
pub(crate) use self::context::{Context, Grant, Mr, Pd};
pub(crate) use self::cq::Cq;
pub use self::faults::{Faults, HandshakeStep};
pub(crate) use self::qp::Qp;
pub(crate) use self::rendezvous::Rendezvous;
pub use self::shm::LinkPolicy;
pub(crate) use self::srq::Srq;
