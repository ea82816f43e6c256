//! Values per category: bars side by side or stacked.

use super::axis::{self, Ruler};
use super::colour::{Colour, INK, Paints, WHITE};
use super::font;
use super::labels::{Obstacles, TAG_FACE, Tag};
use super::scene::{Anchor, Area, Mark, Stroke, Text, TypeFace};
use super::{BarSeries, Bars, Scale};

/// The names and obstacles around the bars.
#[derive(Debug, Default)]
pub(super) struct Drawn {
    pub(super) obstacles: Obstacles,
    /// The names right of the frame.
    pub(super) tags: Vec<Tag>,
}

/// Returns the values that the vertical axis must show, with room for the numbers on the bars.
pub(super) fn reach(bars: &Bars) -> Vec<f64> {
    let count = bars.categories.len();
    let values: Vec<f64> = if bars.stacked {
        let sums = (0..count).flat_map(|category| {
            let values = bars.series.iter().filter_map(|series| series.values.get(category).copied()).filter(usable);
            let (up, down): (Vec<f64>, Vec<f64>) = values.partition(|value| *value >= 0.0);
            [up.iter().sum(), down.iter().sum()]
        });
        sums.filter(|sum| *sum != 0.0).collect()
    } else {
        bars.series.iter().flat_map(|series| series.values.iter().take(count)).copied().filter(usable).collect()
    };
    values.into_iter().flat_map(|value| [value, value * HEADROOM]).collect()
}

pub(super) fn draw(marks: &mut Vec<Mark>, bars: &Bars, paints: &Paints<'_>, frame: Area, y: &Ruler) -> Drawn {
    if bars.stacked { stacked(marks, bars, paints, frame, y) } else { grouped(marks, bars, paints, frame, y) }
}

/// Writes the categories under the frame and returns their height. If there are many, it writes only every second or
/// third.
pub(super) fn draw_categories(marks: &mut Vec<Mark>, bars: &Bars, frame: Area) -> f64 {
    let slot = slot(bars, frame);
    let widest = |face| {
        let words = bars.categories.iter().flat_map(|name| name.split_whitespace());
        words.map(|word| font::width(word, face)).fold(1.0, f64::max)
    };
    let faces = CATEGORY_SIZES.map(TypeFace::regular);
    let face = faces.into_iter().find(|face| widest(*face) <= slot - 5.0).unwrap_or(faces[faces.len() - 1]);
    // A few long names lose their ends; many names are thinned out.
    let count = bars.categories.len();
    let room_wanted = widest(face) + 5.0;
    let fits = |stride: &usize| *stride as f64 * slot >= room_wanted;
    let stride = if count <= CATEGORIES_FEW { 1 } else { (1..count).find(fits).unwrap_or(count) };
    let mut lines_most = 0;
    for (index, name) in bars.categories.iter().enumerate().step_by(stride) {
        let lines = font::wrap(name, face, stride as f64 * slot - 4.0);
        for (row, line) in lines.iter().enumerate() {
            let base = frame.bottom + 17.0 + row as f64 * face.leading();
            marks.push(Text::plain((middle(bars, frame, index), base), Anchor::Middle, face, INK, line));
        }
        lines_most = lines_most.max(lines.len());
    }
    if lines_most == 0 { 2.0 } else { 17.0 + (lines_most - 1) as f64 * face.leading() }
}

/// Returns the height of the key above the frame, which names bars that stand side by side.
pub(super) fn key_height(bars: &Bars, width: f64) -> f64 {
    let rows = key(bars, width).last().map_or(0, |(row, _, _)| row + 1);
    if rows == 0 { 0.0 } else { rows as f64 * KEY_LEADING + 4.0 }
}

pub(super) fn draw_key(marks: &mut Vec<Mark>, bars: &Bars, paints: &Paints<'_>, top: f64, width: f64) {
    for (row, left, name) in key(bars, width) {
        let paint = paints.paint(name);
        let middle = top + 4.0 + (row as f64 + 0.5) * KEY_LEADING;
        marks.push(Mark::area(Area::around((left + KEY_SIDE / 2.0, middle), KEY_SIDE, KEY_SIDE), paint.colour));
        let base = (left + KEY_SIDE + 5.0, middle + TAG_FACE.middle_to_base());
        marks.push(Text::plain(base, Anchor::Start, TAG_FACE, paint.colour.for_text(), name));
    }
}

/// Returns the row, left end and text of each name.
fn key(bars: &Bars, width: f64) -> Vec<(usize, f64, &str)> {
    let mut places = Vec::new();
    let (mut row, mut left) = (0, 0.0);
    if bars.stacked {
        return places;
    }
    for name in bars.series.iter().map(|series| series.name.as_str()).filter(|name| !name.is_empty()) {
        let length = KEY_SIDE + 5.0 + font::width(name, TAG_FACE);
        if left > 0.0 && left + length > width {
            (row, left) = (row + 1, 0.0);
        }
        places.push((row, left, name));
        left += length + 16.0;
    }
    places
}

fn grouped(marks: &mut Vec<Mark>, bars: &Bars, paints: &Paints<'_>, frame: Area, y: &Ruler) -> Drawn {
    let count = bars.series.len().max(1) as f64;
    let pitch = (slot(bars, frame) * GROUP_SHARE / count).min(BAR_WIDTH_MAX + 2.0);
    let width = if pitch > 6.0 { pitch - 2.0 } else { pitch * 0.9 };
    let mut areas = Vec::new();
    let mut numbers = Vec::new();
    for (index, series) in bars.series.iter().enumerate() {
        let paint = paints.paint(&series.name);
        for (category, &value) in series.values.iter().take(bars.categories.len()).enumerate() {
            let Some(place) = y.place(value) else { continue };
            let centre = middle(bars, frame, category) + (index as f64 + 0.5 - count / 2.0) * pitch;
            let (top, bottom) = ordered(frame, place, y.foot());
            let area = Area { left: centre - width / 2.0, top, right: centre + width / 2.0, bottom };
            marks.push(Mark::area(area, paint.colour));
            areas.push(area);
            numbers.push(Number { value, place, bar: area, colour: paint.colour.for_text() });
        }
    }
    // A single series has the whole slot for its numbers.
    let room = if bars.series.len() == 1 { slot(bars, frame) - 4.0 } else { pitch - 1.0 };
    areas.extend(draw_numbers(marks, numbers, room, false));
    Drawn { obstacles: Obstacles { segments: Vec::new(), areas }, tags: Vec::new() }
}

fn stacked(marks: &mut Vec<Mark>, bars: &Bars, paints: &Paints<'_>, frame: Area, y: &Ruler) -> Drawn {
    let segments = segments(bars, frame, y);
    let values: Vec<f64> = segments.iter().map(|segment| segment.value).collect();
    for (segment, text) in segments.iter().zip(axis::short(&values)) {
        let Area { left, top, right, bottom } = segment.area;
        let colour = paints.paint(&segment.series.name).colour;
        let edge = (segment.area.height() > 2.0).then_some(Stroke::solid(WHITE, 1.0));
        marks.push(Mark::fill(vec![(left, top), (right, top), (right, bottom), (left, bottom)], colour, edge));
        if segment.area.height() >= 15.0 && font::width(&text, SEGMENT_FACE) <= segment.area.width() - 4.0 {
            let base = f64::midpoint(top, bottom) + SEGMENT_FACE.middle_to_base();
            let at = (f64::midpoint(left, right), base);
            marks.push(Text::plain(at, Anchor::Middle, SEGMENT_FACE, colour.contrast(), &text));
        }
    }
    let mut areas: Vec<Area> = segments.iter().map(|segment| segment.area).collect();
    if bars.series.len() > 1 {
        areas.extend(draw_numbers(marks, totals(&segments, y), slot(bars, frame) - 4.0, true));
    }
    let last = segments.iter().filter(|segment| segment.category + 1 == bars.categories.len());
    let tag = |(index, segment): (usize, &Segment<'_>)| Tag {
        name: segment.series.name.clone(),
        colour: paints.paint(&segment.series.name).colour,
        end: (segment.area.right, f64::midpoint(segment.area.top, segment.area.bottom)),
        reach: segment.area.height() / 2.0,
        tie: -(index as f64),
    };
    Drawn { tags: last.enumerate().map(tag).collect(), obstacles: Obstacles { segments: Vec::new(), areas } }
}

/// A segment of a stack.
#[derive(Debug)]
struct Segment<'a> {
    series: &'a BarSeries,
    category: usize,
    value: f64,
    area: Area,
}

/// Returns the segments of all stacks: positive ones go up from zero, negative ones down.
fn segments<'a>(bars: &'a Bars, frame: Area, y: &Ruler) -> Vec<Segment<'a>> {
    let width = (slot(bars, frame) * STACK_SHARE).min(STACK_WIDTH_MAX);
    let mut segments = Vec::new();
    for category in 0..bars.categories.len() {
        let centre = middle(bars, frame, category);
        let (mut up, mut down) = (0.0, 0.0);
        for series in &bars.series {
            let Some(value) = series.values.get(category).copied().filter(usable) else { continue };
            let sum = if value < 0.0 { &mut down } else { &mut up };
            let from = y.place(*sum).unwrap_or(y.foot());
            *sum += value;
            let (top, bottom) = ordered(frame, y.place(*sum).unwrap_or(from), from);
            let area = Area { left: centre - width / 2.0, top, right: centre + width / 2.0, bottom };
            segments.push(Segment { series, category, value, area });
        }
    }
    segments
}

/// Returns the sum of each stack without negative values.
fn totals(segments: &[Segment<'_>], y: &Ruler) -> Vec<Number> {
    let stacks = segments.chunk_by(|a, b| a.category == b.category);
    let positive = stacks.filter(|stack| stack.iter().all(|segment| segment.value >= 0.0));
    let total = |stack: &[Segment<'_>]| {
        let value = stack.iter().map(|segment| segment.value).sum();
        Some(Number { value, place: y.place(value)?, bar: stack.last()?.area, colour: INK })
    };
    positive.filter_map(total).collect()
}

/// The number at the end of a bar.
#[derive(Debug)]
struct Number {
    value: f64,
    /// The position of the value on the axis.
    place: f64,
    bar: Area,
    colour: Colour,
}

/// Writes all numbers in one size, if there is one at which each has enough room, and returns their areas. A number
/// beyond the axis is skipped: its bar is cut off.
fn draw_numbers(marks: &mut Vec<Mark>, mut numbers: Vec<Number>, room: f64, bold: bool) -> Vec<Area> {
    numbers.retain(|number| (-1e-6..=1.000_001).contains(&number.place));
    let texts = axis::short(&numbers.iter().map(|number| number.value).collect::<Vec<_>>());
    let faces = NUMBER_SIZES.map(|size| TypeFace { size, bold });
    let fitting = faces.into_iter().find(|face| texts.iter().all(|text| font::width(text, *face) <= room));
    let Some(face) = fitting else { return Vec::new() };
    let write = |(number, text): (Number, String)| {
        let base = if number.value < 0.0 { number.bar.bottom + face.size + 1.0 } else { number.bar.top - 4.0 };
        let centre = f64::midpoint(number.bar.left, number.bar.right);
        marks.push(Text::rimmed((centre, base), Anchor::Middle, face, number.colour, &text));
        Area::around((centre, base - face.size / 2.0), font::width(&text, face), face.size)
    };
    numbers.into_iter().zip(texts).map(write).collect()
}

fn usable(value: &f64) -> bool {
    axis::shows(Scale::Linear, *value)
}

/// Returns top and bottom of a bar between two positions of the axis, inside the frame.
fn ordered(frame: Area, a: f64, b: f64) -> (f64, f64) {
    let [a, b] = [a, b].map(|place| frame.bottom - place.clamp(0.0, 1.0) * frame.height());
    (a.min(b), a.max(b))
}

fn slot(bars: &Bars, frame: Area) -> f64 {
    frame.width() / (bars.categories.len().max(1) as f64)
}

fn middle(bars: &Bars, frame: Area, category: usize) -> f64 {
    frame.left + (category as f64 + 0.5) * slot(bars, frame)
}

/// The share of the width of a category that its bars take.
const GROUP_SHARE: f64 = 0.82;
const STACK_SHARE: f64 = 0.62;
const BAR_WIDTH_MAX: f64 = 56.0;
const STACK_WIDTH_MAX: f64 = 76.0;
const CATEGORY_SIZES: [f64; 3] = [11.5, 10.5, 9.5];
const CATEGORIES_FEW: usize = 10;
/// Numbers stand above bars that end at least this much below the top.
const HEADROOM: f64 = 1.06;
const KEY_LEADING: f64 = 17.0;
const KEY_SIDE: f64 = 10.0;
const NUMBER_SIZES: [f64; 4] = [11.0, 10.0, 9.0, 8.5];
const SEGMENT_FACE: TypeFace = TypeFace::regular(10.5);
