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

use crate::common::{Gate, secs};

/// How many requests are sent at once.
const REQUESTS: usize = 200;

/// How often a scenario is repeated if a request got 503. A store that does not answer within a second counts as
/// unavailable, and a busy machine may need longer for this many requests.
const MAX_ROUNDS: usize = 20;

/// The response of a server.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    /// Returns whether it is a rejection because of contention (409). Otherwise the store was too slow (503).
    fn is_conflict(&self) -> bool {
        let reason = if self.status == 409 { "not_acquired" } else { "unavailable" };
        assert!(matches!(self.status, 409 | 503), "{self:?}");
        assert!(self.head.contains("\r\ncontent-type: application/problem+json"), "{self:?}");
        assert!(self.body.contains(r#""lock":"order:42""#), "{self:?}");
        assert!(self.body.contains(&format!(r#""reason":"{reason}""#)), "{self:?}");
        self.status == 409
    }
}

/// Sends the head of a request.
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
    soon("a response", stream.read_to_end(&mut bytes)).await.unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

async fn send_to(address: SocketAddr, method: &str, path: &str) -> Answer {
    answer(begin(address, method, path).await).await
}

/// Sends requests to the instances in turn, all at once.
fn at_once(instances: [SocketAddr; 2], path: &'static str) -> JoinSet<Answer> {
    let (mut requests, start) = (JoinSet::new(), Arc::new(Barrier::new(REQUESTS)));
    for number in 0..REQUESTS {
        let (address, start) = (instances[number % 2], start.clone());
        requests.spawn(async move {
            start.wait().await;
            send_to(address, "POST", path).await
        });
    }
    requests
}

/// Waits until the server has no keys. The leases are too long to expire meanwhile.
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

/// Starts an instance in this process, with its own connections to Redis.
async fn instance(server: &RedisServer, gate: &Gate, wait: bool) -> SocketAddr {
    let keeper = soon("to connect", lockkeeper::open(&server.url())).await.unwrap();
    let lock = LockLayer::new(keeper).ttl(secs(600)).wait(secs(if wait { 600 } else { 0 }));
    let stay = async |State(gate): State<Gate>| gate.pass().await;
    let app = Router::new()
        .route("/orders/{order_id}/pay", post(stay).get(stay))
        .route_layer(lock.key("order:{order_id}").methods([Method::POST, Method::GET]))
        .route("/", get(async || "hello"))
        .with_state(gate.clone());
    serve(app).await
}

async fn two_instances(server: &RedisServer, gate: &Gate, wait: bool) -> [SocketAddr; 2] {
    [instance(server, gate, wait).await, instance(server, gate, wait).await]
}

#[tokio::test]
async fn of_two_hundred_requests_at_once_one_is_served_and_all_others_are_rejected() {
    let (server, gate) = (RedisServer::start_or_panic(), Gate::new());
    let instances = two_instances(&server, &gate, false).await;
    let (mut clean, mut paid) = (0, 0);
    for _ in 0..MAX_ROUNDS {
        let mut requests = at_once(instances, "/orders/42/pay");
        let mut rejected = 0;
        // The handler of the served request waits until all others have their responses.
        for _ in 1..REQUESTS {
            let answer = soon("a rejection", requests.join_next()).await.unwrap().unwrap();
            rejected += usize::from(answer.is_conflict());
        }
        eventually("the last request is running or has a response", async || {
            gate.running() == 1 || requests.try_join_next().is_some()
        })
        .await;
        if gate.running() == 1 {
            gate.open(1);
            let answer = soon("the served one", requests.join_next()).await.unwrap().unwrap();
            assert_eq!(answer.status, 200, "{answer:?}");
            paid += 1;
            clean += usize::from(rejected == REQUESTS - 1);
        }
        assert!(gate.started() == paid && gate.max_running() <= 1);
        no_key_is_left(&server).await;
        if clean == 2 {
            return;
        }
    }
    panic!("the server never answers two hundred within a second");
}

#[tokio::test]
async fn two_hundred_waiting_requests_are_all_served_one_at_a_time() {
    let (server, gate) = (RedisServer::start_or_panic(), Gate::new());
    let instances = two_instances(&server, &gate, true).await;
    gate.open(REQUESTS);
    let mut requests = at_once(instances, "/orders/42/pay");
    while let Some(answer) = soon("a response", requests.join_next()).await {
        assert_eq!(answer.unwrap().status, 200);
    }
    assert_eq!((gate.started(), gate.max_running()), (REQUESTS, 1));
    no_key_is_left(&server).await;
}

#[tokio::test]
async fn a_disconnect_cancels_the_handler_and_releases_the_lock() {
    let (server, gate) = (RedisServer::start_or_panic(), Gate::new());
    let [one, other] = two_instances(&server, &gate, true).await;
    let working = begin(one, "POST", "/orders/42/pay").await;
    gate.wait_until_running().await;
    // A waiting request disconnects, too, and must not be served.
    let waiting = begin(other, "POST", "/orders/42/pay").await;
    let queue = ["ZCARD", "lockkeeper:{order:42}:q"];
    eventually("the request waits", async || server.command(&queue) == "1").await;
    drop(waiting);
    eventually("the request has left the queue", async || server.command(&queue) == "0").await;
    drop(working);
    gate.wait_until_idle().await;
    no_key_is_left(&server).await;
    gate.open(1);
    assert_eq!(send_to(other, "POST", "/orders/42/pay").await.status, 200);
    assert_eq!(gate.started(), 2);
}

#[tokio::test]
async fn a_rejected_head_request_has_no_body_and_the_server_continues() {
    let (server, gate) = (RedisServer::start_or_panic(), Gate::new());
    let [one, other] = two_instances(&server, &gate, false).await;
    let working = begin(one, "POST", "/orders/42/pay").await;
    gate.wait_until_running().await;
    let rejected = send_to(other, "HEAD", "/orders/42/pay").await;
    assert_eq!((rejected.status, &*rejected.body), (409, ""));
    assert_eq!(send_to(other, "GET", "/").await.body, "hello");
    gate.open(1);
    assert_eq!(answer(working).await.status, 200);
    no_key_is_left(&server).await;
}

/// The example as a process, killed when this is dropped.
struct Shop {
    _process: Child,
    address: SocketAddr,
}

impl Shop {
    /// Starts the example on a free port.
    async fn open(redis: &str, millis: &str) -> Self {
        let mut command = Command::new(example());
        command.args([redis, "127.0.0.1:0", millis]).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let process = command.spawn();
        let mut process = process.unwrap_or_else(|error| {
            panic!("{error}: run cargo build -p lockkeeper-axum --example orders")
        });
        let (mut line, output) = (String::new(), process.stdout.take().unwrap());
        soon("its address", BufReader::new(output).read_line(&mut line)).await.unwrap();
        let address = line.strip_prefix("listening on ").map(|address| address.trim().parse());
        let address = address.unwrap_or_else(|| panic!("the example printed {line:?}")).unwrap();
        Self { _process: process, address }
    }

    /// Starts two instances on one Redis server.
    async fn open_two(server: &RedisServer, millis: [&str; 2]) -> [Self; 2] {
        let url = server.url();
        [Self::open(&url, millis[0]).await, Self::open(&url, millis[1]).await]
    }
}

/// Returns the path of the example, which cargo builds with all tests.
fn example() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("examples/orders")
}

/// Returns the fence, start and end of a payment.
fn receipt(body: &str) -> [u128; 3] {
    let words: Vec<&str> = body.split([' ', ',', '\n']).collect();
    ["fence", "began", "ended"].map(|word| {
        let at = words.iter().position(|one| *one == word).unwrap_or_else(|| panic!("{body:?}"));
        words[at + 1].parse().unwrap()
    })
}

#[tokio::test]
async fn the_second_instance_of_the_example_returns_409_while_the_first_works() {
    let server = RedisServer::start_or_panic();
    let shops = Shop::open_two(&server, ["600000", "0"]).await;
    let working = begin(shops[0].address, "POST", "/orders/42/pay").await;
    let held = ["EXISTS", "lockkeeper:{order:42}"];
    eventually("the first pays", async || server.command(&held) == "1").await;
    // The holder is omitted if Redis does not answer in time.
    eventually("the second is rejected with the holder", async || {
        let second = send_to(shops[1].address, "POST", "/orders/42/pay").await;
        let has_holder = second.head.contains("\r\nretry-after: ");
        assert_eq!(has_holder, second.body.contains(r#""holder":""#), "{second:?}");
        second.is_conflict() && has_holder
    })
    .await;
    assert_eq!(send_to(shops[1].address, "POST", "/orders/43/pay").await.status, 200);
    // The client of the first disconnects, and the second can pay.
    drop(working);
    no_key_is_left(&server).await;
    assert_eq!(send_to(shops[1].address, "POST", "/orders/42/pay").await.status, 200);
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
        let (before, mut rejected) = (paid.len(), 0);
        while let Some(answer) = soon("a response", requests.join_next()).await {
            let answer = answer.unwrap();
            if answer.status == 200 {
                paid.push(receipt(&answer.body));
            } else {
                rejected += usize::from(answer.is_conflict());
            }
        }
        no_key_is_left(&server).await;
        let here = paid.len() - before;
        if here > 0 && rejected > 0 && here + rejected == REQUESTS {
            break;
        }
    }
    // In the order of their fences, each payment started after the previous one had ended.
    paid.sort_unstable();
    for pair in paid.windows(2) {
        let ([before, _, ended], [after, began, _]) = (pair[0], pair[1]);
        assert!(before < after && ended <= began, "{pair:?}");
    }
}
