//! Figures: one value per repetition, and statistics over them.

use serde::{Deserialize, Serialize};

use crate::report::Better;

/// A measured quantity, with one entry per repetition. A failed repetition leaves its entry empty, so that later ones keep their index.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) repetitions: Vec<Option<f64>>,
}

impl Figure {
    /// Records the value of a repetition.
    pub(crate) fn record(&mut self, repetition: usize, value: Option<f64>) {
        if self.repetitions.len() <= repetition {
            self.repetitions.resize(repetition + 1, None);
        }
        self.repetitions[repetition] = value.filter(|value| value.is_finite());
    }

    /// Returns the value of a repetition, if it succeeded.
    pub(crate) fn at(&self, repetition: usize) -> Option<f64> {
        self.repetitions.get(repetition).copied().flatten()
    }

    /// Returns the values of the repetitions that succeeded.
    pub(crate) fn measured(&self) -> Vec<f64> {
        self.repetitions.iter().copied().flatten().collect()
    }

    pub(crate) fn median(&self) -> Option<f64> {
        median(&self.measured())
    }

    pub(crate) fn min(&self) -> Option<f64> {
        self.measured().into_iter().reduce(f64::min)
    }

    pub(crate) fn max(&self) -> Option<f64> {
        self.measured().into_iter().reduce(f64::max)
    }

    /// Formats the median, with the minimum and the maximum in brackets.
    pub(crate) fn show(&self) -> String {
        let (Some(median), Some(min), Some(max)) = (self.median(), self.min(), self.max()) else {
            return "–".into();
        };
        if self.repetitions.len() == 1 {
            return short(median);
        }
        format!("{} ({}–{})", short(median), short(min), short(max))
    }

    /// Divides by another figure, repetition by repetition: both values of a repetition were measured under the same noise.
    pub(crate) fn divided_by(&self, other: &Self) -> Self {
        let mut ratio = Self::default();
        for repetition in 0..self.repetitions.len() {
            let both = self.at(repetition).zip(other.at(repetition));
            ratio.record(repetition, both.map(|(this, other)| this / other));
        }
        ratio
    }

    /// Returns the factor by which this figure is better than another, if it is better in every repetition. A repetition that failed is not better.
    pub(crate) fn beats(&self, other: &Self, better: Better) -> Option<f64> {
        let is_better = |repetition| match (self.at(repetition), other.at(repetition), better) {
            (_, _, Better::Neither) | (None, _, _) => false,
            (Some(_), None, _) => true,
            (Some(this), Some(other), Better::Low) => this < other,
            (Some(this), Some(other), Better::High) => this > other,
        };
        let repetitions = self.repetitions.len().max(other.repetitions.len());
        let (this, other) = (self.median()?, other.median()?);
        let factor = if better == Better::Low { other / this } else { this / other };
        (0..repetitions).all(is_better).then_some(factor)
    }
}

pub(crate) fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// Returns the value below which the given part of the values lies.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index into some thousands"
)]
pub(crate) fn quantile(values: &[f64], part: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| !value.is_nan()).collect();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let index = last as f64 * part;
    let (low, high) = (sorted[index.floor() as usize], sorted[index.ceil() as usize]);
    Some(low + (high - low) * index.fract())
}

#[expect(clippy::cast_precision_loss, reason = "counts of some thousands")]
pub(crate) fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Formats a number with about three digits.
pub(crate) fn short(value: f64) -> String {
    let size = value.abs();
    if size >= 10_000.0 {
        let mut whole = format!("{value:.0}");
        let mut index = whole.len();
        while index > 3 && whole.as_bytes()[index - 4].is_ascii_digit() {
            index -= 3;
            whole.insert(index, ',');
        }
        return whole;
    }
    let digits = match size {
        _ if size == 0.0 || size >= 100.0 => 0,
        _ if size >= 10.0 => 1,
        _ if size >= 0.1 => 2,
        _ => 4,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(repetitions: &[Option<f64>]) -> Figure {
        let mut figure = Figure::default();
        for (repetition, value) in repetitions.iter().enumerate() {
            figure.record(repetition, *value);
        }
        figure
    }

    #[test]
    fn a_repetition_that_failed_does_not_shift_the_later_ones_in_ratios() {
        let ours = figure(&[Some(10.0), None, Some(30.0)]);
        let theirs = figure(&[Some(5.0), Some(1.0), Some(10.0)]);
        assert_eq!(ours.divided_by(&theirs).repetitions, [Some(2.0), None, Some(3.0)]);
        assert_eq!(theirs.divided_by(&ours).repetitions, [Some(0.5), None, Some(1.0 / 3.0)]);
    }

    #[test]
    fn a_skipped_repetition_keeps_its_index() {
        let mut figure = Figure::default();
        figure.record(2, Some(7.0));
        assert_eq!(figure.repetitions, [None, None, Some(7.0)]);
        assert_eq!((figure.at(1), figure.at(2), figure.at(3)), (None, Some(7.0), None));
    }

    #[test]
    fn medians_and_spreads_skip_failed_repetitions() {
        let figure = figure(&[Some(3.0), None, Some(1.0), Some(2.0), None]);
        assert_eq!(figure.median(), Some(2.0));
        assert_eq!((figure.min(), figure.max()), (Some(1.0), Some(3.0)));
        assert_eq!(figure.show(), "2.00 (1.00–3.00)");
    }

    #[test]
    fn a_figure_without_values_is_a_dash() {
        assert_eq!(figure(&[None, None]).show(), "–");
        assert_eq!(figure(&[]).show(), "–");
    }

    #[test]
    fn a_figure_measured_once_has_no_spread() {
        assert_eq!(figure(&[Some(4.0)]).show(), "4.00");
    }

    #[test]
    fn a_division_by_zero_leaves_an_empty_entry() {
        let ratio = figure(&[Some(1.0), Some(0.0)]).divided_by(&figure(&[Some(0.0), Some(0.0)]));
        assert_eq!(ratio.repetitions, [None, None]);
    }

    #[test]
    fn a_figure_that_is_better_in_every_repetition_beats_another() {
        let (low, high) = (figure(&[Some(1.0), Some(2.0)]), figure(&[Some(2.0), Some(4.0)]));
        assert_eq!(low.beats(&high, Better::Low), Some(2.0));
        assert_eq!(high.beats(&low, Better::High), Some(2.0));
        assert_eq!(low.beats(&high, Better::High), None);
        assert_eq!(low.beats(&high, Better::Neither), None);
    }

    #[test]
    fn a_figure_that_is_worse_once_does_not_beat_another() {
        let (mixed, other) = (figure(&[Some(1.0), Some(5.0)]), figure(&[Some(2.0), Some(4.0)]));
        assert_eq!(mixed.beats(&other, Better::Low), None);
    }

    #[test]
    fn a_figure_that_failed_once_is_beaten_and_does_not_beat() {
        let (whole, failed) = (figure(&[Some(2.0), Some(2.0)]), figure(&[None, Some(1.0)]));
        assert_eq!(failed.beats(&whole, Better::Low), None);
        assert_eq!(whole.beats(&failed, Better::High), Some(2.0));
        // A missing last repetition counts as failed.
        let failed = figure(&[Some(1.0)]);
        assert_eq!(failed.beats(&whole, Better::Low), None);
    }

    #[test]
    fn an_empty_entry_is_null_in_json() {
        let json = serde_json::to_string(&figure(&[Some(1.5), None])).unwrap_or_default();
        assert_eq!(json, r#"{"repetitions":[1.5,null]}"#);
    }

    #[test]
    fn numbers_are_short() {
        let all = [0.0, 0.0026, 0.5, 12.34, 123.4, 1234.0, 12_345.0, 1_234_567.0].map(short);
        assert_eq!(all, ["0", "0.0026", "0.50", "12.3", "123", "1234", "12,345", "1,234,567"]);
    }
}
