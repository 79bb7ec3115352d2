//! Wall clocks for test servers that differ from this machine's.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use tempfile::TempDir;

use super::StartError;

/// The wall clock of a server or another process, which a test can set. Clones are handles to the same clock.
///
/// A library that is preloaded into the process shifts its `CLOCK_REALTIME`. [`ServerClock::new`] compiles the library,
/// so a C compiler must be installed.
///
/// ```
/// use lockkeeper_testkit::server::{RedisServer, ServerClock};
///
/// let clock = ServerClock::new().unwrap();
/// let redis = RedisServer::builder().clock(&clock).start_or_panic();
/// let seconds = || redis.command(&["TIME"]).lines().next().unwrap().parse::<i64>().unwrap();
/// let before = seconds();
/// clock.set_ahead(3_600_000_000);
/// assert!(seconds() >= before + 3600);
/// ```
#[derive(Debug, Clone)]
pub struct ServerClock(Arc<Shim>);

#[derive(Debug)]
struct Shim {
    dir: TempDir,
    file: fs::File,
}

impl ServerClock {
    /// Creates a clock that agrees with this machine's.
    ///
    /// # Errors
    ///
    /// If no C compiler is installed.
    pub fn new() -> Result<Self, StartError> {
        let made = Self::make();
        made.map_err(|e| {
            StartError(format!("cannot build the clock shim: {e} (is a C compiler installed?)"))
        })
    }

    fn make() -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("lockkeeper-clock-").tempdir()?;
        let source = dir.path().join("shim.c");
        fs::write(&source, include_str!("clock_shim.c"))?;
        let mut compiler = Command::new("cc");
        compiler
            .args(["-O1", "-shared", "-fPIC", "-o"])
            .arg(dir.path().join("shim.so"))
            .arg(&source);
        let done = compiler.output()?;
        if !done.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&done.stderr).into_owned()));
        }
        let file = fs::File::create(dir.path().join("ahead"))?;
        file.write_all_at(&0_i64.to_ne_bytes(), 0)?;
        Ok(Self(Arc::new(Shim { dir, file })))
    }

    /// Sets by how many microseconds it is ahead of this machine's clock. Takes effect at once, also in a running server.
    ///
    /// # Panics
    ///
    /// If its file cannot be written.
    pub fn set_ahead(&self, micros: i64) {
        self.0
            .file
            .write_all_at(&micros.to_ne_bytes(), 0)
            .expect("the clock's file can be written");
    }

    /// Returns the environment variables with which a process runs on this clock.
    pub fn environment(&self) -> [(&'static str, PathBuf); 2] {
        let dir = self.0.dir.path();
        [("LD_PRELOAD", dir.join("shim.so")), ("LOCKKEEPER_CLOCK", dir.join("ahead"))]
    }
}
