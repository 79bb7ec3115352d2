//! One connection: commands and their replies.
//!
//! The calling task writes its command directly to the socket, without a hop to another task. A task of the connection's
//! runtime, the *read loop*, reads replies and passes them to the callers. It also writes bytes that the socket did not
//! accept at once.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use lockkeeper_core::Result;
use redis::{Cmd, ErrorKind, ProtocolVersion, RedisError, RedisResult, Value};
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::io::{Reader, Writer};
use super::resp::{self, Frame, FrameScanner, Limits, Pipeline};
use super::settings::{Address, Settings};
use super::stream::{self, Endpoint};
use crate::error::{ErrorClass, classify, unwrapped};

/// The initial size of the read buffer.
const BUFFER: usize = 16 * 1024;
/// A read buffer that has grown beyond this is replaced when it is empty.
const MAX_KEPT_BUFFER: usize = 16 * BUFFER;

/// Receives the channel and the text of each message.
pub(crate) type OnMessage = Box<dyn Fn(&[u8], &[u8]) + Send>;

/// A connection to a server. It closes when it is dropped or when its token `gone` is cancelled. If it breaks, it cancels
/// the token.
pub(crate) struct Connection {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    gone: CancellationToken,
    /// While false, only small replies are accepted.
    handshake_is_done: AtomicBool,
}

struct State {
    /// `None` after a write error, and after the connection was closed.
    writer: Option<Writer>,
    is_closed: bool,
    /// Bytes that the writer has not accepted yet.
    unwritten: Vec<u8>,
    /// The callers that wait for a reply, in the order of their commands.
    waiting: VecDeque<Waiting>,
    /// Wakes the read loop.
    read_loop: Waker,
}

/// A caller that waits for replies.
enum Waiting {
    One(oneshot::Sender<RedisResult<Value>>),
    /// Several commands that were written at once.
    Many {
        missing: usize,
        replies: Vec<Value>,
        sender: oneshot::Sender<RedisResult<Vec<Value>>>,
    },
}

impl Waiting {
    fn fail(self, error: &RedisError) {
        match self {
            Self::One(sender) => drop(sender.send(Err(error.clone()))),
            Self::Many { sender, .. } => drop(sender.send(Err(error.clone()))),
        }
    }
}

impl Connection {
    /// Connects to the first of the host's addresses that accepts, without logging in. Accepts only small replies until
    /// [`end_handshake`](Self::end_handshake). With RESP2, a connection that receives messages accepts only `SUBSCRIBE`,
    /// `UNSUBSCRIBE` and `PING`.
    pub(crate) async fn connect(
        settings: &Settings,
        address: &Address,
        endpoints: &[Endpoint],
        protocol: ProtocolVersion,
        on_message: Option<OnMessage>,
        gone: &CancellationToken,
    ) -> Result<Self> {
        let (reader, writer) = stream::connect(settings, address, endpoints).await?;
        let state = State {
            writer: Some(writer),
            is_closed: false,
            unwritten: Vec::new(),
            waiting: VecDeque::new(),
            read_loop: Waker::noop().clone(),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            gone: gone.clone(),
            handshake_is_done: AtomicBool::new(false),
        });
        let is_subscribed = on_message.is_some() && protocol == ProtocolVersion::RESP2;
        let (bytes, scanner) = (vec![0; BUFFER], FrameScanner::default());
        let buffer = ReadBuffer { bytes, filled: 0, scanner, is_subscribed, on_message };
        tokio::spawn(ReadLoop { shared: shared.clone(), reader, buffer }.run());
        Ok(Self { shared })
    }

    /// Accepts large replies from now on. Called after the login and the other commands of the handshake have succeeded.
    pub(crate) fn end_handshake(&self) {
        self.shared.handshake_is_done.store(true, Ordering::Relaxed);
    }

    /// Sends a command and waits for its reply. An error reply is an error.
    ///
    /// The first poll sends the command. The server executes it even if the future is dropped after that.
    pub(crate) async fn query(&self, command: &Cmd) -> RedisResult<Value> {
        self.send(command).await?.extract_error()
    }

    /// Sends a command as [`query`](Self::query) does. Closes the connection on an error of class
    /// [`Broken`](ErrorClass::Broken).
    pub(crate) async fn execute(&self, command: &Cmd) -> RedisResult<Value> {
        let reply = self.send(command).await;
        self.outcome(reply)
    }

    /// Sends a pipeline of one command, as [`execute`](Self::execute) does.
    pub(crate) async fn execute_one(&self, command: &Pipeline) -> RedisResult<Value> {
        let replies = self.send_all(command).await;
        self.outcome(replies.map(|mut replies| replies.pop().unwrap_or(Value::Nil)))
    }

    fn outcome(&self, reply: RedisResult<Value>) -> RedisResult<Value> {
        let reply = reply.and_then(|reply| match reply {
            Value::ServerError(error) => Err(error.into()),
            // A script for a batch of requests returns an array. Here the batch had one request, which failed.
            Value::Array(mut replies) if matches!(replies.as_slice(), [Value::ServerError(_)]) => {
                replies.remove(0).extract_error()
            }
            reply => Ok(reply),
        });
        let reply = reply.map_err(unwrapped);
        if reply.as_ref().is_err_and(|error| classify(error) == ErrorClass::Broken) {
            self.shared.gone.cancel();
        }
        reply
    }

    /// Sends a command and waits for its reply. Leaves errors inside the reply in place.
    pub(crate) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        let (reply, replied) = oneshot::channel();
        self.shared.write(Waiting::One(reply), |bytes| command.write_packed_command(bytes))?;
        replied.await.unwrap_or_else(|_| Err(lost()))
    }

    /// Sends several commands in one write and waits for all replies, with errors left in place.
    ///
    /// The first poll sends them. The server executes them even if the caller is dropped after that.
    pub(crate) async fn send_all(&self, commands: &Pipeline) -> RedisResult<Vec<Value>> {
        let (sender, replied) = oneshot::channel();
        let missing = commands.count();
        let waiting = Waiting::Many { missing, replies: Vec::with_capacity(missing), sender };
        self.shared.write(waiting, |bytes| bytes.extend_from_slice(commands.bytes()))?;
        replied.await.unwrap_or_else(|_| Err(lost()))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The connection did not break, so others with the same token stay open.
        self.shared.close(&lost(), |_| {});
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, waiting: Waiting, add: impl FnOnce(&mut Vec<u8>)) -> RedisResult<()> {
        let mut state = self.state();
        if state.writer.is_none() {
            return Err(lost());
        }
        add(&mut state.unwritten);
        state.waiting.push_back(waiting);
        let written = state.flush();
        drop(state);
        written.inspect_err(|error| self.fail(error))
    }

    /// Hands a reply to the caller that has waited longest.
    fn reply(&self, value: Value) -> RedisResult<()> {
        let mut state = self.state();
        if let Some(Waiting::Many { missing, replies, .. }) = state.waiting.front_mut()
            && *missing > 1
        {
            *missing -= 1;
            replies.push(value);
            return Ok(());
        }
        let waiting = state.waiting.pop_front();
        drop(state);
        match waiting.ok_or((ErrorKind::Parse, "a reply to no command"))? {
            Waiting::One(sender) => drop(sender.send(Ok(value))),
            Waiting::Many { mut replies, sender, .. } => {
                replies.push(value);
                drop(sender.send(Ok(replies)));
            }
        }
        Ok(())
    }

    /// Closes the connection because it broke.
    fn fail(&self, error: &RedisError) {
        self.close(error, CancellationToken::cancel);
    }

    /// Closes the connection, unless it is closed: nothing more is written, and all callers get `error`. Calls `before`
    /// with the token before that.
    fn close(&self, error: &RedisError, before: impl FnOnce(&CancellationToken)) {
        let mut state = self.state();
        if std::mem::replace(&mut state.is_closed, true) {
            return;
        }
        let writer = state.writer.take();
        let (waiting, read_loop) = (std::mem::take(&mut state.waiting), state.read_loop.clone());
        state.unwritten = Vec::new();
        drop(state);
        drop(writer);
        before(&self.gone);
        for waiting in waiting {
            waiting.fail(error);
        }
        read_loop.wake();
    }
}

impl State {
    /// Writes as much as the socket accepts, and registers the read loop to be woken when it accepts more. After an error
    /// nothing more is written.
    fn flush(&mut self) -> RedisResult<()> {
        let Some(mut writer) = self.writer.take() else { return Err(lost()) };
        let mut context = Context::from_waker(&self.read_loop);
        let mut done = 0;
        while done < self.unwritten.len() {
            match Pin::new(&mut writer).poll_write(&mut context, &self.unwritten[done..])? {
                Poll::Ready(0) => return Err(lost()),
                Poll::Ready(count) => done += count,
                Poll::Pending => break,
            }
        }
        self.unwritten.drain(..done);
        // For TLS streams, which buffer.
        let _ = Pin::new(&mut writer).poll_flush(&mut context)?;
        self.writer = Some(writer);
        Ok(())
    }
}

/// Reads a connection until it closes or its runtime ends.
struct ReadLoop {
    shared: Arc<Shared>,
    reader: Reader,
    buffer: ReadBuffer,
}

impl ReadLoop {
    async fn run(mut self) {
        let gone = self.shared.gone.clone();
        let mut gone = pin!(gone.cancelled());
        let error = poll_fn(|context| {
            if gone.as_mut().poll(context).is_ready() {
                return Poll::Ready(lost());
            }
            self.poll(context)
        });
        let error = error.await;
        self.shared.fail(&error);
    }

    /// Reads and dispatches frames until the socket has no more bytes. Ready when the connection is broken.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<RedisError> {
        let mut state = self.shared.state();
        if !state.read_loop.will_wake(context.waker()) {
            state.read_loop.clone_from(context.waker());
        }
        if let Err(error) = state.flush() {
            return Poll::Ready(error);
        }
        drop(state);
        loop {
            if let Err(error) = ready!(self.buffer.read(&mut self.reader, context)) {
                return Poll::Ready(error.into());
            }
            if let Err(error) = self.buffer.dispatch(&self.shared) {
                return Poll::Ready(error);
            }
        }
    }
}

impl Drop for ReadLoop {
    /// Fails the callers if the runtime ends and drops this task.
    fn drop(&mut self) {
        self.shared.fail(&lost());
    }
}

/// Bytes that were read and not yet dispatched.
struct ReadBuffer {
    bytes: Vec<u8>,
    filled: usize,
    /// How far the first frame has been scanned.
    scanner: FrameScanner,
    /// Whether arrays may be messages (RESP2).
    is_subscribed: bool,
    on_message: Option<OnMessage>,
}

impl ReadBuffer {
    fn read(&mut self, reader: &mut Reader, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.filled == self.bytes.len() {
            self.bytes.resize(self.filled * 2, 0);
        }
        let mut buffer = ReadBuf::new(&mut self.bytes[self.filled..]);
        ready!(Pin::new(reader).poll_read(context, &mut buffer))?;
        let count = buffer.filled().len();
        self.filled += count;
        Poll::Ready(if count == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) })
    }

    /// Passes every complete frame to its receiver.
    fn dispatch(&mut self, shared: &Shared) -> RedisResult<()> {
        let mut done = 0;
        let is_ready = shared.handshake_is_done.load(Ordering::Relaxed);
        let limits = if is_ready { Limits::READY } else { Limits::HANDSHAKE };
        while let Some(length) = self.scanner.end(&self.bytes[done..self.filled], limits)? {
            let frame = resp::parse(&self.bytes[done..done + length], self.is_subscribed)?;
            self.scanner = FrameScanner::default();
            done += length;
            match frame {
                Frame::Reply(value) => shared.reply(value)?,
                Frame::Message { channel, message } => {
                    if let Some(on_message) = &self.on_message {
                        on_message(&channel, &message);
                    }
                }
                Frame::Other => {}
            }
        }
        self.bytes.copy_within(done..self.filled, 0);
        self.filled -= done;
        if self.filled == 0 && self.bytes.len() > MAX_KEPT_BUFFER {
            self.bytes = vec![0; BUFFER];
        }
        Ok(())
    }
}

fn lost() -> RedisError {
    io::Error::new(io::ErrorKind::ConnectionReset, "the connection is lost").into()
}

#[cfg(test)]
mod tests;
