//! Systems without inotify: the engine polls with backoff.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::FileEvents;

/// Has no values.
#[derive(Debug)]
pub(crate) struct Watcher(Infallible);

/// Has no values.
#[derive(Debug)]
pub(crate) struct Listener(Infallible);

impl Watcher {
    pub(crate) fn start() -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn watch_dir(&self, _dir: &Path) {
        match self.0 {}
    }

    pub(crate) fn listen(&self, _path: &Path) -> io::Result<Listener> {
        match self.0 {}
    }
}

impl Listener {
    pub(crate) fn events(&self) -> &Arc<FileEvents> {
        match self.0 {}
    }

    pub(crate) fn has_ended(&self) -> bool {
        match self.0 {}
    }
}
