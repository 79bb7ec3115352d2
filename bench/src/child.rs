//! What this program does in a process of its own, to be looked at or killed from outside.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};

use crate::load;
use crate::make::{Make, Mode, Outcome, told};
use crate::makes;

/// What a child is told on its command line.
#[derive(Debug, clap::Args)]
pub(crate) struct Orders {
    /// `redis`, `postgres` or `file`.
    store: String,
    /// Its address or directory.
    place: String,
    /// Which make, by its label.
    make: String,
    ttl_ms: u64,
    /// The name of the lock, or how the names of many begin.
    key: String,
    count: usize,
}

/// Takes the locks, says so, and holds them until it is killed.
pub(crate) async fn obey(orders: Orders) -> Outcome<()> {
    // Whatever becomes of who started it.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(told)?;
    let ttl = Duration::from_millis(orders.ttl_ms);
    let makes = of(&orders.store, &orders.place, ttl).await?;
    let make = makes.into_iter().find(|make| make.label() == orders.make);
    let make = make.ok_or_else(|| format!("no make {:?}", orders.make))?;
    let before = load::memory();
    let mut held = Vec::with_capacity(orders.count);
    if orders.count == 1 {
        held.push(make.lock(&orders.key, 0).await?.acquire(Mode::Exclusive).await?);
    }
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
        tokio::time::sleep(ttl / 600).await;
    }
    // What was needed only to take them comes back, and tasks have their final size.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut out = std::io::stdout();
    writeln!(out, "held {}", load::memory() - before).and_then(|()| out.flush()).map_err(told)?;
    std::future::pending::<()>().await;
    drop(held);
    Ok(())
}

/// The makes on a store.
pub(crate) async fn of(store: &str, place: &str, ttl: Duration) -> Outcome<Vec<Make>> {
    match store {
        "redis" => makes::on_redis(place, ttl).await,
        "postgres" => makes::on_postgres(place).await,
        "file" => makes::on_files(Path::new(place)),
        _ => Err(format!("no store {store:?}")),
    }
}

/// A process that holds locks. It is killed when this is dropped.
pub(crate) struct Holder {
    child: Child,
    /// How much memory it took to hold them.
    pub(crate) bytes: f64,
}

impl Holder {
    /// Starts one, and waits until it holds the locks.
    pub(crate) async fn start(
        store: &str,
        place: &str,
        make: &Make,
        ttl: Duration,
        key: &str,
        count: usize,
    ) -> Outcome<Self> {
        let program = std::env::current_exe().map_err(told)?;
        let mut command = Command::new(program);
        command.args(["child", store, place, &make.label(), &ttl.as_millis().to_string(), key]);
        command.arg(count.to_string()).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(told)?;
        let output = child.stdout.take().ok_or("no output")?;
        let mut holder = Self { child, bytes: 0.0 };
        let line = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            BufReader::new(output).read_line(&mut line).map(|_| line)
        });
        let line = line.await.map_err(told)?.map_err(told)?;
        let bytes = line.trim().strip_prefix("held ").and_then(|bytes| bytes.parse().ok());
        holder.bytes = bytes.ok_or_else(|| format!("{}: a child said {line:?}", make.label()))?;
        Ok(holder)
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

impl Drop for Holder {
    fn drop(&mut self) {
        self.kill();
    }
}
