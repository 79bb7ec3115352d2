//! Requests and answers on one connection.
//!
//! Whoever has a request writes it, there and then, on whatever thread that is: no task stands between a lock and
//! the network. A task of the connection's runtime, the *pump*, reads what comes back and gives it to whom it is for;
//! it also writes what the network would not take at once.

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

use crate::config::{Address, Config};
use crate::error::translate;
use crate::resp::{self, Limits, Said, Skim};
use crate::stream::{self, Reader, Writer};

/// How much is read at once, at first.
const BUFFER: usize = 16 * 1024;
/// A buffer that has grown beyond this is not kept.
const LARGE: usize = 16 * BUFFER;

/// Is called with the channel and the text of each message.
pub(crate) type Hear = Box<dyn Fn(&[u8], &[u8]) + Send>;

/// A connection for requests. It ends when it is dropped, or when the token is cancelled that it was opened with; if
/// it breaks, it cancels that itself.
pub(crate) struct Wire {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    gone: CancellationToken,
    /// Until then, answers must be small.
    handshake_is_done: AtomicBool,
}

struct State {
    /// None if it failed, or the connection has ended.
    writer: Option<Writer>,
    has_ended: bool,
    /// What the writer has yet to take.
    out: Vec<u8>,
    /// Who waits for an answer, in the order of the requests.
    waiting: VecDeque<oneshot::Sender<RedisResult<Value>>>,
    /// Wakes the pump.
    pump: Waker,
}

impl Wire {
    /// Connects, and logs in. Answers must be small until [`end_handshake`](Self::end_handshake). With RESP2, a connection that hears messages takes no requests but those about channels.
    pub(crate) async fn open(
        config: &Config,
        address: &Address,
        places: &[SocketAddr],
        protocol: ProtocolVersion,
        hear: Option<Hear>,
        gone: &CancellationToken,
    ) -> Result<Self> {
        let wire = Self::connect(config, address, places, protocol, hear, gone).await?;
        wire.log_in(config, protocol).await.map_err(translate)?;
        Ok(wire)
    }

    /// Connects to the first of the host's addresses that answers. Nothing has been said yet.
    pub(crate) async fn connect(
        config: &Config,
        address: &Address,
        places: &[SocketAddr],
        protocol: ProtocolVersion,
        hear: Option<Hear>,
        gone: &CancellationToken,
    ) -> Result<Self> {
        let (reader, writer) = stream::connect(config, address, places).await?;
        let state = State {
            writer: Some(writer),
            has_ended: false,
            out: Vec::new(),
            waiting: VecDeque::new(),
            pump: Waker::noop().clone(),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            gone: gone.clone(),
            handshake_is_done: AtomicBool::new(false),
        });
        let listens = hear.is_some() && protocol == ProtocolVersion::RESP2;
        let (bytes, skim) = (vec![0; BUFFER], Skim::default());
        let heard = Heard { bytes, filled: 0, skim, listens, hear };
        tokio::spawn(Pump { shared: shared.clone(), reader, heard }.run());
        Ok(Self { shared })
    }

    pub(crate) async fn log_in(
        &self,
        config: &Config,
        protocol: ProtocolVersion,
    ) -> RedisResult<()> {
        let password = config.password.as_deref();
        if protocol == ProtocolVersion::RESP3 {
            let mut hello = redis::cmd("HELLO");
            hello.arg(3);
            if let Some(password) = password {
                hello
                    .arg("AUTH")
                    .arg(config.username.as_deref().unwrap_or("default"))
                    .arg(password);
            }
            self.ask(&hello).await?;
        } else if let Some(password) = password {
            let mut auth = redis::cmd("AUTH");
            let asked = self.ask(auth.arg(&config.username).arg(password)).await;
            asked.map_err(|error| unquoted(not_admitted(error), config))?;
        }
        if config.database != 0 {
            self.ask(redis::cmd("SELECT").arg(config.database)).await?;
        }
        Ok(())
    }

    /// Allows large answers from now on. Call it when the server has proved to be what it should be.
    pub(crate) fn end_handshake(&self) {
        self.shared.handshake_is_done.store(true, Ordering::Relaxed);
    }

    /// Sends a command and awaits its answer, which may be an error, too.
    ///
    /// Once it is polled it is sent, and is obeyed even if nobody awaits the answer any more.
    pub(crate) async fn ask(&self, command: &Cmd) -> RedisResult<Value> {
        self.send(command).await?.extract_error()
    }

    /// The same, with errors within the answer left where they are.
    pub(crate) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        let (answer, answered) = oneshot::channel();
        self.shared.write(command, answer)?;
        answered.await.unwrap_or_else(|_| Err(lost()))
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Nothing has broken: what shares the token may go on.
        self.shared.end(&lost(), |_| {});
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, command: &Cmd, answer: oneshot::Sender<RedisResult<Value>>) -> RedisResult<()> {
        let mut state = self.state();
        if state.writer.is_none() {
            return Err(lost());
        }
        command.write_packed_command(&mut state.out);
        state.waiting.push_back(answer);
        let written = state.flush();
        drop(state);
        written.inspect_err(|error| self.fail(error))
    }

    /// Ends the connection because it is broken.
    fn fail(&self, why: &RedisError) {
        self.end(why, CancellationToken::cancel);
    }

    /// Ends the connection, unless it has ended: what has been written is all that was, and nobody is answered any
    /// more. `before` they hear of it, the token is seen to.
    fn end(&self, why: &RedisError, before: impl FnOnce(&CancellationToken)) {
        let mut state = self.state();
        if std::mem::replace(&mut state.has_ended, true) {
            return;
        }
        let writer = state.writer.take();
        let (waiting, pump) = (std::mem::take(&mut state.waiting), state.pump.clone());
        state.out = Vec::new();
        drop(state);
        drop(writer);
        before(&self.gone);
        for answer in waiting {
            let _ = answer.send(Err(why.clone()));
        }
        pump.wake();
    }
}

impl State {
    /// Writes what the network takes. When it takes more, the pump is woken. After an error nothing is written any more.
    fn flush(&mut self) -> RedisResult<()> {
        let Some(mut writer) = self.writer.take() else { return Err(lost()) };
        let mut context = Context::from_waker(&self.pump);
        let mut done = 0;
        while done < self.out.len() {
            match Pin::new(&mut writer).poll_write(&mut context, &self.out[done..])? {
                Poll::Ready(0) => return Err(lost()),
                Poll::Ready(count) => done += count,
                Poll::Pending => break,
            }
        }
        self.out.drain(..done);
        // What encrypts has a buffer of its own.
        let _ = Pin::new(&mut writer).poll_flush(&mut context)?;
        self.writer = Some(writer);
        Ok(())
    }
}

/// What reads a connection, for as long as its runtime lets it.
struct Pump {
    shared: Arc<Shared>,
    reader: Reader,
    heard: Heard,
}

impl Pump {
    async fn run(mut self) {
        let gone = self.shared.gone.clone();
        let mut gone = pin!(gone.cancelled());
        let why = poll_fn(|context| {
            if gone.as_mut().poll(context).is_ready() {
                return Poll::Ready(lost());
            }
            self.poll(context)
        });
        let why = why.await;
        self.shared.fail(&why);
    }

    /// Reads for as long as something comes. Is ready when the connection is no good any more.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<RedisError> {
        let mut state = self.shared.state();
        if !state.pump.will_wake(context.waker()) {
            state.pump.clone_from(context.waker());
        }
        if let Err(error) = state.flush() {
            return Poll::Ready(error);
        }
        drop(state);
        loop {
            if let Err(error) = ready!(self.heard.read(&mut self.reader, context)) {
                return Poll::Ready(error.into());
            }
            if let Err(error) = self.heard.sort(&self.shared) {
                return Poll::Ready(error);
            }
        }
    }
}

impl Drop for Pump {
    /// Its runtime may end before it does.
    fn drop(&mut self) {
        self.shared.fail(&lost());
    }
}

/// What has been read.
struct Heard {
    bytes: Vec<u8>,
    filled: usize,
    /// How far the first of it has been looked through for its end.
    skim: Skim,
    /// Whether arrays may be messages.
    listens: bool,
    hear: Option<Hear>,
}

impl Heard {
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

    /// Gives everything that has been said in full to whom it is for.
    fn sort(&mut self, shared: &Shared) -> RedisResult<()> {
        let mut done = 0;
        let is_ready = shared.handshake_is_done.load(Ordering::Relaxed);
        let limits = if is_ready { Limits::READY } else { Limits::HANDSHAKE };
        while let Some(length) = self.skim.end(&self.bytes[done..self.filled], limits)? {
            let said = resp::parse(&self.bytes[done..done + length], self.listens)?;
            self.skim = Skim::default();
            done += length;
            match said {
                Said::Answer(value) => {
                    let answer = shared.state().waiting.pop_front();
                    let answer = answer.ok_or((ErrorKind::Parse, "an answer to nothing"))?;
                    let _ = answer.send(Ok(value));
                }
                Said::Message { channel, message } => {
                    if let Some(hear) = &self.hear {
                        hear(&channel, &message);
                    }
                }
                Said::Other => {}
            }
        }
        self.bytes.copy_within(done..self.filled, 0);
        self.filled -= done;
        if self.filled == 0 && self.bytes.len() > LARGE {
            self.bytes = vec![0; BUFFER];
        }
        Ok(())
    }
}

fn lost() -> RedisError {
    io::Error::new(io::ErrorKind::ConnectionReset, "the connection is lost").into()
}

/// What servers of different versions say to a wrong password, in the words of one. One that does not know AUTH
/// quotes what it was sent, so that is left out.
fn not_admitted(error: RedisError) -> RedisError {
    let text = error.to_string().to_ascii_lowercase();
    if text.contains("unknown command") {
        return (ErrorKind::AuthenticationFailed, "the server does not know AUTH").into();
    }
    if error.code() == Some("ERR") && text.contains("password") {
        return (ErrorKind::AuthenticationFailed, "the password was refused").into();
    }
    error
}

/// An answer to the login, without the password that it may quote: a proxy that refuses a command may repeat it.
pub(crate) fn unquoted(error: RedisError, config: &Config) -> RedisError {
    let (Some(password), Some(detail)) = (config.password.as_deref(), error.detail()) else {
        return error;
    };
    if password.is_empty() || !detail.contains(password) {
        return error;
    }
    let code = error.code().unwrap_or("ERR");
    let reply = format!("-{code} {}\r\n", detail.replace(password, "***"));
    match redis::parse_redis_value(reply.as_bytes()).map(Value::extract_error) {
        Ok(Err(unquoted)) => unquoted,
        _ => (ErrorKind::AuthenticationFailed, "the login was refused").into(),
    }
}

#[cfg(test)]
mod tests;
