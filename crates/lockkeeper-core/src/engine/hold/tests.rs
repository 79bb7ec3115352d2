//! What a hold reports, and when.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use super::*;
use crate::clock::simulated::sleep_machine;
use crate::{Keeper, Memory};

const TTL: Duration = Duration::from_secs(30);

fn asking() -> Hold {
    let context = Keeper::new(Memory::new()).context;
    let who = (Name::new("a").unwrap(), Owner::random(), Label::default());
    Hold::new(context, who, Mode::Exclusive, TTL, None)
}

fn hold() -> Hold {
    let hold = asking();
    assert!(hold.granted(Moment::now(), None, Some(TTL), None));
    hold.succeed();
    hold
}

#[test]
fn a_hold_is_lost_while_the_machine_sleeps_and_says_so_at_once() {
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
fn a_renewal_confirmed_after_the_deadline_does_not_bring_a_hold_back() {
    for looked in [true, false] {
        let hold = hold();
        let sent = Moment::now();
        sleep_machine(TTL);
        if looked {
            assert_eq!(hold.state(), State::Lost);
        }
        assert!(!hold.renewed(Moment::now(), Some(TTL)));
        assert!(!hold.renewed(sent, Some(TTL * 100)));
        hold.lose(LossReason::Broken);
        assert_eq!(hold.state(), State::Lost);
    }
}

#[test]
fn a_hold_that_ran_out_before_it_was_given_back_was_lost() {
    let hold = hold();
    sleep_machine(TTL);
    assert!(hold.end(Ending::Release));
    hold.released(Ok(ReleaseOutcome::Released));
    let outcome = hold.take_release_outcome(Waker::noop());
    assert_eq!(outcome.unwrap().unwrap(), ReleaseOutcome::AlreadyLost);
}

#[tokio::test(start_paused = true)]
async fn a_guard_tells_of_its_loss_soon_after_the_machine_wakes() {
    let keeper = Keeper::new(Memory::new());
    let guard = keeper.mutex("a").lock().await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let start = tokio::time::Instant::now();
    sleep_machine(TTL);
    guard.lost().await;
    assert!(start.elapsed() <= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn work_that_wakes_before_the_loss_is_told_does_no_step_more() {
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

fn given_up() -> Error {
    Error::new(ErrorKind::Unavailable, "given up")
}

#[test]
fn an_acquire_that_has_its_lock_by_now_is_not_given_up() {
    let hold = hold();
    assert!(!hold.fail_from_outside(given_up()));
    assert_eq!(hold.state(), State::Held);
    assert_eq!(hold.ending(), None);
    assert!(matches!(hold.take_acquire_outcome(Waker::noop()), Some(AcquireOutcome::Granted)));
}

#[test]
fn an_acquire_that_was_given_up_gets_no_guard_from_a_grant_that_comes_then() {
    let hold = asking();
    assert!(hold.fail_from_outside(given_up()));
    assert!(hold.granted(Moment::now(), None, Some(TTL), None));
    hold.succeed();
    assert!(matches!(hold.take_acquire_outcome(Waker::noop()), Some(AcquireOutcome::Failed(_))));
    assert_eq!(hold.ending(), Some(Ending::Release));
}

#[test]
fn an_acquire_that_is_given_up_is_woken_if_it_was_polled_just_before() {
    struct Woken(AtomicBool);
    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let (hold, woken) = (asking(), Arc::new(Woken(AtomicBool::new(false))));
    assert!(hold.take_acquire_outcome(&woken.clone().into()).is_none());
    assert!(hold.fail_from_outside(given_up()));
    assert!(woken.0.load(Ordering::SeqCst));
}

#[test]
fn a_request_to_a_hold_that_nobody_drives_any_more_is_answered() {
    let hold = hold();
    hold.lose(LossReason::Broken);
    hold.finished();
    let (reply, mut answer) = oneshot::channel();
    hold.request(Request::Downgrade(reply));
    assert!(answer.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed));
}
