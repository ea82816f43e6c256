//! A flow of small messages (mouse) beside a flow of large ones (elephant): Figure 7 of Zhang et al.

use super::super::measure::in_parallel;
use super::super::{ExperimentError, Finding, Table};
use super::flows::{self, MouseTimes};
use crate::plot::{Axis, Content, Line, LineStyle, Panel};

/// Their Figure 7: bytes of the mouse; median in µs and million messages a second alone, beside 1 MB and 1 GB.
const FIGURE_7: [(u64, [f64; 3], [f64; 3]); 3] = [
    (10, [1.3, 2.8, 2.9], [0.78, 0.37, 0.33]),
    (100, [1.4, 2.6, 2.9], [0.71, 0.40, 0.36]),
    (1000, [2.4, 6.3, 6.0], [0.41, 0.18, 0.17]),
];
/// The port, in bit/s.
const PORT_BPS: f64 = 48e9;
/// The message size of the elephant beside the mouse, in MB; `None` without an elephant.
const BESIDE: [Option<u64>; 3] = [None, Some(1), Some(1000)];

/// Flows of small messages, alone and beside large ones.
pub(super) struct Mice {
    times: Vec<(u64, Option<u64>, MouseTimes)>,
    /// Rates of elephants alone: message size in MB, Gbit/s.
    alone: Vec<(u64, f64)>,
}

impl Mice {
    pub(super) fn measure() -> Result<Self, ExperimentError> {
        let jobs: Vec<(u64, Option<u64>)> =
            FIGURE_7.into_iter().flat_map(|(bytes, ..)| BESIDE.map(|megabytes| (bytes, megabytes))).collect();
        let times = in_parallel(&jobs, |&(bytes, megabytes)| flows::mouse(bytes, megabytes))?;
        let times = jobs.into_iter().zip(times).map(|((bytes, megabytes), times)| (bytes, megabytes, times)).collect();
        let sizes: Vec<u64> = BESIDE.into_iter().flatten().collect();
        let alone = in_parallel(&sizes, |&megabytes| flows::elephant_alone(megabytes))?;
        Ok(Self { times, alone: sizes.into_iter().zip(alone).collect() })
    }

    fn of(&self, bytes: u64, megabytes: Option<u64>) -> MouseTimes {
        let found = self.times.iter().find(|times| (times.0, times.1) == (bytes, megabytes));
        found.map_or(MouseTimes { median_us: f64::NAN, rate: f64::NAN, elephant_gbps: f64::NAN }, |&(.., times)| times)
    }

    pub(super) fn table(&self) -> Table {
        let columns = [
            "mouse_bytes",
            "elephant_mb",
            "median_us",
            "median_us_in_the_paper",
            "million_per_s",
            "million_per_s_in_the_paper",
            "elephant_gbps",
        ];
        let mut table = Table::new("mice", &columns);
        for (bytes, medians, rates) in FIGURE_7 {
            for (place, megabytes) in BESIDE.into_iter().enumerate() {
                let times = self.of(bytes, megabytes);
                table.push(vec![
                    bytes.to_string(),
                    megabytes.map_or_else(|| "none".to_owned(), |megabytes| megabytes.to_string()),
                    format!("{:.3}", times.median_us),
                    medians[place].to_string(),
                    format!("{:.3}", times.rate),
                    rates[place].to_string(),
                    format!("{:.3}", times.elephant_gbps),
                ]);
            }
        }
        table
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let slower = |bytes, megabytes: u64| self.of(bytes, Some(megabytes)).median_us / self.of(bytes, None).median_us;
        let rate = |bytes, megabytes: u64| self.of(bytes, Some(megabytes)).rate / self.of(bytes, None).rate;
        let lost_to = |bytes: u64| {
            let beside = self.alone.iter().map(|&(megabytes, alone)| (self.of(bytes, Some(megabytes)), alone));
            beside.map(|(times, alone)| 1.0 - times.elephant_gbps / alone).fold(0.0, f64::max)
        };
        let lost = FIGURE_7.iter().map(|(bytes, ..)| lost_to(*bytes)).fold(0.0, f64::max);
        let (ten, hundred) = (slower(10, 1000), slower(100, 1000));
        let (kilo, kilo_alone) = (slower(1000, 1000), self.of(1000, None).median_us);
        vec![
            Finding {
                what: "median of a mouse of 10 and 100 bytes beside an elephant of 1 GB (Figure 7)".into(),
                paper: "2.2 and 2.1 times that alone, 1.3 and 1.4 µs".into(),
                here: format!("{ten:.2} and {hundred:.2} times; the queue is fitted to this"),
                agrees: (1.8..=2.6).contains(&ten) && (1.7..=2.5).contains(&hundred),
            },
            Finding {
                what: "messages per second of a mouse of 10 bytes beside 1 MB and 1 GB".into(),
                paper: "0.47 and 0.42 of those alone".into(),
                here: format!(
                    "{:.2} and {:.2}: beside 1 MB the mouse has the port alone during the pauses between messages",
                    rate(10, 1),
                    rate(10, 1000)
                ),
                agrees: (rate(10, 1) - 0.47).abs() <= 0.12 && (rate(10, 1000) - 0.42).abs() <= 0.12,
            },
            Finding {
                what: "median of a mouse of 1 KB alone and beside 1 GB".into(),
                paper: "2.4 µs, and 2.5 times that".into(),
                here: format!(
                    "{kilo_alone:.1} µs, and {kilo:.2} times that; the fetch of its payload is fitted to the first"
                ),
                agrees: (kilo_alone - 2.4).abs() <= 0.3 && (kilo - 2.5).abs() <= 0.3,
            },
            Finding {
                what: "bandwidth that the elephant loses to a mouse".into(),
                paper: "none".into(),
                here: format!(
                    "at most {:.1} %, to a mouse of 1 KB, whose own bytes are {:.1} % of the port; {:.1} % to a mouse \
                     of 10 bytes",
                    lost * 1e2,
                    self.of(1000, Some(1000)).rate * 1e6 * 8_000.0 / PORT_BPS * 1e2,
                    lost_to(10) * 1e2
                ),
                agrees: lost <= 0.02,
            },
        ]
    }

    pub(super) fn panel(&self) -> Panel {
        let line = |name: &str, of: &dyn Fn(usize) -> f64, style| {
            let points = FIGURE_7.iter().enumerate().map(|(place, (bytes, ..))| (*bytes as f64, of(place)));
            Line::new(name, points.collect(), style)
        };
        let here = |beside: Option<u64>| move |place: usize| self.of(FIGURE_7[place].0, beside).median_us;
        let paper = |beside: usize| move |place: usize| FIGURE_7[place].1[beside];
        Panel {
            title: Some("A mouse, polling, beside an elephant".into()),
            ..Panel::new(
                Axis::log10("message of the mouse (bytes)"),
                Axis::linear("median time of a message (µs)").with_range(0.0, 7.0),
                Content::Lines(vec![
                    line("beside 1 GB", &here(Some(1000)), LineStyle::Markers),
                    line("the paper, beside 1 GB", &paper(2), LineStyle::Dashed),
                    line("alone", &here(None), LineStyle::Markers),
                    line("the paper, alone", &paper(0), LineStyle::Dashed),
                ]),
            )
        }
    }
}
