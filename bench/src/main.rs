//! Lockkeeper side by side with its peers.
//!
//! `cargo run --release -p lockkeeper-bench -- --help`. Starts servers of its own, measures every make at the same works in one run,
//! interleaved in small slices, and says who is fast, who is not, and who breaks. `docs/performance.md` is written by it.
#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a program that counts to some thousands, and prints"
)]

mod bars;
mod bench;
mod child;
mod figures;
mod load;
mod machine;
mod make;
mod makes;
mod page;
mod plots;
mod referee;
mod report;
mod slice;
mod stores;
mod work;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, Subcommand};
use lockkeeper_testkit::server::RedisServer;
use tokio::runtime::Builder;

use crate::bench::{Bench, REPETITIONS};
use crate::make::{Outcome, told};
use crate::report::Report;

/// How many tasks may wait in a thread of their own: those of makes that block.
pub(crate) const THREADS: usize = 1024;

/// Measures Lockkeeper and its peers at the same work, in one run.
#[derive(Debug, Parser)]
struct Arguments {
    /// A look in less than two minutes, with less to rely on
    #[arg(long)]
    quick: bool,

    /// Only some works: redis, redlock, postgres, file, memory, or one such as redis/queue-8
    #[arg(long, value_name = "WORK", value_delimiter = ',')]
    only: Vec<String>,

    /// Writes everything that was measured, each repetition, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Writes a page of Markdown, and its plots into a directory of the same name without its end
    #[arg(long, value_name = "FILE.md")]
    report: Option<PathBuf>,

    #[command(subcommand)]
    child: Option<Role>,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Holds locks in a process of its own
    #[command(hide = true)]
    Child(child::Orders),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime =
        Builder::new_multi_thread().max_blocking_threads(THREADS + 32).enable_all().build();
    let outcome = runtime.map_err(told).and_then(|runtime| match arguments.child {
        Some(Role::Child(orders)) => runtime.block_on(child::obey(orders)),
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
        eprintln!("built without --release: the figures are worth nothing");
    }
    // Before anything else: it would be a pity to find out at the end.
    if let Some(file) = &arguments.report
        && file.extension().is_none()
    {
        return Err(format!("--report {}: a file whose name ends in .md", file.display()));
    }
    for file in arguments.json.iter().chain(&arguments.report) {
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(file);
        opened.map_err(|error| format!("{}: {error}", file.display()))?;
    }
    let machine = machine::describe();
    let weather = RedisServer::start().map_err(told)?;
    let connection = runtime.block_on(makes::connect(&weather.url()))?;
    let mut bench = Bench::new(arguments.quick, arguments.only.clone(), connection);
    runtime.block_on(measure(&mut bench))?;
    let single = Builder::new_current_thread().enable_all().build().map_err(told)?;
    single.block_on(stores::alone(&mut bench))?;
    if bench.sections.is_empty() {
        return Err(format!("nothing is called {:?}", arguments.only));
    }
    // By store; what was measured first or last does not matter.
    bench.sections.sort_by_key(|section| report::place(&section.id));
    let mut report = Report {
        quick: arguments.quick,
        repetitions: REPETITIONS,
        machine,
        part: !arguments.only.is_empty(),
        seconds: start.elapsed().as_secs_f64(),
        load_before,
        sections: bench.sections,
        bars: Vec::new(),
    };
    report.bars = bars::all(&report);
    hand_in(&report, arguments)
}

async fn measure(bench: &mut Bench) -> Outcome<()> {
    work::honest().await?;
    stores::in_memory(bench).await?;
    if bench.wants("redis") {
        stores::on_redis(bench).await?;
    }
    stores::on_redlock(bench).await?;
    if bench.wants("file") {
        stores::on_files(bench).await?;
    }
    if bench.wants("postgres") {
        stores::on_postgres(bench).await?;
    }
    stores::at_rest(bench).await
}

/// Prints the report, and writes what was asked for.
fn hand_in(report: &Report, arguments: &Arguments) -> Outcome<()> {
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
        let json = serde_json::to_string_pretty(report).map_err(told)?;
        std::fs::write(file, json).map_err(told)?;
    }
    if let (Some(file), Some(dir)) = (&arguments.report, &dir) {
        plots::write(&plots, dir)?;
        std::fs::write(file, &page).map_err(told)?;
    }
    Ok(())
}
