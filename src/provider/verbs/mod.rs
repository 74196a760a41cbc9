//! RDMA NICs, by way of libibverbs and librdmacm.
//!
//! ```text
//! device    Context ── the opened device, its events' thread      memory   Pd, Mr, Grant
//! queue     Cq with its channel                                   pair     Qp and its states; post: lists of work requests
//! srq       receive queues of several Qps
//! cm        CmId, its inbox                                       connect  Acceptor, Incoming, connecting
//! gid       which address of a port; survey: what reports ask     bare     connecting without RDMA CM: rendezvous, greeting; foreign
//! ```
//!
//! What is destroyed before what is ownership: a [`Qp`] holds its [`Cq`], [`Srq`] and [`Pd`], those hold the [`Context`].
//! Completion and connection events are counted and acknowledged, so that nothing that is destroyed waits for them.
//!
//! libibverbs and librdmacm are thread safe, which is why the handles here are `Send` and `Sync`.
#![allow(unsafe_code)]

mod bare;
mod cm;
mod connect;
mod device;
mod events;
#[cfg(feature = "async-rdma")]
mod foreign;
mod gid;
mod greeting;
mod hints;
mod memory;
mod pair;
mod post;
mod queue;
mod rendezvous;
mod srq;
mod survey;
mod sys;
mod timers;

pub(crate) use self::connect::{Acceptor, Incoming};
pub(crate) use self::device::{Context, devices};
#[cfg(feature = "async-rdma")]
pub(crate) use self::foreign::ForeignPair;
pub(crate) use self::memory::{Grant, Mr, Pd};
pub(crate) use self::pair::{Qp, Sender};
pub(crate) use self::queue::Cq;
pub(crate) use self::rendezvous::Rendezvous;
pub(crate) use self::srq::Srq;
pub(crate) use self::survey::survey;
