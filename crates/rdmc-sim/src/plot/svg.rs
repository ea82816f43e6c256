//! A scene as SVG text.

use std::fmt::Write as _;

use super::colour::Colour;
use super::scene::{Anchor, Mark, Path, Scene, Stroke, Text};

pub(super) fn write(title: &str, scene: &Scene) -> String {
    let (width, height) = (number(scene.width), number(scene.height));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"{FAMILY}\" role=\"img\">\n\
         <title>{}</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n",
        escaped(title)
    );
    for mark in &scene.marks {
        match mark {
            Mark::Path(path) => svg.push_str(&path_element(path)),
            Mark::Circle { centre, radius, fill, edge } => {
                let (x, y, radius) = (number(centre.0), number(centre.1), number(*radius));
                append(&mut svg, format_args!("<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"{}\"", hex(*fill)));
                svg.push_str(&stroke_attributes(*edge));
                svg.push_str("/>\n");
            }
            Mark::Text(text) => svg.push_str(&text_element(text)),
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn path_element(path: &Path) -> String {
    let mut element = String::from("<path d=\"");
    for (index, (x, y)) in path.points.iter().enumerate() {
        let command = ["M", "L", " "][index.min(2)];
        append(&mut element, format_args!("{command}{} {}", number(*x), number(*y)));
    }
    match path.fill {
        Some(fill) => append(&mut element, format_args!("Z\" fill=\"{}\"", hex(fill))),
        None => element.push_str("\" fill=\"none\""),
    }
    element.push_str(&stroke_attributes(path.stroke));
    element.push_str("/>\n");
    element
}

fn stroke_attributes(stroke: Option<Stroke>) -> String {
    let Some(Stroke { colour, width, dash }) = stroke else { return String::new() };
    let mut attributes =
        format!(" stroke=\"{}\" stroke-width=\"{}\" stroke-linejoin=\"round\"", hex(colour), number(width));
    if let Some((dash, gap)) = dash {
        append(&mut attributes, format_args!(" stroke-dasharray=\"{} {}\"", number(dash), number(gap)));
    }
    attributes
}

fn text_element(text: &Text) -> String {
    let mut element = format!(
        "<text x=\"{}\" y=\"{}\" font-size=\"{}\" fill=\"{}\"",
        number(text.at.0),
        number(text.at.1),
        number(text.type_face.size),
        hex(text.colour)
    );
    if text.type_face.bold {
        element.push_str(" font-weight=\"bold\"");
    }
    match text.anchor {
        Anchor::Start => {}
        Anchor::Middle => element.push_str(" text-anchor=\"middle\""),
        Anchor::End => element.push_str(" text-anchor=\"end\""),
    }
    if text.rim {
        append(
            &mut element,
            format_args!(
                " stroke=\"#fff\" stroke-width=\"{}\" stroke-linejoin=\"round\" paint-order=\"stroke\"",
                number(RIM)
            ),
        );
    }
    append(&mut element, format_args!(">{}</text>\n", escaped(&text.content)));
    element
}

fn append(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("writing to a string cannot fail");
}

/// Formats a number with two decimals at most, and zero without a sign, so that the last bits of a sum do not show.
fn number(value: f64) -> String {
    let fixed = format!("{value:.2}");
    let short = fixed.trim_end_matches('0').trim_end_matches('.');
    if short == "-0" { "0".to_owned() } else { short.to_owned() }
}

fn hex(colour: Colour) -> String {
    format!("#{:02x}{:02x}{:02x}", colour.0, colour.1, colour.2)
}

/// Escapes characters that XML reserves, and drops control characters that it forbids.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '&' => safe.push_str("&amp;"),
            '"' => safe.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => {}
            _ if letter.is_control() => {}
            _ => safe.push(letter),
        }
    }
    safe
}

/// Width of the white rim around text, on both sides together.
pub(super) const RIM: f64 = 3.5;

/// The font of the measured widths, then fonts that are hardly wider.
const FAMILY: &str = "'Noto Sans','Open Sans','Segoe UI','Helvetica Neue',Helvetica,Arial,sans-serif";
