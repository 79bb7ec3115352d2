//! Checks whether the system removes the files of a directory while locks are held.

use std::path::{Path, PathBuf};

use lockkeeper_core::Finding;

/// Warns if the directory is below one whose files the system removes.
pub(crate) fn diagnose(dir: &Path) -> Finding {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let of_session = runtime.filter(|dir| dir.is_absolute()).into_iter();
    let of_session = of_session.chain(["/run/user".into()]).map(|dir| (dir, SESSION));
    let temporary = [std::env::temp_dir(), "/tmp".into(), "/var/tmp".into()];
    let temporary = temporary.into_iter().map(|dir| (dir, TEMPORARY));
    let shared = [("/dev/shm".into(), SHARED_MEMORY)];
    let removed: Vec<_> = of_session.chain(temporary).chain(shared).collect();
    of_path(&dir, &removed)
}

const SESSION: &str = "which is removed when the user's last session ends";
const TEMPORARY: &str = "where old files are removed, also those of held locks";
const SHARED_MEMORY: &str = "where a user's files are removed when the user logs out";

fn of_path(dir: &Path, removed: &[(PathBuf, &str)]) -> Finding {
    for (parent, why) in removed {
        // It may be a link, like /tmp on macOS.
        let real = parent.canonicalize().unwrap_or_else(|_| parent.clone());
        if dir.starts_with(&real) || dir.starts_with(parent) {
            return Finding::warn(
                format!("the directory is below {}, {why}", parent.display()),
                "a holder then loses its lock: use /run/lockkeeper (root), or a directory below the user's home",
            );
        }
    }
    Finding::ok("the system does not clean up the directory")
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::Severity;

    use super::*;

    #[test]
    fn directories_that_the_system_cleans_up_are_warned_of() {
        for (dir, why) in [
            ("/run/user/1000/lockkeeper", "last session ends"),
            ("/tmp/lockkeeper-0", "old files are removed"),
            ("/var/tmp/a/b", "old files are removed"),
            ("/dev/shm/locks", "logs out"),
        ] {
            let finding = diagnose(Path::new(dir));
            assert_eq!(finding.severity, Severity::Warn, "{dir}");
            assert!(finding.what.contains(why) && finding.advice.is_some(), "{finding:?}");
        }
        for dir in ["/run/lockkeeper", "/home/a/.local/state/lockkeeper", "/tmpfiles", "/run/users"]
        {
            assert_eq!(diagnose(Path::new(dir)).severity, Severity::Ok, "{dir}");
        }
    }

    #[test]
    fn the_directory_of_a_session_is_recognized_at_any_path() {
        let removed = [("/srv/session".into(), SESSION)];
        assert_eq!(of_path(Path::new("/srv/session/x"), &removed).severity, Severity::Warn);
        assert_eq!(of_path(Path::new("/srv/sessions"), &removed).severity, Severity::Ok);
    }
}
