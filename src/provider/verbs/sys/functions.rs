// Written by `cargo xtask bindings` with bindgen from <infiniband/verbs.h> and <rdma/rdma_cma.h>; do not edit.
//
// Copyright (c) 2004, 2005 Topspin Communications.  All rights reserved.
// Copyright (c) 2004, 2011-2012 Intel Corporation.  All rights reserved.
// Copyright (c) 2005, 2006, 2007 Cisco Systems, Inc.  All rights reserved.
// Copyright (c) 2005 PathScale, Inc.  All rights reserved.
// Copyright (c) 2005 Voltaire Inc.  All rights reserved.
// Copyright (c) 2020 Intel Corporation.  All rights reserved.
//
// Of the two licences that the headers offer, this is the OpenIB.org BSD one:
//
//     Redistribution and use in source and binary forms, with or
//     without modification, are permitted provided that the following
//     conditions are met:
//
//      - Redistributions of source code must retain the above
//        copyright notice, this list of conditions and the following
//        disclaimer.
//
//      - Redistributions in binary form must reproduce the above
//        copyright notice, this list of conditions and the following
//        disclaimer in the documentation and/or other materials
//        provided with the distribution.
//
// THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND,
// EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
// MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
// NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS
// BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN
// ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
// CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
// SOFTWARE.

use super::load::library;
use super::types::*;

library! {
    /// libibverbs: devices, memory, queues.
    Verbs = "libibverbs.so.1";
    required:
    fn ibv_get_device_list(num_devices: *mut libc::c_int) -> *mut *mut ibv_device;
    fn ibv_free_device_list(list: *mut *mut ibv_device);
    fn ibv_get_device_name(device: *mut ibv_device) -> *const libc::c_char;
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    fn ibv_close_device(context: *mut ibv_context) -> libc::c_int;
    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> libc::c_int;
    fn ibv_ack_async_event(event: *mut ibv_async_event);
    fn ibv_query_device(context: *mut ibv_context, device_attr: *mut ibv_device_attr) -> libc::c_int;
    fn ibv_query_port(context: *mut ibv_context, port_num: u8,
        port_attr: *mut _compat_ibv_port_attr) -> libc::c_int;
    fn ibv_query_gid(context: *mut ibv_context, port_num: u8, index: libc::c_int, gid: *mut ibv_gid) -> libc::c_int;
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> libc::c_int;
    fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut libc::c_void, length: usize, access: libc::c_int) -> *mut ibv_mr;
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> libc::c_int;
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> libc::c_int;
    fn ibv_create_cq(context: *mut ibv_context, cqe: libc::c_int, cq_context: *mut libc::c_void,
        channel: *mut ibv_comp_channel, comp_vector: libc::c_int) -> *mut ibv_cq;
    fn ibv_resize_cq(cq: *mut ibv_cq, cqe: libc::c_int) -> libc::c_int;
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> libc::c_int;
    fn ibv_get_cq_event(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq,
        cq_context: *mut *mut libc::c_void) -> libc::c_int;
    fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: libc::c_uint);
    fn ibv_create_srq(pd: *mut ibv_pd, srq_init_attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    fn ibv_destroy_srq(srq: *mut ibv_srq) -> libc::c_int;
    fn ibv_create_qp(pd: *mut ibv_pd, qp_init_attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: libc::c_int) -> libc::c_int;
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> libc::c_int;
    fn ibv_event_type_str(event: ibv_event_type) -> *const libc::c_char;
    optional:
    fn _ibv_query_gid_ex(context: *mut ibv_context, port_num: u32, gid_index: u32, entry: *mut ibv_gid_entry,
        flags: u32, entry_size: usize) -> libc::c_int;
    fn ibv_reg_dmabuf_mr(pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: libc::c_int,
        access: libc::c_int) -> *mut ibv_mr;
}

library! {
    /// librdmacm: addresses and connections.
    Cm = "librdmacm.so.1";
    required:
    fn rdma_create_event_channel() -> *mut rdma_event_channel;
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel);
    fn rdma_create_id(channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id, context: *mut libc::c_void,
        ps: rdma_port_space) -> libc::c_int;
    fn rdma_destroy_id(id: *mut rdma_cm_id) -> libc::c_int;
    fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> libc::c_int;
    fn rdma_resolve_addr(id: *mut rdma_cm_id, src_addr: *mut sockaddr, dst_addr: *mut sockaddr,
        timeout_ms: libc::c_int) -> libc::c_int;
    fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: libc::c_int) -> libc::c_int;
    fn rdma_connect(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> libc::c_int;
    fn rdma_listen(id: *mut rdma_cm_id, backlog: libc::c_int) -> libc::c_int;
    fn rdma_accept(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> libc::c_int;
    fn rdma_reject(id: *mut rdma_cm_id, private_data: *const libc::c_void, private_data_len: u8) -> libc::c_int;
    fn rdma_disconnect(id: *mut rdma_cm_id) -> libc::c_int;
    fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> libc::c_int;
    fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> libc::c_int;
    fn rdma_init_qp_attr(id: *mut rdma_cm_id, qp_attr: *mut ibv_qp_attr,
        qp_attr_mask: *mut libc::c_int) -> libc::c_int;
    fn rdma_get_src_port(id: *mut rdma_cm_id) -> __be16;
    fn rdma_event_str(event: rdma_cm_event_type) -> *const libc::c_char;
    optional:
    fn rdma_establish(id: *mut rdma_cm_id) -> libc::c_int;
}
