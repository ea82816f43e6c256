//! Widths and outlines of text in the compiled-in font: Noto Sans, under the SIL Open Font License 1.1.

use ttf_parser::{Face, OutlineBuilder};

use super::scene::TypeFace;

pub(super) fn width(text: &str, type_face: TypeFace) -> f64 {
    let face = face(type_face);
    let units: u32 = text.chars().map(|letter| advance(&face, letter)).sum();
    f64::from(units) * scale(&face, type_face)
}

/// Breaks `text` at spaces into lines of at most `width_max`; a longer word loses its end.
pub(super) fn wrap(text: &str, type_face: TypeFace, width_max: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        if let Some(line) = lines.last_mut() {
            let longer = format!("{line} {word}");
            if width(&longer, type_face) <= width_max {
                *line = longer;
                continue;
            }
        }
        lines.push(shortened(word, type_face, width_max));
    }
    lines
}

/// Calls `glyph` for each glyph of `text`, with the distance of the glyph from the left end of the text and a writer of
/// its outline in font units.
pub(super) fn outline(text: &str, type_face: TypeFace, mut glyph: impl FnMut(f64, &dyn Fn(&mut dyn OutlineBuilder))) {
    let face = face(type_face);
    let mut pen = 0;
    for letter in text.chars() {
        if let Some(id) = face.glyph_index(letter).or_else(|| face.glyph_index(SUBSTITUTE)) {
            glyph(f64::from(pen) * scale(&face, type_face), &|builder| {
                face.outline_glyph(id, builder);
            });
        }
        pen += advance(&face, letter);
    }
}

/// Returns the length of a font unit.
pub(super) fn unit(type_face: TypeFace) -> f64 {
    scale(&face(type_face), type_face)
}

fn shortened(word: &str, type_face: TypeFace, width_max: f64) -> String {
    if width(word, type_face) <= width_max {
        return word.to_owned();
    }
    let face = face(type_face);
    let mut left = width_max - width(ELLIPSIS, type_face);
    let fits = |letter: &char| {
        left -= f64::from(advance(&face, *letter)) * scale(&face, type_face);
        left >= 0.0
    };
    word.chars().take_while(fits).chain(ELLIPSIS.chars()).collect()
}

fn advance(face: &Face<'_>, letter: char) -> u32 {
    let id = face.glyph_index(letter).or_else(|| face.glyph_index(SUBSTITUTE));
    id.and_then(|id| face.glyph_hor_advance(id)).map_or(0, u32::from)
}

fn scale(face: &Face<'_>, type_face: TypeFace) -> f64 {
    type_face.size / f64::from(face.units_per_em())
}

fn face(type_face: TypeFace) -> Face<'static> {
    let bytes = if type_face.bold { notosans::BOLD_TTF } else { notosans::REGULAR_TTF };
    Face::parse(bytes, 0).expect("the font that is compiled in is well formed")
}

/// Replaces the end of a word that is too long.
const ELLIPSIS: &str = "…";
/// Replaces letters that the font lacks.
const SUBSTITUTE: char = '?';
