//! Costs: requests, connections and CPU time.

use std::collections::BTreeMap;
use std::fs;

use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use crate::implementation::Implementation;

/// What a server has done so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Load {
    pub(crate) requests: f64,
    /// The number of open connections.
    pub(crate) connections: f64,
    /// CPU seconds by process. The time that a process used after the last sample is lost when it exits.
    processes: BTreeMap<u32, f64>,
}

impl Load {
    pub(crate) fn requests_since(&self, before: &Self) -> f64 {
        self.requests - before.requests
    }

    pub(crate) fn processor_since(&self, before: &Self) -> f64 {
        let before = |pid| before.processes.get(pid).copied().unwrap_or(0.0);
        self.processes.iter().map(|(pid, seconds)| seconds - before(pid)).sum()
    }
}

/// A server whose load is sampled.
#[derive(Clone, Copy)]
pub(crate) enum Meter<'a> {
    Redis(&'a RedisServer),
    /// All processes of the server.
    Postgres(&'a PostgresServer),
    /// The processes that serve one database, and its statements in the log. The server logs all statements with the database's
    /// name as prefix: PostgreSQL's statistics views lag by up to ten seconds.
    Database(&'a PostgresServer, &'a str),
}

impl Meter<'_> {
    /// Returns whether requests can be counted over a short time.
    pub(crate) fn counts_requests(self) -> bool {
        !matches!(self, Self::Postgres(_))
    }

    /// Samples the load that the clients of an implementation cause.
    pub(crate) fn read(self, implementation: &Implementation) -> Load {
        match self {
            Self::Redis(server) => of_redis(server, implementation),
            Self::Postgres(server) => Load { processes: processes(server, ""), ..Load::default() },
            Self::Database(server, database) => {
                // The process title of a backend.
                let processes = processes(server, &format!("postgres: postgres {database} "));
                let connections = processes.len() as f64;
                Load { requests: statements(server, database), connections, processes }
            }
        }
    }
}

fn of_redis(server: &RedisServer, implementation: &Implementation) -> Load {
    let stats = server.command(&["INFO", "commandstats"]);
    let calls = |command: &str| {
        let start = format!("cmdstat_{command}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(&start))?;
        line.split(',').next()?.parse::<f64>().ok()
    };
    let requests = implementation.commands.iter().filter_map(|command| calls(command)).sum();
    let info = server.command(&["INFO"]);
    let value = |name: &str| {
        info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok())
    };
    let seconds = value("used_cpu_user:").unwrap_or(0.0) + value("used_cpu_sys:").unwrap_or(0.0);
    // The connection of this query does not count.
    let connections = value("connected_clients:").unwrap_or(1.0) - 1.0;
    Load { requests, connections, processes: [(server.pid(), seconds)].into() }
}

/// Returns the CPU time of the server's processes whose command line starts with `start`.
fn processes(server: &PostgresServer, start: &str) -> BTreeMap<u32, f64> {
    let pid = server.pid();
    let children = text(&format!("/proc/{pid}/task/{pid}/children"));
    let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    let is_meant =
        |pid: &u32| start.is_empty() || text(&format!("/proc/{pid}/cmdline")).starts_with(start);
    let seconds = |pid| {
        // In nanoseconds; `stat` has a resolution of 10 ms, which is too coarse for hundreds of nearly idle processes.
        let spent = text(&format!("/proc/{pid}/schedstat"));
        let spent = spent.split_whitespace().next().and_then(|spent| spent.parse::<f64>().ok());
        (pid, spent.unwrap_or(0.0) / 1e9)
    };
    children.filter(is_meant).map(seconds).collect()
}

/// Returns how many statements a server has logged for a database, empty ones (heartbeats) included.
fn statements(server: &PostgresServer, database: &str) -> f64 {
    let log = fs::read(server.dir().join("server.log")).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let starts = ["statement: ", "execute "].map(|start| format!("{database} LOG:  {start}"));
    log.lines().filter(|line| starts.iter().any(|start| line.starts_with(start))).count() as f64
}

fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Returns the CPU seconds that a process has used.
pub(crate) fn processor_time(pid: u32) -> f64 {
    let stat = text(&format!("/proc/{pid}/stat"));
    // The second field is the program's name in brackets, which may itself contain brackets and blanks.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = fields.split_whitespace().skip(11).take(2);
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Returns the resident memory of this process, in bytes.
pub(crate) fn memory() -> f64 {
    status(std::process::id(), "VmRSS:").unwrap_or(0.0) * 1024.0
}

/// Returns the number of threads of a process.
pub(crate) fn threads(pid: u32) -> Option<f64> {
    status(pid, "Threads:")
}

fn status(pid: u32, name: &str) -> Option<f64> {
    let status = text(&format!("/proc/{pid}/status"));
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns how many file locks a process holds, by `/proc/locks`.
pub(crate) fn locked_files(pid: u32) -> f64 {
    // Such as `7: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF`. Lines of waiters have `->` as second field.
    let pid = pid.to_string();
    let is_its = |line: &&str| line.split_whitespace().nth(4) == Some(&pid);
    text("/proc/locks").lines().filter(is_its).count() as f64
}

/// Returns the load average of the last minute.
pub(crate) fn average() -> Option<f64> {
    text("/proc/loadavg").split_whitespace().next()?.parse().ok()
}
