//! Figures: one for each repetition, and what they have in common.

use serde::Serialize;

/// What was measured, once in each repetition.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Figure {
    pub(crate) repetitions: Vec<f64>,
}

impl Figure {
    pub(crate) fn push(&mut self, value: f64) {
        self.repetitions.push(value);
    }

    pub(crate) fn median(&self) -> Option<f64> {
        median(&self.repetitions)
    }

    pub(crate) fn least(&self) -> Option<f64> {
        self.repetitions.iter().copied().reduce(f64::min)
    }

    pub(crate) fn most(&self) -> Option<f64> {
        self.repetitions.iter().copied().reduce(f64::max)
    }

    /// The median, with the least and most in brackets.
    pub(crate) fn show(&self) -> String {
        let (Some(median), Some(least), Some(most)) = (self.median(), self.least(), self.most())
        else {
            return "–".into();
        };
        if self.repetitions.len() == 1 {
            return short(median);
        }
        format!("{} ({}–{})", short(median), short(least), short(most))
    }

    /// This divided by another, repetition by repetition: both had the same weather.
    pub(crate) fn per(&self, other: &Self) -> Self {
        let pairs = self.repetitions.iter().zip(&other.repetitions);
        Self { repetitions: pairs.map(|(a, b)| a / b).collect() }
    }
}

pub(crate) fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The value below which this part of all lies.
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
    let place = last as f64 * part;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    Some(low + (high - low) * place.fract())
}

#[expect(clippy::cast_precision_loss, reason = "counts of some thousands")]
pub(crate) fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// A number in three digits or so.
pub(crate) fn short(value: f64) -> String {
    let size = value.abs();
    if size >= 10_000.0 {
        let mut whole = format!("{value:.0}");
        let mut place = whole.len();
        while place > 3 && whole.as_bytes()[place - 4].is_ascii_digit() {
            place -= 3;
            whole.insert(place, ',');
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
