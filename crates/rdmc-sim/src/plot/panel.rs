//! One panel: heading, frame, grid, content, reference lines, notes.

use super::axis::{Ends, Ruler, TICK_FACE, TickRoom};
use super::colour::{GREY, GRID, INK, Paints, RULE};
use super::font;
use super::labels::{self, Obstacles};
use super::lines::{self, Plane};
use super::scene::{Anchor, Area, Mark, Stroke, Text, TypeFace};
use super::{Bars, Content, Line, Panel, Reference, bars};

/// The lengths that the panels of a row share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) width: f64,
    /// From the top of the panel to the top of the frame.
    pub(super) header: f64,
    /// From the top of the frame to its bottom.
    pub(super) plot: f64,
}

/// The shapes of a panel, relative to its upper left corner.
#[derive(Debug)]
pub(super) struct Drawn {
    pub(super) marks: Vec<Mark>,
    pub(super) height: f64,
}

pub(super) fn header_height(panel: &Panel, width: f64) -> f64 {
    let title = panel.title.as_deref().map_or(0.0, |title| block_height(title, TITLE_FACE, width));
    let key = match &panel.content {
        Content::Bars(bars) => bars::key_height(bars, width),
        Content::Lines(_) => 0.0,
    };
    title + block_height(&panel.y.label, LABEL_FACE, width) + key + HEADER_GAP
}

/// Returns the least height of the frame at which the names right of it do not overlap.
pub(super) fn plot_height_min(panel: &Panel, width: f64) -> f64 {
    labels::tag_height(tag_names(panel), width * TAG_SHARE)
}

pub(super) fn draw(panel: &Panel, paints: &Paints<'_>, sizes: Sizes) -> Drawn {
    let mut marks = Vec::new();
    let heading = draw_heading(&mut marks, panel, paints, sizes);
    let references = panel.references.iter().map(|reference| reference.y);
    let (mut body, y) = match &panel.content {
        Content::Lines(lines) => {
            let values = lines.iter().flat_map(|line| &line.points).map(|point| point.1);
            let y = Ruler::new(&panel.y, values.chain(references), TickRoom::Up(sizes.plot), Ends::Tick);
            (draw_lines(&mut marks, panel, lines, paints, sizes, &y), y)
        }
        Content::Bars(bars) => {
            let values = bars::reach(bars).into_iter();
            let y = Ruler::new(&panel.y, values.chain(references), TickRoom::Up(sizes.plot), Ends::TickAndZero);
            (draw_bars(&mut marks, panel, bars, paints, sizes, &y), y)
        }
    };
    body.obstacles.areas.push(heading);
    rule_names(&mut marks, &panel.references, body.frame, &y, body.obstacles);
    let mut height = sizes.header + sizes.plot + body.below;
    for note in &panel.notes {
        height += NOTE_GAP;
        height += block(&mut marks, note, NOTE_FACE, GREY, height, sizes.width);
    }
    Drawn { marks, height }
}

/// The result of drawing the content of a panel.
#[derive(Debug)]
struct Body {
    frame: Area,
    obstacles: Obstacles,
    /// The height of the labels below the frame.
    below: f64,
}

/// Draws the frame and the lines in it.
fn draw_lines(
    marks: &mut Vec<Mark>,
    panel: &Panel,
    lines: &[Line],
    paints: &Paints<'_>,
    sizes: Sizes,
    y: &Ruler,
) -> Body {
    let tag_width = labels::tag_width(tag_names(panel), sizes.width * TAG_SHARE);
    let ruler = |frame: Area| {
        let values = lines.iter().flat_map(|line| &line.points).map(|point| point.0);
        Ruler::new(&panel.x, values, TickRoom::Across(frame.width()), Ends::Tight)
    };
    // Names stand inside the frame if they are clearer there, otherwise right of it, which narrows the frame.
    let wide = frame(sizes, y, NARROW_MARGIN);
    let wide_x = ruler(wide);
    let traces = lines::traces(lines, paints, Plane { frame: wide, x: &wide_x, y });
    let rules: Vec<f64> = panel.references.iter().filter_map(|reference| height(wide, y, reference.y)).collect();
    let inside = lines::names_inside(&traces, wide, &rules);
    let (frame, x, traces) = if inside.is_some() || tag_width == 0.0 {
        (wide, wide_x, traces)
    } else {
        let frame = frame(sizes, y, tag_width + TAG_GAP);
        let x = ruler(frame);
        let traces = lines::traces(lines, paints, Plane { frame, x: &x, y });
        (frame, x, traces)
    };

    grid(marks, frame, y);
    let plane = Plane { frame, x: &x, y };
    for tick in &x.ticks {
        let at = plane.across(tick.value);
        marks.push(Mark::stroke(vec![(at, frame.top), (at, frame.bottom)], Stroke::solid(GRID, 1.0)));
        marks.push(Mark::stroke(vec![(at, frame.bottom), (at, frame.bottom + 4.0)], Stroke::solid(RULE, 1.0)));
        let base = (at, frame.bottom + TICK_BASE);
        marks.push(Text::plain(base, Anchor::Middle, TICK_FACE, GREY, &tick.label));
    }
    rule_lines(marks, &panel.references, frame, y);
    floor(marks, frame, y);
    let mut obstacles = lines::draw(marks, &traces);
    if traces.iter().all(|trace| trace.end.is_none()) {
        no_data(marks, frame);
    }
    match inside {
        Some(areas) => {
            lines::draw_inside(marks, &traces, &areas);
            obstacles.areas.extend(areas.into_iter().flatten());
        }
        None => {
            let left = frame.right + TAG_GAP - 6.0;
            let tags = lines::tags(&traces, frame);
            labels::draw_tags(marks, tags, left, sizes.width * TAG_SHARE, frame.top - 8.0, frame.bottom + 8.0);
        }
    }
    let below = TICK_BASE + axis_label(marks, panel, frame, TICK_BASE);
    Body { frame, obstacles, below }
}

/// Draws the frame and the bars in it.
fn draw_bars(marks: &mut Vec<Mark>, panel: &Panel, bars: &Bars, paints: &Paints<'_>, sizes: Sizes, y: &Ruler) -> Body {
    let tag_width = labels::tag_width(tag_names(panel), sizes.width * TAG_SHARE);
    let frame = frame(sizes, y, if tag_width > 0.0 { tag_width + TAG_GAP } else { NARROW_MARGIN });
    grid(marks, frame, y);
    rule_lines(marks, &panel.references, frame, y);
    let drawn = bars::draw(marks, bars, paints, frame, y);
    floor(marks, frame, y);
    if drawn.obstacles.areas.is_empty() {
        no_data(marks, frame);
    }
    let left = frame.right + TAG_GAP - 6.0;
    labels::draw_tags(marks, drawn.tags, left, sizes.width * TAG_SHARE, frame.top - 8.0, frame.bottom + 8.0);
    let categories = bars::draw_categories(marks, bars, frame);
    let below = categories + axis_label(marks, panel, frame, categories);
    Body { frame, obstacles: drawn.obstacles, below }
}

/// Returns the names that stand right of the frame.
fn tag_names(panel: &Panel) -> impl Iterator<Item = &str> {
    let (lines, series): (&[Line], &[super::BarSeries]) = match &panel.content {
        Content::Lines(lines) => (lines, &[]),
        Content::Bars(bars) if bars.stacked => (&[], &bars.series),
        Content::Bars(_) => (&[], &[]),
    };
    lines.iter().map(|line| line.name.as_str()).chain(series.iter().map(|series| series.name.as_str()))
}

fn frame(sizes: Sizes, y: &Ruler, right_margin: f64) -> Area {
    let widths = y.ticks.iter().map(|tick| font::width(&tick.label, TICK_FACE));
    Area {
        left: widths.fold(0.0, f64::max).ceil() + TICK_GAP,
        top: sizes.header,
        right: (sizes.width - right_margin).floor(),
        bottom: sizes.header + sizes.plot,
    }
}

/// Writes the title at the top, and the label of the vertical axis and the key directly above the frame; returns their
/// area.
fn draw_heading(marks: &mut Vec<Mark>, panel: &Panel, paints: &Paints<'_>, sizes: Sizes) -> Area {
    let mut top = sizes.header - header_height(panel, sizes.width);
    if let Some(title) = &panel.title {
        top += block(marks, title, TITLE_FACE, INK, 0.0, sizes.width);
    }
    top += block(marks, &panel.y.label, LABEL_FACE, GREY, top, sizes.width);
    let label = font::wrap(&panel.y.label, LABEL_FACE, sizes.width);
    let mut right = label.iter().map(|line| font::width(line, LABEL_FACE)).fold(0.0, f64::max);
    if let Content::Bars(bars) = &panel.content {
        bars::draw_key(marks, bars, paints, top, sizes.width);
        if bars::key_height(bars, sizes.width) > 0.0 {
            right = sizes.width;
        }
    }
    Area { left: 0.0, top: 0.0, right, bottom: sizes.header - HEADER_GAP }
}

fn grid(marks: &mut Vec<Mark>, frame: Area, y: &Ruler) {
    for tick in &y.ticks {
        let Some(at) = height(frame, y, tick.value) else { continue };
        marks.push(Mark::stroke(vec![(frame.left, at), (frame.right, at)], Stroke::solid(GRID, 1.0)));
        let base = (frame.left - 7.0, at + TICK_FACE.middle_to_base());
        marks.push(Text::plain(base, Anchor::End, TICK_FACE, GREY, &tick.label));
    }
}

/// Draws the bottom of the frame, and the line of zero if it is higher.
fn floor(marks: &mut Vec<Mark>, frame: Area, y: &Ruler) {
    let zero = height(frame, y, 0.0).unwrap_or(frame.bottom);
    for at in [frame.bottom, zero.clamp(frame.top, frame.bottom)] {
        marks.push(Mark::stroke(vec![(frame.left, at), (frame.right, at)], Stroke::solid(RULE, 1.0)));
    }
}

fn rule_lines(marks: &mut Vec<Mark>, references: &[Reference], frame: Area, y: &Ruler) {
    for at in references.iter().filter_map(|reference| height(frame, y, reference.y)) {
        marks.push(Mark::stroke(vec![(frame.left, at), (frame.right, at)], Stroke::dashed(GREY, 1.2, 2.0, 3.0)));
    }
}

/// Writes each name on its reference line, at the place where it hides least.
fn rule_names(marks: &mut Vec<Mark>, references: &[Reference], frame: Area, y: &Ruler, mut obstacles: Obstacles) {
    for reference in references {
        let Some(at) = height(frame, y, reference.y) else { continue };
        let Some(name) = font::wrap(&reference.label, RULE_FACE, frame.width()).into_iter().next() else { continue };
        let (width, high) = (font::width(&name, RULE_FACE), RULE_FACE.size);
        let lefts = [frame.right - width - 4.0, frame.left + 6.0, f64::midpoint(frame.left, frame.right) - width / 2.0];
        let tops = [at - high - 3.0, at + 3.0];
        let places = tops.into_iter().flat_map(|top| lefts.map(|left| (left, top)));
        let areas = places.map(|(left, top)| Area { left, top, right: left + width, bottom: top + high });
        let inside = areas.filter(|area| area.bottom <= frame.bottom);
        let Some(area) = inside.min_by_key(|area| obstacles.hits(area.grown(1.0))) else { continue };
        obstacles.areas.push(area);
        let base = (area.left, area.bottom - 2.0);
        marks.push(Text::rimmed(base, Anchor::Start, RULE_FACE, GREY, &name));
    }
}

/// Returns the height of `value` in the frame, on the middle of a row of pixels; `None` outside of it.
fn height(frame: Area, y: &Ruler, value: f64) -> Option<f64> {
    let place = y.place(value).filter(|place| (-1e-6..=1.000_001).contains(place))?;
    Some((frame.bottom - place * frame.height()).round())
}

fn axis_label(marks: &mut Vec<Mark>, panel: &Panel, frame: Area, below: f64) -> f64 {
    let lines = font::wrap(&panel.x.label, LABEL_FACE, frame.width());
    for (index, line) in lines.iter().enumerate() {
        let base = frame.bottom + below + LABEL_GAP + (index + 1) as f64 * LABEL_FACE.leading();
        let middle = f64::midpoint(frame.left, frame.right);
        marks.push(Text::plain((middle, base), Anchor::Middle, LABEL_FACE, GREY, line));
    }
    if lines.is_empty() { 4.0 } else { LABEL_GAP + lines.len() as f64 * LABEL_FACE.leading() + 4.0 }
}

fn no_data(marks: &mut Vec<Mark>, frame: Area) {
    let middle = (f64::midpoint(frame.left, frame.right), f64::midpoint(frame.top, frame.bottom));
    marks.push(Text::rimmed(middle, Anchor::Middle, LABEL_FACE, GREY, "no data"));
}

fn block(
    marks: &mut Vec<Mark>,
    text: &str,
    face: TypeFace,
    colour: super::colour::Colour,
    top: f64,
    width: f64,
) -> f64 {
    for (index, line) in font::wrap(text, face, width).iter().enumerate() {
        let base = top + index as f64 * face.leading() + face.size;
        marks.push(Text::plain((0.0, base), Anchor::Start, face, colour, line));
    }
    block_height(text, face, width)
}

fn block_height(text: &str, face: TypeFace, width: f64) -> f64 {
    font::wrap(text, face, width).len() as f64 * face.leading()
}

const TITLE_FACE: TypeFace = TypeFace::bold(13.5);
const LABEL_FACE: TypeFace = TypeFace::regular(11.5);
const RULE_FACE: TypeFace = TypeFace::regular(10.5);
const NOTE_FACE: TypeFace = TypeFace::regular(10.5);

const HEADER_GAP: f64 = 9.0;
const NOTE_GAP: f64 = 5.0;
/// Distance from the frame to the base line of the numbers under it.
const TICK_BASE: f64 = 17.0;
const TICK_GAP: f64 = 9.0;
const LABEL_GAP: f64 = 3.0;
/// Distance from the frame to the names right of it, with a margin for wider fonts.
const TAG_GAP: f64 = 14.0;
/// Margin for half of the last number under the frame.
const NARROW_MARGIN: f64 = 14.0;
/// Limit of the names' share of the width of a panel.
const TAG_SHARE: f64 = 0.27;
