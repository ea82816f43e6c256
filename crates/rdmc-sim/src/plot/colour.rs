//! Colours and markers of series.

use super::{Content, Figure};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Colour(pub(super) u8, pub(super) u8, pub(super) u8);

impl Colour {
    /// Mixes the colour with `share` percent of `other`.
    pub(super) fn mixed(self, other: Self, share: u16) -> Self {
        let mix = |own: u8, other: u8| {
            let sum = u16::from(own) * (100 - share) + u16::from(other) * share;
            u8::try_from(sum / 100).expect("a mean of two bytes is a byte")
        };
        Self(mix(self.0, other.0), mix(self.1, other.1), mix(self.2, other.2))
    }

    /// Makes the colour dark enough for text on white.
    pub(super) fn for_text(self) -> Self {
        if self.brightness() > 0.45 { self.mixed(INK, 28) } else { self.mixed(INK, 8) }
    }

    /// Returns the colour of text on this colour.
    pub(super) fn contrast(self) -> Self {
        if self.brightness() > 0.6 { INK } else { WHITE }
    }

    /// Returns the perceived brightness (Rec. 601 luma), 0 to 1.
    fn brightness(self) -> f64 {
        (0.299 * f64::from(self.0) + 0.587 * f64::from(self.1) + 0.114 * f64::from(self.2)) / 255.0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Marker {
    Circle,
    Square,
    Triangle,
    Diamond,
}

/// The colour and marker of a series.
#[derive(Debug, Clone, Copy)]
pub(super) struct Paint {
    pub(super) colour: Colour,
    pub(super) marker: Marker,
}

/// The series names of a figure in the order of their first appearance, which decides colour and marker.
#[derive(Debug)]
pub(super) struct Paints<'a>(Vec<&'a str>);

impl<'a> Paints<'a> {
    pub(super) fn of(figure: &'a Figure) -> Self {
        let mut names: Vec<&str> = Vec::new();
        let mut note = |name: &'a str| {
            if !names.contains(&name) {
                names.push(name);
            }
        };
        for panel in &figure.panels {
            match &panel.content {
                Content::Lines(lines) => lines.iter().for_each(|line| note(&line.name)),
                Content::Bars(bars) => bars.series.iter().for_each(|series| note(&series.name)),
            }
        }
        Self(names)
    }

    pub(super) fn paint(&self, name: &str) -> Paint {
        let index = self.0.iter().position(|known| *known == name).unwrap_or(0);
        Paint { colour: PALETTE[index % PALETTE.len()], marker: MARKERS[index % MARKERS.len()] }
    }
}

pub(super) const WHITE: Colour = Colour(255, 255, 255);
/// Titles.
pub(super) const INK: Colour = Colour(27, 27, 31);
/// Labels of axes, notes.
pub(super) const GREY: Colour = Colour(92, 92, 100);
/// Axes, reference lines.
pub(super) const RULE: Colour = Colour(140, 140, 148);
pub(super) const GRID: Colour = Colour(232, 232, 236);

/// After Okabe and Ito, without yellow, and with a purple and a grey that carry text on white.
const PALETTE: [Colour; 8] = [
    Colour(0, 114, 178),
    Colour(213, 94, 0),
    Colour(0, 158, 115),
    Colour(170, 68, 136),
    Colour(230, 159, 0),
    Colour(86, 180, 233),
    Colour(90, 90, 98),
    Colour(130, 30, 60),
];

const MARKERS: [Marker; 4] = [Marker::Circle, Marker::Square, Marker::Triangle, Marker::Diamond];
