//! Fuzz targets for every decoder of foreign input: bytes of peers, and files.
//!
//! A target is a function of bytes that panics if a property does not hold. The binaries in `fuzz_targets` give each
//! target to libFuzzer. `tests/replay.rs` runs all targets on the corpus and on earlier findings.

mod allocation;
pub mod fabric;
pub mod mesh;
pub mod peers;
pub mod sessions;
pub mod simulation;
pub mod table;
pub mod transfer;

/// A target and its first inputs.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of the target, of its binary and of its directories.
    pub name: &'static str,
    /// Runs the target on one input.
    ///
    /// # Panics
    /// If a property does not hold.
    pub run: fn(&[u8]),
    /// Makes the corpus, by file names; the same at each call.
    pub seeds: fn() -> Vec<Seed>,
}

/// An input and the name of its file.
pub type Seed = (String, Vec<u8>);

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "mesh_frame", run: mesh::frame, seeds: mesh::frame_seeds },
    Target { name: "mesh_stream", run: mesh::stream, seeds: mesh::stream_seeds },
    Target { name: "mesh_agreement", run: mesh::agreement, seeds: mesh::agreement_seeds },
    Target { name: "mesh_invitation", run: mesh::invitation, seeds: mesh::invitation_seeds },
    Target { name: "table_row", run: table::row, seeds: table::row_seeds },
    Target { name: "ring_slot", run: table::slot, seeds: table::slot_seeds },
    Target { name: "session_frame", run: sessions::frame, seeds: sessions::frame_seeds },
    Target { name: "session_state", run: sessions::state, seeds: sessions::state_seeds },
    Target { name: "gateway_note", run: sessions::note, seeds: sessions::note_seeds },
    Target { name: "gateway_slabs", run: sessions::slabs, seeds: sessions::slabs_seeds },
    Target { name: "meeting_place", run: fabric::meeting_place, seeds: fabric::meeting_place_seeds },
    Target { name: "remote_memory", run: fabric::remote_memory, seeds: fabric::remote_memory_seeds },
    Target { name: "tcp_header", run: fabric::tcp_header, seeds: fabric::tcp_header_seeds },
    Target { name: "tcp_greeting", run: peers::greeting, seeds: peers::greeting_seeds },
    Target { name: "tcp_connection", run: peers::connection, seeds: peers::connection_seeds },
    Target { name: "object_descriptor", run: fabric::object_descriptor, seeds: fabric::object_descriptor_seeds },
    #[cfg(target_os = "linux")]
    Target { name: "shm_entry", run: fabric::shm_entry, seeds: fabric::shm_entry_seeds },
    #[cfg(target_os = "linux")]
    Target { name: "shm_request", run: fabric::shm_request, seeds: fabric::shm_request_seeds },
    #[cfg(target_os = "linux")]
    Target { name: "verbs_endpoint", run: fabric::verbs_endpoint, seeds: fabric::verbs_endpoint_seeds },
    Target { name: "announcement", run: transfer::announcement, seeds: transfer::announcement_seeds },
    Target { name: "manifest", run: transfer::manifest, seeds: transfer::manifest_seeds },
    Target { name: "scenario", run: simulation::scenario, seeds: simulation::scenario_seeds },
    Target { name: "campaign_case", run: simulation::campaign_case, seeds: simulation::campaign_case_seeds },
    Target { name: "cluster_model", run: simulation::cluster_model, seeds: simulation::cluster_model_seeds },
];

/// Names seeds.
fn named<N: Into<String>>(seeds: impl IntoIterator<Item = (N, Vec<u8>)>) -> Vec<Seed> {
    seeds.into_iter().map(|(name, bytes)| (name.into(), bytes)).collect()
}
