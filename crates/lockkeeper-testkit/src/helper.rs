//! A program that acquires locks in a separate process, for tests that kill it.
//!
//! A store crate builds it with a main function of a few lines, as a binary or an example:
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
//! It is called as `helper URL NAME TTL_MS TASK…`, and reports events on standard output, one per
//! line:
//!
//! - `hold`: acquires the lock; `held FENCE`, then `lost` or `released`. Ends at the end of its standard input.
//! - `hammer COUNT`: acquires and releases it `COUNT` times; `hold …` for each finished
//!   [`Hold`](crate::history::Hold), then `done`.
//! - `lead`: campaigns in an election; `campaigns` at first, `leads …` with a [`Hold`](crate::history::Hold) that has begun,
//!   `led …` with the same when it has ended. Ends at the end of its standard input: `resigned`.
//! - `work`: the same with `run_while_leader`; `works TERM`, and `stopped TERM` when the work was cancelled.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use lockkeeper_core::{Error, ErrorKind, Fence, Keeper, Mode, Result};
use tokio::io::AsyncReadExt as _;

use crate::history::History;

/// Runs the helper on a store that `open` opens from the first argument.
pub fn main(open: impl AsyncFnOnce(&str) -> Result<Keeper>) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(run_task(&arguments, open)),
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

async fn run_task(
    arguments: &[String],
    open: impl AsyncFnOnce(&str) -> Result<Keeper>,
) -> Result<()> {
    let usage = || {
        let message = "usage: helper URL NAME TTL_MS hold | hammer COUNT | lead | work";
        Error::new(ErrorKind::Config, message)
    };
    let [url, name, ttl, task @ ..] = arguments else { return Err(usage()) };
    let ttl = Duration::from_millis(ttl.parse().map_err(|_| usage())?);
    let keeper = open(url).await?.ttl(ttl);
    match task {
        [hold] if hold == "hold" => hold_until_end_of_input(&keeper, name).await,
        [lead] if lead == "lead" => lead_until_end_of_input(&keeper, name).await,
        [work] if work == "work" => work_until_end_of_input(&keeper, name).await,
        [task, count] if task == "hammer" => {
            hammer(&keeper, name, count.parse().map_err(|_| usage())?).await
        }
        _ => Err(usage()),
    }
}

async fn hold_until_end_of_input(keeper: &Keeper, name: &str) -> Result<()> {
    let guard = keeper.mutex(name).lock().await?;
    print_line(&format!("held {}", guard.fence().map_or(0, Fence::get)));
    tokio::select! {
        () = guard.lost() => print_line("lost"),
        () = end_of_input() => {
            guard.release().await?;
            print_line("released");
        }
    }
    Ok(())
}

async fn end_of_input() {
    let mut input = Vec::new();
    // An unreadable standard input counts as its end.
    let _ = tokio::io::stdin().read_to_end(&mut input).await;
}

async fn lead_until_end_of_input(keeper: &Keeper, name: &str) -> Result<()> {
    let election = keeper.election(name);
    let history = History::new();
    let end_of_input = end_of_input();
    tokio::pin!(end_of_input);
    print_line("campaigns");
    loop {
        let leadership = tokio::select! {
            leadership = election.campaign() => leadership?,
            () = &mut end_of_input => return Ok(()),
        };
        let (owner, term) = (leadership.owner(), Some(leadership.term()));
        let open = history.begin(name, owner, Mode::Exclusive, term);
        print_line(&format!("leads {}", open.hold()));
        let ended = tokio::select! {
            () = leadership.lost() => false,
            () = &mut end_of_input => true,
        };
        if let Some(deadline) = leadership.expires_at() {
            open.until(deadline);
        }
        print_line(&format!("led {}", open.end()));
        if ended {
            leadership.resign().await?;
            print_line("resigned");
            return Ok(());
        }
    }
}

async fn work_until_end_of_input(keeper: &Keeper, name: &str) -> Result<()> {
    /// The work of a term. It is dropped when the term ends.
    struct Work(Fence);

    impl Drop for Work {
        fn drop(&mut self) {
            print_line(&format!("stopped {}", self.0));
        }
    }

    let election = keeper.election(name);
    let lead = election.run_while_leader(|term| async move {
        print_line(&format!("works {term}"));
        let _work = Work(term);
        std::future::pending::<()>().await;
    });
    tokio::select! {
        ended = lead => ended,
        () = end_of_input() => {
            keeper.close().await;
            Ok(())
        }
    }
}

async fn hammer(keeper: &Keeper, name: &str, count: usize) -> Result<()> {
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
        // If this process was stopped just after the grant, the lease had expired before the hold began.
        if hold.end >= Some(hold.start) {
            print_line(&format!("hold {hold}"));
            finished += 1;
        }
    }
    print_line("done");
    Ok(())
}

/// Prints a line and flushes it: the reader may kill this process next.
fn print_line(line: &str) {
    let mut out = std::io::stdout().lock();
    // The reader may have closed the pipe.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
