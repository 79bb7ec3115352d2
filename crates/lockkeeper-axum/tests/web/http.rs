//! Several instances on one Redis server, over real HTTP.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::Method;
use axum::routing::{get, post};
use lockkeeper_axum::LockLayer;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::common::{Room, secs};

/// How many requests come at once.
const REQUESTS: usize = 200;

/// How often a scenario is repeated in which a request was answered with 503. A store that takes more than a second to
/// say anything is unavailable, and a busy machine may need that long for so many.
const MAX_ROUNDS: usize = 20;

/// What a server answered.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    /// Whether it is a refusal because others hold the lock; if not, the store was too slow to tell.
    fn is_refusal(&self) -> bool {
        let reason = if self.status == 409 { "not_acquired" } else { "unavailable" };
        assert!(matches!(self.status, 409 | 503), "{self:?}");
        assert!(self.head.contains("\r\ncontent-type: application/problem+json"), "{self:?}");
        assert!(self.body.contains(r#""lock":"order:42""#), "{self:?}");
        assert!(self.body.contains(&format!(r#""reason":"{reason}""#)), "{self:?}");
        self.status == 409
    }
}

/// Sends the head of a request, with nothing else.
async fn begin(address: SocketAddr, method: &str, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: shop\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

async fn answer(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    soon("an answer", stream.read_to_end(&mut bytes)).await.unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

async fn ask(address: SocketAddr, method: &str, path: &str) -> Answer {
    answer(begin(address, method, path).await).await
}

/// Sends requests to the instances in turn, all at once.
fn at_once(instances: [SocketAddr; 2], path: &'static str) -> JoinSet<Answer> {
    let (mut requests, start) = (JoinSet::new(), Arc::new(Barrier::new(REQUESTS)));
    for number in 0..REQUESTS {
        let (address, start) = (instances[number % 2], start.clone());
        requests.spawn(async move {
            start.wait().await;
            ask(address, "POST", path).await
        });
    }
    requests
}

/// Waits until the server has not one key. Leases are so long that none of them ends meanwhile.
async fn no_key_is_left(server: &RedisServer) {
    eventually("no key is left", async || server.command(&["DBSIZE"]) == "0").await;
    assert_eq!(server.command(&["KEYS", "*"]), "");
}

/// Serves an app until the test ends.
async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// An instance in this process, with connections of its own to the server.
async fn instance(server: &RedisServer, room: &Room, wait: bool) -> SocketAddr {
    let keeper = soon("to connect", lockkeeper::open(&server.url())).await.unwrap();
    let lock = LockLayer::new(keeper).ttl(secs(600)).wait(secs(if wait { 600 } else { 0 }));
    let stay = async |State(room): State<Room>| room.stay().await;
    let app = Router::new()
        .route("/orders/{order_id}/pay", post(stay).get(stay))
        .route_layer(lock.key("order:{order_id}").methods([Method::POST, Method::GET]))
        .route("/", get(async || "hello"))
        .with_state(room.clone());
    serve(app).await
}

async fn two_instances(server: &RedisServer, room: &Room, wait: bool) -> [SocketAddr; 2] {
    [instance(server, room, wait).await, instance(server, room, wait).await]
}

#[tokio::test]
async fn of_two_hundred_requests_at_once_one_is_served_and_all_others_are_refused() {
    let (server, room) = (RedisServer::start_or_panic(), Room::new());
    let instances = two_instances(&server, &room, false).await;
    let (mut clean, mut paid) = (0, 0);
    for _ in 0..MAX_ROUNDS {
        let mut requests = at_once(instances, "/orders/42/pay");
        let mut refused = 0;
        // The one that is served stays until all others have their answers.
        for _ in 1..REQUESTS {
            let answer = soon("a refusal", requests.join_next()).await.unwrap().unwrap();
            refused += usize::from(answer.is_refusal());
        }
        eventually("the last is at work or answered", async || {
            room.inside() == 1 || requests.try_join_next().is_some()
        })
        .await;
        if room.inside() == 1 {
            room.let_out(1);
            let answer = soon("the served one", requests.join_next()).await.unwrap().unwrap();
            assert_eq!(answer.status, 200, "{answer:?}");
            paid += 1;
            clean += usize::from(refused == REQUESTS - 1);
        }
        assert!(room.entered() == paid && room.most() <= 1);
        no_key_is_left(&server).await;
        if clean == 2 {
            return;
        }
    }
    panic!("the server never answers two hundred within a second");
}

#[tokio::test]
async fn of_two_hundred_requests_that_may_wait_all_are_served_one_at_a_time() {
    let (server, room) = (RedisServer::start_or_panic(), Room::new());
    let instances = two_instances(&server, &room, true).await;
    room.let_out(REQUESTS);
    let mut requests = at_once(instances, "/orders/42/pay");
    while let Some(answer) = soon("an answer", requests.join_next()).await {
        assert_eq!(answer.unwrap().status, 200);
    }
    assert_eq!((room.entered(), room.most()), (REQUESTS, 1));
    no_key_is_left(&server).await;
}

#[tokio::test]
async fn a_client_that_hangs_up_has_its_handler_cancelled_and_its_lock_given_back() {
    let (server, room) = (RedisServer::start_or_panic(), Room::new());
    let [one, other] = two_instances(&server, &room, true).await;
    let working = begin(one, "POST", "/orders/42/pay").await;
    room.is_entered().await;
    // One that waits hangs up, too: it must not come to its turn.
    let waiting = begin(other, "POST", "/orders/42/pay").await;
    let queue = ["ZCARD", "lockkeeper:{order:42}:q"];
    eventually("it waits", async || server.command(&queue) == "1").await;
    drop(waiting);
    eventually("it waits no more", async || server.command(&queue) == "0").await;
    drop(working);
    room.is_empty().await;
    no_key_is_left(&server).await;
    room.let_out(1);
    assert_eq!(ask(other, "POST", "/orders/42/pay").await.status, 200);
    assert_eq!(room.entered(), 2);
}

#[tokio::test]
async fn a_head_request_is_refused_without_a_body_and_the_connection_is_left_in_order() {
    let (server, room) = (RedisServer::start_or_panic(), Room::new());
    let [one, other] = two_instances(&server, &room, false).await;
    let working = begin(one, "POST", "/orders/42/pay").await;
    room.is_entered().await;
    let refused = ask(other, "HEAD", "/orders/42/pay").await;
    assert_eq!((refused.status, &*refused.body), (409, ""));
    assert_eq!(ask(other, "GET", "/").await.body, "hello");
    room.let_out(1);
    assert_eq!(answer(working).await.status, 200);
    no_key_is_left(&server).await;
}

/// The example, as a process that ends when this is dropped.
struct Shop {
    _process: Child,
    address: SocketAddr,
}

impl Shop {
    /// Starts it on a free port.
    async fn open(redis: &str, millis: &str) -> Self {
        let mut command = Command::new(example());
        command.args([redis, "127.0.0.1:0", millis]).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let process = command.spawn();
        let mut process = process.unwrap_or_else(|error| {
            panic!("{error}: cargo builds the example for all tests together, not for some of them")
        });
        let (mut line, output) = (String::new(), process.stdout.take().unwrap());
        soon("its address", BufReader::new(output).read_line(&mut line)).await.unwrap();
        let address = line.strip_prefix("listening on ").map(|address| address.trim().parse());
        let address = address.unwrap_or_else(|| panic!("the example said {line:?}")).unwrap();
        Self { _process: process, address }
    }

    /// Two of them, on one server.
    async fn open_two(server: &RedisServer, millis: [&str; 2]) -> [Self; 2] {
        let url = server.url();
        [Self::open(&url, millis[0]).await, Self::open(&url, millis[1]).await]
    }
}

/// Where cargo has put the example when it built this test.
fn example() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("examples/orders")
}

/// Fence, beginning and end of a payment.
fn receipt(body: &str) -> [u128; 3] {
    let words: Vec<&str> = body.split([' ', ',', '\n']).collect();
    ["fence", "began", "ended"].map(|word| {
        let at = words.iter().position(|one| *one == word).unwrap_or_else(|| panic!("{body:?}"));
        words[at + 1].parse().unwrap()
    })
}

#[tokio::test]
async fn the_second_of_two_instances_of_the_example_answers_409_while_the_first_is_at_work() {
    let server = RedisServer::start_or_panic();
    let shops = Shop::open_two(&server, ["600000", "0"]).await;
    let working = begin(shops[0].address, "POST", "/orders/42/pay").await;
    let held = ["EXISTS", "lockkeeper:{order:42}"];
    eventually("the first pays", async || server.command(&held) == "1").await;
    // Who holds it is left out if the server does not tell in time.
    eventually("the second is refused and told who holds it", async || {
        let second = ask(shops[1].address, "POST", "/orders/42/pay").await;
        let told = second.head.contains("\r\nretry-after: ");
        assert_eq!(told, second.body.contains(r#""holder":""#), "{second:?}");
        second.is_refusal() && told
    })
    .await;
    assert_eq!(ask(shops[1].address, "POST", "/orders/43/pay").await.status, 200);
    // The client of the first hangs up, and the second may pay.
    drop(working);
    no_key_is_left(&server).await;
    assert_eq!(ask(shops[1].address, "POST", "/orders/42/pay").await.status, 200);
}

#[tokio::test]
async fn two_hundred_requests_to_two_instances_of_the_example_are_served_one_at_a_time() {
    let server = RedisServer::start_or_panic();
    let shops = Shop::open_two(&server, ["100", "100"]).await;
    let instances = [shops[0].address, shops[1].address];
    let mut paid = Vec::new();
    for round in 1.. {
        assert!(round <= MAX_ROUNDS, "the server never answers two hundred within a second");
        let mut requests = at_once(instances, "/orders/42/pay");
        let (before, mut refused) = (paid.len(), 0);
        while let Some(answer) = soon("an answer", requests.join_next()).await {
            let answer = answer.unwrap();
            if answer.status == 200 {
                paid.push(receipt(&answer.body));
            } else {
                refused += usize::from(answer.is_refusal());
            }
        }
        no_key_is_left(&server).await;
        let here = paid.len() - before;
        if here > 0 && refused > 0 && here + refused == REQUESTS {
            break;
        }
    }
    // In the order of their fences, each began after the one before had ended.
    paid.sort_unstable();
    for pair in paid.windows(2) {
        let ([before, _, ended], [after, began, _]) = (pair[0], pair[1]);
        assert!(before < after && ended <= began, "{pair:?}");
    }
}
