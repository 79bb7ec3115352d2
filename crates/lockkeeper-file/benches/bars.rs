//! The bars of the file store, each beside a raw baseline of the same run.
//!
//! `cargo bench -p lockkeeper-file`. It needs the example that holds locks in another process, which
//! `cargo build --release --examples -p lockkeeper-file` makes; without, the last bar is left out and it says so.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench")]

use std::fs::OpenOptions;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lockkeeper_core::Keeper;
use lockkeeper_file::File;
use tokio::runtime::Runtime;

/// How often each is measured, in turn with the others.
const ROUNDS: usize = 31;
/// How many locks a round has.
const LOCKS: u32 = 2000;
/// How many holders are killed.
const KILLS: usize = 100;

fn main() {
    let runtime = Runtime::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    uncontended(&runtime, "on disk", disk.path());
    if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
        uncontended(&runtime, "on tmpfs", memory.path());
    }
    kills(&runtime, disk.path());
}

fn uncontended(runtime: &Runtime, place: &str, dir: &Path) {
    let plain = File::options().fence(false).open(dir).unwrap();
    let fenced = File::open(dir).unwrap();
    let path = plain.path("orders/42");
    let [plain, fenced] =
        [plain, fenced].map(|store| runtime.block_on(async { Keeper::new(store) }));
    let raw = || {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        file.try_lock().unwrap();
    };
    let locked = |keeper: &Keeper| {
        let mutex = keeper.mutex("orders/42");
        runtime.block_on(async {
            for _ in 0..LOCKS {
                mutex.lock().await.unwrap().release().await.unwrap();
            }
        });
    };
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        let works: [&dyn Fn(); 3] =
            [&|| (0..LOCKS).for_each(|_| raw()), &|| locked(&plain), &|| locked(&fenced)];
        for (times, work) in times.iter_mut().zip(works) {
            let start = Instant::now();
            work();
            times.push(start.elapsed() / LOCKS);
        }
    }
    let [raw, plain, fenced] = times.map(median);
    let ratio = |time: Duration| time.as_secs_f64() / raw.as_secs_f64();
    println!("uncontended lock + release, {place}, median of {ROUNDS} rounds of {LOCKS}:");
    println!("  raw open + flock + close  {raw:>10.2?}");
    println!(
        "  fence=off                 {plain:>10.2?}  {:.2} x raw {}",
        ratio(plain),
        bar(ratio(plain) <= 3.0, "at most 3 x")
    );
    println!("  with fences               {fenced:>10.2?}  {:.2} x raw", ratio(fenced));
}

fn bar(kept: bool, bar: &str) -> String {
    format!("({}: {bar})", if kept { "kept" } else { "MISSED" })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// From the kill of a holder to the grant of the one who waits.
fn kills(runtime: &Runtime, dir: &Path) {
    let bench = std::env::current_exe().unwrap();
    let helper = bench.ancestors().nth(2).unwrap().join("examples/file_helper");
    if !helper.exists() {
        println!("kill -9: NOT MEASURED, {} is missing", helper.display());
        return;
    }
    let keeper = runtime.block_on(async { Keeper::new(File::open(dir).unwrap()) });
    let mut times = Vec::new();
    for _ in 0..KILLS {
        let mut holder = hold(&helper, dir);
        let mutex = keeper.mutex("killed");
        let waiter = runtime.spawn(async move {
            let guard = mutex.lock().await.unwrap();
            let entered = Instant::now();
            guard.release().await.unwrap();
            entered
        });
        // Long enough for the waiter to wait.
        std::thread::sleep(Duration::from_millis(20));
        let start = Instant::now();
        holder.kill().unwrap();
        times.push(runtime.block_on(waiter).unwrap() - start);
        holder.wait().unwrap();
    }
    times.sort_unstable();
    let (middle, worst) = (times[KILLS / 2], times[KILLS - 1]);
    println!("kill -9 of a holder, until the next has the lock, {KILLS} times:");
    let kept = bar(middle <= Duration::from_millis(20), "at most 20 ms");
    println!("  median {middle:.2?}, worst {worst:.2?} {kept}");
}

fn hold(helper: &Path, dir: &Path) -> Child {
    let mut command = Command::new(helper);
    command.arg(format!("file:{}", dir.display())).args(["killed", "30000", "hold"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("held"), "{line:?}");
    child
}
