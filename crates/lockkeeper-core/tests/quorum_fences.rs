//! Fences of a quorum over nodes with skewed clocks, in paused time, with random faults. Each seed is reproducible.
//!
//! The fence of a hold is known to few nodes until its release, so the test concentrates on how holds end: releases that
//! reach some nodes or none, crashes, tickets, downgrades, short leases, nodes that restart without their data. No client
//! remembers a fence: each lock is acquired by a new keeper. `tests/simulation.rs` has the other promises.
//!
//! Each run draws new seeds, and a failure names its seed. `LOCKKEEPER_SEED=<seed>` repeats that seed and the ones
//! after it, and `LOCKKEEPER_SEEDS=<count>` runs more of them.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{millis, secs};
use lockkeeper_core::{Backend, Guard, Keeper, Memory, Mode, Quorum};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::time::{Instant, sleep, timeout};

/// The number of seeds of an ordinary run.
const SEEDS: u64 = 300;
const TTL: Duration = Duration::from_secs(3);
const CLIENTS: u64 = 3;

/// The servers of the nodes.
struct Servers {
    stores: Vec<Arc<Faulty>>,
    controls: Vec<Faults>,
    /// Whether they may restart: only if their clocks differ by less than the TTL, as the documentation of `Quorum` states.
    restart: bool,
}

impl Servers {
    fn new(random: &mut fastrand::Rng) -> Self {
        // Within a quarter of the TTL, within the TTL, and two groups that are far apart.
        let (skew, apart, restart) = match random.u32(..3) {
            0 => (700, 0, true),
            1 => (2_900, 0, true),
            _ => (1_500, 20_000, false),
        };
        let (mut stores, mut controls) = (Vec::new(), Vec::new());
        for _ in 0..3 + 2 * random.usize(..2) {
            let (store, control) = Faulty::forgetting(Memory::new);
            let ahead = random.u64(..skew) + if random.bool() { apart } else { 0 };
            control.clock(Instant::now() - millis(ahead));
            stores.push(Arc::new(store));
            controls.push(control);
        }
        Self { stores, controls, restart }
    }

    /// Returns a keeper that remembers no fence, and the network between it and each server.
    fn keeper(&self, random: &mut fastrand::Rng) -> (Keeper, Vec<Faults>) {
        let (mut nodes, mut network) = (Vec::new(), Vec::new());
        for store in &self.stores {
            let (node, faults) = Faulty::around(store.clone());
            for op in [Op::Attempt, Op::Renew, Op::Downgrade, Op::Release] {
                let latency = millis(random.u64(..4));
                let slow = if random.bool() { Fault::SlowRequest } else { Fault::SlowAnswer };
                faults.always(op, slow(latency));
            }
            nodes.push(Arc::new(node) as Arc<dyn Backend>);
            network.push(faults);
        }
        // A minority does not respond, so that majorities differ.
        for _ in 0..random.usize(..=self.stores.len() / 2) {
            network[random.usize(..network.len())].everything(Fault::Refused);
        }
        if random.u32(..8) == 0 {
            let slow = Fault::SlowAnswer(millis(random.u64(..1_500)));
            network[random.usize(..network.len())].always(Op::Attempt, slow);
        }
        let node_timeout = millis(if random.bool() { 200 } else { 2_500 });
        let quorum = Quorum::new(nodes).unwrap().node_timeout(node_timeout);
        (Keeper::new(quorum).ttl(TTL), network)
    }
}

/// The highest fence of an exclusive grant so far.
#[derive(Default)]
struct Fences(Mutex<u64>);

impl Fences {
    fn check(&self, seed: u64, guard: &Guard) {
        if !guard.is_held() {
            return;
        }
        let (mut last, fence) = (self.0.lock().unwrap(), guard.fence().unwrap().get());
        if guard.mode() == Mode::Exclusive {
            assert!(fence > *last, "seed {seed}: fence {fence} after {last}");
            *last = fence;
        } else {
            assert!(fence >= *last, "seed {seed}: a reader's fence {fence} after {last}");
        }
    }
}

/// Ends a hold in one of many ways.
async fn end(guard: Guard, servers: &Servers, network: &[Faults], random: &mut fastrand::Rng) {
    let short = millis(random.u64(20..300));
    match random.u32(..10) {
        // A client that crashes, at once or after it has made its lease shorter.
        0 => drop(guard.detach()),
        1 => {
            let _ = guard.extend(short).await;
            drop(guard.detach());
        }
        2 => {
            if let Ok(ticket) = guard.detach() {
                let _ = servers.keeper(random).0.release_ticket(ticket).await;
            }
        }
        3 => {
            if let Ok(ticket) = guard.detach()
                && let Ok(guard) = servers.keeper(random).0.adopt(ticket).await
            {
                let _ = guard.release().await;
            }
        }
        4 | 5 if guard.mode() == Mode::Exclusive => {
            if guard.downgrade().await.is_ok() {
                sleep(millis(random.u64(..40))).await;
            }
            let _ = guard.release().await;
        }
        // The release reaches some of the nodes.
        6 | 7 => {
            for faults in network {
                let lost = [Fault::Refused, Fault::Hangs, Fault::LostAnswer];
                if random.bool() {
                    faults.always(Op::Release, lost[random.usize(..lost.len())]);
                }
            }
            let _ = timeout(millis(300), guard.release()).await;
        }
        _ => {
            let _ = guard.release().await;
        }
    }
}

async fn client(servers: Arc<Servers>, fences: Arc<Fences>, seed: u64, salt: u64) {
    let mut random = fastrand::Rng::with_seed(seed * 31 + salt);
    for _ in 0..10 {
        let (keeper, network) = servers.keeper(&mut random);
        let lock = keeper.rw_lock("x");
        let wait = millis(random.u64(50..2_000));
        let reads = random.u32(..5) == 0;
        let acquired = if reads {
            timeout(wait, lock.read()).await
        } else {
            timeout(wait, lock.write()).await
        };
        if let Ok(Ok(guard)) = acquired {
            fences.check(seed, &guard);
            let hold = [0, 0, 10, 100, 1_000, 4_000][random.usize(..6)];
            sleep(millis(random.u64(..=hold))).await;
            end(guard, &servers, &network, &mut random).await;
        }
        sleep(millis([0, 0, 5, 500][random.usize(..4)])).await;
    }
}

async fn run_seed(seed: u64) {
    // The engine's backoff is random, too.
    fastrand::seed(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let servers = Arc::new(Servers::new(&mut random));
    let fences = Arc::<Fences>::default();
    let clients = (0..CLIENTS).map(|salt| client(servers.clone(), fences.clone(), seed, salt));
    let tasks: Vec<_> = clients.map(tokio::spawn).collect();
    while !tasks.iter().all(tokio::task::JoinHandle::is_finished) {
        sleep(millis(random.u64(..4_000))).await;
        if servers.restart && random.bool() {
            servers.controls[random.usize(..servers.controls.len())].restart();
        }
    }
    for task in tasks {
        task.await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

#[test]
fn fences_of_a_quorum_rise_although_clocks_differ_and_releases_are_lost() {
    let first = number("LOCKKEEPER_SEED").unwrap_or_else(|| fastrand::u64(..1 << 40));
    for seed in first..first + number("LOCKKEEPER_SEEDS").unwrap_or(SEEDS) {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let ended = timeout(secs(100_000), run_seed(seed)).await;
            assert!(ended.is_ok(), "seed {seed}: stuck");
        });
    }
}
