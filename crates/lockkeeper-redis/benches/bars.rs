//! What locks on Redis cost, beside what the same client can do at best in the same run. Ratios, not
//! times: times are those of a machine.
//!
//! `cargo bench -p lockkeeper-redis`, or with the name of a part: `cargo bench -p lockkeeper-redis -- queue`.
//! Starts servers of its own.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that measures")]
#![allow(missing_docs, reason = "nobody calls it")]

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::Keeper;
use lockkeeper_redis::{Config, Redis, redlock};
use lockkeeper_testkit::server::{RedisServer, RedlockNodes};
use redis::aio::MultiplexedConnection;

const UNLOCK: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

fn main() {
    let part = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let wanted = |name: &str| part.as_deref().is_none_or(|part| part == name);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        if wanted("uncontended") {
            uncontended().await;
        }
        if wanted("many") {
            many_keys().await;
        }
        if wanted("queue") {
            queue().await;
        }
        if wanted("idle") {
            idle().await;
        }
        if wanted("held") {
            held().await;
        }
        if wanted("redlock") {
            quorum().await;
        }
    });
}

async fn keeper(server: &RedisServer) -> Keeper {
    Keeper::new(Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap())
}

/// A connection with the settings that the store uses.
async fn raw(server: &RedisServer) -> MultiplexedConnection {
    let client = redis::Client::open(format!("{}?protocol=resp3", server.url())).unwrap();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

async fn ping(connection: &mut MultiplexedConnection) {
    connection.send_packed_command(&redis::cmd("PING")).await.unwrap();
}

/// SET NX PX, and compare and delete: what one would write by hand.
async fn raw_pair(connection: &mut MultiplexedConnection, hash: &str, key: &str) {
    let mut set = redis::cmd("SET");
    set.arg(key).arg("me").arg("NX").arg("PX").arg(30_000);
    connection.send_packed_command(&set).await.unwrap();
    let mut unlock = redis::cmd("EVALSHA");
    unlock.arg(hash).arg(1).arg(key).arg("me");
    connection.send_packed_command(&unlock).await.unwrap();
}

async fn load(connection: &mut MultiplexedConnection) -> String {
    let mut load = redis::cmd("SCRIPT");
    load.arg("LOAD").arg(UNLOCK);
    redis::from_redis_value(connection.send_packed_command(&load).await.unwrap()).unwrap()
}

fn p50(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Runs the subjects in turn, so that all have the same weather; the median of each, in µs.
async fn in_turn<const N: usize>(rounds: usize, mut subjects: [&mut dyn AsyncStep; N]) -> [f64; N] {
    let mut times: [Vec<f64>; N] = std::array::from_fn(|_| Vec::with_capacity(rounds));
    for round in 0..rounds + rounds / 10 {
        for (subject, times) in subjects.iter_mut().zip(&mut times) {
            let start = Instant::now();
            subject.step().await;
            if round >= rounds / 10 {
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    times.map(p50)
}

/// One thing to measure.
trait AsyncStep {
    fn step(&mut self) -> std::pin::Pin<Box<dyn Future<Output = ()> + '_>>;
}

impl<F: AsyncFnMut()> AsyncStep for F {
    fn step(&mut self) -> std::pin::Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(self())
    }
}

fn bar(what: &str, figure: f64, is_met: bool, bar: &str) {
    println!("  {what:<52} {figure:8.2}   bar {bar}: {}", if is_met { "met" } else { "MISSED" });
}

async fn uncontended() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server).await;
    let (mut one, mut two) = (raw(&server).await, raw(&server).await);
    let hash = load(&mut two).await;
    let mutex = keeper.mutex("a");
    let [pings, pair, ours] = in_turn(
        3000,
        [
            &mut async || {
                ping(&mut one).await;
                ping(&mut one).await;
            },
            &mut async || raw_pair(&mut two, &hash, "b").await,
            &mut async || {
                mutex.lock().await.unwrap().release().await.unwrap();
            },
        ],
    )
    .await;
    println!("uncontended lock and release, p50 in units of two PINGs ({pings:.0} µs)");
    println!("  {:<52} {:8.2}", "raw SET NX + EVALSHA", pair / pings);
    bar("lockkeeper", ours / pings, ours / pings <= 1.15, "<= 1.15");
}

/// Pairs per second of so many tasks within the time.
async fn per_second<F: Future<Output = ()> + Send + 'static>(
    tasks: usize,
    time: Duration,
    work: impl Fn(usize, Arc<AtomicBool>, Arc<AtomicU64>) -> F,
) -> f64 {
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let start = Instant::now();
    let tasks: Vec<_> =
        (0..tasks).map(|task| tokio::spawn(work(task, stop.clone(), count.clone()))).collect();
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    let done = count.load(Ordering::Relaxed);
    let took = start.elapsed();
    for task in tasks {
        task.await.unwrap();
    }
    #[expect(clippy::cast_precision_loss, reason = "a figure to look at")]
    let rate = done as f64 / took.as_secs_f64();
    rate
}

async fn many_keys() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server).await;
    let mut connection = raw(&server).await;
    let hash = load(&mut connection).await;
    let time = Duration::from_secs(1);
    let mut ratios = Vec::new();
    for _ in 0..5 {
        let raw = per_second(64, time, |task, stop, count| {
            let (mut connection, hash) = (connection.clone(), hash.clone());
            async move {
                let key = format!("raw:{task}");
                while !stop.load(Ordering::Relaxed) {
                    raw_pair(&mut connection, &hash, &key).await;
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        })
        .await;
        let ours = per_second(64, time, |task, stop, count| {
            let mutex = keeper.mutex(format!("key/{task}"));
            async move {
                while !stop.load(Ordering::Relaxed) {
                    mutex.lock().await.unwrap().release().await.unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        })
        .await;
        ratios.push((ours / raw, ours, raw));
    }
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (ratio, ours, raw) = ratios[2];
    println!("64 tasks on 64 keys, locks per second ({ours:.0}) beside raw pairs ({raw:.0})");
    bar("lockkeeper", ratio, ratio >= 1.0, ">= 1");
}

/// How many commands of scripts the server has run.
fn scripts_run(server: &RedisServer) -> f64 {
    let info = server.command(&["INFO", "commandstats"]);
    let line = info.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
    let calls = line.and_then(|line| line.split_once("calls=")).map(|(_, rest)| rest);
    calls.and_then(|rest| rest.split(',').next()).map_or(0.0, |calls| calls.parse().unwrap())
}

async fn queue() {
    println!("one key, so many tasks");
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server).await;
    let mut rates = Vec::new();
    for tasks in [8_usize, 64, 512] {
        let turns: Arc<Vec<AtomicU64>> = Arc::new((0..tasks).map(|_| AtomicU64::new(0)).collect());
        let before = scripts_run(&server);
        let all = Arc::new(AtomicU64::new(0));
        // So long that one turn, which is the moment at which it is stopped, is less than the bar.
        let time = Duration::from_secs(if tasks > 64 { 20 } else { 4 });
        let rate = per_second(tasks, time, |task, stop, count| {
            let (mutex, turns, all) = (keeper.mutex("one"), turns.clone(), all.clone());
            async move {
                while !stop.load(Ordering::Relaxed) {
                    let guard = mutex.lock().await.unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                    all.fetch_add(1, Ordering::Relaxed);
                    turns[task].fetch_add(1, Ordering::Relaxed);
                    guard.release().await.unwrap();
                }
            }
        })
        .await;
        #[expect(clippy::cast_precision_loss, reason = "a figure to look at")]
        let requests = (scripts_run(&server) - before) / all.load(Ordering::Relaxed) as f64;
        let turns: Vec<u64> = turns.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let (least, most) = (*turns.iter().min().unwrap(), *turns.iter().max().unwrap());
        #[expect(clippy::cast_precision_loss, reason = "a figure to look at")]
        let spread = (most - least) as f64 / most as f64;
        println!(
            "  {tasks} tasks: {rate:.0} hand-overs per second, served {least} to {most} times"
        );
        // The first ask of each task waits for nobody's release: to two decimals it is as if it were not there.
        bar("requests per hand-over", requests, requests < 2.005, "<= 2.00");
        bar("least and most turns", spread, spread <= 0.02, "<= 2 %");
        rates.push(rate);
    }
    let (least, most) =
        (rates.iter().copied().fold(f64::MAX, f64::min), rates.iter().copied().fold(0.0, f64::max));
    bar(
        "hand-overs per second, 1 - least / most",
        1.0 - least / most,
        least / most >= 0.8,
        "<= 0.20",
    );

    let other = self::keeper(&server).await;
    let mut connection = raw(&server).await;
    let (mut pings, mut wakes) = (Vec::new(), Vec::new());
    for _ in 0..1000 {
        let start = Instant::now();
        ping(&mut connection).await;
        pings.push(start.elapsed().as_secs_f64() * 1e6);
        let guard = keeper.mutex("two").lock().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = other.mutex("two");
            async move {
                let guard = mutex.lock().await.unwrap();
                (Instant::now(), guard)
            }
        });
        while server_waiters(&mut connection).await == 0 {}
        let start = Instant::now();
        let release = tokio::spawn(guard.release());
        let (woken, guard) = waiter.await.unwrap();
        wakes.push(woken.duration_since(start).as_secs_f64() * 1e6);
        release.await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
    let (ping, wake) = (p50(pings), p50(wakes));
    println!(
        "  wake-up of a single waiter in another client, p50 in units of a PING ({ping:.0} µs)"
    );
    bar("from the call of release to the guard", wake / ping, wake / ping <= 2.0, "<= 2");
}

async fn server_waiters(connection: &mut MultiplexedConnection) -> u64 {
    let mut count = redis::cmd("ZCARD");
    count.arg("lockkeeper:{two}:q");
    redis::from_redis_value(connection.send_packed_command(&count).await.unwrap()).unwrap()
}

async fn idle() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server).await;
    let guard = keeper.mutex("one").lock().await.unwrap();
    let waiters: Vec<_> = (0..1000)
        .map(|_| {
            let mutex = keeper.mutex("one");
            tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (before, start) = (scripts_run(&server), Instant::now());
    tokio::time::sleep(Duration::from_secs(20)).await;
    let rate = (scripts_run(&server) - before) / start.elapsed().as_secs_f64();
    println!("1,000 waiters on a held lock at ttl 30 s, over 20 s");
    bar("requests per second per waiter", rate / 1000.0, rate / 1000.0 < 0.105, "<= 0.10");
    guard.release().await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap();
    }
}

/// Seconds of processor time that this process has used.
fn processor_time() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    ticks / 100.0
}

async fn held() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server).await;
    let mut guards = Vec::new();
    for chunk in 0..100 {
        let locks = (0..100).map(|i| {
            let mutex = keeper.mutex(format!("held/{chunk}/{i}"));
            tokio::spawn(async move { mutex.lock().await.unwrap() })
        });
        for lock in locks.collect::<Vec<_>>() {
            guards.push(lock.await.unwrap());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (requests, cpu, start) = (scripts_run(&server), processor_time(), Instant::now());
    tokio::time::sleep(Duration::from_secs(20)).await;
    let took = start.elapsed().as_secs_f64();
    let rate = (scripts_run(&server) - requests) / took;
    let cpu = (processor_time() - cpu) / took * 100.0;
    assert!(guards.iter().all(lockkeeper_core::Guard::is_held));
    println!("10,000 locks held at ttl 30 s, taken over 10 s, watched for 20 s");
    bar("requests per second", rate, rate <= 1000.0, "<= 1000");
    bar("% of a core in the client", cpu, cpu <= 3.0, "<= 3");
    drop(guards);
    keeper.close().await;
}

async fn quorum() {
    let mut nodes = RedlockNodes::start_or_panic(5);
    let single = keeper(&nodes.nodes()[0]).await;
    let five = redlock(Config::redlock_from_url(&nodes.url()).unwrap()).await.unwrap();
    let five = Keeper::new(five);
    let (one, all) = (single.mutex("single"), five.mutex("quorum"));
    let mut one_step = async || {
        one.lock().await.unwrap().release().await.unwrap();
    };
    let mut all_step = async || {
        all.lock().await.unwrap().release().await.unwrap();
    };
    let [alone, healthy] = in_turn(1500, [&mut one_step, &mut all_step]).await;
    println!("Redlock of five, lock and release, p50 (single node {alone:.0} µs)");
    bar("in units of the single node", healthy / alone, healthy / alone <= 1.6, "<= 1.6");
    for node in &mut nodes.nodes_mut()[3..] {
        node.stop();
    }
    let [with_two_stopped] = in_turn(1500, [&mut all_step]).await;
    for node in &mut nodes.nodes_mut()[3..] {
        node.cont();
    }
    let [healthy_again] = in_turn(1500, [&mut all_step]).await;
    let ratio = with_two_stopped / healthy.midpoint(healthy_again);
    bar("two nodes stopped, in units of all well", ratio, ratio <= 1.2, "<= 1.2");
    five.close().await;
}
