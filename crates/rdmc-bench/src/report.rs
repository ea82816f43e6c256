//! The printed results: a table for people, values for spreadsheets.

use crate::limits::Limits;
use crate::measured::CaseResult;
use crate::options::{PACKED_MAX, WINDOW};
use crate::plan::{Case, LeftToModel, NAMES};
use rdmc_files::size::{ByteSize, Rate};
use rdmc_files::words::count;

/// The table, which is printed row by row.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<Column>,
    heading: String,
}

#[derive(Debug)]
struct Column {
    name: &'static str,
    width: usize,
    /// Index in [`NAMES`] of a value that differs between configurations.
    named: Option<usize>,
}

impl Table {
    /// Lays the table out. Values that all configurations share stand above it.
    pub(crate) fn new(cases: &[Case], compares: bool) -> Self {
        let mut columns = Vec::new();
        let mut same = Vec::new();
        let names: Vec<[String; NAMES.len()]> = cases.iter().map(Case::names).collect();
        for (place, name) in NAMES.into_iter().enumerate() {
            let Some(first) = names.first().map(|names| &names[place]) else { continue };
            if names.iter().all(|names| names[place] == *first) {
                same.push(format!("{name} {first}"));
                continue;
            }
            let longest = names.iter().map(|names| names[place].len()).max().unwrap_or(0);
            columns.push(Column { name, width: longest.max(name.len()), named: Some(place) });
        }
        let mut push = |name, width| columns.push(Column { name, width, named: None });
        push("size", 8);
        let chosen = cases.iter().filter(|case| case.left_to_model != LeftToModel::default());
        if let Some(longest) = chosen.map(|case| case.way().len()).max() {
            push("chosen", longest);
        }
        push("by", 12);
        for (name, width) in FIGURES {
            push(name, width);
        }
        if compares {
            push("/rdmc", 6);
        }
        Self { columns, heading: same.join(", ") }
    }

    /// Returns the lines above the rows.
    pub(crate) fn head(&self, window: Option<u32>, cores: u64) -> String {
        let titles = self.line(|column| column.name.to_owned());
        let flight = match window {
            Some(window) => format!("with {window} in flight"),
            None => format!("packed up to {}, with {WINDOW} in flight above", ByteSize(PACKED_MAX)),
        };
        format!(
            "{}\n{}: processes on loopback, every byte of every round verified; msg/s {flight}\n{titles}",
            self.heading,
            count(cores, "core"),
        )
    }

    /// Returns the row of a result.
    pub(crate) fn row(&self, case: &Case, measured: &CaseResult) -> String {
        let names = case.names();
        self.line(|column| match column.named {
            Some(place) => names[place].clone(),
            None if column.name == "chosen"
                && (case.left_to_model == LeftToModel::default() || measured.by != "rdmc") =>
            {
                "-".to_owned()
            }
            None if column.name == "chosen" => case.way(),
            None => cell(column.name, measured),
        })
    }

    fn line(&self, cell: impl Fn(&Column) -> String) -> String {
        let cells = self.columns.iter().map(|column| format!("{:>width$}", cell(column), width = column.width));
        cells.collect::<Vec<_>>().join("  ")
    }
}

/// Columns of figures, and their widths.
const FIGURES: [(&str, usize); 12] = [
    ("rounds", 6),
    ("time", 8),
    ("p10", 8),
    ("p90", 8),
    ("p99", 8),
    ("skew", 8),
    ("each", 11),
    ("aggregate", 11),
    ("CPU s/GiB", 9),
    ("/floor", 6),
    ("/streams", 8),
    ("msg/s", 8),
];

fn cell(column: &str, measured: &CaseResult) -> String {
    let shown = |figure: Option<f64>, show: fn(f64) -> String| figure.map_or("-".to_owned(), show);
    let ratio = |ratio: f64| if ratio < 0.005 { "<0.01".to_owned() } else { format!("{ratio:.2}") };
    match column {
        "size" => ByteSize(measured.bytes).to_string(),
        "by" => format!("{}:{}", measured.by, measured.transport),
        "rounds" => measured.rounds.to_string(),
        "time" => time(measured.seconds.median),
        "p10" => time(measured.seconds.p10),
        "p90" => time(measured.seconds.p90),
        "p99" => time(measured.seconds.p99),
        "skew" => time(measured.skew_seconds),
        "each" => shown(measured.receiver_rate, per_second),
        "aggregate" => shown(measured.aggregate_rate, per_second),
        // For a few bytes it would mean nothing.
        "CPU s/GiB" if measured.bytes < CPU_SHOWN_MIN => "-".to_owned(),
        "CPU s/GiB" => format!("{:.2}", measured.cpu_seconds_per_gib),
        "/floor" => shown(measured.to_copy_floor, ratio),
        "/streams" => shown(measured.to_streams, ratio),
        "msg/s" => shown(measured.message_rate, |rate| format!("{rate:.0}")),
        "/rdmc" => shown(measured.seconds_to_rdmc, ratio),
        _ => String::new(),
    }
}

/// Returns the table of the machine's limits.
pub(crate) fn limits_table(all: &[Limits]) -> String {
    let mut text =
        "The limits of this machine in the same run: one copying thread; threads that copy to a place for each \
         receiver (the\ncopy floor); plain TCP streams on loopback, one stream and one for each receiver\n"
            .to_owned();
    let mut line = |cells: [&str; 9]| {
        let [nodes, size, memcpy, threads, plain, around, stream, streams, took] = cells;
        text += &format!(
            "{nodes:>4}  {size:>8}  {memcpy:>11}  {threads:>7}  {plain:>11}  {around:>12}  {stream:>11}  \
             {streams:>11}  {took:>12}\n"
        );
    };
    line(["n", "size", "memcpy", "threads", "floor", "non-temporal", "1 stream", "streams", "streams take"]);
    for limits in all {
        line([
            &limits.nodes.to_string(),
            &ByteSize(limits.bytes).to_string(),
            &per_second(limits.memcpy_rate),
            &limits.copy_threads.to_string(),
            &per_second(limits.copy_floor_plain_rate),
            &limits.copy_floor_non_temporal_rate.map_or("-".to_owned(), per_second),
            &per_second(limits.stream_rate),
            &per_second(limits.streams_rate),
            &time(limits.streams_seconds),
        ]);
    }
    text
}

/// Returns the names of the comma-separated values.
pub(crate) fn csv_head() -> String {
    let names: Vec<&str> = CSV.iter().map(|(name, _)| *name).collect();
    names.join(",")
}

/// Returns a result as comma-separated values.
pub(crate) fn csv_row(measured: &CaseResult) -> String {
    let values: Vec<String> = CSV.iter().map(|(_, value)| quoted(value(measured))).collect();
    values.join(",")
}

/// Makes the text of a column.
type Value = fn(&CaseResult) -> String;

/// Columns of comma-separated values, with the names and units of the JSON.
const CSV: [(&str, Value); 31] = [
    ("by", |m| m.by.clone()),
    ("transport", |m| m.transport.clone()),
    ("fabric", |m| m.fabric.to_owned()),
    ("completion", |m| m.completion.to_owned()),
    ("nodes", |m| m.nodes.to_string()),
    ("groups", |m| m.groups.to_string()),
    ("senders", |m| m.senders.to_string()),
    ("algorithm", |m| m.algorithm.clone()),
    ("block_size", |m| m.block_size.to_string()),
    ("bytes", |m| m.bytes.to_string()),
    ("rounds", |m| m.rounds.to_string()),
    ("seconds_median", |m| m.seconds.median.to_string()),
    ("seconds_p10", |m| m.seconds.p10.to_string()),
    ("seconds_p90", |m| m.seconds.p90.to_string()),
    ("seconds_p99", |m| m.seconds.p99.to_string()),
    ("seconds_min", |m| m.seconds.min.to_string()),
    ("seconds_max", |m| m.seconds.max.to_string()),
    ("skew_seconds", |m| m.skew_seconds.to_string()),
    ("receiver_rate", |m| optional(m.receiver_rate)),
    ("aggregate_rate", |m| optional(m.aggregate_rate)),
    ("cpu_seconds_per_gib", |m| m.cpu_seconds_per_gib.to_string()),
    ("message_rate", |m| optional(m.message_rate)),
    ("to_copy_floor", |m| optional(m.to_copy_floor)),
    ("to_streams", |m| optional(m.to_streams)),
    ("to_memcpy", |m| optional(m.to_memcpy)),
    ("seconds_to_rdmc", |m| optional(m.seconds_to_rdmc)),
    ("setup", |m| m.setup.clone().unwrap_or_default()),
    ("delivery", |m| m.delivery.to_owned()),
    ("checks", |m| m.checks.to_owned()),
    ("copy_floor_rate", |m| m.copy_floor_rate.to_string()),
    ("ring", |m| m.ring.clone().unwrap_or_default()),
];

pub(crate) fn optional(value: Option<f64>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}

/// Quotes a value that has a comma or a quotation mark.
pub(crate) fn quoted(value: String) -> String {
    if value.contains([',', '"']) { format!("\"{}\"", value.replace('"', "\"\"")) } else { value }
}

/// Formats seconds with about three digits.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        _ if seconds >= 0.9995 => format!("{seconds:.2} s"),
        _ if seconds >= 0.000_999_5 => {
            let ms = seconds * 1e3;
            if ms < 99.95 { format!("{ms:.2} ms") } else { format!("{ms:.0} ms") }
        }
        _ => format!("{:.1} us", seconds * 1e6),
    }
}

pub(crate) fn per_second(rate: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative; `as` saturates")]
    let bytes = rate as u64;
    Rate { bytes, seconds: 1.0 }.to_string()
}

/// Least size of messages whose processor time is shown per GiB, in bytes.
const CPU_SHOWN_MIN: u64 = 4 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::tests::{case, limits, measured};
    use crate::options::Delivery;

    #[test]
    fn what_is_the_same_everywhere_stands_above_the_table() {
        let table = Table::new(&[case(2, 1), case(3, 1 << 30)], false);
        let expected = "\
fabric tcp, completion event, delivery private, checks auto, ring none, groups 1, senders 1, algorithm chain, \
block 1 MiB
2 cores: processes on loopback, every byte of every round verified; msg/s with 64 in flight
n      size            by  rounds      time       p10       p90       p99      skew         each    aggregate  \
CPU s/GiB  /floor  /streams     msg/s";
        assert_eq!(table.head(Some(64), 2), expected);
        let row = "3     1 GiB   rdmc:tcp     3    1.00 s    600 ms    1.40 s    1.49 s    250 ms  1.0 GiB/s  \
                   2.0 GiB/s       0.50    0.25      0.50      2000";
        let shown = table.row(&case(3, 1 << 30), &measured());
        assert_eq!(shown.split_whitespace().collect::<Vec<_>>(), row.split_whitespace().collect::<Vec<_>>());
        assert_eq!(shown.len(), expected.lines().last().unwrap().len());
    }

    #[test]
    fn what_is_shared_is_not_compared_with_what_is_copied() {
        let (mut case, mut shared) = (case(3, 1 << 30), measured());
        case.delivery = Delivery::Shared;
        shared = CaseResult { delivery: "shared", receiver_rate: None, aggregate_rate: None, ..shared };
        shared = CaseResult { to_copy_floor: None, to_streams: None, to_memcpy: None, ..shared };
        let row = Table::new(&[case.clone(), crate::measured::tests::case(3, 1)], false).row(&case, &shared);
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!((cells[0], cells.iter().filter(|cell| **cell == "-").count()), ("shared", 4), "{row}");
    }

    #[test]
    fn what_was_chosen_has_a_column() {
        let chosen =
            |bytes| Case { left_to_model: LeftToModel { algorithm: true, block_size: true }, ..case(3, bytes) };
        let table = Table::new(&[chosen(1), chosen(2)], false);
        assert!(table.head(Some(64), 2).starts_with(
            "fabric tcp, completion event, delivery private, checks auto, ring none, groups 1, n 3, senders 1, \
             algorithm auto, block auto"
        ));
        let row = table.row(&chosen(1), &measured());
        assert!(row.contains("  chain, 1 MiB  "), "{row}");
        assert!(!table.row(&case(3, 1), &measured()).contains("chain"));
    }

    #[test]
    fn an_mpi_stands_beside_with_its_transport_and_ratio() {
        let mut theirs = measured();
        (theirs.by, theirs.setup, theirs.seconds_to_rdmc) = ("ompi".into(), Some("as it is".into()), Some(1.5));
        let table = Table::new(&[case(3, 1 << 30)], true);
        let row = table.row(&case(3, 1 << 30), &theirs);
        assert!(row.contains("ompi:tcp") && row.ends_with("1.50"), "{row}");
        assert!(table.row(&case(3, 1 << 30), &measured()).ends_with('-'));
    }

    #[test]
    fn values_are_as_many_as_their_names() {
        let mut theirs = measured();
        theirs.setup = Some("--mca btl vader,self".into());
        let row = csv_row(&theirs);
        assert!(row.ends_with("\"--mca btl vader,self\",private,auto,8589934592,"), "{row}");
        assert_eq!(row.split(',').count(), csv_head().split(',').count() + 1);
        assert!(row.starts_with("rdmc,tcp,tcp,event,3,1,1,chain,1048576,1073741824,3,1,"), "{row}");
    }

    #[test]
    fn times_have_a_unit_that_fits() {
        let shown = [0.000_012_34, 0.001, 0.0999, 0.1, 0.5, 2.0].map(time);
        assert_eq!(shown, ["12.3 us", "1.00 ms", "99.90 ms", "100 ms", "500 ms", "2.00 s"]);
    }

    #[test]
    fn limits_are_a_line_for_each_length() {
        let text = limits_table(&[limits(), limits()]);
        assert_eq!(text.lines().count(), 5);
        assert!(text.ends_with("500 ms\n"), "{text}");
    }
}
