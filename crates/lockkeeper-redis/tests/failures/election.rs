//! Leaders that are killed and stopped, in processes of their own.

use std::time::Duration;

use lockkeeper_core::{Fence, Observe};
use lockkeeper_testkit::history::{self, History, Hold};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;
use rustix::process::Signal;

use crate::common::{Process, close, keeper, secs, until_empty, until_queued};

/// Short, because leaders die here, and longer than a busy machine keeps a process waiting.
const TTL: Duration = Duration::from_secs(2);
const LOCK: &str = "election/service";

fn candidate(server: &RedisServer, task: &str) -> Process {
    Process::start(&server.url(), "service", TTL, &[task])
}

/// The next leader that is another than the last.
async fn next_term(observe: &mut Observe, last: Option<Fence>) -> Fence {
    soon("a leader", async {
        loop {
            let term = observe.next().await.unwrap().and_then(|leader| leader.term);
            if let Some(term) = term.filter(|term| Some(*term) != last) {
                return term;
            }
        }
    })
    .await
}

/// Kills a process and notes its time in office, and what it said of it since.
async fn end_of(mut process: Process, hold: Hold, history: &History) {
    process.kill9().await;
    let killed = history::now();
    let own = History::new();
    own.add(hold);
    while let Some(line) = soon("its last words", process.next_line()).await {
        let (_, hold) = line.split_once(' ').unwrap();
        own.add(hold.parse().unwrap());
    }
    own.end_all(killed);
    own.holds().into_iter().for_each(|hold| history.add(hold));
}

/// The leader is always the next to be killed or stopped: terms rise, and what each of them took for its
/// time in office is disjoint from the others'.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_leads_at_a_time_whether_leaders_are_killed_or_stopped() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server.url()).await;
    let history = History::new();
    let mut last: Option<Fence> = None;
    let mut leader = candidate(&server, "lead");
    leader.expect("campaigns").await;
    for round in 0..4 {
        let hold: Hold = leader.expect("leads").await.parse().unwrap();
        assert!(hold.fence > last, "{hold} after {last:?}");
        last = hold.fence;
        let mut next = candidate(&server, "lead");
        next.expect("campaigns").await;
        if round % 2 == 0 {
            end_of(leader, hold, &history).await;
        } else {
            leader.signal(Signal::STOP);
            let mut observe = keeper.election("service").observe().unwrap();
            next_term(&mut observe, last).await;
            // It wakes up, and knows that it leads no more.
            leader.signal(Signal::CONT);
            let led: Hold = leader.expect("led").await.parse().unwrap();
            assert_eq!(led.fence, last);
            end_of(leader, led, &history).await;
        }
        leader = next;
    }
    let hold: Hold = leader.expect("leads").await.parse().unwrap();
    assert!(hold.fence > last);
    leader.end_input();
    history.add(leader.expect("led").await.parse().unwrap());
    leader.expect("resigned").await;
    let summary = history.assert_clean();
    assert!(summary.holds >= 5 && summary.most_at_once == 1, "{summary:?}");
    close(&keeper).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_leader_finds_its_work_dropped_and_campaigns_again() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server.url()).await;
    let mut observe = keeper.election("service").observe().unwrap();
    let mut first = candidate(&server, "work");
    let term = first.expect("works").await;
    assert_eq!(next_term(&mut observe, None).await.to_string(), term);
    first.signal(Signal::STOP);
    let mut second = candidate(&server, "work");
    let next = second.expect("works").await;
    let seen = next_term(&mut observe, term.parse().ok().and_then(Fence::new)).await;
    assert_eq!(seen.to_string(), next);
    assert!(next.parse::<u64>().unwrap() > term.parse().unwrap());
    first.signal(Signal::CONT);
    assert_eq!(first.expect("stopped").await, term);
    until_queued(&server, LOCK, 1).await;
    // The second is killed, and the first leads again.
    second.kill9().await;
    let again: u64 = first.expect("works").await.parse().unwrap();
    assert!(again > next.parse().unwrap());
    // It ends in good order: the work first, then the leadership.
    first.end_input();
    assert_eq!(first.expect("stopped").await, again.to_string());
    close(&keeper).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_gone_for_a_while_ends_no_candidate() {
    let mut server = RedisServer::start_or_panic();
    let mut process = candidate(&server, "work");
    let term: u64 = process.expect("works").await.parse().unwrap();
    server.kill9();
    // Its lease ends while nobody answers.
    assert_eq!(process.expect("stopped").await, term.to_string());
    server.restart().unwrap();
    let again: u64 = process.expect("works").await.parse().unwrap();
    assert!(again > term);
    process.end_input();
    process.expect("stopped").await;
    soon("its end", async { while process.next_line().await.is_some() {} }).await;
    tokio::time::timeout(secs(30), until_empty(&server)).await.unwrap();
}
