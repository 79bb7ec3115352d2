//! What a run costs: requests and processor time.

use std::ops::Sub;

use lockkeeper_testkit::server::RedisServer;

use crate::make::Make;

/// What a server, or a process, has done so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Load {
    pub(crate) requests: f64,
    /// Seconds of processor time.
    pub(crate) processor: f64,
}

/// Reads the load.
pub(crate) type Meter<'a> = dyn Fn() -> Load + Send + Sync + 'a;

impl Sub for Load {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            requests: self.requests - before.requests,
            processor: self.processor - before.processor,
        }
    }
}

/// What a Redis server has done for the clients of a make.
pub(crate) fn of_redis(server: &RedisServer, make: &Make) -> Load {
    let stats = server.command(&["INFO", "commandstats"]);
    let calls = |command: &str| {
        let start = format!("cmdstat_{command}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(&start))?;
        line.split(',').next()?.parse::<f64>().ok()
    };
    let requests = make.commands.iter().filter_map(|command| calls(command)).sum();
    let cpu = server.command(&["INFO", "cpu"]);
    let seconds = |name: &str| {
        cpu.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok())
    };
    let user = seconds("used_cpu_user:").unwrap_or(0.0);
    Load { requests, processor: user + seconds("used_cpu_sys:").unwrap_or(0.0) }
}

/// Seconds of processor time that a process has used.
pub(crate) fn processor_time(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The program's name comes first, in brackets, and may itself contain brackets and blanks.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = fields.split_whitespace().skip(11).take(2);
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// How much memory this process has, in bytes.
pub(crate) fn memory() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next());
    kilobytes.and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0) * 1024.0
}

/// The load average of the last minute.
pub(crate) fn average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|text| text.parse().ok()).unwrap_or(f64::NAN)
}
