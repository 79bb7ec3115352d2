//! A majority of five servers.

use std::time::Duration;

use lockkeeper_testkit::server::RedlockNodes;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::figures::quantile;
use crate::make::{Lock, Make, Outcome, fresh};
use crate::makes;
use crate::report::{Better, Row, Section};
use crate::slice::alone;

const TTL: Duration = Duration::from_secs(30);

/// Measures lock and release with all five well and with two of them stopped, in turn.
pub(crate) async fn run(bench: &mut Bench, section: Section) -> Outcome<()> {
    let mut section = section
        .column("single", "one server, p50 µs", Better::Neither)
        .column("well", "all well, p50 µs", Better::Low)
        .column("stopped", "two stopped, p50 µs", Better::Low)
        .column("keys", "keys left after 100 releases", Better::Neither);
    bench.begin(&mut section).await?;
    let nodes = RedlockNodes::start(5).map_err(|error| error.to_string())?;
    let urls: Vec<String> = nodes.nodes().iter().map(|node| node.url()).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let makes = makes::on_redlock(&urls, TTL).await?;
    let singles = makes::on_redlock(&urls[..1], TTL).await?;
    let time = bench.ms(200, 30);
    // So long a make may take to answer while two servers do not.
    let patience = bench.ms(1500, 150);
    for repetition in 0..REPETITIONS {
        for place in shuffled(0..makes.len()) {
            let row = section.row(&makes[place]);
            for (key, make) in [("single", &singles[place]), ("well", &makes[place])] {
                let lock = make.lock(&fresh(key), 0).await;
                let Some(lock) = row.worked(lock) else { continue };
                let slice = alone(&*lock, time, patience).await;
                row.put(key, repetition, quantile(&slice.times, 0.5));
                row.wrongs_of_alone(&slice);
            }
        }
        let mut locks: Vec<(&Make, Box<dyn Lock>)> = Vec::new();
        for make in shuffled(&makes) {
            let lock = make.lock(&fresh("stopped"), 0).await;
            locks.extend(section.row(make).worked(lock).map(|lock| (make, lock)));
        }
        for node in &nodes.nodes()[3..] {
            node.stop();
        }
        for (make, lock) in &locks {
            let slice = alone(&**lock, time, patience).await;
            let row = section.row(make);
            row.put("stopped", repetition, quantile(&slice.times, 0.5));
            if let Some(error) = &slice.first_error {
                row.note(format!("with two stopped: {error}"));
            }
        }
        for node in &nodes.nodes()[3..] {
            node.cont();
        }
        tokio::time::sleep(bench.ms(200, 100)).await;
    }
    for make in &makes {
        let left = leftovers(section.row(make), &nodes, make).await;
        let _ = section.row(make).worked(left);
    }
    bench.end(section);
    Ok(())
}

/// What locks that were all released leave on the servers.
async fn leftovers(row: &mut Row, nodes: &RedlockNodes, make: &Make) -> Outcome<()> {
    for node in nodes.nodes() {
        node.command(&["FLUSHALL"]);
    }
    let mut done = 0_u32;
    for _ in 0..100 {
        let lock = make.lock(&fresh("left"), 0).await?;
        let slice = alone(&*lock, Duration::ZERO, Duration::from_secs(5)).await;
        done += u32::try_from(slice.times.len()).unwrap_or(0);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let sizes = nodes.nodes().iter().map(|node| node.command(&["DBSIZE"]));
    let left: f64 = sizes.filter_map(|size| size.parse::<f64>().ok()).sum();
    row.put_once("keys", Some(left));
    if done < 100 {
        row.note(format!("only {done} of 100 locks were taken and released"));
    }
    if left > 0.0 {
        row.note(format!("**leaks: {left} keys on the servers after {done} releases**"));
    }
    Ok(())
}
