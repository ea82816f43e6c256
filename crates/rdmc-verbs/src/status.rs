//! The statuses of a device's completions, as typed errors.

use rdmc_fabric::{Opcode, WorkError};

/// Translates the status of a failed completion; `room` is the length of the request's memory.
pub(crate) fn work_error(status: i32, vendor: u32, opcode: Opcode, room: usize) -> WorkError {
    let known = usize::try_from(status).ok().and_then(|status| STATUSES.get(status));
    let Some(&(_, name)) = known else { return WorkError::Device { status: "unknown status", vendor } };
    match (status, opcode) {
        // Soft-RoCE reports a message that does not fit to the receiver with other statuses. It uses the sender's
        // status. If there is no room at all, it reports a malformed receive, and the sender gets a failed operation.
        (1 | 2 | 9, Opcode::Receive) => WorkError::LocalLength { got: None, room: room as u64 },
        (4, _) | (8, _) => WorkError::LocalProtection,
        (5, _) => WorkError::Flushed,
        (7, _) => WorkError::Protocol,
        (9 | 11, _) => WorkError::RemoteInvalidRequest,
        (10, _) => WorkError::RemoteAccess,
        (12, _) => WorkError::ConnectionLost,
        (13, _) => WorkError::ReceiverNotReady,
        _ => WorkError::Device { status: name, vendor },
    }
}

/// The statuses of libibverbs in their order, with a text for each.
pub(crate) const STATUSES: [(&str, &str); 24] = [
    ("IBV_WC_SUCCESS", "success"),
    ("IBV_WC_LOC_LEN_ERR", "local length error"),
    ("IBV_WC_LOC_QP_OP_ERR", "local queue pair operation error"),
    ("IBV_WC_LOC_EEC_OP_ERR", "local end-to-end context operation error"),
    ("IBV_WC_LOC_PROT_ERR", "local protection error"),
    ("IBV_WC_WR_FLUSH_ERR", "flushed"),
    ("IBV_WC_MW_BIND_ERR", "memory window binding error"),
    ("IBV_WC_BAD_RESP_ERR", "bad response"),
    ("IBV_WC_LOC_ACCESS_ERR", "local access error"),
    ("IBV_WC_REM_INV_REQ_ERR", "remote invalid request"),
    ("IBV_WC_REM_ACCESS_ERR", "remote access error"),
    ("IBV_WC_REM_OP_ERR", "remote operation error"),
    ("IBV_WC_RETRY_EXC_ERR", "transport retries exceeded"),
    ("IBV_WC_RNR_RETRY_EXC_ERR", "receiver-not-ready retries exceeded"),
    ("IBV_WC_LOC_RDD_VIOL_ERR", "local reliable datagram domain violation"),
    ("IBV_WC_REM_INV_RD_REQ_ERR", "remote invalid reliable datagram request"),
    ("IBV_WC_REM_ABORT_ERR", "remote abort"),
    ("IBV_WC_INV_EECN_ERR", "invalid end-to-end context number"),
    ("IBV_WC_INV_EEC_STATE_ERR", "invalid end-to-end context state"),
    ("IBV_WC_FATAL_ERR", "fatal error of the device"),
    ("IBV_WC_RESP_TIMEOUT_ERR", "response timeout"),
    ("IBV_WC_GENERAL_ERR", "general error"),
    ("IBV_WC_TM_ERR", "tag matching error"),
    ("IBV_WC_TM_RNDV_INCOMPLETE", "tag matching rendezvous incomplete"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_is_a_typed_error() {
        let error = |status| work_error(status, 7, Opcode::Send, 100);
        assert_eq!(work_error(1, 0, Opcode::Receive, 100), WorkError::LocalLength { got: None, room: 100 });
        assert_eq!(error(1), WorkError::Device { status: "local length error", vendor: 7 });
        assert_eq!(work_error(9, 0, Opcode::Receive, 8), WorkError::LocalLength { got: None, room: 8 });
        let own = [(4, WorkError::LocalProtection), (5, WorkError::Flushed), (7, WorkError::Protocol)];
        let peers = [
            (9, WorkError::RemoteInvalidRequest),
            (11, WorkError::RemoteInvalidRequest),
            (10, WorkError::RemoteAccess),
        ];
        let ways =
            [(12, WorkError::ConnectionLost), (13, WorkError::ReceiverNotReady), (8, WorkError::LocalProtection)];
        for (status, want) in own.into_iter().chain(peers).chain(ways) {
            assert_eq!(error(status), want, "{status}");
        }
        for status in [2, 3, 6, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23] {
            let name = STATUSES[usize::try_from(status).unwrap()].1;
            assert_eq!(error(status), WorkError::Device { status: name, vendor: 7 });
        }
        for status in [-1, 24, i32::MAX] {
            assert_eq!(error(status), WorkError::Device { status: "unknown status", vendor: 7 });
        }
    }
}
