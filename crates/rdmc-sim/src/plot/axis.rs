//! Rulers: the positions of values on an axis, ticks, and the text of numbers.

use super::font;
use super::scene::TypeFace;
use super::{Axis, Scale};

/// An axis with its ends and ticks decided.
#[derive(Debug)]
pub(super) struct Ruler {
    scale: Scale,
    first: f64,
    last: f64,
    pub(super) ticks: Vec<Tick>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tick {
    pub(super) value: f64,
    pub(super) label: String,
}

/// The length that the ticks of an axis share, and the direction of the axis.
#[derive(Debug, Clone, Copy)]
pub(super) enum TickRoom {
    Across(f64),
    Up(f64),
}

/// The ends of an axis that shows all data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    /// At the data.
    Tight,
    /// At the next tick beyond the data, or at zero when that is not far.
    Tick,
    /// As `Tick`, but zero is always shown on a linear axis.
    TickAndZero,
}

impl Ruler {
    pub(super) fn new(axis: &Axis, data: impl Iterator<Item = f64>, room: TickRoom, ends: Ends) -> Self {
        let scale = axis.scale;
        let given = axis.range.map(|(a, b)| (a.min(b), a.max(b)));
        let given = given.filter(|&(first, last)| shows(scale, first) && shows(scale, last) && apart(first, last));
        let (first, last, ticks) = match (given, scale) {
            (Some((first, last)), _) => (first, last, ticks(scale, first, last, room)),
            (None, Scale::Linear) => {
                let (least, most) = linear_extent(data, ends);
                let step = linear_step(least, most, room);
                let (first, last) = match ends {
                    Ends::Tight => (least, most),
                    _ => ((least / step + ROUNDING).floor() * step, (most / step - ROUNDING).ceil() * step),
                };
                (first, last, linear_ticks(first, last, step))
            }
            (None, Scale::Log2 | Scale::Log10) => {
                let (least, most) = log_extent(scale, data);
                let (first, last) = match ends {
                    Ends::Tight => (least, most),
                    _ => (log_beyond(scale, least, false), log_beyond(scale, most, true)),
                };
                (first, last, ticks(scale, first, last, room))
            }
        };
        Self { scale, first, last, ticks }
    }

    /// Returns the position of `value`: 0 at the first end, 1 at the last end, other numbers outside. `None` if it has
    /// none.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        if !shows(self.scale, value) {
            return None;
        }
        Some(match self.scale {
            Scale::Linear => (value - self.first) / (self.last - self.first),
            _ => (value / self.first).ln() / (self.last / self.first).ln(),
        })
    }

    /// Returns the position of the foot of a bar: zero, or the nearest end of the axis.
    pub(super) fn foot(&self) -> f64 {
        self.place(0.0).map_or(0.0, |foot| foot.clamp(0.0, 1.0))
    }
}

/// Returns whether `value` has a position on the scale. Numbers beyond any measurement have none, so that sums and
/// ratios stay finite.
pub(super) fn shows(scale: Scale, value: f64) -> bool {
    let sane = value.is_finite() && value.abs() <= LARGEST;
    match scale {
        Scale::Linear => sane,
        Scale::Log2 | Scale::Log10 => sane && value >= 1.0 / LARGEST,
    }
}

/// Formats measured values with three digits, and no more decimals than one of them needs: `0.25`, `12.3`, `56.7k`.
pub(super) fn short(values: &[f64]) -> Vec<String> {
    let needed = values.iter().map(|value| {
        let digits = three_digits(*value, i32::MAX);
        let decimals = digits.split_once('.').map_or("", |(_, decimals)| decimals.trim_end_matches(SUFFIX_LETTERS));
        i32::try_from(decimals.trim_end_matches('0').len()).unwrap_or(0)
    });
    let decimals_max = needed.max().unwrap_or(0);
    values.iter().map(|value| three_digits(*value, decimals_max)).collect()
}

fn three_digits(value: f64, decimals_max: i32) -> String {
    let size = value.abs();
    if size == 0.0 {
        return "0".to_owned();
    }
    if !(1e-4..1e15).contains(&size) {
        return scientific(value);
    }
    let (divisor, suffix) = suffix(size);
    let shown = size / divisor;
    let decimals = (0..6).find(|&decimals| shown * 10_f64.powi(decimals) >= 99.95).unwrap_or(6);
    format!("{}{suffix}", fixed(value / divisor, decimals.min(decimals_max)))
}

fn ticks(scale: Scale, first: f64, last: f64, room: TickRoom) -> Vec<Tick> {
    match scale {
        Scale::Linear => linear_ticks(first, last, linear_step(first, last, room)),
        Scale::Log2 | Scale::Log10 => log_ticks(scale, first, last, room),
    }
}

fn linear_extent(data: impl Iterator<Item = f64>, ends: Ends) -> (f64, f64) {
    let Some((mut least, mut most)) = extent(Scale::Linear, data) else { return (0.0, 1.0) };
    let near_zero = ends == Ends::Tick && least < 0.6 * most;
    if (ends == Ends::TickAndZero || near_zero) && least > 0.0 {
        least = 0.0;
    }
    if ends == Ends::TickAndZero && most < 0.0 {
        most = 0.0;
    }
    if apart(least, most) {
        return (least, most);
    }
    let margin = if least == 0.0 { 1.0 } else { 0.5 * least.abs() };
    if least == 0.0 { (0.0, 1.0) } else { (least - margin, most + margin) }
}

fn log_extent(scale: Scale, data: impl Iterator<Item = f64>) -> (f64, f64) {
    let base = base(scale);
    match extent(scale, data) {
        None => (1.0, base.powi(3)),
        Some((least, most)) if apart(least, most) => (least, most),
        Some((least, most)) => (least / base, most * base),
    }
}

fn extent(scale: Scale, data: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    data.filter(|&value| shows(scale, value)).fold(None, |extent, value| match extent {
        None => Some((value, value)),
        Some((least, most)) => Some((value.min(least), value.max(most))),
    })
}

fn apart(first: f64, last: f64) -> bool {
    last - first > 1e-9 * first.abs().max(last.abs())
}

/// Returns the smallest of 1, 2, 2.5, 5, 10 … at which ticks have enough room.
fn linear_step(first: f64, last: f64, room: TickRoom) -> f64 {
    let (length, each) = match room {
        TickRoom::Across(length) => (length, 76.0),
        TickRoom::Up(length) => (length, 38.0),
    };
    let least = (last - first) / (length / each).max(2.0);
    let power = 10_f64.powf(least.log10().floor());
    let nice = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= least * (1.0 - ROUNDING));
    nice.unwrap_or(10.0) * power
}

fn linear_ticks(first: f64, last: f64, step: f64) -> Vec<Tick> {
    let start = (first / step - ROUNDING).ceil();
    let values = (0..TICKS_MAX).map(|index| (start + f64::from(index)) * step);
    let values: Vec<f64> = values.take_while(|value| *value <= last + ROUNDING * step).collect();
    let size_max = values.iter().fold(0.0_f64, |size, value| size.max(value.abs()));
    // A suffix is used only if the step stays exact with it.
    let units = [suffix(size_max), (1.0, "")];
    let unit = units.into_iter().find_map(|(divisor, suffix)| Some((divisor, suffix, decimals(step / divisor)?)));
    let label = |value: f64| match unit {
        _ if value.abs() < ROUNDING * step => "0".to_owned(),
        Some((divisor, suffix, decimals)) if size_max < 1e15 => format!("{}{suffix}", fixed(value / divisor, decimals)),
        _ => scientific(value),
    };
    values.into_iter().map(|value| Tick { value, label: label(value) }).collect()
}

/// Returns the number of decimals that `step` needs, if there are few.
fn decimals(step: f64) -> Option<i32> {
    (0..=6).find(|&decimals| {
        let scaled = step * 10_f64.powi(decimals);
        scaled >= 0.99 && (scaled - scaled.round()).abs() < 1e-6 * scaled
    })
}

/// Returns ticks at powers of the base; with fewer than two of them, at 1, 2, 5, 10 …; below an octave, at equal steps.
fn log_ticks(scale: Scale, first: f64, last: f64, room: TickRoom) -> Vec<Tick> {
    let base = base(scale);
    let inside = |value: &f64| *value >= first * (1.0 - ROUNDING) && *value <= last * (1.0 + ROUNDING);
    let start = (first.ln() / base.ln() - ROUNDING).floor();
    let powers = || {
        let powers = (0..POWERS_MAX).map(move |index| base.powf(start + f64::from(index)));
        powers.take_while(move |power| *power <= last * (1.0 + ROUNDING))
    };
    let mut values: Vec<f64> = powers().filter(inside).collect();
    if values.len() < 3 && scale == Scale::Log10 {
        values = powers().flat_map(|power| [power, 2.0 * power, 5.0 * power]).filter(inside).collect();
    }
    if values.len() < 2 {
        return linear_ticks(first, last, linear_step(first, last, room));
    }
    let binary_suffixes = scale == Scale::Log2 && last >= 131_072.0;
    let label = |value: f64| if binary_suffixes { binary(value) } else { power_label(value) };
    let ticks: Vec<Tick> = values.into_iter().map(|value| Tick { value, label: label(value) }).collect();
    thinned(ticks, (last / first).ln(), room)
}

/// Keeps every second, third … tick, until they have enough room along the axis, which spans `span` of natural
/// logarithm.
fn thinned(ticks: Vec<Tick>, span: f64, room: TickRoom) -> Vec<Tick> {
    let each = ticks.windows(2).map(|pair| (pair[1].value / pair[0].value).ln() / span).fold(1.0, f64::min);
    let (have, want) = match room {
        TickRoom::Across(length) => {
            let width_max = ticks.iter().map(|tick| font::width(&tick.label, TICK_FACE)).fold(0.0, f64::max);
            (each * length, width_max + 14.0)
        }
        TickRoom::Up(length) => (each * length, 24.0),
    };
    let stride = (1..ticks.len()).find(|&stride| stride as f64 * have >= want).unwrap_or(ticks.len());
    ticks.into_iter().step_by(stride).collect()
}

/// Returns the nearest power of two, or of ten, or 2 or 5 times that, below or above `value`.
fn log_beyond(scale: Scale, value: f64, above: bool) -> f64 {
    let base = base(scale);
    let exponent = value.ln() / base.ln();
    if scale == Scale::Log2 {
        let exponent = if above { (exponent - ROUNDING).ceil() } else { (exponent + ROUNDING).floor() };
        return base.powf(exponent);
    }
    let power = base.powf((exponent + ROUNDING).floor());
    let stops = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let slack = 1.0 + ROUNDING;
    if above {
        stops.into_iter().find(|stop| stop * slack >= value).unwrap_or(10.0 * power)
    } else {
        stops.into_iter().rev().find(|stop| *stop <= value * slack).unwrap_or(power)
    }
}

fn power_label(value: f64) -> String {
    if (1e-4..1e15).contains(&value) {
        let (divisor, suffix) = suffix(value);
        let (divisor, suffix) =
            if value >= 999.5 && suffix.is_empty() && is_decimal(value) { (1e3, "k") } else { (divisor, suffix) };
        let shown = value / divisor;
        let decimals = (0..8).find(|&decimals| is_whole(shown * 10_f64.powi(decimals))).unwrap_or(4);
        format!("{}{suffix}", fixed(shown, decimals))
    } else {
        scientific(value)
    }
}

/// Returns whether `value` is a whole number of thousands: these are written `1k`, powers of two are not.
fn is_decimal(value: f64) -> bool {
    is_whole(value / 1e3)
}

fn is_whole(value: f64) -> bool {
    value >= 0.5 && (value - value.round()).abs() < 1e-6 * value
}

fn binary(value: f64) -> String {
    let suffixes = [(2_f64.powi(40), "Ti"), (2_f64.powi(30), "Gi"), (2_f64.powi(20), "Mi"), (2_f64.powi(10), "Ki")];
    let (divisor, suffix) = suffixes.into_iter().find(|(divisor, _)| value >= *divisor).unwrap_or((1.0, ""));
    format!("{}{suffix}", power_label(value / divisor))
}

/// Returns the divisor and the suffix that make a value up to `size` short.
fn suffix(size: f64) -> (f64, &'static str) {
    let suffixes = [(1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")];
    let found = suffixes.into_iter().find(|(least, _, _)| size >= least * (1.0 - ROUNDING));
    found.map_or((1.0, ""), |(_, divisor, suffix)| (divisor, suffix))
}

fn scientific(value: f64) -> String {
    format!("{value:.1e}").replace(".0e", "e").replace('-', "−")
}

/// Formats a number with this many decimals and a proper minus.
fn fixed(value: f64, decimals: i32) -> String {
    let decimals = usize::try_from(decimals).unwrap_or(0);
    format!("{value:.decimals$}").replace('-', "−")
}

fn base(scale: Scale) -> f64 {
    if scale == Scale::Log2 { 2.0 } else { 10.0 }
}

pub(super) const TICK_FACE: TypeFace = TypeFace::regular(11.0);

/// Larger values, and on a logarithmic axis values below its reciprocal, have no position.
const LARGEST: f64 = 1e100;
const SUFFIX_LETTERS: [char; 4] = ['k', 'M', 'G', 'T'];
/// Values within this relative distance count as equal.
const ROUNDING: f64 = 1e-9;
const TICKS_MAX: u32 = 100;
/// `LARGEST` squared, in powers of two.
const POWERS_MAX: u32 = 700;

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: Axis, data: &[f64], ends: Ends) -> Vec<String> {
        let ruler = Ruler::new(&axis, data.iter().copied(), TickRoom::Across(600.0), ends);
        ruler.ticks.into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn powers_of_two_are_written_out() {
        assert_eq!(
            labels(Axis::log2(""), &[2.0, 512.0], Ends::Tight),
            ["2", "4", "8", "16", "32", "64", "128", "256", "512"]
        );
        assert_eq!(labels(Axis::log2(""), &[1024.0, 8192.0], Ends::Tight), ["1024", "2048", "4096", "8192"]);
        assert_eq!(labels(Axis::log2(""), &[262_144.0, 1_048_576.0], Ends::Tight), ["256Ki", "512Ki", "1Mi"]);
        assert_eq!(labels(Axis::log2(""), &[0.25, 2.0], Ends::Tight), ["0.25", "0.5", "1", "2"]);
    }

    #[test]
    fn powers_of_ten_are_written_with_suffixes() {
        assert_eq!(labels(Axis::log10(""), &[1.0, 100_000.0], Ends::Tight), ["1", "10", "100", "1k", "10k", "100k"]);
        assert_eq!(labels(Axis::log10(""), &[0.01, 1.0], Ends::Tight), ["0.01", "0.1", "1"]);
        assert_eq!(labels(Axis::log10(""), &[30.0, 800.0], Ends::Tight), ["50", "100", "200", "500"]);
        assert_eq!(labels(Axis::log10(""), &[30.0, 800.0], Ends::Tick), ["20", "50", "100", "200", "500", "1k"]);
    }

    #[test]
    fn linear_ticks_are_round_and_show_zero_when_it_is_near() {
        assert_eq!(labels(Axis::linear(""), &[3.0, 97.0], Ends::Tick), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(labels(Axis::linear(""), &[0.0, 41_000.0], Ends::Tick), ["0", "10k", "20k", "30k", "40k", "50k"]);
        assert_eq!(
            labels(Axis::linear(""), &[-0.1, 0.2], Ends::Tick),
            ["−0.10", "−0.05", "0", "0.05", "0.10", "0.15", "0.20"]
        );
        assert_eq!(labels(Axis::linear(""), &[99.0, 100.0], Ends::Tick)[0], "99.0");
    }

    #[test]
    fn ticks_stay_few_and_inside_on_any_range() {
        let sizes = [1e-90, 1e-9, 0.3, 1.0, 7.0, 1e4, 1e9, 1e99];
        for axis in [Axis::linear(""), Axis::log2(""), Axis::log10("")] {
            for (first, last) in sizes.iter().flat_map(|a| sizes.iter().map(move |b| (*a, *b))) {
                for ends in [Ends::Tight, Ends::Tick, Ends::TickAndZero] {
                    let ruler = Ruler::new(&axis, [first, last].into_iter(), TickRoom::Up(300.0), ends);
                    assert!(ruler.ticks.len() <= 14, "{axis:?} {first} {last} {:?}", ruler.ticks);
                    for tick in &ruler.ticks {
                        let place = ruler.place(tick.value).expect("ticks have a place");
                        assert!((-1e-6..=1.000_001).contains(&place), "{axis:?} {first} {last} {tick:?}");
                    }
                    for value in [first, last] {
                        let place = ruler.place(value).expect("data has a place");
                        assert!((-1e-6..=1.000_001).contains(&place), "{axis:?} {first} {last} {value}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_has_no_logarithm_has_no_place() {
        let ruler = Ruler::new(&Axis::log2(""), [1.0, 8.0].into_iter(), TickRoom::Up(300.0), Ends::Tick);
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(ruler.place(value), None);
        }
        assert_eq!(ruler.place(8.0), Some(1.0));
    }

    #[test]
    fn steps_far_from_zero_do_not_lose_their_digits() {
        let data = [1_000_000_000.0, 1_000_000_010.0];
        assert_eq!(labels(Axis::linear(""), &data, Ends::Tight)[1], "1000000002");
    }

    #[test]
    fn values_are_written_with_three_digits() {
        let written =
            [0.0, 0.25, 1.0, 12.34, 123.4, 1234.0, 56_789.0, 1.5e6, -3.0].map(|value| short(&[value]).concat());
        assert_eq!(written, ["0", "0.25", "1", "12.3", "123", "1234", "56.8k", "1.5M", "−3"]);
        assert_eq!(short(&[71.0, 95.1, 3.25, 0.0]), ["71.0", "95.1", "3.25", "0"]);
        assert_eq!(short(&[71.0, 3.0]), ["71", "3"]);
        assert_eq!(short(&[]), [""; 0]);
    }
}
