//! What ten thousand held locks cost: memory for each, and processor time for their renewal.
//!
//! `cargo run --release --example ten_thousand_holds -p lockkeeper -- --ttl-secs 30 --seconds 30`
//!
//! The memory is all that the process has grown by: the guards, their names, the engine's side and
//! the memory store's. A lock is renewed every third of its ttl, so measure for a multiple of that.
//! The figures come from `/proc`, so without Linux there are none.
#![allow(clippy::print_stdout, reason = "an example shows what happens")]

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
    println!("{HOLDS} locks taken in {:.0?}", start.elapsed());

    // Each gets its tender in the background. That is part of the memory, and not of the renewals.
    tokio::time::sleep(Duration::from_millis(300)).await;
    if let (Some(before), Some(after)) = (before, resident_bytes()) {
        let each = after.saturating_sub(before) / u64::from(HOLDS);
        println!("{each} bytes for each, with its name and its place in the store");
    }

    let expected = f64::from(HOLDS) * 3.0 / ttl.as_secs_f64();
    println!("{expected:.0} renewals a second expected, with a ttl of {ttl:?}");
    let (start, used) = (Instant::now(), processor_seconds());
    tokio::time::sleep(seconds).await;
    if let (Some(before), Some(after)) = (used, processor_seconds()) {
        let percent = 100.0 * (after - before) / start.elapsed().as_secs_f64();
        println!("{percent:.2} % of a core used for them, over {seconds:?}");
    }

    let held = guards.iter().filter(|guard| guard.is_held()).count();
    println!("{held} still held");
    assert_eq!(held, guards.len(), "some were lost");

    let start = Instant::now();
    guards.into_iter().for_each(drop::<Guard>);
    keeper.close().await;
    println!("all given back in {:.0?}", start.elapsed());
    Ok(())
}

/// The ttl, and how long to measure.
fn arguments() -> Result<(Duration, Duration), Box<dyn Error>> {
    let (mut ttl, mut seconds) = (30, 30);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{argument} needs a number"))?;
        match argument.as_str() {
            "--ttl-secs" => ttl = value.parse()?,
            "--seconds" => seconds = value.parse()?,
            _ => return Err(format!("unknown {argument}: --ttl-secs N and --seconds N").into()),
        }
    }
    Ok((Duration::from_secs(ttl), Duration::from_secs(seconds)))
}

/// How much memory the process has at the moment.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * PAGE_BYTES)
}

/// How much processor time the process has used so far, its own and the kernel's for it.
fn processor_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program's name in brackets, which may contain blanks.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks = |field: usize| fields.split_whitespace().nth(field)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND)
}
