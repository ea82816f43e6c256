//! Medians and percentiles.

use serde::Serialize;

/// Distribution of samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Distribution {
    pub(crate) median: f64,
    pub(crate) p10: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Distribution {
    /// Summarizes samples; `None` if there are none.
    pub(crate) fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let at = |share| quantile(&sorted, share);
        Some(Self { median: at(0.5), p10: at(0.1), p90: at(0.9), p99: at(0.99), min, max })
    }
}

/// Returns the median of samples; 0 if there are none.
pub(crate) fn median(samples: impl IntoIterator<Item = f64>) -> f64 {
    Distribution::of(samples).map_or(0.0, |distribution| distribution.median)
}

/// Returns the value below which a share of the sorted samples lies, interpolated linearly.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len() - 1;
    let place = share * last as f64;
    let below = place as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_between_the_nearest_samples() {
        let found = Distribution::of((0..=100).rev().map(f64::from)).unwrap();
        assert_eq!((found.median, found.p10, found.p90, found.p99), (50.0, 10.0, 90.0, 99.0));
        assert_eq!((found.min, found.max), (0.0, 100.0));
        let two = Distribution::of([3.0, 1.0]).unwrap();
        assert_eq!((two.median, two.min), (2.0, 1.0));
        assert!((two.p90 - 2.8).abs() < 1e-9);
    }

    #[test]
    fn one_sample_is_every_percentile_and_none_has_none() {
        let one = Distribution::of([7.0]).unwrap();
        assert_eq!((one.median, one.p10, one.p99, one.max), (7.0, 7.0, 7.0, 7.0));
        assert_eq!(Distribution::of([]), None);
        assert_eq!(median([]).to_bits(), 0);
    }
}
