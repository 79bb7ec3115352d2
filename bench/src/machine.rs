//! The machine: its description, and CPU affinity.

use std::fs;
use std::process::Command;
use std::sync::OnceLock;

use lockkeeper_testkit::server::Binaries;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::implementation::{Outcome, one_line};

/// Starts a server pinned to one CPU, and pins this thread and its children to another. On a machine with one CPU, they
/// share it.
pub(crate) fn on_separate_cpus<T>(start: impl FnOnce() -> T) -> Outcome<T> {
    static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
    let allowed = sched_getaffinity(None).map_err(one_line)?;
    let allowed = ALLOWED
        .get_or_init(|| (0..CpuSet::MAX_CPU).filter(|index| allowed.is_set(*index)).collect());
    pin_to_cpu(allowed.last())?;
    let server = start();
    pin_to_cpu(allowed.first())?;
    Ok(server)
}

fn pin_to_cpu(index: Option<&usize>) -> Outcome<()> {
    let mut set = CpuSet::new();
    set.set(*index.ok_or("the affinity mask has no CPU")?);
    sched_setaffinity(None, &set).map_err(one_line)
}

/// Describes CPU, memory, kernel, servers and compiler.
pub(crate) fn describe() -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("unknown", |(_, model)| model);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    add("CPU", format!("{model}, {cores} threads"));
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let total = total.and_then(|total| total.split_whitespace().next()?.parse::<f64>().ok());
    add("memory", format!("{:.0} GB", total.unwrap_or(0.0) / 1e6));
    let system = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    add("kernel", format!("Linux {}", system.trim()));
    add("Redis", version("redis-server", "redis-server"));
    add("PostgreSQL", version("postgres", "postgresql"));
    let build = if cfg!(debug_assertions) { "WITHOUT optimisation" } else { "--release" };
    add("Rust", format!("{}, built {build}", output(Command::new("rustc").arg("--version"))));
    facts
}

fn version(program: &str, package: &str) -> String {
    match Binaries::installed().find(program, package) {
        Ok(path) => output(Command::new(path).arg("--version")),
        Err(error) => error.to_string(),
    }
}

/// Returns the version number that a command prints.
fn output(command: &mut Command) -> String {
    match command.output() {
        Ok(output) => version_number(&String::from_utf8_lossy(&output.stdout)),
        Err(error) => error.to_string(),
    }
}

/// Returns the first word that is a version number, such as `7.0.15` in `Redis server v=7.0.15 sha=…`.
fn version_number(text: &str) -> String {
    let mut words = text.split_whitespace().map(|word| word.trim_start_matches("v="));
    words.find(|word| word.starts_with(|c: char| c.is_ascii_digit())).unwrap_or("unknown").into()
}

/// Returns the versions of the compared crates, from the lock file.
pub(crate) fn crate_versions() -> Vec<(String, String)> {
    const NAMES: &[&str] = &[
        "distkit",
        "distributed-lock-file",
        "distributed-lock-postgres",
        "distributed-lock-redis",
        "fd-lock",
        "redis",
        "redlock",
        "rslock",
        "sqlx",
        "tokio",
        "tokio-postgres",
    ];
    let lock = include_str!("../../Cargo.lock");
    let value = |line: &str| line.split('"').nth(1).unwrap_or_default().to_owned();
    let mut found = Vec::new();
    let mut lines = lock.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("name = ") && NAMES.contains(&value(line).as_str()) {
            found.push((value(line), lines.next().map(value).unwrap_or_default()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_reduced_to_its_number() {
        for (text, number) in [
            ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0", "7.0.15"),
            ("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)", "15.18"),
            ("rustc 1.95.0 (59807616e 2026-04-14)", "1.95.0"),
            ("", "unknown"),
        ] {
            assert_eq!(version_number(text), number);
        }
    }
}
