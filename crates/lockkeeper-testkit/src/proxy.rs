//! A TCP proxy for failures of the network: it can be slow, cut, or frozen.
//!
//! Point a client at [`Proxy::addr`] instead of at its server. Unlike firewall rules, it needs no root,
//! and its calls take effect before they return: after [`cut`](Proxy::cut) or
//! [`freeze`](Proxy::freeze) not one more byte passes, in either direction, and after [`lose`](Proxy::lose) none
//! in the direction that loses.

use std::future::poll_fn;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

/// How many chunks of at most [`CHUNK`] bytes may be in flight in one direction of a connection.
/// Beyond that the sender gets back-pressure.
const CHUNKS: usize = 64;
const CHUNK: usize = 16 * 1024;

/// A proxy on a free port of 127.0.0.1. Dropping it closes its port and all its connections.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    link: Arc<watch::Sender<Link>>,
    task: JoinHandle<()>,
}

/// The state of the network.
#[derive(Debug, Clone, Copy)]
struct Link {
    flow: Flow,
    delay: Duration,
    /// How often the network was cut: a connection from before a cut is gone, even if the network was healed immediately.
    cuts: u64,
    /// The number of connections so far.
    connections: u64,
    /// Which directions lose all data until the network heals, by [`Side::index`].
    loses: [bool; 2],
    /// Connections with a lower number lose all data in that direction, permanently.
    lost_before: [u64; 2],
    /// Connections with this number or a higher one are frozen until the network heals.
    frozen_from: Option<u64>,
}

/// One end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The end that connects to the proxy.
    Client,
    /// The end that the proxy connects to.
    Server,
}

impl Side {
    fn index(self) -> usize {
        match self {
            Side::Client => 0,
            Side::Server => 1,
        }
    }

    fn other(self) -> Self {
        match self {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Flowing,
    Frozen,
    Cut,
}

impl Proxy {
    /// Starts a proxy to an address, on the current runtime.
    ///
    /// # Errors
    ///
    /// If no port can be bound. A missing server at `target` shows only when a client connects:
    /// the client's connection is reset.
    pub async fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let link = Link {
            flow: Flow::Flowing,
            delay: Duration::ZERO,
            cuts: 0,
            connections: 0,
            loses: [false; 2],
            lost_before: [0; 2],
            frozen_from: None,
        };
        let link = Arc::new(watch::Sender::new(link));
        let task = tokio::spawn(accept(listener, target, link.clone()));
        Ok(Self { addr, link, task })
    }

    /// Returns the address that clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Delays every byte that arrives from now on, in each direction: a round trip takes twice the
    /// delay longer. [`Duration::ZERO`] ends it.
    pub fn delay(&self, delay: Duration) {
        self.link.send_modify(|link| link.delay = delay);
    }

    /// Resets all connections, and every new one as soon as it is accepted, until [`heal`](Self::heal).
    pub fn cut(&self) {
        self.link.send_modify(|link| {
            link.flow = Flow::Cut;
            link.cuts += 1;
        });
    }

    /// Stops all traffic, closes included, until [`heal`](Self::heal): all connections stay
    /// open, and new ones are accepted, but no data passes. Data sent meanwhile arrives
    /// after `heal`, as on a real network.
    pub fn freeze(&self) {
        self.link.send_modify(|link| link.flow = Flow::Frozen);
    }

    /// Freezes connections that are opened from now on, until [`heal`](Self::heal). Others are not affected.
    pub fn freeze_new(&self) {
        self.link.send_modify(|link| link.frozen_from = Some(link.connections));
    }

    /// Discards, until [`heal`](Self::heal), all data that one side sends, a close included. Neither side is
    /// notified: the connections stay open. Discarded data does not arrive later.
    pub fn lose(&self, from: Side) {
        self.link.send_modify(|link| link.loses[from.index()] = true);
    }

    /// Discards, permanently, all data that one side sends on the existing connections, a close included.
    /// New connections are not affected. A firewall that forgets its connections does this to both sides.
    pub fn lose_for_good(&self, from: Side) {
        self.link.send_modify(|link| link.lost_before[from.index()] = link.connections);
    }

    /// Ends a cut, a freeze, or a [`lose`](Self::lose). A delay stays.
    pub fn heal(&self) {
        self.link.send_modify(|link| {
            link.flow = Flow::Flowing;
            link.loses = [false; 2];
            link.frozen_from = None;
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, link: Arc<watch::Sender<Link>>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    let (mut cuts, mut number) = (0, 0);
                    link.send_modify(|link| {
                        (cuts, number) = (link.cuts, link.connections);
                        link.connections += 1;
                    });
                    let cable = Cable { link: link.clone(), cuts, number };
                    connections.spawn(carry(client, target, cable));
                }
                // Probably there are too many open files: a pause lets some be closed.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            // Finished connections must be removed, or the set grows without limit.
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Forwards one connection until both sides have closed it, one has broken it, or the network is cut.
async fn carry(mut client: TcpStream, target: SocketAddr, cable: Cable) {
    let connect = async {
        // On a frozen network the server must not see the client.
        cable.gate(None, |_| Poll::Ready(())).await;
        TcpStream::connect(target).await
    };
    let server = tokio::select! {
        server = connect => server,
        () = cable.cut() => Err(io::ErrorKind::ConnectionReset.into()),
    };
    let Ok(mut server) = server else { return reset(&client) };
    // Without this a small response may wait for the acknowledgement of the previous one.
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);

    // Borrowed halves, because an owned half shuts the connection down in order when it is dropped.
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let both = async {
        tokio::try_join!(
            pump(&mut from_client, &mut to_server, Side::Client, &cable),
            pump(&mut from_server, &mut to_client, Side::Server, &cable),
        )
    };
    let closed = tokio::select! {
        done = both => done.is_ok(),
        () = cable.cut() => false,
    };
    if !closed {
        reset(&client);
        reset(&server);
    }
}

/// Forwards, after the delay, what one side sends to the other, then its close or its failure.
async fn pump(
    from: &mut ReadHalf<'_>,
    to: &mut WriteHalf<'_>,
    side: Side,
    cable: &Cable,
) -> io::Result<()> {
    let (sender, mut chunks) = mpsc::channel::<(Instant, io::Result<Vec<u8>>)>(CHUNKS);
    let reading = async move {
        let mut buffer = vec![0; CHUNK];
        loop {
            let chunk = from.read(&mut buffer).await.map(|len| buffer[..len].to_vec());
            let last = chunk.as_ref().map_or(true, Vec::is_empty);
            let due = Instant::now() + cable.link.borrow().delay;
            if sender.send((due, chunk)).await.is_err() || last {
                return Ok(());
            }
        }
    };
    let writing = async move {
        while let Some((due, chunk)) = chunks.recv().await {
            tokio::time::sleep_until(due).await;
            let result = match chunk {
                Ok(chunk) if chunk.is_empty() => {
                    let close = cable.gate(Some(side), |cx| Pin::new(&mut *to).poll_shutdown(cx));
                    close.await.unwrap_or(Ok(()))
                }
                Ok(chunk) => write(to, &chunk, side, cable).await,
                Err(error) => {
                    let passed = cable.gate(Some(side), |_| Poll::Ready(())).await;
                    passed.map_or(Ok(()), |()| Err(error))
                }
            };
            // The failure of the other side is data from it, which may be lost, too.
            if result.is_err() && !cable.loses(&cable.link.borrow(), side.other()) {
                return result;
            }
        }
        Ok(())
    };
    tokio::try_join!(reading, writing).map(|_| ())
}

async fn write(
    to: &mut WriteHalf<'_>,
    mut chunk: &[u8],
    side: Side,
    cable: &Cable,
) -> io::Result<()> {
    while !chunk.is_empty() {
        let write = cable.gate(Some(side), |cx| Pin::new(&mut *to).poll_write(cx, chunk));
        // Lost, and with it the rest of the chunk.
        let Some(written) = write.await else { return Ok(()) };
        chunk = &chunk[written?..];
    }
    Ok(())
}

/// One connection's view of the network.
struct Cable {
    link: Arc<watch::Sender<Link>>,
    /// How often the network had been cut when the connection was opened.
    cuts: u64,
    /// How many connections were opened before it.
    number: u64,
}

/// The result of one step through a gate.
enum Passage<T> {
    Passed(T),
    Lost,
    Blocked,
}

impl Cable {
    /// Polls `act` only while data flows. `None` if the network loses what `from` sends.
    async fn gate<T>(
        &self,
        from: Option<Side>,
        mut act: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Option<T> {
        let mut changes = self.link.subscribe();
        loop {
            let acted = poll_fn(|cx| {
                // The link is borrowed, and so cannot change, while `act` runs: this is what makes
                // the promise of `freeze`, `cut` and `lose` that nothing passes after them.
                let link = self.link.borrow();
                if !self.flows(&link) {
                    Poll::Ready(Passage::Blocked)
                } else if from.is_some_and(|from| self.loses(&link, from)) {
                    Poll::Ready(Passage::Lost)
                } else {
                    act(cx).map(Passage::Passed)
                }
            });
            match acted.await {
                Passage::Passed(done) => return Some(done),
                Passage::Lost => return None,
                Passage::Blocked => self.wait(&mut changes, |link| self.flows(link)).await,
            }
        }
    }

    fn loses(&self, link: &Link, from: Side) -> bool {
        link.loses[from.index()] || self.number < link.lost_before[from.index()]
    }

    /// Waits until this connection is cut.
    async fn cut(&self) {
        self.wait(&mut self.link.subscribe(), |link| self.is_cut(link)).await;
    }

    fn flows(&self, link: &Link) -> bool {
        let frozen = link.frozen_from.is_some_and(|from| self.number >= from);
        link.flow == Flow::Flowing && !frozen && !self.is_cut(link)
    }

    fn is_cut(&self, link: &Link) -> bool {
        link.flow == Flow::Cut || link.cuts != self.cuts
    }

    async fn wait(&self, changes: &mut watch::Receiver<Link>, until: impl Fn(&Link) -> bool) {
        // It cannot fail: `self` has a sender.
        let _ = changes.wait_for(|link| until(link)).await;
    }
}

/// Makes the socket send a reset when it is dropped, instead of an orderly close.
#[cfg(unix)]
fn reset(socket: &TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

/// Elsewhere a close must do.
#[cfg(not(unix))]
fn reset(_: &TcpStream) {}
