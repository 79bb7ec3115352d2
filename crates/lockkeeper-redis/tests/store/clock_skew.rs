//! Fences on servers whose clocks are wrong, set back or different.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use lockkeeper_core::{
    Attempt, Backend as _, Background, Claim, ClaimSpec, ErrorKind, Fence, Guard, Keeper, Name,
};
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::server::{RedisServer, ServerClock};
use lockkeeper_testkit::wait::{eventually, soon};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::common::{all_of, got, key, lock, number, open, secs, server, waiter, write};

const SECOND: i64 = 1_000_000;
const HOUR: i64 = 3600 * SECOND;
const TEN_YEARS: i64 = 10 * 365 * 24 * HOUR;

/// Starts a server with a skewed clock. Returns both and a keeper.
async fn skewed(ahead: i64) -> (ServerClock, RedisServer, Keeper) {
    let clock = ServerClock::new().unwrap();
    clock.set_ahead(ahead);
    let server = RedisServer::builder().clock(&clock).start_or_panic();
    let keeper = open(&server.url()).await;
    (clock, server, keeper)
}

fn fence(guard: &Guard) -> u64 {
    guard.fence().unwrap().get()
}

async fn next(keeper: &Keeper, name: &str) -> u64 {
    let guard = lock(keeper, name).await;
    let fence = fence(&guard);
    guard.release().await.unwrap();
    fence
}

/// Returns the server's clock, in microseconds.
fn time(server: &RedisServer) -> u64 {
    let time = server.command(&["TIME"]);
    let (seconds, micros) = time.split_once('\n').unwrap();
    seconds.parse::<u64>().unwrap() * 1_000_000 + micros.parse::<u64>().unwrap()
}

/// Asserts that no key lives longer than an hour, the limit for a stored fence.
fn assert_short_lived(server: &RedisServer) {
    for key in server.command(&["KEYS", "*"]).lines() {
        let left = number(server, &["PTTL", key]);
        assert!((0..=3_600_010).contains(&left), "{key} lives for {left} ms");
    }
}

#[tokio::test]
async fn a_clock_that_was_years_ahead_affects_only_names_locked_then_and_for_an_hour() {
    let (clock, server, keeper) = skewed(TEN_YEARS).await;
    let far = next(&keeper, "a").await;
    clock.set_ahead(0);
    for name in 0..100 {
        let fence = next(&keeper, &format!("another/{name}")).await;
        assert!(fence <= time(&server), "{fence} is ahead of the clock");
    }
    assert_eq!(server.command(&["KEYS", "*"]), "", "a stored fence");
    // Its keeper does not accept a lower fence before its floor has expired.
    let error = soon("the error", keeper.mutex("a").lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    let text = error.to_string();
    assert!(text.contains(&(far + 1).to_string()), "{text}");
    assert!(
        text.contains("ahead of the store's clock") && text.contains("Correct the clock"),
        "{text}"
    );
    assert!(soon("the error", keeper.mutex("a").try_lock()).await.is_err());
    // Other keepers do at once.
    let other = open(&server.url()).await;
    assert!(next(&other, "a").await <= time(&server));
    for keeper in [&keeper, &other] {
        soon("the releases", keeper.close()).await;
    }
    assert_eq!(server.command(&["KEYS", "*"]), "");
}

#[tokio::test]
async fn a_lock_held_while_the_clock_is_set_back_is_handed_off_with_a_higher_fence() {
    for ahead in [30 * SECOND, TEN_YEARS] {
        let (clock, server, keeper) = skewed(ahead).await;
        let other = open(&server.url()).await;
        let guard = lock(&keeper, "a").await;
        let waiting = waiter(&keeper, "a", 1, write(&other, "a")).await;
        clock.set_ahead(0);
        let before = fence(&guard);
        guard.release().await.unwrap();
        let guard = got(waiting).await;
        assert!(fence(&guard) > before);
        assert_short_lived_fence(&server);
        let mut last = fence(&guard);
        guard.release().await.unwrap();
        // The server has stored that fence: all keepers can lock, whether or not they have seen it.
        let third = open(&server.url()).await;
        for keeper in [&keeper, &other, &third, &keeper] {
            let now = next(keeper, "a").await;
            assert!(now > last);
            last = now;
        }
        assert_eq!(server.command(&["KEYS", "*"]), format!("{}:f", key("a")));
        assert_short_lived(&server);
    }
}

fn assert_short_lived_fence(server: &RedisServer) {
    let left = number(server, &["PTTL", &format!("{}:f", key("a"))]);
    assert!((1..=3_600_010).contains(&left), "{left} ms");
}

/// A proxy that forwards connections to one server, and after a switch to another.
struct Switch {
    addr: SocketAddr,
    target: Arc<Mutex<SocketAddr>>,
    switched: Arc<Notify>,
}

impl Switch {
    async fn to(server: &RedisServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let target = Arc::new(Mutex::new(server.addr()));
        let switched = Arc::new(Notify::new());
        let (at, end) = (target.clone(), switched.clone());
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (at, end) = (*at.lock().unwrap(), end.clone());
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(at).await else { return };
                    tokio::select! {
                        () = end.notified() => {}
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                    }
                });
            }
        });
        Self { addr, target, switched }
    }

    fn switch(&self, server: &RedisServer) {
        *self.target.lock().unwrap() = server.addr();
        self.switched.notify_waiters();
    }
}

#[tokio::test]
async fn the_fences_of_a_keeper_rise_over_a_failover_to_a_server_whose_clock_is_behind() {
    let (_clock, old, _) = skewed(20 * SECOND).await;
    let new = RedisServer::builder().replica_of(&old).start_or_panic();
    let switch = Switch::to(&old).await;
    let url = format!("redis://{}/", switch.addr);
    let keeper = open(&url).await;
    let (before, other_name) = (next(&keeper, "a").await, next(&keeper, "b").await);
    let held = lock(&keeper, "held").await;
    eventually("replication", async || new.command(&["EXISTS", &key("held"), &key("a")]) == "1")
        .await;
    new.command(&["REPLICAOF", "NO", "ONE"]);
    switch.switch(&new);
    eventually("a reconnect", async || keeper.mutex("c").try_lock().await.is_ok()).await;
    // Names that it locked before the failover, by its floors.
    let after = next(&keeper, "a").await;
    assert!(after > before, "{after} after {before}");
    assert!(next(&keeper, "b").await > other_name);
    // From then on the new master has stored the fence, for all clients.
    let fresh = open(&new.url()).await;
    assert!(next(&fresh, "a").await > after);
    // A name that it did not lock is not affected.
    let fence_of_new = next(&keeper, "new").await;
    assert!(fence_of_new <= time(&new), "{fence_of_new} is ahead of the clock");
    // A lock held over the failover is handed off with a higher fence.
    let waiting = waiter(&keeper, "held", 1, write(&fresh, "held")).await;
    let before = fence(&held);
    held.release().await.unwrap();
    let guard = got(waiting).await;
    assert!(fence(&guard) > before);
    guard.release().await.unwrap();
    for keeper in [&keeper, &fresh] {
        soon("the releases", keeper.close()).await;
    }
    for key in new.command(&["KEYS", "*"]).lines() {
        let left = number(&new, &["PTTL", key]);
        assert!(key.ends_with(":f") && (0..=20_010).contains(&left), "{key} lives for {left} ms");
    }
}

fn claim(store: &Redis, queue: bool) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    let mut spec = ClaimSpec::new(Name::new("a").unwrap(), secs(600), background);
    spec.queue = queue;
    store.claim(spec).unwrap()
}

#[tokio::test]
async fn a_floor_far_ahead_of_the_clock_is_refused_in_every_state_and_changes_nothing() {
    let (server, _) = server().await;
    let store = Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap();
    let far = Fence::new(time(&server) + 2 * HOUR.unsigned_abs()).unwrap();
    let refused = async |claim: &mut Box<dyn Claim>, floor: Fence| {
        let before = server.command(&["KEYS", "*"]);
        let error = soon("the error", claim.attempt(Some(floor))).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let mut after: Vec<_> = server.command(&["KEYS", "*"]).lines().map(str::to_owned).collect();
        let mut before: Vec<_> = before.lines().map(str::to_owned).collect();
        before.sort();
        after.sort();
        assert_eq!(before, after);
        all_of(&error)
    };
    let mut holder = claim(&store, false);
    let text = refused(&mut holder, far).await;
    assert!(text.contains(&far.to_string()), "{text}");
    refused(&mut claim(&store, true), far).await;
    // From the holder, as a quorum that raises its fence, and from a waiter.
    assert!(matches!(holder.attempt(None).await.unwrap(), Attempt::Granted(_)));
    refused(&mut holder, far).await;
    refused(&mut claim(&store, true), far).await;
    refused(&mut claim(&store, false), Fence::new((1 << 53) - 1).unwrap()).await;
    refused(&mut claim(&store, false), Fence::MAX).await;
    let near = Fence::new(time(&server) + HOUR.unsigned_abs() / 2).unwrap();
    let Attempt::Granted(grant) = holder.attempt(Some(near)).await.unwrap() else { panic!() };
    assert_eq!(grant.fence, Some(near));
    holder.release().await.unwrap();
}

/// The scripts count exactly up to 2^53. Only a manipulated fence gets there.
#[tokio::test]
async fn at_the_maximum_fence_attempts_fail_and_no_fence_is_repeated() {
    let (server, keeper) = server().await;
    let other = open(&server.url()).await;
    let fence_key = format!("{}:f", key("a"));
    let last = (1_u64 << 53) - 4;
    server.command(&["SET", &fence_key, &last.to_string(), "PX", "600000"]);
    assert_eq!(next(&keeper, "a").await, last + 1);
    assert_eq!(next(&other, "a").await, last + 2);
    let guard = lock(&keeper, "a").await;
    assert_eq!(fence(&guard), last + 3);
    // The waiter fails, too.
    let waiting = waiter(&keeper, "a", 1, write(&other, "a")).await;
    guard.release().await.unwrap();
    let error = soon("the waiter", waiting).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("no fence is left"), "{error}");
    for keeper in [&keeper, &other, &open(&server.url()).await] {
        let error = soon("the error", keeper.mutex("a").lock()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        // Other names are not affected.
        next(keeper, "b").await;
    }
    keeper.semaphore("a", 2).acquire().await.unwrap().release().await.unwrap();
    assert!(number(&server, &["PTTL", &fence_key]) <= 3_600_010);
}

#[tokio::test]
async fn a_ticket_with_another_fence_changes_no_fence_of_any_lock() {
    let (server, keeper) = server().await;
    let ticket = lock(&keeper, "a").await.detach().unwrap();
    let adopter = open(&server.url()).await;
    // A fence within the first lease would be accepted: the store learns the fence of such a lock from its first renewal.
    let hour = HOUR.unsigned_abs();
    for number in [1, time(&server) - hour, time(&server) + hour, (1 << 53) - 2, (1 << 63) - 1] {
        let mut altered = ticket.clone();
        altered.fence = Fence::new(number);
        let error = adopter.adopt(altered).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        assert!(error.to_string().contains("the ticket does not match a hold"), "{error}");
    }
    adopter.adopt(ticket).await.unwrap().release().await.unwrap();
    let witness = open(&server.url()).await;
    for name in ["a", "b"] {
        let mut last = 0;
        for keeper in [&adopter, &keeper, &witness, &adopter] {
            let now = next(keeper, name).await;
            assert!(now > last && now <= time(&server), "{now} after {last}");
            last = now;
        }
    }
    for keeper in [&keeper, &adopter, &witness] {
        soon("the releases", keeper.close()).await;
    }
    assert_eq!(server.command(&["KEYS", "*"]), "");
}
