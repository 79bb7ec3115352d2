//! The testkit's helper process on the file store, with four more commands, each of which runs until its input ends:
//! `file_helper URL gc` removes idle files, `file_helper URL permit` holds the only permit of the semaphore `gpu`,
//! `file_helper URL start` locks `a` and starts a program, `file_helper URL read` acquires `a` for reading in a loop.

use std::io::Read as _;
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lockkeeper_core::blocking::block_on;
use lockkeeper_core::{Error, ErrorKind, Keeper, Result};
use lockkeeper_file::File;
use lockkeeper_testkit::helper;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match &arguments[..] {
        [url, task] if task == "gc" => block_on(remove_idle_files(url)),
        [url, task] if task == "permit" => block_on(hold_permit(url)),
        [url, task] if task == "start" => start_program(url),
        [url, task] if task == "read" => read_in_loop(url),
        _ => return helper::main(async |url| Ok(Keeper::new(File::from_url(url)?))),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Removes idle files in a loop, and prints the number removed.
#[expect(clippy::print_stdout, reason = "the tests read it")]
async fn remove_idle_files(url: &str) -> Result<()> {
    static ENDED: AtomicBool = AtomicBool::new(false);
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        ENDED.store(true, Ordering::Release);
    });
    let store = File::from_url(url)?;
    let mut removed = 0;
    while !ENDED.load(Ordering::Acquire) {
        let more = store.gc().await?;
        if more > 0 {
            removed += more;
            println!("removed {removed}");
        }
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the tests read it")]
async fn hold_permit(url: &str) -> Result<()> {
    let keeper = Keeper::new(File::from_url(url)?);
    let permit = keeper.semaphore("gpu", 1).acquire().await?;
    println!("held");
    let _ = std::io::stdin().read(&mut [0]);
    permit.release().await?;
    Ok(())
}

/// Acquires the read lock in a loop, and prints a line each time.
#[expect(clippy::print_stdout, reason = "the tests read it")]
fn read_in_loop(url: &str) -> Result<()> {
    let keeper = Keeper::new(File::from_url(url)?);
    let lock = keeper.ttl(Duration::from_secs(600)).rw_lock("a");
    loop {
        let guard = lock.blocking_read()?;
        println!("read");
        std::thread::sleep(Duration::from_millis(25));
        guard.blocking_release()?;
    }
}

/// Starts a program while it holds a lock, and prints its process id.
#[expect(clippy::print_stdout, reason = "the tests read it")]
fn start_program(url: &str) -> Result<()> {
    let keeper = Keeper::new(File::from_url(url)?);
    let guard = keeper.mutex("a").blocking_lock()?;
    let mut sleep = std::process::Command::new("sleep");
    sleep.arg("600").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let started = sleep.spawn();
    let started = started.map_err(|error| Error::new(ErrorKind::Config, error.to_string()))?;
    println!("started {}", started.id());
    let _ = std::io::stdin().read(&mut [0]);
    guard.blocking_release()?;
    Ok(())
}
