//! The directory, the files and the claims of the file store.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{LONG, SOON, claim, fence_of, files, half_an_hour_ahead, keeper, soon, store};
use lockkeeper_core::blocking::block_on;
use lockkeeper_core::{
    Attempt, Backend, Background, ClaimSpec, ErrorKind, Fence, Kind, LossReason, Name,
    ReleaseOutcome, Renewal,
};
use lockkeeper_file::File;

#[tokio::test]
async fn a_floor_far_ahead_of_the_clock_is_rejected_and_not_written() {
    let (store, _dir) = store();
    for far in [half_an_hour_ahead().unwrap().get() + 3_600_000_000, 1 << 53, u64::MAX >> 1] {
        let mut refused = claim(&store, "a");
        let error = refused.attempt(Fence::new(far)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(&far.to_string()), "{error}");
        refused.release().await.unwrap();
        let mut next = claim(&store, "a");
        assert!(fence_of(&mut *next, None).await < far, "it was written");
        // The fence of a holder is not raised to it, either.
        assert_eq!(next.attempt(Fence::new(far)).await.unwrap_err().kind(), ErrorKind::Config);
        next.release().await.unwrap();
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test]
async fn a_missing_directory_is_created_for_its_owner_only() {
    let dir = tempfile::tempdir().unwrap();
    let locks = dir.path().join("run/locks");
    let store = File::open(&locks).unwrap();
    assert_eq!(files(&locks), [""; 0]);
    assert_eq!(mode(&locks), 0o700);
    keeper(&store).mutex("a").lock().await.unwrap().release().await.unwrap();
    assert_eq!(mode(&locks.join("a.lock")), 0o600);
    File::open(&locks).expect("an existing directory");
}

#[test]
fn a_path_that_is_no_directory_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "mine").unwrap();
    let dangling = dir.path().join("dangling");
    symlink(dir.path().join("nowhere"), &dangling).unwrap();
    for path in [&file, &file.join("below"), &dangling] {
        let error = File::open(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let start = format!("file: open \"{}\": ", path.display());
        assert!(error.to_string().starts_with(&start), "{error}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

#[test]
fn a_read_only_directory_is_an_error() {
    // Not even root can create a file in /proc.
    for path in ["/proc", "/proc/lockkeeper"] {
        let error = File::open(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().starts_with(&format!("file: open \"{path}\": ")), "{error}");
        assert!(std::error::Error::source(&error).is_some());
    }
    if !rustix::process::getuid().is_root() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o500)).unwrap();
        let error = File::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    }
}

/// A small mounted disk.
struct Disk(tempfile::TempDir);

impl Disk {
    /// Mounts a disk. Returns `None` if that is not permitted.
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(dir.path());
        let mounted = mount.output().is_ok_and(|output| output.status.success());
        mounted.then_some(Self(dir))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Set when this program runs again with a disk mounted at that path.
const DISK: &str = "LOCKKEEPER_TEST_DISK";

#[tokio::test]
async fn on_a_full_disk_existing_locks_work_and_new_ones_fail() {
    if let Some(disk) = std::env::var_os(DISK) {
        return fill(Path::new(&disk)).await;
    }
    if let Some(disk) = Disk::mount() {
        return fill(disk.0.path()).await;
    }
    // A user who may not mount can usually do so in a user namespace.
    let dir = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=64k tmpfs \"$1\" && shift && exec \"$@\"";
    let mut again = std::process::Command::new("unshare");
    again.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]).arg(dir.path());
    again.arg(std::env::current_exe().unwrap());
    again.args(["--exact", "on_a_full_disk_existing_locks_work_and_new_ones_fail"]);
    let output = again.env(DISK, dir.path()).stdin(std::process::Stdio::null()).output();
    let output = output.expect("this test needs a small disk: run it as root, or install unshare");
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert!(
        output.status.success() && said[0].contains("1 passed"),
        "this test mounts a small disk: run it as root, or allow user namespaces\n{}{}",
        said[0],
        said[1]
    );
}

async fn fill(disk: &Path) {
    let store = File::open(disk.join("locks")).unwrap();
    let keeper = keeper(&store);
    let guard = keeper.mutex("known").lock().await.unwrap();
    let mut fence = guard.fence();
    guard.release().await.unwrap();
    let filling = disk.join("filling");
    fs::write(&filling, vec![1; 1 << 20]).expect_err("the disk is full");
    for _ in 0..5 {
        let guard = keeper.mutex("known").lock().await.unwrap();
        assert!(guard.fence() > fence);
        fence = guard.fence();
        guard.release().await.unwrap();
    }
    let error = keeper.mutex("new").lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().starts_with("file: lock \"new\": No space left"), "{error}");
    let refused = fs::File::open(store.path("new")).unwrap();
    refused.try_lock().expect("a lock without a written fence is not granted");
    drop(refused);
    fs::remove_file(filling).unwrap();
    keeper.mutex("new").lock().await.expect("there is space again").release().await.unwrap();
}

#[tokio::test]
async fn files_of_all_names_stay_in_the_directory_and_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let locks = dir.path().join("locks");
    let store = File::open(&locks).unwrap();
    let keeper = keeper(&store);
    let longest = "../".repeat(341);
    let names = ["/", "..", "../a", "/etc/passwd", "a/../../b", "🔒", "a\nb", "A", "a", &longest];
    let mut guards = Vec::new();
    for name in names {
        guards.push(keeper.mutex(name).try_lock().await.unwrap().expect(name));
    }
    // The names of its slots contain NUL and are longer than any user's name.
    let permits = keeper.semaphore(&*longest, 2).acquire().await.unwrap();
    assert_eq!(files(dir.path()), ["locks"]);
    assert_eq!(files(&locks).len(), names.len() + 2, "the names, a slot and the gate");
    let inspect = keeper.inspect().unwrap();
    let listed = inspect.list("").await.unwrap();
    let of = |kind| {
        let of_kind = listed.iter().filter(move |info| info.kind == kind);
        of_kind.map(|info| info.name.to_string()).collect::<Vec<_>>()
    };
    let mut expected = names.map(str::to_owned).to_vec();
    expected.sort();
    assert_eq!(of(Kind::Lock), expected);
    assert_eq!(of(Kind::Semaphore), [&*longest]);
    assert_eq!(inspect.show(&*longest).await.unwrap().len(), 2);
    drop((guards, permits));
}

#[tokio::test]
async fn two_stores_in_one_directory_exclude_each_other() {
    let (one, dir) = store();
    let other = File::options().fence(false).polling(true).open(dir.path()).unwrap();
    let guard = keeper(&one).mutex("a").lock().await.unwrap();
    assert!(keeper(&other).mutex("a").try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
    assert!(keeper(&other).mutex("a").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn a_holder_whose_file_is_removed_or_replaced_loses_the_lock_at_once() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    let path = store.path("a");
    for replace in [false, true] {
        let guard = keeper.mutex("a").lock().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = keeper.mutex("a");
            async move { mutex.lock().await.unwrap() }
        });
        if replace {
            fs::write(dir.path().join("other"), "").unwrap();
            fs::rename(dir.path().join("other"), &path).unwrap();
        } else {
            fs::remove_file(&path).unwrap();
        }
        soon("the loss", guard.lost()).await;
        let next = soon("the waiter", waiter).await.unwrap();
        assert!(next.fence() > guard.fence());
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
        assert_eq!(next.release().await.unwrap(), ReleaseOutcome::Released);
    }
}

#[tokio::test]
async fn without_notifications_a_renewal_and_a_release_find_the_loss() {
    let (_, dir) = store();
    let deaf = File::options().polling(true).open(dir.path()).unwrap();
    let mut renewing = claim(&deaf, "a");
    let mut releasing = claim(&deaf, "b");
    fence_of(&mut *renewing, None).await;
    fence_of(&mut *releasing, None).await;
    assert_eq!(renewing.renew(LONG).await.unwrap(), Renewal::Held);
    fs::remove_file(deaf.path("a")).unwrap();
    fs::remove_file(deaf.path("b")).unwrap();
    assert_eq!(renewing.renew(LONG).await.unwrap(), Renewal::Lost(LossReason::Broken));
    assert_eq!(releasing.release().await.unwrap(), lockkeeper_core::Release::WasNotHeld);
}

/// Runs as fast as possible, so that files are removed between opening and locking.
#[test]
fn a_file_removed_between_opening_and_locking_never_has_two_holders() {
    // In memory if possible: a disk would be too slow.
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let store = File::options().polling(true).fence(false).open(dir.path()).unwrap();
    let (inside, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let removed = AtomicUsize::new(0);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let remove = || {
        let path = store.path("a");
        let Ok(file) = fs::OpenOptions::new().write(true).open(&path) else { return };
        if file.try_lock().is_ok()
            && fs::metadata(&path).is_ok_and(|at| at.ino() == file.metadata().unwrap().ino())
        {
            fs::remove_file(&path).unwrap();
            removed.fetch_add(1, Ordering::SeqCst);
        }
    };
    let hold = || {
        let background = Background::new(runtime.handle().clone());
        let mut spec = ClaimSpec::new(Name::new("a").unwrap(), LONG, background);
        // The removal may refuse an attempt.
        spec.queue = true;
        let mut claim = store.claim(spec).unwrap();
        if let Attempt::Granted(_) = block_on(claim.attempt(None)).unwrap() {
            assert!(!inside.swap(true, Ordering::SeqCst), "two holders");
            // Not a yield: on a busy machine each would cost a time slice.
            let start = Instant::now();
            while start.elapsed() < Duration::from_micros(30) {
                std::hint::spin_loop();
            }
            inside.store(false, Ordering::SeqCst);
            block_on(claim.release()).unwrap();
        }
    };
    let start = Instant::now();
    let hammer = || {
        let mut holds = 0;
        // Until enough files were removed between two acquires.
        while holds < 4000 || (removed.load(Ordering::SeqCst) < 20 && start.elapsed() < SOON) {
            hold();
            holds += 1;
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    remove();
                }
            });
        }
        let holders = [(); 3].map(|()| scope.spawn(hammer));
        let ended = holders.map(std::thread::ScopedJoinHandle::join);
        done.store(true, Ordering::SeqCst);
        assert!(ended.iter().all(Result::is_ok), "two holders");
    });
    let removed = removed.into_inner();
    assert!(removed >= 20, "only {removed} files were removed: too few for the race");
}

#[tokio::test]
async fn fences_rise_after_a_file_was_removed() {
    let (store, _dir) = store();
    let mut last = 0;
    for _ in 0..20 {
        let mut writer = claim(&store, "a");
        let fence = fence_of(&mut *writer, None).await;
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        writer.release().await.unwrap();
        assert_eq!(store.gc().await.unwrap(), 1);
        let reader = keeper(&store).rw_lock("a").read().await.unwrap();
        assert!(
            reader.fence().unwrap().get() >= last,
            "the fence of a reader is lower than that of a writer"
        );
    }
}

#[tokio::test]
async fn a_waiter_whose_file_is_removed_waits_for_the_new_one() {
    let (store, _dir) = store();
    let keeper = keeper(&store);
    let first = keeper.mutex("a").lock().await.unwrap();
    let waiters: Vec<_> = (0..4)
        .map(|_| {
            let mutex = keeper.mutex("a");
            tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(50)).await;
    fs::remove_file(store.path("a")).unwrap();
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap();
    }
    drop(first);
}

#[tokio::test]
async fn waiting_readers_acquire_together() {
    let (store, _dir) = store();
    let keeper = keeper(&store);
    let writer = keeper.mutex("a").lock().await.unwrap();
    let barrier = Arc::new(tokio::sync::Barrier::new(4));
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let (lock, barrier) = (keeper.rw_lock("a"), barrier.clone());
            tokio::spawn(async move {
                let guard = lock.read().await.unwrap();
                // All readers hold the lock before the first releases it.
                barrier.wait().await;
                guard.release().await.unwrap();
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(50)).await;
    writer.release().await.unwrap();
    for reader in readers {
        soon("a reader", reader).await.unwrap();
    }
}

#[tokio::test]
async fn without_fences_nothing_is_written_and_inspection_is_unsupported() {
    let dir = tempfile::tempdir().unwrap();
    let store = File::options().fence(false).open(dir.path()).unwrap();
    let keeper = keeper(&store);
    let guard = keeper.mutex("a").lock().await.unwrap();
    assert_eq!(guard.fence(), None);
    let long = keeper.mutex("long".repeat(100)).lock().await.unwrap();
    for name in [guard.name(), long.name()] {
        assert_eq!(fs::metadata(store.path(name)).unwrap().len(), 0);
    }
    assert_eq!(keeper.inspect().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(store.gc().await.unwrap(), 0);
    guard.release().await.unwrap();
    long.release().await.unwrap();
    assert_eq!(store.gc().await.unwrap(), 2);
}

#[tokio::test]
async fn invalid_content_of_a_file_blocks_no_claim() {
    let (store, _dir) = store();
    let path = store.path("a");
    fs::write(&path, [0xff; 3000]).unwrap();
    let first = fence_of(&mut *claim(&store, "a"), None).await;
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    // The other line is torn.
    file.write_all_at(&[0xff; 512], 512).unwrap();
    assert!(fence_of(&mut *claim(&store, "a"), None).await > first);
    let info = store.inspector().unwrap().list("").await.unwrap();
    assert_eq!(info, []);
}

#[tokio::test]
async fn a_store_without_inotify_polls_and_declares_no_push() {
    let dir = tempfile::tempdir().unwrap();
    let deaf = File::from_url(&format!("{}?polling=on", common::url(dir.path()))).unwrap();
    assert!(!deaf.capabilities().push);
    let keeper = keeper(&deaf);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = keeper.mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    guard.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_directory_named_like_a_lock_file_blocks_no_other_lock() {
    let dir = tempfile::tempdir().unwrap();
    let store = File::open(dir.path()).unwrap();
    fs::create_dir(dir.path().join("odd.lock")).unwrap();
    symlink("/nowhere", dir.path().join("link.lock")).unwrap();
    let keeper = keeper(&store);
    let guard = keeper.mutex("a").lock().await.unwrap();
    assert_eq!(keeper.inspect().unwrap().list("").await.unwrap().len(), 1);
    guard.release().await.unwrap();
    assert_eq!(store.gc().await.unwrap(), 1);
    assert_eq!(files(dir.path()), ["link.lock", "odd.lock"]);
}
