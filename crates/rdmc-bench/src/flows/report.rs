//! The printed results of flows, and their picture.

use rdmc_files::words::count;
use rdmc_sim::plot::{Axis, BarSeries, Bars, Content, Figure, Panel};
use serde::Serialize;

use super::FlowsOptions;
use super::flow::Flow;
use super::tally::{Sample, Times};
use crate::local::cores;
use crate::output::{Output, OutputFormat};
use crate::report::{optional, per_second, quoted, time};
use crate::statistics::median;

/// What a flow ran beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Setting {
    Alone,
    Beside,
}

/// The results of one flow, alone or beside the others: medians of the repetitions.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename = "result")]
pub(super) struct FlowResult {
    /// Its place on the command line, from 1.
    number: usize,
    flow: String,
    pub(super) setting: Setting,
    fabric: &'static str,
    repetitions: u32,
    /// Bytes per second.
    pub(super) rate: f64,
    message_rate: f64,
    seconds: Option<Times>,
    /// Processor time of the two ends as a share of the time.
    cpu_source: Option<f64>,
    cpu_target: Option<f64>,
    /// Of the rates of all flows.
    pub(super) share: Option<f64>,
    /// The rate over that alone, and the same of times.
    rate_to_alone: Option<f64>,
    median_to_alone: Option<f64>,
    p99_to_alone: Option<f64>,
}

impl FlowResult {
    #[expect(clippy::cast_precision_loss, reason = "a length of at most 1 GiB")]
    pub(super) fn of(number: usize, flow: &Flow, options: &FlowsOptions, setting: Setting, runs: &[Sample]) -> Self {
        let message_rate = median(runs.iter().map(|run| run.message_rate));
        let times: Vec<Times> = runs.iter().filter_map(|run| run.seconds).collect();
        let middle = |of: fn(&Times) -> f64| median(times.iter().map(of));
        let seconds = (!times.is_empty()).then(|| Times {
            median: middle(|times| times.median),
            p99: middle(|times| times.p99),
            p999: middle(|times| times.p999),
            max: times.iter().map(|times| times.max).fold(0.0, f64::max),
        });
        let cpu: Vec<[f64; 2]> = runs.iter().filter_map(|run| run.cpu).collect();
        let cpu = |end: usize| (!cpu.is_empty()).then(|| median(cpu.iter().map(|cpu| cpu[end])));
        Self {
            number: number + 1,
            flow: flow.to_string(),
            setting,
            fabric: options.fabric.name(),
            repetitions: options.repetitions,
            rate: message_rate * flow.bytes as f64,
            message_rate,
            seconds,
            cpu_source: cpu(0),
            cpu_target: cpu(1),
            share: None,
            rate_to_alone: None,
            median_to_alone: None,
            p99_to_alone: None,
        }
    }

    /// Compares it with the flow alone.
    pub(super) fn over(self, alone: &Self) -> Self {
        let ratio = |of: fn(&Times) -> f64| Some(of(&self.seconds?) / of(&alone.seconds?));
        let (median_to_alone, p99_to_alone) = (ratio(|times| times.median), ratio(|times| times.p99));
        let rate_to_alone = (alone.rate > 0.0).then(|| self.rate / alone.rate);
        Self { rate_to_alone, median_to_alone, p99_to_alone, ..self }
    }
}

/// Prints results in the chosen form. So many ends of flows were on this host.
pub(super) fn print(results: &[FlowResult], ends_here: usize, format: OutputFormat, output: &dyn Output) {
    match format {
        OutputFormat::Json => {
            for result in results {
                output.print(&serde_json::to_string(result).expect("results have string keys"));
            }
        }
        OutputFormat::Csv => {
            output.print(&CSV.map(|(name, _)| name).join(","));
            for result in results {
                output.print(&CSV.map(|(_, value)| quoted(value(result))).join(","));
            }
        }
        OutputFormat::Table => {
            output.print(table(results).trim_end());
            if ends_here > cores() {
                let cores = count(cores() as u64, "core");
                let so = "so flows may wait for a core, not for the network";
                output.print(&format!("\n{ends_here} ends share the {cores} of this host, {so}"));
            }
        }
    }
}

/// Makes the text of a column.
type Value = fn(&FlowResult) -> String;

/// Columns of comma-separated values, with the names and units of the JSON.
const CSV: [(&str, Value); 17] = [
    ("number", |r| r.number.to_string()),
    ("flow", |r| r.flow.clone()),
    ("setting", |r| setting(r.setting).to_owned()),
    ("fabric", |r| r.fabric.to_owned()),
    ("repetitions", |r| r.repetitions.to_string()),
    ("rate", |r| r.rate.to_string()),
    ("message_rate", |r| r.message_rate.to_string()),
    ("seconds_median", |r| optional(r.seconds.map(|times| times.median))),
    ("seconds_p99", |r| optional(r.seconds.map(|times| times.p99))),
    ("seconds_p999", |r| optional(r.seconds.map(|times| times.p999))),
    ("seconds_max", |r| optional(r.seconds.map(|times| times.max))),
    ("cpu_source", |r| optional(r.cpu_source)),
    ("cpu_target", |r| optional(r.cpu_target)),
    ("share", |r| optional(r.share)),
    ("rate_to_alone", |r| optional(r.rate_to_alone)),
    ("median_to_alone", |r| optional(r.median_to_alone)),
    ("p99_to_alone", |r| optional(r.p99_to_alone)),
];

fn setting(setting: Setting) -> &'static str {
    match setting {
        Setting::Alone => "alone",
        Setting::Beside => "beside",
    }
}

/// Columns of the table.
const COLUMNS: [(&str, Value); 14] = [
    ("flow", |r| format!("{} {}", r.number, r.flow)),
    ("", |r| setting(r.setting).to_owned()),
    ("rate", |r| per_second(r.rate)),
    ("msg/s", |r| format!("{:.*}", if r.message_rate < 10.0 { 2 } else { 0 }, r.message_rate)),
    ("median", |r| shown(r.seconds, |times| time(times.median))),
    ("p99", |r| shown(r.seconds, |times| time(times.p99))),
    ("p99.9", |r| shown(r.seconds, |times| time(times.p999))),
    ("max", |r| shown(r.seconds, |times| time(times.max))),
    ("CPU", |r| shown(r.cpu_source, |share| format!("{share:.2}"))),
    ("far CPU", |r| shown(r.cpu_target, |share| format!("{share:.2}"))),
    ("share", |r| shown(r.share, |share| format!("{share:.2}"))),
    ("rate/alone", |r| shown(r.rate_to_alone, |ratio| format!("{ratio:.2}"))),
    ("median/alone", |r| shown(r.median_to_alone, |ratio| format!("{ratio:.2}"))),
    ("p99/alone", |r| shown(r.p99_to_alone, |ratio| format!("{ratio:.2}"))),
];

fn shown<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

fn table(results: &[FlowResult]) -> String {
    // A flow that was measured alone has nothing beside.
    let compares = results.iter().any(|result| result.setting == Setting::Beside);
    let columns = &COLUMNS[..if compares { COLUMNS.len() } else { COLUMNS.len() - 4 }];
    let cells = |of: &dyn Fn(&(&str, Value)) -> String| columns.iter().map(of).collect::<Vec<_>>();
    let mut rows = vec![cells(&|column| column.0.to_owned())];
    rows.extend(results.iter().map(|result| cells(&|column| column.1(result))));
    let widths: Vec<usize> =
        (0..columns.len()).map(|place| rows.iter().map(|row| row[place].len()).max().unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate().map(|(place, (cell, width))| match place {
            0 | 1 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Draws rates and times of messages.
pub(super) fn draw(results: &[FlowResult]) -> Figure {
    let of = |setting: Setting| results.iter().filter(move |result| result.setting == setting);
    let categories: Vec<String> =
        of(Setting::Alone).map(|result| format!("{} {}", result.number, result.flow)).collect();
    let panel = |label: &str, value: fn(&FlowResult) -> Option<f64>| {
        let series = [Setting::Alone, Setting::Beside].into_iter().filter_map(|of_setting| {
            let values: Vec<f64> = of(of_setting).map(|result| value(result).unwrap_or(f64::NAN)).collect();
            (!values.is_empty()).then(|| BarSeries::new(setting(of_setting), values))
        });
        let bars = Bars { categories: categories.clone(), series: series.collect(), stacked: false };
        Panel::new(Axis::linear("flow"), Axis::log10(label), Content::Bars(bars))
    };
    let panels = vec![
        panel("bytes per second", |result| Some(result.rate)),
        panel("median time of a message (s)", |result| result.seconds.map(|times| times.median)),
    ];
    let fabric = results.first().map_or("", |result| result.fabric);
    let mut figure = Figure::new(format!("Flows alone and beside each other, {fabric}"), panels);
    figure.columns = 1;
    figure
}
