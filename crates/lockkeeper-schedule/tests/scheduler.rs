//! The guarantees of the scheduler, on the memory store in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use common::{OnDrop, RunRecord, WallClock, hours, mins, secs};
use lockkeeper::{ErrorKind, Keeper, Memory};
use lockkeeper_schedule::{Misfire, Schedule, Scheduler};
use lockkeeper_testkit::log::Log;
use lockkeeper_testkit::wait::{eventually, soon};
use lockkeeper_testkit::{Fault, Faulty, Op};
use tokio::time::sleep;

const START: &str = "2026-03-01T00:00:30Z";

/// Returns a store that several keepers can share.
fn store() -> Arc<Memory> {
    Arc::new(Memory::new())
}

fn keeper(store: &Arc<Memory>) -> Keeper {
    Keeper::from_backend(store.clone())
}

fn every_minute() -> Schedule {
    Schedule::cron("* * * * *", "UTC")
}

#[tokio::test(start_paused = true)]
async fn five_nodes_with_skewed_clocks_run_each_tick_once() {
    let (store, record) = (store(), RunRecord::default());
    let wall = WallClock::at(START);
    let skews = [-240, -7, 0, 13, 280];
    let mut nodes: Vec<_> = skews
        .iter()
        .map(|skew| {
            let job = every_minute().job("x", record.job(&format!("{skew}")));
            Scheduler::new(keeper(&store)).job(job).clock(wall.skewed(*skew)).start().unwrap()
        })
        .collect();
    // The node whose clock is furthest ahead runs every tick until it stops, then the next node does.
    for _ in 0..5 {
        sleep(mins(30)).await;
        soon("the shutdown", nodes.pop().unwrap().shutdown()).await;
    }
    let (runs, nodes) = record.assert_each_once();
    // The clocks of the first and the last node differ by up to 9 minutes.
    assert!((140..=155).contains(&runs), "{runs} ticks in 150 minutes");
    assert_eq!(nodes, 5);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_starts_after_a_run_has_ended_does_not_run_the_tick_again() {
    let (store, record) = (store(), RunRecord::default());
    let wall = WallClock::at("2026-03-01T02:59:50Z");
    let within = Misfire::RunOnce { within: hours(6) };
    let nightly = |who: &str| {
        Schedule::cron("0 3 * * *", "UTC").job("nightly", record.job(who)).misfire(within)
    };
    let node = |who: &str| Scheduler::new(keeper(&store)).job(nightly(who)).clock(wall.skewed(0));
    let first = node("first").start().unwrap();
    sleep(mins(1)).await;
    assert_eq!(record.runs(), ["first 2026-03-01T03:00:00Z"]);
    soon("the shutdown", first.shutdown()).await;
    // Nodes start and stop, as in a deployment, and each checks for missed ticks.
    for _ in 0..6 {
        let late = node("late").start().unwrap();
        sleep(hours(1)).await;
        soon("the shutdown", late.shutdown()).await;
    }
    assert_eq!(record.runs().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_tick_missed_before_the_start_runs_once_if_the_misfire_policy_is_run_once() {
    for (misfire, expected) in [
        (Misfire::Skip, vec![]),
        (Misfire::RunOnce { within: mins(59) }, vec![]),
        (Misfire::RunOnce { within: mins(61) }, vec!["a 2026-03-01T03:00:00Z"]),
        (Misfire::RunOnce { within: hours(200) }, vec!["a 2026-03-01T03:00:00Z"]),
    ] {
        let (store, record, log) = (store(), RunRecord::default(), Log::start());
        let job = Schedule::cron("0 3 * * *", "UTC").job("nightly", record.job("a"));
        let wall = WallClock::at("2026-03-01T04:00:00Z");
        let scheduler = Scheduler::new(keeper(&store)).job(job.misfire(misfire));
        let running = scheduler.clock(wall.skewed(0)).start().unwrap();
        sleep(mins(1)).await;
        assert_eq!(record.runs(), expected, "{misfire:?}");
        // The node cannot know whether earlier ticks were missed, so it logs none.
        assert_eq!(log.count(&["WARN"]), 0, "{log:?}");
        drop(running);
    }
}

#[tokio::test(start_paused = true)]
async fn ticks_that_are_due_during_a_run_are_skipped_on_all_nodes() {
    let (store, log) = (store(), Log::start());
    let wall = WallClock::at(START);
    let (busy, runs) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut nodes = Vec::new();
    for skew in [0, 1, 2] {
        let (busy, runs) = (busy.clone(), runs.clone());
        let job = every_minute().job("slow", move |_| {
            let (busy, runs) = (busy.clone(), runs.clone());
            async move {
                assert_eq!(busy.fetch_add(1, Ordering::SeqCst), 0, "two runs overlap");
                sleep(secs(90)).await;
                busy.fetch_sub(1, Ordering::SeqCst);
                runs.fetch_add(1, Ordering::SeqCst);
            }
        });
        let scheduler = Scheduler::new(keeper(&store)).job(job).clock(wall.skewed(skew));
        nodes.push(scheduler.start().unwrap());
    }
    sleep(mins(60)).await;
    // Every second tick is skipped.
    assert_eq!(runs.load(Ordering::SeqCst), 30);
    assert!(
        (29..=30).contains(&log.count(&["an earlier run still holds", "job=\"slow\""])),
        "{log:?}"
    );
    drop(nodes);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_exceeds_at_most_for_is_dropped_and_the_next_tick_runs() {
    let (store, log) = (store(), Log::start());
    let dropped = Arc::new(AtomicUsize::new(0));
    let counts = dropped.clone();
    let job = every_minute().job("stuck", move |_| {
        let counts = counts.clone();
        let counts = OnDrop(move || {
            counts.fetch_add(1, Ordering::SeqCst);
        });
        async move {
            let _counts = counts;
            pending::<()>().await;
        }
    });
    let scheduler = Scheduler::new(keeper(&store)).job(job.at_most_for(secs(20)));
    let running = scheduler.clock(WallClock::at(START).skewed(0)).start().unwrap();
    sleep(mins(3)).await;
    assert_eq!(dropped.load(Ordering::SeqCst), 3);
    assert_eq!(
        log.count(&["WARN", "it ran longer than at_most_for", "stuck", "took=20s"]),
        3,
        "{log:?}"
    );
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_run_whose_lock_is_lost_is_dropped_and_tasks_that_it_spawned_are_notified() {
    let (store, log) = (store(), Log::start());
    let (events, mut received) = tokio::sync::mpsc::unbounded_channel();
    let job = every_minute().job("x", move |ctx| {
        events.send("runs").unwrap();
        let (events, lost) = (events.clone(), ctx.lost());
        tokio::spawn({
            let events = events.clone();
            async move {
                lost.await;
                events.send("notified").unwrap();
            }
        });
        let dropped = OnDrop(move || events.send("dropped").unwrap());
        async move {
            let _dropped = dropped;
            pending::<()>().await;
        }
    });
    let scheduler = Scheduler::new(keeper(&store)).job(job);
    let running = scheduler.clock(WallClock::at(START).skewed(0)).start().unwrap();
    assert_eq!(received.recv().await.unwrap(), "runs");
    keeper(&store).inspect().unwrap().break_lock("schedule/run/x").await.unwrap();
    let mut after_loss = [received.recv().await.unwrap(), received.recv().await.unwrap()];
    after_loss.sort_unstable();
    assert_eq!(after_loss, ["dropped", "notified"]);
    assert_eq!(tokio::time::timeout(mins(2), received.recv()).await.unwrap().unwrap(), "runs");
    let tick = "scheduled_at=2026-03-01T00:01:00Z";
    log.assert_has(&["WARN", "its lock was lost", "job=\"x\"", tick]);
    drop(running);
}

/// Models a process that is suspended past its lease: the clock has passed the deadline, and the run is polled
/// before the task that reports the loss.
#[tokio::test(start_paused = true)]
async fn no_step_of_a_run_begins_after_the_deadline() {
    let (store, log) = (store(), Log::start());
    let steps = Arc::new(AtomicUsize::new(0));
    let (wakers, mut received) = tokio::sync::mpsc::unbounded_channel();
    let (counted, dropped) = (steps.clone(), Arc::new(AtomicUsize::new(0)));
    let drops = dropped.clone();
    let job = every_minute().job("x", move |_| {
        let (steps, wakers, drops) = (counted.clone(), wakers.clone(), drops.clone());
        let drops = OnDrop(move || {
            drops.fetch_add(1, Ordering::SeqCst);
        });
        async move {
            let _drops = drops;
            poll_fn(|cx| {
                steps.fetch_add(1, Ordering::SeqCst);
                wakers.send(cx.waker().clone()).unwrap();
                Poll::<()>::Pending
            })
            .await;
        }
    });
    let scheduler = Scheduler::new(keeper(&store).ttl(secs(30))).job(job);
    let running = scheduler.clock(WallClock::at(START).skewed(0)).start().unwrap();
    let waker = received.recv().await.unwrap();
    // `advance` sets the clock in its first poll, and lets other tasks run after that.
    let mut advance = pin!(tokio::time::advance(secs(30)));
    assert!(poll_fn(|cx| Poll::Ready(advance.as_mut().poll(cx).is_pending())).await);
    waker.wake();
    eventually("the end of the run", async || dropped.load(Ordering::SeqCst) == 1).await;
    assert_eq!(steps.load(Ordering::SeqCst), 1);
    let logged = || log.count(&["its lock was lost", "job=\"x\""]) == 1;
    eventually("the log line", async || logged()).await;
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_short_run_keeps_the_jobs_lock_for_at_least_for_even_if_its_node_stops() {
    let (store, record, wall) = (store(), RunRecord::default(), WallClock::at(START));
    let node = |name: &str| {
        let job = every_minute().job("x", record.job(name)).at_least_for(secs(150));
        Scheduler::new(keeper(&store)).job(job).clock(wall.skewed(0)).start().unwrap()
    };
    let first = node("first");
    sleep(secs(31)).await;
    assert_eq!(record.runs(), ["first 2026-03-01T00:01:00Z"]);
    soon("the shutdown", first.shutdown()).await;
    let second = node("second");
    sleep(mins(3)).await;
    // 00:02 and 00:03 are within 150 s of 00:01.
    let expected = ["first 2026-03-01T00:01:00Z", "second 2026-03-01T00:04:00Z"];
    assert_eq!(record.runs(), expected);
    drop(second);
}

#[tokio::test(start_paused = true)]
async fn a_store_failure_skips_the_tick_and_not_the_next_one() {
    let (record, log, wall) = (RunRecord::default(), Log::start(), WallClock::at(START));
    let (store, faults) = Faulty::new(Memory::new());
    let job = every_minute().job("x", record.job("a"));
    let scheduler = Scheduler::new(Keeper::new(store)).job(job).clock(wall.skewed(0));
    let running = scheduler.start().unwrap();
    faults.everything(Fault::Refused);
    sleep(mins(1)).await;
    faults.everything(Fault::Hangs);
    // An attempt times out after 30 s.
    sleep(secs(65)).await;
    assert_eq!(log.count(&["WARN", "tick skipped: the store failed", "job=\"x\""]), 2, "{log:?}");
    log.assert_has(&["scheduled_at=2026-03-01T00:01:00Z", "connection refused"]);
    faults.none();
    sleep(mins(1)).await;
    // The claim succeeds and the attempt on the run lock fails.
    faults.once(Op::Attempt, Fault::SlowAnswer(secs(0)));
    faults.once(Op::Attempt, Fault::Refused);
    sleep(mins(2)).await;
    let expected = ["a 2026-03-01T00:03:00Z", "a 2026-03-01T00:05:00Z"];
    assert_eq!(record.runs(), expected);
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_job_that_panics_or_fails_is_run_again_at_the_next_tick() {
    let (store, log) = (store(), Log::start());
    let runs = Arc::new(AtomicUsize::new(0));
    let counts = runs.clone();
    let job = every_minute().job("x", move |_| {
        let run = counts.fetch_add(1, Ordering::SeqCst);
        assert_ne!(run, 0, "panic in the closure");
        async move {
            assert_ne!(run, 1, "panic in the future");
            if run == 2 { Err("no paper") } else { Ok(()) }
        }
    });
    let scheduler = Scheduler::new(keeper(&store)).job(job);
    let running = scheduler.clock(WallClock::at(START).skewed(0)).start().unwrap();
    sleep(mins(4)).await;
    assert_eq!(runs.load(Ordering::SeqCst), 4);
    assert_eq!(log.count(&["ERROR", "job panicked"]), 2, "{log:?}");
    log.assert_has(&["ERROR", "job failed", "error=\"no paper\""]);
    log.assert_has(&["INFO", "job done", "scheduled_at=2026-03-01T00:04:00Z"]);
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_the_running_job_and_starts_no_other() {
    let (store, wall) = (store(), WallClock::at(START));
    let ended = Arc::new(AtomicUsize::new(0));
    let start = || {
        let ended = ended.clone();
        let job = every_minute().job("x", move |_| {
            let ended = ended.clone();
            async move {
                sleep(secs(40)).await;
                ended.fetch_add(1, Ordering::SeqCst);
            }
        });
        Scheduler::new(keeper(&store)).job(job).clock(wall.skewed(0)).start().unwrap()
    };
    let running = start();
    sleep(secs(31)).await;
    running.shutdown().await;
    assert_eq!(ended.load(Ordering::SeqCst), 1);
    let left = keeper(&store).inspect().unwrap().list("").await.unwrap();
    let names: Vec<_> = left.iter().map(|info| info.name.as_str()).collect();
    assert_eq!(names, ["schedule/tick/2026-03-01T00:01:00Z/x"]);
    // Dropping it also stops the scheduler, and the running job continues to its end.
    let running = start();
    sleep(secs(60)).await;
    assert_eq!(ended.load(Ordering::SeqCst), 1);
    drop(running);
    sleep(mins(30)).await;
    assert_eq!(ended.load(Ordering::SeqCst), 2);
    assert!(keeper(&store).inspect().unwrap().list("").await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn jitter_spreads_the_attempts_over_time_and_the_runs_over_nodes() {
    let (store, record, wall) = (store(), RunRecord::default(), WallClock::at(START));
    let nodes: Vec<_> = (0..3)
        .map(|node| {
            let clock = wall.skewed(0);
            let job = every_minute().job("x", record.job_with_delay(&format!("{node}"), clock));
            let scheduler = Scheduler::new(keeper(&store)).job(job.jitter(secs(30)));
            scheduler.clock(wall.skewed(0)).start().unwrap()
        })
        .collect();
    sleep(hours(2)).await;
    assert_eq!(record.assert_each_once(), (120, 3));
    let delays = record.delays();
    assert!(delays.iter().all(|delay| *delay <= secs(31)), "{delays:?}");
    assert!(delays.iter().any(|delay| *delay > secs(5)), "{delays:?}");
    drop(nodes);
}

#[tokio::test(start_paused = true)]
async fn the_log_names_the_node_of_each_run_and_the_reason_of_each_skip() {
    let (store, log, wall) = (store(), Log::start(), WallClock::at(START));
    let fences = Arc::new(std::sync::Mutex::new(Vec::new()));
    let start = |node: &str| {
        let fences = fences.clone();
        let job = every_minute().job("x", move |ctx| {
            assert_eq!(ctx.job(), "x");
            fences.lock().unwrap().push(ctx.fence().unwrap());
            async {}
        });
        let keeper = keeper(&store).label(node);
        Scheduler::new(keeper).job(job).clock(wall.skewed(0)).start().unwrap()
    };
    let nodes = [start("node-1"), start("node-2")];
    sleep(secs(31)).await;
    log.assert_has(&[
        "INFO job starts",
        "job=\"x\"",
        "scheduled_at=2026-03-01T00:01:00Z",
        "fence=",
        "node=\"node-",
    ]);
    log.assert_has(&["INFO job done", "job=\"x\"", "scheduled_at=2026-03-01T00:01:00Z", "took="]);
    log.assert_has(&["DEBUG tick skipped: another node claimed it", "job=\"x\"", "scheduled_at="]);
    sleep(mins(10)).await;
    let fences = fences.lock().unwrap();
    assert_eq!(fences.len(), 11);
    assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    drop(nodes);
}

#[tokio::test(start_paused = true)]
async fn invalid_jobs_and_options_are_rejected_at_the_start() {
    let store = store();
    let job = || every_minute().job("x", |_| async {});
    let start = |jobs: Vec<lockkeeper_schedule::Job>| {
        let scheduler = Scheduler::new(keeper(&store));
        jobs.into_iter().fold(scheduler, Scheduler::job).start().map(drop)
    };
    let wrong = |jobs: Vec<lockkeeper_schedule::Job>, text: &str| {
        let error = start(jobs).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
        assert!(error.to_string().contains(text), "{error}");
    };
    wrong(vec![job(), job()], "job \"x\": another job has the same name");
    wrong(vec![every_minute().job("", |_| async {})], "the name is empty");
    wrong(vec![every_minute().job("x".repeat(1000), |_| async {})], "at most 1024 bytes");
    wrong(vec![Schedule::cron("nonsense", "UTC").job("x", |_| async {})], "nonsense");
    wrong(vec![Schedule::cron("0 0 31 6 *", "UTC").job("x", |_| async {})], "has no tick");
    wrong(vec![job().at_most_for(secs(0))], "at_most_for is zero");
    wrong(vec![job().at_least_for(secs(2)).at_most_for(secs(1))], "longer than at_most_for");
    wrong(vec![job().jitter(std::time::Duration::MAX)], "too long");
    let within = Misfire::RunOnce { within: std::time::Duration::MAX };
    wrong(vec![job().misfire(within)], "too long");
    let every = Schedule::every(secs(5)).job("x", |_| async {});
    wrong(vec![every.jitter(secs(5))], "jitter must be shorter");
    let skewed = Scheduler::new(keeper(&store)).max_skew(std::time::Duration::MAX).start();
    assert_eq!(skewed.unwrap_err().kind(), ErrorKind::InvalidOption);
    start(vec![]).unwrap();
    assert!(keeper(&store).inspect().unwrap().list("").await.unwrap().is_empty());
}

/// In real time: a blocked thread cannot be cancelled, so the scheduler waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn the_lock_is_not_released_during_a_run_that_cannot_be_cancelled() {
    let store = store();
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let (unblock, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = Arc::new(std::sync::Mutex::new(blocked));
    let job = Schedule::every(secs(1)).job("x", move |_| {
        let (started, blocked) = (started.clone(), blocked.clone());
        async move {
            started.send(()).unwrap();
            let _ = blocked.lock().unwrap().recv_timeout(secs(30));
        }
    });
    let limit = std::time::Duration::from_millis(20);
    let running = Scheduler::new(keeper(&store)).job(job.at_most_for(limit)).start().unwrap();
    soon("a run", starts.recv()).await.unwrap();
    let lock = keeper(&store).mutex("schedule/run/x");
    for _ in 0..20 {
        sleep(limit).await;
        assert!(lock.try_lock().await.unwrap().is_none(), "released during the run");
    }
    // This and all later runs return at once.
    drop(unblock);
    soon("the shutdown", running.shutdown()).await;
    assert!(lock.try_lock().await.unwrap().is_some());
}

#[test]
fn start_outside_a_runtime_is_a_config_error() {
    let error = Scheduler::new(Keeper::new(Memory::new())).start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
}
