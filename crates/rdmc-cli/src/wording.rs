//! The names of this program's options and commands in messages of the libraries.

use rdmc_files::Wording;

/// Returns the names that users know.
pub(crate) fn wording() -> Wording {
    let mut wording = Wording::default();
    wording.sender = "rdmc send";
    wording.receiver = "rdmc recv";
    wording.not_listening =
        "does rdmc recv run there? It listens at 127.0.0.1:7471, for this host only, unless --listen says otherwise";
    wording.default_address = Some("rdmc recv listens at 127.0.0.1:7471 by default");
    wording.directory = "the directory of --dir";
    wording.choose_directory = "let this user write there, or choose another one with --dir";
    wording.no_overwrite = "--no-overwrite";
    wording.pool_bytes_max = "--pool-size";
    wording.wait = "--wait";
    wording.evict_after = "rdmc send --evict-after";
    wording.fabric = "--fabric";
    wording.device = "--device";
    wording.no_shm = "--no-shm";
    wording.encrypt = "--encrypt";
    wording.security = "--key or --tls-ca keep others out";
    wording.doctor = Some("rdmc doctor");
    wording
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::LISTEN_DEFAULT;

    #[test]
    fn the_default_address_is_the_one_that_is_named() {
        let Wording { not_listening, default_address, .. } = wording();
        assert!(
            not_listening.contains(LISTEN_DEFAULT)
                && default_address.is_some_and(|sentence| sentence.contains(LISTEN_DEFAULT))
        );
    }
}
