//! When a grant that the server pushes may be believed.

use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, Background, Change, Claim, ClaimSpec, Inspector, Name, Release,
};
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

fn queued(store: &Redis, name: &str) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    let mut spec = ClaimSpec::new(Name::new(name).unwrap(), Duration::from_secs(600), background);
    spec.queue = true;
    store.claim(spec).unwrap()
}

async fn is_granted(claim: &mut dyn Claim) -> bool {
    matches!(soon("attempt", claim.attempt(None)).await.unwrap(), Attempt::Granted(_))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_of_an_ask_before_the_last_is_not_believed() {
    let server = RedisServer::start_or_panic();
    let store = Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap();
    let (mut one, mut two, mut three) =
        (queued(&store, "a"), queued(&store, "a"), queued(&store, "a"));
    assert!(is_granted(&mut *one).await);
    assert!(!is_granted(&mut *two).await);
    assert_eq!(one.release().await.unwrap(), Release::Released);
    // The second has been told that it holds, and has not listened yet. It is broken, a third takes the
    // lock, and the second asks again.
    assert_eq!(store.break_lock(&Name::new("a").unwrap()).await.unwrap(), 1);
    assert!(is_granted(&mut *three).await);
    assert!(!is_granted(&mut *two).await);
    let change = soon("the word of then", two.changed()).await;
    assert_eq!(change, Change::LookAgain, "two hold");
    assert_eq!(two.release().await.unwrap(), Release::WasNotHeld);
    assert_eq!(three.release().await.unwrap(), Release::Released);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_replicas_have_yet_to_acknowledge_is_looked_at_again() {
    let server = RedisServer::start_or_panic();
    let _replica = RedisServer::builder().replica_of(&server).start_or_panic();
    eventually("the replica follows", async || {
        server.command(&["INFO", "replication"]).contains("state=online")
    })
    .await;
    let config = Config::from_url(&server.url()).unwrap().min_replicas(1);
    let store = Redis::connect(config).await.unwrap();
    let (mut one, mut two) = (queued(&store, "a"), queued(&store, "a"));
    assert!(is_granted(&mut *one).await);
    assert!(!is_granted(&mut *two).await);
    assert_eq!(one.release().await.unwrap(), Release::Released);
    let change = soon("the hand-over", two.changed()).await;
    assert_eq!(change, Change::LookAgain, "nobody knows whether the replica has it");
    assert!(is_granted(&mut *two).await);
    assert_eq!(two.release().await.unwrap(), Release::Released);
}
