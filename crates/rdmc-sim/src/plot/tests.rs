//! Tests of whole figures.

use super::*;

fn lines(points: impl Fn(f64) -> Vec<(f64, f64)>, style: LineStyle) -> Content {
    let names = ["pipeline", "chain", "tree", "sequential", "bound"];
    let line = |(index, name): (usize, &&str)| Line::new(*name, points(index as f64), style);
    Content::Lines(names.iter().enumerate().map(line).collect())
}

fn bars(stacked: bool) -> Content {
    let series = vec![BarSeries::new("wire", vec![3.0, 4.5]), BarSeries::new("wait", vec![1.0, 0.25])];
    Content::Bars(Bars { categories: vec!["chain".to_owned(), "tree".to_owned()], series, stacked })
}

fn four_panels() -> Figure {
    let powers = |index: f64| (1..=9).map(|power| (2_f64.powi(power), (index + 1.0) * f64::from(power))).collect();
    let curve = |index: f64| (0..50).map(|x| (10_f64.powf(index / 5.0) * f64::from(x), f64::from(x) / 49.0)).collect();
    let mut first = Panel::new(Axis::log2("members"), Axis::linear("time (ms)"), lines(powers, LineStyle::Markers));
    first.references.push(Reference::new(50.0, "limit"));
    first.notes.push("a note".to_owned());
    Figure {
        subtitle: Some("a subtitle".to_owned()),
        ..Figure::new(
            "A title",
            vec![
                first,
                Panel::new(Axis::log10("latency (µs)"), Axis::linear("share"), lines(curve, LineStyle::Step)),
                Panel::new(Axis::linear("size"), Axis::linear("Gb/s"), bars(false)),
                Panel::new(Axis::linear("size"), Axis::linear("ms"), bars(true)),
            ],
        )
    }
}

/// Returns width and height of a PNG file, from its header.
fn png_size(png: &[u8]) -> (u32, u32) {
    assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
    let number = |at: usize| png[at..at + 4].iter().fold(0, |number, byte| number << 8 | u32::from(*byte));
    (number(16), number(20))
}

#[test]
fn a_png_has_two_by_two_pixels_for_each_unit_of_the_svg() {
    let figure = four_panels();
    let svg = figure.to_svg();
    let (width, height) = png_size(&figure.to_png().unwrap());
    assert_eq!(width, 1600);
    assert!(
        svg.starts_with(&format!("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\" height=\"{}\"", height / 2))
    );
    assert!((500..1000).contains(&(height / 2)), "{height}");
}

#[test]
fn the_same_figure_gives_the_same_bytes() {
    assert_eq!(four_panels().to_svg(), four_panels().to_svg());
    assert_eq!(four_panels().to_png().unwrap(), four_panels().to_png().unwrap());
}

#[test]
fn all_texts_of_a_figure_reach_the_svg() {
    let svg = four_panels().to_svg();
    let texts =
        ["A title", "a subtitle", "a note", "limit", "members", "time (ms)", "pipeline", "sequential", "wire", "512"];
    for text in texts {
        assert!(svg.contains(&format!(">{text}</text>")), "{text}");
    }
}

#[test]
fn a_series_keeps_its_colour_in_all_panels() {
    let line = |name: &str| Line::new(name, vec![(1.0, 1.0), (2.0, 2.0)], LineStyle::Plain);
    let panel = |names: &[&str]| {
        let content = Content::Lines(names.iter().map(|name| line(name)).collect());
        Panel::new(Axis::linear(""), Axis::linear(""), content)
    };
    let svg = Figure::new("", vec![panel(&["a", "b"]), panel(&["b"])]).to_svg();
    let fill_of_b = |text: &str| text.split_once("fill=\"").map(|(_, rest)| rest[..7].to_owned());
    let fills: Vec<_> = svg.lines().filter(|line| line.contains(">b<")).map(fill_of_b).collect();
    assert_eq!(fills.len(), 2);
    assert_eq!(fills[0], fills[1]);
}

#[test]
fn markup_in_names_is_text() {
    let line = Line::new("<b> & \"c\"\u{1}", vec![(1.0, 1.0)], LineStyle::Plain);
    let panel = Panel::new(Axis::linear(""), Axis::linear(""), Content::Lines(vec![line]));
    let svg = Figure::new("a < b", vec![panel]).to_svg();
    assert!(svg.contains(">&lt;b&gt; &amp; &quot;c&quot;</text>"));
    assert!(svg.contains("<title>a &lt; b</title>"));
}

#[test]
fn ten_thousand_points_become_a_small_svg() {
    let curve = |index: f64| (0..10_000).map(|x| (f64::from(x), (f64::from(x) / 1e4).powf(index + 1.0))).collect();
    let panel = Panel::new(Axis::linear("x"), Axis::linear("y"), lines(curve, LineStyle::Step));
    let svg = Figure::new("long", vec![panel]).to_svg();
    assert!(svg.len() < 60_000, "{}", svg.len());
}

#[test]
fn a_distribution_rises_from_zero_to_one_over_its_samples() {
    let line = Line::distribution("", &[3.0, f64::NAN, 1.0, 2.0, 2.0]);
    assert_eq!(line.points, [(1.0, 0.0), (1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]);
    assert_eq!(Line::distribution("", &[]).points, []);
}

#[test]
fn nothing_to_draw_is_said_so() {
    let empty = Panel::new(
        Axis::linear(""),
        Axis::log2(""),
        Content::Lines(vec![Line::new("a", vec![(1.0, 0.0)], LineStyle::Step)]),
    );
    assert!(Figure::new("", vec![empty]).to_svg().contains(">no data<"));
    let svg = Figure::new("", vec![]).to_svg();
    assert!(svg.ends_with("</svg>\n"));
}

#[test]
fn a_figure_that_is_too_high_is_refused() {
    let panel = Panel::new(Axis::linear(""), Axis::linear(""), Content::Lines(vec![]));
    let figure = Figure::new("", vec![panel; 200]);
    assert!(matches!(figure.to_png(), Err(PlotError::TooHigh { want: 32_768, .. })));
}

#[test]
fn odd_numbers_do_not_panic() {
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, -5.0, 1e-320, 1e308, -1e308, 1.0, 1.0 + 1e-15];
    let ranges =
        [None, Some((1.0, 1.0)), Some((5.0, -5.0)), Some((f64::NAN, 1.0)), Some((0.0, 1e300)), Some((2.0, 3.0))];
    let styles = [LineStyle::Markers, LineStyle::Plain, LineStyle::Step, LineStyle::Dashed];
    for (scale, range) in [Scale::Linear, Scale::Log2, Scale::Log10].iter().flat_map(|s| ranges.map(|r| (*s, r))) {
        let axis = || Axis { label: "µ <&> 漢字 \u{7f}".to_owned(), scale, range };
        for count in [0, 1, 2, odd.len()] {
            let points: Vec<_> = odd.iter().flat_map(|x| odd.map(|y| (*x, y))).take(count * count).collect();
            let lines = styles.map(|style| Line::new("line", points.clone(), style)).to_vec();
            let series = |name: &str| BarSeries::new(name, odd[..count].to_vec());
            let categories = vec!["a category with a long name".to_owned(); 5];
            let bars =
                |stacked| Bars { categories: categories.clone(), series: vec![series("a"), series("")], stacked };
            for content in [Content::Lines(lines), Content::Bars(bars(false)), Content::Bars(bars(true))] {
                let references = odd.map(|y| Reference::new(y, "reference")).to_vec();
                let panel = Panel { references, ..Panel::new(axis(), axis(), content) };
                let svg = Figure::new("odd", vec![panel.clone(), panel]).to_svg();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{scale:?} {range:?} {count}");
            }
        }
    }
}

#[test]
fn many_names_and_many_bars_do_not_panic() {
    let word = "pneumonoultramicroscopicsilicovolcanoconiosis".repeat(5);
    let lines =
        (0..60).map(|y| Line::new(format!("{word} {y}"), vec![(0.0, 0.0), (1.0, f64::from(y % 3))], LineStyle::Step));
    let lines = Content::Lines(lines.collect());
    let series = (0..20).map(|index| BarSeries::new(format!("series {index}"), vec![f64::from(index); 300]));
    let categories = (0..300).map(|index| format!("{word}{index}")).collect();
    let bars = Bars { categories, series: series.collect(), stacked: false };
    let stacks = Bars { stacked: true, ..bars.clone() };
    let panel = |content| Panel::new(Axis::linear(&word), Axis::linear(&word), content);
    let panels = vec![panel(lines), panel(Content::Bars(bars)), panel(Content::Bars(stacks))];
    let figure = Figure { subtitle: Some(word.clone()), ..Figure::new(word.clone(), panels) };
    assert!(figure.to_svg().contains('…'));
    assert_eq!(png_size(&figure.to_png().unwrap()).0, 1600);
}
