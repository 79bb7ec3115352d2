//! Finds the programs of servers.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

use super::StartError;

/// The directories that are searched for servers' programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binaries(Vec<PathBuf>);

impl Binaries {
    /// Returns the directories of `PATH`, then those of `PostgreSQL` on Debian, newest version first.
    pub fn installed() -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
        let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let mut versions: Vec<PathBuf> = versions.map(|entry| entry.path()).collect();
        // Compares numbers: as text, 9 would be newer than 16.
        versions.sort_by_key(|dir| {
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let version: Option<Vec<u32>> = name.split('.').map(|part| part.parse().ok()).collect();
            Reverse(version)
        });
        dirs.extend(versions.into_iter().map(|dir| dir.join("bin")));
        Self(dirs)
    }

    /// Returns these directories only.
    pub fn within(dirs: impl IntoIterator<Item = PathBuf>) -> Self {
        Self(dirs.into_iter().collect())
    }

    /// Returns the path of a server that `./check servers` downloads to `target/servers`, or to the directory in the
    /// environment variable `LOCKKEEPER_SERVERS`.
    ///
    /// # Errors
    ///
    /// If it does not exist.
    pub fn downloaded(server: &str, program: &str) -> Result<PathBuf, StartError> {
        let dir = std::env::var_os("LOCKKEEPER_SERVERS").map(PathBuf::from);
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        // Relative to the workspace, where `./check` runs: Cargo runs tests in the directory of their crate.
        let dir = workspace.join(dir.unwrap_or_else(|| "target/servers".into()));
        let path = dir.join(server).join(program);
        if path.is_file() {
            return Ok(path);
        }
        Err(StartError(format!("{} is missing: run `./check servers`", path.display())))
    }

    /// Finds a program.
    ///
    /// # Errors
    ///
    /// If it is in none of the directories. The message names the `package` to install.
    pub fn find(&self, program: &str, package: &str) -> Result<PathBuf, StartError> {
        let mut paths = self.0.iter().map(|dir| dir.join(program));
        paths.find(|path| path.is_file()).ok_or_else(|| {
            StartError(format!("{program} is not installed: try `apt-get install {package}`"))
        })
    }
}
