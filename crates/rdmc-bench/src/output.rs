//! Where results go, and in which form.

/// Form of the printed results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// A table for people.
    Table,
    /// Lines of comma-separated values.
    Csv,
    /// A JSON object per line.
    Json,
}

/// Output of a benchmark.
pub trait Output {
    /// Prints one or more lines. The last line end is missing.
    fn print(&self, text: &str);

    /// Shows the progress: `done` configurations are measured, and `now` describes the one that is being measured.
    /// After the last one `now` is empty.
    fn progress(&self, now: &str, done: u64);
}
