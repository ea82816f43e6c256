//! The picture of the results: time and rate over the size, with a line for each configuration.

use rdmc_sim::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

use crate::measured::CaseResult;
use crate::plan::{Case, NAMES};
use crate::report::time;

/// Draws the results.
pub(crate) fn draw(results: &[(Case, CaseResult)]) -> Figure {
    let varying: Vec<usize> = (0..NAMES.len())
        .filter(|place| results.iter().any(|(case, _)| case.names()[*place] != results[0].0.names()[*place]))
        .collect();
    let compares = results.iter().any(|(_, measured)| measured.setup.is_some());
    let mut lines: Vec<(String, Vec<&CaseResult>)> = Vec::new();
    for (case, measured) in results {
        let names = case.names();
        let mut words: Vec<String> =
            varying.iter().map(|place| format!("{} {}", NAMES[*place], names[*place])).collect();
        if compares {
            words.insert(0, format!("{} {}", measured.by, measured.transport));
        }
        let name = if words.is_empty() { measured.transport.clone() } else { words.join(", ") };
        match lines.iter_mut().find(|(known, _)| *known == name) {
            Some((_, points)) => points.push(measured),
            None => lines.push((name, vec![measured])),
        }
    }
    let panel = |label: &str, of: fn(&CaseResult) -> Option<f64>| {
        let lines = lines.iter().filter_map(|(name, points)| {
            let mut points: Vec<(f64, f64)> =
                points.iter().filter_map(|point| Some((length(point), of(point)?))).collect();
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
            (!points.is_empty()).then(|| Line::new(name.clone(), points, LineStyle::Markers))
        });
        Panel::new(Axis::log2("message (bytes)"), Axis::log10(label), Content::Lines(lines.collect()))
    };
    let panels = vec![
        panel("time to the last receiver (s, median)", |measured| Some(measured.seconds.median)),
        panel("all receivers together (GiB/s)", |measured| measured.aggregate_rate.map(|rate| rate / GIB)),
    ];
    let mut figure = Figure::new("rdmc bench: processes of one host", panels);
    figure.subtitle = results.iter().map(|(_, measured)| measured.seconds.median).reduce(f64::max).map(|longest| {
        let rounds = results.iter().map(|(_, measured)| measured.rounds).min().unwrap_or(0);
        format!("medians of {rounds} rounds or more; the longest took {}", time(longest))
    });
    figure.columns = 1;
    figure
}

#[expect(clippy::cast_precision_loss, reason = "a place on an axis")]
fn length(measured: &CaseResult) -> f64 {
    measured.bytes as f64
}

const GIB: f64 = (1u64 << 30) as f64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::tests::{case, measured};

    #[test]
    fn every_configuration_is_a_line_in_both_panels() {
        let results: Vec<_> = [(2, 1), (2, 1 << 20), (3, 1)]
            .map(|(nodes, bytes)| (case(nodes, bytes), CaseResult { nodes, bytes, ..measured() }))
            .into();
        let figure = draw(&results);
        for panel in &figure.panels {
            let Content::Lines(lines) = &panel.content else { panic!("lines") };
            let found: Vec<_> = lines.iter().map(|line| (line.name.as_str(), line.points.len())).collect();
            assert_eq!(found, [("n 2", 2), ("n 3", 1)]);
        }
        assert!(figure.to_svg().starts_with("<svg"));
    }

    #[test]
    fn nothing_measured_is_an_empty_picture() {
        assert!(draw(&[]).to_svg().contains("no data"));
    }
}
