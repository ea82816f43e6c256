//! The results of `rdmc bench`, as they are printed.

use std::cell::RefCell;
use std::path::Path;

use anyhow::Context;
use rdmc_bench::{Output, OutputFormat};

use crate::exit::Exit;
use crate::progress::{Bar, OutputOptions, Reporter, print_line};

/// Returns the form of the results.
pub(crate) fn format_of(output: OutputOptions, csv: bool) -> OutputFormat {
    match (output.json, csv) {
        (true, _) => OutputFormat::Json,
        (false, true) => OutputFormat::Csv,
        (false, false) => OutputFormat::Table,
    }
}

/// The output of the results.
pub(crate) struct Printer {
    reporter: Reporter,
    /// `None` when everything is measured.
    bar: RefCell<Option<Bar>>,
    total: u64,
}

impl Printer {
    /// Prints the results of so many measurements.
    pub(crate) fn new(reporter: Reporter, total: u64) -> Self {
        let bar = RefCell::new(Some(reporter.work_bar("", total)));
        Self { reporter, bar, total }
    }
}

impl Output for Printer {
    fn print(&self, text: &str) {
        if self.reporter.is_json() {
            print_line(text);
        } else {
            self.reporter.print(text);
        }
    }

    fn progress(&self, now: &str, done: u64) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.label(now);
            // Programs see the results instead.
            if !self.reporter.is_json() {
                bar.set(done);
            }
        }
        if done == self.total {
            self.bar.take();
        }
    }
}

/// Name of the subcommand that is a process of the benchmark.
pub(crate) const PROCESS: &str = "internal-bench-node";

/// Fails if a file cannot be written. What it has stays.
pub(crate) fn check_writable(path: &Path) -> anyhow::Result<()> {
    let opened = std::fs::File::options().create(true).append(true).open(path);
    opened.with_context(|| path.display().to_string()).context(Exit::Usage)?;
    Ok(())
}
