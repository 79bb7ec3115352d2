//! Child processes of the benchmark, which hold locks or wait for one, and which the parent watches or kills.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit,
};
use tokio::task::{JoinHandle, spawn_blocking};

use crate::implementation::{Held, Implementation, Mode, Outcome, one_line};
use crate::implementations;
use crate::load;

/// How long a child may take to start or to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(90);

/// What a child does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Role {
    /// Holds locks.
    Hold,
    /// Holds one lock, for which `count` tasks wait.
    Wait,
}

/// The command line of a child.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ChildArgs {
    pub(crate) role: Role,
    /// `redis`, `postgres` or `file`.
    pub(crate) store: String,
    /// The address or directory of the store.
    pub(crate) address: String,
    /// The label of the implementation.
    pub(crate) implementation: String,
    pub(crate) ttl_ms: u64,
    /// The name of the lock, or the prefix of the names of several locks.
    pub(crate) key: String,
    pub(crate) count: usize,
}

/// Runs a child: acquires its locks, reports on standard output, and keeps running until it is killed.
pub(crate) async fn run_child(args: ChildArgs) -> Outcome<()> {
    // The child does not outlive its parent.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(one_line)?;
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).map_err(one_line)?;
    match serve(&args).await {
        Ok(()) => Ok(()),
        Err(error) => write_line(&format!("failed {error}")),
    }
}

async fn serve(args: &ChildArgs) -> Outcome<()> {
    let implementations =
        implementations_on(&args.store, &args.address, Duration::from_millis(args.ttl_ms)).await?;
    let implementation = implementations
        .into_iter()
        .find(|implementation| implementation.label() == args.implementation);
    let implementation = implementation
        .ok_or_else(|| format!("unknown implementation {:?}", args.implementation))?;
    let before = load::memory();
    let (held, waiting) = match args.role {
        Role::Hold => (hold(&implementation, args).await?, Vec::new()),
        Role::Wait => wait(&implementation, args).await?,
    };
    // Wait until memory used only for the setup is freed and the tasks have their final size.
    tokio::time::sleep(Duration::from_millis(100)).await;
    write_line(&format!("ready {}", load::memory() - before))?;
    spawn_blocking(|| io::stdin().read_line(&mut String::new()))
        .await
        .map_err(one_line)?
        .map_err(one_line)?;
    let (finished, waiting): (Vec<_>, Vec<_>) =
        waiting.into_iter().partition(JoinHandle::is_finished);
    let mut first_error = String::new();
    for task in finished {
        if let Err(error) = task.await.map_err(one_line).flatten() {
            first_error = error;
            break;
        }
    }
    write_line(&format!("waiting {} {first_error}", waiting.len()))?;
    std::future::pending::<()>().await;
    drop(held);
    Ok(())
}

fn write_line(line: &str) -> Outcome<()> {
    let mut out = io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(one_line)
}

async fn hold(implementation: &Implementation, args: &ChildArgs) -> Outcome<Vec<Box<dyn Held>>> {
    if args.count == 1 {
        return Ok(vec![implementation.lock(&args.key, 0).await?.acquire(Mode::Exclusive).await?]);
    }
    let mut held = Vec::with_capacity(args.count);
    while held.len() < args.count {
        let tasks = (held.len()..args.count.min(held.len() + 100)).map(|number| {
            let (implementation, key) = (implementation.clone(), format!("{}-{number}", args.key));
            tokio::spawn(async move {
                implementation.lock(&key, number).await?.acquire(Mode::Exclusive).await
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            held.push(task.await.map_err(one_line)??);
        }
        // Spread the acquisitions, because renewals keep the same distances.
        tokio::time::sleep(Duration::from_millis(args.ttl_ms) / 600).await;
    }
    Ok(held)
}

/// The held lock, and the tasks that wait for it.
type Waiting = (Vec<Box<dyn Held>>, Vec<JoinHandle<Outcome<()>>>);

async fn wait(implementation: &Implementation, args: &ChildArgs) -> Outcome<Waiting> {
    let holder = implementation.lock(&args.key, args.count).await?;
    let held = holder.acquire(Mode::Exclusive).await?;
    let locks = implementation.locks_on_one_key(&args.key, args.count).await?;
    let waiting = locks
        .into_iter()
        .map(|lock| tokio::spawn(async move { lock.acquire(Mode::Exclusive).await.map(drop) }));
    Ok((vec![held], waiting.collect()))
}

/// Returns the implementations for a store.
pub(crate) async fn implementations_on(
    store: &str,
    address: &str,
    ttl: Duration,
) -> Outcome<Vec<Implementation>> {
    match store {
        "redis" => implementations::on_redis(address, ttl).await,
        "postgres" => implementations::on_postgres(address, ttl).await,
        "file" => implementations::on_files(Path::new(address), ttl).await,
        _ => Err(format!("unknown store {store:?}")),
    }
}

/// A child process. Dropping it kills the process.
pub(crate) struct Process {
    child: Child,
    output: Option<BufReader<ChildStdout>>,
    /// How much memory the locks or waiters of the child take.
    pub(crate) bytes: f64,
}

impl Process {
    /// Starts a child and waits until it is ready.
    pub(crate) async fn start(args: &ChildArgs) -> Outcome<Self> {
        let role = if args.role == Role::Hold { "hold" } else { "wait" };
        let (ttl, count) = (args.ttl_ms.to_string(), args.count.to_string());
        let mut command = Command::new(std::env::current_exe().map_err(one_line)?);
        command.args(["child", role, &args.store, &args.address, &args.implementation, &ttl]);
        command.args([&args.key, &count]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(one_line)?;
        let output = child.stdout.take().map(BufReader::new);
        let mut process = Self { child, output, bytes: 0.0 };
        process.bytes = process.answer("ready ").await?.0;
        Ok(process)
    }

    /// Returns how many tasks still wait, and the first error of those that do not. Can be called once.
    pub(crate) async fn waiting(&mut self) -> Outcome<(f64, String)> {
        drop(self.child.stdin.take());
        self.answer("waiting ").await
    }

    /// Reads the next line, which starts with `start`, and returns the number in it and the text after the number.
    async fn answer(&mut self, start: &str) -> Outcome<(f64, String)> {
        let mut output = self.output.take().ok_or("the child's output is closed")?;
        let reading = spawn_blocking(move || {
            let mut line = String::new();
            output.read_line(&mut line).map(|_| (line, output))
        });
        let Ok(read) = tokio::time::timeout(ANSWER_TIMEOUT, reading).await else {
            // The kill closes the pipe, which ends the read.
            self.kill();
            return Err(format!("the child did not answer within {ANSWER_TIMEOUT:?}"));
        };
        let (line, output) = read.map_err(one_line)?.map_err(one_line)?;
        self.output = Some(output);
        let line = line.trim();
        if let Some(error) = line.strip_prefix("failed ") {
            return Err(error.to_owned());
        }
        let answer = line.strip_prefix(start).and_then(|answer| {
            let (number, rest) = answer.split_once(' ').unwrap_or((answer, ""));
            Some((number.parse().ok()?, rest.to_owned()))
        });
        answer.ok_or_else(|| format!("unexpected line from a child: {line:?}"))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process with SIGKILL.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
