//! Compares Lockkeeper with its peers.
//!
//! `cargo run --release -p lockkeeper-bench -- --help`. Starts its own servers, measures all implementations in the same scenarios in one run,
//! interleaved in short slices, and reports speed, cost and violations of mutual exclusion. It writes `docs/performance.md`.
#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a program that counts to some thousands, and prints"
)]

mod bench;
mod child;
mod figures;
mod implementation;
mod implementations;
mod load;
mod machine;
mod overlap_detector;
mod page;
mod plots;
mod report;
mod scenarios;
mod slice;
mod stores;
mod thresholds;

use std::path::PathBuf;
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

    /// Write a Markdown page, and its plots into a directory named like the file without its extension
    #[arg(long, value_name = "FILE.md")]
    report: Option<PathBuf>,

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
    let (start, load_before) = (Instant::now(), load::average());
    if cfg!(debug_assertions) {
        eprintln!("built without --release: the figures are meaningless");
    }
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
    let machine = machine::describe();
    let noise = RedisServer::start().map_err(one_line)?;
    let connection = runtime.block_on(implementations::connect(&noise.url()))?;
    let mut bench = Bench::new(arguments.quick, arguments.only.clone(), connection);
    runtime.block_on(measure(&mut bench))?;
    let single = Builder::new_current_thread().enable_all().build().map_err(one_line)?;
    single.block_on(stores::single_threaded(&mut bench))?;
    if bench.sections.is_empty() {
        return Err(format!("no scenario matches --only {:?}", arguments.only));
    }
    // Sections are sorted by store, not by the order of measurement.
    bench.sections.sort_by_key(|section| report::sort_key(&section.id));
    let mut report = Report {
        quick: arguments.quick,
        repetitions: REPETITIONS,
        machine,
        partial: !arguments.only.is_empty(),
        seconds: start.elapsed().as_secs_f64(),
        load_before,
        sections: bench.sections,
        thresholds: Vec::new(),
    };
    report.thresholds = thresholds::check(&report);
    write_report(&report, arguments)
}

async fn measure(bench: &mut Bench) -> Outcome<()> {
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
    let mut command = "cargo run --release -p lockkeeper-bench --".to_owned();
    for argument in std::env::args().skip(1) {
        command.push(' ');
        command.push_str(&argument);
    }
    let dir = arguments.report.as_ref().map(|file| file.with_extension(""));
    let name = dir.as_ref().and_then(|dir| dir.file_name()).unwrap_or_default();
    let drawn: &[plots::Plot] = if dir.is_some() { &plots } else { &[] };
    let page = page::page(report, &command, drawn, &name.to_string_lossy());
    println!("{page}");
    if let Some(file) = &arguments.json {
        let json = serde_json::to_string_pretty(report).map_err(one_line)?;
        std::fs::write(file, json).map_err(one_line)?;
    }
    if let (Some(file), Some(dir)) = (&arguments.report, &dir) {
        plots::write(&plots, dir)?;
        std::fs::write(file, &page).map_err(one_line)?;
    }
    Ok(())
}
