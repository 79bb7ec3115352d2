//! The thresholds that Lockkeeper is measured against: ratios where the speed of the machine would decide.

use crate::figures::{Figure, short};
use crate::report::{Report, Row, Section, Threshold};
use crate::stores::RAW_POSTGRES;

const OURS: &str = "lockkeeper";
const UNFENCED: &str = "lockkeeper, fence off";
const FENCED: &str = "lockkeeper, fence on (default)";

/// The limit of a threshold.
#[derive(Clone, Copy)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

/// Compares the measured figures with the thresholds. Figures that were not measured are left out.
pub(crate) fn check(report: &Report) -> Vec<Threshold> {
    let mut thresholds = Vec::new();
    redis(report, &mut thresholds);
    redis_queue(report, &mut thresholds);
    quorum(report, &mut thresholds);
    postgres(report, &mut thresholds);
    files(report, &mut thresholds);
    thresholds
}

fn push(thresholds: &mut Vec<Threshold>, name: &str, figure: Option<Figure>, limit: Limit) {
    let Some(figure) = figure else { return };
    let Some(median) = figure.median() else { return };
    // Rounded to two decimals, as shown: requests at the edges of a slice are counted without their hand-off.
    let median = (median * 100.0).round() / 100.0;
    let (limit, met) = match limit {
        Limit::AtMost(max) => (format!("≤ {}", short(max)), median <= max),
        Limit::AtLeast(min) => (format!("≥ {}", short(min)), median >= min),
    };
    thresholds.push(Threshold { name: name.into(), figure, limit, met });
}

fn redis(report: &Report, thresholds: &mut Vec<Threshold>) {
    let figure = |section: &str, key: &str| report.figure(section, OURS, key).cloned();
    let name = "Redis: uncontended, in units of two PINGs";
    push(thresholds, name, figure("redis/uncontended", "p50-ratio"), Limit::AtMost(1.1));
    let name = "Redis: locks per second, 64 tasks on 64 keys, in units of raw pairs";
    push(thresholds, name, figure("redis/keys", "rate-ratio"), Limit::AtLeast(1.2));
    for keys in ["1", "8", "256", "1024"] {
        let Some(section) = report.section("redis/scaling-keys") else { continue };
        let (ours, best) = (section.find(OURS), best_other(section, keys));
        let figures = ours.and_then(|ours| ours.figures.get(keys)).zip(best);
        let ratio = figures.map(|(ours, (_, best))| ours.divided_by(best));
        let of = best.map_or_else(String::new, |(row, _)| format!(", {}", row.implementation));
        let name =
            format!("Redis: locks per second on {keys} keys, in units of the best other{of}");
        push(thresholds, &name, ratio, Limit::AtLeast(1.0));
    }
    let name = "Redis: wake-up of a single waiter, in PINGs after the same pause";
    push(thresholds, name, figure("redis/wake", "p50-ratio"), Limit::AtMost(2.0));
    let name = "Redis: requests per second of an idle waiter, of 1,000 in a process";
    push(thresholds, name, figure("redis/idle", "rate"), Limit::AtMost(0.1));
    // A quick run holds fewer locks, with a shorter TTL.
    if !report.quick {
        let name = "Redis: 10,000 held locks, requests per second";
        push(thresholds, name, figure("redis/held", "requests"), Limit::AtMost(1000.0));
        let name = "Redis: 10,000 held locks, % of a core in the client";
        push(thresholds, name, figure("redis/held", "client"), Limit::AtMost(3.0));
        let name = "Redis: 10,000 held locks, client bytes each";
        push(thresholds, name, figure("redis/held", "bytes"), Limit::AtMost(1500.0));
    }
    let name = "Redis: kill -9 of a holder, ms after the lease's end";
    push(thresholds, name, figure("redis/takeover", "ms"), Limit::AtMost(150.0));
}

fn redis_queue(report: &Report, thresholds: &mut Vec<Threshold>) {
    for (tasks, times) in [(8, 3.0), (64, 4.0), (512, 5.0)] {
        let Some(section) = report.section(&format!("redis/queue-{tasks}")) else { continue };
        let (Some(ours), Some(peer)) = (section.find(OURS), fastest_peer(section)) else {
            continue;
        };
        let name = format!(
            "Redis: hand-offs, {tasks} tasks, in units of the best peer, {}",
            peer.implementation
        );
        let ratio = ours.figures.get("rate").zip(peer.figures.get("rate"));
        let ratio = ratio.map(|(ours, peer)| ours.divided_by(peer));
        push(thresholds, &name, ratio, Limit::AtLeast(times));
    }
    // From the scaling section, whose numbers of tasks are interleaved: at different times the noise would differ.
    let rates = |repetition: usize| {
        let rate = |tasks| report.figure("redis/scaling-waiters", OURS, tasks)?.at(repetition);
        ["8", "64", "512"].into_iter().map(rate).collect::<Option<Vec<f64>>>()
    };
    let mut flat = Figure::default();
    for repetition in 0..report.repetitions {
        let ratio = rates(repetition).map(|rates| {
            let slowest = rates.iter().copied().fold(f64::MAX, f64::min);
            slowest / rates.iter().copied().fold(f64::MIN_POSITIVE, f64::max)
        });
        flat.record(repetition, ratio);
    }
    let name = "Redis: hand-offs at 8, 64, 512 tasks, slowest / fastest";
    push(thresholds, name, Some(flat), Limit::AtLeast(0.85));
    for tasks in [8, 64, 512] {
        let section = format!("redis/queue-{tasks}");
        let name = format!("Redis: requests per hand-off, {tasks} tasks");
        let requests = report.figure(&section, OURS, "requests").cloned();
        push(thresholds, &name, requests, Limit::AtMost(2.0));
        // In a quick run, one acquisition is more than the threshold.
        if !report.quick {
            let name = format!("Redis: fairness, (most − fewest) / most of {tasks} tasks, %");
            let uneven = report.figure("redis/fairness", OURS, &tasks.to_string()).cloned();
            push(thresholds, &name, uneven, Limit::AtMost(2.0));
        }
    }
}

/// Returns the row of another implementation with the highest figure of a column, the raw recipe included.
fn best_other<'a>(section: &'a Section, column: &str) -> Option<(&'a Row, &'a Figure)> {
    let rows = section.rows.iter().filter(|row| !row.is_ours() && row.overlaps == 0);
    let figures = rows.filter_map(|row| Some((row, row.figures.get(column)?)));
    let median = |figure: &Figure| figure.median().unwrap_or(0.0);
    figures.max_by(|(_, a), (_, b)| median(a).total_cmp(&median(b)))
}

/// Returns the peer with the most hand-offs, of those without overlaps.
fn fastest_peer(section: &Section) -> Option<&Row> {
    let rate = |row: &Row| row.figures.get("rate").and_then(Figure::median);
    let peers = section.rows.iter().filter(|row| !row.is_ours() && !row.is_raw());
    let peers = peers.filter(|row| row.overlaps == 0 && rate(row).is_some());
    peers.max_by(|a, b| rate(a).unwrap_or(0.0).total_cmp(&rate(b).unwrap_or(0.0)))
}

fn quorum(report: &Report, thresholds: &mut Vec<Threshold>) {
    let figure = |key: &str| report.figure("redlock/five", OURS, key);
    let healthy =
        figure("healthy").zip(figure("single")).map(|(well, single)| well.divided_by(single));
    let name = "Redlock of five, in units of a single server";
    push(thresholds, name, healthy, Limit::AtMost(1.8));
    let stopped =
        figure("stopped").zip(figure("healthy")).map(|(stopped, well)| stopped.divided_by(well));
    let name = "Redlock with two of five stopped, in units of all healthy";
    push(thresholds, name, stopped, Limit::AtMost(1.2));
}

fn postgres(report: &Report, thresholds: &mut Vec<Threshold>) {
    let figure = |section: &str, implementation: &str, key: &str| {
        report.figure(&format!("postgres/{section}"), implementation, key).cloned()
    };
    let of_raw = |section: &str, key: &str| {
        let (ours, raw) = (figure(section, FENCED, key)?, figure(section, RAW_POSTGRES, key)?);
        Some(ours.divided_by(&raw))
    };
    let in_raw = "in units of the raw recipe";
    let name = format!("PostgreSQL: uncontended, {in_raw}");
    push(thresholds, &name, of_raw("uncontended", "p50"), Limit::AtMost(1.25));
    let name = "PostgreSQL: uncontended, fence off, in units of two SELECT 1";
    let uncontended = figure("uncontended", UNFENCED, "p50-ratio");
    push(thresholds, name, uncontended, Limit::AtMost(1.08));
    for (tasks, least) in [(8, 0.9), (64, 1.0), (512, 1.0)] {
        let name = format!("PostgreSQL: hand-offs, {tasks} tasks, {in_raw}");
        let ratio = of_raw(&format!("queue-{tasks}"), "rate");
        push(thresholds, &name, ratio, Limit::AtLeast(least));
    }
    let name = format!("PostgreSQL: wake-up of a single waiter, {in_raw}");
    push(thresholds, &name, of_raw("wake", "p50"), Limit::AtMost(1.4));
    let name = format!("PostgreSQL: readers and a few writers, {in_raw}");
    push(thresholds, &name, of_raw("readers", "reads"), Limit::AtLeast(0.7));
    for keys in ["4", "16", "64"] {
        let name = format!("PostgreSQL: locks per second on {keys} keys, {in_raw}");
        push(thresholds, &name, of_raw("scaling-keys", keys), Limit::AtLeast(0.9));
    }
    // A quick run holds fewer locks, with a shorter TTL.
    if !report.quick {
        let name = "PostgreSQL: 10,000 held locks, statements per second";
        push(thresholds, name, figure("held", FENCED, "requests"), Limit::AtMost(20.0));
        let name = "PostgreSQL: 10,000 held locks, % of a core in the client";
        push(thresholds, name, figure("held", FENCED, "client"), Limit::AtMost(0.5));
    }
    let name = "PostgreSQL: kill -9 of a holder, ms to the next";
    push(thresholds, name, figure("takeover", FENCED, "ms"), Limit::AtMost(50.0));
}

fn files(report: &Report, thresholds: &mut Vec<Threshold>) {
    let figure = |section: &str, implementation: &str, key: &str| {
        report.figure(section, implementation, key).cloned()
    };
    let name = "Files: uncontended, fence off, in units of open + flock + close";
    push(thresholds, name, figure("file/uncontended", UNFENCED, "p50-ratio"), Limit::AtMost(3.0));
    let name = "Files: kill -9 of a holder, ms to the next";
    push(thresholds, name, figure("file/takeover", FENCED, "ms"), Limit::AtMost(20.0));
}
