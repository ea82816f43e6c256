//! Positions of names that neither overlap each other nor hide data.

use super::colour::{Colour, WHITE};
use super::font;
use super::scene::{Anchor, Area, Mark, Point, Stroke, Text, TypeFace};

/// A name right of the data.
#[derive(Debug)]
pub(super) struct Tag {
    pub(super) name: String,
    pub(super) colour: Colour,
    /// The end of the series.
    pub(super) end: Point,
    /// Distance that the name may move up or down without a leader to its series; infinite for never a leader.
    pub(super) reach: f64,
    /// Orders names whose series end at one height: smaller values stand higher.
    pub(super) tie: f64,
}

/// Returns the width of `names` broken into lines of at most `width_max`.
pub(super) fn tag_width<'a>(names: impl Iterator<Item = &'a str>, width_max: f64) -> f64 {
    let lines = names.flat_map(|name| font::wrap(name, TAG_FACE, width_max));
    lines.map(|line| font::width(&line, TAG_FACE)).fold(0.0, f64::max)
}

/// Returns the height of `names` one under the other.
pub(super) fn tag_height<'a>(names: impl Iterator<Item = &'a str>, width_max: f64) -> f64 {
    names.map(|name| height(&font::wrap(name, TAG_FACE, width_max))).sum()
}

/// Draws names in a column from `left`, each as near as possible to the end of its series.
pub(super) fn draw_tags(marks: &mut Vec<Mark>, mut tags: Vec<Tag>, left: f64, width_max: f64, top: f64, bottom: f64) {
    tags.sort_by(|a, b| a.end.1.round().total_cmp(&b.end.1.round()).then(a.tie.total_cmp(&b.tie)));
    let lines: Vec<Vec<String>> = tags.iter().map(|tag| font::wrap(&tag.name, TAG_FACE, width_max)).collect();
    let wanted: Vec<(f64, f64)> = tags.iter().zip(&lines).map(|(tag, lines)| (tag.end.1, height(lines))).collect();
    for ((tag, lines), middle) in tags.iter().zip(&lines).zip(spread(&wanted, top, bottom)) {
        if lines.is_empty() {
            continue;
        }
        let far = left - tag.end.0 > 40.0;
        if tag.reach.is_finite() && (far || (middle - tag.end.1).abs() > tag.reach) {
            let knee = (left - 16.0).max(tag.end.0);
            let start = (tag.end.0 + 5.0).min(knee);
            let points = vec![(start, tag.end.1), (knee, tag.end.1), (left - 3.0, middle)];
            // A long leader must not look like a part of the line.
            let dots = far.then_some((1.0, 3.0));
            marks.push(Mark::stroke(points, Stroke { colour: tag.colour.mixed(WHITE, 40), width: 1.0, dash: dots }));
        }
        let first = middle - height(lines) / 2.0 + LINE_GAP / 2.0 + TAG_FACE.leading() / 2.0;
        for (index, line) in lines.iter().enumerate() {
            let base = first + index as f64 * TAG_FACE.leading() + TAG_FACE.middle_to_base();
            marks.push(Text::rimmed((left, base), Anchor::Start, TAG_FACE, tag.colour.for_text(), line));
        }
    }
}

/// Moves intervals of one line apart, with the least sum of squared moves that keeps their order.
///
/// Takes the wanted middle and the height of each, ordered by the wanted middle; returns the middles. All intervals
/// stay in `top..bottom`, unless they are higher together: then they continue below it.
pub(super) fn spread(wanted: &[(f64, f64)], top: f64, bottom: f64) -> Vec<f64> {
    // Without the heights above it, each interval must be at least as low as the one before. This is isotonic
    // regression: neighbours in the wrong order are pooled at their mean.
    let mut pools: Vec<(f64, usize)> = Vec::new();
    let mut above = 0.0;
    for &(middle, height) in wanted {
        let (mut sum, mut count) = (middle - above - height / 2.0, 1);
        while let Some(&(sum_before, count_before)) = pools.last() {
            if sum_before * (count as f64) <= sum * (count_before as f64) {
                break;
            }
            pools.pop();
            (sum, count) = (sum + sum_before, count + count_before);
        }
        pools.push((sum, count));
        above += height;
    }
    let lowest = bottom - above;
    let starts = pools.into_iter().flat_map(|(sum, count)| std::iter::repeat_n(sum / count as f64, count));
    let mut above = 0.0;
    let placed = wanted.iter().zip(starts).map(|(&(_, height), start)| {
        let middle = start.min(lowest).max(top) + above + height / 2.0;
        above += height;
        middle
    });
    placed.collect()
}

/// The lines and areas that a name must not hide.
#[derive(Debug, Default)]
pub(super) struct Obstacles {
    pub(super) segments: Vec<(Point, Point)>,
    pub(super) areas: Vec<Area>,
}

impl Obstacles {
    pub(super) fn hits(&self, area: Area) -> usize {
        let segments = self.segments.iter().filter(|(from, to)| area.clip(*from, *to).is_some()).count();
        segments + self.areas.iter().filter(|other| other.overlaps(area)).count()
    }

    /// Returns an area for a name of this size beside `path`, inside `frame`, that hides nothing; middle heights come
    /// first.
    pub(super) fn beside(&self, path: &[Point], (width, height): (f64, f64), frame: Area) -> Option<Area> {
        let middle = f64::midpoint(frame.top, frame.bottom);
        let mut best: Option<(f64, Area)> = None;
        let points = path.windows(2).flat_map(|pair| walked(pair[0], pair[1]));
        // The flatter the line, the farther the name stays from its point.
        for (point, gap) in points.flat_map(|point| BESIDE_GAPS.map(|gap| (point, gap))) {
            for (side_cost, (dx, dy)) in
                [(0.0, (1.0, 0.0)), (30.0, (-1.0, 0.0)), (60.0, (0.0, -1.0)), (60.0, (0.0, 1.0))]
            {
                let centre = (point.0 + dx * (width / 2.0 + gap), point.1 + dy * (height / 2.0 + gap));
                let area = Area::around(centre, width, height);
                let cost = side_cost + 2.0 * gap + (centre.1 - middle).abs();
                let better = best.is_none_or(|(least, _)| cost < least);
                // No other line may run between the name and its own line.
                let between = (f64::midpoint(STROKE, gap), (gap - STROKE).max(1.0));
                let gate = (point.0 + dx * between.0, point.1 + dy * between.0);
                let gate = Area::around(gate, 1.0 + dx.abs() * between.1, 1.0 + dy.abs() * between.1);
                let free = |area: Area| self.hits(area) == 0;
                if better && frame.encloses(area) && free(area.grown(CLEARANCE)) && free(gate) {
                    best = Some((cost, area));
                }
            }
        }
        best.map(|(_, area)| area)
    }
}

/// Returns points a few units apart on a segment.
fn walked(from: Point, to: Point) -> impl Iterator<Item = Point> {
    let length = (to.0 - from.0).hypot(to.1 - from.1);
    let count = (1..200_u32).find(|count| f64::from(*count) * 5.0 >= length).unwrap_or(200);
    (0..=count).map(move |index| {
        let along = f64::from(index) / f64::from(count);
        (from.0 + along * (to.0 - from.0), from.1 + along * (to.1 - from.1))
    })
}

fn height(lines: &[String]) -> f64 {
    if lines.is_empty() { 0.0 } else { lines.len() as f64 * TAG_FACE.leading() + LINE_GAP }
}

pub(super) const TAG_FACE: TypeFace = TypeFace::bold(11.5);

/// Gap between the last line of a name and the first line of the next, beyond the leading.
const LINE_GAP: f64 = 2.0;

/// Gap between a name inside the frame and a point of its line.
const BESIDE_GAPS: [f64; 4] = [6.0, 10.0, 15.0, 22.0];

/// Distance from a point within which its line lies, for every slope.
const STROKE: f64 = 2.5;

/// Gap between a name inside the frame and the nearest obstacle.
const CLEARANCE: f64 = 3.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_apart(wanted: &[(f64, f64)], placed: &[f64]) {
        for index in 1..wanted.len() {
            let gap = placed[index] - placed[index - 1] - (wanted[index].1 + wanted[index - 1].1) / 2.0;
            assert!(gap > -1e-9, "{index}: {placed:?}");
        }
    }

    #[test]
    fn names_with_room_stay_where_they_are_wanted() {
        assert_eq!(spread(&[(20.0, 10.0), (40.0, 10.0), (90.0, 10.0)], 0.0, 100.0), [20.0, 40.0, 90.0]);
        assert_eq!(spread(&[], 0.0, 100.0), [0.0; 0]);
    }

    #[test]
    fn names_at_one_height_share_the_move() {
        assert_eq!(spread(&[(50.0, 10.0), (50.0, 10.0)], 0.0, 100.0), [45.0, 55.0]);
        assert_eq!(spread(&[(50.0, 10.0), (50.0, 20.0), (50.0, 10.0)], 0.0, 100.0), [35.0, 50.0, 65.0]);
    }

    #[test]
    fn names_stay_inside_while_they_fit() {
        assert_eq!(spread(&[(0.0, 10.0), (1.0, 10.0)], 0.0, 100.0), [5.0, 15.0]);
        assert_eq!(spread(&[(99.0, 10.0), (100.0, 10.0)], 0.0, 100.0), [85.0, 95.0]);
        assert_eq!(spread(&[(9.0, 60.0), (9.0, 60.0)], 0.0, 100.0), [30.0, 90.0]);
    }

    #[test]
    fn names_never_meet() {
        let mut state = 1_u64;
        let mut draw = |below: f64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            f64::from(u32::try_from(state >> 32).expect("32 bits are left")) / f64::from(u32::MAX) * below
        };
        for count in 0..40 {
            let mut wanted: Vec<(f64, f64)> = (0..count).map(|_| (draw(300.0), 5.0 + draw(30.0))).collect();
            wanted.sort_by(|a, b| a.0.total_cmp(&b.0));
            let placed = spread(&wanted, 0.0, 300.0);
            assert_eq!(placed.len(), wanted.len());
            assert_apart(&wanted, &placed);
            let total: f64 = wanted.iter().map(|(_, height)| height).sum();
            if let (Some(last), Some((_, height))) = (placed.last(), wanted.last()) {
                assert!(placed[0] - wanted[0].1 / 2.0 >= -1e-9);
                assert!(total > 300.0 || last + height / 2.0 <= 300.0 + 1e-9);
            }
        }
    }

    #[test]
    fn a_name_beside_a_line_hides_no_line() {
        let frame = Area { left: 0.0, top: 0.0, right: 200.0, bottom: 100.0 };
        let path = [(10.0, 100.0), (60.0, 0.0)];
        let obstacles = Obstacles { segments: vec![(path[0], path[1]), ((100.0, 100.0), (100.0, 0.0))], areas: vec![] };
        let area = obstacles.beside(&path, (30.0, 12.0), frame).expect("there is room");
        assert_eq!(obstacles.hits(area), 0);
        assert!(frame.encloses(area));
        assert_eq!(obstacles.beside(&path, (300.0, 12.0), frame), None);
    }
}
