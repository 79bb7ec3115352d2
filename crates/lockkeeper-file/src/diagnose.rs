//! What makes locks in a directory unsafe.

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

/// Looks for what makes locks in the directory of a `file:` URL wrong. The directory is made if it is missing.
///
/// # Errors
///
/// [`Config`](lockkeeper_core::ErrorKind::Config) for a wrong URL. All else is a finding.
pub fn diagnose(url: &str) -> Result<Vec<Finding>> {
    let (options, dir) = config::parse(url)?;
    let shown = dir.display();
    let store = match options.open(&dir) {
        Ok(store) => store,
        Err(error) => {
            return Ok(vec![refused(&error, &dir)]);
        }
    };
    let mut findings = vec![Finding::ok(format!("the directory {shown} can be written to"))];
    let dir = store.store.dir.path();
    findings.push(permissions(dir));
    findings.extend(parents(dir));
    findings.extend(file_system(dir));
    findings.push(notices(&store));
    findings.push(lifetime::diagnose(dir));
    Ok(findings)
}

/// Why the store cannot be opened, as `File::open` says it.
fn refused(error: &Error, dir: &Path) -> Finding {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let inner = source.and_then(io::Error::get_ref);
    if let Some(reason) = inner.and_then(|inner| inner.downcast_ref::<Unsafe>()) {
        let what = format!("the directory {} is not safe: {}", dir.display(), reason.what);
        return Finding::fail(what, reason.advice.clone());
    }
    let advice = "make it a directory that this user may write to, or name another one";
    Finding::fail(error.to_string(), advice)
}

fn permissions(dir: &Path) -> Finding {
    let found = match fs::metadata(dir) {
        Ok(found) => found,
        Err(error) => return Finding::fail(format!("the directory: {error}"), "look at it"),
    };
    let mode = found.mode() & 0o7777;
    if mode & 0o022 != 0 {
        // With the sticky bit, or the store would not have been opened.
        return Finding::warn(
            format!("others may create files in the directory (mode {mode:04o})"),
            "they can keep a lock from being used by creating its file first: chmod 0700",
        );
    }
    if mode & 0o055 != 0 {
        return Finding::warn(
            format!("others may read the directory (mode {mode:04o})"),
            "they see the names of locks, and could hold up those who look: chmod 0700",
        );
    }
    Finding::ok(format!("only its owner may use the directory (mode {mode:04o})"))
}

/// Warns of the first directory above the store's in which others can move it away. The store then recreates it, and
/// holders learn of that with their next renewal.
fn parents(dir: &Path) -> Option<Finding> {
    dir.ancestors().skip(1).find_map(|parent| {
        let found = fs::metadata(parent).ok()?;
        let (owner, mode) = (found.uid(), found.mode() & 0o7777);
        let shown = parent.display();
        if !is_trusted(owner) {
            return Some(Finding::warn(
                format!("{shown}, above the directory, belongs to user {owner}"),
                "that user can move the directory away: use one below directories of this user or root",
            ));
        }
        (mode & 0o022 != 0 && mode & 0o1000 == 0).then(|| {
            Finding::warn(
                format!("others may write to {shown}, above the directory (mode {mode:04o})"),
                format!("they can move the directory away: chmod go-w {shown}, or use another one"),
            )
        })
    })
}

#[cfg(target_os = "linux")]
fn file_system(dir: &Path) -> Option<Finding> {
    let kind = rustix::fs::statfs(dir).ok()?.f_type;
    // The kernel's numbers are 32 bits, whatever the type that they come in.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "32 bits are all")]
    Some(of_file_system(kind as u32))
}

/// What a file system of this magic number, as in `statfs(2)`, is worth.
#[cfg(target_os = "linux")]
fn of_file_system(magic: u32) -> Finding {
    let name = match magic {
        0x6969 => "NFS",
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => "SMB",
        0x0102_1997 => "9p",
        0x6573_5546 => "FUSE",
        0x00c3_6400 => "Ceph",
        _ => return Finding::ok("the file system is a local one"),
    };
    Finding::warn(
        format!("the directory is on {name}"),
        "locks may not exclude other machines there, and changes are not told: use a local directory, or \
         Redis for locks between machines",
    )
}

#[cfg(not(target_os = "linux"))]
fn file_system(_: &Path) -> Option<Finding> {
    None
}

fn notices(store: &File) -> Finding {
    if store.store.watcher.is_some() {
        return Finding::ok("waiters are told of changes");
    }
    Finding::warn(
        "waiters are not told of changes and look now and then",
        "leave polling=on out, and see that the user is below fs.inotify.max_user_instances",
    )
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use lockkeeper_core::Severity;

    use super::*;

    // There is no NFS to be had in a test; the numbers are those of linux/magic.h.
    #[test]
    fn file_systems_of_other_machines_are_told_of() {
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
