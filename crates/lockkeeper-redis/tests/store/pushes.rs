//! Which pushed grants a client accepts.

use std::time::Duration;

use std::pin::Pin;

use futures_util::{Stream, StreamExt as _};
use lockkeeper_core::{
    Attempt, Backend, Background, Change, Claim, ClaimSpec, Inspector, LossReason, Name, Owner,
    Release, Renewal,
};
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

const TTL: Duration = Duration::from_secs(600);

fn queued(store: &Redis, name: &str) -> Box<dyn Claim> {
    queued_as(store, name, Owner::random())
}

fn queued_as(store: &Redis, name: &str, owner: Owner) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    let mut spec = ClaimSpec::new(Name::new(name).unwrap(), TTL, background);
    (spec.queue, spec.owner) = (true, owner);
    store.claim(spec).unwrap()
}

async fn is_granted(claim: &mut dyn Claim) -> bool {
    matches!(soon("attempt", claim.attempt(None)).await.unwrap(), Attempt::Granted(_))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_for_an_earlier_attempt_is_not_accepted() {
    let server = RedisServer::start_or_panic();
    let store = Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap();
    let (mut one, mut two, mut three) =
        (queued(&store, "a"), queued(&store, "a"), queued(&store, "a"));
    assert!(is_granted(&mut *one).await);
    assert!(!is_granted(&mut *two).await);
    assert_eq!(one.release().await.unwrap(), Release::Released);
    // The second claim has a pushed grant that it has not read. Its lock is broken, the third claim acquires, and
    // the second repeats its attempt.
    assert_eq!(store.break_lock(&Name::new("a").unwrap()).await.unwrap(), 1);
    assert!(is_granted(&mut *three).await);
    assert!(!is_granted(&mut *two).await);
    let change = soon("the earlier message", two.changed()).await;
    assert_eq!(change, Change::LookAgain, "two holders");
    assert_eq!(two.release().await.unwrap(), Release::WasNotHeld);
    assert_eq!(three.release().await.unwrap(), Release::Released);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pushed_grant_is_confirmed_by_an_attempt_if_replicas_must_acknowledge() {
    let server = RedisServer::start_or_panic();
    let _replica = RedisServer::builder().replica_of(&server).start_or_panic();
    eventually("the replica is online", async || {
        server.command(&["INFO", "replication"]).contains("state=online")
    })
    .await;
    let config = Config::from_url(&server.url()).unwrap().min_replicas(1);
    let store = Redis::connect(config).await.unwrap();
    let (mut one, mut two) = (queued(&store, "a"), queued(&store, "a"));
    assert!(is_granted(&mut *one).await);
    assert!(!is_granted(&mut *two).await);
    assert_eq!(one.release().await.unwrap(), Release::Released);
    let change = soon("the hand-off", two.changed()).await;
    assert_eq!(change, Change::LookAgain, "accepted before a replica acknowledged");
    assert!(is_granted(&mut *two).await);
    assert_eq!(two.release().await.unwrap(), Release::Released);
}

/// A user that may publish and subscribe on every channel, and may not read or write keys.
struct Forger {
    client: redis::aio::MultiplexedConnection,
    messages: Pin<Box<dyn Stream<Item = redis::Msg> + Send>>,
}

impl Forger {
    async fn on(server: &RedisServer) -> Self {
        let rules = ["on", ">secret", "resetkeys", "allchannels", "-@all"];
        let commands = ["+publish", "+subscribe", "+psubscribe", "+ping", "+hello", "+client"];
        server.command(&[&["ACL", "SETUSER", "forger"], &rules[..], &commands].concat());
        let url = server.url().replace("redis://", "redis://forger:secret@");
        let client = redis::Client::open(url).unwrap();
        let mut messages = client.get_async_pubsub().await.unwrap();
        messages.psubscribe("*").await.unwrap();
        let messages = Box::pin(messages.into_on_message());
        let client = client.get_multiplexed_async_connection().await.unwrap();
        Self { client, messages }
    }

    /// Returns the next message that any client publishes.
    async fn intercepted(&mut self) -> (String, String) {
        let message = soon("a message", self.messages.next()).await.unwrap();
        (message.get_channel_name().to_owned(), message.get_payload().unwrap())
    }

    /// Publishes on the channels of all sessions.
    async fn publish(&mut self, server: &RedisServer, message: &str) {
        for channel in server.command(&["PUBSUB", "CHANNELS", "*:wake:*"]).lines() {
            let mut publish = redis::cmd("PUBLISH");
            publish.arg(channel).arg(message);
            let _: i64 = publish.query_async(&mut self.client).await.unwrap();
            assert_eq!(self.intercepted().await, (channel.to_owned(), message.to_owned()));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_right_to_publish_is_not_the_right_to_grant() {
    let server = RedisServer::start_or_panic();
    let store = Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap();
    let owner = Owner::random();
    let (mut one, mut two) = (queued(&store, "a"), queued_as(&store, "a", owner));
    assert!(is_granted(&mut *one).await);
    assert!(!is_granted(&mut *two).await);
    let mut forger = Forger::on(&server).await;
    // The forger knows what inspection shows, and can guess.
    let fence = 4_000_000_000_000_000_u64;
    let mut guesses = [1, 2, 3, 4].map(|number| number.to_string()).to_vec();
    guesses.extend(["", "-"].map(str::to_owned));
    guesses.extend(["0".repeat(32), "0".repeat(64), owner.to_string()]);
    for guess in guesses {
        forger.publish(&server, &format!("granted {owner} {guess} {fence}")).await;
        // So that `changed` returns even if the forged grant is ignored.
        forger.publish(&server, &format!("look {owner}")).await;
        let change = soon("a message", two.changed()).await;
        assert_eq!(change, Change::LookAgain, "a forged grant with {guess:?} was accepted");
    }
    assert!(!is_granted(&mut *two).await);
    // The real grant is accepted.
    assert_eq!(one.release().await.unwrap(), Release::Released);
    loop {
        match soon("the grant", two.changed()).await {
            Change::LookAgain => {}
            Change::Granted(_) => break,
            Change::Lost(_) => panic!("nothing was held"),
        }
    }
    assert_eq!(two.release().await.unwrap(), Release::Released);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_intercepted_grant_cannot_be_replayed() {
    let server = RedisServer::start_or_panic();
    let store = Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap();
    let owner = Owner::random();
    let (mut one, mut two) = (queued(&store, "a"), queued_as(&store, "a", owner));
    let mut forger = Forger::on(&server).await;
    assert!(is_granted(&mut *one).await);
    assert!(!is_granted(&mut *two).await);
    assert_eq!(one.release().await.unwrap(), Release::Released);
    let (_, grant) = forger.intercepted().await;
    assert!(grant.starts_with("granted "), "{grant}");
    assert!(matches!(soon("the grant", two.changed()).await, Change::Granted(_)));

    // It loses the lock to another claim, and its renewal reports that.
    assert_eq!(store.break_lock(&Name::new("a").unwrap()).await.unwrap(), 1);
    assert_eq!(forger.intercepted().await.1, format!("look {owner}"));
    assert_eq!(soon("the break", two.changed()).await, Change::LookAgain);
    assert!(is_granted(&mut *one).await);
    assert_eq!(
        soon("the renewal", two.renew(TTL)).await.unwrap(),
        Renewal::Lost(LossReason::Broken)
    );
    forger.publish(&server, &grant).await;
    assert_eq!(soon("a message", two.changed()).await, Change::LookAgain, "a replay was accepted");
    // Nor is it accepted for a later attempt of the same owner.
    assert!(!is_granted(&mut *two).await);
    forger.publish(&server, &grant).await;
    assert_eq!(soon("a message", two.changed()).await, Change::LookAgain, "a replay was accepted");
    assert_eq!(two.release().await.unwrap(), Release::WasNotHeld);
    assert_eq!(one.release().await.unwrap(), Release::Released);
}
