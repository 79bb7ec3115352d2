//! The results of a run: sections of rows of figures.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::figures::Figure;
use crate::implementation::{Implementation, Kind, Outcome};
use crate::slice::{Slice, UncontendedSlice};

/// The results of a run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) quick: bool,
    /// Whether only some scenarios were selected.
    pub(crate) partial: bool,
    pub(crate) repetitions: usize,
    pub(crate) machine: Vec<(String, String)>,
    /// The versions of the compared crates.
    pub(crate) crates: Vec<(String, String)>,
    pub(crate) seconds: f64,
    /// The load average before the run.
    pub(crate) load_before: Option<f64>,
    pub(crate) sections: Vec<Section>,
    /// Derived from the sections, and not read from a file.
    #[serde(skip_deserializing)]
    pub(crate) thresholds: Vec<Threshold>,
}

/// The results of one scenario on one store.
#[derive(Debug, Clone, Serialize, Deserialize)]
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
    pub(crate) load_average: Option<f64>,
    /// How long the section took, including others that were measured concurrently.
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

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Column {
    pub(crate) key: String,
    pub(crate) title: String,
    pub(crate) better: Better,
}

impl Column {
    pub(crate) fn has_direction(&self) -> bool {
        self.better != Better::Neither
    }
}

/// Which direction of a figure is better. Implementations are compared by the first column that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Better {
    Low,
    High,
    Neither,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
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
            load_average: None,
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
        self.columns.iter().find(|column| column.has_direction())
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

    /// Returns whether the row only serves as a unit: it has as many round trips as a lock, but no lock.
    pub(crate) fn is_unit(&self) -> bool {
        const UNITS: [&str; 4] = [
            crate::stores::PINGS,
            crate::stores::OUR_PINGS,
            crate::stores::SELECTS,
            crate::scenarios::wake::UNIT,
        ];
        UNITS.contains(&self.implementation.as_str())
    }

    /// Returns whether a note says that the implementation violates exclusion, loses locks or leaks them.
    pub(crate) fn breaks(&self) -> bool {
        self.all_notes().iter().any(|note| note.starts_with("**"))
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::stores::{OUR_PINGS, PINGS, RAW_FILE, RAW_POSTGRES, RAW_REDIS, SELECTS};
    use Better::{High, Low, Neither};

    /// Sections of a full run: the id, and the columns that are compared or have a threshold.
    const SECTIONS: &[(&str, &[(&str, Better)])] = &[
        ("redis/uncontended", &[("p50", Low), ("p50-ratio", Neither)]),
        ("redis/keys", &[("rate", High), ("rate-ratio", Neither)]),
        ("redis/queue-8", QUEUE),
        ("redis/queue-64", QUEUE),
        ("redis/queue-512", QUEUE),
        ("redis/fairness", &[("8", Neither), ("64", Neither), ("512", Neither)]),
        ("redis/wake", &[("p50", Low), ("p50-ratio", Neither)]),
        ("redis/idle", &[("rate", Low), ("client", Low)]),
        ("redis/held", &[("requests", Neither), ("client", Low), ("bytes", Low)]),
        ("redis/takeover", &[("ms", Low)]),
        ("redis/readers", &[("reads", High)]),
        ("redis/semantics", &[]),
        ("redis/scaling-keys", KEYS),
        ("redis/scaling-waiters", SCALING),
        ("redlock/five", &[("single", Neither), ("healthy", Low), ("stopped", Low)]),
        ("postgres/uncontended", &[("p50", Low), ("p50-ratio", Neither)]),
        ("postgres/keys", &[("rate", High)]),
        ("postgres/queue-8", QUEUE),
        ("postgres/queue-64", QUEUE),
        ("postgres/queue-512", QUEUE),
        ("postgres/wake", &[("p50", Low)]),
        ("postgres/idle", &[("connections", Low), ("rate", Low), ("client", Low)]),
        (
            "postgres/held",
            &[("requests", Neither), ("client", Neither), ("client-each", Low), ("bytes", Low)],
        ),
        ("postgres/takeover", &[("ms", Low)]),
        ("postgres/readers", &[("reads", High)]),
        ("postgres/scaling-keys", POSTGRES_KEYS),
        ("postgres/scaling-waiters", SCALING),
        ("file/uncontended", &[("p50", Low), ("p50-ratio", Neither)]),
        ("file/keys", &[("rate", High)]),
        ("file/queue-8", QUEUE),
        ("file/queue-64", QUEUE),
        ("file/queue-512", QUEUE),
        ("file/wake", &[("p50", Low)]),
        ("file/idle", &[("client", Low), ("threads", Low)]),
        ("file/held", &[("client", Low), ("bytes", Low)]),
        ("file/takeover", &[("ms", Low)]),
        ("file/readers", &[("reads", High)]),
        ("file/scaling-keys", SCALING),
        ("file/scaling-waiters", SCALING),
        ("memory/uncontended", &[("ns", Low)]),
        ("memory/queue-8", QUEUE),
        ("memory/queue-64", QUEUE),
        ("memory/queue-512", QUEUE),
    ];
    const QUEUE: &[(&str, Better)] = &[("rate", High)];
    const KEYS: &[(&str, Better)] =
        &[("1", High), ("8", High), ("64", High), ("256", High), ("1024", High)];
    const POSTGRES_KEYS: &[(&str, Better)] =
        &[("1", High), ("4", High), ("16", High), ("64", High), ("256", High)];
    const SCALING: &[(&str, Better)] =
        &[("2", High), ("8", High), ("64", High), ("512", High), ("2048", High)];

    fn add_row(section: &mut Section, implementation: &str, values: &[(&str, f64)]) {
        let ours = implementation.starts_with("lockkeeper");
        let kind = if ours { Kind::Ours } else { Kind::Peer };
        let figure = |value: f64| Figure { repetitions: vec![Some(value); 5] };
        let figures = values.iter().map(|(key, value)| ((*key).to_owned(), figure(*value)));
        section.rows.push(Row {
            implementation: implementation.into(),
            kind: format!("{kind:?}"),
            figures: figures.collect(),
            notes: Vec::new(),
            overlaps: 0,
            errors: 0,
            first_error: None,
        });
    }

    fn empty_section(id: &str) -> Section {
        Section::new(id, &id.replace('/', ": "), "What is measured.")
    }

    /// Returns a section with one column, in which a high figure is better.
    pub(crate) fn section(id: &str, key: &str, rows: &[(&str, f64)]) -> Section {
        let mut section = empty_section(id).column(key, "per second", High);
        for (implementation, value) in rows {
            add_row(&mut section, implementation, &[(key, *value)]);
        }
        section
    }

    pub(crate) fn report_of(sections: Vec<Section>) -> Report {
        Report {
            quick: false,
            partial: false,
            repetitions: 5,
            machine: vec![("CPU".into(), "test machine".into())],
            crates: vec![("peer".into(), "1.0.0".into())],
            seconds: 60.0,
            load_before: Some(0.1),
            sections,
            thresholds: Vec::new(),
        }
    }

    /// Returns a report with every section of a full run, in which Lockkeeper loses every comparison.
    pub(crate) fn full_report() -> Report {
        let sections = SECTIONS.iter().map(|(id, columns)| {
            let mut section = empty_section(id);
            for (key, better) in *columns {
                section = section.column(key, key, *better);
            }
            let values = |low: f64, high: f64| -> Vec<(&str, f64)> {
                let value = |better| if better == High { high } else { low };
                columns.iter().map(|(key, better)| (*key, value(*better))).collect()
            };
            let ours = match id.split('/').next() {
                Some("postgres" | "file") => {
                    &["lockkeeper, fence off", "lockkeeper, fence on (default)"][..]
                }
                _ => &["lockkeeper"],
            };
            for implementation in ours {
                // Also columns that are not compared but have a threshold.
                let mut values = values(2.0, 1.0);
                values.push(("requests", 2.0));
                add_row(&mut section, implementation, &values);
            }
            let others = ["peer", RAW_REDIS, RAW_POSTGRES, RAW_FILE, PINGS, OUR_PINGS, SELECTS];
            for implementation in others {
                add_row(&mut section, implementation, &values(1.0, 2.0));
            }
            section
        });
        report_of(sections.collect())
    }

    #[test]
    fn a_report_that_is_saved_and_read_again_is_the_same() {
        let report = full_report();
        let json = serde_json::to_string(&report).unwrap();
        let read: Report = serde_json::from_str(&json).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), json);
    }

    #[test]
    fn every_section_of_a_full_run_has_a_position() {
        for (id, _) in SECTIONS {
            assert!(sort_key(id).iter().all(Option::is_some), "{id}");
        }
    }
}
