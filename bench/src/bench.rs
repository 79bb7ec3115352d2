//! A run: how long and how often, and what it has found so far.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;

use crate::figures::{Figure, median, short};
use crate::load;
use crate::make::Outcome;
use crate::report::{Row, Section};

/// How often everything is measured, in turn with everything else.
pub(crate) const REPETITIONS: usize = 5;

pub(crate) struct Bench {
    pub(crate) quick: bool,
    only: Vec<String>,
    /// Somebody to ask for the weather.
    connection: MultiplexedConnection,
    pub(crate) sections: Vec<Section>,
    began: Instant,
}

impl Bench {
    pub(crate) fn new(quick: bool, only: Vec<String>, connection: MultiplexedConnection) -> Self {
        Self { quick, only, connection, sections: Vec::new(), began: Instant::now() }
    }

    /// Whether a section was asked for, by its name or by how that begins.
    pub(crate) fn wants(&self, id: &str) -> bool {
        let of = |only: &String| id == only || id.starts_with(&format!("{only}/"));
        self.only.is_empty()
            || self.only.iter().any(|only| of(only) || only.starts_with(&format!("{id}/")))
    }

    /// One of two lengths, in milliseconds.
    pub(crate) fn ms(&self, full: u64, quick: u64) -> Duration {
        Duration::from_millis(if self.quick { quick } else { full })
    }

    pub(crate) fn either<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Begins a section: looks at the weather.
    pub(crate) async fn begin(&mut self, section: &mut Section) -> Outcome<()> {
        eprintln!("{} …", section.id);
        self.began = Instant::now();
        section.ping = self.ping().await?;
        section.load_average = load::average();
        Ok(())
    }

    /// What a PING takes now, in µs: the median of some.
    pub(crate) async fn ping(&mut self) -> Outcome<Option<f64>> {
        let mut times = Vec::new();
        for _ in 0..200 {
            times.push(ping(&mut self.connection).await?);
        }
        Ok(median(&times))
    }

    /// The same, each after a pause of so many µs.
    pub(crate) async fn ping_after(&mut self, pause: std::ops::Range<u64>) -> Outcome<f64> {
        let mut times = Vec::new();
        for _ in 0..self.either(30, 8) {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(pause.clone()))).await;
            times.push(ping(&mut self.connection).await?);
        }
        median(&times).ok_or_else(|| "no time".into())
    }

    /// Ends a section, and says what the main figure of each is.
    pub(crate) fn end(&mut self, section: Section) {
        if let Some(column) = section.main_column() {
            eprintln!("  {}", column.title);
            for row in &section.rows {
                let figure = row.figures.get(&column.key).map_or_else(|| "–".into(), Figure::show);
                eprintln!("  {:<55} {figure}  {}", row.make, wrongs(row));
            }
        }
        let mut section = section;
        // They were added in the order in which they happened to be measured.
        section.rows.sort_by_key(|row| (!row.is_ours(), row.make.clone()));
        section.seconds = self.began.elapsed().as_secs_f64();
        eprintln!("  {:.1} s", section.seconds);
        self.sections.push(section);
    }
}

fn wrongs(row: &Row) -> String {
    let mut wrongs = Vec::new();
    if row.overlaps > 0 {
        wrongs.push(format!("{} OVERLAPS", row.overlaps));
    }
    if let Some(error) = &row.first_error {
        wrongs.push(format!("{} errors: {error}", short(row.errors as f64)));
    }
    wrongs.join(", ")
}

/// How long a PING takes, in µs.
pub(crate) async fn ping(connection: &mut MultiplexedConnection) -> Outcome<f64> {
    let start = Instant::now();
    let answer = connection.send_packed_command(&redis::cmd("PING")).await;
    answer.map_err(crate::make::told)?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// In another order each time: nobody always comes after the same.
pub(crate) fn shuffled<T>(things: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut things: Vec<T> = things.into_iter().collect();
    fastrand::shuffle(&mut things);
    things
}
