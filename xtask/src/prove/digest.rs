//! The digest of what a tier covers.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::tier::{COMMON, Tier};

/// Computes the digest of a tier and of all tracked files that it covers: names, contents as they are on the disk, and
/// whether they can be executed. A file that was removed counts as such.
pub(crate) fn digest(root: &Path, tier: &Tier) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut add = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    add(&serde_json::to_vec(tier)?);
    for path in tracked(root, tier)? {
        add(&path);
        let file = root.join(OsStr::from_bytes(&path));
        match std::fs::symlink_metadata(&file) {
            Ok(metadata) if metadata.is_symlink() => {
                add(b"link");
                add(std::fs::read_link(&file)?.as_os_str().as_bytes());
            }
            Ok(metadata) => {
                add(if metadata.permissions().mode() & 0o100 == 0 { b"file" } else { b"program" });
                add(&std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?);
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => add(b"removed"),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", file.display())),
        }
    }
    Ok(hasher.finalize().to_hex()[..DIGEST_DIGITS].to_owned())
}

/// Lists the tracked files that a tier covers, in order.
fn tracked(root: &Path, tier: &Tier) -> Result<Vec<Vec<u8>>> {
    let covered = || COMMON.into_iter().chain(tier.covers.iter().map(String::as_str));
    let output = Command::new("git")
        .args(["ls-files", "-z", "--"])
        .args(covered())
        .current_dir(root)
        .output()
        .context("cannot run git, which tells the files that a tier covers")?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "git cannot list the files that a tier covers: {}", complaint.trim());
    let mut paths: Vec<Vec<u8>> =
        output.stdout.split(|byte| *byte == 0).filter(|path| !path.is_empty()).map(<[u8]>::to_vec).collect();
    paths.sort();
    paths.dedup();
    for path in &tier.covers {
        let prefix = format!("{path}/");
        let holds = |file: &Vec<u8>| *file == path.as_bytes() || file.starts_with(prefix.as_bytes());
        ensure!(paths.iter().any(holds), "the tier {} covers {path}, where git tracks no file", tier.name);
    }
    Ok(paths)
}

/// Hexadecimal digits of a digest: 128 bits.
const DIGEST_DIGITS: usize = 32;
