//! The endpoint of a queue pair: what the other end must know of it.

use std::time::Duration;

use rdmc_fabric::{ConnectError, Endpoint, MeetingPlace};

/// The identifiers and limits of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VerbsEndpoint {
    /// The place at which both ends agree that they are ready.
    pub(crate) place: MeetingPlace,
    /// The queue pair's number.
    pub(crate) qp_num: u32,
    /// The number of its first packet.
    pub(crate) psn: u32,
    /// Its port's local identifier, on InfiniBand.
    pub(crate) lid: u16,
    /// Its port's global identifier.
    pub(crate) gid: [u8; 16],
    /// Whether its port is an Ethernet port.
    pub(crate) ethernet: bool,
    /// Its port's longest packet, as the verbs number it: from 1 for 256 bytes to 5 for 4096.
    pub(crate) mtu: u8,
    /// Most reads of the peer that it answers at once.
    pub(crate) reads_max: u8,
    /// How often the peer retries a request that found no receive.
    pub(crate) receiver_not_ready_retries: u8,
}

impl VerbsEndpoint {
    /// Encodes the tag, the place, and the numbers in the order of the fields, little endian; at most 70 bytes.
    pub(crate) fn encode(&self) -> Endpoint {
        let mut out = TAG.to_vec();
        self.place.encode(&mut out);
        out.extend(self.qp_num.to_le_bytes());
        out.extend(self.psn.to_le_bytes());
        out.extend(self.lid.to_le_bytes());
        out.extend(self.gid);
        out.extend([u8::from(self.ethernet), self.mtu, self.reads_max, self.receiver_not_ready_retries]);
        Endpoint::new(out).expect("an endpoint takes at most 70 bytes")
    }

    /// Decodes and checks every bound.
    pub(crate) fn decode(endpoint: &Endpoint) -> Result<Self, ConnectError> {
        let parse = || {
            let mut rest = endpoint.as_bytes().strip_prefix(TAG)?;
            let place = MeetingPlace::decode(&mut rest)?;
            let rest: [u8; 30] = rest.try_into().ok()?;
            let (qp_num, rest) = rest.split_first_chunk::<4>()?;
            let (psn, rest) = rest.split_first_chunk::<4>()?;
            let (lid, rest) = rest.split_first_chunk::<2>()?;
            let (gid, rest) = rest.split_first_chunk::<16>()?;
            let &[ethernet, mtu, reads_max, retries] = rest else { return None };
            let remote = Self {
                place,
                qp_num: u32::from_le_bytes(*qp_num),
                psn: u32::from_le_bytes(*psn),
                lid: u16::from_le_bytes(*lid),
                gid: *gid,
                ethernet: ethernet == 1,
                mtu,
                reads_max,
                receiver_not_ready_retries: retries,
            };
            let sound = ethernet <= 1
                && remote.qp_num < 1 << 24
                && remote.psn < 1 << 24
                && (1..=5).contains(&mtu)
                && retries <= RETRIES_FOR_EVER;
            sound.then_some(remote)
        };
        parse().ok_or(ConnectError::BadEndpoint)
    }
}

/// Chooses how long the peer pauses before it retries a request that found no receive, as the verbs number it, and how
/// often it retries. Together they cover `wait`.
///
/// The count has three bits: beyond four seconds the peer retries without end.
pub(crate) fn receiver_not_ready(wait: Duration) -> (u8, u8) {
    let micros = wait.as_micros();
    let mut codes = TIMERS_MICROS.iter().zip(1u8..).chain([(&655_360, 0)]);
    match codes.find(|&(&timer, _)| u128::from(timer) * u128::from(RETRIES_MAX) >= micros) {
        Some((_, code)) => (code, RETRIES_MAX),
        None => (TIMER_FOR_EVER, RETRIES_FOR_EVER),
    }
}

/// Returns the verbs' number for the shortest acknowledgement timeout of at least `timeout`: 4.096 µs times a power of
/// two.
pub(crate) fn timeout_code(timeout: Duration) -> u8 {
    (1..31).find(|&code| 4_096u128 << code >= timeout.as_nanos()).unwrap_or(31)
}

/// First bytes of an encoded endpoint: fabric and version.
const TAG: &[u8] = b"vrb1";
/// The largest count of retries that has an end.
const RETRIES_MAX: u8 = 6;
/// The count that means retries without end.
pub(crate) const RETRIES_FOR_EVER: u8 = 7;
/// The pause between retries without end: 5 ms.
const TIMER_FOR_EVER: u8 = 18;
/// The pauses of codes 1 to 31, in microseconds (InfiniBand specification, volume 1, table "RNR NAK timer").
const TIMERS_MICROS: [u32; 31] = [
    10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1_280, 1_920, 2_560, 3_840, 5_120, 7_680, 10_240,
    15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760, 327_680, 491_520,
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rdmc_fabric::{Rendezvous, TokioEnvironment};

    use super::*;

    fn remote() -> VerbsEndpoint {
        VerbsEndpoint {
            place: Rendezvous::new().meeting(&TokioEnvironment::new()).place(),
            qp_num: 0x12_3456,
            psn: 0xfe_dcba,
            lid: 7,
            gid: std::array::from_fn(|at| u8::try_from(at).unwrap()),
            ethernet: true,
            mtu: 5,
            reads_max: 16,
            receiver_not_ready_retries: 6,
        }
    }

    #[test]
    fn endpoints_survive_encoding() {
        let remote = remote();
        assert_eq!(VerbsEndpoint::decode(&remote.encode()).unwrap(), remote);
    }

    #[test]
    fn numbers_out_of_bounds_are_refused() {
        let wrong: [fn(&mut VerbsEndpoint); 4] =
            [|r| r.qp_num = 1 << 24, |r| r.psn = 1 << 24, |r| r.mtu = 6, |r| r.receiver_not_ready_retries = 8];
        for spoil in wrong {
            let mut remote = remote();
            spoil(&mut remote);
            assert!(matches!(VerbsEndpoint::decode(&remote.encode()), Err(ConnectError::BadEndpoint)));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_endpoint_or_an_error(tail in proptest::collection::vec(any::<u8>(), 0..80)) {
            let bytes = [TAG, &tail].concat();
            if let Ok(remote) = VerbsEndpoint::decode(&Endpoint::new(bytes.clone()).unwrap()) {
                prop_assert_eq!(remote.encode().as_bytes().to_vec(), bytes);
            }
        }
    }

    #[test]
    fn the_wait_for_a_receive_is_covered() {
        let covered = |ms| receiver_not_ready(Duration::from_millis(ms));
        assert_eq!(covered(0), (1, 6));
        assert_eq!(covered(30), (18, 6));
        assert_eq!(covered(1000), (29, 6));
        assert_eq!(covered(3900), (0, 6));
        assert_eq!(covered(3_600_000), (18, 7));
    }

    #[test]
    fn timeouts_are_rounded_up() {
        assert_eq!(timeout_code(Duration::ZERO), 1);
        assert_eq!(timeout_code(Duration::from_millis(67)), 14);
        assert_eq!(timeout_code(Duration::from_millis(68)), 15);
        assert_eq!(timeout_code(Duration::from_secs(1 << 20)), 31);
    }
}
