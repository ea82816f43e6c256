//! Two flows of large messages (elephants): Table 3 and Figure 4 of Zhang et al.

use super::super::measure::in_parallel;
use super::super::{ExperimentError, Finding, Table};
use super::flows::{self, CompletionWait, Elephant};
use crate::plot::{Axis, Content, Line, LineStyle, Panel};

/// Their Figure 4, events: messages of the base flow in MB, and the ratios of bandwidths against size ratios.
const FIGURE_4: [(u64, &[(u64, f64)]); 5] = [
    (1, &[(1, 1.00), (2, 1.20), (5, 1.37), (10, 1.37), (100, 1.40), (1000, 1.40)]),
    (2, &[(1, 1.00), (2, 1.09), (5, 1.16), (10, 1.19), (100, 1.19)]),
    (5, &[(1, 1.00), (2, 1.03), (5, 1.06), (10, 1.07), (100, 1.07)]),
    (10, &[(1, 1.00), (2, 1.02), (5, 1.02), (10, 1.035), (100, 1.035)]),
    (100, &[(1, 1.00), (2, 1.00), (5, 1.00), (10, 1.00)]),
];
/// The largest ratio of their Figure 4 where both flows poll.
const FIGURE_4_BUSY_MOST: f64 = 1.055;
/// Two elephants: the message size in MB and the kind of waiting of each.
type Pair = [(u64, CompletionWait); 2];

/// Two flows of large messages.
pub(super) struct Elephants(Vec<(Pair, [f64; 2])>);

impl Elephants {
    pub(super) fn measure() -> Result<Self, ExperimentError> {
        let mut pairs: Vec<Pair> = vec![
            [(1, CompletionWait::Busy), (1000, CompletionWait::Event)],
            [(1, CompletionWait::Busy), (1, CompletionWait::Event)],
        ];
        for waits in [CompletionWait::Event, CompletionWait::Busy] {
            for (base, points) in FIGURE_4 {
                pairs.extend(points.iter().map(|&(ratio, _)| [(base * ratio, waits), (base, waits)]));
            }
        }
        let sends = |(megabytes, waits)| Elephant::sends(megabytes, waits);
        let rates = in_parallel(&pairs, |&pair| flows::elephants(pair.map(sends)))?;
        Ok(Self(pairs.into_iter().zip(rates).collect()))
    }

    fn rates(&self, pair: Pair) -> [f64; 2] {
        self.0.iter().find(|(of, _)| *of == pair).map_or([f64::NAN; 2], |&(_, rates)| rates)
    }

    /// Returns the bandwidth of the flow with larger messages as a multiple of the base flow's.
    fn ratio(&self, base: u64, ratio: u64, waits: CompletionWait) -> f64 {
        let [large, small] = self.rates([(base * ratio, waits), (base, waits)]);
        large / small
    }

    pub(super) fn table(&self) -> Table {
        let columns = ["a_mb", "a_waits", "b_mb", "b_waits", "a_gbps", "b_gbps", "ratio", "ratio_in_the_paper"];
        let mut table = Table::new("elephants", &columns);
        for &([a, b], [rate_a, rate_b]) in &self.0 {
            let points = FIGURE_4.iter().find(|(base, _)| *base == b.0).map(|(_, points)| *points);
            let point = points.and_then(|points| points.iter().find(|(ratio, _)| b.0 * ratio == a.0));
            let paper = match (a.1, b.1) {
                (CompletionWait::Event, CompletionWait::Event) => {
                    point.map_or_else(String::new, |(_, ratio)| ratio.to_string())
                }
                (CompletionWait::Busy, CompletionWait::Event) => if b.0 == 1 { "1.20" } else { "1.00" }.to_owned(),
                _ => String::new(),
            };
            let waits = |waits: CompletionWait| format!("{waits:?}").to_lowercase();
            let mut row = vec![a.0.to_string(), waits(a.1), b.0.to_string(), waits(b.1)];
            row.extend([rate_a, rate_b].map(|rate| format!("{rate:.2}")));
            row.extend([format!("{:.3}", rate_a / rate_b), paper]);
            table.push(row);
        }
        table
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let far = self.ratio(1, 1000, CompletionWait::Event);
        let [giga, mega] = self.rates([(1000, CompletionWait::Event), (1, CompletionWait::Event)]);
        let of_figure = |waits| {
            FIGURE_4.into_iter().flat_map(move |(base, points)| {
                points.iter().map(move |&(ratio, paper)| (self.ratio(base, ratio, waits), paper))
            })
        };
        let off = of_figure(CompletionWait::Event).map(|(ratio, paper)| (ratio - paper).abs()).fold(0.0, f64::max);
        let busy = of_figure(CompletionWait::Busy).map(|(ratio, _)| ratio).fold(0.0, f64::max);
        let mixed = |megabytes| {
            let [busy, event] = self.rates([(1, CompletionWait::Busy), (megabytes, CompletionWait::Event)]);
            busy / event
        };
        let (against_large, against_same) = (mixed(1000), mixed(1));
        vec![
            Finding {
                what: "1 GB against 1 MB messages, both with events (Table 3; the pause is fitted to it)".into(),
                paper: "1.37 to 1.44 times the bandwidth, depending on the verb; 28.2 and 20.5 Gbit/s".into(),
                here: format!("{far:.2} times, {giga:.1} and {mega:.1} Gbit/s; verbs do not differ in the model"),
                agrees: (1.32..=1.49).contains(&far),
            },
            Finding {
                what: "all of Figure 4, events: base messages of 1 to 100 MB, 1 to 1000 times larger ones".into(),
                paper: "1.00 to 1.40, less for larger base sizes".into(),
                here: format!("differs by at most {off:.2}, with one fitted constant"),
                agrees: off <= 0.1,
            },
            Finding {
                what: "all of Figure 4, both polling".into(),
                paper: format!("fair: at most {FIGURE_4_BUSY_MOST}"),
                here: format!("at most {busy:.3}"),
                agrees: busy <= FIGURE_4_BUSY_MOST,
            },
            Finding {
                what: "1 MB polling against 1 GB with events".into(),
                paper: "equal".into(),
                here: format!("{against_large:.2} times"),
                agrees: (against_large - 1.0).abs() <= 0.05,
            },
            Finding {
                what: "1 MB polling against 1 MB with events".into(),
                paper: "1.20 times".into(),
                here: format!(
                    "{against_same:.2} times: one length of the pause after each event cannot match both this and \
                     Table 3"
                ),
                agrees: (against_same - 1.2).abs() <= 0.06,
            },
        ]
    }

    pub(super) fn panel(&self) -> Panel {
        let lines = FIGURE_4.into_iter().filter(|(base, _)| *base <= 10).flat_map(|(base, points)| {
            let at = |ratio: u64| ratio as f64;
            let here =
                points.iter().map(|&(ratio, _)| (at(ratio), self.ratio(base, ratio, CompletionWait::Event))).collect();
            let paper = points.iter().map(|&(ratio, paper)| (at(ratio), paper)).collect();
            [Line::new(format!("{base} MB"), here, LineStyle::Markers), Line::new("", paper, LineStyle::Dashed)]
        });
        Panel {
            title: Some("Two elephants, events (dashed: the paper)".into()),
            ..Panel::new(
                Axis::log10("message size of the larger flow (times the base)"),
                Axis::linear("bandwidth of the larger flow (times the base)").with_range(0.95, 1.5),
                Content::Lines(lines.collect()),
            )
        }
    }
}
