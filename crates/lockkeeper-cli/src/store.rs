//! Which store, and the way to it.

use lockkeeper::Keeper;

use crate::args;
use crate::failure::Failure;

/// The environment variable that names the store.
pub(crate) const VARIABLE: &str = "LOCKKEEPER_STORE";

/// The URL of the store: as told, or that of the default directory, made ready.
pub(crate) fn url(store: &args::Store) -> Result<String, Failure> {
    if let Some(url) = &store.url {
        return given(url, "--store");
    }
    match std::env::var(VARIABLE) {
        Ok(url) => given(&url, VARIABLE),
        Err(std::env::VarError::NotPresent) => default::url(),
        Err(_) => Err(Failure::usage(format!("{VARIABLE} is not UTF-8"))),
    }
}

fn given(url: &str, by: &str) -> Result<String, Failure> {
    if url.is_empty() {
        let message = format!("{by} is empty: give a URL, as in redis://host/, or leave it out");
        return Err(Failure::usage(message));
    }
    Ok(url.to_owned())
}

/// Opens the store for one who holds locks on behalf of a command. Where locks end with the process, the
/// command has a part in them: should this process be killed, nobody else enters before the command is dead.
pub(crate) async fn open_for_a_command(mut url: String) -> Result<Keeper, Failure> {
    if is_file(&url) && !url.contains("inherit=") {
        url.push(if url.contains('?') { '&' } else { '?' });
        url.push_str("inherit=on");
    }
    Ok(lockkeeper::open(&url).await?)
}

/// Whether a URL names a directory.
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
        Err(Failure::usage("this build has no file: stores, so --store URL must be given"))
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

    /// The `file:` URL of the directory that all processes of this user share, whatever session they belong to.
    pub(super) fn url() -> Result<String, Failure> {
        let dir = dir()?;
        ready(&dir).map_err(|why| {
            let advice = "fix that, or name another directory with --store file:/a/directory";
            Failure::unavailable(format!("file: open \"{}\": {why}: {advice}", dir.display()))
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

    /// Not below `XDG_RUNTIME_DIR`, which is removed when the user's last session ends, and not in a directory for
    /// temporary files, which is tidied up: both take locks away from commands that still run.
    fn dir() -> Result<PathBuf, Failure> {
        if rustix::process::geteuid().is_root() {
            // Whatever the environment says: cron, sudo and a login shell must agree. BSD systems have no /run.
            let run = Path::new("/run");
            return Ok(if run.is_dir() { run } else { Path::new("/var/run") }.join("lockkeeper"));
        }
        let path = |name| std::env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
        let home = || path("HOME").map(|home| home.join(".local/state"));
        let state = path("XDG_STATE_HOME").or_else(home);
        let state = state.ok_or_else(|| {
            Failure::usage(
                "no default directory for locks, as neither XDG_STATE_HOME nor HOME is an absolute path: set HOME, \
                 or name a store with --store file:/a/directory or LOCKKEEPER_STORE",
            )
        })?;
        Ok(state.join("lockkeeper"))
    }

    /// Creates the directory if it is missing, and checks that no other user can use it.
    fn ready(dir: &Path) -> Result<(), String> {
        let created = DirBuilder::new().mode(0o700).recursive(true).create(dir);
        if let Err(error) = created
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error.to_string());
        }
        let found = fs::symlink_metadata(dir).map_err(|error| error.to_string())?;
        if !found.is_dir() {
            return Err("not a directory".to_owned());
        }
        if found.uid() != rustix::process::geteuid().as_raw() {
            return Err(format!("it belongs to user {}", found.uid()));
        }
        if found.mode() & 0o077 != 0 {
            return Err("other users may use it: its mode should be 0700".to_owned());
        }
        Ok(())
    }
}
