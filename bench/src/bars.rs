//! The bars that Lockkeeper is held to, as ratios where a machine's speed would decide.

use crate::figures::{Figure, short};
use crate::report::{Bar, Report, Row, Section};

const OURS: &str = "lockkeeper";
const UNFENCED: &str = "lockkeeper, fence off";
const FENCED: &str = "lockkeeper, fence on (default)";

/// Which side of a bar is the right one.
#[derive(Clone, Copy)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

/// Holds what was measured against the bars. What was not measured has no bar.
pub(crate) fn all(report: &Report) -> Vec<Bar> {
    let mut bars = Vec::new();
    redis(report, &mut bars);
    redis_queue(report, &mut bars);
    quorum(report, &mut bars);
    postgres_and_files(report, &mut bars);
    bars
}

fn add(bars: &mut Vec<Bar>, what: &str, figure: Option<Figure>, wanted: Limit) {
    let Some(figure) = figure else { return };
    let Some(median) = figure.median() else { return };
    // To two decimals, as it is shown and asked for: requests at the edges of a slice are counted without their hand-over.
    let median = (median * 100.0).round() / 100.0;
    let (limit, met) = match wanted {
        Limit::AtMost(most) => (format!("≤ {}", short(most)), median <= most),
        Limit::AtLeast(least) => (format!("≥ {}", short(least)), median >= least),
    };
    bars.push(Bar { what: what.into(), figure, limit, met });
}

fn redis(report: &Report, bars: &mut Vec<Bar>) {
    let figure = |section: &str, key: &str| report.figure(section, OURS, key).cloned();
    let what = "Redis: uncontended, in units of two PINGs";
    add(bars, what, figure("redis/uncontended", "p50-ratio"), Limit::AtMost(1.15));
    let what = "Redis: 64 tasks on 64 keys, in units of raw pairs";
    add(bars, what, figure("redis/keys", "rate-ratio"), Limit::AtLeast(1.0));
    let what = "Redis: wake-up of a single waiter, in PINGs after the same pause";
    add(bars, what, figure("redis/wake", "p50-ratio"), Limit::AtMost(2.0));
    let what = "Redis: requests per second of an idle waiter, of 1,000 in a process";
    add(bars, what, figure("redis/idle", "rate"), Limit::AtMost(0.1));
    // A quick run holds other numbers of locks for other times.
    if !report.quick {
        let what = "Redis: 10,000 held locks, requests per second";
        add(bars, what, figure("redis/held", "requests"), Limit::AtMost(1000.0));
        let what = "Redis: 10,000 held locks, % of a core in the client";
        add(bars, what, figure("redis/held", "client"), Limit::AtMost(3.0));
    }
    let what = "Redis: kill -9 of a holder, ms after the lease's end";
    add(bars, what, figure("redis/takeover", "ms"), Limit::AtMost(150.0));
}

fn redis_queue(report: &Report, bars: &mut Vec<Bar>) {
    for (tasks, times) in [(8, 2.0), (64, 3.0)] {
        let Some(section) = report.section(&format!("redis/queue-{tasks}")) else { continue };
        let (Some(ours), Some(peer)) = (section.find(OURS), best_peer(section)) else { continue };
        let what =
            format!("Redis: hand-overs, {tasks} tasks, in units of the best peer, {}", peer.make);
        let ratio = ours.figures.get("rate").zip(peer.figures.get("rate"));
        let ratio = ratio.map(|(ours, peer)| ours.per(peer));
        add(bars, &what, ratio, Limit::AtLeast(times));
    }
    // From where they take turns: at different times, the weather would differ.
    let rates = |repetition: usize| {
        let rate = |tasks| report.figure("redis/scaling-waiters", OURS, tasks)?.at(repetition);
        ["8", "64", "512"].into_iter().map(rate).collect::<Option<Vec<f64>>>()
    };
    let mut flat = Figure::default();
    for repetition in 0..report.repetitions {
        let ratio = rates(repetition).map(|rates| {
            let least = rates.iter().copied().fold(f64::MAX, f64::min);
            least / rates.iter().copied().fold(f64::MIN_POSITIVE, f64::max)
        });
        flat.put(repetition, ratio);
    }
    let what = "Redis: hand-overs at 8, 64, 512 tasks, least / most";
    add(bars, what, Some(flat), Limit::AtLeast(0.8));
    for tasks in [8, 64, 512] {
        let section = format!("redis/queue-{tasks}");
        let what = format!("Redis: requests per hand-over, {tasks} tasks");
        let requests = report.figure(&section, OURS, "requests").cloned();
        add(bars, &what, requests, Limit::AtMost(2.0));
        // In a quick run, one turn is more than the bar.
        if !report.quick {
            let what = format!("Redis: least and most served of {tasks} tasks, %");
            let uneven = report.figure("redis/fairness", OURS, &tasks.to_string()).cloned();
            add(bars, &what, uneven, Limit::AtMost(2.0));
        }
    }
}

/// The peer with the most hand-overs, among those that exclude.
fn best_peer(section: &Section) -> Option<&Row> {
    let rate = |row: &Row| row.figures.get("rate").and_then(Figure::median);
    let peers = section.rows.iter().filter(|row| !row.is_ours() && !row.is_raw());
    let peers = peers.filter(|row| row.overlaps == 0 && rate(row).is_some());
    peers.max_by(|a, b| rate(a).unwrap_or(0.0).total_cmp(&rate(b).unwrap_or(0.0)))
}

fn quorum(report: &Report, bars: &mut Vec<Bar>) {
    let figure = |key: &str| report.figure("redlock/five", OURS, key);
    let healthy = figure("well").zip(figure("single")).map(|(well, single)| well.per(single));
    let what = "Redlock of five, in units of a single server";
    add(bars, what, healthy, Limit::AtMost(1.6));
    let stopped = figure("stopped").zip(figure("well")).map(|(stopped, well)| stopped.per(well));
    let what = "Redlock with two of five stopped, in units of all well";
    add(bars, what, stopped, Limit::AtMost(1.2));
}

fn postgres_and_files(report: &Report, bars: &mut Vec<Bar>) {
    let figure = |section: &str, make: &str, key: &str| report.figure(section, make, key).cloned();
    let what = "PostgreSQL: uncontended, fence off, in units of two SELECT 1";
    let uncontended = figure("postgres/uncontended", UNFENCED, "p50-ratio");
    add(bars, what, uncontended, Limit::AtMost(1.1));
    for tasks in [8, 64] {
        let section = format!("postgres/queue-{tasks}");
        let raw = report.figure(&section, crate::stores::RAW_POSTGRES, "rate");
        let ours = report.figure(&section, UNFENCED, "rate");
        let what =
            format!("PostgreSQL: hand-overs, {tasks} tasks, fence off, in units of the raw one");
        add(bars, &what, ours.zip(raw).map(|(ours, raw)| ours.per(raw)), Limit::AtLeast(0.95));
    }
    let what = "PostgreSQL: kill -9 of a holder, ms to the next";
    add(bars, what, figure("postgres/takeover", FENCED, "ms"), Limit::AtMost(50.0));
    let what = "Files: uncontended, fence off, in units of open + flock + close";
    add(bars, what, figure("file/uncontended", UNFENCED, "p50-ratio"), Limit::AtMost(3.0));
    let what = "Files: kill -9 of a holder, ms to the next";
    add(bars, what, figure("file/takeover", FENCED, "ms"), Limit::AtMost(20.0));
}
