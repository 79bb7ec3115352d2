//! Checks a directory for problems that make its locks unsafe.

mod lifetime;

use std::error::Error as _;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use lockkeeper_core::{Error, Finding, Result};

use crate::backend::File;
use crate::config;
use crate::dir::{Unsafe, is_trusted};

/// Checks the directory of a `file:` URL for problems that make its locks unsafe. Creates the directory if it is missing.
///
/// # Errors
///
/// [`Config`](lockkeeper_core::ErrorKind::Config) for an invalid URL. Every other problem is a finding.
pub fn diagnose(url: &str) -> Result<Vec<Finding>> {
    let (options, dir) = config::parse(url)?;
    let shown = dir.display();
    let store = match options.open(&dir) {
        Ok(store) => store,
        Err(error) => {
            return Ok(vec![refused(&error, &dir)]);
        }
    };
    let mut findings = vec![Finding::ok(format!("the directory {shown} is writable"))];
    let dir = store.store.dir.path();
    findings.push(permissions(dir));
    findings.extend(parents(dir));
    findings.extend(file_system(dir));
    findings.push(notifications(&store));
    findings.push(lifetime::diagnose(dir));
    Ok(findings)
}

/// Turns the error of `File::open` into a finding.
fn refused(error: &Error, dir: &Path) -> Finding {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let inner = source.and_then(io::Error::get_ref);
    if let Some(reason) = inner.and_then(|inner| inner.downcast_ref::<Unsafe>()) {
        let what = format!("the directory {} is not safe: {}", dir.display(), reason.what);
        return Finding::fail(what, reason.advice.clone());
    }
    let advice = "make it a directory that this user may write to, or use another one";
    Finding::fail(error.to_string(), advice)
}

fn permissions(dir: &Path) -> Finding {
    let found = match fs::metadata(dir) {
        Ok(found) => found,
        Err(error) => {
            return Finding::fail(
                format!("cannot stat the directory: {error}"),
                "check that it exists",
            );
        }
    };
    let mode = found.mode() & 0o7777;
    if mode & 0o022 != 0 {
        // It has the sticky bit, because `open` accepted it.
        return Finding::warn(
            format!("others may create files in the directory (mode {mode:04o})"),
            "they can block a lock by creating its file first: chmod 0700",
        );
    }
    if mode & 0o055 != 0 {
        return Finding::warn(
            format!("others may read the directory (mode {mode:04o})"),
            "they can see the names of locks, and block inspection by locking the directory: chmod 0700",
        );
    }
    Finding::ok(format!("only its owner may use the directory (mode {mode:04o})"))
}

/// Warns of the first parent directory in which other users can move the store's directory. If one does, the store creates
/// the directory again, and holders lose their locks.
fn parents(dir: &Path) -> Option<Finding> {
    dir.ancestors().skip(1).find_map(|parent| {
        let found = fs::metadata(parent).ok()?;
        let (owner, mode) = (found.uid(), found.mode() & 0o7777);
        let shown = parent.display();
        if !is_trusted(owner) {
            return Some(Finding::warn(
                format!("{shown}, above the directory, belongs to user {owner}"),
                "that user can move the directory: use one below directories of this user or root",
            ));
        }
        (mode & 0o022 != 0 && mode & 0o1000 == 0).then(|| {
            Finding::warn(
                format!("others may write to {shown}, above the directory (mode {mode:04o})"),
                format!("they can move the directory: chmod go-w {shown}, or use another one"),
            )
        })
    })
}

#[cfg(target_os = "linux")]
fn file_system(dir: &Path) -> Option<Finding> {
    let kind = rustix::fs::statfs(dir).ok()?.f_type;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "magic numbers have 32 bits, in a wider type"
    )]
    Some(of_file_system(kind as u32))
}

/// Checks the type of a file system by its magic number (statfs(2)).
#[cfg(target_os = "linux")]
fn of_file_system(magic: u32) -> Finding {
    let name = match magic {
        0x6969 => "NFS",
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => "SMB",
        0x0102_1997 => "9p",
        0x6573_5546 => "FUSE",
        0x00c3_6400 => "Ceph",
        _ => return Finding::ok("the file system is local"),
    };
    Finding::warn(
        format!("the directory is on {name}"),
        "locks may not exclude other machines there, and waiters are not notified: use a local directory, or \
         Redis for locks between machines",
    )
}

#[cfg(not(target_os = "linux"))]
fn file_system(_: &Path) -> Option<Finding> {
    None
}

fn notifications(store: &File) -> Finding {
    if store.store.watcher.is_some() {
        return Finding::ok("waiters are notified of changes");
    }
    Finding::warn(
        "waiters are not notified of changes, and poll",
        "remove polling=on, and check that the user is below fs.inotify.max_user_instances",
    )
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use lockkeeper_core::Severity;

    use super::*;

    // A test cannot mount NFS. The numbers are those of linux/magic.h.
    #[test]
    fn network_file_systems_are_warned_of() {
        let remote =
            [(0x6969, "NFS"), (0xff53_4d42, "SMB"), (0xfe53_4d42, "SMB"), (0x6573_5546, "FUSE")];
        for (magic, name) in remote {
            let finding = of_file_system(magic);
            assert_eq!(finding.severity, Severity::Warn, "{name}");
            assert!(finding.what.contains(name) && finding.advice.is_some(), "{finding:?}");
        }
        let local = [
            (0xef53, "ext4"),
            (0x5846_5342, "xfs"),
            (0x0102_1994, "tmpfs"),
            (0x794c_7630, "overlay"),
        ];
        for (magic, name) in local {
            assert_eq!(of_file_system(magic).severity, Severity::Ok, "{name}");
        }
    }
}
