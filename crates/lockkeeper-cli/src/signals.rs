//! The signals that are heard, and handed on to the command.

use std::fs;
use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, Waker};

use nix::sys::signal::SigSet;
use rustix::process::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use crate::failure::Failure;

/// What is handed on.
const FORWARDED: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// Hears the signals from when it is made: until then they end the process.
///
/// What was ignored when the process began stays ignored, here and in the command: that is how `nohup` and
/// `&` in a script keep HUP and INT away.
pub(crate) struct Signals(Vec<(Signal, Stream)>);

impl Signals {
    pub(crate) fn new() -> io::Result<Self> {
        // A signal in the middle of a registration would be swallowed: signal-hook-registry (1.4, `register`) installs
        // its handler a moment before that knows what to call. A blocked signal is delivered after the registration.
        SigSet::all().thread_block().map_err(io::Error::from)?;
        let ignored = ignored();
        let heard = FORWARDED.into_iter().filter(|signal| ignored & bit(*signal) == 0);
        let listen = |which: Signal| Ok((which, stream(which)?));
        let streams = heard.map(listen).collect::<io::Result<_>>()?;
        // Whoever started us may have blocked them, and nothing would be heard.
        SigSet::all().thread_unblock().map_err(io::Error::from)?;
        Ok(Self(streams))
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|cx| self.poll(cx).map_or(Poll::Pending, Poll::Ready)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Option<Signal> {
        let mut heard = self.0.iter_mut();
        heard.find_map(|(which, stream)| stream.poll_recv(cx).is_ready().then_some(*which))
    }

    /// One that has come already.
    pub(crate) fn pending(&mut self) -> Option<Signal> {
        self.poll(&mut Context::from_waker(Waker::noop()))
    }

    /// The output of a future, unless a signal comes before.
    pub(crate) async fn unless<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            output = work => Ok(output),
            signal = self.next() => Err(Failure::signal(signal)),
        }
    }
}

/// The signals that this process ignores, one bit each; none where that is not known.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn bit(signal: Signal) -> u64 {
    1 << (signal.as_raw() - 1)
}

/// Hears one kind of signal.
pub(crate) fn stream(which: Signal) -> io::Result<Stream> {
    signal(SignalKind::from_raw(which.as_raw()))
}

/// Whether a signal asks its receiver to end.
pub(crate) fn ends(signal: Signal) -> bool {
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT].contains(&signal)
}
