//! Titles, and panels in rows.

use super::Figure;
use super::colour::{GREY, INK, Paints};
use super::font;
use super::panel::{self, Sizes};
use super::scene::{Anchor, Mark, Scene, Text, TypeFace};

pub(super) fn scene(figure: &Figure) -> Scene {
    let mut marks = Vec::new();
    let mut top = MARGIN;
    top += paragraph(&mut marks, &figure.title, TITLE_FACE, INK, top);
    if let Some(subtitle) = &figure.subtitle {
        top += paragraph(&mut marks, subtitle, SUBTITLE_FACE, GREY, top);
    }
    if top > MARGIN {
        top += TITLE_GAP;
    }

    let columns = figure.columns.clamp(1, 2);
    let width = if columns == 1 { WIDTH - 2.0 * MARGIN } else { (WIDTH - 2.0 * MARGIN - COLUMN_GAP) / 2.0 };
    let plot_min = if columns == 1 { 330.0 } else { 240.0 };
    let paints = Paints::of(figure);
    for (index, row) in figure.panels.chunks(columns).enumerate() {
        if index > 0 {
            top += ROW_GAP;
        }
        // The frames of a row are at one height, independent of their headings.
        let header = row.iter().map(|panel| panel::header_height(panel, width)).fold(0.0, f64::max);
        let plot = row.iter().map(|panel| panel::plot_height_min(panel, width)).fold(plot_min, f64::max);
        let mut height = 0.0_f64;
        for (column, panel) in row.iter().enumerate() {
            let drawn = panel::draw(panel, &paints, Sizes { width, header, plot });
            let left = MARGIN + column as f64 * (width + COLUMN_GAP);
            marks.extend(drawn.marks.into_iter().map(|mark| mark.shifted(left, top)));
            height = height.max(drawn.height);
        }
        top += height;
    }
    Scene { width: WIDTH, height: (top + MARGIN).ceil(), marks }
}

/// Writes text over the whole width and returns its height.
fn paragraph(marks: &mut Vec<Mark>, text: &str, type_face: TypeFace, colour: super::colour::Colour, top: f64) -> f64 {
    let lines = font::wrap(text, type_face, WIDTH - 2.0 * MARGIN);
    for (index, line) in lines.iter().enumerate() {
        let base = top + index as f64 * type_face.leading() + type_face.size;
        marks.push(Text::plain((MARGIN, base), Anchor::Start, type_face, colour, line));
    }
    lines.len() as f64 * type_face.leading()
}

const WIDTH: f64 = 800.0;
const MARGIN: f64 = 18.0;
const COLUMN_GAP: f64 = 28.0;
const ROW_GAP: f64 = 22.0;
const TITLE_GAP: f64 = 12.0;
const TITLE_FACE: TypeFace = TypeFace::bold(17.0);
const SUBTITLE_FACE: TypeFace = TypeFace::regular(12.5);
