//! Builds the suites on the host, runs them in the lab and sums up.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::Value;

use super::boot::{self, Guest};
use super::build::Parts;
use super::suites::{SUITES, Suite};
use super::{Driver, Machine};

/// Paths of executables by `KIND:NAME`.
type Executables = BTreeMap<String, PathBuf>;

/// Runs the suites with `filter` in their names, or those of every day if it is empty; returns the status to exit with.
///
/// A machine has one processor. So as many machines run at once as the host has processors, each on its own.
pub(crate) fn run_suites(filter: &str, verbose: bool) -> Result<u8> {
    let chosen = |suite: &&Suite| if filter.is_empty() { suite.by_default } else { suite.name.contains(filter) };
    let suites: Vec<&Suite> = SUITES.iter().filter(chosen).collect();
    ensure!(!suites.is_empty(), "no suite has {filter:?} in its name");
    std::env::set_current_dir(workspace()).context("the workspace is not where it was compiled")?;
    let mut executables = Executables::new();
    let builds: BTreeSet<&[&str]> = suites.iter().flat_map(|suite| suite.builds).copied().collect();
    builds.into_iter().try_for_each(|arguments| build(arguments, &mut executables))?;

    let (queue, ended) = (Mutex::new(suites.iter()), Mutex::new(Vec::new()));
    let next = || queue.lock().expect("nothing panics with the lock").next();
    let run_on = |cpu: &CpuSet| {
        // The machines that this thread starts inherit it. If it cannot be, they share processors.
        let _ = sched_setaffinity(None, cpu);
        while let Some(suite) = next() {
            let start = Instant::now();
            let result = run_suite(suite, &executables, verbose, suites.len() == 1);
            ended.lock().expect("nothing panics with the lock").push((suite.name, result, start.elapsed()));
        }
    };
    let run_on = &run_on;
    thread::scope(|scope| {
        for cpu in boot::cpus()?.into_iter().take(suites.len()) {
            scope.spawn(move || run_on(&cpu));
        }
        anyhow::Ok(())
    })?;

    // Failures last, with the ends of their outputs, for those who see only the end of all.
    let mut ended = ended.into_inner().expect("nothing panics with the lock");
    ended.sort_by_key(|(_, result, _)| result.is_err());
    for (name, result, elapsed) in &ended {
        let result = result.as_ref().map_or_else(|error| format!("FAILED: {error:#}"), |()| "passed".to_owned());
        eprintln!("lab: {name:<20} {:>6.1} s  {result}", elapsed.as_secs_f64());
    }
    let passed = ended.iter().all(|(_, result, _)| result.is_ok());
    if passed {
        eprintln!("lab: all passed: {} suites", ended.len());
    }
    Ok(u8::from(!passed))
}

/// Runs the measurements of the fabric `verbs`: what `arguments` say, or all; returns the status to exit with.
pub(crate) fn run_bench(parts: &Parts, port_rate_mbit: Option<u32>, arguments: &[OsString]) -> Result<u8> {
    std::env::set_current_dir(workspace()).context("the workspace is not where it was compiled")?;
    let mut executables = Executables::new();
    build(&["bench", "-p", "rdmc-benches", "--bench", "verbs"], &mut executables)?;
    let bench = substitute("{bench:verbs}", &executables)?;
    let run = |port_rate_mbit: Option<u32>, command: &[OsString]| {
        let machine = Machine {
            nodes: 4,
            driver: Driver::Rxe,
            memory_mib: 6 << 10,
            port_rate_mbit,
            timeout_s: Some(BENCH_LIMIT_S),
            writable: Vec::new(),
            kernel_log: None,
            verbose: false,
        };
        anyhow::Ok(boot::boot(parts, &machine, &Guest::Run(command))?.status())
    };
    if !arguments.is_empty() {
        return run(port_rate_mbit, &[&[bench], arguments].concat());
    }
    let all =
        |parts: &str| ["sh", "-ec", parts].map(OsString::from).into_iter().chain([bench.clone()]).collect::<Vec<_>>();
    if port_rate_mbit.is_none() {
        let status = run(None, &all(r#""$0" pair; "$0" group; "$0" time"#))?;
        if status != 0 {
            return Ok(status);
        }
    }
    let mbit = port_rate_mbit.unwrap_or(BENCH_PORT_RATE_MBIT);
    println!("\nports of {mbit} Mbit/s");
    run(Some(mbit), &all(r#""$0" pair --mib 32; "$0" group --mib 32"#))
}

/// Runs a suite in a machine of a process of its own, and shows its output: as it comes if it runs `alone`.
fn run_suite(suite: &Suite, executables: &Executables, verbose: bool, alone: bool) -> Result<()> {
    // If this thread ends early, because the process was killed, so does the machine.
    let mut lab = Command::new("setpriv");
    lab.args(["--pdeathsig", "TERM"]).arg(std::env::current_exe()?).args(["lab", "run"]);
    lab.arg(format!("--nodes={}", suite.nodes)).arg(format!("--driver={}", suite.driver));
    lab.arg(format!("--memory={}", suite.memory_mib)).arg(format!("--timeout={}", suite.timeout_s));
    lab.args(verbose.then_some("--verbose")).arg("--");
    for word in suite.command {
        lab.arg(substitute(word, executables)?);
    }
    lab.stdin(Stdio::null());
    let mut output = tempfile::tempfile()?;
    if alone {
        eprintln!("lab: suite {}", suite.name);
    } else {
        lab.stdout(output.try_clone()?).stderr(output.try_clone()?);
    }
    let status = lab.status().context("cannot run setpriv (package util-linux)")?;
    if alone {
        ensure!(status.success(), "{status}");
        return Ok(());
    }
    let mut text = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut text)?;
    {
        // Locked, so that the outputs of suites do not mix.
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "lab: suite {}", suite.name)?;
        stdout.write_all(&text)?;
    }
    ensure!(status.success(), "{status}; its output ended with:\n{}", boot::tail(&text, OUTPUT_TAIL_LINES));
    Ok(())
}

/// Runs cargo and adds the executables that it tells of.
fn build(arguments: &[&str], executables: &mut Executables) -> Result<()> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).arg("--message-format=json-render-diagnostics");
    if matches!(arguments.first(), Some(&("test" | "bench"))) {
        cargo.arg("--no-run");
    }
    let output = cargo.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    ensure!(output.status.success(), "cargo {} ended with {}", arguments.join(" "), output.status);
    for line in String::from_utf8(output.stdout)?.lines() {
        let message = serde_json::from_str(line).with_context(|| format!("cargo says {line:?}"))?;
        executables.extend(executable(&message));
    }
    Ok(())
}

/// Reads the key and path of an executable from a message of cargo; most messages are of other things.
fn executable(message: &Value) -> Option<(String, PathBuf)> {
    let path = message["executable"].as_str()?;
    let name = message["target"]["name"].as_str()?;
    let kind = match (message["target"]["kind"][0].as_str()?, message["profile"]["test"].as_bool()?) {
        // Several packages have a test of the same name.
        ("test", true) => {
            let package = Path::new(message["manifest_path"].as_str()?).parent()?.file_name()?.to_str()?;
            return Some((format!("test:{package}/{name}"), path.into()));
        }
        ("bench", true) => "bench",
        // Of the kinds of libraries, such as rlib, only the tests are executables.
        (kind, true) if kind.ends_with("lib") || kind == "proc-macro" => "lib",
        ("bin", false) => "bin",
        ("example", false) => "example",
        _ => return None,
    };
    Some((format!("{kind}:{name}"), path.into()))
}

/// Puts the paths of executables for their keys in braces; braces around anything else stay.
fn substitute(word: &str, executables: &Executables) -> Result<OsString> {
    let mut result = String::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('{') {
        result.push_str(before);
        let key = after.split_once('}').filter(|(key, _)| KINDS.iter().any(|kind| key.starts_with(kind)));
        if let Some((key, after)) = key {
            let Some(path) = executables.get(key) else {
                let keys: Vec<&str> = executables.keys().map(String::as_str).collect();
                bail!("no executable {key} was built; there are: {}", keys.join(", "));
            };
            result.push_str(path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?);
            rest = after;
        } else {
            result.push('{');
            rest = after;
        }
    }
    result.push_str(rest);
    Ok(result.into())
}

/// The root of the workspace.
fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a directory of the workspace")
}

const KINDS: [&str; 5] = ["test:", "bench:", "lib:", "bin:", "example:"];
/// Enough for the panics and the summary of a failed test binary, and for a few binaries behind it.
const OUTPUT_TAIL_LINES: usize = 80;
const BENCH_LIMIT_S: u32 = 3600;
const BENCH_PORT_RATE_MBIT: u32 = 200;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn message(kind: &str, test: bool, name: &str) -> Value {
        json!({
            "reason": "compiler-artifact",
            "manifest_path": "/work/crates/package/Cargo.toml",
            "target": { "kind": [kind], "name": name },
            "profile": { "test": test },
            "executable": format!("/target/{name}"),
        })
    }

    #[test]
    fn executables_are_told_apart_by_kind() {
        let key = |message| executable(&message).map(|(key, _)| key);
        assert_eq!(key(message("test", true, "suite")).as_deref(), Some("test:package/suite"));
        assert_eq!(key(message("bench", true, "verbs")).as_deref(), Some("bench:verbs"));
        assert_eq!(key(message("lib", true, "rdmc")).as_deref(), Some("lib:rdmc"));
        assert_eq!(key(message("bin", false, "rdmc")).as_deref(), Some("bin:rdmc"));
        assert_eq!(key(message("bin", true, "rdmc")), None);
        assert_eq!(key(json!({ "reason": "compiler-artifact", "executable": null })), None);
        assert_eq!(key(json!({ "reason": "build-finished", "success": true })), None);
    }

    #[test]
    fn names_in_braces_become_paths() {
        let executables: Executables =
            [message("bin", false, "rdmc"), message("test", true, "suite")].iter().filter_map(executable).collect();
        let substitute = |word| substitute(word, &executables);
        assert_eq!(substitute("{bin:rdmc} < {test:package/suite};").unwrap(), "/target/rdmc < /target/suite;");
        assert_eq!(substitute("f() { ${x}; }").unwrap(), "f() { ${x}; }");
        assert_eq!(substitute("{").unwrap(), "{");
        assert!(substitute("{bin:other}").unwrap_err().to_string().contains("test:package/suite"));
    }

    #[test]
    fn names_of_suites_are_distinct() {
        for (i, suite) in SUITES.iter().enumerate() {
            assert!(SUITES[..i].iter().all(|other| other.name != suite.name), "{} is there twice", suite.name);
        }
    }
}
