//! What the scheduler promises, on the memory store in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use common::{Ledger, OnDrop, Wall, hours, mins, secs};
use lockkeeper::{ErrorKind, Keeper, Memory};
use lockkeeper_schedule::{Misfire, Schedule, Scheduler};
use lockkeeper_testkit::log::Log;
use lockkeeper_testkit::wait::{eventually, soon};
use lockkeeper_testkit::{Fault, Faulty, Op};
use tokio::time::sleep;

const START: &str = "2026-03-01T00:00:30Z";

/// A store, and a keeper for each node on it.
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
    let (store, ledger) = (store(), Ledger::default());
    let wall = Wall::at(START);
    let skews = [-240, -7, 0, 13, 280];
    let mut nodes: Vec<_> = skews
        .iter()
        .map(|skew| {
            let job = every_minute().job("x", ledger.note(&format!("{skew}")));
            Scheduler::new(keeper(&store)).job(job).clock(wall.skewed(*skew)).start().unwrap()
        })
        .collect();
    // The one whose clock is the fastest has them all, until it goes; then the next one.
    for _ in 0..5 {
        sleep(mins(30)).await;
        soon("it stops", nodes.pop().unwrap().shutdown()).await;
    }
    let (runs, doers) = ledger.assert_each_once();
    // From a clock that is ahead to one that is behind, some ticks come sooner and some later.
    assert!((140..=155).contains(&runs), "{runs} ticks in 150 minutes");
    assert_eq!(doers, 5);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_comes_after_the_run_has_ended_does_not_run_it_again() {
    let (store, ledger) = (store(), Ledger::default());
    let wall = Wall::at("2026-03-01T02:59:50Z");
    let within = Misfire::RunOnce { within: hours(6) };
    let nightly = |who: &str| {
        Schedule::cron("0 3 * * *", "UTC").job("nightly", ledger.note(who)).misfire(within)
    };
    let node = |who: &str| Scheduler::new(keeper(&store)).job(nightly(who)).clock(wall.skewed(0));
    let first = node("first").start().unwrap();
    sleep(mins(1)).await;
    assert_eq!(ledger.runs(), ["first 2026-03-01T03:00:00Z"]);
    soon("it stops", first.shutdown()).await;
    // Nodes come and go, as in a deployment, and each looks for what it may have missed.
    for _ in 0..6 {
        let late = node("late").start().unwrap();
        sleep(hours(1)).await;
        soon("it stops", late.shutdown()).await;
    }
    assert_eq!(ledger.runs().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_tick_that_nobody_saw_is_run_once_when_somebody_comes_if_that_is_wanted() {
    for (misfire, expected) in [
        (Misfire::Skip, vec![]),
        (Misfire::RunOnce { within: mins(59) }, vec![]),
        (Misfire::RunOnce { within: mins(61) }, vec!["a 2026-03-01T03:00:00Z"]),
        (Misfire::RunOnce { within: hours(200) }, vec!["a 2026-03-01T03:00:00Z"]),
    ] {
        let (store, ledger, log) = (store(), Ledger::default(), Log::start());
        let job = Schedule::cron("0 3 * * *", "UTC").job("nightly", ledger.note("a"));
        let wall = Wall::at("2026-03-01T04:00:00Z");
        let scheduler = Scheduler::new(keeper(&store)).job(job.misfire(misfire));
        let running = scheduler.clock(wall.skewed(0)).start().unwrap();
        sleep(mins(1)).await;
        assert_eq!(ledger.runs(), expected, "{misfire:?}");
        // Whether anybody saw those before, it cannot know.
        assert_eq!(log.count(&["WARN"]), 0, "{log:?}");
        drop(running);
    }
}

#[tokio::test(start_paused = true)]
async fn ticks_that_come_while_the_job_is_busy_are_skipped_on_all_nodes() {
    let (store, log) = (store(), Log::start());
    let wall = Wall::at(START);
    let (busy, runs) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut nodes = Vec::new();
    for skew in [0, 1, 2] {
        let (busy, runs) = (busy.clone(), runs.clone());
        let job = every_minute().job("slow", move |_| {
            let (busy, runs) = (busy.clone(), runs.clone());
            async move {
                assert_eq!(busy.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
                sleep(secs(90)).await;
                busy.fetch_sub(1, Ordering::SeqCst);
                runs.fetch_add(1, Ordering::SeqCst);
            }
        });
        let scheduler = Scheduler::new(keeper(&store)).job(job).clock(wall.skewed(skew));
        nodes.push(scheduler.start().unwrap());
    }
    sleep(mins(60)).await;
    // Every other tick.
    assert_eq!(runs.load(Ordering::SeqCst), 30);
    assert!(
        (29..=30).contains(&log.count(&["busy with an earlier one", "job=\"slow\""])),
        "{log:?}"
    );
    drop(nodes);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_takes_too_long_is_dropped_and_the_next_tick_runs() {
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
    let running = scheduler.clock(Wall::at(START).skewed(0)).start().unwrap();
    sleep(mins(3)).await;
    assert_eq!(dropped.load(Ordering::SeqCst), 3);
    assert_eq!(log.count(&["WARN", "it took too long", "stuck", "took=20s"]), 3, "{log:?}");
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_run_whose_lock_is_lost_is_dropped_and_what_it_spawned_hears_of_it() {
    let (store, log) = (store(), Log::start());
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let job = every_minute().job("x", move |ctx| {
        tell.send("runs").unwrap();
        let (tell, lost) = (tell.clone(), ctx.lost());
        tokio::spawn({
            let tell = tell.clone();
            async move {
                lost.await;
                tell.send("heard").unwrap();
            }
        });
        let dropped = OnDrop(move || tell.send("dropped").unwrap());
        async move {
            let _dropped = dropped;
            pending::<()>().await;
        }
    });
    let scheduler = Scheduler::new(keeper(&store)).job(job);
    let running = scheduler.clock(Wall::at(START).skewed(0)).start().unwrap();
    assert_eq!(told.recv().await.unwrap(), "runs");
    keeper(&store).inspect().unwrap().break_lock("schedule/run/x").await.unwrap();
    let mut said = [told.recv().await.unwrap(), told.recv().await.unwrap()];
    said.sort_unstable();
    assert_eq!(said, ["dropped", "heard"]);
    assert_eq!(tokio::time::timeout(mins(2), told.recv()).await.unwrap().unwrap(), "runs");
    log.assert_has(&["WARN", "its lock is lost", "job=\"x\"", "scheduled_at=2026-03-01T00:01:00Z"]);
    drop(running);
}

/// As a process that was stopped past its lease: the clock has passed the deadline, and the run is polled before the
/// task that reports the loss.
#[tokio::test(start_paused = true)]
async fn no_step_of_a_run_begins_after_the_deadline() {
    let (store, log) = (store(), Log::start());
    let steps = Arc::new(AtomicUsize::new(0));
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let (counted, dropped) = (steps.clone(), Arc::new(AtomicUsize::new(0)));
    let drops = dropped.clone();
    let job = every_minute().job("x", move |_| {
        let (steps, tell, drops) = (counted.clone(), tell.clone(), drops.clone());
        let drops = OnDrop(move || {
            drops.fetch_add(1, Ordering::SeqCst);
        });
        async move {
            let _drops = drops;
            poll_fn(|cx| {
                steps.fetch_add(1, Ordering::SeqCst);
                tell.send(cx.waker().clone()).unwrap();
                Poll::<()>::Pending
            })
            .await;
        }
    });
    let scheduler = Scheduler::new(keeper(&store).ttl(secs(30))).job(job);
    let running = scheduler.clock(Wall::at(START).skewed(0)).start().unwrap();
    let waker = told.recv().await.unwrap();
    // `advance` sets the clock in its first poll, and lets other tasks run after that.
    let mut advance = pin!(tokio::time::advance(secs(30)));
    assert!(poll_fn(|cx| Poll::Ready(advance.as_mut().poll(cx).is_pending())).await);
    waker.wake();
    eventually("the run ends", async || dropped.load(Ordering::SeqCst) == 1).await;
    assert_eq!(steps.load(Ordering::SeqCst), 1);
    eventually("it is told", async || log.count(&["its lock is lost", "job=\"x\""]) == 1).await;
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_short_run_keeps_the_job_busy_for_as_long_as_it_should_even_if_its_node_ends() {
    let (store, ledger, wall) = (store(), Ledger::default(), Wall::at(START));
    let node = |who: &str| {
        let job = every_minute().job("x", ledger.note(who)).at_least_for(secs(150));
        Scheduler::new(keeper(&store)).job(job).clock(wall.skewed(0)).start().unwrap()
    };
    let first = node("first");
    sleep(secs(31)).await;
    assert_eq!(ledger.runs(), ["first 2026-03-01T00:01:00Z"]);
    soon("it stops at once", first.shutdown()).await;
    let second = node("second");
    sleep(mins(3)).await;
    // 00:02 and 00:03 are too soon.
    let expected = ["first 2026-03-01T00:01:00Z", "second 2026-03-01T00:04:00Z"];
    assert_eq!(ledger.runs(), expected);
    drop(second);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_costs_a_tick_and_not_the_next_one() {
    let (ledger, log, wall) = (Ledger::default(), Log::start(), Wall::at(START));
    let (store, faults) = Faulty::new(Memory::new());
    let job = every_minute().job("x", ledger.note("a"));
    let scheduler = Scheduler::new(Keeper::new(store)).job(job).clock(wall.skewed(0));
    let running = scheduler.start().unwrap();
    faults.everything(Fault::Refused);
    sleep(mins(1)).await;
    faults.everything(Fault::Hangs);
    // An answer is awaited for half a minute.
    sleep(secs(65)).await;
    assert_eq!(log.count(&["WARN", "tick skipped: the store failed", "job=\"x\""]), 2, "{log:?}");
    log.assert_has(&["scheduled_at=2026-03-01T00:01:00Z", "connection refused"]);
    faults.none();
    sleep(mins(1)).await;
    // The claim is made, and then the run's own lock cannot be had.
    faults.once(Op::Attempt, Fault::SlowAnswer(secs(0)));
    faults.once(Op::Attempt, Fault::Refused);
    sleep(mins(2)).await;
    let expected = ["a 2026-03-01T00:03:00Z", "a 2026-03-01T00:05:00Z"];
    assert_eq!(ledger.runs(), expected);
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_job_that_panics_or_fails_is_run_again_at_the_next_tick() {
    let (store, log) = (store(), Log::start());
    let runs = Arc::new(AtomicUsize::new(0));
    let counts = runs.clone();
    let job = every_minute().job("x", move |_| {
        let run = counts.fetch_add(1, Ordering::SeqCst);
        assert_ne!(run, 0, "before there is a future");
        async move {
            assert_ne!(run, 1, "inside of it");
            if run == 2 { Err("no paper") } else { Ok(()) }
        }
    });
    let scheduler = Scheduler::new(keeper(&store)).job(job);
    let running = scheduler.clock(Wall::at(START).skewed(0)).start().unwrap();
    sleep(mins(4)).await;
    assert_eq!(runs.load(Ordering::SeqCst), 4);
    assert_eq!(log.count(&["ERROR", "job panicked"]), 2, "{log:?}");
    log.assert_has(&["ERROR", "job failed", "error=\"no paper\""]);
    log.assert_has(&["INFO", "job done", "scheduled_at=2026-03-01T00:04:00Z"]);
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_lets_the_running_job_end_and_starts_no_other() {
    let (store, wall) = (store(), Wall::at(START));
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
    // Dropped, it stops as well, and what runs goes on to its end.
    let running = start();
    sleep(secs(60)).await;
    assert_eq!(ended.load(Ordering::SeqCst), 1);
    drop(running);
    sleep(mins(30)).await;
    assert_eq!(ended.load(Ordering::SeqCst), 2);
    assert!(keeper(&store).inspect().unwrap().list("").await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn jitter_spreads_the_tries_and_who_makes_them() {
    let (store, ledger, wall) = (store(), Ledger::default(), Wall::at(START));
    let nodes: Vec<_> = (0..3)
        .map(|node| {
            let clock = wall.skewed(0);
            let job = every_minute().job("x", ledger.note_with_delay(&format!("{node}"), clock));
            let scheduler = Scheduler::new(keeper(&store)).job(job.jitter(secs(30)));
            scheduler.clock(wall.skewed(0)).start().unwrap()
        })
        .collect();
    sleep(hours(2)).await;
    let (runs, doers) = ledger.assert_each_once();
    assert_eq!((runs, doers), (120, 3));
    let delays = ledger.delays();
    assert!(delays.iter().all(|delay| *delay <= secs(31)), "{delays:?}");
    assert!(delays.iter().any(|delay| *delay > secs(5)), "{delays:?}");
    drop(nodes);
}

#[tokio::test(start_paused = true)]
async fn what_ran_where_and_why_a_tick_was_skipped_is_in_the_log() {
    let (store, log, wall) = (store(), Log::start(), Wall::at(START));
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
    log.assert_has(&["DEBUG tick skipped: another node has it", "job=\"x\"", "scheduled_at="]);
    sleep(mins(10)).await;
    let fences = fences.lock().unwrap();
    assert_eq!(fences.len(), 11);
    assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    drop(nodes);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_work_is_refused_before_anything_runs() {
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
    wrong(vec![job(), job()], "job \"x\": there are two of that name");
    wrong(vec![every_minute().job("", |_| async {})], "needs a name");
    wrong(vec![every_minute().job("x".repeat(1000), |_| async {})], "at most 1024 bytes");
    wrong(vec![Schedule::cron("nonsense", "UTC").job("x", |_| async {})], "nonsense");
    wrong(vec![Schedule::cron("0 0 31 6 *", "UTC").job("x", |_| async {})], "has no tick");
    wrong(vec![job().at_most_for(secs(0))], "leaves it no time");
    wrong(vec![job().at_least_for(secs(2)).at_most_for(secs(1))], "longer than at_most_for");
    wrong(vec![job().jitter(std::time::Duration::MAX)], "too long");
    let within = Misfire::RunOnce { within: std::time::Duration::MAX };
    wrong(vec![job().misfire(within)], "too long");
    let every = Schedule::every(secs(5)).job("x", |_| async {});
    wrong(vec![every.jitter(secs(5))], "jitter is not shorter");
    let skewed = Scheduler::new(keeper(&store)).max_skew(std::time::Duration::MAX).start();
    assert_eq!(skewed.unwrap_err().kind(), ErrorKind::InvalidOption);
    start(vec![]).unwrap();
    assert!(keeper(&store).inspect().unwrap().list("").await.unwrap().is_empty());
}

/// In real time: a thread that blocks cannot be stopped, and is waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn the_lock_is_not_given_back_under_a_run_that_cannot_be_stopped() {
    let store = store();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let (end, ends) = std::sync::mpsc::channel::<()>();
    let ends = Arc::new(std::sync::Mutex::new(ends));
    let job = Schedule::every(secs(1)).job("x", move |_| {
        let (tell, ends) = (tell.clone(), ends.clone());
        async move {
            tell.send(()).unwrap();
            let _ = ends.lock().unwrap().recv_timeout(secs(30));
        }
    });
    let limit = std::time::Duration::from_millis(20);
    let running = Scheduler::new(keeper(&store)).job(job.at_most_for(limit)).start().unwrap();
    soon("a run", told.recv()).await.unwrap();
    let lock = keeper(&store).mutex("schedule/run/x");
    for _ in 0..20 {
        sleep(limit).await;
        assert!(lock.try_lock().await.unwrap().is_none(), "given back under the run");
    }
    // From now on nobody waits for the end.
    drop(end);
    soon("it stops", running.shutdown()).await;
    assert!(lock.try_lock().await.unwrap().is_some());
}

#[test]
fn outside_of_a_runtime_it_says_so() {
    let error = Scheduler::new(Keeper::new(Memory::new())).start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
}
