//! Private decoders, public for the fuzz targets. The module exists only with the feature `fuzzing`.

use rdmc_fabric::{Endpoint, MeetingPlace};

use crate::endpoint::VerbsEndpoint;

/// Decodes an endpoint and encodes it again; returns `None` if it is invalid.
pub fn recode_endpoint(endpoint: &Endpoint) -> Option<Endpoint> {
    VerbsEndpoint::decode(endpoint).ok().map(|remote| remote.encode())
}

/// Encodes an endpoint of a queue pair at `place`.
pub fn endpoint(place: MeetingPlace) -> Endpoint {
    let remote = VerbsEndpoint {
        place,
        qp_num: 0x12_3456,
        psn: 0xfe_dcba,
        lid: 7,
        gid: [9; 16],
        ethernet: true,
        mtu: 5,
        reads_max: 16,
        receiver_not_ready_retries: 6,
    };
    remote.encode()
}
