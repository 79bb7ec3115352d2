//! Measures how much longer `lockkeeper run x -- true` takes than `true`, on the file store.
//!
//! ```text
//! cargo bench -p lockkeeper-cli
//! ```

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The number of measurements of each.
const ROUNDS: usize = 200;

fn main() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = format!("file:{}", dir.path().display());
    let bare = || Command::new("true");
    let wrapped = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockkeeper"));
        command.args(["run", "x", "--", "true"]).env("LOCKKEEPER_STORE", &store);
        command
    };
    let time = |mut command: Command| {
        let start = Instant::now();
        let status = command.stdin(Stdio::null()).status().expect("the command runs");
        assert!(status.success());
        start.elapsed()
    };
    // Alternates, so that other load on the machine affects both alike.
    let (mut alone, mut under) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(time(bare()));
        under.push(time(wrapped()));
    }
    let (alone, under) = (percentiles(alone), percentiles(under));
    println_all(&[
        format!("true                       p50 {:>9.2?}  p90 {:>9.2?}", alone.0, alone.1),
        format!("lockkeeper run x -- true   p50 {:>9.2?}  p90 {:>9.2?}", under.0, under.1),
        format!(
            "difference                 p50 {:>9.2?}  (threshold: 10 ms)",
            under.0.saturating_sub(alone.0)
        ),
    ]);
}

fn percentiles(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() * 9 / 10])
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn println_all(lines: &[String]) {
    for line in lines {
        println!("{line}");
    }
}
