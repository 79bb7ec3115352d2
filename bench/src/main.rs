//! Compares Lockkeeper with its peers.
//!
//! `cargo run --release -p lockkeeper-bench -- --help`. Starts its own servers, measures all implementations in the same scenarios in one run,
//! interleaved in short slices, and reports speed, cost and violations of mutual exclusion. Writes `docs/performance.md` and
//! `docs/performance/`.
#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "the program prints its report, and counts to some thousands"
)]

mod bench;
mod child;
mod figures;
mod implementation;
mod implementations;
mod load;
mod losses;
mod machine;
mod overlap_detector;
mod plots;
mod report;
mod scenarios;
mod slice;
mod stores;
mod summary;
mod tables;
mod thresholds;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, Subcommand};
use lockkeeper_testkit::server::RedisServer;
use tokio::runtime::Builder;

use crate::bench::{Bench, REPETITIONS};
use crate::implementation::{Outcome, one_line};
use crate::report::Report;

/// The maximum number of tasks that wait in a thread each, for implementations that block.
pub(crate) const THREADS: usize = 1024;

/// Measures Lockkeeper and its peers in the same scenarios, in one run.
#[derive(Debug, Parser)]
struct Arguments {
    /// Take less than two minutes, with less reliable figures
    #[arg(long)]
    quick: bool,

    /// Run only these scenarios: all of a store (redis, redlock, postgres, file, memory), or one, such as redis/queue-8
    #[arg(long, value_name = "SCENARIO", value_delimiter = ',')]
    only: Vec<String>,

    /// Write all measured values, of each repetition, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write a summary page, and all tables and plots into a directory named like the file without its extension
    #[arg(long, value_name = "FILE.md")]
    report: Option<PathBuf>,

    /// Measure nothing: render the values that --json has saved
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "only", "json"])]
    from_json: Option<PathBuf>,

    #[command(subcommand)]
    child: Option<ChildCommand>,
}

#[derive(Debug, Subcommand)]
enum ChildCommand {
    /// Hold locks or wait for one, in a child process of the benchmark
    #[command(hide = true)]
    Child(child::ChildArgs),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime =
        Builder::new_multi_thread().max_blocking_threads(THREADS + 32).enable_all().build();
    let outcome = runtime.map_err(one_line).and_then(|runtime| match arguments.child {
        Some(ChildCommand::Child(args)) => runtime.block_on(child::run_child(args)),
        None => run(&runtime, &arguments),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockkeeper-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(runtime: &tokio::runtime::Runtime, arguments: &Arguments) -> Outcome<()> {
    // Check the output files before the run, not after it.
    if let Some(file) = &arguments.report
        && file.extension().is_none()
    {
        return Err(format!(
            "--report {}: the file name needs an extension, such as .md",
            file.display()
        ));
    }
    for file in arguments.json.iter().chain(&arguments.report) {
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(file);
        opened.map_err(|error| format!("{}: {error}", file.display()))?;
    }
    let mut report = match &arguments.from_json {
        Some(file) => read(file)?,
        None => measure(runtime, arguments)?,
    };
    report.thresholds = thresholds::check(&report);
    write_report(&report, arguments)
}

/// Reads a report that `--json` has saved.
fn read(file: &Path) -> Outcome<Report> {
    let at = |error: String| format!("{}: {error}", file.display());
    let json = std::fs::read_to_string(file).map_err(|error| at(one_line(error)))?;
    serde_json::from_str(&json).map_err(|error| at(one_line(error)))
}

/// Runs the selected scenarios.
fn measure(runtime: &tokio::runtime::Runtime, arguments: &Arguments) -> Outcome<Report> {
    let (start, load_before) = (Instant::now(), load::average());
    if cfg!(debug_assertions) {
        eprintln!("built without --release: the figures are meaningless");
    }
    // Before this thread is pinned to a CPU.
    let machine = machine::describe();
    let noise = RedisServer::start().map_err(one_line)?;
    let connection = runtime.block_on(implementations::connect(&noise.url()))?;
    let mut bench = Bench::new(arguments.quick, arguments.only.clone(), connection);
    runtime.block_on(run_scenarios(&mut bench))?;
    let single = Builder::new_current_thread().enable_all().build().map_err(one_line)?;
    single.block_on(stores::single_threaded(&mut bench))?;
    if bench.sections.is_empty() {
        return Err(format!("no scenario matches --only {:?}", arguments.only));
    }
    // Sections are sorted by store, not by the order of measurement.
    bench.sections.sort_by_key(|section| report::sort_key(&section.id));
    Ok(Report {
        quick: arguments.quick,
        repetitions: REPETITIONS,
        machine,
        crates: machine::crate_versions(),
        partial: !arguments.only.is_empty(),
        seconds: start.elapsed().as_secs_f64(),
        load_before,
        sections: bench.sections,
        thresholds: Vec::new(),
    })
}

async fn run_scenarios(bench: &mut Bench) -> Outcome<()> {
    scenarios::check_overlap_detection().await?;
    stores::in_memory(bench).await?;
    if bench.is_selected("redis") {
        stores::on_redis(bench).await?;
    }
    stores::on_redlock(bench).await?;
    if bench.is_selected("file") {
        stores::on_files(bench).await?;
    }
    if bench.is_selected("postgres") {
        stores::on_postgres(bench).await?;
    }
    stores::idle_and_held(bench).await
}

/// Prints the report and writes the requested files.
fn write_report(report: &Report, arguments: &Arguments) -> Outcome<()> {
    let plots = plots::of(report);
    let file = arguments.report.as_deref().unwrap_or(Path::new("performance.md"));
    let dir = file.with_extension("");
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let summary = summary::page(report, &plots, &name(&dir));
    let tables = tables::page(report, &format!("../{}", name(file)));
    println!("{summary}\n{tables}");
    if let Some(file) = &arguments.json {
        let json = serde_json::to_string_pretty(report).map_err(one_line)?;
        std::fs::write(file, json).map_err(one_line)?;
    }
    if arguments.report.is_some() {
        plots::write(&plots, &dir)?;
        std::fs::write(dir.join("tables.md"), &tables).map_err(one_line)?;
        std::fs::write(file, &summary).map_err(one_line)?;
    }
    Ok(())
}
