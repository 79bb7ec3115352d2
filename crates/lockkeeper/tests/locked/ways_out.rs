//! How a body can end: the lock is released first, and then the caller gets the result.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lockkeeper::{ErrorKind, Keeper, locked};
use lockkeeper_testkit::wait::soon;
use lockkeeper_testkit::{Fault, Faults, Op};
use tokio::sync::oneshot;

use crate::common::{AppError, faulty, held, is_free, keeper};

#[derive(Debug, Clone, Copy)]
enum Way {
    Value,
    Return,
    Question,
    Error,
    Panic,
}

const WAYS: [Way; 5] = [Way::Value, Way::Return, Way::Question, Way::Error, Way::Panic];

#[locked(key = "a", keeper = "keeper")]
async fn leave(keeper: &Keeper, way: Way) -> Result<u8, AppError> {
    tokio::task::yield_now().await;
    assert_eq!(held(keeper).await, ["a"]);
    match way {
        Way::Value => Ok(1),
        Way::Return => return Ok(2),
        Way::Question => Err(AppError::Declined)?,
        Way::Error => Err(AppError::Declined),
        Way::Panic => panic!("on purpose"),
    }
}

#[locked(key = "a", keeper = "keeper")]
fn leave_blocking(keeper: &Keeper, way: Way) -> Result<u8, AppError> {
    assert_eq!(lockkeeper::blocking::block_on(held(keeper)), ["a"]);
    match way {
        Way::Value => Ok(1),
        Way::Return => return Ok(2),
        Way::Question => Err(AppError::Declined)?,
        Way::Error => Err(AppError::Declined),
        Way::Panic => panic!("on purpose"),
    }
}

/// Checks what the caller gets.
fn check(way: Way, left: std::thread::Result<Result<u8, AppError>>) {
    match (way, left) {
        (Way::Value, Ok(Ok(1)))
        | (Way::Return, Ok(Ok(2)))
        | (Way::Question | Way::Error, Ok(Err(AppError::Declined))) => {}
        (Way::Panic, Err(panic)) => {
            assert_eq!(*panic.downcast_ref::<&str>().unwrap(), "on purpose");
        }
        (way, left) => panic!("{way:?} gave {left:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn the_lock_is_released_before_the_caller_gets_the_result() {
    for way in WAYS {
        let (healthy, keeper, faults) = faulty();
        faults.always(Op::Release, Fault::SlowRequest(Duration::from_secs(3)));
        let caller = tokio::spawn(async move {
            let left = leave(&keeper, way).await;
            (left, is_free(&healthy, "a").await, healthy)
        });
        match caller.await {
            Ok((left, free, _)) => {
                assert!(free, "{way:?}: the caller has the result while the lock is held");
                check(way, Ok(left));
            }
            Err(error) => check(way, Err(error.into_panic())),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_propagates_after_the_release() {
    let (healthy, keeper, faults) = faulty();
    faults.always(Op::Release, Fault::SlowRequest(Duration::from_secs(3)));
    let left = tokio::spawn(async move { leave(&keeper, Way::Panic).await }).await;
    check(Way::Panic, Err(left.unwrap_err().into_panic()));
    assert!(is_free(&healthy, "a").await);
}

#[test]
fn a_blocking_function_releases_its_lock_before_it_returns() {
    for way in WAYS {
        let (healthy, keeper, faults) = faulty();
        faults.always(Op::Release, Fault::SlowRequest(Duration::from_millis(20)));
        let left = std::panic::catch_unwind(AssertUnwindSafe(|| leave_blocking(&keeper, way)));
        assert!(lockkeeper::blocking::block_on(is_free(&healthy, "a")), "{way:?}");
        check(way, left);
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_masks_neither_value_nor_error() {
    for way in WAYS {
        let (healthy, keeper, faults) = faulty();
        faults.always(Op::Release, Fault::Refused);
        let left = tokio::spawn(async move { leave(&keeper, way).await }).await;
        check(way, left.map_err(tokio::task::JoinError::into_panic));
        drop(healthy);
    }
}

/// Sets a flag when it is dropped.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[locked(key = "a", keeper = "keeper", ttl = "10s")]
async fn hang(
    keeper: &Keeper,
    started: oneshot::Sender<()>,
    dropped: Dropped,
) -> Result<(), AppError> {
    let _dropped = dropped;
    started.send(()).unwrap();
    std::future::pending().await
}

#[tokio::test]
async fn a_dropped_future_releases_its_lock() {
    let keeper = keeper();
    let dropped = Arc::new(AtomicBool::new(false));
    let (started, is_started) = oneshot::channel();
    let (other, body) = (keeper.clone(), Dropped(dropped.clone()));
    let task = tokio::spawn(async move { hang(&other, started, body).await });
    soon("the body starts", is_started).await.unwrap();
    assert!(!is_free(&keeper, "a").await);
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert!(dropped.load(Ordering::SeqCst));
    drop(soon("the lock", keeper.mutex("a").lock()).await.unwrap());
}

#[tokio::test]
async fn a_body_is_cancelled_when_its_lock_is_lost_and_the_caller_gets_the_loss() {
    let keeper = keeper();
    let dropped = Arc::new(AtomicBool::new(false));
    let (started, is_started) = oneshot::channel();
    let (other, body) = (keeper.clone(), Dropped(dropped.clone()));
    let task = tokio::spawn(async move { hang(&other, started, body).await });
    soon("the body starts", is_started).await.unwrap();
    keeper.inspect().unwrap().break_lock("a").await.unwrap();
    let error = soon("the body ends", task).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), Some(ErrorKind::Lost));
    assert!(dropped.load(Ordering::SeqCst), "the body is dropped before the caller gets the error");
}

/// Records how many releases were sent before it was dropped.
struct Counts(Faults, Arc<AtomicUsize>);

impl Drop for Counts {
    fn drop(&mut self) {
        self.1.store(self.0.asked(Op::Release), Ordering::SeqCst);
    }
}

#[locked(key = "a", keeper = "keeper", ttl = "10s")]
async fn drop_something(keeper: &Keeper, counts: Counts, way: Way) -> Result<(), AppError> {
    let _counts = counts;
    tokio::task::yield_now().await;
    match way {
        Way::Panic => panic!("on purpose"),
        Way::Error | Way::Question => Err(AppError::Declined),
        Way::Value | Way::Return => Ok(()),
    }
}

#[tokio::test(start_paused = true)]
async fn the_values_of_a_body_are_dropped_before_the_release() {
    for way in WAYS {
        let (_, keeper, faults) = faulty();
        let released = Arc::new(AtomicUsize::new(usize::MAX));
        let counts = Counts(faults.clone(), released.clone());
        let call = async move { drop_something(&keeper, counts, way).await };
        let _ = tokio::spawn(call).await;
        assert_eq!(released.load(Ordering::SeqCst), 0, "{way:?}");
    }
}

#[locked(key = "a", keeper = "keeper", ttl = "10s")]
async fn keep_something(keeper: &Keeper, counts: Counts) -> Result<(), AppError> {
    let _counts = counts;
    std::future::pending().await
}

#[locked(key = "a", keeper = "keeper", ttl = "10s", reentrant)]
async fn keep_something_scoped(keeper: &Keeper, counts: Counts) -> Result<(), AppError> {
    let _counts = counts;
    std::future::pending().await
}

#[tokio::test(start_paused = true)]
async fn the_values_of_a_dropped_future_are_dropped_before_the_release() {
    for reentrant in [false, true] {
        let (_, keeper, faults) = faulty();
        let released = Arc::new(AtomicUsize::new(usize::MAX));
        let counts = Counts(faults.clone(), released.clone());
        let call = async {
            if reentrant {
                lockkeeper::scope(keep_something_scoped(&keeper, counts)).await
            } else {
                keep_something(&keeper, counts).await
            }
        };
        let cut = tokio::time::timeout(Duration::from_secs(1), call).await;
        assert!(cut.is_err());
        assert_eq!(released.load(Ordering::SeqCst), 0, "reentrant: {reentrant}");
        drop(soon("the lock", keeper.mutex("a").lock()).await.unwrap());
    }
}

#[locked(key = "a", keeper = "keeper", ttl = "10s")]
async fn lose(keeper: &Keeper, own: Option<AppError>) -> Result<(), AppError> {
    // No await follows, so the body returns after the loss.
    keeper.inspect()?.break_lock("a").await?;
    own.map_or(Ok(()), Err)
}

#[locked(key = "a", keeper = "keeper", ttl = "50ms")]
fn lose_blocking(keeper: &Keeper, own: Option<AppError>) -> Result<(), AppError> {
    // Past the lease: renewals fail.
    std::thread::sleep(Duration::from_millis(100));
    own.map_or(Ok(()), Err)
}

#[tokio::test(start_paused = true)]
async fn a_body_that_outlives_its_lease_is_cancelled() {
    let (_, keeper, faults) = faulty();
    faults.always(Op::Renew, Fault::Refused);
    let late = run_late(&keeper, None).await.unwrap_err();
    assert_eq!(late.kind(), Some(ErrorKind::Lost));
    let late = run_late(&keeper, Some(AppError::Declined)).await.unwrap_err();
    assert!(late.kind() == Some(ErrorKind::Lost), "cancelled before it returned its error");
}

#[locked(key = "late", keeper = "keeper", ttl = "10s")]
async fn run_late(keeper: &Keeper, own: Option<AppError>) -> Result<(), AppError> {
    tokio::time::sleep(Duration::from_secs(11)).await;
    own.map_or(Ok(()), Err)
}

/// A blocking body cannot be cancelled.
#[test]
fn a_blocking_body_that_lost_its_lock_returns_its_own_error_or_the_loss() {
    let (_, keeper, faults) = faulty();
    faults.always(Op::Renew, Fault::Refused);
    let lost = lose_blocking(&keeper, None).unwrap_err();
    assert_eq!(lost.kind(), Some(ErrorKind::Lost));
    let own = lose_blocking(&keeper, Some(AppError::Declined)).unwrap_err();
    assert_eq!(own.kind(), None, "{own:?}");
}

#[tokio::test]
async fn an_error_of_the_body_is_not_masked_by_a_loss() {
    let keeper = keeper();
    for _ in 0..20 {
        // The loss may be reported before or after the body returns.
        let own = lose(&keeper, Some(AppError::Declined)).await.unwrap_err();
        assert_eq!(own.kind(), None, "{own:?}");
    }
}

#[locked(key = "a", keeper = "keeper", wait = "0s")]
async fn at_once(keeper: &Keeper) -> Result<(), AppError> {
    Ok(())
}

#[locked(key = "a", keeper = "keeper")]
async fn patiently(keeper: &Keeper) -> Result<(), AppError> {
    Ok(())
}

#[tokio::test]
async fn a_contended_call_fails_at_once_with_wait_0s_and_waits_otherwise() {
    let keeper = keeper();
    let guard = keeper.mutex("a").lock().await.unwrap();
    let AppError::Locking(error) = at_once(&keeper).await.unwrap_err() else { panic!() };
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.is_retryable());
    assert_eq!(error.name(), Some("a"));
    let mut waiting = Box::pin(patiently(&keeper));
    tokio::select! {
        biased;
        _ = &mut waiting => panic!("the call did not wait"),
        () = tokio::task::yield_now() => {}
    }
    drop(guard);
    soon("the lock", waiting).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_is_unavailable() {
    let (_, keeper, faults) = faulty();
    faults.everything(Fault::Refused);
    assert_eq!(at_once(&keeper).await.unwrap_err().kind(), Some(ErrorKind::Unavailable));
}
