//! A connection to a server that the test controls.

use std::sync::mpsc;
use std::time::Duration;

use lockkeeper_testkit::wait::{eventually, soon};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::config::Config;

/// More bytes than the socket buffers accept.
const LARGE: usize = 16 * 1024 * 1024;

async fn pair(
    protocol: ProtocolVersion,
    on_message: Option<OnMessage>,
) -> (Arc<Connection>, TcpStream, CancellationToken) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = Address::tcp("127.0.0.1", listener.local_addr().unwrap().port());
    let config = Config::from_url(&format!("redis://{address}/")).unwrap();
    let gone = CancellationToken::new();
    let endpoints = [Endpoint::Ip(listener.local_addr().unwrap())];
    let connection =
        Connection::connect(&config.client, &address, &endpoints, protocol, on_message, &gone);
    let (connection, accepted) = tokio::join!(connection, listener.accept());
    (Arc::new(connection.unwrap()), accepted.unwrap().0, gone)
}

async fn plain() -> (Arc<Connection>, TcpStream, CancellationToken) {
    pair(ProtocolVersion::RESP3, None).await
}

fn query(connection: &Arc<Connection>, word: &str) -> tokio::task::JoinHandle<RedisResult<Value>> {
    let (connection, command) = (connection.clone(), redis::cmd(word));
    tokio::spawn(async move { connection.query(&command).await })
}

/// Waits until this many commands are pending.
async fn pending(connection: &Connection, count: usize) {
    eventually("pending commands", async || connection.shared.state().waiting.len() == count).await;
}

async fn reply(server: &mut TcpStream, text: &str) {
    server.write_all(text.as_bytes()).await.unwrap();
}

async fn expect(server: &mut TcpStream, text: &str) {
    let mut buffer = vec![0; text.len()];
    soon("the command", server.read_exact(&mut buffer)).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&buffer), text);
}

/// Reads until the client closes the connection.
async fn closed(server: &mut TcpStream) {
    let mut rest = Vec::new();
    let _ = soon("the close", server.read_to_end(&mut rest)).await;
}

#[tokio::test]
async fn replies_match_their_commands_even_if_some_callers_are_dropped() {
    let (connection, mut server, _gone) = plain().await;
    let first = query(&connection, "ONE");
    pending(&connection, 1).await;
    let dropped = query(&connection, "TWO");
    pending(&connection, 2).await;
    let last = query(&connection, "THREE");
    pending(&connection, 3).await;
    dropped.abort();
    expect(&mut server, "*1\r\n$3\r\nONE\r\n*1\r\n$3\r\nTWO\r\n*1\r\n$5\r\nTHREE\r\n").await;
    // In two parts, cut inside a value.
    reply(&mut server, ":1\r\n:2\r\n$3\r\nth").await;
    assert_eq!(soon("the first", first).await.unwrap().unwrap(), Value::Int(1));
    reply(&mut server, "r\r\n").await;
    let last = soon("the last", last).await.unwrap().unwrap();
    assert_eq!(last, Value::BulkString(b"thr".into()));
}

#[tokio::test]
async fn a_command_is_written_by_the_first_poll_on_any_thread() {
    let (connection, mut server, _gone) = plain().await;
    // Once, on a thread without a runtime.
    std::thread::spawn(move || {
        let command = redis::cmd("ONE");
        let mut sent = Box::pin(connection.query(&command));
        let mut context = Context::from_waker(Waker::noop());
        assert!(sent.as_mut().poll(&mut context).is_pending());
        drop(sent);
        std::mem::forget(connection);
    })
    .join()
    .unwrap();
    expect(&mut server, "*1\r\n$3\r\nONE\r\n").await;
}

#[tokio::test]
async fn the_read_loop_writes_bytes_that_the_socket_did_not_accept_at_once() {
    let (connection, mut server, _gone) = plain().await;
    let mut command = redis::cmd("SET");
    command.arg("x".repeat(LARGE));
    let mut sent = Box::pin(connection.query(&command));
    assert!(sent.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(
        !connection.shared.state().unwritten.is_empty(),
        "the socket accepted all {LARGE} bytes: raise LARGE"
    );
    drop(sent);
    let next = query(&connection, "NEXT");
    let mut all = vec![0; command.get_packed_command().len()];
    soon("the whole command", server.read_exact(&mut all)).await.unwrap();
    assert!(all == command.get_packed_command());
    expect(&mut server, "*1\r\n$4\r\nNEXT\r\n").await;
    reply(&mut server, "+OK\r\n:2\r\n").await;
    assert_eq!(soon("the next", next).await.unwrap().unwrap(), Value::Int(2));
}

#[tokio::test]
async fn a_reply_may_be_larger_than_the_buffer() {
    let (connection, mut server, _gone) = plain().await;
    connection.end_handshake();
    let sent = query(&connection, "GET");
    let text = "x".repeat(BUFFER * 5 + 1);
    reply(&mut server, &format!("${}\r\n{text}\r\n:1\r\n", text.len())).await;
    let value = soon("the reply", sent).await.unwrap().unwrap();
    assert_eq!(value, Value::BulkString(text.into_bytes()));
}

#[tokio::test]
async fn when_the_server_closes_the_connection_all_callers_fail_and_nothing_more_is_sent() {
    let (connection, server, gone) = plain().await;
    let (one, two) = (query(&connection, "ONE"), query(&connection, "TWO"));
    pending(&connection, 2).await;
    drop(server);
    for sent in [one, two] {
        assert!(soon("the error", sent).await.unwrap().unwrap_err().is_io_error());
    }
    soon("the cancelled token", gone.cancelled()).await;
    assert!(soon("the error", query(&connection, "THREE")).await.unwrap().is_err());
}

#[tokio::test]
async fn an_invalid_reply_closes_the_connection() {
    for bytes in ["HTTP/1.1 400 Bad Request\r\n", ":1\r\n:2\r\n"] {
        let (connection, mut server, gone) = plain().await;
        let one = query(&connection, "ONE");
        pending(&connection, 1).await;
        reply(&mut server, bytes).await;
        soon("the cancelled token", gone.cancelled()).await;
        let replied = soon("the reply", one).await.unwrap();
        assert_eq!(replied.is_ok(), bytes.starts_with(':'), "{replied:?}");
        closed(&mut server).await;
    }
}

/// Replies that exceed a limit: a description, and the part that must close the connection.
fn oversized_replies(limits: Limits) -> Vec<(&'static str, String)> {
    let (bytes, values, line) = (limits.bytes, limits.values, limits.line);
    let half = bytes / 2;
    let text = "x".repeat(half);
    vec![
        ("a bulk string whose length is too large", format!("${}\r\n", bytes + 1)),
        (
            "two bulk strings that are too large together",
            format!("*2\r\n${half}\r\n{text}\r\n${half}\r\n"),
        ),
        ("more values than are allowed", format!("*{}\r\n", values + 1)),
        ("more pairs than are allowed", format!("%{}\r\n", values / 2 + 1)),
        ("arrays in arrays without end", "*1\r\n".repeat(values + 1)),
        ("attributes without end", "|0\r\n".repeat(values + 1)),
        ("a line without end", format!("+{}", "x".repeat(line + 1))),
        ("a number without end", format!(":{}", "1".repeat(line + 1))),
        ("a push without end", format!(">{}\r\n", values + 1)),
    ]
}

#[tokio::test]
async fn a_reply_that_exceeds_a_limit_closes_the_connection() {
    for (is_ready, limits) in [(false, Limits::HANDSHAKE), (true, Limits::READY)] {
        for (what, start) in oversized_replies(limits) {
            let (connection, mut server, gone) = plain().await;
            if is_ready {
                connection.end_handshake();
            }
            let one = query(&connection, "ONE");
            pending(&connection, 1).await;
            // The client may close the connection before it has read everything.
            let _ = server.write_all(start.as_bytes()).await;
            let case = format!("{what}, after the handshake: {is_ready}");
            soon(&case, gone.cancelled()).await;
            let error = soon(&case, one).await.unwrap().expect_err(&case);
            assert!(error.to_string().contains("limit"), "{case}: {error}");
            closed(&mut server).await;
        }
    }
}

/// A hostile server sends the start of a reply, and then the same byte without end.
#[test]
fn the_read_buffer_does_not_grow_beyond_twice_the_limit() {
    for (is_ready, limits) in [(false, Limits::HANDSHAKE), (true, Limits::READY)] {
        let mut starts = oversized_replies(limits);
        starts.push(("a bulk string four times the limit", format!("${}\r\n", 4 * limits.bytes)));
        starts.push(("a bulk string at the limit", format!("${}\r\n", limits.bytes - 20)));
        starts.push(("a push at the limit", format!(">1\r\n${}\r\n", limits.bytes - 30)));
        for (what, start) in starts {
            let state = State {
                writer: None,
                is_closed: false,
                unwritten: Vec::new(),
                waiting: VecDeque::new(),
                read_loop: Waker::noop().clone(),
            };
            let shared = Shared {
                state: Mutex::new(state),
                gone: CancellationToken::new(),
                handshake_is_done: AtomicBool::new(is_ready),
            };
            let (bytes, scanner) = (vec![0; BUFFER], FrameScanner::default());
            let mut buffer =
                ReadBuffer { bytes, filled: 0, scanner, is_subscribed: false, on_message: None };
            let endless = std::io::Cursor::new(start.into_bytes()).chain(tokio::io::repeat(b'x'));
            let mut reader: Reader = Box::new(endless);
            let (mut largest, mut context) = (0, Context::from_waker(Waker::noop()));
            while buffer.dispatch(&shared).is_ok() {
                assert!(matches!(buffer.read(&mut reader, &mut context), Poll::Ready(Ok(()))));
                largest = largest.max(buffer.bytes.len());
            }
            let case = format!("{what}, after the handshake: {is_ready}");
            assert!(largest <= 2 * limits.bytes, "{case}: {largest} bytes");
        }
    }
}

#[tokio::test]
async fn replies_within_the_limits_are_accepted() {
    for (is_ready, limits) in [(false, Limits::HANDSHAKE), (true, Limits::READY)] {
        let (connection, mut server, _gone) = plain().await;
        if is_ready {
            connection.end_handshake();
        }
        let (one, two) = (query(&connection, "ONE"), query(&connection, "TWO"));
        pending(&connection, 2).await;
        let text = "x".repeat(limits.bytes - 100);
        reply(&mut server, &format!("${}\r\n{text}\r\n", text.len())).await;
        reply(&mut server, &format!("+{}\r\n", "x".repeat(limits.line - 100))).await;
        assert_eq!(soon("one", one).await.unwrap().unwrap(), Value::BulkString(text.into_bytes()));
        soon("two", two).await.unwrap().unwrap();
    }
}

/// The server sends an endless line to every client.
#[tokio::test]
async fn an_endless_reply_to_the_login_is_an_error() {
    for protocol in ["resp2", "resp3"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let flood = tokio::spawn(async move {
            let mut sent = 0_usize;
            while let Ok((mut client, _)) = listener.accept().await {
                let chunk = [b'x'; 4096];
                let _ = client.write_all(b"+").await;
                while client.write_all(&chunk).await.is_ok() {
                    sent += chunk.len();
                    assert!(sent < LARGE * 4, "the client does not stop reading");
                }
            }
        });
        let url = format!("redis://:secret@{address}/?protocol={protocol}&connect_timeout=60s");
        let opened = crate::Redis::connect(Config::from_url(&url).unwrap());
        let error = soon("the error", opened).await.unwrap_err();
        assert!(error.to_string().contains("limit"), "{error}");
        flood.abort();
    }
}

/// A proxy may quote a command that it does not support.
#[tokio::test]
async fn an_error_that_quotes_the_login_is_reported_without_the_password() {
    for protocol in ["resp2", "resp3"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let proxy = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut bytes = [0; 1024];
                let count = client.read(&mut bytes).await.unwrap();
                let quoted = String::from_utf8_lossy(&bytes[..count]).replace("\r\n", " ");
                let reply = format!("-ERR not supported: {quoted}\r\n");
                client.write_all(reply.as_bytes()).await.unwrap();
            }
        });
        let url = format!("redis://:hunter2@{address}/?protocol={protocol}");
        let opened = crate::Redis::connect(Config::from_url(&url).unwrap());
        let error = soon("the error", opened).await.unwrap_err();
        let chain =
            std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
        let shown: Vec<String> = chain.map(|error| format!("{error} {error:?}")).collect();
        let shown = shown.join("; ");
        assert!(shown.contains("not supported"), "{shown}");
        assert!(!shown.contains("hunter2"), "{shown}");
        proxy.abort();
    }
}

#[tokio::test]
async fn cancelling_the_token_closes_the_connection() {
    let (connection, mut server, gone) = plain().await;
    let one = query(&connection, "ONE");
    pending(&connection, 1).await;
    gone.cancel();
    assert!(soon("the error", one).await.unwrap().is_err());
    closed(&mut server).await;
}

#[tokio::test]
async fn dropping_a_connection_closes_it_without_cancelling_the_token() {
    let (connection, mut server, gone) = plain().await;
    drop(connection);
    closed(&mut server).await;
    assert!(!gone.is_cancelled());
}

#[test]
fn when_the_runtime_of_a_connection_ends_all_callers_fail() {
    let other = tokio::runtime::Runtime::new().unwrap();
    let (connection, _server, gone) = other.block_on(plain());
    let here = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    here.block_on(async {
        let one = query(&connection, "ONE");
        pending(&connection, 1).await;
        other.shutdown_background();
        assert!(soon("the error", one).await.unwrap().is_err());
        assert!(gone.is_cancelled());
    });
}

#[tokio::test]
async fn messages_are_received_between_replies() {
    for (protocol, kind) in [(ProtocolVersion::RESP3, '>'), (ProtocolVersion::RESP2, '*')] {
        let (sender, receiver) = mpsc::channel();
        let on_message = move |channel: &[u8], message: &[u8]| {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let _ = sender.send((text(channel), text(message)));
        };
        let (connection, mut server, _gone) = pair(protocol, Some(Box::new(on_message))).await;
        let sent = query(&connection, "SUBSCRIBE");
        pending(&connection, 1).await;
        let message = "3\r\n$7\r\nmessage\r\n$1\r\na\r\n$2\r\nhi\r\n";
        let subscribed = "3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n";
        reply(&mut server, &format!("{kind}{message}{kind}{subscribed}{kind}{message}")).await;
        assert!(matches!(soon("the reply", sent).await.unwrap().unwrap(), Value::Array(_)));
        let mut messages = Vec::new();
        eventually("both messages", async || {
            messages.extend(receiver.try_iter());
            messages.len() == 2
        })
        .await;
        assert!(messages.iter().all(|(channel, message)| channel == "a" && message == "hi"));
    }
}

#[tokio::test]
async fn callers_send_without_waiting_for_earlier_replies() {
    let (connection, mut server, _gone) = plain().await;
    let sent: Vec<_> = (0..1000).map(|_| query(&connection, "PING")).collect();
    pending(&connection, 1000).await;
    tokio::time::timeout(Duration::from_secs(10), reply(&mut server, &"+PONG\r\n".repeat(1000)))
        .await
        .unwrap();
    for sent in sent {
        soon("a reply", sent).await.unwrap().unwrap();
    }
}
