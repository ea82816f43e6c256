//! Options for keys and certificates, and `rdmc keygen`.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rdmc::Security;

use crate::exit::Exit;
use crate::named::Switch;

/// Options that admit only known peers.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct SecurityOptions {
    /// File with the key that all ends share, made by rdmc keygen: only peers with the key take part. Like ssh, rdmc
    /// refuses a file of yours that others can read
    #[arg(long, env = "RDMC_KEY_FILE", value_name = "FILE", conflicts_with_all = ["tls_ca", "tls_cert", "tls_key"])]
    pub(crate) key: Option<PathBuf>,
    /// File with the certificates (PEM) of the authority: only peers with one of its certificates take part
    #[arg(long, env = "RDMC_TLS_CA", value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    pub(crate) tls_ca: Option<PathBuf>,
    /// File with this host's certificate (PEM); that of an end that listens names the host as others type it
    #[arg(long, env = "RDMC_TLS_CERT", value_name = "FILE", requires_all = ["tls_ca", "tls_key"])]
    pub(crate) tls_cert: Option<PathBuf>,
    /// File with the private key (PEM) of this host's certificate; it must be as private as --key
    #[arg(long, env = "RDMC_TLS_KEY", value_name = "FILE", requires_all = ["tls_ca", "tls_cert"])]
    pub(crate) tls_key: Option<PathBuf>,
    /// Encrypt the data that TCP carries; all ends must agree. Needs --key, or --tls-ca, --tls-cert and --tls-key
    #[arg(long, env = "RDMC_ENCRYPT", value_parser = Switch)]
    pub(crate) encrypt: bool,
}

impl SecurityOptions {
    /// Tells whether only known peers may take part.
    pub(crate) fn is_given(&self) -> bool {
        self.key.is_some() || self.tls_ca.is_some()
    }

    /// Reads keys and certificates; `None` if everybody may take part.
    pub(crate) fn open(&self) -> anyhow::Result<Option<Security>> {
        let security = match self {
            Self { key: Some(key), .. } => {
                check_private(key)?;
                Some(Security::key_file(key)?)
            }
            Self { tls_ca: Some(ca), tls_cert: Some(certificate), tls_key: Some(key), .. } => {
                check_private(key)?;
                Some(Security::tls_files(ca, certificate, key)?)
            }
            _ => None,
        };
        if self.encrypt && security.is_none() {
            return Err(Exit::Usage.error(
                "--encrypt needs --key, or --tls-ca, --tls-cert and --tls-key: a reader of the control connections \
                 could decrypt the data",
            ));
        }
        Ok(security)
    }
}

/// Refuses a private file that others can read or write, as ssh does. Files of other users, such as those of a service
/// manager, are not checked.
fn check_private(file: &Path) -> anyhow::Result<()> {
    let metadata = std::fs::metadata(file).with_context(|| format!("cannot read {}", file.display()))?;
    anyhow::ensure!(!metadata.is_dir(), "{} is a directory, not the file of a key", file.display());
    let (mode, ours) = (metadata.mode() & 0o777, metadata.uid() == rustix::process::getuid().as_raw());
    anyhow::ensure!(
        !ours || mode & 0o077 == 0,
        "others have access to {} (its mode is {mode:04o}): make it private with chmod 600, or make a new key",
        file.display()
    );
    Ok(())
}

/// Writes a new key to a file that must not exist yet.
pub(crate) fn keygen(file: &Path) -> anyhow::Result<()> {
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(|error| anyhow::anyhow!("the operating system has no randomness: {error}"))?;
    let mut options = OpenOptions::new();
    let created = options.write(true).create_new(true).mode(0o600).open(file);
    let mut written = created.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            anyhow::anyhow!("{} exists; no key is overwritten", file.display())
        }
        _ => anyhow::Error::new(error).context(format!("cannot write {}", file.display())),
    })?;
    let text = format!("{}\n", blake3::Hash::from_bytes(key).to_hex());
    written.write_all(text.as_bytes()).and_then(|()| written.sync_all()).map_err(|error| {
        // An incomplete key must not stay.
        let _ = std::fs::remove_file(file);
        anyhow::Error::new(error).context(format!("cannot write {}", file.display()))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn with_key(key: &Path) -> SecurityOptions {
        SecurityOptions { key: Some(key.to_owned()), ..SecurityOptions::default() }
    }

    #[test]
    fn a_new_key_is_private_and_never_overwrites() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        keygen(&one).unwrap();
        keygen(&other).unwrap();
        let text = std::fs::read_to_string(&one).unwrap();
        assert_eq!((text.len(), std::fs::metadata(&one).unwrap().mode() & 0o777), (65, 0o600));
        assert_ne!(text, std::fs::read_to_string(&other).unwrap());
        let error = keygen(&one).unwrap_err().to_string();
        assert!(error.ends_with("one exists; no key is overwritten"), "{error}");
        assert_eq!(std::fs::read_to_string(&one).unwrap(), text);
        assert!(with_key(&one).open().unwrap().is_some());
        assert!(keygen(&dir.path().join("no/where")).is_err());
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("key");
        keygen(&key).unwrap();
        for mode in [0o640, 0o604, 0o644, 0o620] {
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = with_key(&key).open().unwrap_err();
            assert!(error.to_string().contains("chmod 600"), "{error}");
            assert_eq!(Exit::code_of(&error), 1);
        }
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o400)).unwrap();
        assert!(with_key(&key).open().is_ok());
        let error = with_key(dir.path()).open().unwrap_err();
        assert!(error.to_string().contains("is a directory"), "{error}");
        let error = with_key(&dir.path().join("gone")).open().unwrap_err();
        assert!(error.to_string().contains("cannot read"), "{error}");
    }

    #[test]
    fn encryption_is_for_those_who_are_known() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("key");
        keygen(&key).unwrap();
        let encrypt = SecurityOptions { encrypt: true, ..SecurityOptions::default() };
        let error = encrypt.open().unwrap_err();
        assert_eq!(Exit::code_of(&error), 2);
        let encrypt = SecurityOptions { encrypt: true, ..with_key(&key) };
        assert!(encrypt.open().is_ok());
    }
}
