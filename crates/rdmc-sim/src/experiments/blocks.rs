//! Figure 6: bandwidth against block size, on Fractus in groups of four.

use rdmc::Algorithm;

use super::measure::{Single, in_parallel};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// Members of the groups.
const MEMBERS: u32 = 4;
/// The messages, in KiB.
const MESSAGES: [u64; 8] = [16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 128 << 10];
/// The largest block, in KiB.
const BLOCK_MAX: u64 = 16 << 10;

pub(super) fn run(_: &Options) -> Result<Report, ExperimentError> {
    let model = PaperCluster::Fractus.model();
    let blocks = || (4..=14).map(|power| 1_u64 << power).filter(|&block| block <= BLOCK_MAX);
    let jobs: Vec<(u64, u64)> = MESSAGES
        .into_iter()
        .flat_map(|message| blocks().filter(move |&block| block <= message).map(move |block| (message, block)))
        .collect();
    let rates = in_parallel(&jobs, |&(message, block)| {
        let single = Single::new(model.clone(), MEMBERS, Algorithm::BinomialPipeline, message << 10, block << 10);
        #[expect(clippy::cast_precision_loss, reason = "a rate to be drawn")]
        let bits = (message << 13) as f64;
        Ok(bits / single.run()?.latency().as_secs_f64() / 1e9)
    })?;

    let mut table = Table::new("", &["message_kib", "block_kib", "bandwidth_gbit_per_s"]);
    let mut lines = Vec::new();
    let (mut rises, mut falls) = (true, true);
    let mut best_large = (0, 0.0);
    for message in MESSAGES {
        let of_message: Vec<(u64, f64)> = jobs
            .iter()
            .zip(&rates)
            .filter(|((size, _), _)| *size == message)
            .map(|(&(_, block), &rate)| (block, rate))
            .collect();
        for (block, rate) in &of_message {
            table.push(vec![message.to_string(), block.to_string(), format!("{rate:.3}")]);
        }
        let best = of_message.iter().copied().fold((0, 0.0), |best, it| if it.1 > best.1 { it } else { best });
        if message >= 4 << 10 {
            rises &= of_message.first().is_some_and(|first| first.1 < best.1);
            falls &= of_message.last().is_some_and(|last| last.1 < best.1);
            best_large = best;
        }
        #[expect(clippy::cast_precision_loss, reason = "a size to be drawn")]
        let points = of_message.into_iter().map(|(block, rate)| (block as f64, rate)).collect();
        lines.push(Line::new(size_text(message), points, LineStyle::Markers));
    }
    let panel = Panel::new(Axis::log2("block size (KiB)"), Axis::linear("bandwidth (Gbit/s)"), Content::Lines(lines));
    let mut figure = Figure::new("Bandwidth over the block size, by message size", vec![panel]);
    figure.subtitle =
        Some("Fractus, 100 Gbit/s, groups of four, binomial pipeline; size over time until all have it".into());
    let findings = vec![Finding {
        what: "bandwidth over block size, for messages of 4 MiB and more".into(),
        paper:
            "rises, peaks and falls: small blocks cost operations, large blocks leave the pipeline empty (shape only)"
                .into(),
        here: format!(
            "{}, {}; 128 MiB are fastest in blocks of {}, at {:.1} Gbit/s",
            if rises { "rises" } else { "does not rise" },
            if falls { "falls" } else { "does not fall" },
            size_text(best_large.0),
            best_large.1
        ),
        agrees: rises && falls,
    }];
    let title = "bandwidth against block size, messages of 16 KiB to 128 MiB".into();
    Ok(Report { name: "figure-6", title, tables: vec![table], figure, findings })
}

fn size_text(kib: u64) -> String {
    if kib >= 1 << 10 { format!("{} MiB", kib >> 10) } else { format!("{kib} KiB") }
}
