//! Many tasks, and one lock.

use std::time::Duration;

use lockkeeper_testkit::server::RedisServer;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::figures::{mean, quantile};
use crate::load;
use crate::make::{Make, Outcome, fresh};
use crate::report::{Better, Row, Section};
use crate::slice::{self, Contend, Plan, Slice};

/// Measures hand-overs between so many tasks. With a Redis server: what they cost it.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    tasks: usize,
    server: Option<&RedisServer>,
) -> Outcome<()> {
    let mut section = section
        .column("rate", "hand-overs per second", Better::High)
        .column("turns", "turns per second", Better::Neither)
        .column("mean", "mean µs", Better::Neither)
        .column("p99", "p99 µs", Better::Neither)
        .column("least", "turns of the least served", Better::Neither)
        .column("most", "of the most served", Better::Neither)
        .column("longest", "longest wait, ms", Better::Neither);
    if server.is_some() {
        section = section.column("requests", "requests per hand-over", Better::Neither).column(
            "server",
            "server µs per hand-over",
            Better::Neither,
        );
    }
    bench.begin(&mut section).await?;
    for _ in 0..REPETITIONS {
        for make in shuffled(makes) {
            if make.most_tasks < tasks {
                section.row(make).note(format!("not run with {tasks} tasks"));
                continue;
            }
            let slice = one(bench, make, tasks, server, bench.ms(600, 60)).await?;
            put(section.row(make), &slice);
        }
    }
    bench.end(section);
    Ok(())
}

/// How evenly turns are dealt: one slice of ours, so long that a turn is less than the bar.
pub(crate) async fn fairness(
    bench: &mut Bench,
    section: Section,
    make: &Make,
    tasks: &[usize],
) -> Outcome<()> {
    let mut section = section;
    for tasks in tasks {
        let title = format!("most less least, of the most, %, {tasks} tasks");
        section = section.column(&tasks.to_string(), &title, Better::Low);
    }
    bench.begin(&mut section).await?;
    for tasks in tasks {
        let time = if *tasks > 100 { bench.ms(11_000, 1200) } else { bench.ms(2800, 500) };
        let slice = one(bench, make, *tasks, None, time).await?;
        let least = *slice.turns.iter().min().unwrap_or(&0) as f64;
        let most = *slice.turns.iter().max().unwrap_or(&0) as f64;
        let row = section.row(make);
        row.put(&tasks.to_string(), Some((most - least) / most * 100.0));
        row.note(format!("{tasks} tasks: {least} to {most} turns"));
        row.wrongs_of(&slice);
    }
    bench.end(section);
    Ok(())
}

/// Hand-overs over numbers of tasks.
pub(crate) async fn scaling(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    points: &[usize],
) -> Outcome<()> {
    let mut section = section;
    for point in points {
        section = section.column(&point.to_string(), &format!("{point} waiters"), Better::High);
    }
    bench.begin(&mut section).await?;
    for _ in 0..REPETITIONS {
        for point in points {
            for make in shuffled(makes) {
                if make.most_tasks >= *point {
                    let slice = one(bench, make, *point, None, bench.ms(300, 40)).await?;
                    let row = section.row(make);
                    row.put(&point.to_string(), Some(slice.hand_overs_per_second()));
                    row.wrongs_of(&slice);
                }
            }
        }
    }
    bench.end(section);
    Ok(())
}

async fn one(
    bench: &Bench,
    make: &Make,
    tasks: usize,
    server: Option<&RedisServer>,
    time: Duration,
) -> Outcome<Slice> {
    let locks = make.locks(&fresh("queue"), tasks).await?;
    let read = server.map(|server| move || load::of_redis(server, make));
    let meter = read.as_ref().map(|read| read as &load::Meter<'_>);
    // So long that everybody has had a place before it counts.
    let warm = bench.ms(if tasks > 64 { 300 } else { 100 }, if tasks > 64 { 60 } else { 25 });
    Ok(slice::run(locks, Plan { contend: Contend::One, readers: 0, warm, time, meter }).await)
}

fn put(row: &mut Row, slice: &Slice) {
    let count = slice.hand_overs.len() as f64;
    row.put("rate", Some(slice.hand_overs_per_second()));
    row.put("turns", Some(slice.turns_per_second()));
    row.put("mean", mean(&slice.hand_overs));
    row.put("p99", quantile(&slice.hand_overs, 0.99));
    row.put("least", slice.turns.iter().min().map(|turns| *turns as f64));
    row.put("most", slice.turns.iter().max().map(|turns| *turns as f64));
    row.put("longest", Some(slice.longest.as_secs_f64() * 1e3));
    if count > 0.0 && slice.load.requests > 0.0 {
        row.put("requests", Some(slice.load.requests / count));
        row.put("server", Some(slice.load.processor * 1e6 / count));
    }
    row.wrongs_of(slice);
}
