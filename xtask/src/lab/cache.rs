//! The directory of what was built, outside the repository.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// The cache directory.
#[derive(Debug)]
pub(crate) struct Cache {
    root: PathBuf,
}

/// The right to change the cache, held by one process at a time until dropped.
#[derive(Debug)]
pub(crate) struct CacheLock {
    _file: File,
}

impl Cache {
    /// Finds the directory from the environment: `RDMC_LAB_CACHE`, or `rdmc-lab` in the user's cache directory.
    pub(crate) fn locate() -> Result<Self> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = variable("RDMC_LAB_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|dir| dir.join("rdmc-lab")))
            .or_else(|| variable("HOME").map(|dir| dir.join(".cache/rdmc-lab")))
            .context("set RDMC_LAB_CACHE to a directory, for there is no HOME")?;
        let root = std::path::absolute(root)?;
        ensure_plain(&root)?;
        Ok(Self { root })
    }

    /// Names the place of what is made from `inputs`: whenever one of them changes, so does the name.
    pub(crate) fn entry(&self, kind: &str, inputs: &[&str]) -> PathBuf {
        self.root.join(format!("{kind}-{}", key(inputs)))
    }

    /// Names the file in which the compiler's log is kept after a failure.
    pub(crate) fn compile_log(&self) -> PathBuf {
        self.root.join(COMPILE_LOG)
    }

    /// Makes the directory and waits until no other process changes it.
    pub(crate) fn lock(&self) -> Result<CacheLock> {
        let name = self.root.join(LOCK);
        fs::create_dir_all(&self.root).with_context(|| format!("cannot make {}", self.root.display()))?;
        let file = File::create(&name).with_context(|| format!("cannot make {}", name.display()))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {
                eprintln!("lab: waiting for another process that builds the lab");
                flock(&file, FlockOperation::LockExclusive)
            }
            result => result,
        }
        .with_context(|| format!("cannot lock {}", name.display()))?;
        Ok(CacheLock { _file: file })
    }

    /// Makes an empty directory to build in, and removes those of builds that were interrupted.
    pub(crate) fn build_directory(&self, _lock: &CacheLock) -> Result<tempfile::TempDir> {
        for path in self.own_entries()? {
            if file_name(&path).starts_with(BUILD_PREFIX) {
                fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        let directory = tempfile::Builder::new().prefix(BUILD_PREFIX).tempdir_in(&self.root)?;
        Ok(directory)
    }

    /// Removes everything that the lab has made here, and the directory if nothing else is in it.
    pub(crate) fn clean(&self) -> Result<()> {
        if !self.root.exists() {
            return Ok(());
        }
        let _lock = self.lock()?;
        for path in self.own_entries()? {
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.with_context(|| format!("cannot remove {}", path.display()))?;
        }
        match fs::remove_dir(&self.root) {
            Err(error) if error.kind() != ErrorKind::DirectoryNotEmpty => {
                Err(error).with_context(|| format!("cannot remove {}", self.root.display()))
            }
            _ => Ok(()),
        }
    }

    /// Lists what the lab has made: the user may have named a directory that holds other things too.
    fn own_entries(&self) -> Result<Vec<PathBuf>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let path = entry?.path();
            let name = file_name(&path);
            let own = [COMPILE_LOG, LOCK].contains(&name) || OWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
            if own {
                entries.push(path);
            }
        }
        Ok(entries)
    }
}

/// Refuses a path that cannot stand on a kernel's command line, where spaces separate words and quotes group them.
pub(crate) fn ensure_plain(path: &Path) -> Result<()> {
    let Some(text) = path.to_str() else { bail!("{} is not UTF-8", path.display()) };
    ensure!(
        !text.contains(|c: char| c.is_whitespace() || c.is_control() || "\"',:\\".contains(c)),
        "the lab cannot use the directory {text:?}: a space, quote, comma, colon or backslash is in its name"
    );
    Ok(())
}

/// Computes a short digest of strings and the bounds between them.
fn key(inputs: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for input in inputs {
        hasher.update(&(input.len() as u64).to_le_bytes());
        hasher.update(input.as_bytes());
    }
    hasher.finalize().to_hex()[..KEY_LEN].to_owned()
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

const BUILD_PREFIX: &str = "build.";
const OWN_PREFIXES: [&str; 3] = [BUILD_PREFIX, "kernel-", "layer-"];
const COMPILE_LOG: &str = "compile.log";
const LOCK: &str = "lock";
const KEY_LEN: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_with_every_input_and_with_the_bounds_between_them() {
        let keys = [key(&["a", "b"]), key(&["a", "c"]), key(&["ab", ""]), key(&["ab"]), key(&["b", "a"])];
        for (i, one) in keys.iter().enumerate() {
            assert_eq!(one.len(), KEY_LEN);
            assert!(keys[..i].iter().all(|other| other != one), "{keys:?}");
        }
        assert_eq!(key(&["a", "b"]), keys[0]);
    }

    #[test]
    fn only_paths_that_stay_one_word_are_plain() {
        for good in ["/root/.cache/rdmc-lab", "/tmp/ä_1"] {
            ensure_plain(Path::new(good)).unwrap();
        }
        for bad in ["/tmp/a b", "/tmp/a\"b", "/tmp/a\nb", "/tmp/a,b", "/tmp/a:b"] {
            ensure_plain(Path::new(bad)).unwrap_err();
        }
    }

    #[test]
    fn clean_removes_what_the_lab_made_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let cache = Cache { root: parent.path().join("cache") };
        cache.clean().unwrap();

        let lock = cache.lock().unwrap();
        fs::create_dir_all(cache.entry("kernel", &["x"]).join("deep")).unwrap();
        fs::write(cache.compile_log(), "log").unwrap();
        let interrupted = cache.build_directory(&lock).unwrap().keep();
        let _build = cache.build_directory(&lock).unwrap();
        assert!(!interrupted.exists());
        fs::write(cache.root.join("mine"), "kept").unwrap();
        drop(lock);

        cache.clean().unwrap();
        let left: Vec<_> = fs::read_dir(&cache.root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["mine"]);
        fs::remove_file(cache.root.join("mine")).unwrap();
        cache.clean().unwrap();
        assert!(!cache.root.exists());
    }
}
