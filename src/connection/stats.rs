//! What happened on a connection.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::completion::pair::QueuePair;

/// Counters of a connection since it was made. Reading them costs nothing to the data path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionStats {
    /// Sends that completed.
    pub sends: u64,
    /// Receives that completed; not those of a shared receive queue, which belong to no connection.
    pub receives: u64,
    /// Writes that completed.
    pub writes: u64,
    /// Reads that completed.
    pub reads: u64,
    /// Atomics that completed.
    pub atomics: u64,
    /// Operations that ended in an error after they were posted.
    pub errors: u64,
    /// Payload bytes sent and written.
    pub bytes_sent: u64,
    /// Payload bytes received and read, as above.
    pub bytes_received: u64,
    /// Operations that the device holds right now, receives included.
    pub in_flight: usize,
    /// The most that the send queue ever held; never more than its depth.
    pub peak_in_flight: usize,
    /// Operations that have a slot: those in flight and those finished whose future was not polled since.
    pub live_slots: usize,
    /// Operations that wait for a slot right now.
    pub waiting: usize,
    /// Operations that had to wait for a slot.
    pub slot_waits: u64,
    /// Times that a message came while no receive was posted here. An RDMA NIC counts these per port
    /// (`hw_counters` in sysfs), so here it is 0.
    pub rnr_sent: u64,
    /// Times that the peer had no receive posted for a message of this side; 0 with an RDMA NIC, as above.
    pub rnr_received: u64,
    /// Payload bytes that a GPU copied from one GPU buffer to another: received and read, where both ends are in this process and
    /// the GPUs are one or reach each other; read and written, where the peer is another process of this host and a GPU of this one
    /// has mapped its memory (see [`direct`](Self::direct)). Other payload of GPUs that this process copies goes through its own memory.
    pub bytes_between_gpus: u64,
    /// One-sided operations of this side that were carried out directly on the peer's memory, which is mapped here
    /// ([`Link::SharedMemory`](crate::Link::SharedMemory)): by the CPU between memory of the host, and by a GPU between GPU buffers.
    /// The others go through the link's queue.
    pub direct: u64,
    /// Looks at the completion queue, which is shared with the device's other connections, as the next three are.
    pub looks: u64,
    /// Looks of the driver that found nothing while it had reason to expect something.
    pub spins: u64,
    /// Times that the driver was woken by the completion channel.
    pub wakeups: u64,
    /// Events read from the completion channel.
    pub channel_events: u64,
}

impl ConnectionStats {
    pub(super) fn of(pair: &QueuePair) -> Self {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (ops, queue, device) = (&pair.counters, &pair.queue().counters, pair.provider_counters());
        Self {
            sends: read(&ops.sends),
            receives: read(&ops.receives),
            writes: read(&ops.writes),
            reads: read(&ops.reads),
            atomics: read(&ops.atomics),
            errors: read(&ops.errors),
            bytes_sent: read(&ops.bytes_sent),
            bytes_received: read(&ops.bytes_received),
            in_flight: pair.send.in_flight() + pair.receive.in_flight(),
            peak_in_flight: pair.send.peak_in_flight(),
            live_slots: pair.send.live_slots() + pair.receive.live_slots(),
            waiting: pair.send.waiting() + pair.receive.waiting(),
            slot_waits: read(&ops.slot_waits),
            rnr_sent: device.rnr_naks_sent,
            rnr_received: device.rnr_naks_received,
            bytes_between_gpus: device.bytes_between_devices,
            direct: device.direct,
            looks: read(&queue.looks),
            spins: read(&queue.spins),
            wakeups: read(&queue.wakeups),
            channel_events: read(&queue.events),
        }
    }
}
