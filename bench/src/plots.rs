//! Plots, as SVG.

use std::fs;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::figures::short;
use crate::implementation::{Outcome, one_line};
use crate::report::{Report, Row};

const WIDTH: u32 = 1100;
/// The height of a line plot.
const HEIGHT: u32 = 640;
/// The height of a bar with its margin, and of the header above the bars.
const BAR: i32 = 46;
const TOP: i32 = 84;
const FONT: &str = "sans-serif";
const OURS: RGBColor = RGBColor(200, 30, 60);
const GREY: RGBColor = RGBColor(120, 120, 120);
/// Colours that most readers can distinguish, with colour blindness too.
const PEERS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(86, 180, 233),
    RGBColor(204, 121, 167),
    RGBColor(150, 110, 60),
];

/// A plot.
pub(crate) struct Plot {
    /// The file name without its extension.
    pub(crate) file: &'static str,
    pub(crate) title: String,
    shape: Shape,
}

impl Plot {
    fn height(&self) -> u32 {
        match &self.shape {
            Shape::Lines { .. } => HEIGHT,
            Shape::Bars { bars, .. } => {
                let count = i32::try_from(bars.len()).unwrap_or(1);
                (TOP + count * BAR + 16).unsigned_abs()
            }
        }
    }
}

enum Shape {
    /// Lines over a number, with logarithmic axes.
    Lines { x: &'static str, y: &'static str, lines: Vec<Line> },
    /// One bar per implementation.
    Bars { unit: &'static str, bars: Vec<Bar>, logarithmic: bool },
}

struct Line {
    label: String,
    colour: RGBColor,
    /// Variants of one crate share a colour; all but the last are dashed.
    dashed: bool,
    /// Number, median, minimum, maximum.
    points: Vec<(f64, f64, f64, f64)>,
}

struct Bar {
    label: String,
    colour: RGBColor,
    median: f64,
    min: f64,
    max: f64,
}

/// Returns the plots for which there are figures.
pub(crate) fn of(report: &Report) -> Vec<Plot> {
    let mut plots = Vec::new();
    let mut lines = |section: &str, file, title: &str, x, y| {
        let lines = lines(report, section);
        if lines.iter().any(|line| line.points.len() > 3) {
            let shape = Shape::Lines { x, y, lines };
            plots.push(Plot { file, title: title.into(), shape });
        }
    };
    let (x, y) = ("waiters", "hand-offs per second");
    let title = "Redis: hand-offs per second, by number of waiters";
    lines("redis/scaling-waiters", "redis-waiters", title, x, y);
    let title = "PostgreSQL: hand-offs per second, by number of waiters";
    lines("postgres/scaling-waiters", "postgres-waiters", title, x, y);
    let title = "Files: hand-offs per second, by number of waiters";
    lines("file/scaling-waiters", "file-waiters", title, x, y);
    let (x, y) = ("keys", "locks per second");
    let title = "Redis: locks per second, by number of keys and tasks";
    lines("redis/scaling-keys", "redis-keys", title, x, y);
    let title = "PostgreSQL: locks per second, by number of keys and tasks";
    lines("postgres/scaling-keys", "postgres-keys", title, x, y);
    let title = "Files: locks per second, by number of keys and tasks";
    lines("file/scaling-keys", "file-keys", title, x, y);
    let mut bars = |section: &str, key: &str, file, title: &str, unit, logarithmic| {
        let bars = bars(report, section, key, title.contains("longer is better"));
        if !bars.is_empty() {
            let shape = Shape::Bars { unit, bars, logarithmic };
            plots.push(Plot { file, title: title.into(), shape });
        }
    };
    let title = "Redis: lock and release, uncontended (shorter is better)";
    bars(
        "redis/uncontended",
        "p50-ratio",
        "redis-uncontended",
        title,
        "p50, in units of two PINGs",
        false,
    );
    let title = "Redis: requests per hand-off, 64 tasks (shorter is better)";
    bars("redis/queue-64", "requests", "redis-requests", title, "requests, logarithmic", true);
    let title = "PostgreSQL: hand-offs, 64 tasks (longer is better)";
    bars("postgres/queue-64", "rate", "postgres-hand-offs", title, "hand-offs per second", false);
    let title = "Files: hand-offs, 64 tasks (longer is better)";
    bars("file/queue-64", "rate", "file-hand-offs", title, "hand-offs per second", false);
    plots
}

/// Returns the crate of a row.
fn name(row: &Row) -> &str {
    row.implementation.split(',').next().unwrap_or_default()
}

/// Returns the colour of a crate, which all its variants share.
fn colour(row: &Row, peers: &mut Vec<String>) -> RGBColor {
    if row.is_ours() {
        return OURS;
    }
    if row.is_raw() {
        return GREY;
    }
    let index = peers.iter().position(|peer| peer == name(row)).unwrap_or_else(|| {
        peers.push(name(row).to_owned());
        peers.len() - 1
    });
    PEERS[index % PEERS.len()]
}

fn lines(report: &Report, section: &str) -> Vec<Line> {
    let Some(section) = report.section(section) else { return Vec::new() };
    let mut peers = Vec::new();
    let line = |(index, row): (usize, &Row)| {
        let points = section.columns.iter().filter_map(|column| {
            let figure = row.figures.get(&column.key)?;
            let number = column.key.parse().ok()?;
            let (median, min, max) = (figure.median()?, figure.min()?, figure.max()?);
            (median > 0.0).then_some((number, median, min.max(1.0), max))
        });
        let points = points.collect();
        let mut label = row.implementation.clone();
        if row.overlaps > 0 {
            label.push_str(" (granted twice)");
        }
        let dashed = section.rows[index + 1..].iter().any(|other| name(other) == name(row));
        Line { label, colour: colour(row, &mut peers), dashed, points }
    };
    section.rows.iter().enumerate().map(line).collect()
}

fn bars(report: &Report, section: &str, key: &str, longer: bool) -> Vec<Bar> {
    let Some(section) = report.section(section) else { return Vec::new() };
    let mut peers = Vec::new();
    let bar = |row: &Row| {
        let figure = row.figures.get(key)?;
        let (median, min, max) = (figure.median()?, figure.min()?, figure.max()?);
        let mut label = row.implementation.clone();
        if row.overlaps > 0 {
            label.push_str(" (granted twice)");
        }
        Some(Bar { label, colour: colour(row, &mut peers), median, min, max })
    };
    let mut bars: Vec<_> = section.rows.iter().filter_map(bar).collect();
    // Best first.
    bars.sort_by(|a, b| a.median.total_cmp(&b.median));
    if longer {
        bars.reverse();
    }
    bars
}

/// Writes the plots into a directory.
pub(crate) fn write(plots: &[Plot], dir: &Path) -> Outcome<()> {
    fs::create_dir_all(dir).map_err(one_line)?;
    for plot in plots {
        let mut text = String::new();
        let size = (WIDTH, plot.height());
        draw(plot, &SVGBackend::with_string(&mut text, size).into_drawing_area())?;
        fs::write(dir.join(format!("{}.svg", plot.file)), text).map_err(one_line)?;
    }
    Ok(())
}

fn draw<B: DrawingBackend>(plot: &Plot, area: &DrawingArea<B, Shift>) -> Outcome<()> {
    area.fill(&WHITE).map_err(one_line)?;
    match &plot.shape {
        Shape::Lines { x, y, lines } => draw_lines(area, &plot.title, (x, y), lines),
        Shape::Bars { unit, bars, logarithmic } => {
            draw_bars(area, &plot.title, unit, bars, *logarithmic)
        }
    }?;
    area.present().map_err(one_line)
}

/// Returns the power of ten next to a number: only those have labels.
fn decade(value: f64, side: fn(f64) -> f64) -> f64 {
    10_f64.powf(side(value.log10()))
}

fn draw_lines<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    title: &str,
    (x, y): (&str, &str),
    lines: &[Line],
) -> Outcome<()> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let most_x = points().map(|point| point.0).fold(1.0, f64::max);
    let least_x = points().map(|point| point.0).fold(f64::MAX, f64::min);
    let most_y = points().map(|point| point.3).fold(1.0, f64::max);
    let least_y = points().map(|point| point.2).fold(f64::MAX, f64::min).max(0.5);
    let (left, right) = area.split_horizontally(770);
    let mut chart = ChartBuilder::on(&left)
        .caption(title, (FONT, 26))
        .margin(18)
        .x_label_area_size(56)
        .y_label_area_size(96)
        .build_cartesian_2d(
            (least_x * 0.9..most_x * 1.1).log_scale(),
            (decade(least_y, f64::floor)..decade(most_y, f64::ceil)).log_scale(),
        )
        .map_err(one_line)?;
    let numbers = |value: &f64| short(*value).replace(".00", "").replace(".0", "");
    // More labels would overlap.
    let some = |value: &f64| {
        let text = numbers(value);
        if text.starts_with(['1', '2', '5']) { text } else { String::new() }
    };
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(y)
        .x_label_formatter(&some)
        .y_label_formatter(&numbers)
        .label_style((FONT, 18))
        .axis_desc_style((FONT, 20))
        .light_line_style(BLACK.mix(0.04))
        .draw()
        .map_err(one_line)?;
    for line in lines {
        let width = if line.colour == OURS { 4 } else { 2 };
        let style = line.colour.stroke_width(width);
        let spread = line.points.iter().map(|point| {
            PathElement::new(vec![(point.0, point.2), (point.0, point.3)], line.colour.mix(0.6))
        });
        chart.draw_series(spread).map_err(one_line)?;
        let dots = line
            .points
            .iter()
            .map(|point| Circle::new((point.0, point.1), 4, line.colour.filled()));
        chart.draw_series(dots).map_err(one_line)?;
        let path = line.points.iter().map(|point| (point.0, point.1));
        if line.dashed {
            chart.draw_series(DashedLineSeries::new(path, 9, 6, style)).map_err(one_line)?;
        } else {
            chart.draw_series(LineSeries::new(path, style)).map_err(one_line)?;
        }
    }
    draw_legend(&right, lines)
}

/// Draws the legend, in the order of the lines' right ends.
fn draw_legend<B: DrawingBackend>(area: &DrawingArea<B, Shift>, lines: &[Line]) -> Outcome<()> {
    let last = |line: &Line| line.points.last().map_or(0.0, |point| point.1);
    let mut lines: Vec<&Line> = lines.iter().collect();
    lines.sort_by(|a, b| last(b).total_cmp(&last(a)));
    for (index, line) in (0..).zip(lines) {
        let y = 90 + index * 58;
        let width = if line.colour == OURS { 4 } else { 2 };
        let parts = if line.dashed { vec![(0, 9), (15, 24)] } else { vec![(0, 26)] };
        for (from, to) in parts {
            let style = line.colour.stroke_width(width);
            area.draw(&PathElement::new(vec![(from, y), (to, y)], style)).map_err(one_line)?;
        }
        let style: TextStyle<'_> = (FONT, 17).into();
        let style = style.color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
        // The variant goes below the name, because the legend is narrow.
        let (name, variant) = line.label.split_once(", ").unwrap_or((&line.label, ""));
        area.draw(&Text::new(name.to_owned(), (36, y), style.clone())).map_err(one_line)?;
        area.draw(&Text::new(variant.to_owned(), (36, y + 21), style)).map_err(one_line)?;
    }
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "pixels")]
fn draw_bars<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    title: &str,
    unit: &str,
    bars: &[Bar],
    logarithmic: bool,
) -> Outcome<()> {
    const LEFT: i32 = 480;
    let width = WIDTH.cast_signed();
    let text = |size: i32, index: HPos| {
        let style: TextStyle<'_> = (FONT, size).into();
        style.color(&BLACK).pos(Pos::new(index, VPos::Center))
    };
    let label = |label: &str, at: (i32, i32), size: i32, index: HPos| {
        area.draw(&Text::new(label.to_owned(), at, text(size, index))).map_err(one_line)
    };
    label(title, (width / 2, 30), 28, HPos::Center)?;
    label(&format!("{unit}; black: minimum to maximum"), (LEFT, 64), 18, HPos::Left)?;
    let scale = |value: f64| if logarithmic { (value.max(1.0) * 1.3).ln() } else { value };
    let max = bars.iter().map(|bar| scale(bar.max)).fold(f64::MIN_POSITIVE, f64::max);
    let along =
        |value: f64| LEFT + (scale(value) / max * f64::from(width - LEFT - 110)).max(1.0) as i32;
    for (index, bar) in (0..).zip(bars) {
        let top = TOP + index * BAR;
        let middle = top + BAR / 2;
        let corners = [(LEFT, top + BAR / 6), (along(bar.median), top + BAR - BAR / 6)];
        area.draw(&Rectangle::new(corners, bar.colour.filled())).map_err(one_line)?;
        // A line from minimum to maximum, with ends that stay visible where they meet.
        let (min, max) = (along(bar.min), along(bar.max));
        let across = |x: i32| vec![(x, middle - 6), (x, middle + 6)];
        for path in [vec![(min, middle), (max, middle)], across(min), across(max)] {
            area.draw(&PathElement::new(path, BLACK.stroke_width(2))).map_err(one_line)?;
        }
        label(&bar.label, (LEFT - 10, middle), 18, HPos::Right)?;
        label(&short(bar.median), (max + 10, middle), 18, HPos::Left)?;
    }
    Ok(())
}
