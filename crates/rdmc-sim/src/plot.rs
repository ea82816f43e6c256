//! Charts of experiments: lines, distributions and bars, as SVG and as PNG.
//!
//! A [`Figure`] is plain data. It is laid out once, as a list of shapes; [`Figure::to_svg`] writes the list as text and
//! [`Figure::to_png`] paints it. Both are independent of the machine: the font is compiled in, and the same figure
//! gives the same bytes each time. An SVG has the same shapes everywhere, with text in the viewer's nearest font.
//!
//! A series keeps its colour and marker in all panels of a figure, by its name. Names stand beside the data in the
//! colour of the series, in place of a legend.
//!
//! Values that cannot be drawn are skipped: a NaN, an infinity, zero or less on a logarithmic axis, a series without
//! points. A panel without data shows "no data".

mod axis;
mod bars;
mod colour;
mod font;
mod labels;
mod layout;
mod lines;
mod panel;
mod raster;

mod scene;
mod svg;

/// Describes a picture: a title over one or more panels.
///
/// # Examples
///
/// ```
/// # use rdmc_sim::plot::{Axis, Content, Figure, Line, LineStyle, Panel};
/// let line = Line::new("binomial", vec![(2.0, 1.0), (4.0, 2.0), (8.0, 3.0)], LineStyle::Markers);
/// let panel = Panel::new(Axis::log2("members"), Axis::linear("steps"), Content::Lines(vec![line]));
/// let figure = Figure::new("Steps of a broadcast", vec![panel]);
/// assert!(figure.to_svg().starts_with("<svg"));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// Stands above everything, in bold.
    pub title: String,
    /// Stands under the title: the fixed parameters and the repetitions.
    pub subtitle: Option<String>,
    /// Panels in a row: 1 or 2; other values count as the nearer of these.
    pub columns: usize,
    /// From left to right, then down.
    pub panels: Vec<Panel>,
}

impl Figure {
    /// Makes a figure without subtitle; two panels or more stand in two columns.
    #[must_use]
    pub fn new(title: impl Into<String>, panels: Vec<Panel>) -> Self {
        Self { title: title.into(), subtitle: None, columns: panels.len().clamp(1, 2), panels }
    }

    /// Draws the figure as an SVG document, 800 px wide and as high as the content needs.
    #[must_use]
    pub fn to_svg(&self) -> String {
        svg::write(&self.title, &layout::scene(self))
    }

    /// Draws the figure as a PNG file on white, with 2 × 2 pixels for each unit of the SVG: 1600 pixels wide.
    ///
    /// # Errors
    ///
    /// [`PlotError::TooHigh`] for a figure of hundreds of panels, [`PlotError::Encode`] when the encoder fails.
    pub fn to_png(&self) -> Result<Vec<u8>, PlotError> {
        raster::encode(&layout::scene(self))
    }
}

/// Describes one pair of axes and what is drawn between them.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// Stands above the panel, in bold; figures with one panel rarely need it.
    pub title: Option<String>,
    /// The horizontal axis. Bars use its label only.
    pub x: Axis,
    /// The vertical axis. Its label stands above the panel, horizontally.
    pub y: Axis,
    /// The data.
    pub content: Content,
    /// Horizontal reference lines; the vertical axis includes them.
    pub references: Vec<Reference>,
    /// Small print under the panel, a paragraph each.
    pub notes: Vec<String>,
}

impl Panel {
    /// Makes a panel without title, references and notes.
    #[must_use]
    pub fn new(x: Axis, y: Axis, content: Content) -> Self {
        Self { title: None, x, y, content, references: Vec::new(), notes: Vec::new() }
    }
}

/// Describes an axis: its quantity and its scale.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// The quantity with its unit, as in `latency (µs)`.
    pub label: String,
    /// The scale.
    pub scale: Scale,
    /// The first and the last value shown, in the unit of the data; data beyond is cut off. `None` and a range that is
    /// invalid on this scale show all data.
    pub range: Option<(f64, f64)>,
}

impl Axis {
    /// Makes a linear axis that shows all data.
    #[must_use]
    pub fn linear(label: impl Into<String>) -> Self {
        Self { label: label.into(), scale: Scale::Linear, range: None }
    }

    /// Makes a binary logarithmic axis that shows all data.
    #[must_use]
    pub fn log2(label: impl Into<String>) -> Self {
        Self { label: label.into(), scale: Scale::Log2, range: None }
    }

    /// Makes a decimal logarithmic axis that shows all data.
    #[must_use]
    pub fn log10(label: impl Into<String>) -> Self {
        Self { label: label.into(), scale: Scale::Log10, range: None }
    }

    /// Shows the values from `first` to `last` only.
    #[must_use]
    pub fn with_range(mut self, first: f64, last: f64) -> Self {
        self.range = Some((first, last));
        self
    }
}

/// The scale of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences have equal lengths.
    Linear,
    /// Equal ratios have equal lengths; ticks at powers of two.
    Log2,
    /// Equal ratios have equal lengths; ticks at powers of ten.
    Log10,
}

/// Holds the data of a panel.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Series of points.
    Lines(Vec<Line>),
    /// Values per category.
    Bars(Bars),
}

/// Describes a series of points.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// Stands beside the line, in its colour; may be empty.
    pub name: String,
    /// `(x, y)` in the units of the axes, in the order of the line.
    pub points: Vec<(f64, f64)>,
    /// The style of the line.
    pub style: LineStyle,
}

impl Line {
    /// Makes a line.
    #[must_use]
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>, style: LineStyle) -> Self {
        Self { name: name.into(), points, style }
    }

    /// Makes the empirical distribution of `samples`: for each value the share of samples, 0 to 1, that do not exceed
    /// it.
    #[must_use]
    pub fn distribution(name: impl Into<String>, samples: &[f64]) -> Self {
        let mut sorted: Vec<f64> = samples.iter().copied().filter(|sample| sample.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let share_of_one = 1.0 / (sorted.len().max(1) as f64);
        let steps = sorted.iter().enumerate().map(|(before, &sample)| (sample, (before + 1) as f64 * share_of_one));
        let start = sorted.first().map(|&least| (least, 0.0));
        Self::new(name, start.into_iter().chain(steps).collect(), LineStyle::Step)
    }
}

/// The style of a line. A line of a single point is a marker in every style.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineStyle {
    /// Straight, with a marker at each point; above 64 points, without.
    Markers,
    /// Straight.
    Plain,
    /// Each value holds until the next point, as in a distribution.
    Step,
    /// Straight and dashed: a model or a bound beside measurements.
    Dashed,
}

/// Describes values per category.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    /// Names along the horizontal axis.
    pub categories: Vec<String>,
    /// The series, with one bar for each category. A series with fewer values has no bar in the last categories.
    pub series: Vec<BarSeries>,
    /// Whether the bars of a category are stacked, not side by side. Ignored on a logarithmic axis.
    pub stacked: bool,
}

/// Describes one value for each category.
#[derive(Debug, Clone, PartialEq)]
pub struct BarSeries {
    /// Stands beside or above the bars, in their colour; may be empty.
    pub name: String,
    /// In the order of the categories, in the unit of the vertical axis; NaN for no value.
    pub values: Vec<f64>,
}

impl BarSeries {
    /// Makes a series.
    #[must_use]
    pub fn new(name: impl Into<String>, values: Vec<f64>) -> Self {
        Self { name: name.into(), values }
    }
}

/// Describes a horizontal reference line.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    /// Its value, in the unit of the vertical axis.
    pub y: f64,
    /// Stands on the line; may be empty.
    pub label: String,
}

impl Reference {
    /// Makes a reference line.
    #[must_use]
    pub fn new(y: f64, label: impl Into<String>) -> Self {
        Self { y, label: label.into() }
    }
}

/// A figure cannot become a PNG.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The figure needs too many rows of pixels; draw fewer panels, or use the SVG.
    #[error("figure is {got} pixels high, want at most {want}")]
    TooHigh {
        /// Rows of pixels of the figure.
        got: u32,
        /// Limit of rows of pixels.
        want: u32,
    },
    /// The encoder refused the picture.
    #[error("png encoder failed")]
    Encode(#[source] png::EncodingError),
}

#[cfg(test)]
mod tests;
