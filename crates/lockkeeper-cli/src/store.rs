//! The URL of the store, the default store, and opening it.

use lockkeeper::Keeper;

use crate::args;
use crate::failure::Failure;

/// The environment variable that contains the URL of the store.
pub(crate) const VARIABLE: &str = "LOCKKEEPER_STORE";

/// Returns the URL of the store. Without one, creates the default directory and returns its URL.
pub(crate) fn url(store: &args::Store) -> Result<String, Failure> {
    if let Some(url) = &store.url {
        return non_empty(url, "--store");
    }
    match std::env::var(VARIABLE) {
        Ok(url) => non_empty(&url, VARIABLE),
        Err(std::env::VarError::NotPresent) => default::url(),
        Err(_) => Err(Failure::usage(format!("{VARIABLE} is not valid UTF-8"))),
    }
}

fn non_empty(url: &str, by: &str) -> Result<String, Failure> {
    if url.is_empty() {
        let message = format!("{by} is empty: set it to a URL such as redis://host/, or omit it");
        return Err(Failure::usage(message));
    }
    Ok(url.to_owned())
}

/// Opens the store for `run`. On a file store the command inherits the lock file (`inherit=on`): if this process is
/// killed, no other process acquires the lock before the command is dead.
pub(crate) async fn open_for_run(mut url: String) -> Result<Keeper, Failure> {
    if is_file(&url) && !url.contains("inherit=") {
        url.push(if url.contains('?') { '&' } else { '?' });
        url.push_str("inherit=on");
    }
    Ok(lockkeeper::open(&url).await?)
}

/// Returns whether a URL is that of a file store.
pub(crate) fn is_file(url: &str) -> bool {
    url.split_once(':').is_some_and(|(scheme, _)| scheme.eq_ignore_ascii_case("file"))
}

/// Opens the store.
pub(crate) async fn open(store: &args::Store) -> Result<Keeper, Failure> {
    Ok(lockkeeper::open(&url(store)?).await?)
}

#[cfg(not(feature = "file"))]
mod default {
    use super::Failure;

    pub(super) fn url() -> Result<String, Failure> {
        Err(Failure::usage("no store given, and this build has no file: stores: pass --store URL"))
    }
}

#[cfg(feature = "file")]
mod default {
    use std::fmt::Write as _;
    use std::fs::{self, DirBuilder};
    use std::io;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
    use std::path::{Path, PathBuf};

    use super::Failure;

    /// Returns the `file:` URL of the directory that all processes of this user share, in any login session.
    pub(super) fn url() -> Result<String, Failure> {
        let dir = dir()?;
        ready(&dir).map_err(|why| {
            let advice = "or use another directory with --store file:/a/directory";
            Failure::unavailable(format!("file: open \"{}\": {why}, {advice}", dir.display()))
        })?;
        let mut url = "file:".to_owned();
        for byte in dir.as_os_str().as_bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' => {
                    url.push(char::from(*byte));
                }
                _ => drop(write!(url, "%{byte:02X}")),
            }
        }
        Ok(url)
    }

    /// Returns the default directory. It must be one in which no files are removed, because a removed lock file no longer
    /// excludes. `XDG_RUNTIME_DIR` is removed when the user's last session ends (`pam_systemd(8)`), and old files are removed
    /// from directories for temporary files (`tmpfiles.d(5)`).
    fn dir() -> Result<PathBuf, Failure> {
        if rustix::process::geteuid().is_root() {
            // Independent of the environment, so that cron, sudo and a login shell agree. BSD systems have no /run.
            let run = Path::new("/run");
            return Ok(if run.is_dir() { run } else { Path::new("/var/run") }.join("lockkeeper"));
        }
        let path = |name| std::env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
        let home = || path("HOME").map(|home| home.join(".local/state"));
        let state = path("XDG_STATE_HOME").or_else(home);
        let state = state.ok_or_else(|| {
            Failure::usage(
                "no default directory for locks, because neither XDG_STATE_HOME nor HOME is an absolute path: set \
                 HOME, or select a store with --store file:/a/directory or LOCKKEEPER_STORE",
            )
        })?;
        Ok(state.join("lockkeeper"))
    }

    /// Creates the directory if it is missing, and checks that no other user can access it.
    fn ready(dir: &Path) -> Result<(), String> {
        let created = DirBuilder::new().mode(0o700).recursive(true).create(dir);
        if let Err(error) = created
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(format!("{error}: create it"));
        }
        let found = fs::symlink_metadata(dir).map_err(|error| error.to_string())?;
        if !found.is_dir() {
            return Err("not a directory: remove it".to_owned());
        }
        if found.uid() != rustix::process::geteuid().as_raw() {
            return Err(format!("it belongs to user {}: change its owner", found.uid()));
        }
        if found.mode() & 0o077 != 0 {
            return Err("other users can access it: set its mode to 0700".to_owned());
        }
        Ok(())
    }
}
