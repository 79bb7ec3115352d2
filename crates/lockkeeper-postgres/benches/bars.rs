//! The bars that this store is held to, each against the bare driver in the same run.
//!
//! `cargo bench -p lockkeeper-postgres`. Rounds of both sides alternate, so that a machine that is busy
//! for a while slows both; ratios are of medians, or of what is not disturbed. A bar that is missed is
//! printed as such.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench prints, and panics if it cannot"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::Keeper;
use lockkeeper_postgres::Postgres;
use lockkeeper_testkit::server::PostgresServer;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio_postgres::{Client, NoTls};

/// Many and short ones: what else runs on the machine then bears on both sides alike.
const ROUNDS: usize = 60;

fn main() {
    let server = PostgresServer::with_args(&["-c", "max_connections=200"]).unwrap();
    // On one thread: which of several a connection's task happens to be on makes a difference of a
    // third to either side, from run to run.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(uncontended(&server.url()));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for waiters in [8, 64] {
            hand_overs(&server.url(), waiters).await;
        }
        killed_holder(&server.url()).await;
    });
}

async fn client(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    client
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What it takes when nothing else runs: whatever else does makes it longer, and never shorter.
fn undisturbed(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 10]
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "MISSED" }
}

async fn uncontended(url: &str) {
    const LOCKS: u32 = 80;
    // Where the system puts a session's process makes a difference of a third and more: so each side has
    // several, one after the other.
    const SETS: usize = 10;
    let [mut selects, mut bare, mut fenced, mut unfenced] = [const { Vec::new() }; 4];
    let locks = async |keeper: &Keeper| {
        let mutex = keeper.mutex("uncontended");
        let start = Instant::now();
        for _ in 0..LOCKS {
            mutex.lock().await.unwrap().release().await.unwrap();
        }
        start.elapsed().as_secs_f64() / f64::from(LOCKS)
    };
    for _ in 0..SETS {
        let raw = client(url).await;
        let select = raw.prepare("SELECT 1").await.unwrap();
        let lock = raw.prepare("SELECT pg_try_advisory_lock($1::bigint)").await.unwrap();
        let unlock = raw.prepare("SELECT pg_advisory_unlock($1::bigint)").await.unwrap();
        let with = Keeper::new(Postgres::new(url).unwrap());
        let without = Keeper::new(Postgres::new(&format!("{url}?fence=off")).unwrap());
        for round in 0..=ROUNDS / SETS {
            let start = Instant::now();
            for _ in 0..LOCKS {
                raw.query_one(&select, &[]).await.unwrap();
                raw.query_one(&select, &[]).await.unwrap();
            }
            let two_selects = start.elapsed().as_secs_f64() / f64::from(LOCKS);
            let start = Instant::now();
            for _ in 0..LOCKS {
                raw.query_one(&lock, &[&4712_i64]).await.unwrap();
                raw.query_one(&unlock, &[&4712_i64]).await.unwrap();
            }
            let bare_locks = start.elapsed().as_secs_f64() / f64::from(LOCKS);
            let (off, on) = (locks(&without).await, locks(&with).await);
            if round > 0 {
                selects.push(two_selects);
                bare.push(bare_locks);
                unfenced.push(off);
                fenced.push(on);
            }
        }
    }
    let two = undisturbed(selects);
    let [bare, off, on] = [bare, unfenced, fenced].map(|times| undisturbed(times) / two);
    println!("uncontended: two SELECT 1 take {:.0} µs", two * 1e6);
    println!("  a bare try and unlock:       {bare:.2} of that");
    println!(
        "  lock and release, fence off: {off:.2} of that (bar 1.10): {}",
        verdict(off <= 1.10)
    );
    println!("  lock and release, fence on:  {on:.2} of that");
}

/// Hand-overs per second: so many tasks lock and release one name in a circle.
async fn hand_overs(url: &str, waiters: usize) {
    const WINDOW: Duration = Duration::from_millis(150);
    let mut clients = Vec::new();
    for _ in 0..waiters {
        let client = client(url).await;
        let lock = client.prepare("SELECT pg_advisory_lock(4711)").await.unwrap();
        let unlock = client.prepare("SELECT pg_advisory_unlock(4711)").await.unwrap();
        clients.push(Arc::new((client, lock, unlock)));
    }
    let keepers = [
        Keeper::new(Postgres::new(&format!("{url}?fence=off")).unwrap()),
        Keeper::new(Postgres::new(url).unwrap()),
    ];
    let (mut raws, mut ratios, mut fenced) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let raw = rate(WINDOW, waiters, |i| {
            let client = clients[i].clone();
            move || {
                let client = client.clone();
                async move {
                    let (client, lock, unlock) = &*client;
                    client.query_one(lock, &[]).await.unwrap();
                    client.query_one(unlock, &[]).await.unwrap();
                }
            }
        })
        .await;
        let mut ours = [0.0; 2];
        for (keeper, rate_of) in keepers.iter().zip(&mut ours) {
            *rate_of = rate(WINDOW, waiters, |_| {
                let mutex = keeper.mutex("hand-over");
                move || {
                    let mutex = mutex.clone();
                    async move {
                        mutex.lock().await.unwrap().release().await.unwrap();
                    }
                }
            })
            .await;
        }
        if round > 0 {
            raws.push(raw);
            ratios.push(ours[0]);
            fenced.push(ours[1]);
        }
    }
    let raw = median(raws);
    let (ratio, fenced) = (median(ratios) / raw, median(fenced) / raw);
    println!("hand-overs with {waiters} waiters: {raw:.0}/s by as many bare connections");
    println!("  fence off: {ratio:.2} of that (bar 0.95): {}", verdict(ratio >= 0.95));
    println!("  fence on:  {fenced:.2} of that");
}

async fn rate<S, F>(window: Duration, tasks: usize, make: impl Fn(usize) -> S) -> f64
where
    S: Fn() -> F + Send + 'static,
    F: Future<Output = ()> + Send,
{
    let done = Arc::new(AtomicUsize::new(0));
    let end = Instant::now() + window;
    let tasks: Vec<_> = (0..tasks)
        .map(|i| {
            let (step, done) = (make(i), done.clone());
            tokio::spawn(async move {
                while Instant::now() < end {
                    step().await;
                    if Instant::now() < end {
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    #[expect(clippy::cast_precision_loss, reason = "it is a count of some thousands")]
    let count = done.load(Ordering::Relaxed) as f64;
    count / window.as_secs_f64()
}

/// From kill -9 of a holder in another process to the next one's guard.
async fn killed_holder(url: &str) {
    let program = std::env::current_exe().unwrap();
    // Benches are built where examples are not; this one is built by hand.
    let dir = program.ancestors().nth(2).unwrap().to_owned();
    let helper = ["examples/postgres_helper", "../debug/examples/postgres_helper"];
    let Some(helper) = helper.iter().map(|path| dir.join(path)).find(|path| path.is_file()) else {
        println!("killed holder: NOT MEASURED: build the example postgres_helper first");
        return;
    };
    let keeper = Keeper::new(Postgres::new(url).unwrap());
    let mut times = Vec::new();
    for _ in 0..15 {
        let mut holder = tokio::process::Command::new(&helper)
            .args([url, "killed", "30000", "hold"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
        assert!(lines.next_line().await.unwrap().unwrap().starts_with("held"));
        let mutex = keeper.mutex("killed");
        let waiter = tokio::spawn(async move { (mutex.lock().await.unwrap(), Instant::now()) });
        tokio::time::sleep(Duration::from_millis(200)).await;
        let start = Instant::now();
        holder.start_kill().unwrap();
        let (guard, told) = waiter.await.unwrap();
        times.push((told - start).as_secs_f64() * 1e3);
        guard.release().await.unwrap();
        holder.wait().await.unwrap();
    }
    let worst = times.iter().copied().fold(0.0, f64::max);
    let time = median(times);
    println!(
        "killed holder: the next has the lock after {time:.1} ms, {worst:.1} at worst (bar 50): {}",
        verdict(time <= 50.0)
    );
}
