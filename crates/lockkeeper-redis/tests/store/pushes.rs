//! When a grant that the server pushes may be believed.

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
async fn a_grant_of_an_attempt_before_the_last_is_not_accepted() {
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

/// A user of the server that may publish and subscribe on every channel, and may not read or write a key.
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

    /// The next message that any client publishes.
    async fn overheard(&mut self) -> (String, String) {
        let message = soon("a message", self.messages.next()).await.unwrap();
        (message.get_channel_name().to_owned(), message.get_payload().unwrap())
    }

    /// Publishes on the channel of every connection.
    async fn says(&mut self, server: &RedisServer, message: &str) {
        for channel in server.command(&["PUBSUB", "CHANNELS", "*:wake:*"]).lines() {
            let mut publish = redis::cmd("PUBLISH");
            publish.arg(channel).arg(message);
            let _: i64 = publish.query_async(&mut self.client).await.unwrap();
            assert_eq!(self.overheard().await, (channel.to_owned(), message.to_owned()));
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
    // The forger knows all that inspection shows, and may count.
    let fence = 4_000_000_000_000_000_u64;
    let mut guesses = [1, 2, 3, 4].map(|number| number.to_string()).to_vec();
    guesses.extend(["", "-"].map(str::to_owned));
    guesses.extend(["0".repeat(32), "0".repeat(64), owner.to_string()]);
    for guess in guesses {
        forger.says(&server, &format!("granted {owner} {guess} {fence}")).await;
        // There is something to hear even if the grant is not passed on.
        forger.says(&server, &format!("look {owner}")).await;
        let change = soon("a message", two.changed()).await;
        assert_eq!(change, Change::LookAgain, "a forged grant with {guess:?} was believed");
    }
    assert!(!is_granted(&mut *two).await);
    // The true grant is believed.
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
async fn a_grant_that_was_overheard_cannot_be_replayed() {
    let server = RedisServer::start_or_panic();
    let store = Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap();
    let owner = Owner::random();
    let (mut one, mut two) = (queued(&store, "a"), queued_as(&store, "a", owner));
    let mut forger = Forger::on(&server).await;
    assert!(is_granted(&mut *one).await);
    assert!(!is_granted(&mut *two).await);
    assert_eq!(one.release().await.unwrap(), Release::Released);
    let (_, grant) = forger.overheard().await;
    assert!(grant.starts_with("granted "), "{grant}");
    assert!(matches!(soon("the grant", two.changed()).await, Change::Granted(_)));

    // It loses the lock to another client, and learns that by its renewal.
    assert_eq!(store.break_lock(&Name::new("a").unwrap()).await.unwrap(), 1);
    assert_eq!(forger.overheard().await.1, format!("look {owner}"));
    assert_eq!(soon("the break", two.changed()).await, Change::LookAgain);
    assert!(is_granted(&mut *one).await);
    assert_eq!(
        soon("the renewal", two.renew(TTL)).await.unwrap(),
        Renewal::Lost(LossReason::Broken)
    );
    forger.says(&server, &grant).await;
    assert_eq!(soon("a word", two.changed()).await, Change::LookAgain, "a used grant was believed");
    // Nor does it answer a later ask of the same owner.
    assert!(!is_granted(&mut *two).await);
    forger.says(&server, &grant).await;
    assert_eq!(soon("a word", two.changed()).await, Change::LookAgain, "a used grant was believed");
    assert_eq!(two.release().await.unwrap(), Release::WasNotHeld);
    assert_eq!(one.release().await.unwrap(), Release::Released);
}
