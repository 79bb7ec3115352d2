//! The results of a run: sections of rows of figures.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::figures::Figure;
use crate::implementation::{Implementation, Kind, Outcome};
use crate::slice::{Slice, UncontendedSlice};

/// The results of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) quick: bool,
    /// Whether only some scenarios were selected.
    pub(crate) partial: bool,
    pub(crate) repetitions: usize,
    pub(crate) machine: Vec<(String, String)>,
    pub(crate) seconds: f64,
    /// The load average before the run.
    pub(crate) load_before: f64,
    pub(crate) sections: Vec<Section>,
    pub(crate) thresholds: Vec<Threshold>,
}

/// The results of one scenario on one store.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Section {
    /// Such as `redis/queue-8`; the argument of `--only`.
    pub(crate) id: String,
    pub(crate) title: String,
    /// What is measured, and how to read it.
    pub(crate) text: String,
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<Row>,
    /// The machine's noise before the section: a PING in µs, and the load average.
    pub(crate) ping: Option<f64>,
    pub(crate) load_average: f64,
    /// How long it took, with what was measured at the same time.
    pub(crate) seconds: f64,
}

/// Returns the position of a section in the report: by store, then by scenario.
pub(crate) fn sort_key(id: &str) -> [Option<usize>; 2] {
    const STORES: &[&str] = &["redis", "redlock", "postgres", "file", "memory"];
    const SCENARIOS: &[&str] = &[
        "uncontended",
        "keys",
        "queue-8",
        "queue-64",
        "queue-512",
        "fairness",
        "wake",
        "idle",
        "held",
        "takeover",
        "readers",
        "semantics",
        "scaling-keys",
        "scaling-waiters",
        "five",
    ];
    let (store, scenario) = id.split_once('/').unwrap_or((id, ""));
    [(STORES, store), (SCENARIOS, scenario)]
        .map(|(all, one)| all.iter().position(|known| *known == one))
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Column {
    pub(crate) key: String,
    pub(crate) title: String,
    pub(crate) better: Better,
}

/// Which direction of a figure is better. Implementations are compared by the first column that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum Better {
    Low,
    High,
    Neither,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) implementation: String,
    pub(crate) kind: String,
    pub(crate) figures: BTreeMap<String, Figure>,
    pub(crate) notes: Vec<String>,
    pub(crate) overlaps: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
}

/// A limit that Lockkeeper is measured against, and the measured figure.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Threshold {
    pub(crate) name: String,
    pub(crate) figure: Figure,
    /// Such as `≤ 2`.
    pub(crate) limit: String,
    pub(crate) met: bool,
}

impl Section {
    pub(crate) fn new(id: &str, title: &str, text: &str) -> Self {
        Self {
            id: id.into(),
            title: title.into(),
            text: text.split_whitespace().collect::<Vec<_>>().join(" "),
            columns: Vec::new(),
            rows: Vec::new(),
            ping: None,
            load_average: f64::NAN,
            seconds: 0.0,
        }
    }

    pub(crate) fn column(mut self, key: &str, title: &str, better: Better) -> Self {
        self.columns.push(Column { key: key.into(), title: title.into(), better });
        self
    }

    /// Returns the row of an implementation, and adds it if it is missing.
    pub(crate) fn row(&mut self, implementation: &Implementation) -> &mut Row {
        let label = implementation.label();
        let index =
            self.rows.iter().position(|row| row.implementation == label).unwrap_or_else(|| {
                self.rows.push(Row {
                    implementation: label,
                    kind: format!("{:?}", implementation.kind),
                    figures: BTreeMap::new(),
                    notes: implementation.caveats.iter().map(ToString::to_string).collect(),
                    overlaps: 0,
                    errors: 0,
                    first_error: None,
                });
                self.rows.len() - 1
            });
        &mut self.rows[index]
    }

    pub(crate) fn find(&self, implementation: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.implementation == implementation)
    }

    /// Returns Lockkeeper's row; of several, the one with the defaults.
    pub(crate) fn ours(&self) -> Option<&Row> {
        let mut ours = self.rows.iter().filter(|row| row.is_ours());
        let default = ours.clone().find(|row| row.implementation.ends_with("(default)"));
        default.or_else(|| ours.next())
    }

    /// Returns the column that implementations are compared by.
    pub(crate) fn main_column(&self) -> Option<&Column> {
        self.columns.iter().find(|column| column.better != Better::Neither)
    }

    /// Adds a column with a figure of each row divided by that of the row `unit`.
    pub(crate) fn in_units_of(&mut self, key: &str, unit: &str, title: &str) {
        let Some(unit) = self.find(unit).and_then(|row| row.figures.get(key)).cloned() else {
            return;
        };
        let ratio = format!("{key}-ratio");
        for row in &mut self.rows {
            if let Some(figure) = row.figures.get(key) {
                let figure = figure.divided_by(&unit);
                row.figures.insert(ratio.clone(), figure);
            }
        }
        let better = Better::Neither;
        self.columns.push(Column { key: ratio, title: title.into(), better });
    }
}

impl Row {
    /// Records the value of a repetition, if it succeeded.
    pub(crate) fn record(&mut self, key: &str, repetition: usize, value: Option<f64>) {
        self.figures.entry(key.to_owned()).or_default().record(repetition, value);
    }

    /// Records a value that is measured once.
    pub(crate) fn record_once(&mut self, key: &str, value: Option<f64>) {
        self.record(key, 0, value);
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Adds the errors and overlaps of a slice.
    pub(crate) fn add_errors(&mut self, slice: &Slice) {
        self.overlaps += slice.overlaps;
        self.errors += slice.errors;
        self.first_error = self.first_error.take().or_else(|| slice.first_error.clone());
    }

    /// Adds the errors of an uncontended slice.
    pub(crate) fn add_uncontended_errors(&mut self, slice: &UncontendedSlice) {
        self.errors += slice.errors;
        self.first_error = self.first_error.take().or_else(|| slice.first_error.clone());
    }

    /// Returns the value, or records the error in the row.
    pub(crate) fn ok_or_record<T>(&mut self, outcome: Outcome<T>) -> Option<T> {
        outcome.map_err(|error| self.failed(error)).ok()
    }

    pub(crate) fn failed(&mut self, error: String) {
        self.errors += 1;
        self.first_error.get_or_insert(error);
    }

    /// Returns all notes of the row: overlaps and errors first.
    pub(crate) fn all_notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.overlaps > 0 {
            notes.push(format!("**granted twice: {} overlaps**", self.overlaps));
        }
        if self.errors > 0 {
            let first = self.first_error.as_deref().unwrap_or("?");
            notes.push(format!("{} errors, the first: {first}", self.errors));
        }
        notes.extend(self.notes.iter().cloned());
        notes
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.kind == format!("{:?}", Kind::Ours)
    }

    pub(crate) fn is_raw(&self) -> bool {
        self.kind == format!("{:?}", Kind::Raw)
    }
}

impl Report {
    pub(crate) fn section(&self, id: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.id == id)
    }

    pub(crate) fn figure(&self, section: &str, implementation: &str, key: &str) -> Option<&Figure> {
        let figure = self.section(section)?.find(implementation)?.figures.get(key)?;
        figure.median().map(|_| figure)
    }
}
