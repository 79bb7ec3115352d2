//! `run`: runs a command while a lock is held.

use std::io;
use std::time::Duration;

use lockkeeper::{Guard, Keeper, ReleaseOutcome, State};
use rustix::process::Signal;
use tokio::signal::unix::Signal as Stream;

use crate::acquire::LockRequest;
use crate::args;
use crate::child::{Child, Status, stops_for_terminal};
use crate::failure::Failure;
use crate::group::{Group, Scope};
use crate::guardian::{self, BootTime, Guardian};
use crate::loss::Loss;
use crate::processes;
use crate::reaper::Reaper;
use crate::report::{Reporter, Style};
use crate::signals::{self, Signals};
use crate::store;
use crate::terminal::Terminal;

/// The default of `--kill-after`.
const KILL_AFTER: Duration = Duration::from_secs(5);
/// How long requests in flight may delay the exit.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for a new guardian to start before the lock is checked again.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval at which the process group is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long to wait for processes to die of KILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);
/// The warning after a loss on a system that does not list processes.
const NOT_LISTED: &str = "only the command's process group was stopped: processes that left the group may still run, \
                          because this system does not list processes (no /proc for this pid namespace)";

/// Runs a command and returns the exit code.
pub(crate) async fn run(mut run: args::Run) -> u8 {
    let style = match (run.quiet, run.json) {
        (true, _) => Style::Quiet,
        (_, true) => Style::Json,
        _ => Style::Text,
    };
    if run.lock.label.is_none() {
        run.lock.label = label(&run);
    }
    let mut reporter = Reporter::new(style, &run.lock.name);
    let mut interrupted = false;
    match acquire_and_run(&run, &mut reporter, &mut interrupted).await {
        Ok(code) => {
            if interrupted {
                Terminal::interrupt_own_group();
            }
            code
        }
        Err(failure) => {
            reporter.failed(&failure);
            Terminal::reraise_interrupt(&failure);
            failure.code
        }
    }
}

/// Returns the default label: host, pid, and the command instead of `lockkeeper`.
fn label(run: &args::Run) -> Option<lockkeeper::Label> {
    let default = lockkeeper::Label::default().to_string();
    let (place, _) = default.rsplit_once(':')?;
    let program = std::path::Path::new(run.command.first()?).file_name()?.to_string_lossy();
    let clean: String = program.chars().filter(|c| !c.is_control()).take(40).collect();
    lockkeeper::Label::new(format!("{place}:{clean}")).ok()
}

/// Acquires the lock, runs the command and releases the lock. Sets `interrupted` if the command was in the foreground of a
/// terminal and died of Ctrl-C.
async fn acquire_and_run(
    run: &args::Run,
    reporter: &mut Reporter,
    interrupted: &mut bool,
) -> Result<u8, Failure> {
    let mut signals = Signals::new().map_err(|error| Failure::signal_handlers(&error))?;
    let reaper = Reaper::start().map_err(|error| Failure::signal_handlers(&error))?;
    let url = store::url(&run.store)?;
    let kill_after = kill_after(run, &url)?;
    let keeper = signals.unless(store::open_for_run(url)).await??;
    let request = LockRequest::new(&keeper, &run.lock);
    let guard = match signals.unless(request.acquire(reporter)).await {
        Ok(Ok(guard)) => guard,
        // Waits for requests in flight, until a timeout or another signal.
        Ok(Err(failure)) | Err(failure) => {
            let closed = tokio::time::timeout(CLOSE_TIMEOUT, keeper.close());
            let _ = signals.unless(closed).await;
            return Err(failure);
        }
    };
    let started = Supervisor::start(run, &guard, kill_after, signals, &reaper, reporter).await;
    let ended = match started {
        Ok(supervisor) => supervisor.wait(reporter, interrupted).await,
        Err(failure) => Err(failure),
    };
    finish(&keeper, guard, ended, reporter).await
}

/// Returns the time between TERM and KILL. The lease must be long enough for a failed renewal, this time, and the margin.
/// On a file store there is no lease, and so no limit. A hold on PostgreSQL has one, because its session can expire.
fn kill_after(run: &args::Run, url: &str) -> Result<Duration, Failure> {
    let ttl = run.lock.ttl;
    match run.kill_after {
        None => Ok(KILL_AFTER.min(ttl / 3)),
        Some(given) if !store::is_file(url) && given > ttl / 2 => Err(Failure::usage(format!(
            "--kill-after {given:?} is too long for --ttl {ttl:?}: use at most {:?}, or a longer --ttl",
            ttl / 2
        ))),
        Some(given) => Ok(given),
    }
}

/// Returns how long before the end of the lease all processes must be dead.
fn margin(ttl: Duration) -> Duration {
    (ttl / 10).min(Duration::from_millis(500))
}

/// Releases the lock and returns the exit code.
async fn finish(
    keeper: &Keeper,
    guard: Guard,
    ended: Result<Status, Failure>,
    reporter: &mut Reporter,
) -> Result<u8, Failure> {
    // The command has ended, so a signal now ends the process without waiting for the store.
    let mut signals = Signals::new().map_err(|error| Failure::signal_handlers(&error))?;
    let name = guard.name().to_owned();
    let lost = matches!(&ended, Err(failure) if failure.kind == "lost");
    let ended = if lost {
        drop(guard);
        ended
    } else {
        match signals.unless(guard.release()).await {
            Ok(Ok(ReleaseOutcome::Released)) => {
                reporter.released();
                ended
            }
            Ok(Ok(ReleaseOutcome::AlreadyLost)) => ended.and_then(|_| {
                let when = "before the command ended, and it may have run beside another holder";
                Err(Failure::lost(format!("lost {name:?} {when}")))
            }),
            Ok(Err(error)) => {
                reporter.warn(&format!("{error}; the lock stays held until its lease ends"));
                ended
            }
            Err(_) => {
                let how = "was interrupted; the lock stays held until its lease ends";
                reporter.warn(&format!("the release of {name:?} {how}"));
                return ended.map(Status::code);
            }
        }
    };
    let timeout = if lost { Duration::from_secs(1) } else { CLOSE_TIMEOUT };
    let _ = signals.unless(tokio::time::timeout(timeout, keeper.close())).await;
    ended.map(Status::code)
}

/// Supervises a running command: its status, signals, the terminal, the guardian and the lock.
struct Supervisor<'a> {
    guard: &'a Guard,
    ttl: Duration,
    kill_after: Duration,
    overlap_grace: Duration,
    signals: Signals,
    children: Stream,
    continued: Stream,
    terminal: Terminal,
    guardian: Guardian,
    group: Group,
    child: Child,
    /// When all processes of the command must be dead. The guardian has the same deadline. `None` without a lease.
    deadline: Option<BootTime>,
    /// Whether a signal that asks the command to terminate was forwarded.
    terminating: bool,
}

impl<'a> Supervisor<'a> {
    async fn start(
        run: &args::Run,
        guard: &'a Guard,
        kill_after: Duration,
        mut signals: Signals,
        reaper: &Reaper,
        reporter: &Reporter,
    ) -> Result<Self, Failure> {
        let broken =
            |error: io::Error| Failure::unavailable(format!("cannot supervise a command: {error}"));
        let children = signals::stream(Signal::CHILD).map_err(broken)?;
        let continued = signals::stream(Signal::CONT).map_err(broken)?;
        let guardian = match Guardian::start(guard.owner(), guardian::START_TIMEOUT).await {
            Ok(guardian) => guardian,
            Err(error) => {
                // If Ctrl-C killed the guardian before it had its own process group, this process received the signal, too.
                // The runtime reports it after it has polled its signal driver.
                let signal = tokio::time::timeout(POLL_INTERVAL, signals.next()).await;
                return Err(signal.map_or_else(|_| broken(error), Failure::signal));
            }
        };
        let terminal = Terminal::find();
        // A signal may have arrived since the grant: then the command is not started.
        if let Some(signal) = signals.pending() {
            guardian.dismiss();
            return Err(Failure::signal(signal));
        }
        // The process may have been stopped for a long time since the lock was granted.
        if !guard.is_held() {
            guardian.dismiss();
            let name = guard.name();
            return Err(Failure::lost(format!("lost {name:?} before the command was started")));
        }
        let deadline = kill_deadline(guard, run.lock.ttl);
        if let Some(deadline) = deadline {
            guardian.set_deadline(deadline);
        }
        let child = Child::spawn(run, guard).inspect_err(|_| guardian.dismiss())?;
        reaper.exclude(child.pid());
        let group = Group::new(child.pid(), guard.owner());
        guardian.set_group(&group);
        // Printed while this process is in the foreground: the terminal may stop a background process that writes to it.
        reporter.started(child.pid().as_raw_pid());
        // If the command used the terminal before this call, TTIN or TTOU has stopped it. `suspend` continues it.
        terminal.move_to_foreground(group.id());
        Ok(Self {
            guard,
            ttl: run.lock.ttl,
            kill_after,
            overlap_grace: run.overlap_grace,
            signals,
            children,
            continued,
            terminal,
            guardian,
            group,
            child,
            deadline,
            terminating: false,
        })
    }

    /// Waits until the command has ended. After a signal or a loss, also waits until the processes that it started have
    /// ended.
    async fn wait(
        mut self,
        reporter: &mut Reporter,
        interrupted: &mut bool,
    ) -> Result<Status, Failure> {
        let ended = self.watch().await;
        let ended = match ended {
            Ok(status) if self.terminating || matches!(status, Status::Killed(_)) => {
                self.wait_for_group().await.map(|()| status)
            }
            ended => ended,
        };
        let ended = match ended {
            Ok(status) => Ok(status),
            Err(loss) => Err((loss, self.stop(loss).await)),
        };
        self.guardian.dismiss();
        let in_foreground = self.terminal.is_foreground(self.group.id());
        self.terminal.restore_foreground(self.group.id());
        match ended {
            Ok(status) => {
                // If this process forwarded a signal, the INT did not come from the terminal.
                *interrupted = in_foreground
                    && !self.terminating
                    && status == Status::Killed(Signal::INT.as_raw());
                reporter.exited(status);
                Ok(status)
            }
            Err((loss, status)) => {
                reporter.exited(status);
                let killed = status == Status::Killed(Signal::KILL.as_raw());
                if !processes::are_listed() {
                    reporter.warn(NOT_LISTED);
                }
                let how = if killed { "killed" } else { "stopped" };
                let name = self.guard.name();
                Err(Failure::lost(format!("lost {name:?}: {loss}; the command was {how}")))
            }
        }
    }

    /// Waits until the command has ended. Returns a `Loss` if the lock is lost earlier, or cannot be renewed in time.
    async fn watch(&mut self) -> Result<Status, Loss> {
        let lost = self.guard.lost_token();
        loop {
            if let Some(status) = self.child.poll_status() {
                match status {
                    Status::Stopped(signal) => self.suspend(signal).await,
                    // The guardian killed it at the deadline.
                    Status::Killed(_) if self.deadline.is_some_and(BootTime::has_passed) => {
                        return Err(Loss::Expired);
                    }
                    ended => return Ok(ended),
                }
            }
            self.check()?;
            self.replace_guardian().await;
            let pause = self.pause();
            tokio::select! {
                biased;
                () = lost.cancelled() => {}
                _ = self.children.recv() => {}
                signal = self.signals.next() => self.forward(signal),
                _ = self.continued.recv() => self.terminal.move_to_foreground(self.group.id()),
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Checks that the lock is held and its lease is long enough to continue. Sends a new deadline to the guardian.
    fn check(&mut self) -> Result<(), Loss> {
        // Checked first, because the state is also `Lost` after the lease has ended.
        if self.deadline.is_some_and(BootTime::has_passed) {
            return Err(Loss::Expired);
        }
        if self.guard.state() == State::Lost {
            return Err(Loss::Dropped);
        }
        let Some(deadline) = kill_deadline(self.guard, self.ttl) else { return Ok(()) };
        if deadline.before(self.kill_after).has_passed() {
            return Err(Loss::LeaseEnding);
        }
        if self.deadline != Some(deadline) {
            self.deadline = Some(deadline);
            self.guardian.set_deadline(deadline);
        }
        Ok(())
    }

    /// Returns how long to sleep: until TERM is due, or until the next check for a renewal.
    fn pause(&self) -> Duration {
        match self.deadline {
            Some(at) => at.before(self.kill_after).remaining().min(self.ttl / 12),
            None => Duration::from_secs(3600),
        }
    }

    fn forward(&mut self, signal: Signal) {
        self.group.signal(signal);
        if signals::asks_to_terminate(signal) {
            self.terminating = true;
            // A stopped process does not handle signals.
            self.group.signal(Signal::CONT);
        }
    }

    /// Starts a new guardian if the last one is dead, so that the command cannot outlive this process.
    async fn replace_guardian(&mut self) {
        if !self.guardian.is_dead() {
            return;
        }
        // After this time the lock is checked again, even if no guardian has started.
        let timeout = self.pause().min(REPLACE_TIMEOUT);
        let lost = self.guard.lost_token();
        let started = tokio::select! {
            biased;
            // The caller kills the command. So does the guardian that is being started, because its pipe closes.
            () = lost.cancelled() => return,
            started = Guardian::start(self.guard.owner(), timeout) => started,
        };
        if let Ok(guardian) = started {
            guardian.set_group(&self.group);
            if let Some(deadline) = self.deadline {
                guardian.set_deadline(deadline);
            }
            self.guardian = guardian;
        } else {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Handles a command that was stopped. On a terminal, stops the whole job until the shell continues it.
    async fn suspend(&mut self, signal: i32) {
        if !self.terminal.exists() {
            return;
        }
        let has_terminal =
            self.terminal.is_in_foreground() || self.terminal.is_foreground(self.group.id());
        if !(stops_for_terminal(signal) && has_terminal) {
            self.terminal.restore_foreground(self.group.id());
            Terminal::stop_own_group();
            // The stop may take effect late. The kernel does not stop an orphaned process group, which no shell could
            // continue.
            tokio::select! {
                _ = self.continued.recv() => {}
                () = tokio::time::sleep(Duration::from_millis(300)) => {}
            }
        }
        // Continues the command only if the lock is still held.
        if self.check().is_ok() {
            self.terminal.move_to_foreground(self.group.id());
            self.group.signal(Signal::CONT);
        }
    }

    /// After a signal, waits until the process group has ended, and kills what is left of it after `--kill-after`.
    async fn wait_for_group(&mut self) -> Result<(), Loss> {
        let kill_at = BootTime::now().after(self.kill_after);
        while !self.group.is_empty(Scope::Inside) {
            self.check()?;
            if kill_at.has_passed() {
                self.group.kill();
                self.wait_after_kill().await;
                return Ok(());
            }
            tokio::select! {
                signal = self.signals.next() => self.forward(signal),
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
        Ok(())
    }

    /// Ends the command and all processes that it started, within the time that the kind of loss allows.
    async fn stop(&mut self, loss: Loss) -> Status {
        let mut kill_at = self.kill_at(loss);
        if !kill_at.has_passed() {
            self.group.signal_all(Signal::TERM);
        }
        let mut ended = None;
        loop {
            let is_final = |status: &Status| !matches!(status, Status::Stopped(_));
            ended = ended.or_else(|| self.child.poll_status().filter(is_final));
            if ended.is_some() && self.group.is_empty(Scope::Anywhere) {
                break;
            }
            if kill_at.has_passed() {
                self.group.kill();
                self.wait_after_kill().await;
                break;
            }
            tokio::time::sleep(POLL_INTERVAL.min(kill_at.remaining())).await;
            // The store may answer again and report that it no longer keeps the lock.
            if loss == Loss::LeaseEnding && self.guard.state() == State::Lost {
                kill_at = kill_at.min(self.kill_at(Loss::Dropped));
            }
        }
        loop {
            match ended.or_else(|| self.child.poll_status()) {
                Some(status @ (Status::Exited(_) | Status::Killed(_))) => return status,
                _ => tokio::time::sleep(POLL_INTERVAL).await,
            }
            ended = None;
        }
    }

    /// After KILL, waits until the group is empty, for at most [`KILL_TIMEOUT`]: a process may be stuck in the kernel.
    async fn wait_after_kill(&mut self) {
        let give_up_at = BootTime::now().after(KILL_TIMEOUT);
        while !give_up_at.has_passed() {
            let status = self.child.poll_status();
            let ended = matches!(status, Some(Status::Exited(_) | Status::Killed(_)));
            if ended && self.group.is_empty(Scope::Inside) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Returns when to send KILL. Not later than the deadline.
    fn kill_at(&self, loss: Loss) -> BootTime {
        let grace = match loss {
            Loss::LeaseEnding => self.kill_after,
            Loss::Dropped => self.overlap_grace,
            Loss::Expired => Duration::ZERO,
        };
        let grace_ends = BootTime::now().after(grace);
        self.deadline.map_or(grace_ends, |last| last.min(grace_ends))
    }
}

/// Returns when all processes of the command must be dead: a margin before the lease ends. `None` if there is no lease.
fn kill_deadline(guard: &Guard, ttl: Duration) -> Option<BootTime> {
    // Reads the clock before `remaining`: a delay between the two makes the result too early, not too late.
    let now = BootTime::now();
    guard.remaining().map(|left| now.after(left).before(margin(ttl)))
}
