//! The part of libibverbs that this crate uses: layouts, numbers, and the library, loaded at run time.
//!
//! The names are those of libibverbs. Its ABI has been stable since version 1.1; `sys/layout.rs` compares every
//! relevant size and offset with the installed headers. Posting and polling are functions of the device's driver. They
//! stand in a table inside the open context, where the inline functions of the headers find them too.

#![allow(non_camel_case_types, reason = "these are libibverbs' names")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// Declares structs with C layout and lists their fields' offsets for the test that compares them with the headers.
macro_rules! layouts {
    ($($(#[$meta:meta])* struct $name:ident { $($field:ident: $type:ty,)+ })+) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(crate) struct $name { $(pub(crate) $field: $type,)+ }
        )+

        /// Name, size in bytes and fields of each struct, with the offset of each field.
        #[cfg(test)]
        pub(crate) fn layouts() -> Vec<(&'static str, usize, Vec<(&'static str, usize)>)> {
            vec![$((
                stringify!($name),
                size_of::<$name>(),
                vec![$((stringify!($field), std::mem::offset_of!($name, $field)),)+],
            ),)+]
        }
    };
}

/// A device; only libibverbs reads it.
pub(crate) enum ibv_device {}
/// A protection domain.
pub(crate) enum ibv_pd {}

type Unused = Option<unsafe extern "C" fn()>;
pub(crate) type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub(crate) type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
pub(crate) type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub(crate) type PostRecv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

layouts! {
    /// The driver's functions.
    struct ibv_context_ops {
        _before: [Unused; 11],
        poll_cq: Option<PollCq>,
        req_notify_cq: Option<ReqNotifyCq>,
        _between: [Unused; 12],
        post_send: Option<PostSend>,
        post_recv: Option<PostRecv>,
        _after: [Unused; 5],
    }
    /// An open device; only the fields that this crate reads.
    struct ibv_context {
        device: *mut ibv_device,
        ops: ibv_context_ops,
        cmd_fd: c_int,
        async_fd: c_int,
    }
    /// A completion channel.
    struct ibv_comp_channel {
        context: *mut ibv_context,
        fd: c_int,
        refcnt: c_int,
    }
    /// A completion queue; only the fields that this crate reads.
    struct ibv_cq {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
    }
    /// A queue pair; only the fields that this crate reads.
    struct ibv_qp {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut c_void,
        handle: u32,
        qp_num: u32,
    }
    /// A memory region.
    struct ibv_mr {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }
    /// The limits and properties of a device.
    struct ibv_device_attr {
        fw_ver: [c_char; 64],
        node_guid: u64,
        sys_image_guid: u64,
        max_mr_size: u64,
        page_size_cap: u64,
        vendor_id: u32,
        vendor_part_id: u32,
        hw_ver: u32,
        max_qp: c_int,
        max_qp_wr: c_int,
        device_cap_flags: c_uint,
        max_sge: c_int,
        max_sge_rd: c_int,
        max_cq: c_int,
        max_cqe: c_int,
        max_mr: c_int,
        max_pd: c_int,
        max_qp_rd_atom: c_int,
        max_ee_rd_atom: c_int,
        max_res_rd_atom: c_int,
        max_qp_init_rd_atom: c_int,
        max_ee_init_rd_atom: c_int,
        atomic_cap: c_int,
        max_ee: c_int,
        max_rdd: c_int,
        max_mw: c_int,
        max_raw_ipv6_qp: c_int,
        max_raw_ethy_qp: c_int,
        max_mcast_grp: c_int,
        max_mcast_qp_attach: c_int,
        max_total_mcast_qp_attach: c_int,
        max_ah: c_int,
        max_fmr: c_int,
        max_map_per_fmr: c_int,
        max_srq: c_int,
        max_srq_wr: c_int,
        max_srq_sge: c_int,
        max_pkeys: u16,
        local_ca_ack_delay: u8,
        phys_port_cnt: u8,
    }
    /// The state of a port.
    struct ibv_port_attr {
        state: c_int,
        max_mtu: c_int,
        active_mtu: c_int,
        gid_tbl_len: c_int,
        port_cap_flags: u32,
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        active_width: u8,
        active_speed: u8,
        phys_state: u8,
        link_layer: u8,
        flags: u8,
        port_cap_flags2: u16,
    }
    /// Depths of a queue pair.
    struct ibv_qp_cap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }
    /// The attributes of a new queue pair.
    struct ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut c_void,
        cap: ibv_qp_cap,
        qp_type: c_int,
        sq_sig_all: c_int,
    }
    /// A route beyond the subnet.
    struct ibv_global_route {
        dgid: [u64; 2],
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }
    /// The path to the peer.
    struct ibv_ah_attr {
        grh: ibv_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
    }
    /// The attributes to change of a queue pair.
    struct ibv_qp_attr {
        qp_state: c_int,
        cur_qp_state: c_int,
        path_mtu: c_int,
        path_mig_state: c_int,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: ibv_qp_cap,
        ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }
    /// A range of registered memory.
    struct ibv_sge {
        addr: u64,
        length: u32,
        lkey: u32,
    }
    /// A receive to be posted.
    struct ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }
    /// A send, write or read to be posted; `remote_addr` and `rkey` are the union's branch `wr.rdma`.
    struct ibv_send_wr {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        opcode: c_int,
        send_flags: c_uint,
        imm_data: u32,
        remote_addr: u64,
        rkey: u32,
        _rest: [u64; 9],
    }
    /// A work completion.
    struct ibv_wc {
        wr_id: u64,
        status: c_int,
        opcode: c_int,
        vendor_err: u32,
        byte_len: u32,
        imm_data: u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: c_uint,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }
    /// An event of the device, not of a request; `element` is a pointer or a port number.
    struct ibv_async_event {
        element: *mut c_void,
        event_type: c_int,
    }
}

/// Declares constants and lists them for the test that compares them with the headers.
macro_rules! numbers {
    ($($name:ident = $value:expr;)+) => {
        $(pub(crate) const $name: c_int = $value;)+

        /// Name and value of each constant.
        #[cfg(test)]
        pub(crate) fn numbers() -> Vec<(&'static str, c_int)> {
            vec![$((stringify!($name), $name),)+]
        }
    };
}

numbers! {
    IBV_QPT_RC = 2;
    IBV_QPS_INIT = 1;
    IBV_QPS_RTR = 2;
    IBV_QPS_RTS = 3;
    IBV_QPS_ERR = 6;
    IBV_QP_STATE = 1;
    IBV_QP_ACCESS_FLAGS = 1 << 3;
    IBV_QP_PKEY_INDEX = 1 << 4;
    IBV_QP_PORT = 1 << 5;
    IBV_QP_AV = 1 << 7;
    IBV_QP_PATH_MTU = 1 << 8;
    IBV_QP_TIMEOUT = 1 << 9;
    IBV_QP_RETRY_CNT = 1 << 10;
    IBV_QP_RNR_RETRY = 1 << 11;
    IBV_QP_RQ_PSN = 1 << 12;
    IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13;
    IBV_QP_MIN_RNR_TIMER = 1 << 15;
    IBV_QP_SQ_PSN = 1 << 16;
    IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17;
    IBV_QP_DEST_QPN = 1 << 20;
    IBV_ACCESS_LOCAL_WRITE = 1;
    IBV_ACCESS_REMOTE_WRITE = 2;
    IBV_ACCESS_REMOTE_READ = 4;
    IBV_WR_RDMA_WRITE = 0;
    IBV_WR_RDMA_WRITE_WITH_IMM = 1;
    IBV_WR_SEND = 2;
    IBV_WR_SEND_WITH_IMM = 3;
    IBV_WR_RDMA_READ = 4;
    IBV_SEND_SIGNALED = 2;
    IBV_SEND_INLINE = 8;
    IBV_WC_RECV_RDMA_WITH_IMM = 129;
    IBV_WC_WITH_IMM = 2;
    IBV_FORK_DISABLED = 0;
    IBV_EVENT_CQ_ERR = 0;
    IBV_EVENT_QP_FATAL = 1;
    IBV_EVENT_QP_REQ_ERR = 2;
    IBV_EVENT_QP_ACCESS_ERR = 3;
    IBV_EVENT_DEVICE_FATAL = 8;
    IBV_EVENT_PORT_ACTIVE = 9;
    IBV_EVENT_PORT_ERR = 10;
}

/// Declares the exported functions and loads them by name.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)+) => {
        /// libibverbs, loaded for as long as the process lives.
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)+
        }

        impl Library {
            fn resolve(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {$(
                    // SAFETY: the name is libibverbs' and the type is that of its header, whose ABI is stable under
                    // the library's name `libibverbs.so.1`; the library is never unloaded.
                    $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?,
                )+})
            }
        }
    };
}

functions! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list: fn(*mut *mut ibv_device);
    ibv_get_device_name: fn(*mut ibv_device) -> *const c_char;
    ibv_open_device: fn(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device: fn(*mut ibv_context) -> c_int;
    ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_resize_cq: fn(*mut ibv_cq, c_int) -> c_int;
    ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
    ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut ibv_cq, c_uint);
    ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp: fn(*mut ibv_qp) -> c_int;
    ibv_get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ibv_ack_async_event: fn(*mut ibv_async_event);
    ibv_is_fork_initialized: fn() -> c_int;
    ibv_fork_init: fn() -> c_int;
}

/// Loads the library at the first call; returns the same result at every call.
///
/// # Errors
/// The dynamic linker's message.
pub(crate) fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let loaded = LIBRARY.get_or_init(|| {
        // SAFETY: libibverbs' initialisers may run in any process that links it.
        let library = unsafe { libloading::Library::new(LIBRARY_NAME) }.map_err(|error| error.to_string())?;
        let functions = Library::resolve(&library).map_err(|error| error.to_string())?;
        // Never unloaded: the drivers' threads and the functions' addresses stay valid.
        std::mem::forget(library);
        Ok(functions)
    });
    loaded.as_ref().map_err(String::as_str)
}

/// The file name of the ABI.
pub(crate) const LIBRARY_NAME: &str = "libibverbs.so.1";

#[cfg(test)]
mod layout;
