//! Reports of loss, abandoned acquires and requests, on a hold without a driver.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use super::*;
use crate::background::Background;
use crate::clock::simulated::sleep_machine;
use crate::{Keeper, Memory};

const TTL: Duration = Duration::from_secs(30);

const GRANT: Grant = Grant { fence: None, fence_is_past: false, valid_for: Some(TTL) };

fn waiting() -> Hold {
    let context = Keeper::new(Memory::new()).context;
    let spec = ClaimSpec::new(Name::new("a").unwrap(), TTL, Background::blocking());
    Hold::new(context, &spec, None)
}

fn hold() -> Hold {
    let hold = waiting();
    assert!(hold.granted(Moment::now(), GRANT, None));
    hold.succeed();
    hold
}

#[test]
fn a_hold_that_expires_while_the_machine_is_suspended_is_lost_at_the_next_check() {
    let hold = hold();
    assert_eq!(hold.state(), State::Held);
    let token = hold.lost_token();
    sleep_machine(TTL);
    assert!(!token.is_cancelled(), "the clock has not been read yet");
    assert_eq!(hold.state(), State::Lost);
    assert!(token.is_cancelled());
    assert!(hold.lost_token().is_cancelled());
}

#[test]
fn a_renewal_confirmed_after_the_deadline_does_not_restore_a_hold() {
    for is_checked in [true, false] {
        let hold = hold();
        let sent = Moment::now();
        sleep_machine(TTL);
        if is_checked {
            assert_eq!(hold.state(), State::Lost);
        }
        assert!(!hold.renewed(Moment::now(), Some(TTL)));
        assert!(!hold.renewed(sent, Some(TTL * 100)));
        hold.lose(LossReason::Broken);
        assert_eq!(hold.state(), State::Lost);
    }
}

#[test]
fn releasing_a_hold_that_has_expired_reports_that_it_was_lost() {
    let hold = hold();
    sleep_machine(TTL);
    assert!(hold.end(Ending::Release));
    hold.released(Ok(ReleaseOutcome::Released), Reporter::Driver);
    let outcome = hold.take_release_outcome(Waker::noop());
    assert_eq!(outcome.unwrap().unwrap(), ReleaseOutcome::AlreadyLost);
}

#[tokio::test(start_paused = true)]
async fn a_guard_reports_its_loss_within_a_second_after_a_suspension() {
    let keeper = Keeper::new(Memory::new());
    let guard = keeper.mutex("a").lock().await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let start = tokio::time::Instant::now();
    sleep_machine(TTL);
    guard.lost().await;
    assert!(start.elapsed() <= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn work_that_wakes_before_the_loss_is_reported_is_not_polled() {
    let keeper = Keeper::new(Memory::new());
    let guard = keeper.mutex("a").lock().await.unwrap();
    let steps = Cell::new(0);
    let work = poll_fn(|_| {
        steps.set(steps.get() + 1);
        Poll::<()>::Pending
    });
    let mut held = pin!(guard.while_held(work));
    assert!(poll_fn(|cx| Poll::Ready(held.as_mut().poll(cx).is_pending())).await);
    sleep_machine(TTL);
    assert_eq!(held.await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(steps.get(), 1);
}

fn abandoned() -> Error {
    Error::new(ErrorKind::Unavailable, "abandoned")
}

#[test]
fn an_acquire_that_was_granted_is_not_abandoned() {
    let hold = hold();
    assert!(!hold.fail_from_other_task(abandoned()));
    assert_eq!(hold.state(), State::Held);
    assert_eq!(hold.ending(), None);
    assert!(matches!(hold.take_acquire_outcome(Waker::noop()), Some(AcquireOutcome::Granted)));
}

#[test]
fn an_abandoned_acquire_gets_no_guard_from_a_later_grant() {
    let hold = waiting();
    assert!(hold.fail_from_other_task(abandoned()));
    assert!(hold.granted(Moment::now(), GRANT, None));
    hold.succeed();
    assert!(matches!(hold.take_acquire_outcome(Waker::noop()), Some(AcquireOutcome::Failed(_))));
    assert_eq!(hold.ending(), Some(Ending::Release));
}

#[test]
fn an_acquire_that_is_abandoned_is_woken() {
    struct Woken(AtomicBool);
    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let (hold, woken) = (waiting(), Arc::new(Woken(AtomicBool::new(false))));
    assert!(hold.take_acquire_outcome(&woken.clone().into()).is_none());
    assert!(hold.fail_from_other_task(abandoned()));
    assert!(woken.0.load(Ordering::SeqCst));
}

#[test]
fn the_reply_to_a_request_is_closed_if_the_driver_has_ended() {
    let hold = hold();
    hold.lose(LossReason::Broken);
    hold.driver_ended();
    let (reply, mut answer) = oneshot::channel();
    hold.request(Request::Downgrade(reply));
    assert!(answer.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed));
}
