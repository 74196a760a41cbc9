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

use super::assert_layout::{layouts, pick};
use super::types::*;

// Size, alignment and offsets; `A | B` where x86_64 has A and aarch64 has B.
layouts! {
    ibv_gid__bindgen_ty_1: 16, 8 { subnet_prefix: 0, interface_id: 8, }
    ibv_gid: 16, 8 { raw: 0, global: 0, }
    ibv_gid_entry: 32, 8 { gid: 0, gid_index: 16, port_num: 20, gid_type: 24, ndev_ifindex: 28, }
    ibv_device_attr: 232, 8 { fw_ver: 0, node_guid: 64, sys_image_guid: 72, max_mr_size: 80, page_size_cap: 88,
        vendor_id: 96, vendor_part_id: 100, hw_ver: 104, max_qp: 108, max_qp_wr: 112, device_cap_flags: 116,
        max_sge: 120, max_sge_rd: 124, max_cq: 128, max_cqe: 132, max_mr: 136, max_pd: 140, max_qp_rd_atom: 144,
        max_ee_rd_atom: 148, max_res_rd_atom: 152, max_qp_init_rd_atom: 156, max_ee_init_rd_atom: 160,
        atomic_cap: 164, max_ee: 168, max_rdd: 172, max_mw: 176, max_raw_ipv6_qp: 180, max_raw_ethy_qp: 184,
        max_mcast_grp: 188, max_mcast_qp_attach: 192, max_total_mcast_qp_attach: 196, max_ah: 200, max_fmr: 204,
        max_map_per_fmr: 208, max_srq: 212, max_srq_wr: 216, max_srq_sge: 220, max_pkeys: 224,
        local_ca_ack_delay: 226, phys_port_cnt: 227, }
    ibv_port_attr: 52, 4 { state: 0, max_mtu: 4, active_mtu: 8, gid_tbl_len: 12, port_cap_flags: 16,
        max_msg_sz: 20, bad_pkey_cntr: 24, qkey_viol_cntr: 28, pkey_tbl_len: 32, lid: 34, sm_lid: 36, lmc: 38,
        max_vl_num: 39, sm_sl: 40, subnet_timeout: 41, init_type_reply: 42, active_width: 43, active_speed: 44,
        phys_state: 45, link_layer: 46, flags: 47, port_cap_flags2: 48, }
    ibv_async_event__bindgen_ty_1: 8, 8 { cq: 0, qp: 0, srq: 0, wq: 0, port_num: 0, }
    ibv_async_event: 16, 8 { element: 0, event_type: 8, }
    ibv_wc__bindgen_ty_1: 4, 4 { imm_data: 0, invalidated_rkey: 0, }
    ibv_wc: 48, 8 { wr_id: 0, status: 8, opcode: 12, vendor_err: 16, byte_len: 20, qp_num: 28, src_qp: 32,
        wc_flags: 36, pkey_index: 40, slid: 42, sl: 44, dlid_path_bits: 45, }
    ibv_mw_bind_info: 32, 8 { mr: 0, addr: 8, length: 16, mw_access_flags: 24, }
    ibv_pd: 16, 8 { context: 0, handle: 8, }
    ibv_mr: 48, 8 { context: 0, pd: 8, addr: 16, length: 24, handle: 32, lkey: 36, rkey: 40, }
    ibv_mw: 32, 8 { context: 0, pd: 8, rkey: 16, handle: 20, type_: 24, }
    ibv_global_route: 24, 8 { dgid: 0, flow_label: 16, sgid_index: 20, hop_limit: 21, traffic_class: 22, }
    ibv_ah_attr: 32, 8 { grh: 0, dlid: 24, sl: 26, src_path_bits: 27, static_rate: 28, is_global: 29, port_num: 30,
        }
    ibv_srq_attr: 12, 4 { max_wr: 0, max_sge: 4, srq_limit: 8, }
    ibv_srq_init_attr: 24, 8 { srq_context: 0, attr: 8, }
    ibv_qp_cap: 20, 4 { max_send_wr: 0, max_recv_wr: 4, max_send_sge: 8, max_recv_sge: 12, max_inline_data: 16, }
    ibv_qp_init_attr: 64, 8 { qp_context: 0, send_cq: 8, recv_cq: 16, srq: 24, cap: 32, qp_type: 52,
        sq_sig_all: 56, }
    ibv_qp_attr: 144, 8 { qp_state: 0, cur_qp_state: 4, path_mtu: 8, path_mig_state: 12, qkey: 16, rq_psn: 20,
        sq_psn: 24, dest_qp_num: 28, qp_access_flags: 32, cap: 36, ah_attr: 56, alt_ah_attr: 88, pkey_index: 120,
        alt_pkey_index: 122, en_sqd_async_notify: 124, sq_draining: 125, max_rd_atomic: 126,
        max_dest_rd_atomic: 127, min_rnr_timer: 128, port_num: 129, timeout: 130, retry_cnt: 131, rnr_retry: 132,
        alt_port_num: 133, alt_timeout: 134, rate_limit: 136, }
    ibv_sge: 16, 8 { addr: 0, length: 8, lkey: 12, }
    ibv_send_wr__bindgen_ty_1: 4, 4 { imm_data: 0, invalidate_rkey: 0, }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_1: 16, 8 { remote_addr: 0, rkey: 8, }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_2: 32, 8 { remote_addr: 0, compare_add: 8, swap: 16, rkey: 24, }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_3: 16, 8 { ah: 0, remote_qpn: 8, remote_qkey: 12, }
    ibv_send_wr__bindgen_ty_2: 32, 8 { rdma: 0, atomic: 0, ud: 0, }
    ibv_send_wr__bindgen_ty_3__bindgen_ty_1: 4, 4 { remote_srqn: 0, }
    ibv_send_wr__bindgen_ty_3: 4, 4 { xrc: 0, }
    ibv_send_wr__bindgen_ty_4__bindgen_ty_1: 48, 8 { mw: 0, rkey: 8, bind_info: 16, }
    ibv_send_wr__bindgen_ty_4__bindgen_ty_2: 16, 8 { hdr: 0, hdr_sz: 8, mss: 10, }
    ibv_send_wr__bindgen_ty_4: 48, 8 { bind_mw: 0, tso: 0, }
    ibv_send_wr: 128, 8 { wr_id: 0, next: 8, sg_list: 16, num_sge: 24, opcode: 28, send_flags: 32, wr: 40,
        qp_type: 72, }
    ibv_recv_wr: 32, 8 { wr_id: 0, next: 8, sg_list: 16, num_sge: 24, }
    ibv_mw_bind: 48, 8 { wr_id: 0, send_flags: 8, bind_info: 16, }
    ibv_srq: 128 | 136, 8 { context: 0, srq_context: 8, pd: 16, handle: 24, mutex: 32, cond: 72 | 80,
        events_completed: 120 | 128, }
    ibv_qp: 160 | 168, 8 { context: 0, qp_context: 8, pd: 16, send_cq: 24, recv_cq: 32, srq: 40, handle: 48,
        qp_num: 52, state: 56, qp_type: 60, mutex: 64, cond: 104 | 112, events_completed: 152 | 160, }
    ibv_comp_channel: 16, 8 { context: 0, fd: 8, refcnt: 12, }
    ibv_cq: 128 | 136, 8 { context: 0, channel: 8, cq_context: 16, handle: 24, cqe: 28, mutex: 32, cond: 72 | 80,
        comp_events_completed: 120 | 128, async_events_completed: 124 | 132, }
    ibv_ah: 24, 8 { context: 0, pd: 8, handle: 16, }
    _ibv_device_ops: 16, 8 { _dummy1: 0, _dummy2: 8, }
    ibv_device: 664, 8 { _ops: 0, node_type: 16, transport_type: 20, name: 24, dev_name: 88, dev_path: 152,
        ibdev_path: 408, }
    ibv_context_ops: 256, 8 { _compat_query_device: 0, _compat_query_port: 8, _compat_alloc_pd: 16,
        _compat_dealloc_pd: 24, _compat_reg_mr: 32, _compat_rereg_mr: 40, _compat_dereg_mr: 48, alloc_mw: 56,
        bind_mw: 64, dealloc_mw: 72, _compat_create_cq: 80, poll_cq: 88, req_notify_cq: 96, _compat_cq_event: 104,
        _compat_resize_cq: 112, _compat_destroy_cq: 120, _compat_create_srq: 128, _compat_modify_srq: 136,
        _compat_query_srq: 144, _compat_destroy_srq: 152, post_srq_recv: 160, _compat_create_qp: 168,
        _compat_query_qp: 176, _compat_modify_qp: 184, _compat_destroy_qp: 192, post_send: 200, post_recv: 208,
        _compat_create_ah: 216, _compat_destroy_ah: 224, _compat_attach_mcast: 232, _compat_detach_mcast: 240,
        _compat_async_event: 248, }
    ibv_context: 328 | 336, 8 { device: 0, ops: 8, cmd_fd: 264, async_fd: 268, num_comp_vectors: 272, mutex: 280,
        abi_compat: 320 | 328, }
    sockaddr: 16, 2 { sa_family: 0, sa_data: 2, }
    sockaddr_storage: 128, 8 { ss_family: 0, __ss_padding: 2, __ss_align: 120, }
    in_addr: 4, 4 { s_addr: 0, }
    in6_addr__bindgen_ty_1: 16, 4 { __u6_addr8: 0, __u6_addr16: 0, __u6_addr32: 0, }
    in6_addr: 16, 4 { __in6_u: 0, }
    sockaddr_in: 16, 4 { sin_family: 0, sin_port: 2, sin_addr: 4, sin_zero: 8, }
    sockaddr_in6: 28, 4 { sin6_family: 0, sin6_port: 2, sin6_flowinfo: 4, sin6_addr: 8, sin6_scope_id: 24, }
    ibv_sa_path_rec: 64, 8 { dgid: 0, sgid: 16, dlid: 32, slid: 34, raw_traffic: 36, flow_label: 40, hop_limit: 44,
        traffic_class: 45, reversible: 48, numb_path: 52, pkey: 54, sl: 56, mtu_selector: 57, mtu: 58,
        rate_selector: 59, rate: 60, packet_life_time_selector: 61, packet_life_time: 62, preference: 63, }
    rdma_ib_addr: 40, 8 { sgid: 0, dgid: 16, pkey: 32, }
    rdma_addr__bindgen_ty_1: 128, 8 { src_addr: 0, src_sin: 0, src_sin6: 0, src_storage: 0, }
    rdma_addr__bindgen_ty_2: 128, 8 { dst_addr: 0, dst_sin: 0, dst_sin6: 0, dst_storage: 0, }
    rdma_addr__bindgen_ty_3: 40, 8 { ibaddr: 0, }
    rdma_addr: 296, 8 { addr: 256, }
    rdma_route: 312, 8 { addr: 0, path_rec: 296, num_paths: 304, }
    rdma_event_channel: 4, 4 { fd: 0, }
    rdma_cm_id: 416, 8 { verbs: 0, channel: 8, context: 16, qp: 24, route: 32, ps: 344, port_num: 348, event: 352,
        send_cq_channel: 360, send_cq: 368, recv_cq_channel: 376, recv_cq: 384, srq: 392, pd: 400, qp_type: 408, }
    rdma_conn_param: 24, 8 { private_data: 0, private_data_len: 8, responder_resources: 9, initiator_depth: 10,
        flow_control: 11, retry_count: 12, rnr_retry_count: 13, srq: 14, qp_num: 16, }
    rdma_ud_param: 56, 8 { private_data: 0, private_data_len: 8, ah_attr: 16, qp_num: 48, qkey: 52, }
    rdma_cm_event__bindgen_ty_1: 56, 8 { conn: 0, ud: 0, }
    rdma_cm_event: 80, 8 { id: 0, listen_id: 8, event: 16, status: 20, param: 24, }
}
