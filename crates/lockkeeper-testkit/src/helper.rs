//! A program that takes locks in a process of its own, for tests that kill it.
//!
//! A store crate makes one with a main function of a few lines, as a binary or an example:
//!
//! ```
//! use std::process::ExitCode;
//! use lockkeeper_core::{Keeper, Memory};
//!
//! fn main() -> ExitCode {
//!     # if std::env::args().count() < 2 { return ExitCode::SUCCESS; }
//!     lockkeeper_testkit::helper::main(async |_url| Ok(Keeper::new(Memory::new())))
//! }
//! ```
//!
//! It is called as `helper URL NAME TTL_MS hold` or `helper URL NAME TTL_MS hammer COUNT`, and says
//! what happens on standard output, a line each: `held FENCE`, `lost`, `released`; `hold …` for each
//! finished [`Hold`](crate::history::Hold) of a hammer, then `done`. A `hold` ends when its standard
//! input does.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use lockkeeper_core::{Error, ErrorKind, Fence, Keeper, Result};
use tokio::io::AsyncReadExt as _;

use crate::history::History;

/// Runs the helper, on a store that `open` opens from the first argument.
pub fn main(open: impl AsyncFnOnce(&str) -> Result<Keeper>) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(work(&arguments, open)),
        Err(error) => Err(Error::new(ErrorKind::Config, error.to_string())),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn work(arguments: &[String], open: impl AsyncFnOnce(&str) -> Result<Keeper>) -> Result<()> {
    let usage = || {
        let message = "usage: helper URL NAME TTL_MS hold | hammer COUNT";
        Error::new(ErrorKind::Config, message)
    };
    let [url, name, ttl, task @ ..] = arguments else { return Err(usage()) };
    let ttl = Duration::from_millis(ttl.parse().map_err(|_| usage())?);
    let keeper = open(url).await?.ttl(ttl);
    match task {
        [hold] if hold == "hold" => hold_until_told(&keeper, name).await,
        [hammer, count] if hammer == "hammer" => {
            hammer_on(&keeper, name, count.parse().map_err(|_| usage())?).await
        }
        _ => Err(usage()),
    }
}

async fn hold_until_told(keeper: &Keeper, name: &str) -> Result<()> {
    let guard = keeper.mutex(name).lock().await?;
    say(&format!("held {}", guard.fence().map_or(0, Fence::get)));
    let mut input = Vec::new();
    let mut stdin = tokio::io::stdin();
    tokio::select! {
        () = guard.lost() => say("lost"),
        _ = stdin.read_to_end(&mut input) => {
            guard.release().await?;
            say("released");
        }
    }
    Ok(())
}

async fn hammer_on(keeper: &Keeper, name: &str, count: usize) -> Result<()> {
    let history = History::new();
    let mut finished = 0;
    while finished < count {
        let guard = keeper.mutex(name).lock().await?;
        let open = history.begin(name, guard.owner(), guard.mode(), guard.fence());
        if let Some(deadline) = guard.expires_at() {
            open.until(deadline);
        }
        tokio::task::yield_now().await;
        let hold = open.end();
        guard.release().await?;
        // If we were stopped just after the grant, it had run out before the hold began.
        if hold.end >= Some(hold.start) {
            say(&format!("hold {hold}"));
            finished += 1;
        }
    }
    say("done");
    Ok(())
}

/// Says a line at once: whoever listens may kill us the next moment.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // If nobody listens any more, nobody minds.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
