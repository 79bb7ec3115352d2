//! The summary page: the machine, the thresholds, where Lockkeeper loses, and the plots.

use std::fmt::Write as _;

use crate::losses;
use crate::plots::Plot;
use crate::report::Report;

/// A load average above this before the run means that the machine is busy with other work.
const BUSY: f64 = 1.0;

/// Returns the page. The plots and the page with all tables are in the directory `dir` beside it.
pub(crate) fn page(report: &Report, plots: &[Plot], dir: &str) -> String {
    let mut page = String::from("# Performance\n\n");
    introduction(&mut page, report, dir);
    thresholds(&mut page, report);
    largest_losses(&mut page, report, dir);
    if !plots.is_empty() {
        page.push_str(
            "\n## Plots\n\nDots are medians, vertical lines go from minimum to maximum.\n\n",
        );
        for plot in plots {
            let _ = writeln!(page, "![{}]({dir}/{}.svg)", plot.title, plot.file);
        }
    }
    page.push_str(HOW_TO_RUN);
    page
}

fn introduction(page: &mut String, report: &Report, dir: &str) {
    let run = match (report.quick, report.partial) {
        (true, _) => "**quick** run, whose figures must not be quoted,",
        (false, true) => "run of **some scenarios**",
        (false, false) => "full run",
    };
    let comparison = losses::compare(report);
    let met = report.thresholds.iter().filter(|threshold| threshold.met).count();
    let machine = report.machine.iter().map(|(name, value)| format!("{name} {value}"));
    let _ = writeln!(
        page,
        "Lockkeeper compared with other lock crates and with the bare drivers: speed, cost, and violations of mutual exclusion.\n\n\
         - **Result:** {met} of {} thresholds are met. In {} of {} comparisons, [another implementation is better](#where-lockkeeper-loses).\n\
         - **Run:** one {run} of {:.1} minutes, in which all implementations ran interleaved. This page is generated; [all tables]({dir}/tables.md) are on a second page.\n\
         - **Machine:** {}. The servers run on the same machine. Times depend on it; ratios depend on it less.",
        report.thresholds.len(),
        comparison.losses.len(),
        comparison.compared,
        report.seconds / 60.0,
        machine.collect::<Vec<_>>().join("; ")
    );
    if report.load_before > Some(BUSY) {
        let _ = writeln!(
            page,
            "\n**The machine was busy when the run began (load average above {BUSY}): do not quote these figures.**"
        );
    }
}

fn thresholds(page: &mut String, report: &Report) {
    if report.thresholds.is_empty() {
        return;
    }
    page.push_str(
        "\n## Thresholds\n\nMedian, with minimum and maximum in brackets.\n\n| figure | threshold | measured | |\n|---|---|---|---|\n",
    );
    for threshold in &report.thresholds {
        let verdict = if threshold.met { "met" } else { "**missed**" };
        let _ = writeln!(
            page,
            "| {} | {} | {} | {verdict} |",
            threshold.name,
            threshold.limit,
            threshold.figure.show()
        );
    }
    let mut causes = Vec::new();
    for threshold in report.thresholds.iter().filter(|threshold| !threshold.met) {
        let known = CAUSES.iter().find(|(start, _)| threshold.name.starts_with(start));
        let (what, cause) = known.copied().unwrap_or((&threshold.name, "The cause is not known."));
        let line = format!("- **{}:** {cause}", what.trim_end_matches([',', ' ']));
        if !causes.contains(&line) {
            causes.push(line);
        }
    }
    if !causes.is_empty() {
        let _ = writeln!(page, "\nWhy thresholds are missed:\n\n{}", causes.join("\n"));
    }
}

/// Why a threshold is missed, by the start of its name.
const CAUSES: &[(&str, &str)] = &[
    (
        "Redis: uncontended",
        "CPU time of the server. A lock is three commands and its release a script; two PINGs run nothing.",
    ),
    (
        "Redis: locks per second",
        "With few tasks, the latency of one request decides, and a lock sends more commands than the plain recipe. With many, CPU time of client and server.",
    ),
    (
        "Redis: wake-up",
        "Two processes wake up from idle: the server to run the release script and push the grant, then the waiter. A PING wakes one.",
    ),
    (
        "Redis: hand-offs",
        "CPU time of the server. Each hand-off also pays for the previous holder, which enqueues again at once because the lock is held for no time. If the spread of a figure is large, noise.",
    ),
    (
        "Redis: requests per hand-off",
        "Requests at the edges of a slice count without their hand-off. In a quick run, slices are short.",
    ),
    (
        "Redlock of five",
        "Five servers share the cores with the client, and each gets two requests.",
    ),
    (
        "PostgreSQL: uncontended",
        "CPU time of the client: the engine, its timers and the session pool.",
    ),
    (
        "PostgreSQL: hand-offs",
        "Of the waiters in one process, only the first waits on the server. The statement of the next is sent after the grant of the first.",
    ),
];

/// Why others are faster, by the store of the section.
const REASONS: &[(&str, &str, &str)] = &[
    (
        "redis/",
        "Redis",
        "a lock also checks for waiters and draws a fence, and its release [checks for waiters](backends/redis.md) to hand the lock off; the raw recipe is a `SET NX` \
         and a compare-and-delete. After a crash, Lockkeeper retries when the reported lease ends, while some peers poll every millisecond. A guard that renews takes \
         more memory than one that does not.",
    ),
    (
        "redlock/",
        "Redlock",
        "each node also checks for waiters and draws a fence. All five servers share this machine.",
    ),
    (
        "postgres/",
        "PostgreSQL",
        "a fence is drawn in the statement that takes the lock; the tables have rows with *fence off*. Held locks send a heartbeat per session and third of a TTL, while peers send nothing.",
    ),
    (
        "file/",
        "Files",
        "fence and label are written into the file, and its path is checked after locking and with every renewal; *fence off* omits the write. Peers block one thread per \
         waiter, which the kernel wakes directly; Lockkeeper's waiters are woken through the runtime, and one thread reads inotify events.",
    ),
    (
        "memory/",
        "Memory",
        "a lock has a lease, an owner, a fence and a loss notification. tokio's mutex has none of these and works in one process.",
    ),
];

fn largest_losses(page: &mut String, report: &Report, dir: &str) {
    page.push_str("\n## Where Lockkeeper loses\n\n");
    let comparison = losses::compare(report);
    let largest = comparison.largest();
    if largest.is_empty() {
        page.push_str("Nowhere in this run.\n");
        return;
    }
    let tables = format!("{dir}/tables.md");
    let _ = writeln!(
        page,
        "The largest loss of each scenario: a figure that is better in every repetition than that of Lockkeeper with its defaults. A factor is missing where their figure is \
         0. [All losses]({tables}#where-lockkeeper-loses) are with the tables.\n\n\
         | scenario, figure | best other | theirs | ours | factor |\n|---|---|---:|---:|---:|"
    );
    for loss in &largest {
        let _ = writeln!(page, "{}", loss.table_row(&tables));
    }
    page.push_str("\nReasons:\n\n");
    for (start, store, reason) in REASONS {
        if largest.iter().any(|loss| loss.section.id.starts_with(start)) {
            let _ = writeln!(page, "- **{store}:** {reason}");
        }
    }
}

const HOW_TO_RUN: &str = "
## How to run it again

```sh
cargo run --release -p lockkeeper-bench -- --report docs/performance.md
```

The full run needs Linux, the Redis and PostgreSQL server programs, OpenSSL's headers (or `--no-default-features`, without one peer), and a machine that is otherwise idle
for a quarter of an hour. `--quick` takes less than two minutes, `--only redis/keys,file` selects scenarios, `--json FILE` saves all values, and `--from-json FILE` renders
saved values without a new run.
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plots;
    use crate::report::tests::{full_report, report_of, section};
    use crate::thresholds;

    /// The most lines that the summary may have.
    const MAX_LINES: usize = 150;

    /// A full run in which Lockkeeper misses every threshold and loses every comparison, on a busy machine.
    fn worst_report() -> Report {
        let mut report = full_report();
        report.load_before = Some(9.0);
        report.thresholds = thresholds::check(&report);
        for threshold in &mut report.thresholds {
            threshold.met = false;
        }
        report
    }

    #[test]
    fn the_summary_of_the_worst_full_run_fits_into_its_lines() {
        let report = worst_report();
        let plots = plots::of(&report);
        assert_eq!((report.thresholds.len(), plots.len()), (30, 10));
        let page = page(&report, &plots, "performance");
        let lines = page.lines().count();
        assert!(lines <= MAX_LINES, "{lines} lines");
    }

    #[test]
    fn the_summary_states_machine_thresholds_losses_plots_and_command() {
        let report = worst_report();
        let page = page(&report, &plots::of(&report), "performance");
        for part in [
            "CPU test machine",
            "do not quote these figures",
            "0 of 30 thresholds are met",
            "\n## Thresholds\n",
            "**missed**",
            "\n## Where Lockkeeper loses\n",
            "(performance/tables.md#redis-uncontended)",
            "![Redis: ",
            "](performance/redis-waiters.svg)",
            "\n## How to run it again\n",
            "--report docs/performance.md",
            "(performance/tables.md)",
        ] {
            assert!(page.contains(part), "no {part:?} in {page}");
        }
        for (_, store, _) in REASONS {
            assert!(page.contains(&format!("- **{store}:** ")), "no reason for {store}");
        }
    }

    #[test]
    fn the_committed_summary_fits_into_its_lines() {
        assert!(include_str!("../../docs/performance.md").lines().count() <= MAX_LINES);
    }

    #[test]
    fn the_tables_are_not_in_the_summary() {
        let report = full_report();
        let page = page(&report, &plots::of(&report), "performance");
        assert!(!page.contains("| implementation |"));
    }

    #[test]
    fn a_run_without_losses_states_that_there_are_none() {
        let rows = [("lockkeeper", 2.0), ("peer", 1.0)];
        let report = report_of(vec![section("redis/queue-8", "rate", &rows)]);
        let page = page(&report, &[], "performance");
        assert!(page.contains("Nowhere in this run."));
        assert!(page.contains("In 0 of 1 comparisons"));
    }

    #[test]
    fn known_causes_of_missed_thresholds_are_stated() {
        let page = page(&worst_report(), &[], "performance");
        for (start, cause) in CAUSES {
            assert!(page.contains(cause), "{start}");
        }
    }

    #[test]
    fn a_quick_run_is_marked() {
        let mut report = full_report();
        report.quick = true;
        assert!(page(&report, &[], "performance").contains("**quick** run"));
    }
}
