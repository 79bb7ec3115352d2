//! Elections among processes that are killed and stopped.

use std::time::Duration;

use lockkeeper_core::{Fence, Observe};
use lockkeeper_testkit::history::{self, History, Hold};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;
use rustix::process::Signal;

use crate::common::{Process, close, keeper, secs, until_empty, until_queued};

/// Short, because leaders are killed here, but longer than a busy machine delays a process.
const TTL: Duration = Duration::from_secs(2);
const LOCK: &str = "election/service";

fn candidate(server: &RedisServer, task: &str) -> Process {
    Process::start(&server.url(), "service", TTL, &[task])
}

/// Waits for a leader with another term than the last.
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

/// Kills a leader and records its term, with the end that it printed, if any.
async fn kill_and_record(mut process: Process, hold: Hold, history: &History) {
    process.kill9().await;
    let killed = history::now();
    let own = History::new();
    own.add(hold);
    while let Some(line) = soon("its last lines", process.next_line()).await {
        let (_, hold) = line.split_once(' ').unwrap();
        own.add(hold.parse().unwrap());
    }
    own.end_all(killed);
    own.holds().into_iter().for_each(|hold| history.add(hold));
}

/// In each round the current leader is killed or stopped. Terms rise, and the recorded leaderships do not overlap.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaderships_do_not_overlap_when_leaders_are_killed_or_stopped() {
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
            kill_and_record(leader, hold, &history).await;
        } else {
            leader.signal(Signal::STOP);
            let mut observe = keeper.election("service").observe().unwrap();
            next_term(&mut observe, last).await;
            // When it continues, it detects that it is no longer the leader.
            leader.signal(Signal::CONT);
            let led: Hold = leader.expect("led").await.parse().unwrap();
            assert_eq!(led.fence, last);
            kill_and_record(leader, led, &history).await;
        }
        leader = next;
    }
    let hold: Hold = leader.expect("leads").await.parse().unwrap();
    assert!(hold.fence > last);
    leader.end_input();
    history.add(leader.expect("led").await.parse().unwrap());
    leader.expect("resigned").await;
    let summary = history.assert_clean();
    assert!(summary.holds >= 5 && summary.max_concurrent == 1, "{summary:?}");
    close(&keeper).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_leader_drops_its_work_when_it_continues_and_campaigns_again() {
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
    // Ends in order: the work first, then the leadership.
    first.end_input();
    assert_eq!(first.expect("stopped").await, again.to_string());
    close(&keeper).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_candidate_survives_a_restart_of_the_server() {
    let mut server = RedisServer::start_or_panic();
    let mut process = candidate(&server, "work");
    let term: u64 = process.expect("works").await.parse().unwrap();
    server.kill9();
    // Its lease expires while the server is down.
    assert_eq!(process.expect("stopped").await, term.to_string());
    server.restart().unwrap();
    let again: u64 = process.expect("works").await.parse().unwrap();
    assert!(again > term);
    process.end_input();
    process.expect("stopped").await;
    soon("its exit", async { while process.next_line().await.is_some() {} }).await;
    tokio::time::timeout(secs(30), until_empty(&server)).await.unwrap();
}
