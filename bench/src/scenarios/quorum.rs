//! A majority of five servers.

use std::time::Duration;

use lockkeeper_testkit::server::RedlockNodes;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::figures::quantile;
use crate::implementation::{Implementation, Lock, Outcome, unique_name};
use crate::implementations;
use crate::report::{Better, Row, Section};
use crate::slice::run_uncontended;

const TTL: Duration = Duration::from_secs(30);

/// Measures lock and release with all five servers healthy and with two of them stopped, alternately.
pub(crate) async fn run(bench: &mut Bench, section: Section) -> Outcome<()> {
    let mut section = section
        .column("single", "one server, p50 µs", Better::Neither)
        .column("healthy", "all healthy, p50 µs", Better::Low)
        .column("stopped", "two stopped, p50 µs", Better::Low)
        .column("keys", "keys left after 100 releases", Better::Neither);
    bench.begin(&mut section).await?;
    let nodes = RedlockNodes::start(5).map_err(|error| error.to_string())?;
    let urls: Vec<String> = nodes.nodes().iter().map(|node| node.url()).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let implementations = implementations::on_redlock(&urls, TTL).await?;
    let singles = implementations::on_redlock(&urls[..1], TTL).await?;
    let time = bench.ms(200, 30);
    // The timeout for implementations that hang while two servers do not answer.
    let timeout = bench.ms(1500, 150);
    for repetition in 0..REPETITIONS {
        for index in shuffled(0..implementations.len()) {
            let row = section.row(&implementations[index]);
            for (key, implementation) in
                [("single", &singles[index]), ("healthy", &implementations[index])]
            {
                let lock = implementation.lock(&unique_name(key), 0).await;
                let Some(lock) = row.ok_or_record(lock) else { continue };
                let slice = run_uncontended(&*lock, time, timeout).await;
                row.record(key, repetition, quantile(&slice.times, 0.5));
                row.add_uncontended_errors(&slice);
            }
        }
        let mut locks: Vec<(&Implementation, Box<dyn Lock>)> = Vec::new();
        for implementation in shuffled(&implementations) {
            let lock = implementation.lock(&unique_name("stopped"), 0).await;
            locks.extend(
                section.row(implementation).ok_or_record(lock).map(|lock| (implementation, lock)),
            );
        }
        for node in &nodes.nodes()[3..] {
            node.stop();
        }
        for (implementation, lock) in &locks {
            let slice = run_uncontended(&**lock, time, timeout).await;
            let row = section.row(implementation);
            row.record("stopped", repetition, quantile(&slice.times, 0.5));
            if let Some(error) = &slice.first_error {
                row.note(format!("with two stopped: {error}"));
            }
        }
        for node in &nodes.nodes()[3..] {
            node.cont();
        }
        tokio::time::sleep(bench.ms(200, 100)).await;
    }
    for implementation in &implementations {
        let left = leftovers(section.row(implementation), &nodes, implementation).await;
        let _ = section.row(implementation).ok_or_record(left);
    }
    bench.end(section);
    Ok(())
}

/// Counts the keys that 100 released locks leave on the servers.
async fn leftovers(
    row: &mut Row,
    nodes: &RedlockNodes,
    implementation: &Implementation,
) -> Outcome<()> {
    for node in nodes.nodes() {
        node.command(&["FLUSHALL"]);
    }
    let mut done = 0_u32;
    for _ in 0..100 {
        let lock = implementation.lock(&unique_name("left"), 0).await?;
        let slice = run_uncontended(&*lock, Duration::ZERO, Duration::from_secs(5)).await;
        done += u32::try_from(slice.times.len()).unwrap_or(0);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let sizes = nodes.nodes().iter().map(|node| node.command(&["DBSIZE"]));
    let left: f64 = sizes.filter_map(|size| size.parse::<f64>().ok()).sum();
    row.record_once("keys", Some(left));
    if done < 100 {
        row.note(format!("only {done} of 100 locks were taken and released"));
    }
    if left > 0.0 {
        row.note(format!("**leaks: {left} keys on the servers after {done} releases**"));
    }
    Ok(())
}
