//! `run`: a command that runs while a lock is held.

use std::io;
use std::time::Duration;

use lockkeeper::{Guard, Keeper, ReleaseOutcome, State};
use rustix::process::Signal;
use tokio::signal::unix::Signal as Stream;

use crate::args;
use crate::child::{Child, Status, wants_terminal};
use crate::failure::Failure;
use crate::group::{Group, Where};
use crate::guardian::{self, Guardian, Moment};
use crate::loss::Loss;
use crate::processes;
use crate::reap::Reaper;
use crate::report::{Reporter, Style};
use crate::signals::{self, Signals};
use crate::store;
use crate::terminal::Terminal;
use crate::waiting::Wanted;

/// How long a command has after TERM, unless told.
const KILL_AFTER: Duration = Duration::from_secs(5);
/// How long whatever is still under way with the store may hold up the end.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long to wait for a new guardian before the next look at the lock.
const GUARDIAN: Duration = Duration::from_secs(1);
/// How often to look whether a group is empty.
const LOOK: Duration = Duration::from_millis(10);
/// How long processes may take to die of KILL.
const DYING: Duration = Duration::from_secs(1);
/// What is said after a loss where only the process group can be found.
const NOT_LISTED: &str = "only the process group of the command was stopped: processes that left it were not looked for, \
                          as this system does not list processes (no /proc of this pid namespace)";

/// Runs a command; its exit code.
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
    match attempt(&run, &mut reporter, &mut interrupted).await {
        Ok(code) => {
            if interrupted {
                Terminal::interrupt_ourselves();
            }
            code
        }
        Err(failure) => {
            reporter.failed(&failure);
            Terminal::pass_on_interrupt(&failure);
            failure.code
        }
    }
}

/// Host, process id and command: who reads it wants to know what runs, not what it is wrapped in.
fn label(run: &args::Run) -> Option<lockkeeper::Label> {
    let default = lockkeeper::Label::default().to_string();
    let (place, _) = default.rsplit_once(':')?;
    let program = std::path::Path::new(run.command.first()?).file_name()?.to_string_lossy();
    let clean: String = program.chars().filter(|c| !c.is_control()).take(40).collect();
    lockkeeper::Label::new(format!("{place}:{clean}")).ok()
}

/// Runs a command; `interrupted` if it was in the foreground of a terminal and died of Ctrl-C.
async fn attempt(
    run: &args::Run,
    reporter: &mut Reporter,
    interrupted: &mut bool,
) -> Result<u8, Failure> {
    let broken = |error: io::Error| Failure::unavailable(format!("no signals: {error}"));
    let mut signals = Signals::new().map_err(broken)?;
    let reaper = Reaper::start().map_err(broken)?;
    let url = store::url(&run.store)?;
    let kill_after = kill_after(run, &url)?;
    let keeper = signals.unless(store::open_for_a_command(url)).await??;
    let wanted = Wanted::new(&keeper, &run.lock);
    let guard = match signals.unless(wanted.acquire(reporter)).await {
        Ok(Ok(guard)) => guard,
        // Whatever was under way in the store ends before the process does, unless it is asked once more.
        Ok(Err(failure)) | Err(failure) => {
            let closed = tokio::time::timeout(LAST_WORDS, keeper.close());
            let _ = signals.unless(closed).await;
            return Err(failure);
        }
    };
    let ended = Watched::start(run, &guard, kill_after, signals, &reaper, reporter).await;
    let ended = match ended {
        Ok(watched) => watched.finished(reporter, interrupted).await,
        Err(failure) => Err(failure),
    };
    finish(&keeper, guard, ended, reporter).await
}

/// How long a command has after TERM. The lease has to be long enough for a renewal to fail, for this, and
/// for a margin. Only files know no leases: a session of PostgreSQL is one, too.
fn kill_after(run: &args::Run, url: &str) -> Result<Duration, Failure> {
    let ttl = run.lock.ttl;
    match run.kill_after {
        None => Ok(KILL_AFTER.min(ttl / 3)),
        Some(given) if !store::is_file(url) && given > ttl / 2 => Err(Failure::usage(format!(
            "a --kill-after of {given:?} does not fit in a --ttl of {ttl:?}: it can be half of it \
                 at most"
        ))),
        Some(given) => Ok(given),
    }
}

/// How long before the end of the lease all must be dead.
fn margin(ttl: Duration) -> Duration {
    (ttl / 10).min(Duration::from_millis(500))
}

/// Gives the lock back, and decides about the exit code.
async fn finish(
    keeper: &Keeper,
    guard: Guard,
    ended: Result<Status, Failure>,
    reporter: &mut Reporter,
) -> Result<u8, Failure> {
    // From now on a signal ends the process at once: there is nothing more to lose.
    let mut signals = Signals::new().map_err(|error| Failure::unavailable(error.to_string()))?;
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
                Err(Failure::lost("the lock was lost before the command ended, which did not know"))
            }),
            Ok(Err(error)) => {
                reporter.warn(&format!("{error}; the lock is free when its lease ends"));
                ended
            }
            Err(_) => {
                reporter.warn("interrupted: the lock is free when its lease ends");
                return ended.map(Status::code);
            }
        }
    };
    let patience = if lost { Duration::from_secs(1) } else { LAST_WORDS };
    let _ = signals.unless(tokio::time::timeout(patience, keeper.close())).await;
    ended.map(Status::code)
}

/// A command that runs, and what is watched meanwhile.
struct Watched<'a> {
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
    /// Until when the guardian lets the command live, as told last.
    told: Option<Moment>,
    /// Whether the command was asked to end.
    asked_to_end: bool,
}

impl<'a> Watched<'a> {
    async fn start(
        run: &args::Run,
        guard: &'a Guard,
        kill_after: Duration,
        mut signals: Signals,
        reaper: &Reaper,
        reporter: &Reporter,
    ) -> Result<Self, Failure> {
        let broken =
            |error: io::Error| Failure::unavailable(format!("cannot watch a command: {error}"));
        let children = signals::stream(Signal::CHILD).map_err(broken)?;
        let continued = signals::stream(Signal::CONT).map_err(broken)?;
        let guardian = match Guardian::start(guard.owner(), guardian::PATIENCE).await {
            Ok(guardian) => guardian,
            Err(error) => {
                // Ctrl-C also kills a guardian that has not left this process group yet. The signal is heard only when
                // the runtime has had a turn.
                let heard = tokio::time::timeout(LOOK, signals.next()).await;
                return Err(heard.map_or_else(|_| broken(error), Failure::signal));
            }
        };
        let terminal = Terminal::find();
        // Whoever was asked to end meanwhile does not begin.
        if let Some(signal) = signals.pending() {
            guardian.dismiss();
            return Err(Failure::signal(signal));
        }
        // The process may have been stopped for a long time since the lock was granted.
        if !guard.is_held() {
            guardian.dismiss();
            return Err(Failure::lost("the lock was lost before the command was started"));
        }
        let told = last_moment(guard, run.lock.ttl);
        if let Some(moment) = told {
            guardian.until(moment);
        }
        let child = Child::spawn(run, guard).inspect_err(|_| guardian.dismiss())?;
        reaper.spare(child.pid());
        let group = Group::new(child.pid(), guard.owner());
        guardian.guard(&group);
        // Before the terminal is given away: who writes to it from the background may be stopped.
        reporter.started(child.pid().as_raw_pid());
        // If it wanted to have the terminal before this, it was stopped, and is continued.
        terminal.give(group.id());
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
            told,
            asked_to_end: false,
        })
    }

    /// Watches until the command has ended, and what it started with it if it was to be stopped.
    async fn finished(
        mut self,
        reporter: &mut Reporter,
        interrupted: &mut bool,
    ) -> Result<Status, Failure> {
        let ended = self.watch().await;
        let ended = match ended {
            Ok(status) if self.asked_to_end || matches!(status, Status::Killed(_)) => {
                self.empty_group().await.map(|()| status)
            }
            ended => ended,
        };
        let ended = match ended {
            Ok(status) => Ok(status),
            Err(loss) => Err((loss, self.stop(loss).await)),
        };
        self.guardian.dismiss();
        let in_foreground = self.terminal.belongs_to(self.group.id());
        self.terminal.take_back(self.group.id());
        match ended {
            Ok(status) => {
                // One that came by way of this process did not come from the terminal.
                *interrupted = in_foreground
                    && !self.asked_to_end
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
                Err(Failure::lost(format!("{loss}: the command was {how}")))
            }
        }
    }

    /// Until the command has ended, or the lock must be taken for lost; why, then.
    async fn watch(&mut self) -> Result<Status, Loss> {
        let lost = self.guard.lost_token();
        loop {
            if let Some(status) = self.child.look() {
                match status {
                    Status::Stopped(signal) => self.suspend(signal).await,
                    // A guardian that had to kill it did so because the time was over.
                    Status::Killed(_) if self.told.is_some_and(Moment::has_passed) => {
                        return Err(Loss::Late);
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
                _ = self.continued.recv() => self.terminal.give(self.group.id()),
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Whether the lock is held for long enough to go on; tells the guardian how long that is.
    fn check(&mut self) -> Result<(), Loss> {
        // First, because a lease that has ended also makes the state `Lost`.
        if self.told.is_some_and(Moment::has_passed) {
            return Err(Loss::Late);
        }
        if self.guard.state() == State::Lost {
            return Err(Loss::Certain);
        }
        let Some(last) = last_moment(self.guard, self.ttl) else { return Ok(()) };
        if last.before(self.kill_after).has_passed() {
            return Err(Loss::Foreseen);
        }
        if self.told != Some(last) {
            self.told = Some(last);
            self.guardian.until(last);
        }
        Ok(())
    }

    /// How long to sleep: until the command must be told to end, or to see whether there was a renewal.
    fn pause(&self) -> Duration {
        match self.told {
            Some(last) => last.before(self.kill_after).left().min(self.ttl / 12),
            None => Duration::from_secs(3600),
        }
    }

    fn forward(&mut self, signal: Signal) {
        self.group.signal(signal);
        if signals::ends(signal) {
            self.asked_to_end = true;
            // What is stopped hears nothing.
            self.group.signal(Signal::CONT);
        }
    }

    /// One that was killed is replaced: the command must not outlive the wrapper.
    async fn replace_guardian(&mut self) {
        if !self.guardian.is_dead() {
            return;
        }
        // The lock is watched again after that, whether there is one or not.
        let patience = self.pause().min(GUARDIAN);
        let lost = self.guard.lost_token();
        let started = tokio::select! {
            biased;
            // There is a command to kill first. A guardian that is left half started kills it, too.
            () = lost.cancelled() => return,
            started = Guardian::start(self.guard.owner(), patience) => started,
        };
        if let Ok(guardian) = started {
            guardian.guard(&self.group);
            if let Some(moment) = self.told {
                guardian.until(moment);
            }
            self.guardian = guardian;
        } else {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The command was stopped: on a terminal, so is the whole job, until the shell continues it.
    async fn suspend(&mut self, signal: i32) {
        if !self.terminal.is_there() {
            return;
        }
        let has_terminal = self.terminal.is_ours() || self.terminal.belongs_to(self.group.id());
        if !(wants_terminal(signal) && has_terminal) {
            self.terminal.take_back(self.group.id());
            Terminal::stop_ourselves();
            // That may take a moment to come true. If there is no shell that could continue us, it does
            // not, and nothing is to be waited for.
            tokio::select! {
                _ = self.continued.recv() => {}
                () = tokio::time::sleep(Duration::from_millis(300)) => {}
            }
        }
        // Not before it is clear that the lock is still held.
        if self.check().is_ok() {
            self.terminal.give(self.group.id());
            self.group.signal(Signal::CONT);
        }
    }

    /// After a signal: waits for what the command has started, which may have to tidy up, and kills what
    /// does not end.
    async fn empty_group(&mut self) -> Result<(), Loss> {
        let until = Moment::now().after(self.kill_after);
        while !self.group.is_empty(Where::Inside) {
            self.check()?;
            if until.has_passed() {
                self.group.kill();
                self.bury().await;
                return Ok(());
            }
            tokio::select! {
                signal = self.signals.next() => self.forward(signal),
                () = tokio::time::sleep(LOOK) => {}
            }
        }
        Ok(())
    }

    /// Ends the command and everything that it started, within the time that the loss leaves.
    async fn stop(&mut self, loss: Loss) -> Status {
        let mut until = self.kill_at(loss);
        if !until.has_passed() {
            self.group.signal_all(Signal::TERM);
        }
        let mut ended = None;
        loop {
            ended =
                ended.or_else(|| self.child.look().filter(|s| !matches!(s, Status::Stopped(_))));
            if ended.is_some() && self.group.is_empty(Where::Anywhere) {
                break;
            }
            if until.has_passed() {
                self.group.kill();
                self.bury().await;
                break;
            }
            tokio::time::sleep(LOOK.min(until.left())).await;
            // A foreseen loss becomes certain if the store answers again, and says so.
            if loss == Loss::Foreseen && self.guard.state() == State::Lost {
                until = until.min(self.kill_at(Loss::Certain));
            }
        }
        loop {
            match ended.or_else(|| self.child.look()) {
                Some(status @ (Status::Exited(_) | Status::Killed(_))) => return status,
                _ => tokio::time::sleep(LOOK).await,
            }
            ended = None;
        }
    }

    /// After a KILL: waits until the group is empty, which takes a moment. A process that is stuck in the kernel is not
    /// waited for.
    async fn bury(&mut self) {
        let until = Moment::now().after(DYING);
        while !until.has_passed() {
            let ended = matches!(self.child.look(), Some(Status::Exited(_) | Status::Killed(_)));
            if ended && self.group.is_empty(Where::Inside) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// When to kill the command: never later than the end of the lease that it had last.
    fn kill_at(&self, loss: Loss) -> Moment {
        let grace = match loss {
            Loss::Foreseen => self.kill_after,
            Loss::Certain => self.overlap_grace,
            Loss::Late => Duration::ZERO,
        };
        let grace = Moment::now().after(grace);
        self.told.map_or(grace, |last| last.min(grace))
    }
}

/// When all must be dead: some time before the lease could go to another. `None` if there is no lease.
fn last_moment(guard: &Guard, ttl: Duration) -> Option<Moment> {
    // The clock first: a process that is held up in between then thinks that it has less time.
    let now = Moment::now();
    guard.remaining().map(|left| now.after(left).before(margin(ttl)))
}
