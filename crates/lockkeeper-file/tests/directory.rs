//! Directories that are removed or moved, and directories and files that other users can change.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::fs::{self, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{files, keeper, soon, store, url};
use lockkeeper_core::{ErrorKind, Severity};
use lockkeeper_file::{File, diagnose};
use rustix::fs::{FileType, Mode};

/// A user that is neither root nor the user of the tests.
const STRANGER: u32 = 12_345;

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Returns whether this is root, who can give files to another user. If not, reports the skipped check on stderr, past the
/// capture of the test harness.
fn is_root_for(check: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        not_run(check, "only root can give files to another user");
    }
    is_root
}

fn not_run(check: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "NOT RUN: {check}: {why}");
}

#[tokio::test]
async fn a_directory_that_was_removed_is_created_again_by_the_next_attempt() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    for round in 0..3 {
        let held = keeper.mutex("held").lock().await.unwrap();
        fs::remove_dir_all(dir.path()).unwrap();
        soon("the loss", held.lost()).await;
        let inspect = keeper.inspect().unwrap();
        assert!(inspect.list("").await.unwrap().is_empty(), "round {round}");
        assert!(inspect.show("held").await.unwrap().is_empty(), "round {round}");
        assert_eq!(inspect.break_lock("held").await.unwrap(), 0, "round {round}");
        assert_eq!(store.gc().await.unwrap(), 0, "round {round}");
        assert!(!dir.path().exists(), "inspection creates no directory");
        let guard = keeper.mutex("b").try_lock().await.unwrap().expect("a free lock");
        assert_eq!(fs::metadata(dir.path()).unwrap().permissions().mode() & 0o777, 0o700);
        let waiter = tokio::spawn({
            let mutex = keeper.mutex("b");
            async move { mutex.lock().await.unwrap() }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        guard.release().await.unwrap();
        soon("a waiter in the new directory", waiter).await.unwrap().release().await.unwrap();
        keeper.semaphore("c", 2).acquire().await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn waiters_acquire_the_lock_in_the_new_directory_after_a_removal() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    let held = keeper.mutex("a").lock().await.unwrap();
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let mutex = keeper.mutex("a");
            tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(20)).await;
    // A waiter may create its file again before the directory is empty.
    while fs::remove_dir_all(dir.path()).is_err() {}
    soon("the loss", held.lost()).await;
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap();
    }
}

#[tokio::test]
async fn a_holder_loses_its_lock_when_the_directory_is_moved() {
    let above = tempfile::tempdir().unwrap();
    let (dir, away) = (above.path().join("locks"), above.path().join("away"));
    let keeper = keeper(&File::open(&dir).unwrap());
    for _ in 0..2 {
        let held = keeper.mutex("a").lock().await.unwrap();
        // The holder listens by now.
        tokio::time::sleep(Duration::from_millis(50)).await;
        fs::rename(&dir, &away).unwrap();
        soon("the loss", held.lost()).await;
        let next = soon("the lock", keeper.mutex("a").lock()).await.unwrap();
        assert!(dir.join("a.lock").exists(), "the lock file is in the directory at the path");
        next.release().await.unwrap();
        fs::remove_dir_all(&away).unwrap();
    }
}

#[tokio::test]
async fn an_unsafe_directory_in_the_place_of_the_old_one_is_rejected() {
    let above = tempfile::tempdir().unwrap();
    let dir = above.path().join("locks");
    let mutex = keeper(&File::open(&dir).unwrap()).mutex("a");
    fs::remove_dir(&dir).unwrap();
    fs::create_dir(&dir).unwrap();
    chmod(&dir, 0o777);
    let error = mutex.lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("every user may write to it (mode 0777)"), "{error}");
    fs::remove_dir(&dir).unwrap();
    fs::create_dir(above.path().join("elsewhere")).unwrap();
    symlink(above.path().join("elsewhere"), &dir).unwrap();
    mutex.lock().await.unwrap_err();
    assert_eq!(files(&above.path().join("elsewhere")), [""; 0]);
    fs::remove_file(&dir).unwrap();
    mutex.lock().await.expect("created again").release().await.unwrap();
}

/// Asserts that `open` and `diagnose` reject a directory.
#[track_caller]
fn assert_rejected(dir: &Path, why: &str, advice: &str) {
    let error = File::open(dir).expect_err(why);
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    let said = error.to_string();
    assert!(said.starts_with(&format!("file: open \"{}\": ", dir.display())), "{said}");
    assert!(said.contains(why) && said.contains(advice), "not {why:?} and {advice:?}: {said}");
    let findings = diagnose(&url(dir)).unwrap();
    let [finding] = &findings[..] else { panic!("{findings:?}") };
    assert_eq!(finding.severity, Severity::Fail);
    assert!(finding.what.contains(why), "{finding:?}");
    assert!(finding.advice.as_deref().is_some_and(|said| said.contains(advice)), "{finding:?}");
}

#[test]
fn a_directory_writable_by_others_is_rejected_unless_it_is_sticky() {
    let above = tempfile::tempdir().unwrap();
    let dir = above.path().join("locks");
    fs::create_dir(&dir).unwrap();
    for (mode, who) in [
        (0o777, "every user"),
        (0o757, "every user"),
        (0o702, "every user"),
        (0o770, "its group"),
        (0o2770, "its group"),
        (0o775, "its group"),
    ] {
        chmod(&dir, mode);
        let why = format!("{who} may write to it (mode {mode:04o})");
        assert_rejected(&dir, &why, &format!("chmod go-w {}", dir.display()));
        assert_eq!(files(&dir), [""; 0]);
    }
    for mode in [0o1777, 0o3770, 0o1770, 0o755, 0o700] {
        chmod(&dir, mode);
        File::open(&dir).unwrap_or_else(|error| panic!("mode {mode:04o}: {error}"));
    }
}

/// Only root can change the owner of files. The unit tests of `dir.rs` cover the rule for other users.
#[test]
fn a_directory_or_link_of_another_user_is_rejected() {
    if !is_root_for("a_directory_or_link_of_another_user_is_refused") {
        return;
    }
    let above = tempfile::tempdir().unwrap();
    let dir = above.path().join("locks");
    fs::create_dir(&dir).unwrap();
    let link = above.path().join("link");
    symlink(&dir, &link).unwrap();
    File::open(&link).expect("a link of this user");
    lchown(&link, Some(STRANGER), None).unwrap();
    for spelled in [link.clone(), link.join(""), link.join("."), link.join("./")] {
        assert_rejected(
            &spelled,
            "a symbolic link that belongs to user 12345",
            "name the directory",
        );
    }
    chown(&dir, Some(STRANGER), None).unwrap();
    assert_rejected(&dir, "it belongs to user 12345", &format!("chown 0 {}", dir.display()));
}

/// Another user who can write to the parent replaces the directory by a link while it is opened.
#[test]
fn a_link_of_another_user_that_appears_while_the_directory_is_opened_is_not_followed() {
    if !is_root_for("a link that appears while the directory is opened is not followed") {
        return;
    }
    let above = tempfile::tempdir().unwrap();
    let path = |name| above.path().join(name);
    let (dir, link, target) = (path("locks"), path("link"), path("target"));
    fs::create_dir(&dir).unwrap();
    fs::create_dir(&target).unwrap();
    symlink(&target, &link).unwrap();
    lchown(&link, Some(STRANGER), None).unwrap();
    let done = AtomicBool::new(false);
    let followed = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let (cwd, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::EXCHANGE);
                rustix::fs::renameat_with(cwd, &dir, cwd, &link, flags).unwrap();
            }
        });
        let end = Instant::now() + Duration::from_secs(1);
        let mut followed = 0;
        while Instant::now() < end {
            let opened = File::options().polling(true).open(&dir);
            followed += usize::from(opened.is_ok_and(|store| store.path("a").starts_with(&target)));
        }
        done.store(true, Ordering::Relaxed);
        followed
    });
    assert_eq!(followed, 0);
}

#[tokio::test]
async fn an_unsafe_lock_file_is_rejected_and_not_written_to() {
    let (store, dir) = store();
    let outside = tempfile::tempdir_in(dir.path()).unwrap();
    let victim = outside.path().join("victim");
    fs::write(&victim, "mine").unwrap();
    let missing = outside.path().join("missing");
    let keeper = keeper(&store);
    let path = |name| store.path(name);
    symlink(&victim, path("link")).unwrap();
    symlink(&missing, path("dangling")).unwrap();
    fs::hard_link(&victim, path("hard")).unwrap();
    fs::create_dir(path("dir")).unwrap();
    let _socket = UnixListener::bind(path("socket")).unwrap();
    let make = |name, kind, device| {
        rustix::fs::mknodat(rustix::fs::CWD, path(name), kind, Mode::RWXU, device)
    };
    make("fifo", FileType::Fifo, 0).unwrap();
    let mut planted = vec![
        ("link", "is a symbolic link"),
        ("dangling", "is a symbolic link"),
        ("hard", "has other names (2 hard links)"),
        ("dir", "is a directory"),
        ("socket", "is not a regular file"),
        ("fifo", "is not a regular file"),
    ];
    if is_root_for("a lock file of another user is rejected") {
        fs::write(path("theirs"), "").unwrap();
        chown(path("theirs"), Some(STRANGER), None).unwrap();
        planted.push(("theirs", "belongs to user 12345"));
        // Containers may forbid devices even to root.
        if make("device", FileType::CharacterDevice, rustix::fs::makedev(1, 7)).is_ok() {
            planted.push(("device", "is not a regular file"));
        } else {
            not_run(
                "a device in the place of a lock file is rejected",
                "devices are forbidden here",
            );
        }
    }
    for (name, why) in &planted {
        for shared in [false, true] {
            let lock = keeper.rw_lock(*name);
            let tried =
                async { if shared { lock.try_read().await } else { lock.try_write().await } };
            let error = soon(name, tried).await.expect_err(name);
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            let said = error.to_string();
            assert!(said.contains(&path(name).display().to_string()), "{said}");
            assert!(said.contains(why) && said.contains("remove it"), "{name}: {said}");
        }
    }
    assert_eq!(fs::read(&victim).unwrap(), b"mine");
    assert!(!missing.exists());
    // Other locks are not affected.
    let guard = keeper.mutex("a").lock().await.unwrap();
    let inspect = keeper.inspect().unwrap();
    assert_eq!(inspect.list("").await.unwrap().len(), 1);
    assert_eq!(inspect.break_lock("a").await.unwrap(), 1);
    drop(guard);
    keeper.close().await;
    assert_eq!(store.gc().await.unwrap(), 1);
    for (name, _) in &planted {
        fs::symlink_metadata(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[tokio::test]
async fn an_unsafe_turnstile_blocks_no_claim() {
    let (store, dir) = store();
    let victim = dir.path().join("victim");
    fs::write(&victim, "mine").unwrap();
    symlink(&victim, dir.path().join("a.turn")).unwrap();
    let lock = keeper(&store).rw_lock("a");
    let held = lock.read().await.unwrap();
    let writer = tokio::spawn({
        let lock = lock.clone();
        async move { lock.write().await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    // As another process: readers of this process queue behind the writer.
    let elsewhere = keeper(&File::open(dir.path()).unwrap()).rw_lock("a");
    soon("a reader elsewhere", elsewhere.read()).await.unwrap().release().await.unwrap();
    held.release().await.unwrap();
    soon("the writer", writer).await.unwrap().release().await.unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"mine");
}

#[test]
fn a_parent_directory_that_others_can_change_is_warned_of() {
    let above = tempfile::tempdir().unwrap();
    let dir = above.path().join("locks");
    let unsafe_parents = || {
        let findings = diagnose(&url(&dir)).unwrap();
        findings.iter().filter(|finding| finding.what.contains("above the directory")).count()
    };
    assert_eq!(unsafe_parents(), 0);
    chmod(above.path(), 0o777);
    assert_eq!(unsafe_parents(), 1);
    chmod(above.path(), 0o1777);
    assert_eq!(unsafe_parents(), 0);
    if is_root_for("a directory below one of another user is warned of") {
        chown(above.path(), Some(STRANGER), None).unwrap();
        assert_eq!(unsafe_parents(), 1);
    }
}

/// A claim closes the files of the slots that it did not get.
#[tokio::test]
async fn a_permit_keeps_one_file_open() {
    const PERMITS: u32 = 64;
    let (store, dir) = store();
    let open = || {
        let fds = fs::read_dir("/proc/self/fd").unwrap();
        let paths = fds.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
        paths.filter(|path| path.starts_with(dir.path()) && path != dir.path()).count()
    };
    let other = keeper(&File::open(dir.path()).unwrap()).semaphore("a", PERMITS);
    let semaphore = keeper(&store).semaphore("a", PERMITS);
    let mut held = Vec::new();
    for i in 0..PERMITS {
        let semaphore = if i % 2 == 0 { &semaphore } else { &other };
        held.push(semaphore.acquire().await.unwrap());
    }
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    // The gate of the claim may be open as well.
    assert!(open() <= 2 * held.len(), "{} files are open for {} permits", open(), held.len());
}
