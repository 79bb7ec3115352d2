//! What makes locks in a directory wrong.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use lockkeeper_core::{Finding, Result};

use crate::backend::File;
use crate::{lifetime, url};

/// Looks for what makes locks in the directory of a `file:` URL wrong. The directory is made if it is missing.
///
/// # Errors
///
/// [`Config`](lockkeeper_core::ErrorKind::Config) for a wrong URL. All else is a finding.
pub fn examine(url: &str) -> Result<Vec<Finding>> {
    let (options, dir) = url::parse(url)?;
    let shown = dir.display();
    let store = match options.open(&dir) {
        Ok(store) => store,
        Err(error) => {
            let advice = "make it a directory that this user may write to, or name another one";
            return Ok(vec![Finding::fail(error.to_string(), advice)]);
        }
    };
    let mut findings = vec![Finding::ok(format!("the directory {shown} can be written to"))];
    findings.push(permissions(&store.store.dir));
    findings.extend(file_system(&store.store.dir));
    findings.push(notices(&store));
    findings.push(lifetime::examine(&store.store.dir));
    Ok(findings)
}

fn permissions(dir: &Path) -> Finding {
    let found = match fs::metadata(dir) {
        Ok(found) => found,
        Err(error) => return Finding::fail(format!("the directory: {error}"), "look at it"),
    };
    let mode = found.mode() & 0o7777;
    if found.uid() != rustix::process::geteuid().as_raw() {
        return Finding::warn(
            format!("the directory belongs to another user ({})", found.uid()),
            "its owner can take locks away: use a directory of this user's own",
        );
    }
    if mode & 0o022 != 0 {
        return Finding::warn(
            format!("others may write to the directory (mode {mode:04o})"),
            "they can take locks away: chmod 0700",
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
    use lockkeeper_core::Verdict;

    use super::*;

    // There is no NFS to be had in a test; the numbers are those of linux/magic.h.
    #[test]
    fn file_systems_of_other_machines_are_told_of() {
        let remote =
            [(0x6969, "NFS"), (0xff53_4d42, "SMB"), (0xfe53_4d42, "SMB"), (0x6573_5546, "FUSE")];
        for (magic, name) in remote {
            let finding = of_file_system(magic);
            assert_eq!(finding.verdict, Verdict::Warn, "{name}");
            assert!(finding.what.contains(name) && finding.advice.is_some(), "{finding:?}");
        }
        let local = [
            (0xef53, "ext4"),
            (0x5846_5342, "xfs"),
            (0x0102_1994, "tmpfs"),
            (0x794c_7630, "overlay"),
        ];
        for (magic, name) in local {
            assert_eq!(of_file_system(magic).verdict, Verdict::Ok, "{name}");
        }
    }
}
