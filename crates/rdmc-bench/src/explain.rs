//! The cost model's choice beside the measurements.

use rdmc_files::PortRate;
use rdmc_files::costs;
use rdmc_files::size::ByteSize;
use serde::Serialize;

use crate::measured::CaseResult;
use crate::plan::{Case, way};
use crate::report::time;

/// The choice for one combination, and the fastest way.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename = "explanation")]
pub(crate) struct Explanation {
    fabric: &'static str,
    transport: String,
    completion: &'static str,
    nodes: u32,
    senders: u32,
    bytes: u64,
    algorithm: String,
    block_size: u32,
    predicted_seconds: f64,
    measured_seconds: f64,
    best_algorithm: String,
    best_block_size: u32,
    best_seconds: f64,
    /// The time of the choice over the best time.
    to_best: f64,
}

impl Explanation {
    /// Explains every choice among the results.
    pub(crate) fn all(results: &[(Case, CaseResult)]) -> anyhow::Result<Vec<Self>> {
        let own: Vec<_> = results.iter().filter(|(_, measured)| measured.seconds_to_rdmc.is_none()).collect();
        let of = |(case, measured): &(Case, CaseResult)| {
            let others = own.iter().filter(|(other, _)| other.is_same_work(case)).map(|(_, measured)| measured);
            let best = others.min_by(|a, b| a.seconds.median.total_cmp(&b.seconds.median));
            Self::of(case, measured, best.unwrap_or(measured))
        };
        own.iter().filter(|(case, _)| case.is_chosen()).map(|&result| of(result)).collect()
    }

    fn of(case: &Case, measured: &CaseResult, best: &CaseResult) -> anyhow::Result<Self> {
        let (algorithm, block_size) = (Some(&case.algorithm), Some(case.block_size));
        let plan = costs::plan(case.fabric.assumed_here(), algorithm, block_size, case.nodes, case.bytes)?;
        Ok(Self {
            fabric: measured.fabric,
            transport: measured.transport.clone(),
            completion: measured.completion,
            nodes: case.nodes,
            senders: case.senders,
            bytes: case.bytes,
            algorithm: measured.algorithm.clone(),
            block_size: case.block_size,
            predicted_seconds: plan.time.as_secs_f64(),
            measured_seconds: measured.seconds.median,
            best_algorithm: best.algorithm.clone(),
            best_block_size: best.block_size,
            best_seconds: best.seconds.median,
            to_best: measured.seconds.median / best.seconds.median,
        })
    }
}

/// Returns the table of explanations.
pub(crate) fn table(all: &[Explanation]) -> String {
    let mut text = format!(
        "The cost model's choice beside the fastest measured way. For shared memory and TCP on this machine the model \
         assumes\nthat the processors copy. For RDMA, and for the TCP of rdmc send, it assumes ports of {} each.\n",
        PortRate::default()
    );
    let mut line = |cells: [&str; 9]| {
        let [nodes, size, fabric, completion, chosen, predicted, measured, best, ratio] = cells;
        text += &format!(
            "{nodes:>4}  {size:>8}  {fabric:>7}  {completion:>10}  {chosen:>26}  {predicted:>9}  {measured:>9}  \
             {best:>38}  {ratio:>6}\n"
        );
    };
    line(["n", "size", "fabric", "completion", "chosen", "predicted", "measured", "best", "/best"]);
    for explained in all {
        line([
            &explained.nodes.to_string(),
            &ByteSize(explained.bytes).to_string(),
            &explained.transport,
            explained.completion,
            &way(&explained.algorithm, explained.block_size),
            &time(explained.predicted_seconds),
            &time(explained.measured_seconds),
            &format!("{}: {}", way(&explained.best_algorithm, explained.best_block_size), time(explained.best_seconds)),
            &format!("{:.2}", explained.to_best),
        ]);
    }
    text
}

#[cfg(test)]
mod tests {
    use rdmc::Algorithm;

    use super::*;
    use crate::measured::tests::{case, measured};
    use crate::plan::LeftToModel;
    use crate::statistics::Distribution;

    fn result(bytes: u64, chosen: bool, algorithm: Algorithm, seconds: f64) -> (Case, CaseResult) {
        let left_to_model = LeftToModel { algorithm: chosen, block_size: chosen };
        let seconds = Distribution::of([seconds]).unwrap();
        let told = CaseResult { bytes, algorithm: algorithm.to_string(), seconds, ..measured() };
        (Case { algorithm, left_to_model, ..case(3, bytes) }, told)
    }

    #[test]
    fn a_choice_is_compared_with_what_does_the_same_work() {
        let mut theirs = result(1 << 20, false, Algorithm::Sequential, 0.01);
        theirs.1.seconds_to_rdmc = Some(0.01);
        let results = [
            result(1 << 20, true, Algorithm::Chain, 0.3),
            result(1 << 30, true, Algorithm::Chain, 0.1),
            result(1 << 20, false, Algorithm::Fanout, 0.2),
            result(1 << 20, false, Algorithm::BinomialTree, 0.4),
            theirs,
        ];
        let all = Explanation::all(&results).unwrap();
        assert_eq!(all.iter().map(|explained| explained.bytes).collect::<Vec<_>>(), [1 << 20, 1 << 30]);
        assert_eq!((all[0].algorithm.as_str(), all[0].best_algorithm.as_str()), ("chain", "fanout"));
        assert!((all[0].to_best - 1.5).abs() < 1e-9 && (all[1].to_best - 1.0).abs() < 1e-9, "{all:?}");
        assert!(all.iter().all(|explained| explained.predicted_seconds > 0.0));
        let text = table(&all);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert!(lines[1].contains("fanout, 1 MiB: 200 ms") && lines[1].ends_with("1.50"), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() == lines[0].chars().count()), "{text}");
    }
}
