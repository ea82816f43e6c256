//! Draws README's figure from the comma-separated values of `program.sh`.
//!
//! ```text
//! cargo run -p rdmc-benches --example receivers -- docs/figures/receivers.csv docs/receivers.svg
//! ```

use anyhow::{Context, Result, bail};
use rdmc_sim::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [values, figure] = &arguments[..] else { bail!("arguments: FILE.csv FILE.svg") };
    let text = std::fs::read_to_string(values).with_context(|| format!("cannot read {values}"))?;

    let mut lines = Vec::new();
    for (algorithm, name) in [("auto", "rdmc"), ("sequential", "the sender sends every copy")] {
        let points = points_of(&text, algorithm).with_context(|| format!("in {values}"))?;
        lines.push(Line::new(name, points, LineStyle::Markers));
    }
    let (x, y) = (Axis::linear("receivers"), Axis::linear("seconds until all have the file and it is checked"));
    let y = Axis { range: Some((0.0, highest(&lines))), ..y };
    let mut drawn = Figure::new("One file to many hosts", vec![Panel::new(x, y, Content::Lines(lines))]);
    drawn.subtitle = Some("rdmc send, 64 MiB; every host has a port of 200 Mbit/s".to_owned());
    std::fs::write(figure, drawn.to_svg()).with_context(|| format!("cannot write {figure}"))
}

/// Reads the number of receivers and the seconds from the rows of an algorithm.
fn points_of(text: &str, algorithm: &str) -> Result<Vec<(f64, f64)>> {
    let mut points = Vec::new();
    for row in text.lines().skip(1) {
        let columns: Vec<&str> = row.split(',').collect();
        let [receivers, of, seconds, ..] = columns[..] else { bail!("no row of program.sh: {row}") };
        if of == algorithm {
            points.push((receivers.parse()?, seconds.parse()?));
        }
    }
    Ok(points)
}

fn highest(lines: &[Line]) -> f64 {
    lines.iter().flat_map(|line| &line.points).map(|&(_, seconds)| seconds).fold(0.0, f64::max)
}
