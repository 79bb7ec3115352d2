//! Requests of one claim reach the server in the order in which they were made, whether they use a script or not.

use std::sync::Arc;
use std::task::Poll;

use lockkeeper_core::{Attempt, Backend as _, Background, Claim, ClaimSpec, Mode, Name, Renewal};
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;
use tokio::runtime::Handle;

use crate::common::{number, secs, server};

/// Enough tasks that nearly all requests share calls.
const TASKS: u32 = 64;
const ROUNDS: u32 = 150;

async fn store(server: &RedisServer) -> Arc<Redis> {
    Arc::new(Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap())
}

fn claim(store: &Redis, name: &str, mode: Mode) -> Box<dyn Claim> {
    let background = Background::new(Handle::current());
    let mut spec = ClaimSpec::new(Name::new(name).unwrap(), secs(600), background);
    spec.mode = mode;
    store.claim(spec).unwrap()
}

/// Runs `round` many times in each of many tasks. Returns the sum of its results.
async fn in_many_tasks<F>(round: impl Fn(String) -> F + Clone + Send + 'static) -> u32
where
    F: Future<Output = u32> + Send,
{
    let tasks = (0..TASKS).map(|task| {
        let round = round.clone();
        tokio::spawn(async move {
            let mut sum = 0;
            for number in 0..ROUNDS {
                sum += round(format!("{task}/{number}")).await;
            }
            sum
        })
    });
    let mut sum = 0;
    for task in tasks.collect::<Vec<_>>() {
        sum += soon("all rounds", task).await.unwrap();
    }
    sum
}

/// Polls a future once, lets other tasks run for a random time, and drops it.
async fn start_and_drop<T>(future: impl Future<Output = T>) {
    let mut future = Box::pin(future);
    if let Poll::Ready(output) = futures_util::poll!(&mut future) {
        drop(output);
    }
    for _ in 0..fastrand::u32(..6) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_release_does_not_overtake_a_dropped_attempt() {
    let (server, _) = server().await;
    let store = store(&server).await;
    for mode in [Mode::Exclusive, Mode::Shared] {
        let store = store.clone();
        in_many_tasks(move |name| {
            let store = store.clone();
            async move {
                let mut claim = claim(&store, &name, mode);
                start_and_drop(claim.attempt(None)).await;
                claim.release().await.unwrap();
                0
            }
        })
        .await;
        // All replies have arrived, so all requests were executed.
        assert_eq!(number(&server, &["DBSIZE"]), 0, "{mode:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_dropped_release_does_not_free_a_later_grant() {
    let (server, _) = server().await;
    let store = store(&server).await;
    let lost = in_many_tasks(move |name| {
        let store = store.clone();
        async move {
            let mut claim = claim(&store, &name, Mode::Exclusive);
            start_and_drop(claim.release()).await;
            let granted = claim.attempt(None).await.unwrap();
            assert!(matches!(granted, Attempt::Granted(_)));
            let renewed = claim.renew(secs(600)).await.unwrap();
            claim.release().await.unwrap();
            u32::from(matches!(renewed, Renewal::Lost(_)))
        }
    })
    .await;
    assert_eq!(lost, 0, "grants that the store freed");
    assert_eq!(number(&server, &["DBSIZE"]), 0);
}
