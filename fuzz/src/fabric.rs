//! Targets for the decoders of fabrics: endpoints, keys, headers.

use rdmc_fabric::fuzzing::{TCP_HEADER_LEN, recode_object_descriptor, recode_tcp_header, tcp_headers};
use rdmc_fabric::{Endpoint, MeetingPlace, ObjectDescriptor, RemoteMemory};

use crate::{Seed, named};

/// Checks that the encoding of a place has one form, and that the decoder takes only its own bytes from the front.
pub fn meeting_place(bytes: &[u8]) {
    let mut rest = bytes;
    let place = MeetingPlace::decode(&mut rest);
    let endpoint = Endpoint::new([TAG, bytes].concat());
    if let Some(place) = place {
        let mut encoded = Vec::new();
        place.encode(&mut encoded);
        assert_eq!(encoded, bytes[..bytes.len() - rest.len()]);
        assert_eq!(place.to_endpoint(TAG).as_bytes(), [TAG, &encoded].concat());
    }
    let Ok(endpoint) = endpoint else { return };
    assert_eq!(MeetingPlace::of_endpoint(&endpoint, TAG).ok(), place.filter(|_| rest.is_empty()));
    assert!(MeetingPlace::of_endpoint(&endpoint, b"other").is_err());
}

/// Checks that any bytes are one place in memory, and that its parts stay in its address space.
pub fn remote_memory(bytes: &[u8]) {
    let Some((encoded, rest)) = bytes.split_first_chunk() else { return };
    let memory = RemoteMemory::decode(*encoded);
    assert_eq!(memory.encode(), *encoded);
    if let Some((offset, _)) = rest.split_first_chunk() {
        let offset = u64::from_le_bytes(*offset);
        let part = memory.slice(offset, 1);
        assert_eq!((part.key, part.address, part.len), (memory.key, memory.address.wrapping_add(offset), 1));
    }
    let secret = memory.key.to_string();
    let shown = format!("{:?}", RemoteMemory { address: 0, len: 0, ..memory });
    assert!(secret.len() < 2 || !shown.contains(&secret), "the key is shown");
}

/// Checks that a header has one form.
pub fn tcp_header(bytes: &[u8]) {
    let Some((header, _)) = bytes.split_first_chunk::<TCP_HEADER_LEN>() else { return };
    if let Some(recoded) = recode_tcp_header(header) {
        assert_eq!(recoded, *header);
    }
}

/// Checks that a descriptor has one form.
pub fn object_descriptor(bytes: &[u8]) {
    if let Some(recoded) = recode_object_descriptor(bytes) {
        assert_eq!(recoded[..], *bytes);
    }
}

/// Checks that an entry means the same after it is encoded again.
#[cfg(target_os = "linux")]
pub fn shm_entry(bytes: &[u8]) {
    let Some((entry, _)) = bytes.split_first_chunk() else { return };
    assert_ne!(rdmc_fabric::fuzzing::recode_shm_entry(entry), Some(false));
}

/// Checks that a request has one form.
#[cfg(target_os = "linux")]
pub fn shm_request(bytes: &[u8]) {
    let Some((request, _)) = bytes.split_first_chunk() else { return };
    if let Some(recoded) = rdmc_fabric::fuzzing::recode_shm_request(request) {
        assert_eq!(recoded, *request);
    }
}

/// Checks that an endpoint of a device has one form, which fits into an endpoint.
#[cfg(target_os = "linux")]
pub fn verbs_endpoint(bytes: &[u8]) {
    let Ok(endpoint) = Endpoint::new(bytes.to_vec()) else { return };
    if let Some(recoded) = rdmc_verbs::fuzzing::recode_endpoint(&endpoint) {
        assert!(recoded == endpoint, "an endpoint has two forms");
    }
}

/// Seeds of [`meeting_place`].
pub fn meeting_place_seeds() -> Vec<Seed> {
    let encoded = |(name, place): (&'static str, MeetingPlace)| {
        let mut out = Vec::new();
        place.encode(&mut out);
        (name, out)
    };
    named(places().map(encoded))
}

/// Seeds of [`remote_memory`].
pub fn remote_memory_seeds() -> Vec<Seed> {
    let memory = RemoteMemory { key: 0x0123_4567_89ab_cdef, address: u64::MAX - 7, len: 100 };
    named([("part", [&memory.encode()[..], &8u64.to_le_bytes()].concat()), ("whole", memory.encode().to_vec())])
}

/// Seeds of [`tcp_header`].
pub fn tcp_header_seeds() -> Vec<Seed> {
    let at = RemoteMemory { key: u64::MAX, address: 1 << 40, len: 1 << 20 };
    named(tcp_headers(at).into_iter().map(|(name, header)| (name, header.to_vec())))
}

/// Seeds of [`object_descriptor`].
pub fn object_descriptor_seeds() -> Vec<Seed> {
    let descriptor = ObjectDescriptor { len: 1 << 28, owner: 3, token: u128::MAX };
    named([("object", descriptor.encode().to_vec())])
}

/// Seeds of [`shm_entry`].
#[cfg(target_os = "linux")]
pub fn shm_entry_seeds() -> Vec<Seed> {
    named(rdmc_fabric::fuzzing::shm_entries().into_iter().map(|(name, entry)| (name, entry.to_vec())))
}

/// Seeds of [`shm_request`].
#[cfg(target_os = "linux")]
pub fn shm_request_seeds() -> Vec<Seed> {
    named(rdmc_fabric::fuzzing::shm_requests().into_iter().map(|(name, request)| (name, request.to_vec())))
}

/// Seeds of [`verbs_endpoint`].
#[cfg(target_os = "linux")]
pub fn verbs_endpoint_seeds() -> Vec<Seed> {
    named(places().map(|(name, place)| (name, rdmc_verbs::fuzzing::endpoint(place).as_bytes().to_vec())))
}

/// Returns a place of each family, by its name.
fn places() -> impl Iterator<Item = (&'static str, MeetingPlace)> {
    let decoded = |listening: &[u8]| {
        let bytes = [&[0x5a; 16][..], listening].concat();
        MeetingPlace::decode(&mut &bytes[..]).expect("it is the form that is documented")
    };
    let (v4, v6) = ([4, 10, 0, 0, 1, 47, 29], [&[6][..], &[0xfd; 16], &[47, 29]].concat());
    [("nowhere", decoded(&[0])), ("ipv4", decoded(&v4)), ("ipv6", decoded(&v6))].into_iter()
}

/// First bytes of the endpoints of the fabric `tcp`.
pub(crate) const TAG: &[u8] = b"tcp3";
