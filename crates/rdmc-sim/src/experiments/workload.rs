//! The writes of a replication layer: targets, sizes and times.

use std::path::Path;

use super::ExperimentError;
use crate::random::Random;

/// One write to three replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    /// Its time, in ns since the first write.
    pub(crate) at_ns: u64,
    pub(crate) bytes: u64,
    /// The nodes of the replicas, in ascending order, from 1: node 0 is the writer.
    pub(crate) targets: [u32; 3],
}

/// Nodes that hold replicas.
pub(crate) const HOSTS: u32 = 15;
/// The median of the paper's sizes, in bytes.
pub(crate) const MEDIAN: f64 = 12e6;
/// The mean of the paper's sizes, in bytes.
pub(crate) const MEAN: f64 = 29e6;
/// The smallest and the largest size: the paper's hundreds of bytes to hundreds of megabytes.
const SIZES: (f64, f64) = (200.0, 900e6);

/// Draws writes to any three hosts, with exponential intervals.
pub(crate) fn sample(count: usize, apart_ns: f64, seed: u64) -> Vec<Write> {
    let mut random = Random::new(seed);
    let (mut sizes, mut targets, mut times) = (random.branch(), random.branch(), random.branch());
    let triples = triples();
    let mut at_ns = 0.0;
    let writes = (0..count).map(|_| {
        let bytes = sizes.lognormal(MEDIAN, MEAN).clamp(SIZES.0, SIZES.1);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "both are positive and below 2^53")]
        let write = Write { at_ns: at_ns as u64, bytes: bytes as u64, targets: *targets.one_of(&triples) };
        at_ns += times.exponential(apart_ns);
        write
    });
    writes.collect()
}

/// Lists all sets of three hosts.
pub(crate) fn triples() -> Vec<[u32; 3]> {
    let of = |first: u32| {
        (first + 1..=HOSTS).flat_map(move |second| (second + 1..=HOSTS).map(move |third| [first, second, third]))
    };
    (1..=HOSTS).flat_map(of).collect()
}

/// Reads a trace of lines `microseconds,bytes,target,target,target`. Targets are hosts from 1 to 15; times do not
/// decrease. Empty lines and lines that begin with `#` are skipped.
///
/// # Errors
/// The file cannot be read, or a line is not a write; the error names the line.
pub(crate) fn read(path: &Path) -> Result<Vec<Write>, ExperimentError> {
    let error = |what: String| ExperimentError::Input { path: path.display().to_string(), what };
    let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
    parse(&text).map_err(error)
}

fn parse(text: &str) -> Result<Vec<Write>, String> {
    let mut writes: Vec<Write> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let write = parse_line(line).map_err(|what| format!("line {number}: {what}"))?;
        if writes.last().is_some_and(|before| write.at_ns < before.at_ns) {
            return Err(format!("line {number}: earlier than the previous write"));
        }
        writes.push(write);
    }
    if writes.is_empty() {
        return Err("the trace has no writes".to_owned());
    }
    Ok(writes)
}

fn parse_line(line: &str) -> Result<Write, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let &[at, bytes, first, second, third] = fields.as_slice() else {
        return Err(format!("{} fields, want microseconds,bytes,target,target,target", fields.len()));
    };
    let number =
        |what: &str, field: &str| field.parse::<u64>().map_err(|_| format!("{what} is {field:?}, not a number"));
    let at_us = number("the time", at)?;
    let at_ns = at_us.checked_mul(1000).ok_or_else(|| format!("the time {at_us} is too late"))?;
    let bytes = number("the size", bytes)?;
    if bytes == 0 || bytes > BYTES_MAX {
        return Err(format!("the size is {bytes}, not from 1 to {BYTES_MAX}"));
    }
    let mut targets = [0; 3];
    for (target, field) in targets.iter_mut().zip([first, second, third]) {
        let host = number("a target", field)?;
        *target = u32::try_from(host)
            .ok()
            .filter(|host| (1..=HOSTS).contains(host))
            .ok_or_else(|| format!("a target is {host}, not a host from 1 to {HOSTS}"))?;
    }
    targets.sort_unstable();
    if targets[0] == targets[1] || targets[1] == targets[2] {
        return Err("a target is named twice".to_owned());
    }
    Ok(Write { at_ns, bytes, targets })
}

/// Largest write in a trace, in bytes: 64 GiB.
const BYTES_MAX: u64 = 64 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_455_groups() {
        let triples = triples();
        assert_eq!(triples.len(), 455);
        assert!(triples.iter().all(|triple| triple[0] < triple[1] && triple[1] < triple[2] && triple[2] <= HOSTS));
    }

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    fn sizes_have_the_papers_median_and_mean() {
        let mut sizes: Vec<u64> = sample(20_000, 1e6, 3).iter().map(|write| write.bytes).collect();
        sizes.sort_unstable();
        let (median, mean) = (sizes[10_000] as f64, sizes.iter().sum::<u64>() as f64 / 2e4);
        assert!((median / MEDIAN - 1.0).abs() < 0.03, "{median}");
        assert!((mean / MEAN - 1.0).abs() < 0.06, "{mean}");
        assert!(sizes[0] >= 200 && sizes[19_999] <= 900_000_000);
    }

    #[test]
    fn targets_are_uniform_and_times_do_not_fall() {
        let writes = sample(15_000, 1e6, 4);
        let mut counts = [0; HOSTS as usize + 1];
        writes.iter().for_each(|write| write.targets.iter().for_each(|&host| counts[host as usize] += 1));
        assert_eq!(counts[0], 0);
        assert!(counts[1..].iter().all(|count| (2_800..3_200).contains(count)), "{counts:?}");
        assert!(writes.windows(2).all(|pair| pair[0].at_ns <= pair[1].at_ns));
        assert_eq!(writes, sample(15_000, 1e6, 4));
    }

    #[test]
    fn a_trace_is_read() {
        let writes = parse("# a comment\n\n 5, 1000 ,3,1,2\n7,1,15,14,13\n").unwrap();
        let first = Write { at_ns: 5_000, bytes: 1000, targets: [1, 2, 3] };
        assert_eq!(writes, [first, Write { at_ns: 7_000, bytes: 1, targets: [13, 14, 15] }]);
    }

    #[test]
    fn what_is_no_trace_is_told_with_its_line() {
        let error = |text: &str| parse(text).unwrap_err();
        assert_eq!(error(""), "the trace has no writes");
        assert_eq!(error("0,1,1,2,3\n1,2,3\n"), "line 2: 3 fields, want microseconds,bytes,target,target,target");
        assert_eq!(error("0,x,1,2,3"), "line 1: the size is \"x\", not a number");
        assert_eq!(error("0,0,1,2,3"), "line 1: the size is 0, not from 1 to 68719476736");
        assert_eq!(error("0,1,1,2,16"), "line 1: a target is 16, not a host from 1 to 15");
        assert_eq!(error("0,1,1,2,0"), "line 1: a target is 0, not a host from 1 to 15");
        assert_eq!(error("0,1,1,2,1"), "line 1: a target is named twice");
        assert_eq!(error("9,1,1,2,3\n8,1,1,2,3"), "line 2: earlier than the previous write");
    }
}
