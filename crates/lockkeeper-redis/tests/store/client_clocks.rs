//! Locks do not depend on the clocks of clients.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use lockkeeper_testkit::server::ServerClock;
use lockkeeper_testkit::wait::{eventually, soon};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::common::{key, lock, nothing_left, number, queued, secs, server};

/// Returns the Rust files below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let files = files.into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs"));
    files.chain(folders.iter().flat_map(|folder| sources(folder))).collect()
}

#[test]
fn the_source_does_not_read_the_wall_clock() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = sources(&folder);
    // The diagnosis compares the clocks of servers with the local one.
    files.retain(|path| !path.starts_with(folder.join("diagnose")));
    assert!(files.len() >= 25, "{files:?}");
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        for word in ["SystemTime", "UNIX_EPOCH", "Utc::now", "CLOCK_REALTIME"] {
            assert!(!text.contains(word), "{word} in {}", path.display());
        }
    }
}

/// A helper process whose clock is an hour ahead.
struct Ahead {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Ahead {
    fn start(clock: &ServerClock, url: &str, name: &str) -> Self {
        let mut program = std::env::current_exe().unwrap();
        program.pop();
        program.pop();
        let mut command = Command::new(program.join("examples/redis_helper"));
        command.args([url, name, "6000", "hold"]).envs(clock.environment());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    async fn next_line(&mut self) -> String {
        soon("the helper's next line", self.lines.next_line()).await.unwrap().unwrap()
    }

    async fn held(&mut self) -> u64 {
        let line = self.next_line().await;
        line.strip_prefix("held ").unwrap_or_else(|| panic!("{line}")).parse().unwrap()
    }

    async fn release(&mut self) {
        drop(self.child.stdin.take());
        assert_eq!(self.next_line().await, "released");
    }
}

#[tokio::test]
async fn clients_whose_clocks_differ_by_an_hour_exclude_each_other_and_hand_off() {
    let (server, keeper) = server().await;
    let hour = ServerClock::new().unwrap();
    hour.set_ahead(3_600_000_000);
    let date = Command::new("date").arg("+%s").envs(hour.environment()).output();
    let date = String::from_utf8(date.await.unwrap().stdout).unwrap();
    let clock = server.command(&["TIME"]);
    let clock: u64 = clock.lines().next().unwrap().parse().unwrap();
    let ahead = date.trim().parse::<u64>().unwrap() - clock;
    assert!((3590..4200).contains(&ahead), "the shim has no effect: {ahead}");

    // The helper holds for longer than its lease: it renews, and the waiter does not acquire.
    let mut other = Ahead::start(&hour, &server.url(), "a");
    let first = other.held().await;
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    let mutex = keeper.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await });
    queued(&keeper, "a", 1).await;
    let infos = keeper.inspect().unwrap().show("a").await.unwrap();
    let (holder, waiter) = (&infos[0].holders[0], &infos[0].waiters[0]);
    assert!(holder.age.unwrap() < secs(1800) && waiter.age.unwrap() < secs(1800));
    assert!(holder.remaining.unwrap() <= secs(6));
    let owner = || server.command(&["GET", &key("a")]).split(' ').next().map(str::to_owned);
    let first_owner = owner();
    let mut renewals = 0;
    let mut left = number(&server, &["PTTL", &key("a")]);
    eventually("its lease is renewed three times", async || {
        assert_eq!(owner(), first_owner);
        let now = number(&server, &["PTTL", &key("a")]);
        renewals += i32::from(now > left);
        left = now;
        renewals >= 3
    })
    .await;
    assert!(!waiting.is_finished());
    other.release().await;
    let guard = soon("the waiter", waiting).await.unwrap().unwrap();
    let second = guard.fence().unwrap().get();
    assert!(second > first);

    // The helper waits in the queue, and then acquires.
    let mut other = Ahead::start(&hour, &server.url(), "a");
    queued(&keeper, "a", 1).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    assert!(other.held().await > second);
    other.release().await;
    let last = lock(&keeper, "a").await;
    assert!(last.fence().unwrap().get() > second);
    last.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}
