//! A key-value store whose GETs are RDMA Reads: the server's program takes no part in them.
//!
//! # Where a key is
//!
//! The server exposes one region for reading: slots of equal length, as many as a power of two. The hash of a key gives its first
//! slot and a step, and the key is in one of the first [`probes`](Shape::probes) slots of that sequence, or not in the table at all.
//! A client reads them one after the other until it finds the key, or a slot that was never used. A key that is deleted leaves a
//! mark, so that the search for others goes on behind it; no key ever moves while it is in the table.
//!
//! # Why a GET cannot return bytes that were never PUT
//!
//! A Read is not atomic: while it copies a slot, the server may be writing it. Neither is there an order to rely on. A NIC fetches
//! cache lines as the host's memory delivers them, packets are as long as the path's MTU, and the server's processor writes them in
//! whatever order its caches give them up. So a sequence number at the start and one at the end prove nothing about the middle, and a
//! lock would cost a round trip that the whole thing is there to save.
//!
//! What does hold whatever the order: a slot carries a checksum of 64 bits over everything else in it, its version included, and no
//! version is ever used twice. Each byte of a Read is one that was in memory at some time during it. If the checksum is
//! right, then all bytes are of one version (or a mixture has the same checksum by chance, 1 in 2^64); if it is not, the slot was
//! being written, and the client reads it again. A writer may be stopped in the middle, so that ends, with
//! [`StoreError::Contended`], when the time for an operation is over.
//!
//! A version that was read whole was, at some time during the Read, the newest or about to be replaced by a PUT that nobody had been
//! told of yet. An empty search is right too: keys do not move, so where a key was missed in its slot, it was not in the table at
//! that moment. PUTs and DELETEs are applied one after the other by the server, and told when they are in memory. So every operation
//! takes effect at one moment between its start and its end.
//!
//! | file | what |
//! |---|---|
//! | `shape` | sizes of a table, and where a key may be in it |
//! | `entry` | the bytes of a slot |
//! | `table` | the server's side: the region, and who writes to it |
//! | `server` | PUTs and DELETEs, by message |
//! | `client` | GETs, by Read, and asking for the others |
//! | `wire` | the messages |
//! | `error` | what can go wrong |

pub mod client;
pub mod entry;
pub mod error;
pub mod server;
pub mod shape;
pub mod table;
mod wire;

pub use client::Client;
pub use error::StoreError;
pub use server::Server;
pub use shape::Shape;
pub use table::Table;
