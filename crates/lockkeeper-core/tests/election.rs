//! What an election promises, on the memory store in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use common::{Forgetful, pair, secs};
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

/// Does something when it is dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[tokio::test(start_paused = true)]
async fn one_leads_at_a_time_and_each_term_is_higher_than_the_one_before() {
    let election = keeper().election("service");
    let leading = Arc::new(AtomicUsize::new(0));
    let mut last = None;
    let mut candidates = Vec::new();
    for _ in 0..20 {
        let (election, leading) = (election.clone(), leading.clone());
        candidates.push(tokio::spawn(async move {
            let leadership = election.campaign().await.unwrap();
            assert_eq!(leading.fetch_add(1, Ordering::SeqCst), 0, "two lead");
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
async fn an_election_and_a_mutex_of_the_same_name_do_not_meet() {
    let keeper = keeper();
    let leadership = keeper.election("a").campaign().await.unwrap();
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_some());
    let locks = keeper.inspect().unwrap().list("").await.unwrap();
    assert_eq!(locks[0].name.as_str(), "election/a");
    assert_eq!(leadership.name(), "a");
    keeper.inspect().unwrap().break_lock("election/a").await.unwrap();
    soon("deposed", leadership.lost()).await;
    assert!(!leadership.is_leader());
}

#[tokio::test(start_paused = true)]
async fn a_bad_name_is_refused_by_everything_that_an_election_does() {
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
        panic!("asked for a lock")
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.0.inspector()
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_without_fences_is_refused_before_anything_is_taken() {
    let election = Keeper::new(Termless(Memory::new())).election("a");
    let error = election.campaign().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let message = "termless: lock \"election/a\": this store has no fences, and so no terms";
    assert_eq!(error.to_string(), message);
    let error = election.run_while_leader(|_| async {}).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[tokio::test(start_paused = true)]
async fn work_that_ends_by_itself_is_followed_by_a_resignation() {
    let pair = pair();
    let output =
        pair.healthy.election("a").run_while_leader(|term| async move { (term, 7) }).await.unwrap();
    assert_eq!(output.1, 7);
    assert!(pair.left().await.is_empty());
}

/// Leads until told otherwise: says its term, and when its work is dropped.
fn leads(
    election: Election,
) -> (tokio::task::JoinHandle<Result<()>>, mpsc::UnboundedReceiver<(Fence, Instant)>) {
    let (tell, told) = mpsc::unbounded_channel();
    let task = tokio::spawn(async move {
        let work = |term| {
            let _ = tell.send((term, Instant::now()));
            let tell = tell.clone();
            let ends = OnDrop(move || {
                let _ = tell.send((term, Instant::now()));
            });
            async move {
                let _ends = ends;
                pending::<()>().await;
            }
        };
        election.run_while_leader(work).await
    });
    (task, told)
}

#[tokio::test(start_paused = true)]
async fn a_lost_leadership_stops_the_work_before_another_leads_and_is_campaigned_for_again() {
    let pair = pair();
    let (first, mut told) = leads(pair.faulty.election("a").ttl(secs(9)));
    let (term, _) = soon("it leads", told.recv()).await.unwrap();
    let (other, mut others) = leads(pair.healthy.election("a").ttl(secs(9)));
    pair.until_queued("election/a", 1).await;
    // Renewals fail, and so does giving it back: the lease has to end.
    pair.faults.everything(Fault::Refused);
    let (stopped, stopped_at) = soon("the work stops", told.recv()).await.unwrap();
    assert_eq!(stopped, term);
    let (next, next_at) = soon("the other leads", others.recv()).await.unwrap();
    assert!(next > term);
    assert!(stopped_at < next_at, "{stopped_at:?}, {next_at:?}");
    // For all of an outage nothing ends.
    sleep(secs(300)).await;
    assert!(!first.is_finished());
    pair.faults.none();
    sleep(secs(20)).await;
    other.abort();
    let (again, _) = soon("it leads again", told.recv()).await.unwrap();
    assert!(again > next);
}

#[tokio::test(start_paused = true)]
async fn an_outage_while_campaigning_is_outlived_and_logged() {
    let log = Log::start();
    let pair = pair();
    pair.faults.everything(Fault::Refused);
    let (_, mut told) = leads(pair.faulty.election("a"));
    sleep(secs(3600)).await;
    let asked = pair.faults.asked(Op::Attempt);
    // Pauses grow to at most five seconds, and are half of that on average.
    assert!((700..3600).contains(&asked), "asked {asked} times in an hour");
    log.assert_has(&["WARN", "the campaign failed, trying again", "election/a", "failures=3"]);
    assert!(told.try_recv().is_err());
    pair.faults.none();
    soon("it leads", told.recv()).await.unwrap();
    log.assert_has(&["INFO", "the store answers again", "election=\"a\""]);
    log.assert_has(&["INFO", "elected", "term="]);
}

#[tokio::test(start_paused = true)]
async fn with_a_max_wait_it_campaigns_again_and_again_without_haste() {
    let pair = pair();
    let leadership = pair.healthy.election("a").campaign().await.unwrap();
    let (_, mut told) = leads(pair.faulty.election("a").max_wait(secs(0)));
    sleep(secs(100)).await;
    let asked = pair.faults.asked(Op::Attempt);
    assert!((10..200).contains(&asked), "asked {asked} times in 100 s");
    drop(leadership);
    soon("it leads", told.recv()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_closed_keeper_ends_the_campaign() {
    let keeper = keeper();
    let _leadership = keeper.election("a").campaign().await.unwrap();
    let (task, _told) = leads(keeper.election("a"));
    sleep(secs(1)).await;
    keeper.close().await;
    let error = soon("the end", task).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_work_goes_through_and_gives_up_the_leadership() {
    let pair = pair();
    let election = pair.faulty.election("a");
    let task = tokio::spawn(async move {
        election
            .run_while_leader(|_| async {
                sleep(secs(1)).await;
                panic!("out of ideas")
            })
            .await
    });
    let panic = task.await.unwrap_err().into_panic();
    assert_eq!(*panic.downcast_ref::<&str>().unwrap(), "out of ideas");
    pair.faulty.close().await;
    assert!(pair.left().await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn dropped_it_stops_the_work_first_and_then_resigns() {
    let memory = Memory::new();
    let (store, faults) = lockkeeper_testkit::Faulty::new(memory.clone());
    let election = Keeper::new(store).election("a");
    let (tell, mut told) = mpsc::unbounded_channel();
    let work = |_| {
        let (tell, faults) = (tell.clone(), faults.clone());
        tell.send("leads".to_owned()).unwrap();
        let dropped = OnDrop(move || {
            let releases = faults.asked(Op::Release);
            tell.send(format!("dropped after {releases} releases")).unwrap();
        });
        async move {
            let _dropped = dropped;
            pending::<()>().await;
        }
    };
    {
        let mut run = pin!(election.run_while_leader(work));
        tokio::select! {
            _ = &mut run => unreachable!("it never ends"),
            said = told.recv() => assert_eq!(said.unwrap(), "leads"),
        }
    }
    assert_eq!(told.try_recv().unwrap(), "dropped after 0 releases");
    let next = Keeper::new(memory).election("a");
    assert!(soon("the next leads", next.campaign()).await.unwrap().is_leader());
    assert_eq!(faults.asked(Op::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn dropped_after_any_poll_it_leaves_nothing_in_the_store() {
    for polls in 0..12 {
        let pair = pair();
        let election = pair.faulty.election("a");
        pair.faults.always(Op::Attempt, Fault::SlowAnswer(secs(1)));
        pair.faults.always(Op::Release, Fault::SlowRequest(secs(1)));
        {
            let mut run = pin!(election.run_while_leader(|_| sleep(secs(3))));
            for _ in 0..polls {
                let done = poll_fn(|cx| Poll::Ready(run.as_mut().poll(cx).is_ready())).await;
                if done {
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
async fn who_leads_is_told_at_once_and_at_each_change() {
    let keeper = keeper();
    let one = keeper.election("a").label("one");
    let two = keeper.election("a").label("two");
    // One that has the name as a prefix, and one with a semaphore of that name, are not it.
    let _near = keeper.election("ab").campaign().await.unwrap();
    let _permit = keeper.semaphore("election/a", 2).acquire().await.unwrap();
    let mut observe = keeper.election("a").observe().unwrap();
    assert_eq!(soon("nobody", observe.next()).await.unwrap(), None);

    let first = one.campaign().await.unwrap();
    let leader = soon("the first", observe.next()).await.unwrap().unwrap();
    assert_eq!((leader.who(), leader.term), ("one", Some(first.term())));
    assert_eq!(leader.owner, Some(first.owner()));
    assert_eq!(one.leader().await.unwrap(), Some(leader));

    // Nothing is told of renewals, nor of who campaigns.
    let waiting = tokio::spawn(async move { two.campaign().await.unwrap() });
    let quiet = tokio::time::timeout(secs(300), observe.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");

    first.resign().await.unwrap();
    let second = waiting.await.unwrap();
    let leader = soon("the second", observe.next()).await.unwrap().unwrap();
    assert_eq!((leader.who(), leader.term), ("two", Some(second.term())));

    // The same label in a new term is another leader.
    drop(second);
    let _third = keeper.election("a").label("two").campaign().await.unwrap();
    let again = soon("the third", observe.next()).await.unwrap().unwrap();
    assert!(again.term > leader.term);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_looked_into_cannot_be_observed_but_elects() {
    let election = Keeper::new(Forgetful::default()).election("a");
    assert_eq!(election.observe().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(election.leader().await.unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(election.campaign().await.unwrap().is_leader());
}
