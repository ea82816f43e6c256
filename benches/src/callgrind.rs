//! Counts instructions with Valgrind's tool callgrind.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Instructions that one phase of a program executed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All instructions.
    pub total: u64,
    /// Instructions of functions and their callees, by the functions' names.
    inclusive: HashMap<String, u64>,
}

impl Counts {
    /// Reads a file of callgrind.
    ///
    /// # Errors
    /// The text is not in callgrind's format.
    pub fn parse(text: &str) -> Result<Self> {
        let mut names: HashMap<&str, &str> = HashMap::new();
        let mut counts = Self::default();
        let (mut function, mut own) = (None, 0);
        for line in text.lines() {
            if let Some(id) = line.strip_prefix("fn=").or_else(|| line.strip_prefix("cfn=")) {
                // A number comes with its name where it comes first.
                let (id, name) = id.split_once(' ').unwrap_or((id, ""));
                let name = *names.entry(id).or_insert(name);
                if line.starts_with("fn=") {
                    counts.add(function.replace(name), std::mem::take(&mut own));
                }
            } else if let Some(total) = line.strip_prefix("totals: ") {
                counts.total = total.trim().parse().context("the total of callgrind's counts")?;
            } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
                // A place and a count: of the function itself, or after `calls=` of a callee.
                let count = line.split_whitespace().nth(1).with_context(|| format!("no count in {line:?}"))?;
                own += count.parse::<u64>().with_context(|| format!("no count in {line:?}"))?;
            }
        }
        counts.add(function, own);
        ensure!(counts.total > 0, "callgrind has counted nothing");
        Ok(counts)
    }

    /// Returns the instructions of the functions whose names contain `part`, and of their callees.
    ///
    /// If one of these functions calls another, the callee counts twice.
    pub fn of(&self, part: &str) -> u64 {
        self.inclusive.iter().filter(|(name, _)| name.contains(part)).map(|(_, count)| count).sum()
    }

    fn add(&mut self, function: Option<&str>, instructions: u64) {
        if let Some(function) = function {
            *self.inclusive.entry(function.to_owned()).or_default() += instructions;
        }
    }
}

/// Returns Valgrind's version, or `None` if it is not installed.
///
/// # Errors
/// Valgrind is installed but does not run.
pub fn version() -> Result<Option<String>> {
    match Command::new("valgrind").arg("--version").output() {
        Ok(output) => Ok(Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context("valgrind does not run"),
    }
}

/// Runs `program` with `arguments` under callgrind, and returns the counts of its phases.
///
/// A phase ends at each call of a function whose name contains `phase_ends`. The files of callgrind stay in
/// `directory`.
///
/// # Errors
/// The program or callgrind failed.
pub fn phases(program: &Path, arguments: &[String], phase_ends: &str, directory: &Path) -> Result<Vec<Counts>> {
    let out = directory.join("callgrind.out");
    let status = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--fair-sched=try"])
        .arg(format!("--dump-before=*{phase_ends}*"))
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args(arguments)
        .stdout(Stdio::null())
        .status()
        .context("valgrind does not run")?;
    ensure!(status.success(), "the program failed under callgrind: {status}");
    let mut phases = Vec::new();
    loop {
        let dump = format!("{}.{}", out.display(), phases.len() + 1);
        match std::fs::read_to_string(&dump) {
            Ok(text) => phases.push(Counts::parse(&text).with_context(|| format!("reading {dump}"))?),
            Err(error) if error.kind() == ErrorKind::NotFound => break,
            Err(error) => bail!("{dump} cannot be read: {error}"),
        }
    }
    Ok(phases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_function_called_counts_as_its_own() {
        let text = "positions: line\nevents: Ir\n\nfl=(1) a.rs\nfn=(7) a::outer\n\
                    16 400\ncfn=(9) a::inner\ncalls=3 +5\n* 60\n\
                    +2 7\n\nfn=(9)\n90 60\n\nfn=(7)\n20 1\n\ntotals: 468\n";
        let counts = Counts::parse(text).expect("as callgrind writes it");
        assert_eq!((counts.total, counts.of("outer"), counts.of("inner")), (468, 468, 60));
        assert_eq!(counts.of("another"), 0);
    }

    #[test]
    fn what_is_no_count_is_refused() {
        for text in ["", "fn=(1) a\n16\n\ntotals: 1\n", "fn=(1) a\n16 x\n\ntotals: 1\n", "totals: x\n"] {
            assert!(Counts::parse(text).is_err(), "{text:?}");
        }
    }
}
