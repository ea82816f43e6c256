//! The line of a bar, which fits a terminal of any width.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use indicatif::{HumanDuration, ProgressState, ProgressStyle};
use rdmc_files::size::{ByteSize, Rate};

/// What a bar measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarKind {
    /// Bytes.
    Bytes,
    /// Parts of some work.
    Work,
}

/// The label of a bar, which can change.
#[derive(Clone, Debug)]
pub(super) struct Label(Arc<Mutex<String>>);

impl Label {
    pub(super) fn new(text: &str) -> Self {
        Self(Arc::new(Mutex::new(text.to_owned())))
    }

    pub(super) fn set(&self, text: &str) {
        text.clone_into(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn text(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl BarKind {
    /// Returns the style that draws the line anew for the width that the terminal has.
    pub(super) fn style(self, label: Label) -> ProgressStyle {
        let draw = move |state: &ProgressState, out: &mut dyn fmt::Write| {
            let label = label.text();
            let line = Line { label: &label, label_width: self.label_width(), percent: percent(state) };
            // It goes into a string.
            let _ = out.write_str(&line.fit(columns(), &self.details(state)));
        };
        ProgressStyle::with_template("{line}").expect("the template is constant").with_key("line", draw)
    }

    fn label_width(self) -> usize {
        match self {
            Self::Bytes => 18,
            Self::Work => 32,
        }
    }

    /// Describes the progress beyond the percentage. A narrow terminal shows the last of these, or none.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative; `as` saturates")]
    fn details(self, state: &ProgressState) -> Vec<String> {
        match self {
            Self::Bytes => {
                let (done, total) = (ByteSize(state.pos()), ByteSize(state.len().unwrap_or_default()));
                let rate = Rate { bytes: state.per_sec() as u64, seconds: 1.0 };
                let left = format!("{:#}", HumanDuration(state.eta()));
                vec![format!("{done:>10} of {total}"), format!("{rate:>12}"), format!("{left:>3}")]
            }
            Self::Work => vec![format!("{:>4}", format!("{:#}", HumanDuration(state.elapsed())))],
        }
    }
}

/// A line: label, bar and percentage.
struct Line<'a> {
    label: &'a str,
    /// Width of the label if there is room. A longer label is cut.
    label_width: usize,
    percent: u8,
}

impl Line<'_> {
    /// Lays the line out in so many columns. Where they are too few, the first details go first, then the label, then
    /// the bar. The percentage is always there.
    fn fit(&self, columns: usize, details: &[String]) -> String {
        let percent = format!("{:>3}%", self.percent);
        let label: String = self.label.chars().take(self.label_width).collect();
        let padded = format!("{label:width$} ", width = self.label_width);
        let whole = |label: &str, details: &[String]| {
            let details: String = details.iter().flat_map(|detail| [" ", detail]).collect();
            let bar = columns.checked_sub(label.chars().count() + 1 + percent.len() + details.chars().count());
            let bar = bar.filter(|bar| *bar >= BAR_MIN)?;
            Some(format!("{label}{} {percent}{details}", self.bar(bar)))
        };
        whole(&padded, details)
            .or_else(|| (1..=details.len()).find_map(|from| whole(&format!("{label} "), &details[from..])))
            .or_else(|| whole("", &[]))
            .unwrap_or_else(|| percent.trim_start().chars().take(columns).collect())
    }

    /// Draws the bar in so many columns.
    fn bar(&self, columns: usize) -> String {
        let inside = columns - 2;
        let done = inside * usize::from(self.percent) / 100;
        let head = if done < inside { ">" } else { "" };
        format!("[{}{head:inside$}]", "=".repeat(done), inside = inside - done)
    }
}

/// Returns the percentage that is done, rounded down.
fn percent(state: &ProgressState) -> u8 {
    let hundredths = (u128::from(state.pos()) * 100).checked_div(state.len().unwrap_or_default().into());
    hundredths.map_or(100, |hundredths| u8::try_from(hundredths.min(100)).expect("it is at most 100"))
}

/// Returns the width of the terminal.
fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stderr()).ok();
    let columns = size.map(|size| size.ws_col).filter(|columns| *columns > 0);
    columns.unwrap_or(COLUMNS_DEFAULT).into()
}

/// Least width of a bar, brackets included.
const BAR_MIN: usize = 10;
/// Width of a terminal that does not know its own.
const COLUMNS_DEFAULT: u16 = 80;

#[cfg(test)]
mod tests {
    use super::*;

    fn details() -> Vec<String> {
        ["  512 MiB of 1 GiB", "   110 MiB/s", " 5s"].map(str::to_owned).to_vec()
    }

    #[test]
    fn a_line_drops_parts_until_it_fits() {
        let line = Line { label: "sending", label_width: 18, percent: 50 };
        let drawn = [
            (80, "sending            [=========>        ]  50%   512 MiB of 1 GiB    110 MiB/s  5s"),
            (60, "sending [==============>             ]  50%    110 MiB/s  5s"),
            (40, "sending [====>   ]  50%    110 MiB/s  5s"),
            (30, "sending [=====>     ]  50%  5s"),
            (25, "sending [=====>    ]  50%"),
            (20, "[======>      ]  50%"),
            (14, "50%"),
            (2, "50"),
            (0, ""),
        ];
        for (columns, expected) in drawn {
            assert_eq!(line.fit(columns, &details()), expected, "{columns}");
        }
    }

    #[test]
    fn a_line_is_never_longer_than_the_terminal() {
        let texts = ["", "sending", "8 members, 256 MiB, binomial-pipeline, tcp, and more"];
        for (columns, label) in (0..300).flat_map(|columns| texts.map(|label| (columns, label))) {
            for percent in [0, 1, 50, 99, 100] {
                let line = Line { label, label_width: 32, percent };
                let drawn = line.fit(columns, &details());
                assert!(drawn.chars().count() <= columns, "{columns}: {drawn}");
                let told = columns < 4 || drawn.contains(&format!("{percent}%"));
                assert!(told, "{columns}: {drawn}");
            }
        }
    }
}
