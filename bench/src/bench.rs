//! One benchmark run: its lengths, its selection of scenarios, and the sections measured so far.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;

use crate::figures::{Figure, median, short};
use crate::implementation::Outcome;
use crate::load;
use crate::report::{Row, Section};

/// How often each figure is measured. The repetitions of all implementations are interleaved.
pub(crate) const REPETITIONS: usize = 5;

pub(crate) struct Bench {
    pub(crate) quick: bool,
    only: Vec<String>,
    /// The connection for the PINGs that estimate the machine's noise.
    connection: MultiplexedConnection,
    pub(crate) sections: Vec<Section>,
    began: Instant,
}

impl Bench {
    pub(crate) fn new(quick: bool, only: Vec<String>, connection: MultiplexedConnection) -> Self {
        Self { quick, only, connection, sections: Vec::new(), began: Instant::now() }
    }

    /// Returns whether a section was selected, by its id or by a prefix of it.
    pub(crate) fn is_selected(&self, id: &str) -> bool {
        let of = |only: &String| id == only || id.starts_with(&format!("{only}/"));
        self.only.is_empty()
            || self.only.iter().any(|only| of(only) || only.starts_with(&format!("{id}/")))
    }

    /// Returns the duration for a full or for a quick run, both given in milliseconds.
    pub(crate) fn ms(&self, full: u64, quick: u64) -> Duration {
        Duration::from_millis(if self.quick { quick } else { full })
    }

    pub(crate) fn either<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Begins a section: records the machine's noise before it.
    pub(crate) async fn begin(&mut self, section: &mut Section) -> Outcome<()> {
        eprintln!("{} …", section.id);
        self.began = Instant::now();
        section.ping = self.ping().await?;
        section.load_average = load::average();
        Ok(())
    }

    /// Returns the median of 200 PINGs, in µs.
    pub(crate) async fn ping(&mut self) -> Outcome<Option<f64>> {
        let mut times = Vec::new();
        for _ in 0..200 {
            times.push(ping(&mut self.connection).await?);
        }
        Ok(median(&times))
    }

    /// Returns the median of PINGs that are each sent after a pause, whose range is given in µs.
    pub(crate) async fn ping_after(&mut self, pause: std::ops::Range<u64>) -> Outcome<f64> {
        let mut times = Vec::new();
        for _ in 0..self.either(30, 8) {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(pause.clone()))).await;
            times.push(ping(&mut self.connection).await?);
        }
        median(&times).ok_or_else(|| "no time".into())
    }

    /// Ends a section and prints the main figure of each row.
    pub(crate) fn end(&mut self, section: Section) {
        if let Some(column) = section.main_column() {
            eprintln!("  {}", column.title);
            for row in &section.rows {
                let figure = row.figures.get(&column.key).map_or_else(|| "–".into(), Figure::show);
                eprintln!("  {:<55} {figure}  {}", row.implementation, problems(row));
            }
        }
        let mut section = section;
        // Rows are added in the order in which they are measured, which is random.
        section.rows.sort_by_key(|row| (!row.is_ours(), row.implementation.clone()));
        section.seconds = self.began.elapsed().as_secs_f64();
        eprintln!("  {:.1} s", section.seconds);
        self.sections.push(section);
    }
}

fn problems(row: &Row) -> String {
    let mut problems = Vec::new();
    if row.overlaps > 0 {
        problems.push(format!("{} OVERLAPS", row.overlaps));
    }
    if let Some(error) = &row.first_error {
        problems.push(format!("{} errors: {error}", short(row.errors as f64)));
    }
    problems.join(", ")
}

/// Returns how long a PING takes, in µs.
pub(crate) async fn ping(connection: &mut MultiplexedConnection) -> Outcome<f64> {
    let start = Instant::now();
    let answer = connection.send_packed_command(&redis::cmd("PING")).await;
    answer.map_err(crate::implementation::one_line)?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// Returns the items in random order, so that no implementation always runs after the same other one.
pub(crate) fn shuffled<T>(things: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut things: Vec<T> = things.into_iter().collect();
    fastrand::shuffle(&mut things);
    things
}
