//! The signals that lockkeeper catches and forwards to the command.

use std::fs;
use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, Waker};

use nix::sys::signal::SigSet;
use rustix::process::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use crate::failure::Failure;

const FORWARDED: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// Streams of the forwarded signals. Until it is created, these signals end the process.
///
/// A signal that was ignored when the process started stays ignored, here and in the command: `nohup` and `&` in a
/// script depend on it.
pub(crate) struct Signals(Vec<(Signal, Stream)>);

impl Signals {
    pub(crate) fn new() -> io::Result<Self> {
        // Blocks signals during the registration, and so delays them. Otherwise a signal could be lost:
        // signal-hook-registry (1.4, `register`) installs its handler before it stores the action.
        SigSet::all().thread_block().map_err(io::Error::from)?;
        let ignored = ignored();
        let caught = FORWARDED.into_iter().filter(|signal| ignored & bit(*signal) == 0);
        let listen = |which: Signal| Ok((which, stream(which)?));
        let streams = caught.map(listen).collect::<io::Result<_>>()?;
        // Unblocks all signals, because the parent process may have blocked them.
        SigSet::all().thread_unblock().map_err(io::Error::from)?;
        Ok(Self(streams))
    }

    /// Waits for the next signal.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|cx| self.poll(cx).map_or(Poll::Pending, Poll::Ready)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Option<Signal> {
        let mut caught = self.0.iter_mut();
        caught.find_map(|(which, stream)| stream.poll_recv(cx).is_ready().then_some(*which))
    }

    /// Returns a signal that has already arrived.
    pub(crate) fn pending(&mut self) -> Option<Signal> {
        self.poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Returns the output of a future, or a failure if a signal arrives first.
    pub(crate) async fn unless<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            output = work => Ok(output),
            signal = self.next() => Err(Failure::signal(signal)),
        }
    }
}

/// Returns the signals that this process ignores, one bit each; none without `/proc`.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn bit(signal: Signal) -> u64 {
    1 << (signal.as_raw() - 1)
}

pub(crate) fn stream(which: Signal) -> io::Result<Stream> {
    signal(SignalKind::from_raw(which.as_raw()))
}

/// Returns whether a signal asks its receiver to terminate.
pub(crate) fn asks_to_terminate(signal: Signal) -> bool {
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT].contains(&signal)
}
