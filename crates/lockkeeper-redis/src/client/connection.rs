//! One connection: commands and their replies.
//!
//! The task that has a command writes it, on the thread that polls it: no other task is between a lock and the network.
//! A task of the connection's runtime, the *read loop*, reads replies and hands them to the callers; it also writes what
//! the network did not accept at once.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
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
use super::resp::{self, Frame, FrameScanner, Limits};
use super::settings::{Address, Settings};
use super::stream;
use crate::error::{ErrorClass, classify, unwrapped};

/// How much is read at once, at first.
const BUFFER: usize = 16 * 1024;
/// A buffer that has grown beyond this is not kept.
const MAX_KEPT_BUFFER: usize = 16 * BUFFER;

/// Receives the channel and the text of each message.
pub(crate) type OnMessage = Box<dyn Fn(&[u8], &[u8]) + Send>;

/// A connection to a server. It closes when it is dropped, or when the token `gone` is cancelled that it was opened with;
/// if it breaks, it cancels the token itself.
pub(crate) struct Connection {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    gone: CancellationToken,
    /// Until it is set, only small replies are accepted.
    handshake_is_done: AtomicBool,
}

struct State {
    /// `None` after it failed or the connection was closed.
    writer: Option<Writer>,
    is_closed: bool,
    /// Bytes that the writer has not accepted yet.
    unwritten: Vec<u8>,
    /// The callers that wait for a reply, in the order of their commands.
    waiting: VecDeque<oneshot::Sender<RedisResult<Value>>>,
    /// Wakes the read loop.
    read_loop: Waker,
}

impl Connection {
    /// Connects to the first of the host's addresses that answers, without logging in. Accepts only small replies until
    /// [`end_handshake`](Self::end_handshake). With RESP2, a connection that receives messages takes no commands but those
    /// about channels.
    pub(crate) async fn connect(
        settings: &Settings,
        address: &Address,
        ips: &[SocketAddr],
        protocol: ProtocolVersion,
        on_message: Option<OnMessage>,
        gone: &CancellationToken,
    ) -> Result<Self> {
        let (reader, writer) = stream::connect(settings, address, ips).await?;
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

    /// Accepts large replies from now on. Called when the server has proved to be the right one.
    pub(crate) fn end_handshake(&self) {
        self.shared.handshake_is_done.store(true, Ordering::Relaxed);
    }

    /// Sends a command and waits for its reply. An error reply is an error.
    ///
    /// The first poll sends it. The server executes it even if the caller is dropped after that.
    pub(crate) async fn query(&self, command: &Cmd) -> RedisResult<Value> {
        self.send(command).await?.extract_error()
    }

    /// Sends a command as [`query`](Self::query) does. An error that means that the connection is broken closes it.
    pub(crate) async fn execute(&self, command: &Cmd) -> RedisResult<Value> {
        let reply = self.send(command).await.and_then(|reply| match reply {
            Value::ServerError(error) => Err(error.into()),
            // A script that serves several requests returns an array; here it served one, which failed.
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

    /// Sends a command and waits for its reply, with errors within the reply left in place.
    pub(crate) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        let (reply, replied) = oneshot::channel();
        self.shared.write(command, reply)?;
        replied.await.unwrap_or_else(|_| Err(lost()))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // It did not break: connections that share the token may go on.
        self.shared.close(&lost(), |_| {});
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, command: &Cmd, reply: oneshot::Sender<RedisResult<Value>>) -> RedisResult<()> {
        let mut state = self.state();
        if state.writer.is_none() {
            return Err(lost());
        }
        command.write_packed_command(&mut state.unwritten);
        state.waiting.push_back(reply);
        let written = state.flush();
        drop(state);
        written.inspect_err(|error| self.fail(error))
    }

    /// Closes the connection because it broke.
    fn fail(&self, error: &RedisError) {
        self.close(error, CancellationToken::cancel);
    }

    /// Closes the connection, unless it is closed: nothing more is written, and all callers get `error`. Calls `before`
    /// with the token before they do.
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
        for reply in waiting {
            let _ = reply.send(Err(error.clone()));
        }
        read_loop.wake();
    }
}

impl State {
    /// Writes as much as the network accepts; the read loop wakes when it accepts more. After an error nothing is written
    /// any more.
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
        // A TLS stream has a buffer of its own.
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

    /// Reads as long as there are bytes. Ready when the connection broke.
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
    /// Its runtime may end before it does.
    fn drop(&mut self) {
        self.shared.fail(&lost());
    }
}

/// Bytes that were read and have not been dispatched.
struct ReadBuffer {
    bytes: Vec<u8>,
    filled: usize,
    /// How far the first frame has been scanned.
    scanner: FrameScanner,
    /// Whether arrays may be messages.
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

    /// Hands every complete frame to its receiver.
    fn dispatch(&mut self, shared: &Shared) -> RedisResult<()> {
        let mut done = 0;
        let is_ready = shared.handshake_is_done.load(Ordering::Relaxed);
        let limits = if is_ready { Limits::READY } else { Limits::HANDSHAKE };
        while let Some(length) = self.scanner.end(&self.bytes[done..self.filled], limits)? {
            let frame = resp::parse(&self.bytes[done..done + length], self.is_subscribed)?;
            self.scanner = FrameScanner::default();
            done += length;
            match frame {
                Frame::Reply(value) => {
                    let reply = shared.state().waiting.pop_front();
                    let reply = reply.ok_or((ErrorKind::Parse, "a reply to no command"))?;
                    let _ = reply.send(Ok(value));
                }
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
