//! Builds the suites on the host, runs them in the lab and sums up.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::boot::{self, Guest, Outcome};
use super::build::Parts;
use super::suites::{SUITES, Suite};
use super::{Driver, Machine};

/// Paths of executables by `KIND:NAME`.
type Executables = BTreeMap<String, PathBuf>;

/// Runs the suites with `filter` in their names, or those of every day if it is empty; returns the status to exit with.
pub(crate) fn run_suites(parts: &Parts, filter: &str, verbose: bool) -> Result<u8> {
    let chosen = |suite: &&Suite| if filter.is_empty() { suite.by_default } else { suite.name.contains(filter) };
    let suites: Vec<&Suite> = SUITES.iter().filter(chosen).collect();
    ensure!(!suites.is_empty(), "no suite has {filter:?} in its name");
    std::env::set_current_dir(workspace()).context("the workspace is not where it was compiled")?;
    let mut summary = Vec::new();
    for suite in suites {
        eprintln!("lab: suite {}", suite.name);
        let start = Instant::now();
        let outcome = run_suite(parts, suite, verbose);
        let verdict = match &outcome {
            Ok(Outcome::Exited(0)) => "passed".to_owned(),
            Ok(Outcome::Exited(status)) => format!("FAILED with status {status}"),
            Ok(Outcome::TimedOut) => format!("FAILED: timed out after {} s", suite.timeout_s),
            Ok(outcome @ Outcome::Interrupted(_)) => return Ok(outcome.status()),
            Err(error) => format!("FAILED: {error:#}"),
        };
        summary.push((suite.name, matches!(outcome, Ok(Outcome::Exited(0))), verdict, start.elapsed()));
    }
    for (name, _, verdict, elapsed) in &summary {
        eprintln!("lab: {name:<20} {:>6.1} s  {verdict}", elapsed.as_secs_f64());
    }
    let passed = summary.iter().all(|(_, passed, ..)| *passed);
    if passed {
        eprintln!("lab: all passed: {} suites", summary.len());
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
        let machine = Machine { port_rate_mbit, ..machine(4, Driver::Rxe, 6 << 10, BENCH_LIMIT_S) };
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

fn run_suite(parts: &Parts, suite: &Suite, verbose: bool) -> Result<Outcome> {
    let mut executables = Executables::new();
    for arguments in suite.builds {
        build(arguments, &mut executables)?;
    }
    let command = suite.command.iter().map(|word| substitute(word, &executables)).collect::<Result<Vec<OsString>>>()?;
    let machine = Machine { verbose, ..machine(suite.nodes, suite.driver, suite.memory_mib, suite.timeout_s) };
    boot::boot(parts, &machine, &Guest::Run(&command))
}

fn machine(nodes: u8, driver: Driver, memory_mib: u32, timeout_s: u32) -> Machine {
    Machine {
        nodes,
        driver,
        memory_mib,
        port_rate_mbit: None,
        timeout_s: Some(timeout_s),
        writable: Vec::new(),
        kernel_log: None,
        verbose: false,
    }
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
