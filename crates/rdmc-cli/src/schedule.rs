//! `rdmc schedule` prints a schedule as a grid (DSN, Figure 3).

use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::Context;
use rdmc_files::words::count;
use rdmc_schedule::{BlockCount, Rank, Schedule};
use serde::Serialize;

use crate::cli::ScheduleOptions;
use crate::exit::Exit;

/// Prints a schedule.
pub(crate) fn run(options: &ScheduleOptions) -> anyhow::Result<()> {
    let algorithm = options.algorithm.resolve(options.nodes)?;
    let schedule = Schedule::new(&algorithm, options.nodes, BlockCount(options.blocks)).context(Exit::Usage)?;
    let cells = u64::from(options.nodes) * if options.json { u64::from(options.blocks) } else { schedule.steps() };
    if cells > CELLS_MAX {
        let what = format!("a schedule of {cells} cells is too large to print; up to {CELLS_MAX} are possible");
        return Err(Exit::Usage.error(what));
    }
    let text = if options.json {
        serde_json::to_string(&described(&schedule))? + "\n"
    } else {
        grid(&schedule, options.sends)
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// Draws a row for each member and a column for each step. The row of the root shows what it sends.
fn grid(schedule: &Schedule, sends: bool) -> String {
    let columns = usize::try_from(schedule.steps()).expect("few enough to print");
    let cells = |rank: Rank| {
        let mut row = vec![String::new(); columns];
        let mut put = |step: rdmc_schedule::Step, text: String| {
            let cell = &mut row[usize::try_from(step.0).expect("a column")];
            // In the hybrid a member can send on both levels in one step.
            if !cell.is_empty() {
                cell.push(' ');
            }
            cell.push_str(&text);
        };
        if sends || rank.is_root() {
            schedule.sends(rank).for_each(|send| put(send.step, format!("{}>{}", send.block, send.peer)));
        } else {
            schedule.receives(rank).for_each(|take| put(take.step, format!("{}<{}", take.block, take.peer)));
        }
        row
    };
    let rows: Vec<Vec<String>> = (0..schedule.members()).map(|rank| cells(Rank(rank))).collect();
    let widths: Vec<usize> = (0..columns)
        .map(|column| rows.iter().map(|row| row[column].len()).chain([column.to_string().len()]).max().unwrap_or(1))
        .collect();
    let (members, blocks) = (count(schedule.members(), "member"), count(schedule.blocks().0, "block"));
    let mut text = format!("{}: {members}, {blocks}, {}\n", schedule.algorithm(), count(schedule.steps(), "step"));
    text += "rows are members, columns are steps; 1<3 takes block 1 from member 3, 1>3 sends it there\n\n";
    let mut line = |head: &str, cells: &mut dyn Iterator<Item = String>| {
        let mut row = format!("{head:>6}");
        for (cell, width) in cells.zip(&widths) {
            let _ = write!(row, "  {cell:^width$}");
        }
        text += row.trim_end();
        text += "\n";
    };
    line("step", &mut (0..columns).map(|column| column.to_string()));
    for (row, rank) in rows.iter().zip(0..) {
        let dotted = |cell: &String| if cell.is_empty() { ".".to_owned() } else { cell.clone() };
        line(&format!("{rank}"), &mut row.iter().map(dotted));
    }
    text
}

#[derive(Serialize)]
struct Described {
    algorithm: String,
    members: u32,
    blocks: u32,
    steps: u64,
    transfers: Vec<DescribedHop>,
}

#[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
struct DescribedHop {
    step: u64,
    from: u32,
    to: u32,
    block: u32,
}

/// Lists all hops by step and sender.
fn described(schedule: &Schedule) -> Described {
    let sends = |from: u32| {
        let sends = schedule.sends(Rank(from));
        sends.map(move |send| DescribedHop { step: send.step.0, from, to: send.peer.0, block: send.block.0 })
    };
    let mut transfers: Vec<_> = (0..schedule.members()).flat_map(sends).collect();
    transfers.sort();
    let (members, blocks) = (schedule.members(), schedule.blocks().get());
    Described { algorithm: schedule.algorithm().to_string(), members, blocks, steps: schedule.steps(), transfers }
}

/// Greatest number of cells of a grid.
const CELLS_MAX: u64 = 1 << 22;

#[cfg(test)]
mod tests {
    use rdmc::Algorithm;

    use super::*;

    #[test]
    fn the_grid_of_8_members_and_3_blocks_is_that_of_figure_3() {
        let schedule = Schedule::new(&Algorithm::BinomialPipeline, 8, BlockCount(3)).unwrap();
        let expected = "\
binomial-pipeline: 8 members, 3 blocks, 5 steps
rows are members, columns are steps; 1<3 takes block 1 from member 3, 1>3 sends it there

  step   0    1    2    3    4
     0  0>1  1>2  2>4  2>1  2>2
     1  0<0   .    .   2<0  1<3
     2   .   1<0   .   0<3  2<0
     3   .   0<1   .   1<2  2<1
     4   .    .   2<0  0<5  1<6
     5   .    .   0<1  2<4  1<7
     6   .    .   1<2  0<7  2<4
     7   .    .   0<3  1<6  2<5
";
        assert_eq!(grid(&schedule, false), expected);
    }

    #[test]
    fn one_member_alone_has_no_steps() {
        let schedule = Schedule::new(&Algorithm::Chain, 1, BlockCount(3)).unwrap();
        assert!(grid(&schedule, true).ends_with("  step\n     0\n"));
        assert!(described(&schedule).transfers.is_empty());
    }

    #[test]
    fn every_receiver_is_sent_every_block() {
        let schedule = Schedule::new(&Algorithm::Circulant, 9, BlockCount(4)).unwrap();
        assert_eq!(described(&schedule).transfers.len(), 8 * 4);
    }
}
