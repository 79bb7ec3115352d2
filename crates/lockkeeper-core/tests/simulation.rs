//! Random clients under random faults, in paused time. Each seed is reproducible.
//!
//! Each run draws new seeds, and a failure names its seed. `LOCKKEEPER_SEED=<seed>` repeats that seed and the ones
//! after it. The test checks the promises in the documentation of `Quorum`: any number of nodes may restart without
//! their data at any time, and their clocks differ by less than `min_uptime`.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{millis, secs};
use lockkeeper_core::{Backend, Guard, Keeper, Memory, Mode, Quorum, Result, Slots};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::time::{Instant, sleep, timeout};

/// The number of seeds that each test runs.
const SEEDS: u64 = 40;
const TTL: Duration = Duration::from_secs(3);
/// The largest difference between the clocks of the nodes, in milliseconds. It is below the TTL, during which a
/// restarted node does not vote.
const MAX_SKEW: u64 = 2_900;
const CLIENTS: usize = 4;
const PERMITS: u32 = 3;
const OPS: [Op; 5] = [Op::Attempt, Op::Changed, Op::Renew, Op::Downgrade, Op::Release];

/// The kind of lock that the clients use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    QuorumMutex,
    QuorumRwLock,
    Semaphore,
}

fn any_fault(random: &mut fastrand::Rng) -> Fault {
    match random.u32(..6) {
        0 => Fault::SlowRequest(millis(random.u64(..1500))),
        1 => Fault::SlowAnswer(millis(random.u64(..1500))),
        2 => Fault::Refused,
        3 => Fault::LostAnswer,
        4 => Fault::NoAnswer,
        _ => Fault::Hangs,
    }
}

/// The guard of each client, and the highest fence so far.
struct HolderRecord {
    seed: u64,
    guards: Mutex<Vec<Option<Arc<Guard>>>>,
    fence: Mutex<u64>,
}

impl HolderRecord {
    /// Panics if the held guards are incompatible.
    fn check(&self) {
        let seed = self.seed;
        let guards = self.guards.lock().unwrap();
        let held: Vec<_> = guards.iter().flatten().filter(|guard| guard.is_held()).collect();
        let alone = held.iter().any(|guard| guard.mode() == Mode::Exclusive);
        assert!(!alone || held.len() == 1, "seed {seed}: two holders: {held:?}");
        let permits = held.iter().map(|guard| match guard.mode() {
            Mode::Permits { take, .. } => take,
            _ => 0,
        });
        let permits: u32 = permits.sum();
        assert!(permits <= PERMITS, "seed {seed}: {permits} permits are held");
    }

    fn enter(&self, client: usize, guard: &Arc<Guard>) {
        if !guard.is_held() {
            return;
        }
        self.guards.lock().unwrap()[client] = Some(guard.clone());
        self.check();
        let seed = self.seed;
        let mut last = self.fence.lock().unwrap();
        match guard.mode() {
            Mode::Exclusive => {
                let fence = guard.fence().unwrap().get();
                assert!(fence > *last, "seed {seed}: fence {fence} after {last}");
                *last = fence;
            }
            Mode::Shared => {
                let fence = guard.fence().unwrap().get();
                assert!(fence >= *last, "seed {seed}: a reader's fence {fence} after {last}");
            }
            Mode::Permits { .. } => {}
        }
    }

    fn leave(&self, client: usize) {
        self.guards.lock().unwrap()[client] = None;
    }
}

/// Acquires a lock of a kind within `wait`.
async fn acquire(
    keeper: &Keeper,
    kind: Kind,
    wait: Duration,
    random: &mut fastrand::Rng,
) -> Option<Guard> {
    let acquired: Result<Result<Guard>, _> = match kind {
        Kind::QuorumMutex => timeout(wait, keeper.mutex("x").lock()).await,
        Kind::QuorumRwLock if random.bool() => timeout(wait, keeper.rw_lock("x").read()).await,
        Kind::QuorumRwLock => timeout(wait, keeper.rw_lock("x").write()).await,
        Kind::Semaphore => {
            let (semaphore, take) = (keeper.semaphore("x", PERMITS), random.u32(1..=PERMITS));
            if random.u32(..4) == 0 {
                return timeout(wait, semaphore.try_acquire_many(take)).await.ok()?.ok()?;
            }
            timeout(wait, semaphore.acquire_many(take)).await
        }
    };
    acquired.ok()?.ok()
}

async fn client(id: usize, keeper: Keeper, kind: Kind, record: Arc<HolderRecord>, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..25 {
        let wait = millis(random.u64(..3000));
        let Some(guard) = acquire(&keeper, kind, wait, &mut random).await else {
            sleep(millis(random.u64(..100))).await;
            continue;
        };
        let guard = Arc::new(guard);
        record.enter(id, &guard);
        sleep(millis(random.u64(..4000))).await;
        if kind == Kind::QuorumRwLock && random.bool() {
            record.leave(id);
            let _ = guard.downgrade().await;
            sleep(millis(random.u64(..500))).await;
        }
        record.leave(id);
        let guard = Arc::into_inner(guard).unwrap();
        if random.bool() {
            let _ = timeout(millis(random.u64(..300)), guard.release()).await;
        }
    }
}

/// Injects and removes random faults until it is cancelled.
async fn inject_faults(
    faults: Vec<Faults>,
    servers: Vec<Faults>,
    record: Arc<HolderRecord>,
    mut random: fastrand::Rng,
) {
    loop {
        sleep(millis(random.u64(..50))).await;
        record.check();
        let one = &faults[random.usize(..faults.len())];
        let op = OPS[random.usize(..OPS.len())];
        if !servers.is_empty() && random.u32(..200) == 0 {
            servers[random.usize(..servers.len())].restart();
        }
        match random.u32(..10) {
            0 => one.always(op, any_fault(&mut random)),
            1 | 2 => one.none(),
            3 if random.u32(..10) == 0 => one.everything(any_fault(&mut random)),
            _ => one.once(op, any_fault(&mut random)),
        }
    }
}

async fn run_seed(kind: Kind, seed: u64) {
    // The engine's backoff is random, too.
    fastrand::seed(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let count = if kind == Kind::Semaphore { 1 } else { 3 + 2 * random.usize(..2) };
    let (mut stores, mut servers) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (store, server) = Faulty::forgetting(Memory::new);
        server.clock(Instant::now() - millis(random.u64(..MAX_SKEW)));
        stores.push(Arc::new(store));
        servers.push(server);
    }
    if kind == Kind::Semaphore {
        // Locks on a single store do not survive the loss of its data.
        servers.clear();
    }
    let guards = Mutex::new((0..CLIENTS).map(|_| None).collect());
    let record = Arc::new(HolderRecord { seed, guards, fence: Mutex::new(0) });
    let (mut faults, mut keepers, mut tasks) = (Vec::new(), Vec::<Keeper>::new(), Vec::new());
    for (id, salt) in (0..CLIENTS).zip(0..) {
        if kind == Kind::Semaphore && id % 2 == 1 {
            // Two tasks of one process: each knows which slots the other holds or requests.
            let keeper = keepers[keepers.len() - 1].clone();
            tasks.push(tokio::spawn(client(id, keeper, kind, record.clone(), seed * 31 + salt)));
            continue;
        }
        let mut nodes = Vec::new();
        for store in &stores {
            let (node, fault) = Faulty::around(store.clone());
            faults.push(fault);
            nodes.push(Arc::new(node) as Arc<dyn Backend>);
        }
        let keeper = match kind {
            Kind::Semaphore => Keeper::new(Slots::new(nodes.remove(0))),
            _ => Keeper::new(Quorum::new(nodes).unwrap().node_timeout(millis(200))),
        };
        let keeper = keeper.ttl(TTL);
        keepers.push(keeper.clone());
        tasks.push(tokio::spawn(client(id, keeper, kind, record.clone(), seed * 31 + salt)));
    }
    let injector = tokio::spawn(inject_faults(faults.clone(), servers, record.clone(), random));
    for task in tasks {
        task.await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    assert!(!injector.is_finished(), "seed {seed}: a check failed during the run");
    injector.abort();
    for faults in &faults {
        faults.none();
    }
    for keeper in &keepers {
        let closed = timeout(secs(600), keeper.close()).await;
        assert!(closed.is_ok(), "seed {seed}: close hangs");
    }
    sleep(TTL).await;
    for store in &stores {
        let left = store.current().inspector().unwrap().list("").await.unwrap();
        assert_eq!(left, [], "seed {seed}");
    }
}

fn run(kind: Kind) {
    let first = match std::env::var("LOCKKEEPER_SEED") {
        Ok(seed) => seed.parse().expect("LOCKKEEPER_SEED is a number"),
        Err(_) => fastrand::u64(..1 << 40),
    };
    for seed in first..first + SEEDS {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let ended = timeout(secs(100_000), run_seed(kind, seed)).await;
            assert!(ended.is_ok(), "seed {seed}: stuck");
        });
    }
}

#[test]
fn a_quorum_mutex_has_at_most_one_holder_and_leaves_no_state_under_random_faults() {
    run(Kind::QuorumMutex);
}

#[test]
fn a_quorum_rw_lock_has_readers_or_a_writer_and_leaves_no_state_under_random_faults() {
    run(Kind::QuorumRwLock);
}

#[test]
fn a_semaphore_of_slots_stays_within_its_permits_and_leaves_no_state_under_random_faults() {
    run(Kind::Semaphore);
}
