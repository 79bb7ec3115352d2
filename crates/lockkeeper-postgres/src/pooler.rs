//! Finding out whether a pooler stands between us and the server.
//!
//! A pooler that hands a session to another client after each transaction grants one lock to two
//! (measured with `PgBouncer`). It cannot be asked what it is, but it gives us away: the process id that
//! it told us at the start, which is there for cancelling, is not that of the session.
//!
//! The driver keeps that id to itself. It writes it into a cancel request, though, and does not mind
//! where that goes: it goes into a buffer here.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::CancelToken;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

/// The process id that whoever we are connected to has told us; `None` if it told none.
pub(crate) async fn announced_pid(token: &CancelToken) -> Option<i32> {
    let tap = Tap::default();
    token.cancel_query_raw(tap.clone(), tap.clone()).await.ok()?;
    let written = tap.0.lock().unwrap_or_else(PoisonError::into_inner);
    // The request ends with the process id and the key. Before it there may be a request for TLS.
    let id = written.len().checked_sub(8)?;
    Some(i32::from_be_bytes(written[id..id + 4].try_into().ok()?))
}

/// A stream that remembers what is written, answers everything with yes, and is its own TLS.
#[derive(Clone, Default)]
struct Tap(Arc<Mutex<Vec<u8>>>);

impl AsyncRead for Tap {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        buffer.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Tap {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl TlsStream for Tap {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl TlsConnect<Tap> for Tap {
    type Stream = Tap;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<Tap>>;

    fn connect(self, _: Tap) -> Self::Future {
        std::future::ready(Ok(self))
    }
}
