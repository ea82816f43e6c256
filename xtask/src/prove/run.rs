//! Runs the steps of a tier and reads from their output how it went.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::tier::{Step, Tier};

/// Runs all steps of a tier; returns one line about how they went.
pub(crate) fn run(root: &Path, tier: &Tier) -> Result<String> {
    let results = tier.steps.iter().map(|step| run_step(root, step)).collect::<Result<Vec<_>>>()?;
    Ok(results.into_iter().flatten().collect::<Vec<_>>().join("; "))
}

/// Runs a step, shows its output, and returns what it tells of the result, if anything.
fn run_step(root: &Path, step: &Step) -> Result<Option<String>> {
    let shown = step.run.join(" ");
    println!("$ {shown}");
    let (program, arguments) = step.run.split_first().context("the step runs nothing")?;
    let (reader, writer) = std::io::pipe()?;
    let mut command = Command::new(program);
    command.args(arguments).envs(&step.env).current_dir(root).stdin(Stdio::null());
    let mut child =
        command.stdout(writer.try_clone()?).stderr(writer).spawn().with_context(|| format!("cannot run {program}"))?;
    // Our copies of the writing end would keep the loop below from ending.
    drop(command);
    let mut told = Told::default();
    for line in BufReader::new(reader).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        told.read(&line, step.result.as_deref());
    }
    let status = child.wait()?;
    ensure!(status.success(), "{shown}: {status}");
    if let Some(skipped) = told.skipped {
        bail!("{shown}: {skipped}");
    }
    for test in &step.tests {
        ensure!(told.passed_names.iter().any(|name| is_test(name, test)), "{shown}: no test {test} has passed");
    }
    match &step.result {
        Some(words) => told.result.map(Some).with_context(|| format!("{shown}: its output has no {words:?}")),
        None => Ok((told.passed > 0).then(|| format!("{} tests passed", told.passed))),
    }
}

/// What the output of a step tells.
#[derive(Debug, Default)]
struct Told {
    passed: u64,
    passed_names: Vec<String>,
    result: Option<String>,
    /// The first thing that was skipped: a proof that skips something proves something else.
    skipped: Option<String>,
}

impl Told {
    fn read(&mut self, line: &str, result: Option<&str>) {
        if let Some(counts) = line.strip_prefix("test result: ok. ") {
            self.passed += counts.split(' ').next().and_then(|count| count.parse::<u64>().ok()).unwrap_or(0);
        }
        if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... ok")) {
            self.passed_names.push(name.trim_end_matches(" - should panic").to_owned());
        }
        if line.starts_with(SKIPPED) {
            self.skipped.get_or_insert_with(|| line.to_owned());
        }
        // Where output is not captured, a line may begin with the name of its test.
        if let Some(at) = result.and_then(|words| line.find(words)) {
            self.result = Some(line[at..].trim().to_owned());
        }
    }
}

/// Tells whether `test` is the end of a test's path.
fn is_test(path: &str, test: &str) -> bool {
    path.strip_suffix(test).is_some_and(|before| before.is_empty() || before.ends_with("::"))
}

/// How tests begin the line in which they say that they need what is not here.
const SKIPPED: &str = "skipped: ";

#[cfg(test)]
mod tests {
    use super::*;

    fn step(script: &str, tests: &[&str], result: Option<&str>) -> Step {
        Step {
            run: ["sh", "-c", script].map(str::to_owned).to_vec(),
            env: [("PROOF".to_owned(), "full".to_owned())].into(),
            tests: tests.iter().map(|test| (*test).to_owned()).collect(),
            result: result.map(str::to_owned),
        }
    }

    fn run(step: &Step) -> Result<Option<String>> {
        run_step(Path::new("/"), step)
    }

    #[test]
    fn tests_that_passed_are_counted() {
        let script = "echo 'test a::one ... ok'; echo 'test result: ok. 2 passed; 0 failed'; \
                      echo 'test result: ok. 3 passed; 0 failed' >&2";
        assert_eq!(run(&step(script, &["one"], None)).unwrap().unwrap(), "5 tests passed");
        let missing = run(&step(script, &["ne"], None)).unwrap_err().to_string();
        assert!(missing.ends_with("no test ne has passed"), "{missing}");
    }

    #[test]
    fn the_line_of_the_result_must_come() {
        let script = "echo \"test it ... sums: $PROOF, 1 of 1 \"";
        assert_eq!(run(&step(script, &[], Some("sums: "))).unwrap().unwrap(), "sums: full, 1 of 1");
        let missing = run(&step(script, &[], Some("counts: "))).unwrap_err().to_string();
        assert!(missing.ends_with("its output has no \"counts: \""), "{missing}");
    }

    #[test]
    fn what_fails_or_skips_something_is_no_proof() {
        assert!(run(&step("exit 3", &[], None)).unwrap_err().to_string().contains("3"));
        let skipped = run(&step("echo 'skipped: no root'", &[], None)).unwrap_err().to_string();
        assert!(skipped.ends_with("skipped: no root"), "{skipped}");
        assert_eq!(run(&step("echo fine", &[], None)).unwrap(), None);
    }
}
