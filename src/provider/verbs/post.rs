//! Posting: lists of work requests, built in place.

use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use super::{hints, sys};
use crate::error::{CloseReason, Error};
use crate::provider::{PostError, PostErrorKind, ReceiveRequest, SendRequest, Sge, SgeList, WrOp};

/// Scatter/gather entries of a request that needs no list.
const FEW: usize = 4;

impl PostError {
    pub(super) fn closed(reason: CloseReason) -> Self {
        Self { accepted: 0, kind: PostErrorKind::Closed(reason) }
    }

    pub(super) fn into_error(self, operation: &'static str, target: &str) -> Error {
        match self.kind {
            PostErrorKind::Closed(reason) => Error::Closed { operation, reason },
            PostErrorKind::Full => Error::io(operation, target, std::io::ErrorKind::OutOfMemory.into()),
            PostErrorKind::System(error) => Error::io(operation, target, error),
        }
    }
}

/// The send queue of a queue pair, with room to build lists in.
///
/// Invariant: `pair` is live while it is there.
#[derive(Debug)]
pub(super) struct SendQueue {
    pair: Option<NonNull<sys::ibv_qp>>,
    list: List<sys::ibv_send_wr>,
    one: One,
}

/// The next single request, in its place: what an operation does not use keeps what an earlier one left there.
struct One {
    wr: sys::ibv_send_wr,
    entry: sys::ibv_sge,
    entries: Entries,
    /// Those of memory in several pieces.
    sges: SgeList,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Entries {
    None = 0,
    One = 1,
    List,
}

impl std::fmt::Debug for One {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("One").field("entries", &self.entries).field("sges", &self.sges.len()).finish_non_exhaustive()
    }
}

/// The receive queue of a queue pair, or one that several share; as [`SendQueue`].
pub(super) struct ReceiveQueue<T: Receives = sys::ibv_qp> {
    owner: Option<NonNull<T>>,
    list: List<sys::ibv_recv_wr>,
}

impl<T: Receives> std::fmt::Debug for ReceiveQueue<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReceiveQueue").field("open", &self.owner.is_some()).finish_non_exhaustive()
    }
}

/// What receives are posted to.
pub(super) trait Receives {
    /// # Safety
    ///
    /// As for `ibv_post_recv`.
    unsafe fn post(this: *mut Self, wr: *mut sys::ibv_recv_wr, bad: *mut *mut sys::ibv_recv_wr) -> i32;
}

impl Receives for sys::ibv_qp {
    #[inline]
    unsafe fn post(this: *mut Self, wr: *mut sys::ibv_recv_wr, bad: *mut *mut sys::ibv_recv_wr) -> i32 {
        // SAFETY: the caller's promise.
        unsafe { sys::ibv_post_recv(this, wr, bad) }
    }
}

impl Receives for sys::ibv_srq {
    #[inline]
    unsafe fn post(this: *mut Self, wr: *mut sys::ibv_recv_wr, bad: *mut *mut sys::ibv_recv_wr) -> i32 {
        // SAFETY: the caller's promise.
        unsafe { sys::ibv_post_srq_recv(this, wr, bad) }
    }
}

// SAFETY: the pointers are the verbs', which may be called from any thread; those in the lists mean something only during a call.
unsafe impl Send for SendQueue {}
// SAFETY: as above.
unsafe impl<T: Receives> Send for ReceiveQueue<T> {}

/// Work requests and their scatter/gather entries. Kept between posts, so that these do not allocate.
struct List<W> {
    requests: Vec<W>,
    entries: Vec<sys::ibv_sge>,
    /// No message, and so no part of one, is longer than this: longer entries are cut, for devices whose length field is short.
    longest: u32,
}

impl<W> std::fmt::Debug for List<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("List").field("capacity", &self.requests.capacity()).finish_non_exhaustive()
    }
}

impl<W: Request> List<W> {
    fn new(depth: usize, longest: u32) -> Self {
        Self { requests: Vec::with_capacity(depth), entries: Vec::with_capacity(depth), longest }
    }

    /// Fills the list and chains it. The pointers in it are good until the next call.
    fn build<R>(&mut self, requests: &[R], entries_of: impl Fn(&R) -> &SgeList, make: impl Fn(&R) -> W) -> *mut W {
        self.requests.clear();
        self.entries.clear();
        for request in requests {
            self.entries.extend(entries_of(request).iter().map(|entry| translate_entry(entry, self.longest)));
            self.requests.push(make(request));
        }
        // Neither vector moves any more.
        let (first, mut entry) = (self.requests.as_mut_ptr(), self.entries.as_mut_ptr());
        for (position, request) in requests.iter().enumerate() {
            let count = entries_of(request).len();
            let next = if position + 1 == requests.len() { ptr::null_mut() } else { first.wrapping_add(position + 1) };
            self.requests[position].link(next, entry, count as i32);
            entry = entry.wrapping_add(count);
        }
        first
    }

    /// How many were taken, given the first that was not.
    fn accepted(&self, bad: *mut W) -> usize {
        let first = self.requests.as_ptr() as usize;
        let position = (bad as usize).wrapping_sub(first) / size_of::<W>();
        // A provider that names none of the list is taken to have refused all of it.
        if bad.is_null() || position >= self.requests.len() { 0 } else { position }
    }
}

/// What the two kinds of work request have in common.
trait Request {
    fn link(&mut self, next: *mut Self, entries: *mut sys::ibv_sge, count: i32);
}

impl Request for sys::ibv_send_wr {
    fn link(&mut self, next: *mut Self, entries: *mut sys::ibv_sge, count: i32) {
        (self.next, self.sg_list, self.num_sge) = (next, entries, count);
    }
}

impl Request for sys::ibv_recv_wr {
    fn link(&mut self, next: *mut Self, entries: *mut sys::ibv_sge, count: i32) {
        (self.next, self.sg_list, self.num_sge) = (next, entries, count);
    }
}

impl SendQueue {
    pub(super) fn new(pair: NonNull<sys::ibv_qp>, depth: u32, longest: u32) -> Self {
        let entry = sys::ibv_sge { addr: 0, length: 0, lkey: 0 };
        let one = One { wr: blank(), entry, entries: Entries::None, sges: SgeList::new() };
        Self { pair: Some(pair), list: List::new(depth as usize, longest), one }
    }

    pub(super) fn close(&mut self) {
        self.pair = None;
    }

    /// The entry of the next single request, or that it has none.
    #[inline]
    pub(super) fn set_entry(&mut self, entry: Option<Sge>) {
        self.one.entries = if entry.is_some() { Entries::One } else { Entries::None };
        if let Some(entry) = entry {
            self.one.entry = translate_entry(&entry, self.list.longest);
        }
    }

    /// Its entries, where there may be several: an empty list to be filled.
    pub(super) fn sges(&mut self) -> &mut SgeList {
        self.one.entries = Entries::List;
        self.one.sges.clear();
        &mut self.one.sges
    }

    /// Posts one request with the entries that were set: nearly all are such, and built where they stand, without the list.
    #[inline(always)]
    pub(super) fn post_one(&mut self, wr_id: u64, fill: impl FnOnce(&mut WrOp), inline: bool) -> Result<(), PostError> {
        let one = &mut self.one;
        let Some(pair) = self.pair.filter(|_| one.entries != Entries::List) else {
            return self.post_less_simply(wr_id, fill, inline);
        };
        let mut op = WrOp::NOTHING;
        fill(&mut op);
        // At once, so that which operation it is need not be asked again.
        describe(&mut one.wr, wr_id, op, true, inline);
        let mut bad = ptr::null_mut();
        one.wr.link(ptr::null_mut(), &raw mut one.entry, one.entries as i32);
        // SAFETY: as for a list; the request has one entry at most, which is there.
        let returned = unsafe { sys::ibv_post_send(pair.as_ptr(), &raw mut one.wr, &raw mut bad) };
        posted(returned, || 0)
    }

    #[inline(never)]
    fn post_less_simply(&mut self, wr_id: u64, fill: impl FnOnce(&mut WrOp), inline: bool) -> Result<(), PostError> {
        let mut op = WrOp::NOTHING;
        fill(&mut op);
        let sges = std::mem::take(&mut self.one.sges);
        let request = SendRequest { wr_id, op, sges, signaled: true, inline };
        let posted = self.post(std::slice::from_ref(&request));
        // With the room that it has got.
        self.one.sges = request.sges;
        posted
    }

    /// Posts the list with one doorbell.
    #[inline(never)]
    pub(super) fn post(&mut self, requests: &[SendRequest]) -> Result<(), PostError> {
        let Some(pair) = self.pair else { return Err(PostError::closed(CloseReason::Local)) };
        if requests.is_empty() {
            return Ok(());
        }
        let first = self.list.build(requests, |request| &request.sges, translate);
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live by the invariant; the list is whole. Whoever posts keeps the memory that it names
        // until the completion, or until the queue pair is destroyed.
        let returned = unsafe { sys::ibv_post_send(pair.as_ptr(), first, &raw mut bad) };
        posted(returned, || self.list.accepted(bad))
    }
}

impl<T: Receives> ReceiveQueue<T> {
    pub(super) fn new(owner: NonNull<T>, longest: u32) -> Self {
        Self { owner: Some(owner), list: List::new(1, longest) }
    }

    /// What is posted to, unless it was closed.
    pub(super) fn owner(&self) -> Option<NonNull<T>> {
        self.owner
    }

    pub(super) fn close(&mut self) {
        self.owner = None;
    }

    pub(super) fn post(&mut self, requests: &[ReceiveRequest]) -> Result<(), PostError> {
        let Some(owner) = self.owner else { return Err(PostError::closed(CloseReason::Local)) };
        let mut bad = ptr::null_mut();
        match requests {
            [] => Ok(()),
            [request] if request.sges.len() <= FEW => {
                let mut entries = FewEntries::room();
                entries.fill(&request.sges, self.list.longest);
                let mut wr = translate_receive(request);
                wr.link(ptr::null_mut(), entries.first(), request.sges.len() as i32);
                // SAFETY: as for sending.
                let returned = unsafe { T::post(owner.as_ptr(), &raw mut wr, &raw mut bad) };
                posted(returned, || 0)
            }
            _ => {
                let first = self.list.build(requests, |request| &request.sges, translate_receive);
                // SAFETY: as for sending.
                let returned = unsafe { T::post(owner.as_ptr(), first, &raw mut bad) };
                posted(returned, || self.list.accepted(bad))
            }
        }
    }
}

/// The scatter/gather entries of one request.
struct FewEntries([MaybeUninit<sys::ibv_sge>; FEW]);

impl FewEntries {
    fn room() -> Self {
        Self([const { MaybeUninit::uninit() }; FEW])
    }

    /// No more than there is room for. In place: returned, all of it would be copied.
    #[inline]
    fn fill(&mut self, sges: &SgeList, longest: u32) {
        let sges = sges.as_slice();
        if let [entry] = sges {
            self.0[0].write(translate_entry(entry, longest));
            return;
        }
        for (place, entry) in self.0.iter_mut().zip(sges) {
            place.write(translate_entry(entry, longest));
        }
    }

    fn first(&mut self) -> *mut sys::ibv_sge {
        self.0.as_mut_ptr().cast()
    }
}

fn posted(returned: i32, accepted: impl FnOnce() -> usize) -> Result<(), PostError> {
    if returned == 0 {
        return Ok(());
    }
    let error = hints::error_of(returned);
    let kind = match error.raw_os_error() {
        Some(libc::ENOMEM) => PostErrorKind::Full,
        _ => PostErrorKind::System(error),
    };
    Err(PostError { accepted: accepted(), kind })
}

fn translate_entry(entry: &Sge, longest: u32) -> sys::ibv_sge {
    sys::ibv_sge {
        addr: entry.segment.address(),
        length: u32::try_from(entry.segment.len()).unwrap_or(u32::MAX).min(longest),
        lkey: entry.lkey,
    }
}

fn translate_receive(request: &ReceiveRequest) -> sys::ibv_recv_wr {
    sys::ibv_recv_wr { wr_id: request.wr_id, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 }
}

fn translate(request: &SendRequest) -> sys::ibv_send_wr {
    let mut wr = blank();
    describe(&mut wr, request.wr_id, request.op, request.signaled, request.inline);
    wr
}

fn blank() -> sys::ibv_send_wr {
    // SAFETY: integers and pointers, of which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Everything but the list and the entries.
#[inline(always)]
fn describe(wr: &mut sys::ibv_send_wr, wr_id: u64, op: WrOp, signaled: bool, inline: bool) {
    wr.wr_id = wr_id;
    wr.send_flags = if signaled { sys::IBV_SEND_SIGNALED } else { 0 };
    if inline {
        wr.send_flags |= sys::IBV_SEND_INLINE;
    }
    let with = |imm: Option<u32>, plain, immediate| if imm.is_some() { immediate } else { plain };
    match op {
        WrOp::Send { imm, .. } => {
            wr.opcode = with(imm, sys::IBV_WR_SEND, sys::IBV_WR_SEND_WITH_IMM);
            wr.__bindgen_anon_1.imm_data = imm.unwrap_or(0).to_be();
        }
        WrOp::Write { remote, imm } => {
            wr.opcode = with(imm, sys::IBV_WR_RDMA_WRITE, sys::IBV_WR_RDMA_WRITE_WITH_IMM);
            wr.__bindgen_anon_1.imm_data = imm.unwrap_or(0).to_be();
            wr.wr.rdma =
                sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: remote.address, rkey: remote.rkey };
        }
        WrOp::Read { remote } => {
            wr.opcode = sys::IBV_WR_RDMA_READ;
            wr.wr.rdma =
                sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: remote.address, rkey: remote.rkey };
        }
        WrOp::CompareSwap { remote, compare, swap } => {
            wr.opcode = sys::IBV_WR_ATOMIC_CMP_AND_SWP;
            wr.wr.atomic = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
                remote_addr: remote.address,
                compare_add: compare,
                swap,
                rkey: remote.rkey,
            };
        }
        WrOp::FetchAdd { remote, add } => {
            wr.opcode = sys::IBV_WR_ATOMIC_FETCH_AND_ADD;
            wr.wr.atomic = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
                remote_addr: remote.address,
                compare_add: add,
                swap: 0,
                rkey: remote.rkey,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::memory::dma::Segment;
    use crate::provider::RemoteAddress;

    fn sge(at: usize, len: usize, lkey: u32) -> Sge {
        Sge { segment: Segment::new(ptr::without_provenance_mut(at), len), lkey }
    }

    fn request(wr_id: u64, op: WrOp, sges: SgeList) -> SendRequest {
        SendRequest { wr_id, op, sges, signaled: true, inline: false }
    }

    #[test]
    fn a_list_is_chained_and_every_request_has_its_entries() {
        let remote = RemoteAddress { address: 0x1000, rkey: 5 };
        let requests = [
            request(1, WrOp::Send { imm: None, patience: 0 }, smallvec![sge(0x10, 1, 11), sge(0x20, 2, 12)]),
            request(2, WrOp::Read { remote }, smallvec![]),
            request(3, WrOp::FetchAdd { remote, add: 9 }, smallvec![sge(0x30, 8, 13)]),
        ];
        let mut list = List::new(1, 1 << 20);
        let mut at = list.build(&requests, |request| &request.sges, translate);
        let mut seen = Vec::new();
        while !at.is_null() {
            // SAFETY: the list is whole, which is what is tested.
            let (wr, entries) = unsafe {
                let entries = if (*at).num_sge == 0 {
                    &[]
                } else {
                    std::slice::from_raw_parts((*at).sg_list, (*at).num_sge as usize)
                };
                (&*at, entries)
            };
            let entries: Vec<_> = entries.iter().map(|entry| (entry.addr, entry.length, entry.lkey)).collect();
            seen.push((wr.wr_id, wr.opcode, entries));
            at = wr.next;
        }
        assert_eq!(
            seen,
            [
                (1, sys::IBV_WR_SEND, vec![(0x10, 1, 11), (0x20, 2, 12)]),
                (2, sys::IBV_WR_RDMA_READ, vec![]),
                (3, sys::IBV_WR_ATOMIC_FETCH_AND_ADD, vec![(0x30, 8, 13)]),
            ]
        );
        // What a refusal of the second one means.
        let second = &raw mut list.requests[1];
        assert_eq!((list.accepted(second), list.accepted(ptr::null_mut())), (1, 0));
        assert_eq!(list.accepted(ptr::without_provenance_mut(8)), 0, "not of the list");
    }

    #[test]
    fn entries_are_never_longer_than_a_message() {
        let requests = [request(1, WrOp::Send { imm: None, patience: 0 }, smallvec![sge(0x10, 5 << 30, 1)])];
        let mut list = List::new(1, 1 << 23);
        list.build(&requests, |request| &request.sges, translate);
        assert_eq!(list.entries[0].length, 1 << 23);
    }

    #[test]
    fn each_operation_has_its_code_flags_and_values() {
        let remote = RemoteAddress { address: 0x1000, rkey: 5 };
        // SAFETY: each member read is the one that was written, and all are integers.
        unsafe {
            let wr = translate(&request(1, WrOp::Write { remote, imm: Some(0x0102_0304) }, smallvec![]));
            assert_eq!(wr.opcode, sys::IBV_WR_RDMA_WRITE_WITH_IMM);
            assert_eq!(wr.__bindgen_anon_1.imm_data.to_ne_bytes(), [1, 2, 3, 4], "network byte order");
            assert_eq!((wr.wr.rdma.remote_addr, wr.wr.rdma.rkey), (0x1000, 5));
            assert_eq!(wr.send_flags, sys::IBV_SEND_SIGNALED);

            let wr = translate(&request(1, WrOp::CompareSwap { remote, compare: 7, swap: 8 }, smallvec![]));
            assert_eq!(wr.opcode, sys::IBV_WR_ATOMIC_CMP_AND_SWP);
            let atomic = wr.wr.atomic;
            assert_eq!((atomic.remote_addr, atomic.compare_add, atomic.swap, atomic.rkey), (0x1000, 7, 8, 5));
        }
        let silent = SendRequest {
            signaled: false,
            inline: true,
            ..request(1, WrOp::Send { imm: None, patience: 0 }, smallvec![])
        };
        assert_eq!(translate(&silent).send_flags, sys::IBV_SEND_INLINE);
        let immediate = request(1, WrOp::Send { imm: Some(0), patience: 0 }, smallvec![]);
        assert_eq!(translate(&immediate).opcode, sys::IBV_WR_SEND_WITH_IMM);
    }

    thread_local! {
        /// What the fake provider was given: each list of requests, as far as these tests look.
        static POSTED: std::cell::RefCell<Vec<Vec<Posted>>> = const { std::cell::RefCell::new(Vec::new()) };
    }

    #[derive(Debug, PartialEq)]
    struct Posted {
        wr_id: u64,
        opcode: u32,
        flags: u32,
        entries: Vec<(u64, u32, u32)>,
    }

    /// Takes everything but requests of the id 13.
    unsafe extern "C" fn take(
        _: *mut sys::ibv_qp,
        mut wr: *mut sys::ibv_send_wr,
        bad: *mut *mut sys::ibv_send_wr,
    ) -> std::ffi::c_int {
        let mut list = Vec::new();
        // SAFETY: a chain of requests with their entries is what is posted; `bad` is the caller's place.
        unsafe {
            while let Some(request) = wr.as_ref() {
                if request.wr_id == 13 {
                    *bad = wr;
                    return libc::ENOMEM;
                }
                let entries = std::slice::from_raw_parts(
                    if request.num_sge == 0 { NonNull::dangling().as_ptr() } else { request.sg_list },
                    request.num_sge as usize,
                );
                list.push(Posted {
                    wr_id: request.wr_id,
                    opcode: request.opcode,
                    flags: request.send_flags,
                    entries: entries.iter().map(|entry| (entry.addr, entry.length, entry.lkey)).collect(),
                });
                wr = request.next;
            }
        }
        POSTED.with_borrow_mut(|posted| posted.push(list));
        0
    }

    #[test]
    fn nothing_of_an_earlier_request_is_left_in_the_next() {
        // SAFETY: integers, pointers, optional functions, and glibc's plain pthread types: zero is a value of each.
        let (mut context, mut pair): (sys::ibv_context, sys::ibv_qp) = unsafe { std::mem::zeroed() };
        context.ops.post_send = Some(take);
        pair.context = &raw mut context;
        let mut queue = SendQueue::new(NonNull::from(&mut pair), 1, 1 << 20);
        let remote = RemoteAddress { address: 0x1000, rkey: 5 };
        let flags = sys::IBV_SEND_SIGNALED;
        let expect = |wr_id, opcode, flags, entries: &[(u64, u32, u32)]| {
            let posted = POSTED.with_borrow_mut(std::mem::take);
            assert_eq!(posted, [[Posted { wr_id, opcode, flags, entries: entries.to_vec() }]]);
        };

        queue.set_entry(Some(sge(0x10, 1, 11)));
        queue.post_one(1, |op| *op = WrOp::Write { remote, imm: Some(7) }, true).unwrap();
        expect(1, sys::IBV_WR_RDMA_WRITE_WITH_IMM, flags | sys::IBV_SEND_INLINE, &[(0x10, 1, 11)]);

        queue.set_entry(None);
        queue.post_one(2, |op| *op = WrOp::Send { imm: None, patience: 0 }, false).unwrap();
        expect(2, sys::IBV_WR_SEND, flags, &[]);

        let five: Vec<_> = (1..=5).map(|n| sge(0x100 * n, n, n as u32)).collect();
        queue.sges().extend(five.iter().copied());
        queue.post_one(3, |op| *op = WrOp::Read { remote }, false).unwrap();
        let entries = [(0x100, 1, 1), (0x200, 2, 2), (0x300, 3, 3), (0x400, 4, 4), (0x500, 5, 5)];
        expect(3, sys::IBV_WR_RDMA_READ, flags, &entries);

        queue.set_entry(Some(sge(0x20, 8, 12)));
        let refused = queue.post_one(13, |op| *op = WrOp::FetchAdd { remote, add: 1 }, false).unwrap_err();
        assert!(matches!(refused, PostError { accepted: 0, kind: PostErrorKind::Full }));

        queue.set_entry(Some(sge(0x30, 2 << 20, 14)));
        queue.post_one(4, |op| *op = WrOp::Write { remote, imm: None }, false).unwrap();
        expect(4, sys::IBV_WR_RDMA_WRITE, flags, &[(0x30, 1 << 20, 14)]);

        queue.close();
        let closed = queue.post_one(5, |op| *op = WrOp::Read { remote }, false).unwrap_err();
        assert!(matches!(closed.kind, PostErrorKind::Closed(_)));
        assert!(POSTED.with_borrow(Vec::is_empty));
    }

    #[test]
    fn a_full_queue_is_told_apart() {
        assert!(matches!(posted(libc::ENOMEM, || 3), Err(PostError { accepted: 3, kind: PostErrorKind::Full })));
        assert!(matches!(posted(-libc::ENOMEM, || 0), Err(PostError { kind: PostErrorKind::Full, .. })));
        assert!(matches!(posted(libc::EINVAL, || 0), Err(PostError { kind: PostErrorKind::System(_), .. })));
    }
}
