//! The thread that waits for a device's events: of the device itself, and of its connections.
//!
//! It sleeps as long as there are none. It is a thread, and not a task, since a connection has to hear of its peer's end
//! in every completion mode, and whether or not a runtime still looks. It never calls into user code; it records why a
//! queue pair failed and wakes the driver of its completion queue, which does the rest.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::device::OpenDevice;
use super::sys;
use crate::affinity::pin_this_thread;
use crate::error::{CloseReason, Error, Result, WcStatus};

/// The running thread; dropping this ends it.
#[derive(Debug)]
pub(super) struct Watcher {
    thread: Option<JoinHandle<()>>,
    stop: Arc<OwnedFd>,
}

impl Watcher {
    pub(super) fn start(device: Arc<OpenDevice>, cpus: Option<Vec<usize>>) -> Result<Self> {
        let stop =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| Error::io("create", "an eventfd", error.into()))?;
        let stop = Arc::new(stop);
        let told = stop.clone();
        let thread = std::thread::Builder::new()
            .name("rdma-events".into())
            .spawn(move || {
                cpus.iter().for_each(|cpus| pin_this_thread(cpus));
                watch(&device, &told);
            })
            .map_err(|error| Error::io("start", "the thread for device events", error))?;
        Ok(Self { thread: Some(thread), stop })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // It owns no handle that a user could drop, so this is another thread. It is in `poll`, or about to be.
            let _ = thread.join();
        }
    }
}

fn watch(device: &Arc<OpenDevice>, stop: &OwnedFd) {
    let mut removed = false;
    loop {
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        // Order matters below: what is asked about last may be left out.
        if let Ok(channel) = device.channel() {
            fds.push(PollFd::from_borrowed_fd(channel.fd(), PollFlags::IN));
        }
        let asynchronous = device.async_fd();
        if !removed {
            fds.push(PollFd::new(&asynchronous, PollFlags::IN));
        }
        if poll(&mut fds, None).is_err_and(|error| error != rustix::io::Errno::INTR) {
            return;
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        // A device that was pulled out hangs up, for ever.
        let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        let hung_up = !removed && fds.last().is_some_and(|fd| fd.revents().intersects(gone));
        drop(fds);
        device.read_async_events();
        if hung_up {
            removed = true;
            device.gone();
        }
        if let Ok(channel) = device.channel() {
            while let Some((inbox, event)) = channel.next(device) {
                inbox.deliver(event);
            }
        }
    }
}

impl OpenDevice {
    /// Reads, acknowledges and handles what there is. Any thread may.
    pub(super) fn read_async_events(&self) {
        loop {
            // SAFETY: integers and pointers, of which zero is a value.
            let mut event: sys::ibv_async_event = unsafe { std::mem::zeroed() };
            // SAFETY: the context is live, and its descriptor non-blocking.
            if unsafe { (self.verbs().ibv_get_async_event)(self.raw(), &raw mut event) } != 0 {
                return;
            }
            let what = What::of(&event);
            // Before anything is done about it: destroying what the event is about waits for this.
            // SAFETY: it was read, and is acknowledged once.
            unsafe { (self.verbs().ibv_ack_async_event)(&raw mut event) };
            self.handle(what, event.event_type);
        }
    }

    fn handle(&self, what: What, kind: sys::ibv_event_type) {
        let text = self.event_name(kind);
        match what {
            What::Pair(number, reason) => {
                tracing::debug!(qp = number, event = text, "queue pair event");
                match (self.pair(number), reason) {
                    (Some(pair), Some(reason)) => pair.fail_and_tell(reason),
                    (Some(pair), None) if kind == sys::IBV_EVENT_QP_LAST_WQE_REACHED => pair.received_last(),
                    _ => {}
                }
            }
            What::Device(reason) => {
                tracing::error!(event = text, "the device failed");
                self.fail_all(&reason);
            }
            // A port that is down for a moment ends no connection; one that stays down makes the retry budget run out.
            What::Port { number, down } => {
                tracing::warn!(port = number, event = text, "port event");
                self.port_changed(number, down);
            }
            What::Other => tracing::info!(event = text, "device event"),
        }
    }

    fn event_name(&self, kind: sys::ibv_event_type) -> String {
        // SAFETY: any number is answered, with a string that lives as long as the library.
        let text = unsafe { (self.verbs().ibv_event_type_str)(kind) };
        if text.is_null() {
            return format!("event {kind}");
        }
        // SAFETY: as above.
        unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// What an asynchronous event is about.
#[derive(Debug, PartialEq, Eq)]
enum What {
    Pair(u32, Option<CloseReason>),
    Device(CloseReason),
    Port { number: u8, down: bool },
    Other,
}

impl What {
    /// Of an event that was read and not yet acknowledged: until then, what it points to lives.
    fn of(event: &sys::ibv_async_event) -> Self {
        let failed = |status| Some(CloseReason::Failed(status));
        let reason = match event.event_type {
            sys::IBV_EVENT_QP_FATAL => failed(WcStatus::Fatal),
            sys::IBV_EVENT_QP_REQ_ERR => failed(WcStatus::RemoteInvalidRequest),
            sys::IBV_EVENT_QP_ACCESS_ERR => failed(WcStatus::RemoteAccess),
            sys::IBV_EVENT_COMM_EST | sys::IBV_EVENT_SQ_DRAINED | sys::IBV_EVENT_QP_LAST_WQE_REACHED => None,
            sys::IBV_EVENT_DEVICE_FATAL => return Self::Device(CloseReason::Device("fatal device error".into())),
            sys::IBV_EVENT_CQ_ERR => return Self::Device(CloseReason::Device("a completion queue overran".into())),
            sys::IBV_EVENT_PORT_ERR | sys::IBV_EVENT_PORT_ACTIVE => {
                // SAFETY: events of these types carry a port's number.
                let number = unsafe { event.element.port_num } as u8;
                return Self::Port { number, down: event.event_type == sys::IBV_EVENT_PORT_ERR };
            }
            _ => return Self::Other,
        };
        // SAFETY: events of these types carry a queue pair, which lives until they are acknowledged.
        Self::Pair(unsafe { (*event.element.qp).qp_num }, reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_tell_whom_they_are_about() {
        // SAFETY: integers, pointers and glibc's plain pthread types, of which zero is a value.
        let (mut event, mut qp): (sys::ibv_async_event, sys::ibv_qp) = unsafe { std::mem::zeroed() };
        qp.qp_num = 17;
        event.element.qp = &raw mut qp;
        event.event_type = sys::IBV_EVENT_QP_ACCESS_ERR;
        assert_eq!(What::of(&event), What::Pair(17, Some(CloseReason::Failed(WcStatus::RemoteAccess))));
        event.event_type = sys::IBV_EVENT_COMM_EST;
        assert_eq!(What::of(&event), What::Pair(17, None));
        event.element.port_num = 1;
        // One that this version has no name for.
        event.event_type = 4711;
        assert_eq!(What::of(&event), What::Other);
        for (kind, down) in [(sys::IBV_EVENT_PORT_ERR, true), (sys::IBV_EVENT_PORT_ACTIVE, false)] {
            event.event_type = kind;
            assert_eq!(What::of(&event), What::Port { number: 1, down });
        }
        event.event_type = sys::IBV_EVENT_DEVICE_FATAL;
        assert!(matches!(What::of(&event), What::Device(_)));
    }
}
