//! Why the fabric could not be opened, and what the device's errors mean for a work request.

use std::io;

use rdmc_fabric::WorkError;

/// The fabric could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AsyncRdmaError {
    /// A setting makes no sense.
    #[error("{setting} must be {bounds}")]
    Setting {
        /// Which one.
        setting: &'static str,
        /// What it may be.
        bounds: &'static str,
    },
    /// There is no such device, or it refused what the settings ask for.
    #[error(
        "the RDMA device {} could not be opened; see `ibv_devinfo` for its name and ports, and whether this user may",
        device.as_deref().unwrap_or("(any)")
    )]
    Device {
        /// The device asked for, if one was.
        device: Option<String>,
        /// What `async-rdma` said.
        source: io::Error,
    },
    /// The port has no address at the place given.
    #[error("port {port} has no address at index {gid_index} of its table; `ibv_devinfo -v` lists those it has")]
    NoGid {
        /// The port.
        port: u8,
        /// The place in its table.
        gid_index: u8,
    },
}

/// Tells what a failed operation of `async-rdma` means.
///
/// Its error type is private; what can be had is the name of the variant, which is the status of the verbs.
pub(crate) fn work_error(error: &io::Error) -> WorkError {
    let Some(inner) = error.get_ref() else {
        return device_error("the request could not be posted");
    };
    match format!("{inner:?}").as_str() {
        "WrFlushErr" => WorkError::Flushed,
        "RemAccessErr" => WorkError::RemoteAccess,
        "RemInvReqErr" => WorkError::RemoteInvalidRequest,
        "RetryExc" => WorkError::ConnectionLost,
        "RnrRetryExc" => WorkError::ReceiverNotReady,
        "LocProtErr" => WorkError::LocalProtection,
        "LocLenErr" => device_error("local length error"),
        "LocQpOpErr" => device_error("local queue pair operation error"),
        "LocAccessErr" => device_error("local access error"),
        "BadRespErr" => device_error("bad response"),
        "RemOpErr" => device_error("remote operation error"),
        "RemAbortErr" => device_error("aborted by the remote end"),
        "Fatal" => device_error("fatal error"),
        "RespTimeout" => device_error("response timeout"),
        "GeneralErr" => device_error("general error"),
        name => {
            tracing::debug!(name, "an error of async-rdma without a name of its own");
            device_error("an error that async-rdma does not explain")
        }
    }
}

pub(crate) fn device_error(status: &'static str) -> WorkError {
    WorkError::Device { status, vendor: 0 }
}
