//! What came of it: sections of rows of figures.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::figures::Figure;
use crate::make::{Kind, Make, Outcome};
use crate::slice::{Alone, Slice};

/// All that a run has found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) quick: bool,
    /// Whether only some works were asked for.
    pub(crate) part: bool,
    pub(crate) repetitions: usize,
    pub(crate) machine: Vec<(String, String)>,
    pub(crate) seconds: f64,
    /// The load average before it began.
    pub(crate) load_before: f64,
    pub(crate) sections: Vec<Section>,
    pub(crate) bars: Vec<Bar>,
}

/// One kind of work.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Section {
    /// Such as `redis/queue-8`; what `--only` names.
    pub(crate) id: String,
    pub(crate) title: String,
    /// What was done, and how to read it.
    pub(crate) text: String,
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<Row>,
    /// The weather before it: PING in µs, and the load average.
    pub(crate) ping: Option<f64>,
    pub(crate) load_average: f64,
    /// How long it took, with what was measured at the same time.
    pub(crate) seconds: f64,
}

/// Where a section stands in the report: by store, and then by work, whatever was measured first.
pub(crate) fn place(id: &str) -> [Option<usize>; 2] {
    const STORES: &[&str] = &["redis", "redlock", "postgres", "file", "memory"];
    const WORKS: &[&str] = &[
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
        "manners",
        "scaling-keys",
        "scaling-waiters",
        "five",
    ];
    let (store, work) = id.split_once('/').unwrap_or((id, ""));
    [(STORES, store), (WORKS, work)].map(|(all, one)| all.iter().position(|known| *known == one))
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Column {
    pub(crate) key: String,
    pub(crate) title: String,
    pub(crate) better: Better,
}

/// Which figures are good ones. The first column that says it is the one that makes are compared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum Better {
    Low,
    High,
    Neither,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) make: String,
    pub(crate) kind: String,
    pub(crate) figures: BTreeMap<String, Figure>,
    pub(crate) notes: Vec<String>,
    pub(crate) overlaps: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
}

/// What was promised, and what is.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Bar {
    pub(crate) what: String,
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

    /// The row of a make, which is added if it is not there.
    pub(crate) fn row(&mut self, make: &Make) -> &mut Row {
        let label = make.label();
        let place = self.rows.iter().position(|row| row.make == label).unwrap_or_else(|| {
            self.rows.push(Row {
                make: label,
                kind: format!("{:?}", make.kind),
                figures: BTreeMap::new(),
                notes: make.caveats.iter().map(ToString::to_string).collect(),
                overlaps: 0,
                errors: 0,
                first_error: None,
            });
            self.rows.len() - 1
        });
        &mut self.rows[place]
    }

    pub(crate) fn find(&self, make: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.make == make)
    }

    /// Lockkeeper's row; where there are several, the one with its defaults.
    pub(crate) fn ours(&self) -> Option<&Row> {
        let mut ours = self.rows.iter().filter(|row| row.is_ours());
        let default = ours.clone().find(|row| row.make.ends_with("(default)"));
        default.or_else(|| ours.next())
    }

    /// The column that makes are compared by.
    pub(crate) fn main_column(&self) -> Option<&Column> {
        self.columns.iter().find(|column| column.better != Better::Neither)
    }

    /// Adds a column with what each has, in units of what one of them has.
    pub(crate) fn in_units_of(&mut self, key: &str, unit: &str, title: &str) {
        let Some(unit) = self.find(unit).and_then(|row| row.figures.get(key)).cloned() else {
            return;
        };
        let ratio = format!("{key}-ratio");
        for row in &mut self.rows {
            if let Some(figure) = row.figures.get(key) {
                let figure = figure.per(&unit);
                row.figures.insert(ratio.clone(), figure);
            }
        }
        let better = Better::Neither;
        self.columns.push(Column { key: ratio, title: title.into(), better });
    }
}

impl Row {
    /// Takes down what a repetition came to, if it did.
    pub(crate) fn put(&mut self, key: &str, repetition: usize, value: Option<f64>) {
        self.figures.entry(key.to_owned()).or_default().put(repetition, value);
    }

    /// The same for what is measured once.
    pub(crate) fn put_once(&mut self, key: &str, value: Option<f64>) {
        self.put(key, 0, value);
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Takes over what went wrong in a slice.
    pub(crate) fn wrongs_of(&mut self, slice: &Slice) {
        self.overlaps += slice.overlaps;
        self.errors += slice.errors;
        self.first_error = self.first_error.take().or_else(|| slice.first_error.clone());
    }

    /// The same for one that was alone.
    pub(crate) fn wrongs_of_alone(&mut self, alone: &Alone) {
        self.errors += alone.errors;
        self.first_error = self.first_error.take().or_else(|| alone.first_error.clone());
    }

    /// What came of a try. What went wrong is taken down.
    pub(crate) fn worked<T>(&mut self, outcome: Outcome<T>) -> Option<T> {
        outcome.map_err(|error| self.failed(error)).ok()
    }

    pub(crate) fn failed(&mut self, error: String) {
        self.errors += 1;
        self.first_error.get_or_insert(error);
    }

    /// All that must be said beside its figures.
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

    pub(crate) fn figure(&self, section: &str, make: &str, key: &str) -> Option<&Figure> {
        let figure = self.section(section)?.find(make)?.figures.get(key)?;
        figure.median().map(|_| figure)
    }
}
