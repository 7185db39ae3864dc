//! Charts of a result file as one SVG: bars of the ratios to a peer, and every row under the machine's roof.
//!
//! Text is left to the viewer's own fonts, so none is needed to write the file.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use thiserror::Error;

use super::ceilings::Ceilings;
use super::results::{Ratio, ResultRow, Results};

const WIDTH: u32 = 1080;
const BAR_HEIGHT: u32 = 26;
const BARS_MARGIN: u32 = 70;
const ROOF_HEIGHT: u32 = 460;
const LABEL_WIDTH: i32 = 300;
const COLORS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 96, 20),
    RGBColor(44, 140, 44),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(90, 90, 90),
];

/// Results that cannot be drawn.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlotError {
    /// There is no figure.
    #[error("the results hold no measured row and no ratio, there is nothing to draw")]
    Nothing,
    /// Drawing failed.
    #[error("the chart could not be drawn: {0}")]
    Draw(String),
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws results as the text of an SVG file.
///
/// # Errors
/// [`PlotError`].
pub fn plot(results: &Results) -> Result<String, PlotError> {
    let points: Vec<Point<'_>> = results.results.iter().filter_map(Point::of).collect();
    let ratios: Vec<&Ratio> = results.ratios.iter().filter(|r| r.ratio.is_finite() && r.ratio > 0.0).collect();
    if points.is_empty() && ratios.is_empty() {
        return Err(PlotError::Nothing);
    }
    let num_bars = u32::try_from(ratios.len()).unwrap_or(u32::MAX).min(200);
    let bars_height = if ratios.is_empty() { 0 } else { BARS_MARGIN + num_bars * BAR_HEIGHT };
    let roof_height = if points.is_empty() { 0 } else { ROOF_HEIGHT };
    let mut svg = String::new();
    let size = (WIDTH, bars_height + roof_height);
    draw(&mut svg, size, bars_height, &ratios, &points, results.ceilings.as_ref())
        .map_err(|error| PlotError::Draw(error.to_string()))?;
    Ok(svg)
}

fn draw(
    svg: &mut String,
    size: (u32, u32),
    bars_height: u32,
    ratios: &[&Ratio],
    points: &[Point<'_>],
    ceilings: Option<&Ceilings>,
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, size).into_drawing_area();
    root.fill(&WHITE)?;
    let (bars, roof) = root.split_vertically(bars_height);
    if !ratios.is_empty() {
        draw_bars(&bars, ratios)?;
    }
    if !points.is_empty() {
        draw_roof(&roof, points, ceilings)?;
    }
    root.present()?;
    Ok(())
}

/// A row under the roof.
struct Point<'a> {
    row: &'a ResultRow,
    flop_per_byte: f64,
    gflops: f64,
}

impl<'a> Point<'a> {
    fn of(row: &'a ResultRow) -> Option<Self> {
        let (tflops, gbs) = (row.tflops?, row.gbs?);
        let point = Self { row, flop_per_byte: tflops * 1e3 / gbs, gflops: tflops * 1e3 };
        (point.flop_per_byte.is_finite() && point.flop_per_byte > 0.0 && point.gflops > 0.0).then_some(point)
    }
}

fn text(size: i32, color: &RGBColor, horizontal: HPos) -> TextStyle<'_> {
    let style = TextStyle::from(("sans-serif", size).into_font()).color(color);
    style.pos(Pos::new(horizontal, VPos::Center))
}

#[expect(clippy::cast_possible_truncation, reason = "pixels of a chart that is about a thousand wide")]
fn draw_bars(area: &Area<'_>, ratios: &[&Ratio]) -> Result<(), Box<dyn std::error::Error>> {
    let title = "time of the peer / our time (above 1: we are faster)";
    area.draw_text(title, &text(19, &BLACK, HPos::Left), (20, 24))?;
    let max = ratios.iter().map(|r| r.ratio).fold(1.0, f64::max);
    let room = f64::from(WIDTH.cast_signed() - LABEL_WIDTH - 90);
    let x = |ratio: f64| LABEL_WIDTH + (ratio / max * room) as i32;
    let (mut top, step) = (46, BAR_HEIGHT.cast_signed());
    let bottom = top + step * i32::try_from(ratios.len())?;
    for ratio in ratios {
        let color = if ratio.ratio >= 1.0 { COLORS[2] } else { COLORS[1] };
        let corners = [(LABEL_WIDTH, top + 4), (x(ratio.ratio), top + step - 4)];
        area.draw(&Rectangle::new(corners, color.filled()))?;
        let middle = top + step / 2;
        let label = format!("{} / {}", ratio.workload, ratio.peer);
        area.draw_text(&label, &text(15, &BLACK, HPos::Right), (LABEL_WIDTH - 8, middle))?;
        let value = format!("{:.2}", ratio.ratio);
        area.draw_text(&value, &text(16, &BLACK, HPos::Left), (x(ratio.ratio) + 6, middle))?;
        top += step;
    }
    area.draw(&PathElement::new([(x(1.0), 42), (x(1.0), bottom)], BLACK.stroke_width(1)))?;
    Ok(())
}

fn draw_roof(
    area: &Area<'_>,
    points: &[Point<'_>],
    ceilings: Option<&Ceilings>,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut systems: Vec<&str> = points.iter().map(|point| point.row.system.as_str()).collect();
    systems.sort_unstable();
    systems.dedup();
    let bounds = |values: &dyn Fn(&Point<'_>) -> f64, more: Option<f64>| {
        let all = points.iter().map(values).chain(more);
        let (low, high) = all.fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), x| (low.min(x), high.max(x)));
        low / 2.0..high * 2.0
    };
    let top = ceilings.and_then(|c| c.matmul_tflops).map(|tflops| tflops * 1e3);
    let (x, y) = (bounds(&|point| point.flop_per_byte, None), bounds(&|point| point.gflops, top));
    let mut chart = ChartBuilder::on(area)
        .caption("rate over arithmetic intensity; the line is the machine's roof", ("sans-serif", 19))
        .margin(20)
        .x_label_area_size(44)
        .y_label_area_size(84)
        .build_cartesian_2d(x.clone().log_scale(), y.clone().log_scale())?;
    chart.configure_mesh().x_desc("FLOP per byte").y_desc("GFLOP/s").label_style(("sans-serif", 15)).draw()?;
    if let Some(memory_gbs) = ceilings.and_then(Ceilings::memory_gbs) {
        // Straight lines on these axes: up to the ridge, then flat; no further than the chart where there is no top.
        let highest = top.unwrap_or(y.end);
        let ridge = (highest / memory_gbs).clamp(x.start, x.end);
        let end = if top.is_some() { x.end } else { ridge };
        let line = [x.start, ridge, end].map(|x| (x, (x * memory_gbs).min(highest)));
        chart.draw_series(LineSeries::new(line, BLACK.stroke_width(2)))?;
    }
    for (index, system) in systems.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let of = points.iter().filter(|point| point.row.system == *system);
        let dots = of.map(|point| Circle::new((point.flop_per_byte, point.gflops), 5, color.filled()));
        let legend = move |(x, y)| Circle::new((x + 10, y), 5, color.filled());
        chart.draw_series(dots)?.label(*system).legend(legend);
    }
    let mut labels = chart.configure_series_labels();
    let labels = labels.position(SeriesLabelPosition::LowerRight).border_style(BLACK).label_font(("sans-serif", 15));
    labels.background_style(WHITE.mix(0.8)).draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::work::Work;
    use super::*;

    #[test]
    fn both_charts_are_drawn_with_their_labels() {
        let ceilings = Ceilings { read_gbs: Some(20.0), copy_gbs: None, matmul_tflops: Some(0.15) };
        let work = Work { pairs: 1, flops: 4_000_000_000, bytes: 50_000_000 };
        let results = Results {
            ceilings: Some(ceilings),
            results: vec![ResultRow::timed("decode-a<b", "cpu", 50.0, work, Some(&ceilings))],
            ratios: vec![Ratio { workload: "decode-a<b".into(), peer: "other".into(), ratio: 1.25, rounds: vec![] }],
            ..Results::default()
        };
        let svg = plot(&results).unwrap();
        for text in ["<svg", "decode-a&lt;b / other", "1.25", "GFLOP/s", "cpu", "<circle"] {
            assert!(svg.contains(text), "{text} is not in the chart");
        }
        assert!(svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        let skipped = ResultRow::skipped("a", "cpu", "because".to_owned());
        let results = Results { results: vec![skipped], ..Results::default() };
        assert!(matches!(plot(&results), Err(PlotError::Nothing)));
    }
}
