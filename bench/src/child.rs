//! What this program does in a process of its own, to be looked at or killed from outside.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit,
};
use tokio::task::{JoinHandle, spawn_blocking};

use crate::load;
use crate::make::{Held, Make, Mode, Outcome, told};
use crate::makes;

/// How long a child may take to do what it is told.
const PATIENCE: Duration = Duration::from_secs(90);

/// What a child is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Role {
    /// Holds locks.
    Hold,
    /// Holds one lock, for which so many others wait.
    Wait,
}

/// What a child is told on its command line.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Orders {
    pub(crate) role: Role,
    /// `redis`, `postgres` or `file`.
    pub(crate) store: String,
    /// Its address or directory.
    pub(crate) place: String,
    /// Which make, by its label.
    pub(crate) make: String,
    pub(crate) ttl_ms: u64,
    /// The name of the lock, or how the names of many begin.
    pub(crate) key: String,
    pub(crate) count: usize,
}

/// Does it, says so, and goes on until it is killed. What fails is said as well.
pub(crate) async fn obey(orders: Orders) -> Outcome<()> {
    // Whatever becomes of who started it.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(told)?;
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).map_err(told)?;
    match serve(&orders).await {
        Ok(()) => Ok(()),
        Err(error) => say(&format!("failed {error}")),
    }
}

async fn serve(orders: &Orders) -> Outcome<()> {
    let makes = of(&orders.store, &orders.place, Duration::from_millis(orders.ttl_ms)).await?;
    let make = makes.into_iter().find(|make| make.label() == orders.make);
    let make = make.ok_or_else(|| format!("no make {:?}", orders.make))?;
    let before = load::memory();
    let (held, waiting) = match orders.role {
        Role::Hold => (hold(&make, orders).await?, Vec::new()),
        Role::Wait => wait(&make, orders).await?,
    };
    // What was needed only to get there comes back, and tasks have their final size.
    tokio::time::sleep(Duration::from_millis(100)).await;
    say(&format!("ready {}", load::memory() - before))?;
    spawn_blocking(|| io::stdin().read_line(&mut String::new()))
        .await
        .map_err(told)?
        .map_err(told)?;
    let (over, waiting): (Vec<_>, Vec<_>) = waiting.into_iter().partition(JoinHandle::is_finished);
    let mut why = String::new();
    for task in over {
        if let Err(error) = task.await.map_err(told).flatten() {
            why = error;
            break;
        }
    }
    say(&format!("waiting {} {why}", waiting.len()))?;
    std::future::pending::<()>().await;
    drop(held);
    Ok(())
}

fn say(line: &str) -> Outcome<()> {
    let mut out = io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(told)
}

async fn hold(make: &Make, orders: &Orders) -> Outcome<Vec<Box<dyn Held>>> {
    if orders.count == 1 {
        return Ok(vec![make.lock(&orders.key, 0).await?.acquire(Mode::Exclusive).await?]);
    }
    let mut held = Vec::with_capacity(orders.count);
    while held.len() < orders.count {
        let asks = (held.len()..orders.count.min(held.len() + 100)).map(|number| {
            let (make, key) = (make.clone(), format!("{}-{number}", orders.key));
            tokio::spawn(
                async move { make.lock(&key, number).await?.acquire(Mode::Exclusive).await },
            )
        });
        for ask in asks.collect::<Vec<_>>() {
            held.push(ask.await.map_err(told)??);
        }
        // Not all at one moment: they will be renewed as they were taken.
        tokio::time::sleep(Duration::from_millis(orders.ttl_ms) / 600).await;
    }
    Ok(held)
}

/// The one that is held, and those who wait for it.
type Waiting = (Vec<Box<dyn Held>>, Vec<JoinHandle<Outcome<()>>>);

async fn wait(make: &Make, orders: &Orders) -> Outcome<Waiting> {
    let holder = make.lock(&orders.key, orders.count).await?;
    let held = holder.acquire(Mode::Exclusive).await?;
    let locks = make.locks(&orders.key, orders.count).await?;
    let waiting = locks
        .into_iter()
        .map(|lock| tokio::spawn(async move { lock.acquire(Mode::Exclusive).await.map(drop) }));
    Ok((vec![held], waiting.collect()))
}

/// The makes on a store.
pub(crate) async fn of(store: &str, place: &str, ttl: Duration) -> Outcome<Vec<Make>> {
    match store {
        "redis" => makes::on_redis(place, ttl).await,
        "postgres" => makes::on_postgres(place, ttl).await,
        "file" => makes::on_files(Path::new(place), ttl).await,
        _ => Err(format!("no store {store:?}")),
    }
}

/// A process that holds locks or waits for one. It is killed when this is dropped.
pub(crate) struct Process {
    child: Child,
    output: Option<BufReader<ChildStdout>>,
    /// How much memory it took to get there.
    pub(crate) bytes: f64,
}

impl Process {
    /// Starts one, and waits until it has done what it was told.
    pub(crate) async fn start(orders: &Orders) -> Outcome<Self> {
        let role = if orders.role == Role::Hold { "hold" } else { "wait" };
        let (ttl, count) = (orders.ttl_ms.to_string(), orders.count.to_string());
        let mut command = Command::new(std::env::current_exe().map_err(told)?);
        command.args(["child", role, &orders.store, &orders.place, &orders.make, &ttl]);
        command.args([&orders.key, &count]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(told)?;
        let output = child.stdout.take().map(BufReader::new);
        let mut process = Self { child, output, bytes: 0.0 };
        process.bytes = process.answer("ready ").await?.0;
        Ok(process)
    }

    /// How many still wait, and why one does not, if it failed. Asked once.
    pub(crate) async fn waiting(&mut self) -> Outcome<(f64, String)> {
        drop(self.child.stdin.take());
        self.answer("waiting ").await
    }

    /// The number in its next line, which begins so, and what stands behind it.
    async fn answer(&mut self, start: &str) -> Outcome<(f64, String)> {
        let mut output = self.output.take().ok_or("a child does not speak any more")?;
        let reading = spawn_blocking(move || {
            let mut line = String::new();
            output.read_line(&mut line).map(|_| (line, output))
        });
        let Ok(read) = tokio::time::timeout(PATIENCE, reading).await else {
            // That also ends the reading.
            self.kill();
            return Err(format!("a child did not answer within {PATIENCE:?}"));
        };
        let (line, output) = read.map_err(told)?.map_err(told)?;
        self.output = Some(output);
        let line = line.trim();
        if let Some(error) = line.strip_prefix("failed ") {
            return Err(error.to_owned());
        }
        let answer = line.strip_prefix(start).and_then(|answer| {
            let (number, rest) = answer.split_once(' ').unwrap_or((answer, ""));
            Some((number.parse().ok()?, rest.to_owned()))
        });
        answer.ok_or_else(|| format!("a child said {line:?}"))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it as a crash would.
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
