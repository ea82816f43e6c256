//! Series of points as strokes.

use super::axis::Ruler;
use super::colour::{Marker, Paint, Paints, WHITE};
use super::font;
use super::labels::{Obstacles, TAG_FACE, Tag};
use super::scene::{Anchor, Area, Mark, Point, Stroke, Text};
use super::{Line, LineStyle};

/// Maps data to points in the frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plane<'a> {
    pub(super) frame: Area,
    pub(super) x: &'a Ruler,
    pub(super) y: &'a Ruler,
}

impl Plane<'_> {
    /// Returns the position of a tick of the horizontal axis, on the middle of a column of pixels.
    pub(super) fn across(&self, value: f64) -> f64 {
        self.x.place(value).map_or(self.frame.left, |place| self.column(place)).round()
    }

    fn place(&self, (x, y): (f64, f64)) -> Option<Point> {
        let (x, y) = (self.x.place(x)?, self.y.place(y)?);
        Some((self.column(x), self.frame.bottom - y * self.frame.height()))
    }

    fn column(&self, place: f64) -> f64 {
        self.frame.left + SIDE_MARGIN + place * (self.frame.width() - 2.0 * SIDE_MARGIN)
    }
}

/// A line in the frame.
#[derive(Debug)]
pub(super) struct DrawnLine<'a> {
    line: &'a Line,
    paint: Paint,
    /// The points inside the frame.
    points: Vec<Point>,
    /// The joined points inside the frame, without points that make no visible difference.
    runs: Vec<Vec<Point>>,
    /// The end of the line; `None` if no part is visible.
    pub(super) end: Option<Point>,
}

pub(super) fn traces<'a>(lines: &'a [Line], paints: &Paints<'_>, plane: Plane<'_>) -> Vec<DrawnLine<'a>> {
    lines.iter().map(|line| trace(line, paints.paint(&line.name), plane)).collect()
}

/// Draws the lines, the first one last so that it lies above the others.
pub(super) fn draw(marks: &mut Vec<Mark>, traces: &[DrawnLine<'_>]) -> Obstacles {
    for trace in traces.iter().rev() {
        let colour = trace.paint.colour;
        let stroke = match trace.line.style {
            LineStyle::Dashed => Stroke::dashed(colour, 1.8, 6.0, 4.0),
            LineStyle::Markers | LineStyle::Plain | LineStyle::Step => Stroke::solid(colour, 2.0),
        };
        marks.extend(trace.runs.iter().map(|run| Mark::stroke(run.clone(), stroke)));
        let bounds = trace.points.iter().fold(None, |bounds: Option<(Point, Point)>, point| match bounds {
            None => Some((*point, *point)),
            Some((least, most)) => {
                Some(((least.0.min(point.0), least.1.min(point.1)), (most.0.max(point.0), most.1.max(point.1))))
            }
        });
        let dot = bounds.is_some_and(|(least, most)| most.0 - least.0 < 1.0 && most.1 - least.1 < 1.0);
        if dot {
            marks.push(marker(trace.points[0], trace.paint));
        } else if trace.line.style == LineStyle::Markers && trace.points.len() <= MARKERS_MAX {
            marks.extend(trace.points.iter().map(|point| marker(*point, trace.paint)));
        }
    }
    obstacles(traces)
}

/// Returns the names right of the frame.
pub(super) fn tags(traces: &[DrawnLine<'_>], frame: Area) -> Vec<Tag> {
    let ended: Vec<(&DrawnLine<'_>, Point)> =
        traces.iter().filter_map(|trace| trace.end.map(|end| (trace, end))).collect();
    let ends: Vec<Point> = ended.iter().map(|(_, end)| *end).collect();
    // Leaders of lines that end at one height would overlap: there only colours identify the lines.
    let hidden = |end: Point| level_elsewhere(end, &ends);
    let tag = |(trace, end): &(&DrawnLine<'_>, Point)| Tag {
        name: trace.line.name.clone(),
        colour: trace.paint.colour,
        end: *end,
        reach: if hidden(*end) { f64::INFINITY } else { 6.0 },
        tie: mean_height(trace, frame),
    };
    ended.iter().map(tag).collect()
}

/// Returns an area inside the frame for each name, if most lines end at one height in different places, as
/// distributions do: right of the frame a reader could not match names and lines. `rules` are the heights of the
/// reference lines.
pub(super) fn names_inside(traces: &[DrawnLine<'_>], frame: Area, rules: &[f64]) -> Option<Vec<Option<Area>>> {
    let ends: Vec<Point> = traces.iter().filter_map(|trace| trace.end).collect();
    let tied = ends.iter().filter(|end| level_elsewhere(**end, &ends)).count();
    if tied * 2 <= ends.len() {
        return None;
    }
    let mut obstacles = obstacles(traces);
    obstacles.segments.extend(rules.iter().map(|at| ((frame.left, *at), (frame.right, *at))));
    let mut areas = Vec::new();
    for trace in traces {
        let width = font::width(&trace.line.name, TAG_FACE);
        if trace.end.is_none() || width == 0.0 {
            areas.push(None);
            continue;
        }
        let size = (width, TAG_FACE.size);
        let inner = Area { right: frame.right - SIDE_MARGIN, ..frame };
        let longest = trace.runs.iter().max_by_key(|run| run.len())?;
        let area = obstacles.beside(longest, size, inner)?;
        obstacles.areas.push(area.grown(NAME_GAP));
        areas.push(Some(area));
    }
    Some(areas)
}

pub(super) fn draw_inside(marks: &mut Vec<Mark>, traces: &[DrawnLine<'_>], areas: &[Option<Area>]) {
    for (trace, area) in traces.iter().zip(areas) {
        let Some(area) = area else { continue };
        let base = f64::midpoint(area.top, area.bottom) + TAG_FACE.middle_to_base();
        let middle = f64::midpoint(area.left, area.right);
        let colour = trace.paint.colour.for_text();
        marks.push(Text::rimmed((middle, base), Anchor::Middle, TAG_FACE, colour, &trace.line.name));
    }
}

/// Returns whether another line ends at the same height, but in another place.
fn level_elsewhere(end: Point, ends: &[Point]) -> bool {
    ends.iter().any(|other| (other.1 - end.1).abs() < 6.0 && (other.0 - end.0).abs() > 20.0)
}

fn trace<'a>(line: &'a Line, paint: Paint, plane: Plane<'_>) -> DrawnLine<'a> {
    let placed: Vec<Point> = line.points.iter().filter_map(|point| plane.place(*point)).collect();
    let joined = if line.style == LineStyle::Step { steps(&placed) } else { placed.clone() };
    let runs: Vec<Vec<Point>> =
        clipped(&joined, plane.frame).into_iter().map(|run| simplified(&thinned(run), TOLERANCE)).collect();
    let points: Vec<Point> = placed.into_iter().filter(|point| plane.frame.grown(0.5).holds(*point)).collect();
    let end = runs.last().and_then(|run| run.last()).or(points.last()).copied();
    DrawnLine { line, paint, points, runs, end }
}

fn steps(points: &[Point]) -> Vec<Point> {
    let corners = points.windows(2).flat_map(|pair| [pair[0], (pair[1].0, pair[0].1)]);
    corners.chain(points.last().copied()).collect()
}

/// Clips a line to the frame, which may leave several pieces.
fn clipped(points: &[Point], frame: Area) -> Vec<Vec<Point>> {
    let mut runs: Vec<Vec<Point>> = Vec::new();
    for pair in points.windows(2) {
        let Some((from, to)) = frame.clip(pair[0], pair[1]) else { continue };
        match runs.last_mut() {
            Some(run) if run.last() == Some(&from) => run.push(to),
            _ => runs.push(vec![from, to]),
        }
    }
    runs
}

/// Keeps the first, the lowest, the highest and the last of successive points in one column of pixels.
fn thinned(points: Vec<Point>) -> Vec<Point> {
    let mut kept = Vec::new();
    for column in points.chunk_by(|a, b| a.0.floor() == b.0.floor()) {
        let by_height = |a: &&Point, b: &&Point| a.1.total_cmp(&b.1);
        let index_of = |wanted: Option<&Point>| {
            wanted.and_then(|wanted| column.iter().position(|point| point == wanted)).unwrap_or(0)
        };
        let lowest = index_of(column.iter().min_by(by_height));
        let highest = index_of(column.iter().max_by(by_height));
        let mut indices = [0, lowest.min(highest), lowest.max(highest), column.len() - 1].to_vec();
        indices.dedup();
        kept.extend(indices.into_iter().map(|index| column[index]));
    }
    kept
}

/// Drops points that lie within `tolerance` of the line without them (Ramer, Douglas and Peucker).
fn simplified(points: &[Point], tolerance: f64) -> Vec<Point> {
    let mut keep = vec![false; points.len()];
    let mut open = vec![(0, points.len().saturating_sub(1))];
    while let Some((first, last)) = open.pop() {
        for end in [first, last] {
            if let Some(kept) = keep.get_mut(end) {
                *kept = true;
            }
        }
        let inner = (first + 1..last).map(|index| (index, distance(points[index], points[first], points[last])));
        let farthest = inner.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, distance)| *distance > tolerance);
        open.extend(farthest.into_iter().flat_map(|(index, _)| [(first, index), (index, last)]));
    }
    points.iter().zip(keep).filter_map(|(point, kept)| kept.then_some(*point)).collect()
}

/// Returns the distance from `point` to the segment.
fn distance(point: Point, from: Point, to: Point) -> f64 {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let length_squared = dx * dx + dy * dy;
    let along = if length_squared > 0.0 {
        (((point.0 - from.0) * dx + (point.1 - from.1) * dy) / length_squared).clamp(0.0, 1.0)
    } else {
        0.0
    };
    (point.0 - from.0 - along * dx).hypot(point.1 - from.1 - along * dy)
}

fn obstacles(traces: &[DrawnLine<'_>]) -> Obstacles {
    let runs = traces.iter().flat_map(|trace| &trace.runs);
    let segments = runs.flat_map(|run| run.windows(2).map(|pair| (pair[0], pair[1]))).collect();
    Obstacles { segments, areas: Vec::new() }
}

/// Returns the mean height over the whole width of the frame, with level continuations at both ends of the line.
fn mean_height(trace: &DrawnLine<'_>, frame: Area) -> f64 {
    let Some((&first, &last)) = trace.points.first().zip(trace.points.last()) else { return 0.0 };
    let level = (first.0 - frame.left) * first.1 + (frame.right - last.0) * last.1;
    let pairs = trace.points.windows(2);
    let slope: f64 = pairs.map(|pair| (pair[1].0 - pair[0].0) * f64::midpoint(pair[0].1, pair[1].1)).sum();
    (level + slope) / frame.width()
}

fn marker(at: Point, paint: Paint) -> Mark {
    let edge = Some(Stroke::solid(WHITE, 1.2));
    let corners = |offsets: &[Point]| offsets.iter().map(|(dx, dy)| (at.0 + dx, at.1 + dy)).collect();
    match paint.marker {
        Marker::Circle => Mark::Circle { centre: at, radius: 4.2, fill: paint.colour, edge },
        Marker::Square => {
            Mark::fill(corners(&[(-3.8, -3.8), (3.8, -3.8), (3.8, 3.8), (-3.8, 3.8)]), paint.colour, edge)
        }
        Marker::Triangle => Mark::fill(corners(&[(0.0, -5.2), (4.9, 3.6), (-4.9, 3.6)]), paint.colour, edge),
        Marker::Diamond => Mark::fill(corners(&[(0.0, -5.4), (5.0, 0.0), (0.0, 5.4), (-5.0, 0.0)]), paint.colour, edge),
    }
}

/// Gap between the sides of the frame and the first and last values.
const SIDE_MARGIN: f64 = 10.0;
/// Gap between names inside the frame.
const NAME_GAP: f64 = 5.0;
const MARKERS_MAX: usize = 64;
/// Largest distance that a line moves when points are dropped.
const TOLERANCE: f64 = 0.1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_points_keeps_corners_and_peaks() {
        let straight: Vec<Point> = (0..100).map(|x| (f64::from(x), 5.0)).collect();
        assert_eq!(simplified(&straight, 0.1), [(0.0, 5.0), (99.0, 5.0)]);
        let mut peak = straight;
        peak[40].1 = 50.0;
        assert!(simplified(&thinned(peak), 0.1).contains(&(40.0, 50.0)));
        assert_eq!(simplified(&[], 0.1), []);
    }

    #[test]
    fn a_column_keeps_its_extremes_in_order() {
        let column = vec![(1.0, 3.0), (1.1, 9.0), (1.2, 4.0), (1.3, 0.0), (1.4, 5.0)];
        assert_eq!(thinned(column), [(1.0, 3.0), (1.1, 9.0), (1.3, 0.0), (1.4, 5.0)]);
    }

    #[test]
    fn a_line_that_leaves_the_frame_comes_back_as_another_piece() {
        let frame = Area { left: 0.0, top: 0.0, right: 10.0, bottom: 10.0 };
        let runs = clipped(&[(1.0, 5.0), (3.0, 15.0), (5.0, 5.0), (6.0, 5.0)], frame);
        assert_eq!(runs, [vec![(1.0, 5.0), (2.0, 10.0)], vec![(4.0, 10.0), (5.0, 5.0), (6.0, 5.0)]]);
    }

    #[test]
    fn steps_hold_a_value_until_the_next() {
        assert_eq!(steps(&[(0.0, 1.0), (2.0, 3.0)]), [(0.0, 1.0), (2.0, 1.0), (2.0, 3.0)]);
        assert_eq!(steps(&[]), []);
    }
}
