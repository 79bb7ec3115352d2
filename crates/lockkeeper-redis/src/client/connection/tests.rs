//! A connection, and a server that does what a test wants.

use std::sync::mpsc;
use std::time::Duration;

use lockkeeper_testkit::wait::{eventually, soon};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::config::Config;

/// More than the network takes at once.
const MUCH: usize = 16 * 1024 * 1024;

async fn pair(
    protocol: ProtocolVersion,
    on_message: Option<OnMessage>,
) -> (Arc<Connection>, TcpStream, CancellationToken) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = Address { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
    let config = Config::from_url(&format!("redis://{address}/")).unwrap();
    let gone = CancellationToken::new();
    let ips = [listener.local_addr().unwrap()];
    let connection =
        Connection::connect(&config.client, &address, &ips, protocol, on_message, &gone);
    let (connection, accepted) = tokio::join!(connection, listener.accept());
    (Arc::new(connection.unwrap()), accepted.unwrap().0, gone)
}

async fn plain() -> (Arc<Connection>, TcpStream, CancellationToken) {
    pair(ProtocolVersion::RESP3, None).await
}

fn ask(connection: &Arc<Connection>, word: &str) -> tokio::task::JoinHandle<RedisResult<Value>> {
    let (connection, command) = (connection.clone(), redis::cmd(word));
    tokio::spawn(async move { connection.query(&command).await })
}

/// Waits until so many have asked, and not been answered.
async fn waiting(connection: &Connection, count: usize) {
    eventually("requests", async || connection.shared.state().waiting.len() == count).await;
}

async fn says(server: &mut TcpStream, text: &str) {
    server.write_all(text.as_bytes()).await.unwrap();
}

async fn heard(server: &mut TcpStream, text: &str) {
    let mut buffer = vec![0; text.len()];
    soon("the request", server.read_exact(&mut buffer)).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&buffer), text);
}

/// Reads until the other side hangs up.
async fn hung_up(server: &mut TcpStream) {
    let mut rest = Vec::new();
    let _ = soon("the end", server.read_to_end(&mut rest)).await;
}

#[tokio::test]
async fn replies_find_their_commands_also_if_some_callers_were_dropped() {
    let (connection, mut server, _gone) = plain().await;
    let first = ask(&connection, "ONE");
    waiting(&connection, 1).await;
    let given_up = ask(&connection, "TWO");
    waiting(&connection, 2).await;
    let last = ask(&connection, "THREE");
    waiting(&connection, 3).await;
    given_up.abort();
    heard(&mut server, "*1\r\n$3\r\nONE\r\n*1\r\n$3\r\nTWO\r\n*1\r\n$5\r\nTHREE\r\n").await;
    // In two parts, cut where it hurts.
    says(&mut server, ":1\r\n:2\r\n$3\r\nth").await;
    assert_eq!(soon("the first", first).await.unwrap().unwrap(), Value::Int(1));
    says(&mut server, "r\r\n").await;
    let last = soon("the last", last).await.unwrap().unwrap();
    assert_eq!(last, Value::BulkString(b"thr".into()));
}

#[tokio::test]
async fn a_command_is_written_by_the_first_poll_on_any_thread() {
    let (connection, mut server, _gone) = plain().await;
    // On a thread that belongs to no runtime, and then never again.
    std::thread::spawn(move || {
        let command = redis::cmd("ONE");
        let mut asked = Box::pin(connection.query(&command));
        let mut context = Context::from_waker(Waker::noop());
        assert!(asked.as_mut().poll(&mut context).is_pending());
        drop(asked);
        std::mem::forget(connection);
    })
    .join()
    .unwrap();
    heard(&mut server, "*1\r\n$3\r\nONE\r\n").await;
}

#[tokio::test]
async fn what_the_network_does_not_accept_at_once_is_written_later_by_the_read_loop() {
    let (connection, mut server, _gone) = plain().await;
    let mut command = redis::cmd("SET");
    command.arg("x".repeat(MUCH));
    let mut asked = Box::pin(connection.query(&command));
    assert!(asked.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(
        !connection.shared.state().unwritten.is_empty(),
        "it took everything: {MUCH} is not much"
    );
    drop(asked);
    let next = ask(&connection, "NEXT");
    let mut all = vec![0; command.get_packed_command().len()];
    soon("all of it", server.read_exact(&mut all)).await.unwrap();
    assert!(all == command.get_packed_command());
    heard(&mut server, "*1\r\n$4\r\nNEXT\r\n").await;
    says(&mut server, "+OK\r\n:2\r\n").await;
    assert_eq!(soon("the next", next).await.unwrap().unwrap(), Value::Int(2));
}

#[tokio::test]
async fn an_answer_may_be_larger_than_the_buffer() {
    let (connection, mut server, _gone) = plain().await;
    connection.end_handshake();
    let asked = ask(&connection, "GET");
    let text = "x".repeat(BUFFER * 5 + 1);
    says(&mut server, &format!("${}\r\n{text}\r\n:1\r\n", text.len())).await;
    let answer = soon("the answer", asked).await.unwrap().unwrap();
    assert_eq!(answer, Value::BulkString(text.into_bytes()));
}

#[tokio::test]
async fn when_the_server_closes_the_connection_all_callers_fail_and_nothing_more_is_sent() {
    let (connection, server, gone) = plain().await;
    let (one, two) = (ask(&connection, "ONE"), ask(&connection, "TWO"));
    waiting(&connection, 2).await;
    drop(server);
    for asked in [one, two] {
        assert!(soon("the end", asked).await.unwrap().unwrap_err().is_io_error());
    }
    soon("the word of it", gone.cancelled()).await;
    assert!(soon("the refusal", ask(&connection, "THREE")).await.unwrap().is_err());
}

#[tokio::test]
async fn an_invalid_reply_closes_the_connection() {
    for nonsense in ["HTTP/1.1 400 Bad Request\r\n", ":1\r\n:2\r\n"] {
        let (connection, mut server, gone) = plain().await;
        let one = ask(&connection, "ONE");
        waiting(&connection, 1).await;
        says(&mut server, nonsense).await;
        soon("the end", gone.cancelled()).await;
        let answer = soon("the answer", one).await.unwrap();
        assert_eq!(answer.is_ok(), nonsense.starts_with(':'), "{answer:?}");
        hung_up(&mut server).await;
    }
}

/// Answers that are too large: what they are, and as much of them as should end the connection.
fn floods(limits: Limits) -> Vec<(&'static str, String)> {
    let (bytes, values, line) = (limits.bytes, limits.values, limits.line);
    let half = bytes / 2;
    let text = "x".repeat(half);
    vec![
        ("a text that is announced to be too long", format!("${}\r\n", bytes + 1)),
        ("two texts that are too long together", format!("*2\r\n${half}\r\n{text}\r\n${half}\r\n")),
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
async fn an_answer_that_is_too_large_ends_the_connection_and_is_not_kept() {
    for (is_ready, limits) in [(false, Limits::HANDSHAKE), (true, Limits::READY)] {
        for (what, start) in floods(limits) {
            let (connection, mut server, gone) = plain().await;
            if is_ready {
                connection.end_handshake();
            }
            let one = ask(&connection, "ONE");
            waiting(&connection, 1).await;
            // It may have hung up before it has read all of it.
            let _ = server.write_all(start.as_bytes()).await;
            let case = format!("{what}, after the handshake: {is_ready}");
            soon(&case, gone.cancelled()).await;
            let error = soon(&case, one).await.unwrap().expect_err(&case);
            assert!(error.to_string().contains("limit"), "{case}: {error}");
            hung_up(&mut server).await;
        }
    }
}

#[tokio::test]
async fn answers_within_the_limits_pass() {
    for (is_ready, limits) in [(false, Limits::HANDSHAKE), (true, Limits::READY)] {
        let (connection, mut server, _gone) = plain().await;
        if is_ready {
            connection.end_handshake();
        }
        let (one, two) = (ask(&connection, "ONE"), ask(&connection, "TWO"));
        waiting(&connection, 2).await;
        let text = "x".repeat(limits.bytes - 100);
        says(&mut server, &format!("${}\r\n{text}\r\n", text.len())).await;
        says(&mut server, &format!("+{}\r\n", "x".repeat(limits.line - 100))).await;
        assert_eq!(soon("one", one).await.unwrap().unwrap(), Value::BulkString(text.into_bytes()));
        soon("two", two).await.unwrap().unwrap();
    }
}

/// A server that floods every client that connects to it.
#[tokio::test]
async fn a_flood_instead_of_a_login_is_refused() {
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
                    assert!(sent < MUCH * 4, "it reads on and on");
                }
            }
        });
        let url = format!("redis://:secret@{address}/?protocol={protocol}&connect_timeout=60s");
        let opened = crate::Redis::connect(Config::from_url(&url).unwrap());
        let error = soon("the refusal", opened).await.unwrap_err();
        assert!(error.to_string().contains("limit"), "{error}");
        flood.abort();
    }
}

/// As a proxy may, that does not know a command and says so in its own words.
#[tokio::test]
async fn a_refusal_of_the_login_that_quotes_it_is_not_passed_on() {
    for protocol in ["resp2", "resp3"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let proxy = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut bytes = [0; 1024];
                let count = client.read(&mut bytes).await.unwrap();
                let quoted = String::from_utf8_lossy(&bytes[..count]).replace("\r\n", " ");
                let answer = format!("-ERR not supported: {quoted}\r\n");
                client.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let url = format!("redis://:hunter2@{address}/?protocol={protocol}");
        let opened = crate::Redis::connect(Config::from_url(&url).unwrap());
        let error = soon("the refusal", opened).await.unwrap_err();
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
async fn a_cancelled_token_closes_it() {
    let (connection, mut server, gone) = plain().await;
    let one = ask(&connection, "ONE");
    waiting(&connection, 1).await;
    gone.cancel();
    assert!(soon("the end", one).await.unwrap().is_err());
    hung_up(&mut server).await;
}

#[tokio::test]
async fn dropping_a_connection_closes_it_and_not_others_with_the_same_token() {
    let (connection, mut server, gone) = plain().await;
    drop(connection);
    hung_up(&mut server).await;
    assert!(!gone.is_cancelled());
}

#[test]
fn when_its_runtime_ends_all_callers_fail() {
    let other = tokio::runtime::Runtime::new().unwrap();
    let (connection, _server, gone) = other.block_on(plain());
    let here = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    here.block_on(async {
        let one = ask(&connection, "ONE");
        waiting(&connection, 1).await;
        other.shutdown_background();
        assert!(soon("the end", one).await.unwrap().is_err());
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
        let asked = ask(&connection, "SUBSCRIBE");
        waiting(&connection, 1).await;
        let message = "3\r\n$7\r\nmessage\r\n$1\r\na\r\n$2\r\nhi\r\n";
        let subscribed = "3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n";
        says(&mut server, &format!("{kind}{message}{kind}{subscribed}{kind}{message}")).await;
        assert!(matches!(soon("the answer", asked).await.unwrap().unwrap(), Value::Array(_)));
        let mut heard = Vec::new();
        eventually("both messages", async || {
            heard.extend(receiver.try_iter());
            heard.len() == 2
        })
        .await;
        assert!(heard.iter().all(|(channel, message)| channel == "a" && message == "hi"));
    }
}

#[tokio::test]
async fn a_slow_server_keeps_no_caller_from_sending() {
    let (connection, mut server, _gone) = plain().await;
    let asked: Vec<_> = (0..1000).map(|_| ask(&connection, "PING")).collect();
    waiting(&connection, 1000).await;
    tokio::time::timeout(Duration::from_secs(10), says(&mut server, &"+PONG\r\n".repeat(1000)))
        .await
        .unwrap();
    for asked in asked {
        soon("an answer", asked).await.unwrap().unwrap();
    }
}
