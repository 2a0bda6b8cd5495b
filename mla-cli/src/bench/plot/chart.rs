//! One chart: curves over two axes, with a legend beside them that covers no data.

use plotters::coord::combinators::BindKeyPoints;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::axis::{Axis, tick};
use super::{Area, Drawn};

/// Minimum height of a chart, and height of a line of its legend, in pixels.
const HEIGHT: u32 = 560;
const LINE: u32 = 20;

/// Width of the legend, and the space above its first line, in pixels.
const LEGEND: u32 = 330;
const ABOVE_LEGEND: u32 = 50;

/// Okabe and Ito's colours, which people with any colour vision can distinguish.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(80, 80, 80),
];

pub(super) struct Chart {
    pub caption: String,
    pub x: Axis,
    pub y: Axis,
    pub curves: Vec<Curve>,
    /// Labels beside points.
    pub names: Vec<((f64, f64), String)>,
}

pub(super) struct Curve {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    pub form: Form,
}

impl Curve {
    pub(super) fn new(name: impl Into<String>, points: Vec<(f64, f64)>, form: Form) -> Self {
        let name = name.into();
        Self { name, points, form }
    }
}

/// The form in which a curve is drawn.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Form {
    /// A line without points, since nothing was measured at its ends.
    Line,
    /// Points without a line between them.
    Points,
    /// Measured points and a line through them.
    Both,
}

impl Chart {
    /// Makes a chart without labels beside points.
    pub(super) fn new(caption: impl Into<String>, x: Axis, y: Axis, curves: Vec<Curve>) -> Self {
        Self {
            caption: caption.into(),
            x,
            y,
            curves,
            names: Vec::new(),
        }
    }

    /// Returns the height in pixels. A long legend makes the chart higher.
    pub(super) fn height(&self) -> u32 {
        HEIGHT.max(ABOVE_LEGEND + LINE * (self.curves.len() as u32 + 1))
    }

    pub(super) fn draw<B: DrawingBackend>(&self, area: &Area<'_, B>) -> Drawn
    where
        B::ErrorType: 'static,
    {
        let (width, _) = area.dim_in_pixel();
        let (left, legend) = area.split_horizontally(width.saturating_sub(LEGEND));
        let [x, y] = [&self.x, &self.y].map(|axis| {
            axis.range
                .clone()
                .log_scale()
                .with_key_points(axis.ticks.clone())
        });
        let mut chart = ChartBuilder::on(&left)
            .caption(&self.caption, ("sans-serif", 22))
            .margin(14)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_desc(&self.x.name)
            .y_desc(&self.y.name)
            .x_label_formatter(&tick)
            .y_label_formatter(&tick)
            .label_style(("sans-serif", 15))
            .draw()?;
        let base = left.get_base_pixel();
        let pixel = |point: &(f64, f64)| {
            let (x, y) = chart.backend_coord(point);
            (x - base.0, y - base.1)
        };
        for (index, curve) in self.curves.iter().enumerate() {
            let style = CurveStyle(index);
            style.draw(&left, curve.form, curve.points.iter().map(pixel).collect())?;
            style.explain(&legend, curve)?;
        }
        // A name goes to the right or to the left of its point, if it covers nothing there.
        let (plot, _) = chart.plotting_area().get_pixel_range();
        let (start, end) = (plot.start - base.0, plot.end - base.0);
        let points = self.names.iter().map(|(point, _)| pixel(point));
        let mut taken: Vec<Pixels> = points
            .map(|(x, y)| Pixels::new(x - 4, y - 4, 8, 8))
            .collect();
        for (point, name) in &self.names {
            let (x, y) = pixel(point);
            let style = ("sans-serif", 12).into_text_style(&left);
            let (width, height) = left.estimate_text_size(name, &style)?;
            let (width, height) = (width as i32, height as i32);
            let sides =
                [x + 6, x - 6 - width].map(|x| Pixels::new(x, y - height / 2, width, height));
            let is_free = |side: &&Pixels| {
                side.0 >= start && side.2 <= end && !taken.iter().any(|it| it.meets(side))
            };
            if let Some(side) = sides.iter().find(is_free) {
                left.draw(&Text::new(name.as_str(), (side.0, side.1), style))?;
                taken.push(*side);
            }
        }
        Ok(())
    }
}

/// A rectangle of pixels: left, top, right, bottom.
#[derive(Clone, Copy)]
struct Pixels(i32, i32, i32, i32);

impl Pixels {
    fn new(x: i32, y: i32, width: i32, height: i32) -> Self {
        Self(x, y, x + width, y + height)
    }

    fn meets(&self, other: &Self) -> bool {
        self.0 < other.2 && other.0 < self.2 && self.1 < other.3 && other.1 < self.3
    }
}

/// The look of the curve with this number: its colour and, if all colours are used, the shape of
/// its points.
#[derive(Clone, Copy)]
struct CurveStyle(usize);

impl CurveStyle {
    fn colour(self) -> RGBColor {
        COLOURS[self.0 % COLOURS.len()]
    }

    fn draw<B: DrawingBackend>(
        self,
        area: &Area<'_, B>,
        form: Form,
        points: Vec<(i32, i32)>,
    ) -> Drawn
    where
        B::ErrorType: 'static,
    {
        if form != Form::Line {
            for &point in &points {
                self.point(area, point)?;
            }
        }
        if form != Form::Points {
            area.draw(&PathElement::new(points, self.colour().stroke_width(2)))?;
        }
        Ok(())
    }

    fn point<B: DrawingBackend>(self, area: &Area<'_, B>, at: (i32, i32)) -> Drawn
    where
        B::ErrorType: 'static,
    {
        let (filled, line) = (self.colour().filled(), self.colour().stroke_width(2));
        match self.0 / COLOURS.len() % 4 {
            0 => area.draw(&Circle::new(at, 4, filled))?,
            1 => area.draw(&TriangleMarker::new(at, 6, filled))?,
            2 => area.draw(&Cross::new(at, 4, line))?,
            _ => area.draw(&Circle::new(at, 5, line))?,
        }
        Ok(())
    }

    /// Draws the curve's line of the legend.
    fn explain<B: DrawingBackend>(self, legend: &Area<'_, B>, curve: &Curve) -> Drawn
    where
        B::ErrorType: 'static,
    {
        let y = (ABOVE_LEGEND + LINE * self.0 as u32) as i32;
        let sample = match curve.form {
            Form::Points => vec![(19, y)],
            Form::Line => vec![(10, y), (28, y)],
            Form::Both => vec![(10, y), (19, y), (28, y)],
        };
        let (point, line) = match curve.form {
            Form::Both => (vec![sample[1]], Form::Line),
            form => (Vec::new(), form),
        };
        self.draw(legend, line, sample)?;
        self.draw(legend, Form::Points, point)?;
        let style = ("sans-serif", 14)
            .into_text_style(legend)
            .pos(Pos::new(HPos::Left, VPos::Center));
        legend.draw(&Text::new(curve.name.as_str(), (36, y), style))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::bench::plot::{WIDTH, draw_on};

    fn svg(curves: Vec<Curve>, names: Vec<((f64, f64), String)>) -> String {
        let x = Axis::chosen("x", &[1.0, 100.0, 1e4], &[]);
        let mut chart = Chart::new("", x, Axis::found("y", &[1.0, 1e4]), curves);
        chart.names = names;
        let mut text = String::new();
        let root = SVGBackend::with_string(&mut text, (WIDTH, chart.height()));
        draw_on(root.into_drawing_area(), &[chart]).unwrap();
        text
    }

    fn curve(name: &str, y: f64, form: Form) -> Curve {
        Curve::new(name, vec![(1.0, y), (100.0, y), (1e4, y)], form)
    }

    /// Returns horizontal positions of the elements that begin with `element`.
    fn places(svg: &str, element: &str, attribute: &str) -> Vec<u32> {
        let found = svg.split(element).skip(1);
        found
            .map(|rest| {
                let (_, from) = rest.split_once(attribute).unwrap();
                from.split('"').next().unwrap().parse().unwrap()
            })
            .collect()
    }

    #[test]
    fn a_legend_covers_no_point_and_no_point_lies_in_it() {
        let names = ["one", "another", "a third"];
        let curves = names.map(|name| curve(name, 1e4, Form::Both));
        let svg = svg(Vec::from(curves), Vec::new());
        let legend = WIDTH - LEGEND;
        let circles = places(&svg, "<circle ", "cx=\"");
        let (samples, points): (Vec<u32>, Vec<u32>) = circles.iter().partition(|x| **x >= legend);
        assert_eq!((samples.len(), points.len()), (3, 9));
        for name in names {
            let (before, _) = svg.split_once(&format!("\n{name}\n")).unwrap();
            let (_, own) = before.rsplit_once("<text ").unwrap();
            let x = places(&format!("<text {own}"), "<text ", "x=\"")[0];
            assert!(x > legend, "{name} begins at {x}");
        }
    }

    /// Returns the names that a chart with these named points shows.
    fn written(names: Vec<((f64, f64), String)>) -> Vec<String> {
        let svg = svg(Vec::new(), names.clone());
        let names = names.into_iter().map(|(_, name)| name);
        names
            .filter(|name| svg.contains(&format!("\n{name}\n")))
            .collect()
    }

    #[test]
    fn a_name_covers_no_name_and_no_point() {
        let at = |x, y, name: &str| ((x, y), name.to_owned());
        let far = vec![at(10.0, 10.0, "a name"), at(10.0, 1000.0, "far")];
        assert_eq!(written(far), ["a name", "far"]);
        // The third name has no room on either side.
        let row = vec![
            at(10.0, 10.0, "right of it"),
            at(9.0, 10.0, "left"),
            at(9.5, 10.0, "between"),
        ];
        assert_eq!(written(row), ["right of it", "left"]);
        // The axis ends to the right of the point.
        let edge = vec![at(1e4, 10.0, "a long name at the end of its axis")];
        assert_eq!(written(edge.clone()), [edge[0].1.clone()]);
    }

    #[test]
    fn nothing_is_marked_where_nothing_was_measured() {
        let marks = |form| {
            places(
                &svg(vec![curve("", 50.0, form)], Vec::new()),
                "<circle ",
                "cx=\"",
            )
            .len()
        };
        // There are three points, and one more in the legend.
        assert_eq!(marks(Form::Both), 4);
        assert_eq!(marks(Form::Points), 4);
        assert_eq!(marks(Form::Line), 0);
    }

    #[test]
    fn twenty_eight_curves_look_different() {
        let looks: BTreeSet<String> = (0..28)
            .map(|number| {
                let mut text = String::new();
                let area = SVGBackend::with_string(&mut text, (100, 100)).into_drawing_area();
                CurveStyle(number).point(&area, (50, 50)).unwrap();
                drop(area);
                text
            })
            .collect();
        assert_eq!(looks.len(), 28);
    }
}
