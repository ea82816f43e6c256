//! The list of shapes that the layout makes and the two writers draw.

use super::colour::Colour;

/// Horizontal and vertical distance from the upper left corner, in units: the figure is 800 units wide.
pub(super) type Point = (f64, f64);

/// A laid-out figure: shapes from back to front on a white page.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) marks: Vec<Mark>,
}

#[derive(Debug)]
pub(super) enum Mark {
    Path(Path),
    Circle { centre: Point, radius: f64, fill: Colour, edge: Option<Stroke> },
    Text(Text),
}

impl Mark {
    pub(super) fn fill(points: Vec<Point>, fill: Colour, edge: Option<Stroke>) -> Self {
        Self::Path(Path { points, fill: Some(fill), stroke: edge })
    }

    pub(super) fn stroke(points: Vec<Point>, stroke: Stroke) -> Self {
        Self::Path(Path { points, fill: None, stroke: Some(stroke) })
    }

    pub(super) fn area(area: Area, fill: Colour) -> Self {
        let Area { left, top, right, bottom } = area;
        Self::fill(vec![(left, top), (right, top), (right, bottom), (left, bottom)], fill, None)
    }

    pub(super) fn shifted(mut self, dx: f64, dy: f64) -> Self {
        let shift = |point: &mut Point| *point = (point.0 + dx, point.1 + dy);
        match &mut self {
            Self::Path(path) => path.points.iter_mut().for_each(shift),
            Self::Circle { centre, .. } => shift(centre),
            Self::Text(text) => shift(&mut text.at),
        }
        self
    }
}

/// Joined points; closed when filled.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) points: Vec<Point>,
    pub(super) fill: Option<Colour>,
    pub(super) stroke: Option<Stroke>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Stroke {
    pub(super) colour: Colour,
    pub(super) width: f64,
    /// The lengths of a dash and of the gap after it.
    pub(super) dash: Option<(f64, f64)>,
}

impl Stroke {
    pub(super) const fn solid(colour: Colour, width: f64) -> Self {
        Self { colour, width, dash: None }
    }

    pub(super) const fn dashed(colour: Colour, width: f64, dash: f64, gap: f64) -> Self {
        Self { colour, width, dash: Some((dash, gap)) }
    }
}

/// One line of text.
#[derive(Debug)]
pub(super) struct Text {
    /// The left end, middle or right end of the base line.
    pub(super) at: Point,
    pub(super) anchor: Anchor,
    pub(super) type_face: TypeFace,
    pub(super) colour: Colour,
    /// Whether a white rim separates the text from the shapes behind it.
    pub(super) rim: bool,
    pub(super) content: String,
}

impl Text {
    pub(super) fn plain(at: Point, anchor: Anchor, type_face: TypeFace, colour: Colour, content: &str) -> Mark {
        Mark::Text(Self { at, anchor, type_face, colour, rim: false, content: content.to_owned() })
    }

    pub(super) fn rimmed(at: Point, anchor: Anchor, type_face: TypeFace, colour: Colour, content: &str) -> Mark {
        Mark::Text(Self { at, anchor, type_face, colour, rim: true, content: content.to_owned() })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TypeFace {
    pub(super) size: f64,
    pub(super) bold: bool,
}

impl TypeFace {
    pub(super) const fn regular(size: f64) -> Self {
        Self { size, bold: false }
    }

    pub(super) const fn bold(size: f64) -> Self {
        Self { size, bold: true }
    }

    /// Returns the distance from one base line to the next.
    pub(super) fn leading(self) -> f64 {
        self.size * 1.3
    }

    /// Returns the distance from the middle of a capital letter down to the base line.
    pub(super) fn middle_to_base(self) -> f64 {
        self.size * 0.357
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Area {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

impl Area {
    pub(super) fn around(centre: Point, width: f64, height: f64) -> Self {
        let (half_width, half_height) = (width / 2.0, height / 2.0);
        Self {
            left: centre.0 - half_width,
            top: centre.1 - half_height,
            right: centre.0 + half_width,
            bottom: centre.1 + half_height,
        }
    }

    pub(super) fn grown(self, by: f64) -> Self {
        Self { left: self.left - by, top: self.top - by, right: self.right + by, bottom: self.bottom + by }
    }

    pub(super) fn width(self) -> f64 {
        self.right - self.left
    }

    pub(super) fn height(self) -> f64 {
        self.bottom - self.top
    }

    pub(super) fn holds(self, point: Point) -> bool {
        (self.left..=self.right).contains(&point.0) && (self.top..=self.bottom).contains(&point.1)
    }

    pub(super) fn encloses(self, other: Self) -> bool {
        self.holds((other.left, other.top)) && self.holds((other.right, other.bottom))
    }

    pub(super) fn overlaps(self, other: Self) -> bool {
        self.left < other.right && other.left < self.right && self.top < other.bottom && other.top < self.bottom
    }

    /// Returns the part of the segment inside the area (Liang–Barsky).
    pub(super) fn clip(self, from: Point, to: Point) -> Option<(Point, Point)> {
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let (mut enter, mut leave) = (0.0_f64, 1.0_f64);
        let edges = [
            (-dx, from.0 - self.left),
            (dx, self.right - from.0),
            (-dy, from.1 - self.top),
            (dy, self.bottom - from.1),
        ];
        for (towards, distance) in edges {
            if towards == 0.0 {
                if distance < 0.0 {
                    return None;
                }
            } else if towards < 0.0 {
                enter = enter.max(distance / towards);
            } else {
                leave = leave.min(distance / towards);
            }
        }
        let along = |t: f64| (from.0 + t * dx, from.1 + t * dy);
        let end = if leave >= 1.0 { to } else { along(leave) };
        (enter <= leave).then(|| (if enter <= 0.0 { from } else { along(enter) }, end))
    }
}
