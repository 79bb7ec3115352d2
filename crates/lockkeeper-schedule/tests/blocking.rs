//! A scheduler that blocking code starts.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::sync::mpsc;
use std::time::Duration;

use lockkeeper::{ErrorKind, Keeper, Memory};
use lockkeeper_schedule::{Job, Schedule, Scheduler};
use tokio::runtime::Builder;

const PATIENCE: Duration = Duration::from_secs(60);

fn every_second() -> Schedule {
    Schedule::every(Duration::from_secs(1))
}

/// Tells of each run: its fence.
fn telling_job() -> (Job, mpsc::Receiver<u64>) {
    let (tell, told) = mpsc::channel();
    let job = every_second().blocking_job("telling", move |ctx| {
        assert!(ctx.is_held());
        let _ = tell.send(ctx.fence().unwrap().get());
    });
    (job, told)
}

/// Starts a scheduler, waits for two runs, and shuts it down.
fn exercise(keeper: Keeper) {
    let (job, told) = telling_job();
    let running = Scheduler::new(keeper).job(job).blocking_start().unwrap();
    let first = told.recv_timeout(PATIENCE).expect("it runs");
    let second = told.recv_timeout(PATIENCE).expect("it runs again");
    assert!(first < second);
    running.blocking_shutdown();
    assert_eq!(told.try_recv(), Err(mpsc::TryRecvError::Disconnected), "no run goes on");
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

/// Runs something on the only thread of a runtime, which it may block.
#[track_caller]
fn on_the_only_thread(work: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { work() });
        done.send(()).unwrap();
    });
    is_done.recv_timeout(PATIENCE).expect("it panicked, or hangs");
}

#[test]
fn works_on_the_only_thread_of_the_keepers_runtime() {
    on_the_only_thread(|| exercise(Keeper::new(Memory::new())));
}

#[test]
fn the_lock_of_a_run_is_renewed_while_the_keepers_runtime_is_blocked() {
    on_the_only_thread(|| {
        let keeper = Keeper::new(Memory::new()).ttl(Duration::from_millis(300));
        let (tell, told) = mpsc::channel();
        let job = every_second().blocking_job("long", move |ctx| {
            std::thread::sleep(Duration::from_millis(900));
            let _ = tell.send(ctx.is_held());
        });
        let running = Scheduler::new(keeper).job(job).blocking_start().unwrap();
        assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
        running.blocking_shutdown();
    });
}

#[test]
fn async_jobs_run_without_a_runtime_of_the_caller() {
    let (tell, told) = mpsc::channel();
    let job = every_second().job("async", move |ctx| {
        let tell = tell.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let _ = tell.send(ctx.is_held());
        }
    });
    let running = Scheduler::new(Keeper::new(Memory::new())).job(job).blocking_start().unwrap();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
    running.blocking_shutdown();
}

#[test]
fn a_blocking_run_that_loses_its_lock_can_see_it_and_a_shutdown_waits_for_it() {
    let keeper = Keeper::new(Memory::new());
    let inspect = keeper.inspect().unwrap();
    let (tell, told) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let may_go_on = std::sync::Mutex::new(may_go_on);
    let job = every_second().blocking_job("losing", move |ctx| {
        let _ = tell.send("started");
        while ctx.is_held() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = tell.send("lost");
        let _ = may_go_on.lock().unwrap().recv_timeout(PATIENCE);
        let _ = tell.send("ended");
    });
    let running = Scheduler::new(keeper).job(job).blocking_start().unwrap();
    assert_eq!(told.recv_timeout(PATIENCE), Ok("started"));
    inspect.blocking_break_lock("schedule/run/losing").unwrap();
    assert_eq!(told.recv_timeout(PATIENCE), Ok("lost"));
    let (shut, is_shut) = mpsc::channel();
    let shutdown = std::thread::spawn(move || {
        running.blocking_shutdown();
        shut.send(()).unwrap();
    });
    assert!(is_shut.recv_timeout(Duration::from_millis(100)).is_err(), "the run goes on");
    drop(go_on);
    is_shut.recv_timeout(PATIENCE).expect("it ends");
    shutdown.join().unwrap();
    assert!(told.iter().any(|what| what == "ended"));
}

#[test]
fn a_blocking_run_that_panics_or_fails_stops_neither_the_scheduler_nor_the_next_run() {
    let (tell, told) = mpsc::channel();
    let job = every_second().blocking_job("failing", move |ctx| -> Result<(), String> {
        let _ = tell.send(());
        if ctx.fence().unwrap().get() % 2 == 0 { panic!("on purpose") } else { Err("no".into()) }
    });
    let running = Scheduler::new(Keeper::new(Memory::new())).job(job).blocking_start().unwrap();
    for _ in 0..2 {
        told.recv_timeout(PATIENCE).expect("it runs");
    }
    running.blocking_shutdown();
}

#[test]
fn what_is_wrong_with_a_job_is_said_at_the_start() {
    let job = Schedule::every(Duration::ZERO).blocking_job("a", |_| {});
    let error = Scheduler::new(Keeper::new(Memory::new())).job(job).blocking_start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
}
