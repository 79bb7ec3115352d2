//! Proxies that do not support all commands of the server.

use std::net::{Ipv4Addr, SocketAddr};

use lockkeeper_testkit::server::RedisServer;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::common::{got, lock, nothing_left, open, read, waiter, write};

/// A proxy that rejects some commands as unknown.
struct LimitedProxy {
    addr: SocketAddr,
}

impl LimitedProxy {
    async fn start(server: &RedisServer, unknown: &'static [&'static str]) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (addr, target) = (listener.local_addr().unwrap(), server.addr());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let server = TcpStream::connect(target).await?;
                    forward(client, server, unknown).await
                });
            }
        });
        Self { addr }
    }

    fn url(&self) -> String {
        format!("redis://{}/", self.addr)
    }
}

async fn forward(
    mut client: TcpStream,
    mut server: TcpStream,
    unknown: &[&str],
) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let mut from_client = BufReader::new(from_client);
    let mut replies = vec![0; 64 * 1024];
    loop {
        tokio::select! {
            // Cancel safe: `fill_buf` does not consume bytes.
            more = from_client.fill_buf() => {
                if more?.is_empty() {
                    return Ok(());
                }
                let (command, raw) = request(&mut from_client).await?;
                if !unknown.contains(&command.as_str()) {
                    to_server.write_all(&raw).await?;
                    continue;
                }
                // Replies must be in the order of the commands: forwards those to earlier commands first.
                to_server.write_all(b"*2\r\n$4\r\nECHO\r\n$9\r\nso far...\r\n").await?;
                let end = b"$9\r\nso far...\r\n";
                let mut before = Vec::new();
                while !before.ends_with(end) {
                    before.push(from_server.read_u8().await?);
                }
                before.truncate(before.len() - end.len());
                to_client.write_all(&before).await?;
                let refusal = format!("-ERR unknown command '{command}'\r\n");
                to_client.write_all(refusal.as_bytes()).await?;
            }
            read = from_server.read(&mut replies) => {
                let read = read?;
                if read == 0 {
                    return Ok(());
                }
                to_client.write_all(&replies[..read]).await?;
            }
        }
    }
}

/// Reads one command. Returns its name and its bytes.
async fn request(
    from: &mut (impl tokio::io::AsyncBufRead + Unpin),
) -> std::io::Result<(String, Vec<u8>)> {
    let mut raw = Vec::new();
    let words = length(from, &mut raw).await?;
    let mut command = String::new();
    for word in 0..words {
        let len = length(from, &mut raw).await?;
        let start = raw.len();
        raw.resize(start + len + 2, 0);
        from.read_exact(&mut raw[start..]).await?;
        if word == 0 {
            command = String::from_utf8_lossy(&raw[start..start + len]).to_uppercase();
        }
    }
    Ok((command, raw))
}

/// Reads the number in a line such as `*3` or `$5`.
async fn length(
    from: &mut (impl tokio::io::AsyncBufRead + Unpin),
    raw: &mut Vec<u8>,
) -> std::io::Result<usize> {
    let start = raw.len();
    from.read_until(b'\n', raw).await?;
    let line = std::str::from_utf8(&raw[start + 1..]).map_err(std::io::Error::other)?;
    line.trim().parse().map_err(std::io::Error::other)
}

/// Hands a lock off between two keepers.
async fn hand_offs(server: &RedisServer, one: &str, two: &str) {
    let (one, two) = (open(one).await, open(two).await);
    let mut guard = lock(&one, "a").await;
    for _ in 0..3 {
        let waiting = waiter(&one, "a", 1, write(&two, "a")).await;
        guard.release().await.unwrap();
        guard = got(waiting).await;
        let waiting = waiter(&one, "a", 1, read(&one, "a")).await;
        guard.release().await.unwrap();
        guard = got(waiting).await;
    }
    guard.release().await.unwrap();
    nothing_left(&one, server).await;
    nothing_left(&two, server).await;
}

#[tokio::test]
async fn a_transparent_proxy_changes_nothing() {
    let server = RedisServer::start_or_panic();
    let proxy = LimitedProxy::start(&server, &[]).await;
    assert!(open(&proxy.url()).await.capabilities().push);
    hand_offs(&server, &proxy.url(), &proxy.url()).await;
}

#[tokio::test]
async fn without_resp3_the_client_falls_back_to_resp2() {
    let server = RedisServer::start_or_panic();
    let proxy = LimitedProxy::start(&server, &["HELLO"]).await;
    assert!(open(&proxy.url()).await.capabilities().push);
    hand_offs(&server, &proxy.url(), &server.url()).await;
}

#[tokio::test]
async fn without_messages_waiters_poll() {
    let server = RedisServer::start_or_panic();
    for lacks in [&["SUBSCRIBE"] as &[_], &["SUBSCRIBE", "HELLO"]] {
        let proxy = LimitedProxy::start(&server, lacks).await;
        assert!(!open(&proxy.url()).await.capabilities().push);
        hand_offs(&server, &proxy.url(), &proxy.url()).await;
        hand_offs(&server, &proxy.url(), &server.url()).await;
    }
}

/// Scripts cannot be loaded in advance, and the server cannot be identified: EVAL is enough.
#[tokio::test]
async fn locks_work_with_the_minimal_set_of_commands() {
    let server = RedisServer::start_or_panic();
    let lacks = &["HELLO", "SUBSCRIBE", "SCRIPT", "EVALSHA_RO", "ROLE", "CLIENT", "INFO", "TIME"];
    let proxy = LimitedProxy::start(&server, lacks).await;
    hand_offs(&server, &proxy.url(), &proxy.url()).await;
}
