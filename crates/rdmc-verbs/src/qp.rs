//! A queue pair of the device itself: its states, and the work posted to it.
//!
//! The module is unsafe because it calls the device's driver with pointers to requests and their memory.

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Once, OnceLock};

use rdmc_fabric::QueuePairConfig;

use crate::completion::Cq;
use crate::connection::EXTRA_SENDS;
use crate::device::{Device, check};
use crate::endpoint::VerbsEndpoint;
use crate::fabric::VerbsConfig;
use crate::sys::{self, ibv_qp, ibv_qp_attr, ibv_recv_wr, ibv_send_wr};

/// A queue pair of the device; dropping it destroys it unless it is destroyed already.
pub(crate) struct Qp {
    pub(crate) device: Arc<Device>,
    /// Keeps the completion queue alive.
    _cq: Arc<Cq>,
    qp: NonNull<ibv_qp>,
    number: u32,
    pub(crate) inline_max: usize,
    destroyed: OnceLock<bool>,
}

// SAFETY: queue pairs of libibverbs may be used from any thread, at the same time.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    pub(crate) fn create(device: &Arc<Device>, cq: &Arc<Cq>, config: QueuePairConfig, inline: u32) -> io::Result<Self> {
        let mut wanted = sys::ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: cq.as_ptr(),
            recv_cq: cq.as_ptr(),
            srq: std::ptr::null_mut(),
            cap: sys::ibv_qp_cap {
                max_send_wr: config.send_depth.saturating_add(EXTRA_SENDS),
                max_recv_wr: config.receive_depth.max(1),
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: sys::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let mut create = || {
            // SAFETY: protection domain and completion queue live; the struct has the library's layout.
            NonNull::new(unsafe { (device.library.ibv_create_qp)(device.pd.as_ptr(), &mut wanted) })
                .ok_or_else(io::Error::last_os_error)
        };
        let (qp, inline_max) = match create() {
            Ok(qp) => (qp, wanted.cap.max_inline_data.min(inline)),
            Err(error) if inline == 0 => return Err(error),
            // Some devices send nothing inline, or only shorter messages.
            Err(error) => {
                static WARNED: Once = Once::new();
                WARNED.call_once(|| {
                    tracing::warn!(
                        inline_bytes = inline,
                        %error,
                        "the device refuses this inline length and sends nothing inline; a grant costs a registration"
                    );
                });
                return Self::create(device, cq, config, 0);
            }
        };
        let inline_max = inline_max as usize;
        // SAFETY: the object is initialised and was just made.
        let number = unsafe { qp.as_ref() }.qp_num;
        Ok(Self { device: device.clone(), _cq: cq.clone(), qp, number, inline_max, destroyed: OnceLock::new() })
    }

    /// Destroys it; nothing may be posted afterwards. Returns whether the device has released the posted work.
    pub(crate) fn destroy(&self) -> bool {
        *self.destroyed.get_or_init(|| {
            self.device.unwatch(self.address());
            // SAFETY: created by this library, destroyed once; afterwards the device touches no memory of its requests.
            let code = unsafe { (self.device.library.ibv_destroy_qp)(self.qp.as_ptr()) };
            if code != 0 {
                tracing::error!(code, "a queue pair could not be destroyed");
            }
            code == 0
        })
    }

    /// Returns the address by which the device's events name it.
    pub(crate) fn address(&self) -> usize {
        self.qp.as_ptr() as usize
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn modify(&self, state: c_int, mask: c_int, set: impl FnOnce(&mut ibv_qp_attr)) -> io::Result<()> {
        // SAFETY: all fields are numbers, for which zero is a value.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = state;
        set(&mut attributes);
        let mask = mask | sys::IBV_QP_STATE;
        // SAFETY: the queue pair lives, the struct has the library's layout.
        check(unsafe { (self.device.library.ibv_modify_qp)(self.qp.as_ptr(), &mut attributes, mask) })
    }

    /// Allows receives to be posted.
    pub(crate) fn initialise(&self) -> io::Result<()> {
        let mask = sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS;
        self.modify(sys::IBV_QPS_INIT, mask, |attributes| {
            attributes.port_num = self.device.choice.port;
            let access = sys::IBV_ACCESS_REMOTE_READ | sys::IBV_ACCESS_REMOTE_WRITE;
            attributes.qp_access_flags = access.cast_unsigned();
        })
    }

    /// Makes it ready to receive from `remote` and to send to it. Blocks while the kernel resolves the path.
    pub(crate) fn connect(
        &self,
        remote: &VerbsEndpoint,
        local: &LocalAttributes,
        config: &VerbsConfig,
    ) -> io::Result<()> {
        let choice = &self.device.choice;
        let mask = sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.modify(sys::IBV_QPS_RTR, mask, |attributes| {
            // The smaller of both: a longer packet would be lost without an error.
            attributes.path_mtu = c_int::from(remote.mtu.min(local.mtu));
            attributes.dest_qp_num = remote.qp_num;
            attributes.rq_psn = remote.psn;
            attributes.max_dest_rd_atomic = local.reads_max;
            attributes.min_rnr_timer = local.receiver_not_ready_timer;
            let path = &mut attributes.ah_attr;
            path.port_num = choice.port;
            path.sl = config.service_level;
            // InfiniBand without a local identifier, and Ethernet always, uses the global identifier.
            path.is_global = u8::from(choice.ethernet || remote.lid == 0);
            path.dlid = remote.lid;
            path.grh.dgid = [&remote.gid[..8], &remote.gid[8..]]
                .map(|half| u64::from_ne_bytes(half.try_into().expect("half of sixteen bytes")));
            path.grh.sgid_index = choice.gid.index;
            path.grh.hop_limit = HOPS_MAX;
            path.grh.traffic_class = config.traffic_class;
        })?;
        let mask = sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(sys::IBV_QPS_RTS, mask, |attributes| {
            attributes.sq_psn = local.psn;
            attributes.timeout = crate::endpoint::timeout_code(config.acknowledgement_timeout);
            attributes.retry_cnt = config.retries;
            attributes.rnr_retry = remote.receiver_not_ready_retries;
            attributes.max_rd_atomic = remote.reads_max.min(local.reads_max);
        })
    }

    /// Posts requests as a chain, with one doorbell. On failure it returns how many requests the device may have taken.
    pub(crate) fn post_send(&self, wrs: &mut [ibv_send_wr]) -> Result<(), (usize, io::Error)> {
        let post = self.device.ops.post_send.expect("every driver sends");
        let mut first = std::ptr::null_mut();
        for wr in wrs.iter_mut().rev() {
            wr.next = first;
            first = wr;
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair lives; requests and lists live during the call, which copies them; the memory they
        // name is registered and owned by the requests that the caller keeps until their completion, or copied if
        // inline.
        check(unsafe { post(self.qp.as_ptr(), first, &mut bad) }).map_err(|error| {
            // Soft-RoCE's driver names no request if all are in its queue and only the doorbell failed.
            let taken = wrs.iter().position(|wr| std::ptr::eq(wr, bad)).unwrap_or(wrs.len());
            (taken, error)
        })
    }

    pub(crate) fn post_recv(&self, wr: &mut ibv_recv_wr) -> io::Result<()> {
        let post = self.device.ops.post_recv.expect("every driver receives");
        let mut bad = std::ptr::null_mut();
        // SAFETY: as for sends.
        check(unsafe { post(self.qp.as_ptr(), wr, &mut bad) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// The attributes of this end, some of which the endpoint tells the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalAttributes {
    pub(crate) psn: u32,
    pub(crate) mtu: u8,
    pub(crate) reads_max: u8,
    pub(crate) receiver_not_ready_timer: u8,
    pub(crate) receiver_not_ready_retries: u8,
}

/// Returns an empty request to be filled in.
pub(crate) fn empty_send() -> ibv_send_wr {
    // SAFETY: all fields are numbers or raw pointers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Most routers on the path.
const HOPS_MAX: u8 = 64;
