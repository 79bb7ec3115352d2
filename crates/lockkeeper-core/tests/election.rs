//! The guarantees of an election, on the memory store in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Forgetful, pair, poll_once, secs};
use lockkeeper_core::{
    Backend, Capabilities, Claim, ClaimSpec, Election, ErrorKind, Fence, Fences, Inspector, Keeper,
    Memory, Name, ReleaseOutcome, Result,
};
use lockkeeper_testkit::log::Log;
use lockkeeper_testkit::wait::soon;
use lockkeeper_testkit::{Fault, Op};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

fn keeper() -> Keeper {
    Keeper::new(Memory::new())
}

/// Calls a function when dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[tokio::test(start_paused = true)]
async fn there_is_one_leader_at_a_time_and_terms_rise() {
    let election = keeper().election("service");
    let leading = Arc::new(AtomicUsize::new(0));
    let mut last = None;
    let mut candidates = Vec::new();
    for _ in 0..20 {
        let (election, leading) = (election.clone(), leading.clone());
        candidates.push(tokio::spawn(async move {
            let leadership = election.campaign().await.unwrap();
            assert_eq!(leading.fetch_add(1, Ordering::SeqCst), 0, "two leaders");
            assert!(leadership.is_leader());
            sleep(secs(100)).await;
            leading.fetch_sub(1, Ordering::SeqCst);
            let term = leadership.term();
            assert_eq!(leadership.resign().await.unwrap(), ReleaseOutcome::Released);
            term
        }));
    }
    for candidate in candidates {
        let term = Some(candidate.await.unwrap());
        assert!(term > last);
        last = term;
    }
}

#[tokio::test(start_paused = true)]
async fn an_election_and_a_mutex_of_the_same_name_are_independent() {
    let keeper = keeper();
    let leadership = keeper.election("a").campaign().await.unwrap();
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_some());
    let locks = keeper.inspect().unwrap().list("").await.unwrap();
    assert_eq!(locks[0].name.as_str(), "election/a");
    assert_eq!(leadership.name(), "a");
    keeper.inspect().unwrap().break_lock("election/a").await.unwrap();
    soon("the loss", leadership.lost()).await;
    assert!(!leadership.is_leader());
}

#[tokio::test(start_paused = true)]
async fn every_operation_of_an_election_rejects_an_invalid_name() {
    let keeper = keeper();
    for name in ["", "a\0b", &"x".repeat(Name::MAX_LEN - 8)] {
        let election = keeper.election(name);
        let kinds = [
            election.campaign().await.unwrap_err().kind(),
            election.run_while_leader(|_| async {}).await.unwrap_err().kind(),
            election.leader().await.unwrap_err().kind(),
            election.observe().unwrap().next().await.unwrap_err().kind(),
        ];
        assert_eq!(kinds, [ErrorKind::InvalidName; 4], "{name:?}");
    }
    let longest = "x".repeat(Name::MAX_LEN - 9);
    assert_eq!(keeper.election(&longest).campaign().await.unwrap().name(), longest);
}

/// A memory store without fences.
#[derive(Debug)]
struct Termless(Memory);

impl Backend for Termless {
    fn name(&self) -> &'static str {
        "termless"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { fences: Fences::None, ..self.0.capabilities() }
    }

    fn claim(&self, _: ClaimSpec) -> Result<Box<dyn Claim>> {
        panic!("the election claimed a lock")
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.0.inspector()
    }
}

#[tokio::test(start_paused = true)]
async fn an_election_on_a_store_without_fences_fails_before_it_claims_a_lock() {
    let election = Keeper::new(Termless(Memory::new())).election("a");
    let error = election.campaign().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let message = "termless: lock \"election/a\": this store does not support fences, which elections need for their terms";
    assert_eq!(error.to_string(), message);
    let error = election.run_while_leader(|_| async {}).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[tokio::test(start_paused = true)]
async fn the_leader_resigns_when_its_work_completes() {
    let pair = pair();
    let output =
        pair.healthy.election("a").run_while_leader(|term| async move { (term, 7) }).await.unwrap();
    assert_eq!(output.1, 7);
    assert!(pair.left().await.is_empty());
}

/// Runs endless work while leader. Sends the term and the time when the work starts and when it is dropped.
fn lead(
    election: Election,
) -> (tokio::task::JoinHandle<Result<()>>, mpsc::UnboundedReceiver<(Fence, Instant)>) {
    let (sender, events) = mpsc::unbounded_channel();
    let task = tokio::spawn(async move {
        let work = |term| {
            let _ = sender.send((term, Instant::now()));
            let sender = sender.clone();
            let on_drop = OnDrop(move || {
                let _ = sender.send((term, Instant::now()));
            });
            async move {
                let _on_drop = on_drop;
                pending::<()>().await;
            }
        };
        election.run_while_leader(work).await
    });
    (task, events)
}

#[tokio::test(start_paused = true)]
async fn a_lost_leadership_stops_the_work_before_the_next_term_and_campaigns_again() {
    let pair = pair();
    let (first, mut events) = lead(pair.faulty.election("a").ttl(secs(9)));
    let (term, _) = soon("the first term", events.recv()).await.unwrap();
    let (other, mut other_events) = lead(pair.healthy.election("a").ttl(secs(9)));
    pair.until_queued("election/a", 1).await;
    // Renewals and releases fail, so the lease has to expire.
    pair.faults.everything(Fault::Refused);
    let (stopped, stopped_at) = soon("the end of the work", events.recv()).await.unwrap();
    assert_eq!(stopped, term);
    let (next, next_at) = soon("the next term", other_events.recv()).await.unwrap();
    assert!(next > term);
    assert!(stopped_at < next_at, "{stopped_at:?}, {next_at:?}");
    // The campaign survives the outage.
    sleep(secs(300)).await;
    assert!(!first.is_finished());
    pair.faults.none();
    sleep(secs(20)).await;
    other.abort();
    let (again, _) = soon("a new term of the first", events.recv()).await.unwrap();
    assert!(again > next);
}

#[tokio::test(start_paused = true)]
async fn a_campaign_survives_an_outage_and_logs_it() {
    let log = Log::start();
    let pair = pair();
    pair.faults.everything(Fault::Refused);
    let (_, mut events) = lead(pair.faulty.election("a"));
    sleep(secs(3600)).await;
    let attempts = pair.faults.asked(Op::Attempt);
    // The backoff grows to at most five seconds, and half of that on average.
    assert!((700..3600).contains(&attempts), "{attempts} attempts in an hour");
    log.assert_has(&["WARN", "the campaign failed, trying again", "election/a", "failures=3"]);
    assert!(events.try_recv().is_err());
    pair.faults.none();
    soon("the leadership", events.recv()).await.unwrap();
    log.assert_has(&["INFO", "the store answers again", "election=\"a\""]);
    log.assert_has(&["INFO", "elected", "term="]);
}

#[tokio::test(start_paused = true)]
async fn a_campaign_with_a_max_wait_is_repeated_with_backoff() {
    let pair = pair();
    let leadership = pair.healthy.election("a").campaign().await.unwrap();
    let (_, mut events) = lead(pair.faulty.election("a").max_wait(secs(0)));
    sleep(secs(100)).await;
    let attempts = pair.faults.asked(Op::Attempt);
    assert!((10..200).contains(&attempts), "{attempts} attempts in 100 s");
    drop(leadership);
    soon("the leadership", events.recv()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_closed_keeper_ends_the_campaign() {
    let keeper = keeper();
    let _leadership = keeper.election("a").campaign().await.unwrap();
    let (task, _events) = lead(keeper.election("a"));
    sleep(secs(1)).await;
    keeper.close().await;
    let error = soon("the end", task).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_work_propagates_and_ends_the_leadership() {
    let pair = pair();
    let election = pair.faulty.election("a");
    let task = tokio::spawn(async move {
        election
            .run_while_leader(|_| async {
                sleep(secs(1)).await;
                panic!("on purpose")
            })
            .await
    });
    let panic = task.await.unwrap_err().into_panic();
    assert_eq!(*panic.downcast_ref::<&str>().unwrap(), "on purpose");
    pair.faulty.close().await;
    assert!(pair.left().await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn dropping_run_while_leader_drops_the_work_before_it_resigns() {
    let memory = Memory::new();
    let (store, faults) = lockkeeper_testkit::Faulty::new(memory.clone());
    let election = Keeper::new(store).election("a");
    let (sender, mut events) = mpsc::unbounded_channel();
    let work = |_| {
        let (sender, faults) = (sender.clone(), faults.clone());
        sender.send("leads".to_owned()).unwrap();
        let dropped = OnDrop(move || {
            let releases = faults.asked(Op::Release);
            sender.send(format!("dropped after {releases} releases")).unwrap();
        });
        async move {
            let _dropped = dropped;
            pending::<()>().await;
        }
    };
    {
        let mut run = pin!(election.run_while_leader(work));
        tokio::select! {
            _ = &mut run => unreachable!("the work never ends"),
            event = events.recv() => assert_eq!(event.unwrap(), "leads"),
        }
    }
    assert_eq!(events.try_recv().unwrap(), "dropped after 0 releases");
    let next = Keeper::new(memory).election("a");
    assert!(soon("the next leader", next.campaign()).await.unwrap().is_leader());
    assert_eq!(faults.asked(Op::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn run_while_leader_dropped_after_any_poll_leaves_no_state() {
    for polls in 0..12 {
        let pair = pair();
        let election = pair.faulty.election("a");
        pair.faults.always(Op::Attempt, Fault::SlowAnswer(secs(1)));
        pair.faults.always(Op::Release, Fault::SlowRequest(secs(1)));
        {
            let mut run = pin!(election.run_while_leader(|_| sleep(secs(3))));
            for _ in 0..polls {
                if poll_once(run.as_mut()).await.is_ready() {
                    break;
                }
                sleep(secs(1)).await;
            }
        }
        pair.faulty.close().await;
        assert!(pair.left().await.is_empty(), "after {polls} polls");
    }
}

#[tokio::test(start_paused = true)]
async fn observe_reports_the_leader_at_once_and_at_each_change() {
    let keeper = keeper();
    let one = keeper.election("a").label("one");
    let two = keeper.election("a").label("two");
    // Neither an election with a longer name nor a semaphore of the same name is reported.
    let _near = keeper.election("ab").campaign().await.unwrap();
    let _permit = keeper.semaphore("election/a", 2).acquire().await.unwrap();
    let mut observe = keeper.election("a").observe().unwrap();
    assert_eq!(soon("no leader", observe.next()).await.unwrap(), None);

    let first = one.campaign().await.unwrap();
    let leader = soon("the first leader", observe.next()).await.unwrap().unwrap();
    assert_eq!((leader.who(), leader.term), ("one", Some(first.term())));
    assert_eq!(leader.owner, Some(first.owner()));
    assert_eq!(one.leader().await.unwrap(), Some(leader));

    // Renewals and candidates are not reported.
    let waiting = tokio::spawn(async move { two.campaign().await.unwrap() });
    let quiet = tokio::time::timeout(secs(300), observe.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");

    first.resign().await.unwrap();
    let second = waiting.await.unwrap();
    let leader = soon("the second leader", observe.next()).await.unwrap().unwrap();
    assert_eq!((leader.who(), leader.term), ("two", Some(second.term())));

    // A new term of the same label is reported as a new leader.
    drop(second);
    let _third = keeper.election("a").label("two").campaign().await.unwrap();
    let again = soon("the third leader", observe.next()).await.unwrap().unwrap();
    assert!(again.term > leader.term);
}

#[tokio::test(start_paused = true)]
async fn a_store_without_inspection_elects_leaders_but_cannot_report_them() {
    let election = Keeper::new(Forgetful::default()).election("a");
    assert_eq!(election.observe().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(election.leader().await.unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(election.campaign().await.unwrap().is_leader());
}
