//! Measures the cost of 10,000 held locks: memory per lock, and CPU time for renewals.
//!
//! `cargo run --release --example ten_thousand_holds -p lockkeeper -- --ttl-secs 30 --seconds 30`
//!
//! The memory is the growth of the process: guards, names, the state of the engine and that of the memory store. A lock
//! is renewed every third of its TTL, so measure for a multiple of that. The figures come from `/proc`, so they are
//! printed on Linux only.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::time::{Duration, Instant};

use lockkeeper::{Guard, Keeper, Memory};

const HOLDS: u32 = 10_000;
/// `getconf PAGESIZE` and `getconf CLK_TCK` on all but a few Linux systems.
const PAGE_BYTES: u64 = 4096;
const TICKS_PER_SECOND: f64 = 100.0;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (ttl, seconds) = arguments()?;
    let keeper = Keeper::new(Memory::new()).ttl(ttl);
    keeper.mutex("warm-up").lock().await?.release().await?;

    let before = resident_bytes();
    let start = Instant::now();
    let mut guards = Vec::new();
    for n in 0..HOLDS {
        guards.push(keeper.mutex(format!("orders/{n:05}")).lock().await?);
    }
    println!("{HOLDS} locks acquired in {:.0?}", start.elapsed());

    // Wait for the background tasks of the holds. They count as memory, not as renewals.
    tokio::time::sleep(Duration::from_millis(300)).await;
    if let (Some(before), Some(after)) = (before, resident_bytes()) {
        let each = after.saturating_sub(before) / u64::from(HOLDS);
        println!("{each} bytes per lock, including its name and its entry in the store");
    }

    let expected = f64::from(HOLDS) * 3.0 / ttl.as_secs_f64();
    println!("{expected:.0} renewals per second expected, with a TTL of {ttl:?}");
    let (start, used) = (Instant::now(), processor_seconds());
    tokio::time::sleep(seconds).await;
    if let (Some(before), Some(after)) = (used, processor_seconds()) {
        let percent = 100.0 * (after - before) / start.elapsed().as_secs_f64();
        println!("{percent:.2} % of a core used for renewals, over {seconds:?}");
    }

    let held = guards.iter().filter(|guard| guard.is_held()).count();
    println!("{held} still held");
    assert_eq!(held, guards.len(), "some locks were lost");

    let start = Instant::now();
    guards.into_iter().for_each(drop::<Guard>);
    keeper.close().await;
    println!("all released in {:.0?}", start.elapsed());
    Ok(())
}

/// Returns the TTL and how long to measure.
fn arguments() -> Result<(Duration, Duration), Box<dyn Error>> {
    let (mut ttl, mut seconds) = (30, 30);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{argument} needs a number"))?;
        match argument.as_str() {
            "--ttl-secs" => ttl = value.parse()?,
            "--seconds" => seconds = value.parse()?,
            _ => {
                return Err(format!(
                    "unknown argument {argument}: use --ttl-secs N and --seconds N"
                )
                .into());
            }
        }
    }
    Ok((Duration::from_secs(ttl), Duration::from_secs(seconds)))
}

/// Returns the resident memory of the process.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * PAGE_BYTES)
}

/// Returns the CPU time that the process has used, in user and kernel mode.
fn processor_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program name in parentheses, which may contain spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks = |field: usize| fields.split_whitespace().nth(field)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND)
}
