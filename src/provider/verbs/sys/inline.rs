//! The functions that the headers define as `static inline`, and which are therefore in no library.
//!
//! Each is named as there. Only those that this crate uses.

use std::ffi::c_int;

use super::functions::Verbs;
use super::types::*;

/// `ibv_poll_cq` in `<infiniband/verbs.h>`.
///
/// # Safety
///
/// `cq` is a live completion queue, `wc` has room for `num_entries`.
pub(crate) unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: a live completion queue has a live context, whose operations the provider has set.
    unsafe {
        match (*(*cq).context).ops.poll_cq {
            Some(poll_cq) => poll_cq(cq, num_entries, wc),
            None => -libc::EOPNOTSUPP,
        }
    }
}

/// `ibv_req_notify_cq` in `<infiniband/verbs.h>`.
///
/// # Safety
///
/// `cq` is a live completion queue.
pub(crate) unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as for `ibv_poll_cq`.
    unsafe {
        match (*(*cq).context).ops.req_notify_cq {
            Some(req_notify_cq) => req_notify_cq(cq, solicited_only),
            None => libc::EOPNOTSUPP,
        }
    }
}

/// `ibv_post_send` in `<infiniband/verbs.h>`.
///
/// # Safety
///
/// `qp` is a live queue pair; `wr` is a list of work requests whose memory stays valid as the verbs ask for; `bad_wr` is writable.
pub(crate) unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: a live queue pair has a live context, whose operations the provider has set.
    unsafe {
        match (*(*qp).context).ops.post_send {
            Some(post_send) => post_send(qp, wr, bad_wr),
            None => refuse(wr, bad_wr),
        }
    }
}

/// `ibv_post_recv` in `<infiniband/verbs.h>`.
///
/// # Safety
///
/// As for [`ibv_post_send`].
pub(crate) unsafe fn ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: as for `ibv_post_send`.
    unsafe {
        match (*(*qp).context).ops.post_recv {
            Some(post_recv) => post_recv(qp, wr, bad_wr),
            None => refuse(wr, bad_wr),
        }
    }
}

/// `ibv_post_srq_recv` in `<infiniband/verbs.h>`.
///
/// # Safety
///
/// As for [`ibv_post_send`], with a live shared receive queue.
pub(crate) unsafe fn ibv_post_srq_recv(
    srq: *mut ibv_srq,
    recv_wr: *mut ibv_recv_wr,
    bad_recv_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as for `ibv_post_send`.
    unsafe {
        match (*(*srq).context).ops.post_srq_recv {
            Some(post_srq_recv) => post_srq_recv(srq, recv_wr, bad_recv_wr),
            None => refuse(recv_wr, bad_recv_wr),
        }
    }
}

/// What a provider without the operation does: takes none of the list.
///
/// # Safety
///
/// `bad_wr` is writable.
unsafe fn refuse<T>(wr: *mut T, bad_wr: *mut *mut T) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { *bad_wr = wr };
    libc::EOPNOTSUPP
}

/// `___ibv_query_port` in `<infiniband/verbs.h>`, by way of the library's symbol, which leaves out what was added last:
/// that stays zero.
///
/// # Safety
///
/// `context` is live.
pub(crate) unsafe fn ibv_query_port(
    verbs: &Verbs,
    context: *mut ibv_context,
    port_num: u8,
    port_attr: &mut ibv_port_attr,
) -> c_int {
    // SAFETY: plain integers, for which zero is a value.
    *port_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the caller's promise; the compatible structure is a prefix of this one.
    unsafe { (verbs.ibv_query_port)(context, port_num, std::ptr::from_mut(port_attr).cast()) }
}

/// `ibv_query_gid_ex` in `<infiniband/verbs.h>`; `None` where the library is older than that function.
///
/// # Safety
///
/// `context` is live.
pub(crate) unsafe fn ibv_query_gid_ex(
    verbs: &Verbs,
    context: *mut ibv_context,
    port_num: u32,
    gid_index: u32,
    entry: &mut ibv_gid_entry,
) -> Option<c_int> {
    let query = verbs._ibv_query_gid_ex?;
    // SAFETY: the caller's promise; the entry is as long as said.
    Some(unsafe { query(context, port_num, gid_index, entry, 0, size_of::<ibv_gid_entry>()) })
}
