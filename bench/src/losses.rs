//! Comparison of Lockkeeper with the other implementations: which figures of theirs are better.

use std::collections::BTreeMap;

use crate::figures::{Figure, short};
use crate::report::{Column, Report, Row, Section};

/// A figure of another implementation that is better than Lockkeeper's in every repetition.
pub(crate) struct Loss<'a> {
    pub(crate) section: &'a Section,
    column: &'a Column,
    row: &'a Row,
    ours: &'a Figure,
    theirs: &'a Figure,
    /// How many times better. Infinite if their figure is 0.
    factor: f64,
}

/// The outcome of all comparisons.
pub(crate) struct Comparison<'a> {
    /// How many figures were compared.
    pub(crate) compared: usize,
    pub(crate) losses: Vec<Loss<'a>>,
}

/// Compares every figure that has a better direction with that of Lockkeeper with its defaults.
pub(crate) fn compare(report: &Report) -> Comparison<'_> {
    let mut comparison = Comparison { compared: 0, losses: Vec::new() };
    for section in &report.sections {
        let Some(ours) = section.ours() else { continue };
        for column in section.columns.iter().filter(|column| column.has_direction()) {
            let Some(ours) = ours.figures.get(&column.key) else { continue };
            for row in section.rows.iter().filter(|row| !row.is_ours() && !row.is_unit()) {
                let Some(theirs) = row.figures.get(&column.key) else { continue };
                comparison.compared += 1;
                if let Some(factor) = theirs.beats(ours, column.better) {
                    comparison.losses.push(Loss { section, column, row, ours, theirs, factor });
                }
            }
        }
    }
    comparison
}

impl Comparison<'_> {
    /// Returns the largest loss of each scenario and kind of figure. Numbers of tasks, keys or waiters are one scenario.
    pub(crate) fn largest(&self) -> Vec<&Loss<'_>> {
        let mut largest: BTreeMap<_, (usize, &Loss<'_>)> = BTreeMap::new();
        for (index, loss) in self.losses.iter().enumerate() {
            let best = largest.entry(loss.group()).or_insert((index, loss));
            if loss.rank() > best.1.rank() {
                best.1 = loss;
            }
        }
        let mut largest: Vec<_> = largest.into_values().collect();
        largest.sort_by_key(|(index, _)| *index);
        largest.into_iter().map(|(_, loss)| loss).collect()
    }
}

impl Loss<'_> {
    /// Returns the scenario and the figure, without the number of tasks, keys or waiters.
    fn group(&self) -> (&str, &str) {
        let is_number = |text: &str| text.parse::<u32>().is_ok();
        let scenario = match self.section.id.rsplit_once('-') {
            Some((scenario, number)) if is_number(number) => scenario,
            _ => &self.section.id,
        };
        (scenario, if is_number(&self.column.key) { "" } else { &self.column.key })
    }

    /// Orders losses of one group: implementations that work first, then those with a finite factor, then by factor.
    fn rank(&self) -> (bool, bool, f64) {
        (!self.row.breaks(), self.factor.is_finite(), self.factor)
    }

    /// Returns the row of a Markdown table. `link` is the page with the table of the section, or empty.
    pub(crate) fn table_row(&self, link: &str) -> String {
        let breaks = if self.row.breaks() { " (**breaks**: see its notes)" } else { "" };
        let factor =
            if self.factor.is_finite() { format!("{:.2} ×", self.factor) } else { "–".into() };
        let show = |figure: &Figure| figure.median().map_or_else(|| "–".into(), short);
        format!(
            "| [{}]({link}#{}), {} | {}{breaks} | {} | {} | {factor} |",
            self.section.title,
            anchor(&self.section.title),
            self.column.title,
            self.row.implementation,
            show(self.theirs),
            show(self.ours),
        )
    }
}

/// Returns the anchor that Markdown renderers give a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{full_report, report_of, section};
    use crate::stores::{OUR_PINGS, PINGS};

    #[test]
    fn a_heading_has_the_anchor_that_forges_give_it() {
        assert_eq!(anchor("Redis: take-over after kill -9"), "redis-take-over-after-kill--9");
        assert_eq!(anchor("Files: 8 tasks, one lock"), "files-8-tasks-one-lock");
    }

    #[test]
    fn numbers_of_tasks_are_one_scenario_and_its_largest_loss_is_shown() {
        let report = report_of(vec![
            section("redis/queue-8", "rate", &[("lockkeeper", 1.0), ("peer", 2.0)]),
            section("redis/queue-64", "rate", &[("lockkeeper", 1.0), ("peer", 3.0)]),
        ]);
        let comparison = compare(&report);
        assert_eq!((comparison.compared, comparison.losses.len()), (2, 2));
        let largest = comparison.largest();
        assert_eq!(largest.len(), 1);
        assert!(largest[0].table_row("t.md").contains("3.00 ×"));
    }

    #[test]
    fn an_implementation_that_breaks_does_not_hide_one_that_works() {
        let mut queue =
            section("redis/queue-8", "rate", &[("lockkeeper", 1.0), ("good", 2.0), ("bad", 9.0)]);
        queue.rows[2].overlaps = 1;
        let report = report_of(vec![queue]);
        let comparison = compare(&report);
        assert_eq!(comparison.losses.len(), 2);
        assert!(comparison.largest()[0].table_row("").contains("| good |"));
    }

    #[test]
    fn units_are_not_compared() {
        let report = report_of(vec![section(
            "redis/uncontended",
            "rate",
            &[("lockkeeper", 1.0), (PINGS, 9.0), (OUR_PINGS, 9.0)],
        )]);
        assert_eq!(compare(&report).compared, 0);
    }

    #[test]
    fn a_full_report_has_losses_in_every_compared_section() {
        let report = full_report();
        let comparison = compare(&report);
        assert_eq!(comparison.compared, comparison.losses.len());
        assert!(comparison.largest().len() > 30);
    }
}
