//! The detection time of a cluster, and its bounds.

use std::time::Duration;

/// A detection time is too short or too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a detection time of {got:?} is not between {:?} and {:?}", DETECTION_MIN, DETECTION_MAX)]
pub struct DetectionError {
    /// The time asked for.
    pub got: Duration,
}

/// Checks the bounds of a detection time.
pub(crate) fn check_detection(got: Duration) -> Result<(), DetectionError> {
    let bounds = DETECTION_MIN..=DETECTION_MAX;
    if bounds.contains(&got) { Ok(()) } else { Err(DetectionError { got }) }
}

/// Shortest detection time.
pub(crate) const DETECTION_MIN: Duration = Duration::from_millis(50);
/// Longest detection time.
pub(crate) const DETECTION_MAX: Duration = Duration::from_secs(3600);
