//! A TCP proxy that injects network failures: delays, cuts, freezes and lost data.
//!
//! Clients connect to [`Proxy::addr`] instead of the server. Unlike firewall rules, the proxy needs no root privileges,
//! and its methods take effect before they return. After [`cut`](Proxy::cut) or [`freeze`](Proxy::freeze) no byte passes
//! in either direction, and after [`lose`](Proxy::lose) none in the affected direction.

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
    network: Arc<watch::Sender<Network>>,
    task: JoinHandle<()>,
}

/// The state of the network.
#[derive(Debug, Clone, Copy)]
struct Network {
    flow: Flow,
    delay: Duration,
    /// The number of cuts so far. A connection from before a cut is closed, even if the network was healed immediately.
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
    /// If no port can be bound. A missing server at `target` is not an error: the proxy resets the connections of clients.
    pub async fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let network = Network {
            flow: Flow::Flowing,
            delay: Duration::ZERO,
            cuts: 0,
            connections: 0,
            loses: [false; 2],
            lost_before: [0; 2],
            frozen_from: None,
        };
        let network = Arc::new(watch::Sender::new(network));
        let task = tokio::spawn(accept(listener, target, network.clone()));
        Ok(Self { addr, network, task })
    }

    /// Returns the address that clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Delays every byte that arrives from now on, in each direction: a round trip takes longer by twice the
    /// delay. [`Duration::ZERO`] ends it.
    pub fn delay(&self, delay: Duration) {
        self.network.send_modify(|network| network.delay = delay);
    }

    /// Resets all connections, and every new one as soon as it is accepted, until [`heal`](Self::heal).
    pub fn cut(&self) {
        self.network.send_modify(|network| {
            network.flow = Flow::Cut;
            network.cuts += 1;
        });
    }

    /// Stops all traffic, closes included, until [`heal`](Self::heal): all connections stay
    /// open, and new ones are accepted, but no data passes. Data sent meanwhile arrives
    /// after `heal`, as on a real network.
    pub fn freeze(&self) {
        self.network.send_modify(|network| network.flow = Flow::Frozen);
    }

    /// Freezes connections that are opened from now on, until [`heal`](Self::heal). Others are not affected.
    pub fn freeze_new(&self) {
        self.network.send_modify(|network| network.frozen_from = Some(network.connections));
    }

    /// Discards, until [`heal`](Self::heal), all data that one side sends, a close included. Neither side is
    /// notified: the connections stay open. Discarded data does not arrive later.
    pub fn lose(&self, from: Side) {
        self.network.send_modify(|network| network.loses[from.index()] = true);
    }

    /// Discards, permanently, all data that one side sends on the existing connections, a close included.
    /// New connections are not affected. A firewall that forgets its connections does this to both sides.
    pub fn lose_for_good(&self, from: Side) {
        self.network.send_modify(|network| network.lost_before[from.index()] = network.connections);
    }

    /// Ends a cut, a freeze, or a [`lose`](Self::lose). A delay stays.
    pub fn heal(&self) {
        self.network.send_modify(|network| {
            network.flow = Flow::Flowing;
            network.loses = [false; 2];
            network.frozen_from = None;
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, network: Arc<watch::Sender<Network>>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    let (mut cuts, mut number) = (0, 0);
                    network.send_modify(|network| {
                        (cuts, number) = (network.cuts, network.connections);
                        network.connections += 1;
                    });
                    let state = ConnectionState { network: network.clone(), cuts, number };
                    connections.spawn(carry(client, target, state));
                }
                // Probably too many open files: wait until some are closed.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            // Finished connections must be removed, or the set grows without limit.
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Forwards one connection until both sides have closed it, one has broken it, or the network is cut.
async fn carry(mut client: TcpStream, target: SocketAddr, state: ConnectionState) {
    let connect = async {
        // On a frozen network the server must not see the client.
        state.gate(None, |_| Poll::Ready(())).await;
        TcpStream::connect(target).await
    };
    let server = tokio::select! {
        server = connect => server,
        () = state.cut() => Err(io::ErrorKind::ConnectionReset.into()),
    };
    let Ok(mut server) = server else { return reset(&client) };
    // Otherwise Nagle's algorithm may delay a small response until the previous one is acknowledged.
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);

    // Borrowed halves: dropping an owned half would send an orderly shutdown.
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let both = async {
        tokio::try_join!(
            pump(&mut from_client, &mut to_server, Side::Client, &state),
            pump(&mut from_server, &mut to_client, Side::Server, &state),
        )
    };
    let closed = tokio::select! {
        done = both => done.is_ok(),
        () = state.cut() => false,
    };
    if !closed {
        reset(&client);
        reset(&server);
    }
}

/// Forwards the data of one side to the other after the delay, then its close or its error.
async fn pump(
    from: &mut ReadHalf<'_>,
    to: &mut WriteHalf<'_>,
    side: Side,
    state: &ConnectionState,
) -> io::Result<()> {
    let (sender, mut chunks) = mpsc::channel::<(Instant, io::Result<Vec<u8>>)>(CHUNKS);
    let reading = async move {
        let mut buffer = vec![0; CHUNK];
        loop {
            let chunk = from.read(&mut buffer).await.map(|len| buffer[..len].to_vec());
            let last = chunk.as_ref().map_or(true, Vec::is_empty);
            let due = Instant::now() + state.network.borrow().delay;
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
                    let close = state.gate(Some(side), |cx| Pin::new(&mut *to).poll_shutdown(cx));
                    close.await.unwrap_or(Ok(()))
                }
                Ok(chunk) => write(to, &chunk, side, state).await,
                Err(error) => {
                    let passed = state.gate(Some(side), |_| Poll::Ready(())).await;
                    passed.map_or(Ok(()), |()| Err(error))
                }
            };
            // An error of the other side counts as data from it, which may be lost, too.
            if result.is_err() && !state.loses(&state.network.borrow(), side.other()) {
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
    state: &ConnectionState,
) -> io::Result<()> {
    while !chunk.is_empty() {
        let write = state.gate(Some(side), |cx| Pin::new(&mut *to).poll_write(cx, chunk));
        // The rest of the chunk is lost, too.
        let Some(written) = write.await else { return Ok(()) };
        chunk = &chunk[written?..];
    }
    Ok(())
}

/// One connection's view of the network.
struct ConnectionState {
    network: Arc<watch::Sender<Network>>,
    /// How often the network had been cut when the connection was opened.
    cuts: u64,
    /// How many connections were opened before it.
    number: u64,
}

/// The result of one step through a gate.
enum StepResult<T> {
    Passed(T),
    Lost,
    Blocked,
}

impl ConnectionState {
    /// Polls `act` only while data flows. Returns `None` if the network loses the data of `from`.
    async fn gate<T>(
        &self,
        from: Option<Side>,
        mut act: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Option<T> {
        let mut changes = self.network.subscribe();
        loop {
            let acted = poll_fn(|cx| {
                // While the network is borrowed it cannot change, so nothing passes after `freeze`, `cut` and `lose`
                // return.
                let network = self.network.borrow();
                if !self.flows(&network) {
                    Poll::Ready(StepResult::Blocked)
                } else if from.is_some_and(|from| self.loses(&network, from)) {
                    Poll::Ready(StepResult::Lost)
                } else {
                    act(cx).map(StepResult::Passed)
                }
            });
            match acted.await {
                StepResult::Passed(done) => return Some(done),
                StepResult::Lost => return None,
                StepResult::Blocked => self.wait(&mut changes, |network| self.flows(network)).await,
            }
        }
    }

    fn loses(&self, network: &Network, from: Side) -> bool {
        network.loses[from.index()] || self.number < network.lost_before[from.index()]
    }

    /// Waits until this connection is cut.
    async fn cut(&self) {
        self.wait(&mut self.network.subscribe(), |network| self.is_cut(network)).await;
    }

    fn flows(&self, network: &Network) -> bool {
        let frozen = network.frozen_from.is_some_and(|from| self.number >= from);
        network.flow == Flow::Flowing && !frozen && !self.is_cut(network)
    }

    fn is_cut(&self, network: &Network) -> bool {
        network.flow == Flow::Cut || network.cuts != self.cuts
    }

    async fn wait(&self, changes: &mut watch::Receiver<Network>, until: impl Fn(&Network) -> bool) {
        // Cannot fail: `self` has a sender.
        let _ = changes.wait_for(|network| until(network)).await;
    }
}

/// Makes the socket send a reset when it is dropped, instead of an orderly close.
#[cfg(unix)]
fn reset(socket: &TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

/// Closes orderly on systems other than Unix.
#[cfg(not(unix))]
fn reset(_: &TcpStream) {}
