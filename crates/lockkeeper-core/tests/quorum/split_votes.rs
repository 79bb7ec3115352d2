//! Split votes: clients that attempt at the same time, each closest to a different node.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, Claim, ErrorKind, Guard, Inspector, Keeper, Memory, Quorum,
};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::time::Instant;

use crate::common::{memories, millis, poll_once, secs, spawn_lock, spec};

const TTL: Duration = Duration::from_secs(30);

/// Returns a keeper on the nodes, with a delay to each, and the faults that count its requests.
fn keeper(stores: &[Memory], delay: impl Fn(usize) -> Duration) -> (Keeper, Vec<Faults>) {
    let (mut nodes, mut links) = (Vec::new(), Vec::new());
    for (i, store) in stores.iter().enumerate() {
        let (node, faults) = Faulty::new(store.clone());
        faults.always(Op::Attempt, Fault::SlowRequest(delay(i)));
        // A release must not overtake the attempts of other clients that are in flight.
        faults.always(Op::Release, Fault::SlowRequest(delay(i).max(millis(1))));
        nodes.push(Arc::new(node) as Arc<dyn Backend>);
        links.push(faults);
    }
    (Keeper::new(Quorum::new(nodes).unwrap()).ttl(TTL), links)
}

/// Returns one keeper per node, with no latency to that node and a millisecond to the others.
fn keeper_near_each(stores: &[Memory]) -> Vec<Keeper> {
    let near = |own| move |i| if i == own { Duration::ZERO } else { millis(1) };
    (0..stores.len()).map(|own| keeper(stores, near(own)).0).collect()
}

async fn assert_empty(stores: &[Memory]) {
    for store in stores {
        assert_eq!(store.list("").await.unwrap(), []);
    }
}

/// Lets all keepers try at the same time. Returns the guards of the successful tries.
async fn winners(keepers: &[Keeper], name: &str) -> Vec<Guard> {
    let tries: Vec<_> = keepers
        .iter()
        .map(|keeper| {
            let mutex = keeper.mutex(name);
            tokio::spawn(async move { mutex.try_lock().await.unwrap() })
        })
        .collect();
    let mut winners = Vec::new();
    for one in tries {
        winners.extend(one.await.unwrap());
    }
    winners
}

#[tokio::test(start_paused = true)]
async fn exactly_one_of_several_simultaneous_tries_gets_a_free_lock() {
    for count in [3, 5] {
        let stores = memories(count);
        let keepers = keeper_near_each(&stores);
        for round in 0..100 {
            let name = format!("a{round}");
            let winners = winners(&keepers, &name).await;
            assert_eq!(winners.len(), 1, "{count} nodes, round {round}");
            for guard in winners {
                guard.release().await.unwrap();
            }
        }
        for keeper in &keepers {
            keeper.close().await;
        }
        assert_empty(&stores).await;
    }
}

#[tokio::test(start_paused = true)]
async fn exactly_one_of_two_simultaneous_tries_gets_a_free_lock_while_a_node_is_down() {
    let stores = memories(3);
    let near = |own| move |i| if i == own { Duration::ZERO } else { millis(1) };
    let mut keepers = Vec::new();
    for own in 0..2 {
        let (keeper, links) = keeper(&stores, near(own));
        links[2].everything(if own == 0 { Fault::Refused } else { Fault::Hangs });
        keepers.push(keeper);
    }
    for round in 0..20 {
        let winners = winners(&keepers, &format!("a{round}")).await;
        assert_eq!(winners.len(), 1, "round {round}");
    }
}

#[tokio::test(start_paused = true)]
async fn exactly_one_of_simultaneous_writers_and_readers_gets_a_free_lock() {
    let stores = memories(3);
    let keepers = keeper_near_each(&stores);
    for round in 0..100 {
        let lock = |i: usize| keepers[i].rw_lock(format!("a{round}"));
        let (one, two, reader) = (lock(0), lock(1), lock(2));
        let (one, two, reader) = tokio::join!(one.try_write(), two.try_write(), reader.try_read());
        let got = [one.unwrap(), two.unwrap(), reader.unwrap()];
        assert_eq!(got.iter().flatten().count(), 1, "round {round}");
        for guard in got.into_iter().flatten() {
            guard.release().await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_try_for_a_held_lock_takes_one_round() {
    let stores = memories(5);
    let held = keeper(&stores, |_| Duration::ZERO).0;
    for shared in [false, true] {
        let name = if shared { "a" } else { "b" };
        let lock = held.rw_lock(name);
        let _guard = if shared { lock.read().await } else { lock.write().await }.unwrap();
        let (other, links) = keeper(&stores, |_| millis(1));
        let start = Instant::now();
        assert!(other.mutex(name).try_lock().await.unwrap().is_none());
        assert_eq!(start.elapsed(), millis(1));
        assert!(links.iter().all(|link| link.asked(Op::Attempt) == 1));
        assert!(links.iter().all(|link| link.asked(Op::Release) == 0));
    }
}

/// The nodes outside the majority are free. They grant the try, which releases them.
#[tokio::test(start_paused = true)]
async fn a_holder_with_a_bare_majority_is_not_a_split_vote() {
    let stores = memories(5);
    let (held, links) = keeper(&stores, |_| Duration::ZERO);
    links[3].everything(Fault::Refused);
    links[4].everything(Fault::Refused);
    let _guard = held.mutex("a").lock().await.unwrap();
    let (other, links) = keeper(&stores, |_| millis(1));
    assert!(other.mutex("a").try_lock().await.unwrap().is_none());
    assert_eq!(links.iter().map(|link| link.asked(Op::Attempt)).sum::<usize>(), 5);
    // The grants are released before the try returns.
    for store in &stores[3..] {
        assert_eq!(store.list("").await.unwrap(), []);
    }
}

/// Takes `name` on one node only, with a new owner. The claim has no majority.
async fn minority_claim(store: &Memory, name: &str) -> Box<dyn Claim> {
    let mut claim = store.claim(spec(name, secs(600))).unwrap();
    assert!(matches!(claim.attempt(None).await.unwrap(), Attempt::Granted(_)));
    claim
}

#[tokio::test(start_paused = true)]
async fn an_undecided_try_fails_in_bounded_time_and_leaves_no_state() {
    let stores = memories(3);
    let _claims = [minority_claim(&stores[0], "a").await, minority_claim(&stores[1], "a").await];
    let (keeper, links) = keeper(&stores, |_| millis(1));
    let start = Instant::now();
    let error = keeper.mutex("a").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Undecided, "{error}");
    assert!(error.is_retryable());
    assert!((secs(2)..secs(3)).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert!(links[2].asked(Op::Attempt) < 100, "{}", links[2].asked(Op::Attempt));
    // A short TTL bounds the retries.
    let start = Instant::now();
    let error = keeper.mutex("a").ttl(millis(300)).try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Undecided, "{error}");
    assert!(start.elapsed() < millis(150), "{:?}", start.elapsed());
    // A bounded wait also ends as undecided, not as contended.
    let error = keeper.mutex("a").try_lock_for(millis(50)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Undecided, "{error}");
    keeper.close().await;
    assert_empty(&stores[2..]).await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_survives_undecided_rounds_and_is_granted_with_a_majority() {
    let stores = memories(3);
    let mut claims = [minority_claim(&stores[0], "a").await, minority_claim(&stores[1], "a").await];
    let (keeper, _) = keeper(&stores, |_| millis(1));
    let waiter = spawn_lock(keeper.mutex("a"));
    tokio::time::sleep(secs(20)).await;
    assert!(!waiter.is_finished());
    claims[0].release().await.unwrap();
    let guard = tokio::time::timeout(secs(1), waiter).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
    keeper.close().await;
    assert_empty(&stores[2..]).await;
}

/// The hung node makes a round take longer than a third of the TTL.
#[tokio::test(start_paused = true)]
async fn a_waiter_with_a_short_ttl_survives_undecided_rounds_with_a_hung_node() {
    let stores = memories(3);
    let mut claim = minority_claim(&stores[0], "a").await;
    let (keeper, links) = keeper(&stores, |_| millis(1));
    links[2].everything(Fault::Hangs);
    let waiter = spawn_lock(keeper.mutex("a").ttl(millis(1200)));
    tokio::time::sleep(secs(20)).await;
    assert!(!waiter.is_finished());
    claim.release().await.unwrap();
    let guard = tokio::time::timeout(secs(2), waiter).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_waiter_survives_a_brief_failure_between_undecided_rounds() {
    let stores = memories(3);
    let mut claims = [minority_claim(&stores[0], "a").await, minority_claim(&stores[1], "a").await];
    let (keeper, links) = keeper(&stores, |_| millis(1));
    let waiter = spawn_lock(keeper.mutex("a"));
    tokio::time::sleep(secs(5)).await;
    for link in &links {
        link.everything(Fault::Refused);
    }
    tokio::time::sleep(secs(1)).await;
    for link in &links {
        link.none();
    }
    claims[0].release().await.unwrap();
    // A node gets the next attempt after it has confirmed the release. Failed releases are retried with full jitter,
    // whose range has doubled several times by now, so a few seconds are not enough.
    let guard = tokio::time::timeout(TTL, waiter).await.unwrap().unwrap();
    guard.expect("the outage was shorter than the TTL").release().await.unwrap();
    // A longer outage ends the wait, a TTL after the last response.
    let _claims = [minority_claim(&stores[0], "b").await, minority_claim(&stores[1], "b").await];
    let waiter = spawn_lock(keeper.mutex("b"));
    tokio::time::sleep(secs(5)).await;
    for link in &links {
        link.everything(Fault::Refused);
    }
    let start = Instant::now();
    let error = waiter.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let took = start.elapsed();
    assert!(took + secs(1) > TTL && took < TTL + secs(1), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_bounded_wait_ends_in_time_when_nodes_hang_between_undecided_rounds() {
    let stores = memories(3);
    let _claims = [minority_claim(&stores[0], "a").await, minority_claim(&stores[1], "a").await];
    // The backoff between rounds is random, so the nodes hang in the middle of some rounds.
    for _ in 0..20 {
        let (keeper, links) = keeper(&stores, |_| millis(1));
        let mutex = keeper.mutex("a");
        let start = Instant::now();
        let waiter = tokio::spawn(async move { mutex.try_lock_for(millis(100)).await });
        tokio::time::sleep(millis(20)).await;
        for link in &links {
            link.everything(Fault::Hangs);
        }
        let error = waiter.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Undecided, "{error}");
        assert!(start.elapsed() <= millis(210), "{:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn an_undecided_try_that_is_dropped_or_closed_leaves_no_state() {
    let stores = memories(3);
    let _claims = [minority_claim(&stores[0], "a").await, minority_claim(&stores[1], "a").await];
    // Dropped after each number of polls.
    for polls in 0..40 {
        let (keeper, _) = keeper(&stores, |_| millis(1));
        let mutex = keeper.mutex("a");
        let mut attempt = Box::pin(mutex.try_lock());
        for _ in 0..polls {
            assert!(poll_once(attempt.as_mut()).await.is_pending());
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        drop(attempt);
        keeper.close().await;
        assert_empty(&stores[2..]).await;
    }
    for millis_in in [0, 1, 2, 3, 5, 20, 100] {
        let (keeper, _) = keeper(&stores, |_| millis(1));
        let mutex = keeper.mutex("a");
        let timed_out = tokio::time::timeout(millis(millis_in), mutex.try_lock()).await;
        assert!(timed_out.is_err());
        let attempt = tokio::spawn(async move { mutex.try_lock().await });
        tokio::time::sleep(millis(millis_in)).await;
        keeper.close().await;
        assert_eq!(attempt.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
        assert_empty(&stores[2..]).await;
    }
}

/// Returns the number of requests to one node per hold, with `tasks` tasks on two clients.
async fn requests_per_hold(tasks: usize) -> usize {
    let stores = memories(5);
    // The clients are closest to different nodes.
    let one = keeper(&stores, |i| millis(1 + i as u64));
    let two = keeper(&stores, |i| millis(5 - i as u64));
    let inside = Arc::new(tokio::sync::Mutex::new(()));
    let work: Vec<_> = (0..tasks)
        .map(|i| {
            let mutex = if i % 2 == 0 { &one.0 } else { &two.0 }.mutex("a");
            let inside = inside.clone();
            tokio::spawn(async move {
                let guard = mutex.lock().await.unwrap();
                let alone = inside.try_lock().expect("no other holder");
                tokio::time::sleep(millis(2)).await;
                drop(alone);
                guard.release().await.unwrap();
            })
        })
        .collect();
    for task in work {
        task.await.unwrap();
    }
    let links = [&one.1[2], &two.1[2]];
    let requests = links.iter().map(|link| link.asked(Op::Attempt) + link.asked(Op::Release));
    requests.sum::<usize>() / tasks
}

#[test]
fn the_number_of_requests_per_hold_is_bounded_for_any_number_of_tasks() {
    for tasks in [8, 50, 100, 200] {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        let requests = runtime.block_on(requests_per_hold(tasks));
        assert!(requests <= 60, "{requests} requests per hold with {tasks} tasks");
    }
}

/// Two clients of three nodes that can lose their data. The first client cannot reach the third node, so it holds a
/// bare majority.
struct Forgetting {
    servers: Vec<Faults>,
    held: Guard,
    other: Keeper,
    _one: Keeper,
}

impl Forgetting {
    async fn new() -> Self {
        let (mut nodes, mut servers) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let (node, server) = Faulty::forgetting(Memory::new);
            nodes.push(Arc::new(node));
            servers.push(server);
        }
        let client = |reaches_third: bool| {
            let links = nodes.iter().enumerate().map(|(i, node)| {
                let (link, faults) = Faulty::around(node.clone());
                if i == 2 && !reaches_third {
                    faults.everything(Fault::Refused);
                }
                Arc::new(link) as Arc<dyn Backend>
            });
            Keeper::new(Quorum::new(links).unwrap()).ttl(TTL)
        };
        let (one, other) = (client(false), client(true));
        let held = one.mutex("a").lock().await.unwrap();
        Self { servers, held, other, _one: one }
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_restarts_without_its_data_does_not_vote_for_one_ttl() {
    let Forgetting { servers, held, other, _one } = Forgetting::new().await;
    servers[1].restart();
    let restarted = Instant::now();
    let mutex = other.mutex("a");
    while restarted.elapsed() + secs(1) < TTL {
        match mutex.try_lock().await {
            Ok(guard) => assert!(guard.is_none() || !held.is_held(), "two holders"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Undecided, "{error}"),
        }
        tokio::time::sleep(millis(500)).await;
    }
    tokio::time::sleep(secs(2)).await;
    assert!(!held.is_held(), "a hold without a majority is not renewed");
    assert!(mutex.try_lock().await.unwrap().is_some(), "the node votes again");
}

/// The documentation of `Quorum` states this exception.
#[tokio::test(start_paused = true)]
async fn undetected_data_loss_of_a_node_breaks_a_lock_with_a_bare_majority() {
    let Forgetting { servers, held, other, _one } = Forgetting::new().await;
    servers[1].forget();
    let second = other.mutex("a").try_lock().await.unwrap();
    assert!(
        second.is_some() && held.is_held(),
        "if a store detects this now, correct the documentation"
    );
}
