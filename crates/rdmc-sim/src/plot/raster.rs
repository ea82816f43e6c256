//! A scene as PNG bytes.

use png::{BitDepth, ColorType, Compression, Encoder};
use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, Path as Outline, PathBuilder, Pixmap, Stroke as Pen, StrokeDash,
    Transform,
};
use ttf_parser::OutlineBuilder;

use super::PlotError;
use super::colour::{Colour, WHITE};
use super::font;
use super::scene::{Anchor, Mark, Point, Scene, Stroke, Text};
use super::svg::RIM;

pub(super) fn encode(scene: &Scene) -> Result<Vec<u8>, PlotError> {
    let (width, height) = (pixels(scene.width), pixels(scene.height));
    let blank = Pixmap::new(width, height).filter(|_| height <= HEIGHT_MAX);
    let mut page = blank.ok_or(PlotError::TooHigh { got: height, want: HEIGHT_MAX })?;
    page.fill(Color::WHITE);
    for mark in &scene.marks {
        paint(&mut page, mark);
    }
    // The page is opaque: the fourth byte of each pixel is constant.
    let rgb: Vec<u8> = page.data().chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect();
    let mut file = Vec::new();
    let mut encoder = Encoder::new(&mut file, width, height);
    encoder.set_color(ColorType::Rgb);
    encoder.set_depth(BitDepth::Eight);
    encoder.set_compression(Compression::High);
    let mut writer = encoder.write_header().map_err(PlotError::Encode)?;
    writer.write_image_data(&rgb).map_err(PlotError::Encode)?;
    writer.finish().map_err(PlotError::Encode)?;
    Ok(file)
}

fn paint(page: &mut Pixmap, mark: &Mark) {
    match mark {
        Mark::Path(path) => {
            let Some(outline) = polygon(&path.points, path.fill.is_some()) else { return };
            if let Some(fill) = path.fill {
                fill_outline(page, &outline, fill);
            }
            if let Some(stroke) = path.stroke {
                stroke_outline(page, &outline, stroke);
            }
        }
        Mark::Circle { centre, radius, fill, edge } => {
            let Some(outline) = PathBuilder::from_circle(narrow(centre.0), narrow(centre.1), narrow(*radius)) else {
                return;
            };
            fill_outline(page, &outline, *fill);
            if let Some(stroke) = edge {
                stroke_outline(page, &outline, *stroke);
            }
        }
        Mark::Text(text) => {
            let Some(outline) = letters(text) else { return };
            if text.rim {
                stroke_outline(page, &outline, Stroke::solid(WHITE, RIM));
            }
            fill_outline(page, &outline, text.colour);
        }
    }
}

fn fill_outline(page: &mut Pixmap, outline: &Outline, colour: Colour) {
    page.fill_path(outline, &ink(colour), FillRule::Winding, scaled(), None);
}

fn stroke_outline(page: &mut Pixmap, outline: &Outline, stroke: Stroke) {
    let dash = stroke.dash.and_then(|(dash, gap)| StrokeDash::new(vec![narrow(dash), narrow(gap)], 0.0));
    let pen = Pen {
        width: narrow(stroke.width),
        line_join: LineJoin::Round,
        line_cap: LineCap::Butt,
        dash,
        ..Pen::default()
    };
    page.stroke_path(outline, &ink(stroke.colour), &pen, scaled(), None);
}

fn polygon(points: &[Point], closed: bool) -> Option<Outline> {
    let mut builder = PathBuilder::new();
    for (index, (x, y)) in points.iter().enumerate() {
        if index == 0 {
            builder.move_to(narrow(*x), narrow(*y));
        } else {
            builder.line_to(narrow(*x), narrow(*y));
        }
    }
    if closed {
        builder.close();
    }
    builder.finish()
}

fn letters(text: &Text) -> Option<Outline> {
    let width = font::width(&text.content, text.type_face);
    let left = match text.anchor {
        Anchor::Start => text.at.0,
        Anchor::Middle => text.at.0 - width / 2.0,
        Anchor::End => text.at.0 - width,
    };
    let unit = narrow(font::unit(text.type_face));
    let mut builder = PathBuilder::new();
    font::outline(&text.content, text.type_face, |pen, draw| {
        draw(&mut Glyph { builder: &mut builder, left: narrow(left + pen), base: narrow(text.at.1), unit });
    });
    builder.finish()
}

/// Places the outline of one glyph on the page: heights in the font count upwards, on the page downwards.
struct Glyph<'a> {
    builder: &'a mut PathBuilder,
    left: f32,
    base: f32,
    unit: f32,
}

impl Glyph<'_> {
    fn place(&self, x: f32, y: f32) -> (f32, f32) {
        (self.left + x * self.unit, self.base - y * self.unit)
    }
}

impl OutlineBuilder for Glyph<'_> {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.place(x, y);
        self.builder.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.place(x, y);
        self.builder.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.place(x1, y1), self.place(x, y));
        self.builder.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ((x1, y1), (x2, y2), (x, y)) = (self.place(x1, y1), self.place(x2, y2), self.place(x, y));
        self.builder.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.builder.close();
    }
}

fn ink(colour: Colour) -> Paint<'static> {
    let mut paint = Paint::default();
    paint.set_color_rgba8(colour.0, colour.1, colour.2, 255);
    paint
}

fn scaled() -> Transform {
    Transform::from_scale(narrow(PIXELS_PER_UNIT), narrow(PIXELS_PER_UNIT))
}

#[expect(clippy::cast_possible_truncation, reason = "half a thousandth of a pixel does not show")]
fn narrow(value: f64) -> f32 {
    value as f32
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a length; beyond u32 it saturates")]
fn pixels(length: f64) -> u32 {
    (length * PIXELS_PER_UNIT).ceil() as u32
}

const PIXELS_PER_UNIT: f64 = 2.0;

/// A page of this height takes 200 MB while it is painted.
const HEIGHT_MAX: u32 = 32_768;
