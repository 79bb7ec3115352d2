//! Locks shared by tasks and threads: drops in loops and in wakers, nested blocking waits, and a stress test.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use common::{Pair, keeper_on, millis, pair, secs, threads};
use lockkeeper_core::{Guard, Keeper, Memory, blocking};
use lockkeeper_testkit::{Fault, Faulty, Op};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

#[tokio::test]
async fn guards_dropped_in_a_loop_are_released_while_the_loop_runs() {
    let keeper = Keeper::new(Memory::new());
    let other = tokio::spawn(async {});
    for i in 0..10_000 {
        drop(keeper.mutex(format!("{i}")).lock().await.unwrap());
    }
    assert!(other.is_finished(), "the other task never ran");
    let left = keeper.inspect().unwrap().list("").await.unwrap().len();
    assert!(left < 5_000, "{left} dropped locks are still held");
}

#[test]
fn a_nested_blocking_wait_loses_no_wake_up() {
    for _ in 0..50 {
        let (wake_outer, outer) = oneshot::channel::<()>();
        let (wake_inner, inner) = oneshot::channel::<()>();
        let (inside, is_inside) = mpsc::channel();
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            blocking::block_on(async {
                tokio::select! {
                    biased;
                    _ = outer => {}
                    () = async {
                        inside.send(()).unwrap();
                        let _ = blocking::block_on(inner);
                        std::future::pending::<()>().await;
                    } => {}
                }
            });
            done.send(()).unwrap();
        });
        is_inside.recv().unwrap();
        wake_outer.send(()).unwrap();
        wake_inner.send(()).unwrap();
        is_done.recv_timeout(secs(30)).expect("the outer wait is woken");
    }
}

/// A waker that drops a guard inside `wake`.
struct DropOnWake(Mutex<Option<Guard>>);

impl Wake for DropOnWake {
    fn wake(self: Arc<Self>) {
        let guard = self.0.lock().unwrap().take();
        drop(guard);
    }
}

#[test]
fn a_guard_may_be_dropped_by_the_waker_that_reports_its_loss() {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let Pair { faulty, faults, .. } = pair();
            let guard = faulty.mutex("a").lock().await.unwrap();
            faults.always(Op::Renew, Fault::Refused);
            let mut lost = Box::pin(guard.lost());
            let drop_on_wake = Arc::new(DropOnWake(Mutex::new(Some(guard))));
            let waker = Waker::from(drop_on_wake.clone());
            assert!(lost.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            sleep(secs(100)).await;
            assert!(drop_on_wake.0.lock().unwrap().is_none(), "the waker was not called");
        });
        done.send(()).unwrap();
    });
    is_done.recv_timeout(secs(30)).expect("no panic and no deadlock");
}

/// State shared by the tasks of the stress test.
#[derive(Default)]
struct Stress {
    inside: AtomicUsize,
    stop: AtomicBool,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
}

impl Stress {
    fn on_a_thread(&self, work: impl FnOnce() + Send + 'static) {
        self.threads.lock().unwrap().push(std::thread::spawn(work));
    }

    /// Releases a guard in one of several ways.
    async fn release(&self, guard: Guard, random: &mut fastrand::Rng) {
        match random.u32(..5) {
            0 => drop(guard),
            1 => self.on_a_thread(move || drop(guard)),
            2 => {
                let within = Duration::from_micros(random.u64(..2000));
                let _ = timeout(within, guard.release()).await;
            }
            3 => self.on_a_thread(move || {
                guard.blocking_release().unwrap();
            }),
            _ => {
                guard.release().await.unwrap();
            }
        }
    }

    async fn run(&self, keeper: Keeper, mut random: fastrand::Rng) {
        while !self.stop.load(Ordering::SeqCst) {
            let name = if random.bool() { "a" } else { "b" };
            let mutex = keeper.mutex(name);
            let guard = if random.u32(..3) == 0 {
                let Ok(guard) = timeout(millis(random.u64(..8)), mutex.lock()).await else {
                    continue;
                };
                guard.unwrap()
            } else {
                mutex.lock().await.unwrap()
            };
            if name == "a" {
                assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
            }
            match random.u32(..3) {
                0 => tokio::task::yield_now().await,
                1 => {
                    let _ = timeout(millis(1), guard.extend(secs(random.u64(4..7)))).await;
                }
                _ => {}
            }
            if name == "a" {
                self.inside.fetch_sub(1, Ordering::SeqCst);
            }
            self.release(guard, &mut random).await;
        }
    }
}

#[test]
fn many_tasks_on_many_threads_exclude_each_other_and_leave_no_state() {
    let runtime = threads(2);
    let memory = Memory::new();
    let (store, faults) = Faulty::new(memory.clone());
    let keeper = keeper_on(&runtime, store).ttl(secs(5));
    faults.always(Op::Attempt, Fault::SlowAnswer(millis(1)));
    faults.always(Op::Release, Fault::SlowAnswer(millis(1)));
    let stress = Arc::new(Stress::default());
    let tasks: Vec<_> = (0..24)
        .map(|seed| {
            let (stress, keeper) = (stress.clone(), keeper.clone());
            let random = fastrand::Rng::with_seed(seed);
            runtime.spawn(async move { stress.run(keeper, random).await })
        })
        .collect();
    std::thread::sleep(secs(3));
    stress.stop.store(true, Ordering::SeqCst);
    runtime.block_on(async {
        for task in tasks {
            timeout(secs(30), task).await.expect("no task hangs").unwrap();
        }
    });
    for thread in std::mem::take(&mut *stress.threads.lock().unwrap()) {
        thread.join().unwrap();
    }
    runtime.block_on(async {
        timeout(secs(30), keeper.close()).await.expect("the keeper closes");
        let left = Keeper::new(memory).inspect().unwrap().list("").await.unwrap();
        assert_eq!(left, []);
    });
}
