//! Two flows of large messages by every pair of verbs: all of Table 3 of Zhang et al.

use rdmc_fabric::FlowVerb;

use super::super::measure::in_parallel;
use super::super::{ExperimentError, Finding, Table};
use super::flows::{self, CompletionWait, Elephant};

/// The verbs and sizes of the columns, in MB. Rows have them in the other order, each with as many columns as are left.
const COLUMNS: [(FlowVerb, u64); 8] = [
    (FlowVerb::Send, 1),
    (FlowVerb::Send, 1000),
    (FlowVerb::WriteWithImm, 1),
    (FlowVerb::WriteWithImm, 1000),
    (FlowVerb::Read, 1),
    (FlowVerb::Read, 1000),
    (FlowVerb::Write, 1),
    (FlowVerb::Write, 1000),
];
/// Their Table 3: the bandwidth of the row's flow over that of the column's, both with events.
const TABLE_3: [&[f64]; 8] = [
    &[1.41, 1.00, 1.44, 1.00, 1.39, 1.00, 1.40, 1.00],
    &[1.02, 0.71, 1.00, 0.72, 0.99, 0.71, 1.00],
    &[1.40, 1.00, 1.43, 1.00, 1.37, 1.00],
    &[1.08, 0.71, 1.04, 0.71, 1.00],
    &[1.40, 1.00, 1.44, 1.00],
    &[1.00, 0.70, 1.00],
    &[1.41, 1.00],
    &[1.00],
];
/// How far a cell may be from theirs.
const NEAR: f64 = 0.1;

/// A cell: row, column, the ratio here and in the paper.
type Cell = ((FlowVerb, u64), (FlowVerb, u64), f64, f64);

/// Every pair of verbs and sizes.
pub(super) struct Verbs(Vec<Cell>);

impl Verbs {
    pub(super) fn measure() -> Result<Self, ExperimentError> {
        let rows = COLUMNS.into_iter().rev().zip(TABLE_3);
        let cells = rows
            .flat_map(|(row, cells)| COLUMNS.into_iter().zip(cells).map(move |(column, paper)| (row, column, *paper)));
        let cells: Vec<_> = cells.collect();
        let ratios = in_parallel(&cells, |&(row, column, _)| {
            let flow = |(verb, megabytes)| Elephant { verb, megabytes, waits: CompletionWait::Event };
            let [of_row, of_column] = flows::elephants([flow(row), flow(column)])?;
            Ok(of_row / of_column)
        })?;
        let with = |((row, column, paper), ratio)| (row, column, ratio, paper);
        Ok(Self(cells.into_iter().zip(ratios).map(with).collect()))
    }

    pub(super) fn table(&self) -> Table {
        let columns = ["a_verb", "a_mb", "b_verb", "b_mb", "ratio", "ratio_in_the_paper"];
        let mut table = Table::new("verbs", &columns);
        for &((a, a_mb), (b, b_mb), ratio, paper) in &self.0 {
            let mut cells = vec![name(a).to_owned(), a_mb.to_string(), name(b).to_owned(), b_mb.to_string()];
            cells.extend([format!("{ratio:.3}"), format!("{paper:.2}")]);
            table.push(cells);
        }
        table
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let off = |(.., ratio, paper): &Cell| (ratio - paper).abs();
        let (count, near) = (self.0.len(), self.0.iter().filter(|cell| off(cell) <= NEAR).count());
        let most = self.0.iter().map(off).fold(0.0, f64::max);
        vec![Finding {
            what: "all 36 cells of Table 3: pairs of verbs, 1 MB and 1 GB, both with events".into(),
            paper: "0.99 to 1.08 for equal sizes, 1.37 to 1.44 for 1 GB beside 1 MB".into(),
            here: format!("{near} of {count} cells are within {NEAR} of theirs, and none is more than {most:.2} off"),
            agrees: count == 36 && near == count,
        }]
    }
}

fn name(verb: FlowVerb) -> &'static str {
    match verb {
        FlowVerb::Send => "SEND",
        FlowVerb::Write => "WRITE",
        FlowVerb::WriteWithImm => "WIMM",
        FlowVerb::Read => "READ",
    }
}
