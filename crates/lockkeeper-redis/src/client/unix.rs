//! Unix sockets.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use lockkeeper_core::{Error, Result};
use tokio::net::UnixStream;

use super::io::{Reader, Writer};
use crate::error::{config, io as io_error, unavailable};

/// Returns whether this platform has Unix sockets, as an error if not.
#[expect(clippy::unnecessary_wraps, reason = "elsewhere it is an error")]
pub(crate) fn check_support() -> Result<()> {
    Ok(())
}

/// Connects to the socket at a path.
pub(super) async fn connect(path: &Path) -> Result<(Reader, Writer)> {
    let stream = UnixStream::connect(path).await.map_err(|error| explain(path, error))?;
    let (reader, writer) = stream.into_split();
    Ok((Box::new(reader), Box::new(writer)))
}

/// Translates an error to one that states what to do. The caller adds the path.
fn explain(path: &Path, error: io::Error) -> Error {
    let is_other_file =
        || std::fs::metadata(path).is_ok_and(|found| !found.file_type().is_socket());
    let explained = match error.kind() {
        io::ErrorKind::NotFound => unavailable(
            "no such socket: check the path in the URL, and that the server runs with this path as its setting unixsocket",
        ),
        io::ErrorKind::PermissionDenied => config(
            "no permission to open the socket: this user must be able to write to it and to enter its directory \
             (set unixsocketperm on the server, or add the user to its group)",
        ),
        io::ErrorKind::InvalidInput => {
            config("the path is too long for a Unix socket: choose a shorter one (unixsocket)")
        }
        _ if is_other_file() => {
            config("not a Unix socket: use the path of the server's setting unixsocket")
        }
        io::ErrorKind::ConnectionRefused => {
            unavailable("no server listens on this socket: start the server")
        }
        _ => return io_error(error),
    };
    explained.with_source(error)
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::ErrorKind;

    use super::*;

    #[test]
    fn a_lack_of_permission_is_a_config_error_that_names_the_setting() {
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let error = explain(Path::new("/run/redis.sock"), denied);
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("unixsocketperm"), "{error}");
    }
}
