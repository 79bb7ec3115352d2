//! The signals that are heard, and handed on to the command.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use crate::failure::Failure;

/// What is handed on.
const FORWARDED: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// Hears the signals from when it is made: until then they end the process.
pub(crate) struct Signals(Vec<(Signal, Stream)>);

impl Signals {
    pub(crate) fn new() -> io::Result<Self> {
        let listen = |which: Signal| Ok((which, stream(which)?));
        FORWARDED.into_iter().map(listen).collect::<io::Result<_>>().map(Self)
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|cx| {
            for (which, stream) in &mut self.0 {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*which);
                }
            }
            Poll::Pending
        })
        .await
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

/// Hears one kind of signal.
pub(crate) fn stream(which: Signal) -> io::Result<Stream> {
    signal(SignalKind::from_raw(which.as_raw()))
}

/// Whether a signal asks its receiver to end.
pub(crate) fn ends(signal: Signal) -> bool {
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT].contains(&signal)
}
