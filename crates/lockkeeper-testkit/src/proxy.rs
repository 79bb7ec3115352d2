//! A TCP proxy that stands for the cable: it can be slow, cut, or dead without a word.
//!
//! Point a client at [`Proxy::addr`] instead of at its server. It needs no root, unlike firewall
//! rules, and what it does is done when the call returns: after [`cut`](Proxy::cut) or
//! [`freeze`](Proxy::freeze) not one more byte passes, in either direction.

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

/// How many chunks of at most [`CHUNK`] bytes may be under way in one direction of a connection.
/// Beyond that the sender feels the back-pressure.
const CHUNKS: usize = 64;
const CHUNK: usize = 16 * 1024;

/// A proxy on a free port of 127.0.0.1. Dropping it closes its port and all its connections.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    link: Arc<watch::Sender<Link>>,
    task: JoinHandle<()>,
}

/// The state of the cable.
#[derive(Debug, Clone, Copy)]
struct Link {
    flow: Flow,
    delay: Duration,
    /// How often it was cut: a connection from before a cut is gone, even if it was healed at once.
    cuts: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Flowing,
    Frozen,
    Cut,
}

impl Proxy {
    /// Starts a proxy in front of an address. It lives on the runtime that this is called on.
    ///
    /// # Errors
    ///
    /// If no port can be had. Whether there is anyone at `target` shows only when a client connects:
    /// if there is not, the client's connection is reset.
    pub async fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let link = Link { flow: Flow::Flowing, delay: Duration::ZERO, cuts: 0 };
        let link = Arc::new(watch::Sender::new(link));
        let task = tokio::spawn(accept(listener, target, link.clone()));
        Ok(Self { addr, link, task })
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Delays every byte that arrives from now on, in each direction: a round trip takes twice as
    /// much longer. [`Duration::ZERO`] ends it.
    pub fn delay(&self, delay: Duration) {
        self.link.send_modify(|link| link.delay = delay);
    }

    /// Resets all connections, and every new one as soon as it is made, until [`heal`](Self::heal).
    pub fn cut(&self) {
        self.link.send_modify(|link| {
            link.flow = Flow::Cut;
            link.cuts += 1;
        });
    }

    /// Lets nothing pass any more, not even a close, until [`heal`](Self::heal): all connections stay
    /// open, and new ones are accepted, but nobody gets an answer. What is sent meanwhile arrives
    /// when it heals, as it does on a real network.
    pub fn freeze(&self) {
        self.link.send_modify(|link| link.flow = Flow::Frozen);
    }

    /// Ends a cut or a freeze. A delay stays.
    pub fn heal(&self) {
        self.link.send_modify(|link| link.flow = Flow::Flowing);
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
                    let cuts = link.borrow().cuts;
                    let cable = Cable { link: link.clone(), cuts };
                    connections.spawn(carry(client, target, cable));
                }
                // Most likely there are too many open files: a pause lets some be closed.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            // Those that are done must be taken out, or the set grows for ever.
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Carries one connection until both sides have closed it, one has broken it, or the link is cut.
async fn carry(mut client: TcpStream, target: SocketAddr, cable: Cable) {
    let connect = async {
        // On a frozen link the server must not hear of the client.
        cable.gate(|_| Poll::Ready(())).await;
        TcpStream::connect(target).await
    };
    let server = tokio::select! {
        server = connect => server,
        () = cable.cut() => Err(io::ErrorKind::ConnectionReset.into()),
    };
    let Ok(mut server) = server else { return reset(&client) };
    // Without this a small answer may wait for the acknowledgement of the one before.
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);

    // The borrowed halves, since an owned one says an orderly goodbye when it is dropped.
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let both = async {
        tokio::try_join!(
            pump(&mut from_client, &mut to_server, &cable),
            pump(&mut from_server, &mut to_client, &cable),
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

/// Passes on, after the delay, what one side sends to the other, then its close or its failure.
async fn pump(from: &mut ReadHalf<'_>, to: &mut WriteHalf<'_>, cable: &Cable) -> io::Result<()> {
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
                    cable.gate(|cx| Pin::new(&mut *to).poll_shutdown(cx)).await
                }
                Ok(chunk) => write(to, &chunk, cable).await,
                Err(error) => cable.gate(|_| Poll::Ready(Ok(()))).await.and(Err(error)),
            };
            result?;
        }
        Ok(())
    };
    tokio::try_join!(reading, writing).map(|_| ())
}

async fn write(to: &mut WriteHalf<'_>, mut chunk: &[u8], cable: &Cable) -> io::Result<()> {
    while !chunk.is_empty() {
        let written = cable.gate(|cx| Pin::new(&mut *to).poll_write(cx, chunk)).await?;
        chunk = &chunk[written..];
    }
    Ok(())
}

/// One connection's view of the link.
struct Cable {
    link: Arc<watch::Sender<Link>>,
    /// How often the link had been cut when the connection was made.
    cuts: u64,
}

impl Cable {
    /// Polls `act` only while the link flows.
    async fn gate<T>(&self, mut act: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
        let mut changes = self.link.subscribe();
        loop {
            let acted = poll_fn(|cx| {
                // The link is borrowed, and so cannot change, while `act` runs: this is what makes
                // the promise of `freeze` and `cut` that nothing passes after them.
                let link = self.link.borrow();
                if self.flows(&link) { act(cx).map(Some) } else { Poll::Ready(None) }
            });
            if let Some(done) = acted.await {
                return done;
            }
            self.wait(&mut changes, |link| self.flows(link)).await;
        }
    }

    /// Waits until this connection is cut.
    async fn cut(&self) {
        self.wait(&mut self.link.subscribe(), |link| self.is_cut(link)).await;
    }

    fn flows(&self, link: &Link) -> bool {
        link.flow == Flow::Flowing && !self.is_cut(link)
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
