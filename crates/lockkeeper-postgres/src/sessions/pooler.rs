//! Detects a connection pooler between the client and the server.
//!
//! A pooler in transaction mode gives a session to another client after each transaction, and so grants one lock to two
//! clients. A pooler announces its own process id for cancel requests when a client connects, and not that of the session.
//! Covered by `tests/store/refusals.rs`, with `PgBouncer`.
//!
//! The driver does not expose the announced id, but writes it into cancel requests. This module makes it write a cancel
//! request into a buffer.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::CancelToken;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

/// Returns the process id that was announced when the client connected, if any.
pub(crate) async fn announced_pid(token: &CancelToken) -> Option<i32> {
    let stream = RecordingStream::default();
    token.cancel_query_raw(stream.clone(), stream.clone()).await.ok()?;
    let written = stream.0.lock().unwrap_or_else(PoisonError::into_inner);
    // A cancel request ends with the process id and the secret. A request for TLS may precede it.
    let id = written.len().checked_sub(8)?;
    Some(i32::from_be_bytes(written[id..id + 4].try_into().ok()?))
}

/// A stream that records what is written, agrees to TLS, and is its own TLS stream.
#[derive(Clone, Default)]
struct RecordingStream(Arc<Mutex<Vec<u8>>>);

impl AsyncRead for RecordingStream {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        buffer.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for RecordingStream {
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

impl TlsStream for RecordingStream {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl TlsConnect<RecordingStream> for RecordingStream {
    type Stream = RecordingStream;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<RecordingStream>>;

    fn connect(self, _: RecordingStream) -> Self::Future {
        std::future::ready(Ok(self))
    }
}
