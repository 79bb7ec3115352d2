//! The proxy between a client and an echo server.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::future::Future;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lockkeeper_testkit::proxy::{Proxy, Side};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Longer than any operation here takes.
const LONG: Duration = Duration::from_secs(20);
/// How long to wait for data that must not arrive.
const SHORT: Duration = Duration::from_millis(200);

/// An event of the echo server.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Connected,
    Bytes(Vec<u8>),
    Closed,
    Reset,
}

/// An echo server that reports its events.
async fn echo() -> (SocketAddr, mpsc::UnboundedReceiver<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (seen, seen_by_test) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let seen = seen.clone();
            let _ = seen.send(Seen::Connected);
            tokio::spawn(async move {
                let mut buffer = vec![0; 64 * 1024];
                loop {
                    let read = stream.read(&mut buffer).await;
                    let (what, len) = match read {
                        Ok(0) => (Seen::Closed, 0),
                        Ok(len) => (Seen::Bytes(buffer[..len].to_vec()), len),
                        Err(_) => (Seen::Reset, 0),
                    };
                    let _ = seen.send(what);
                    if len == 0 || stream.write_all(&buffer[..len]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (addr, seen_by_test)
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    timeout(LONG, what).await.expect("an operation timed out")
}

async fn connect(proxy: &Proxy) -> TcpStream {
    within(TcpStream::connect(proxy.addr())).await.unwrap()
}

/// Sends a text and waits for its echo.
async fn echoed(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
    expect(stream, text).await;
}

async fn expect(stream: &mut TcpStream, text: &str) {
    let mut read = vec![0; text.len()];
    within(stream.read_exact(&mut read)).await.unwrap();
    assert_eq!(read, text.as_bytes());
}

/// Waits until the other side has reset the connection.
async fn assert_reset(stream: &mut TcpStream) {
    let error = within(stream.read(&mut [0])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

async fn assert_silent(stream: &mut TcpStream) {
    let read = timeout(SHORT, stream.read(&mut [0])).await;
    assert!(read.is_err(), "the client received {read:?}");
}

#[tokio::test]
async fn data_is_forwarded_in_both_directions() {
    let (target, _seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let (mut one, mut other) = (connect(&proxy).await, connect(&proxy).await);
    echoed(&mut one, "one").await;
    echoed(&mut other, "other").await;
    echoed(&mut one, "again").await;
}

#[tokio::test]
async fn more_data_than_the_buffers_hold_is_forwarded() {
    let (target, _seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let (mut reader, mut writer) = connect(&proxy).await.into_split();
    let sent: Vec<u8> =
        (0..8_000_000_u32).map(|n| n.to_be_bytes()[3] ^ n.to_be_bytes()[2]).collect();
    let expected = sent.clone();
    let sending = tokio::spawn(async move {
        writer.write_all(&sent).await.unwrap();
        writer.shutdown().await.unwrap();
    });
    let mut echoed = Vec::new();
    within(reader.read_to_end(&mut echoed)).await.unwrap();
    within(sending).await.unwrap();
    assert!(echoed == expected, "{} of {} bytes", echoed.len(), expected.len());
}

#[tokio::test]
async fn a_close_is_forwarded() {
    let (target, mut seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let mut client = connect(&proxy).await;
    client.shutdown().await.unwrap();
    assert_eq!(within(seen.recv()).await, Some(Seen::Connected));
    assert_eq!(within(seen.recv()).await, Some(Seen::Closed));
    assert_eq!(within(client.read(&mut [0])).await.unwrap(), 0);
}

#[tokio::test]
async fn a_client_is_reset_if_the_server_is_missing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = listener.local_addr().unwrap();
    drop(listener);
    let proxy = Proxy::start(closed).await.unwrap();
    assert_reset(&mut connect(&proxy).await).await;
}

#[tokio::test]
async fn a_delay_applies_in_each_direction() {
    let (target, _seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let mut client = connect(&proxy).await;
    echoed(&mut client, "fast").await;
    proxy.delay(Duration::from_millis(100));
    let start = Instant::now();
    echoed(&mut client, "slow").await;
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_cut_resets_both_sides() {
    let (target, mut seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let mut client = connect(&proxy).await;
    echoed(&mut client, "a").await;
    proxy.cut();
    assert_reset(&mut client).await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Connected));
    assert_eq!(within(seen.recv()).await, Some(Seen::Bytes(b"a".to_vec())));
    assert_eq!(within(seen.recv()).await, Some(Seen::Reset));
}

#[tokio::test]
async fn a_cut_network_resets_new_connections_until_it_heals() {
    let (target, mut seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    proxy.cut();
    for _ in 0..3 {
        assert_reset(&mut connect(&proxy).await).await;
    }
    assert!(seen.try_recv().is_err(), "the server noticed");
    proxy.heal();
    echoed(&mut connect(&proxy).await, "a").await;
}

#[tokio::test]
async fn a_cut_that_heals_immediately_still_resets() {
    let (target, _seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let mut client = connect(&proxy).await;
    echoed(&mut client, "a").await;
    // Without an await between them: no task runs while the network is cut.
    proxy.cut();
    proxy.heal();
    assert_reset(&mut client).await;
    echoed(&mut connect(&proxy).await, "b").await;
}

#[tokio::test]
async fn a_frozen_network_keeps_connections_and_delivers_when_it_heals() {
    let (target, mut seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let mut client = connect(&proxy).await;
    echoed(&mut client, "a").await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Connected));
    assert_eq!(within(seen.recv()).await, Some(Seen::Bytes(b"a".to_vec())));
    proxy.freeze();
    client.write_all(b"b").await.unwrap();
    assert_silent(&mut client).await;
    assert!(seen.try_recv().is_err(), "the server noticed");
    proxy.heal();
    expect(&mut client, "b").await;
}

#[tokio::test]
async fn a_frozen_network_delays_responses_too() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap()).await.unwrap();
    let mut client = connect(&proxy).await;
    let (mut server, _) = within(listener.accept()).await.unwrap();
    proxy.freeze();
    server.write_all(b"response").await.unwrap();
    drop(server);
    assert_silent(&mut client).await;
    proxy.heal();
    expect(&mut client, "response").await;
    assert_eq!(within(client.read(&mut [0])).await.unwrap(), 0);
}

#[tokio::test]
async fn a_frozen_network_accepts_connections_without_the_server() {
    let (target, mut seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    proxy.freeze();
    let mut client = connect(&proxy).await;
    client.write_all(b"a").await.unwrap();
    assert_silent(&mut client).await;
    assert!(seen.try_recv().is_err(), "the server noticed");
    proxy.heal();
    expect(&mut client, "a").await;
}

#[tokio::test]
async fn a_frozen_network_does_not_forward_a_close() {
    let (target, mut seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let mut client = connect(&proxy).await;
    echoed(&mut client, "a").await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Connected));
    assert_eq!(within(seen.recv()).await, Some(Seen::Bytes(b"a".to_vec())));
    proxy.freeze();
    drop(client);
    let event = timeout(SHORT, seen.recv()).await;
    assert!(event.is_err(), "the server noticed: {event:?}");
    proxy.heal();
    assert_eq!(within(seen.recv()).await, Some(Seen::Closed));
}

#[tokio::test]
async fn a_frozen_network_can_be_cut() {
    let (target, _seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let mut client = connect(&proxy).await;
    echoed(&mut client, "a").await;
    proxy.freeze();
    client.write_all(b"b").await.unwrap();
    proxy.cut();
    assert_reset(&mut client).await;
}

#[tokio::test]
async fn a_dropped_proxy_closes_its_port_and_its_connections() {
    let (target, _seen) = echo().await;
    let proxy = Proxy::start(target).await.unwrap();
    let addr = proxy.addr();
    let mut client = connect(&proxy).await;
    echoed(&mut client, "a").await;
    drop(proxy);
    assert!(matches!(within(client.read(&mut [0])).await, Ok(0) | Err(_)));
    let refused = TcpStream::connect(addr).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn a_lossy_direction_discards_data_without_notice_until_it_heals() {
    let (addr, mut seen) = echo().await;
    let proxy = Proxy::start(addr).await.unwrap();
    let mut stream = connect(&proxy).await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Connected));
    proxy.lose(Side::Server);
    stream.write_all(b"lost response").await.unwrap();
    assert_eq!(within(seen.recv()).await, Some(Seen::Bytes(b"lost response".to_vec())));
    assert_silent(&mut stream).await;
    proxy.heal();
    echoed(&mut stream, "heard").await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Bytes(b"heard".to_vec())));

    proxy.lose(Side::Client);
    stream.write_all(b"lost request").await.unwrap();
    assert_silent(&mut stream).await;
    proxy.heal();
    echoed(&mut stream, "and again").await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Bytes(b"and again".to_vec())));
}

#[tokio::test]
async fn permanently_lost_connections_receive_nothing_and_new_ones_work() {
    let (addr, mut seen) = echo().await;
    let proxy = Proxy::start(addr).await.unwrap();
    let mut lost = connect(&proxy).await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Connected));
    proxy.lose_for_good(Side::Client);
    proxy.lose_for_good(Side::Server);
    proxy.heal();
    lost.write_all(b"lost").await.unwrap();
    assert_silent(&mut lost).await;
    let mut new = connect(&proxy).await;
    echoed(&mut new, "new").await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Connected));
    assert_eq!(within(seen.recv()).await, Some(Seen::Bytes(b"new".to_vec())), "and no close");
}

#[tokio::test]
async fn new_connections_can_be_frozen_while_existing_ones_work() {
    let (addr, mut seen) = echo().await;
    let proxy = Proxy::start(addr).await.unwrap();
    let mut old = connect(&proxy).await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Connected));
    proxy.freeze_new();
    let mut new = connect(&proxy).await;
    new.write_all(b"later").await.unwrap();
    echoed(&mut old, "now").await;
    assert_eq!(within(seen.recv()).await, Some(Seen::Bytes(b"now".to_vec())));
    assert_silent(&mut new).await;
    proxy.heal();
    expect(&mut new, "later").await;
}
