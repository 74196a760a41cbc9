//! RDMA CM: its event channel and its ids.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use tokio::sync::Notify;

use super::device::OpenDevice;
use super::pair::PairState;
use super::{hints, sys};
use crate::error::{CloseReason, Error, Result};
use crate::sync::Mutex;

/// The channel that carries the events of all of a device's ids.
///
/// Invariant: `raw` is live and non-blocking; ids that use it hold the device, which holds this.
pub(super) struct EventChannel {
    raw: NonNull<sys::rdma_event_channel>,
    cm: &'static sys::Cm,
}

// SAFETY: librdmacm may be called from any thread.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

/// What happened to an id.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) kind: sys::rdma_cm_event_type,
    pub(super) status: i32,
    pub(super) parameters: Parameters,
    /// The id of a connection request.
    pub(super) request: Option<CmId>,
}

/// What the peer sent along.
#[derive(Debug, Default)]
pub(super) struct Parameters {
    pub(super) private_data: Vec<u8>,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
}

impl EventChannel {
    pub(super) fn new() -> Result<Self, String> {
        let cm = sys::Cm::get().map_err(ToString::to_string)?;
        // SAFETY: no arguments.
        let raw = unsafe { (cm.rdma_create_event_channel)() };
        let Some(raw) = NonNull::new(raw) else {
            let error = std::io::Error::last_os_error();
            return Err(format!("no event channel: {error} (is the kernel module rdma_ucm loaded?)"));
        };
        let this = Self { raw, cm };
        rustix::io::ioctl_fionbio(this.fd(), true).map_err(|error| error.to_string())?;
        Ok(this)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is live, and with it its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }

    /// The next event, read and acknowledged, and whom to give it to. Called by the device's thread only.
    pub(super) fn next(&self, device: &Arc<OpenDevice>) -> Option<(Arc<Inbox>, Event)> {
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is live; the event goes to a place of ours.
        if unsafe { (self.cm.rdma_get_cm_event)(self.raw.as_ptr(), &raw mut raw) } != 0 {
            return None;
        }
        // SAFETY: an event that was read is live until it is acknowledged, and so are its ids. Their context is the
        // inbox that `CmId` keeps until after the id is destroyed, which waits for that acknowledgement.
        unsafe {
            let event = &*raw;
            let is_request = event.event == sys::RDMA_CM_EVENT_CONNECT_REQUEST;
            let id = if is_request { event.listen_id } else { event.id };
            let inbox = (*id).context.cast_const().cast::<Inbox>();
            Arc::increment_strong_count(inbox);
            let inbox = Arc::from_raw(inbox);
            // A new id begins with its listener's context. It gets its own before its next event is read, here.
            let request = is_request.then(|| CmId::adopt(event.id, self.cm, device));
            let event = Event { kind: event.event, status: event.status, parameters: Parameters::of(event), request };
            (self.cm.rdma_ack_cm_event)(raw);
            Some((inbox, event))
        }
    }

    pub(super) fn name_of(&self, kind: sys::rdma_cm_event_type) -> String {
        // SAFETY: any number is answered, with a string that lives as long as the library.
        let text = unsafe { (self.cm.rdma_event_str)(kind) };
        if text.is_null() {
            return format!("event {kind}");
        }
        // SAFETY: as above.
        unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: live by the invariant; the ids are gone.
        unsafe { (self.cm.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

impl Parameters {
    /// # Safety
    ///
    /// The event was read and not acknowledged.
    unsafe fn of(event: &sys::rdma_cm_event) -> Self {
        let has_parameters = matches!(
            event.event,
            sys::RDMA_CM_EVENT_CONNECT_REQUEST
                | sys::RDMA_CM_EVENT_CONNECT_RESPONSE
                | sys::RDMA_CM_EVENT_ESTABLISHED
                | sys::RDMA_CM_EVENT_REJECTED
        );
        if !has_parameters {
            return Self::default();
        }
        // SAFETY: events of these types carry connection parameters, and their private data is as long as said.
        unsafe {
            let connection = &event.param.conn;
            let (data, len) = (connection.private_data.cast::<u8>(), usize::from(connection.private_data_len));
            let private_data = if data.is_null() { Vec::new() } else { std::slice::from_raw_parts(data, len).to_vec() };
            Self {
                private_data,
                responder_resources: connection.responder_resources,
                initiator_depth: connection.initiator_depth,
            }
        }
    }
}

/// Where an id's events arrive.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    state: Mutex<State>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    /// Once set up, the events concern the queue pair.
    pair: Option<Arc<PairState>>,
}

/// Requests that may wait for a listener. The kernel has a limit too, but only for those that were not read yet.
const MOST_REQUESTS: usize = 128;

impl Inbox {
    /// Called by the device's thread.
    pub(super) fn deliver(&self, event: Event) {
        let mut state = self.state.lock();
        if let Some(pair) = &state.pair {
            let pair = pair.clone();
            drop(state);
            pair.heard(&event);
            return;
        }
        if event.request.is_some() && state.events.len() >= MOST_REQUESTS {
            // Dropping it refuses the request, as a full backlog does.
            drop(state);
            return;
        }
        state.events.push_back(event);
        drop(state);
        self.arrived.notify_one();
    }

    /// The next event. One waits at a time. Cancel safe.
    pub(super) async fn next(&self) -> Event {
        loop {
            let event = self.state.lock().events.pop_front();
            match event {
                Some(event) => return event,
                None => self.arrived.notified().await,
            }
        }
    }

    /// From now on, and for what came already, the queue pair is told.
    pub(super) fn belongs_to(&self, pair: &Arc<PairState>) {
        let mut state = self.state.lock();
        state.pair = Some(pair.clone());
        let early = std::mem::take(&mut state.events);
        drop(state);
        for event in early {
            pair.heard(&event);
        }
    }
}

impl PairState {
    /// An event of the connection.
    fn heard(&self, event: &Event) {
        let reason = match event.kind {
            // A peer that ends before it has seen the connection established rejects it instead.
            sys::RDMA_CM_EVENT_DISCONNECTED | sys::RDMA_CM_EVENT_REJECTED | sys::RDMA_CM_EVENT_TIMEWAIT_EXIT => {
                CloseReason::Peer
            }
            sys::RDMA_CM_EVENT_UNREACHABLE | sys::RDMA_CM_EVENT_CONNECT_ERROR => {
                CloseReason::LinkLost("RDMA CM lost the connection".into())
            }
            sys::RDMA_CM_EVENT_DEVICE_REMOVAL => CloseReason::Device("it was removed".into()),
            // The address moved to another device; this one goes on, or its retries run out.
            _ => return,
        };
        self.fail_and_tell(reason);
    }
}

/// An id: one end of a connection, or a listener.
///
/// Invariant: `raw` is live, its context is `inbox`, and its queue pair is not librdmacm's business.
#[derive(Debug)]
pub(super) struct CmId {
    raw: NonNull<sys::rdma_cm_id>,
    cm: &'static sys::Cm,
    // Field order: the id is destroyed (in `drop`) before its inbox goes, and that before the device with the channel.
    inbox: Arc<Inbox>,
    device: Arc<OpenDevice>,
}

// SAFETY: librdmacm may be called from any thread.
unsafe impl Send for CmId {}
// SAFETY: as above; what is read from behind `raw` changes only while an event is taken that somebody waits for.
unsafe impl Sync for CmId {}

impl CmId {
    pub(super) fn new(device: &Arc<OpenDevice>) -> Result<Self> {
        let channel = device.channel()?;
        let inbox = Arc::<Inbox>::default();
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is live; the inbox is kept for as long as the id.
        let returned = unsafe {
            let context = Arc::as_ptr(&inbox).cast_mut().cast();
            (channel.cm.rdma_create_id)(channel.raw.as_ptr(), &raw mut raw, context, sys::RDMA_PS_TCP)
        };
        match NonNull::new(raw) {
            Some(raw) if returned == 0 => Ok(Self { raw, cm: channel.cm, inbox, device: device.clone() }),
            _ => Err(hints::last("create", "an RDMA CM id")),
        }
    }

    /// # Safety
    ///
    /// `raw` is the id of a connection request that was read and not acknowledged.
    unsafe fn adopt(raw: *mut sys::rdma_cm_id, cm: &'static sys::Cm, device: &Arc<OpenDevice>) -> Self {
        let inbox = Arc::<Inbox>::default();
        // SAFETY: the caller's promise.
        unsafe {
            (*raw).context = Arc::as_ptr(&inbox).cast_mut().cast();
            Self { raw: NonNull::new_unchecked(raw), cm, inbox, device: device.clone() }
        }
    }

    pub(super) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    pub(super) fn raw(&self) -> *mut sys::rdma_cm_id {
        self.raw.as_ptr()
    }

    pub(super) fn cm(&self) -> &'static sys::Cm {
        self.cm
    }

    /// The name of the event, for errors.
    pub(super) fn name_of(&self, kind: sys::rdma_cm_event_type) -> String {
        self.device.channel().map_or_else(|_| format!("event {kind}"), |channel| channel.name_of(kind))
    }

    pub(super) fn bind(&self, address: SocketAddr) -> std::io::Result<()> {
        let mut address = Socket::from(address);
        // SAFETY: the id is live; the address is only read.
        succeeded(unsafe { (self.cm.rdma_bind_addr)(self.raw(), address.as_mut_ptr()) })
    }

    pub(super) fn listen(&self, backlog: i32) -> std::io::Result<()> {
        // SAFETY: the id is live.
        succeeded(unsafe { (self.cm.rdma_listen)(self.raw(), backlog) })
    }

    pub(super) fn resolve_address(&self, from: Option<IpAddr>, to: SocketAddr, millis: i32) -> std::io::Result<()> {
        let mut to = Socket::from(to);
        let mut from = from.map(|ip| Socket::from(SocketAddr::new(ip, 0)));
        let from = from.as_mut().map_or(ptr::null_mut(), Socket::as_mut_ptr);
        // SAFETY: the id is live; the addresses are only read.
        succeeded(unsafe { (self.cm.rdma_resolve_addr)(self.raw(), from, to.as_mut_ptr(), millis) })
    }

    pub(super) fn resolve_route(&self, millis: i32) -> std::io::Result<()> {
        // SAFETY: the id is live.
        succeeded(unsafe { (self.cm.rdma_resolve_route)(self.raw(), millis) })
    }

    pub(super) fn connect(&self, parameters: &mut sys::rdma_conn_param) -> std::io::Result<()> {
        // SAFETY: the id is live; the parameters are only read.
        succeeded(unsafe { (self.cm.rdma_connect)(self.raw(), parameters) })
    }

    pub(super) fn accept(&self, parameters: &mut sys::rdma_conn_param) -> std::io::Result<()> {
        // SAFETY: as above.
        succeeded(unsafe { (self.cm.rdma_accept)(self.raw(), parameters) })
    }

    /// The active side's last step, where the queue pair is not librdmacm's.
    pub(super) fn establish(&self) -> std::io::Result<()> {
        let Some(establish) = self.cm.rdma_establish else {
            let why = "librdmacm is older than rdma-core 21: it has no rdma_establish";
            return Err(std::io::Error::new(std::io::ErrorKind::Unsupported, why));
        };
        // SAFETY: the id is live.
        succeeded(unsafe { establish(self.raw()) })
    }

    pub(super) fn reject(&self, reason: &str) {
        // rdma_reject(3): at most 148 bytes.
        let reason = &reason.as_bytes()[..reason.len().min(148)];
        // SAFETY: the id is live; the reason is only read.
        unsafe { (self.cm.rdma_reject)(self.raw(), reason.as_ptr().cast(), reason.len() as u8) };
    }

    /// Tells the peer; that the connection is over already is no error.
    pub(super) fn disconnect(&self) {
        // SAFETY: the id is live.
        unsafe { (self.cm.rdma_disconnect)(self.raw()) };
    }

    /// Whether the id was bound to this device, once it is bound to one at all.
    pub(super) fn is_on_device(&self) -> Option<bool> {
        // SAFETY: the id is live; its context, once set, is librdmacm's, which keeps it open.
        unsafe {
            let verbs = (*self.raw()).verbs;
            (!verbs.is_null()).then(|| self.device.is(verbs))
        }
    }

    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: the id is live, and every view of the union is plain bytes.
        from_storage(unsafe { &(*self.raw()).route.addr.__bindgen_anon_1.src_storage })
    }

    pub(super) fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        from_storage(unsafe { &(*self.raw()).route.addr.__bindgen_anon_2.dst_storage })
    }

    pub(super) fn local_port(&self) -> u16 {
        // SAFETY: the id is live.
        u16::from_be(unsafe { (self.cm.rdma_get_src_port)(self.raw()) })
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // Waits for events of this id that were read and not acknowledged; the thread that reads acknowledges at once.
        // SAFETY: live by the invariant. If this is that thread, it has acknowledged what it read.
        if unsafe { (self.cm.rdma_destroy_id)(self.raw()) } != 0 {
            tracing::error!(error = %std::io::Error::last_os_error(), "an RDMA CM id could not be destroyed");
        }
    }
}

fn succeeded(returned: i32) -> std::io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(hints::error_of(returned)) }
}

/// A socket address as C has it.
struct Socket(sys::sockaddr_storage);

impl Socket {
    fn as_mut_ptr(&mut self) -> *mut sys::sockaddr {
        (&raw mut self.0).cast()
    }
}

impl From<SocketAddr> for Socket {
    fn from(address: SocketAddr) -> Self {
        // SAFETY: bytes, of which zero is a value.
        let mut storage: sys::sockaddr_storage = unsafe { std::mem::zeroed() };
        let place = &raw mut storage;
        // SAFETY: the storage is large enough and aligned for every kind of address.
        unsafe {
            match address {
                SocketAddr::V4(v4) => place.cast::<sys::sockaddr_in>().write(sys::sockaddr_in {
                    sin_family: libc::AF_INET as sys::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: sys::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                }),
                SocketAddr::V6(v6) => place.cast::<sys::sockaddr_in6>().write(sys::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as sys::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: sys::in6_addr { __in6_u: sys::in6_addr__bindgen_ty_1 { __u6_addr8: v6.ip().octets() } },
                    sin6_scope_id: v6.scope_id(),
                }),
            }
        }
        Self(storage)
    }
}

fn from_storage(storage: &sys::sockaddr_storage) -> Option<SocketAddr> {
    let place = std::ptr::from_ref(storage);
    // SAFETY: the storage is large enough and aligned for every kind of address, and all of them are plain integers.
    unsafe {
        match i32::from(storage.ss_family) {
            libc::AF_INET => {
                let v4 = &*place.cast::<sys::sockaddr_in>();
                Some((v4.sin_addr.s_addr.to_ne_bytes(), u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                let v6 = &*place.cast::<sys::sockaddr_in6>();
                let ip = v6.sin6_addr.__in6_u.__u6_addr8.into();
                let (port, flow) = (u16::from_be(v6.sin6_port), v6.sin6_flowinfo);
                Some(std::net::SocketAddrV6::new(ip, port, flow, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// The error of a step that ended with another event than it waited for.
pub(super) fn unexpected(id: &CmId, event: &Event, step: &'static str, peer: &str) -> Error {
    let mut reason = id.name_of(event.kind);
    if event.status < 0 {
        reason = format!("{reason}: {}", std::io::Error::from_raw_os_error(-event.status));
    } else if event.status > 0 {
        reason = format!("{reason} (status {})", event.status);
    }
    Error::Handshake { step, peer: peer.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_trip_to_c_and_back() {
        for text in ["10.1.2.3:7471", "[fe80::1%3]:1", "[2001:db8::7]:65535"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_storage(&Socket::from(address).0), Some(address));
        }
        // SAFETY: bytes, of which zero is a value.
        assert_eq!(from_storage(&unsafe { std::mem::zeroed() }), None);
    }
}
