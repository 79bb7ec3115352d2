//! A scheduler started from blocking code.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::sync::mpsc;
use std::time::Duration;

use lockkeeper::{ErrorKind, Keeper, Memory};
use lockkeeper_schedule::{Job, Schedule, Scheduler};
use tokio::runtime::Builder;

const TIMEOUT: Duration = Duration::from_secs(60);

fn every_second() -> Schedule {
    Schedule::every(Duration::from_secs(1))
}

/// Returns a job that sends the fence of each run.
fn fence_job() -> (Job, mpsc::Receiver<u64>) {
    let (sender, fences) = mpsc::channel();
    let job = every_second().blocking_job("fences", move |ctx| {
        assert!(ctx.is_held());
        let _ = sender.send(ctx.fence().unwrap().get());
    });
    (job, fences)
}

/// Starts a scheduler, waits for two runs, and shuts it down.
fn exercise(keeper: Keeper) {
    let (job, fences) = fence_job();
    let running = Scheduler::new(keeper).job(job).blocking_start().unwrap();
    let first = fences.recv_timeout(TIMEOUT).expect("a first run");
    let second = fences.recv_timeout(TIMEOUT).expect("a second run");
    assert!(first < second);
    running.blocking_shutdown();
    assert_eq!(fences.try_recv(), Err(mpsc::TryRecvError::Disconnected), "no run is left");
}

#[test]
fn works_from_a_plain_thread() {
    exercise(Keeper::new(Memory::new()));
}

#[tokio::test]
async fn works_inside_spawn_blocking() {
    let keeper = Keeper::new(Memory::new());
    tokio::task::spawn_blocking(move || exercise(keeper)).await.unwrap();
}

/// Calls `work` on the only thread of a runtime. It may block that thread.
#[track_caller]
fn on_single_threaded_runtime(work: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { work() });
        done.send(()).unwrap();
    });
    is_done.recv_timeout(TIMEOUT).expect("the thread panicked or hangs");
}

#[test]
fn works_on_the_only_thread_of_the_keepers_runtime() {
    on_single_threaded_runtime(|| exercise(Keeper::new(Memory::new())));
}

#[test]
fn the_lock_of_a_run_is_renewed_while_the_keepers_runtime_is_blocked() {
    on_single_threaded_runtime(|| {
        let keeper = Keeper::new(Memory::new()).ttl(Duration::from_millis(300));
        let (sender, held) = mpsc::channel();
        let job = every_second().blocking_job("long", move |ctx| {
            std::thread::sleep(Duration::from_millis(900));
            let _ = sender.send(ctx.is_held());
        });
        let running = Scheduler::new(keeper).job(job).blocking_start().unwrap();
        assert_eq!(held.recv_timeout(TIMEOUT), Ok(true));
        running.blocking_shutdown();
    });
}

#[test]
fn async_jobs_run_although_the_caller_has_no_runtime() {
    let (sender, held) = mpsc::channel();
    let job = every_second().job("async", move |ctx| {
        let sender = sender.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let _ = sender.send(ctx.is_held());
        }
    });
    let running = Scheduler::new(Keeper::new(Memory::new())).job(job).blocking_start().unwrap();
    assert_eq!(held.recv_timeout(TIMEOUT), Ok(true));
    running.blocking_shutdown();
}

#[test]
fn a_blocking_run_sees_the_loss_of_its_lock_and_a_shutdown_waits_for_it() {
    let keeper = Keeper::new(Memory::new());
    let inspect = keeper.inspect().unwrap();
    let (sender, events) = mpsc::channel();
    let (unblock, blocked) = mpsc::channel::<()>();
    let blocked = std::sync::Mutex::new(blocked);
    let job = every_second().blocking_job("losing", move |ctx| {
        let _ = sender.send("started");
        while ctx.is_held() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = sender.send("lost");
        let _ = blocked.lock().unwrap().recv_timeout(TIMEOUT);
        let _ = sender.send("ended");
    });
    let running = Scheduler::new(keeper).job(job).blocking_start().unwrap();
    assert_eq!(events.recv_timeout(TIMEOUT), Ok("started"));
    inspect.blocking_break_lock("schedule/run/losing").unwrap();
    assert_eq!(events.recv_timeout(TIMEOUT), Ok("lost"));
    let (shut, is_shut) = mpsc::channel();
    let shutdown = std::thread::spawn(move || {
        running.blocking_shutdown();
        shut.send(()).unwrap();
    });
    assert!(is_shut.recv_timeout(Duration::from_millis(100)).is_err(), "shut down during the run");
    drop(unblock);
    is_shut.recv_timeout(TIMEOUT).expect("the end of the shutdown");
    shutdown.join().unwrap();
    assert!(events.iter().any(|event| event == "ended"));
}

#[test]
fn a_blocking_run_that_panics_or_fails_stops_neither_the_scheduler_nor_the_next_run() {
    let (sender, runs) = mpsc::channel();
    let job = every_second().blocking_job("failing", move |ctx| -> Result<(), String> {
        let _ = sender.send(());
        if ctx.fence().unwrap().get() % 2 == 0 { panic!("on purpose") } else { Err("no".into()) }
    });
    let running = Scheduler::new(Keeper::new(Memory::new())).job(job).blocking_start().unwrap();
    for _ in 0..2 {
        runs.recv_timeout(TIMEOUT).expect("a run");
    }
    running.blocking_shutdown();
}

#[test]
fn an_invalid_job_is_rejected_at_the_start() {
    let job = Schedule::every(Duration::ZERO).blocking_job("a", |_| {});
    let error = Scheduler::new(Keeper::new(Memory::new())).job(job).blocking_start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
}
