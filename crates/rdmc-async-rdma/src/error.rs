//! Why the fabric could not be opened, and what the device's errors mean for a work request.

use std::io;

use rdmc_fabric::WorkError;

/// An error of opening the fabric.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AsyncRdmaError {
    /// A setting is out of bounds; the caller must change it.
    #[error("{setting} must be {bounds}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its bounds.
        bounds: &'static str,
    },
    /// No such device exists, or it refused the settings.
    #[error(
        "the RDMA device {} could not be opened; see `ibv_devinfo` for its name and ports, and whether this user may",
        device.as_deref().unwrap_or("(any)")
    )]
    Device {
        /// The device that the settings name.
        device: Option<String>,
        /// The error of `async-rdma`.
        source: io::Error,
    },
    /// The port has no address at this index.
    #[error("port {port} has no address at index {gid_index} of its table; `ibv_devinfo -v` lists those it has")]
    NoGid {
        /// The port.
        port: u8,
        /// The index in its table.
        gid_index: u8,
    },
}

/// Translates the error of a failed operation of `async-rdma`.
///
/// Its error type is private. Only the variant's name is accessible, which is the status of the verbs.
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
            tracing::debug!(name, "an unknown error of async-rdma");
            device_error("an error that async-rdma does not explain")
        }
    }
}

pub(crate) fn device_error(status: &'static str) -> WorkError {
    WorkError::Device { status, vendor: 0 }
}
