//! inotify: one instance and one thread for each store, one watch for each file that somebody listens
//! to.
//!
//! A thread and not a task, because a store belongs to no runtime: several keepers may use it, each on
//! its own, and any of those may be shut down.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use super::Bell;

/// Reads events for as long as it lives.
#[derive(Debug)]
pub(crate) struct Watcher {
    shared: Arc<Shared>,
    /// A watch whose removal ends the thread.
    anchor: i32,
}

#[derive(Debug)]
struct Shared {
    inotify: OwnedFd,
    watches: Mutex<HashMap<i32, Watch>>,
    /// Nobody reads any more: whoever listens hears nothing.
    ended: AtomicBool,
    /// The watch of the store's directory; -1 if there is none.
    dir: AtomicI32,
}

/// A file that somebody listens to.
#[derive(Debug)]
struct Watch {
    bell: Arc<Bell>,
    listeners: usize,
}

/// Hears of one file for as long as it lives.
#[derive(Debug)]
pub(crate) struct Listener {
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    watch: i32,
}

impl Watcher {
    /// Starts to read.
    ///
    /// # Errors
    ///
    /// If this user has too many instances already, or there is no thread to be had.
    pub(crate) fn start() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC)?;
        // The root of the file system stays, whatever happens to the store's directory.
        let anchor = inotify::add_watch(&inotify, "/", WatchFlags::DELETE_SELF)?;
        let (watches, ended) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { inotify, watches, ended, dir: AtomicI32::new(-1) });
        let reader = Reading(shared.clone());
        let thread = thread::Builder::new().name("lockkeeper-file".to_owned());
        thread.stack_size(128 * 1024).spawn(move || reader.0.read(anchor))?;
        Ok(Self { shared, anchor })
    }

    /// Watches the store's directory: if it is moved away, no lock file is in place any more, and none of them changes.
    /// Best effort, since a renewal finds out as well.
    pub(crate) fn watch_dir(&self, dir: &Path) {
        let what = WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
        let added = inotify::add_watch(&self.shared.inotify, dir, what).unwrap_or(-1);
        let before = self.shared.dir.swap(added, Ordering::SeqCst);
        if before != added && before != -1 {
            // It fails if the directory is gone, and its watch with it.
            let _ = inotify::remove_watch(&self.shared.inotify, before);
        }
    }

    /// Listens to the file that is at a path now.
    ///
    /// # Errors
    ///
    /// If there is no file, no watch to be had, or nobody who reads.
    pub(crate) fn listen(&self, path: &Path) -> io::Result<Listener> {
        // A file that is unlinked, or replaced by another, changes its attributes: its count of links.
        let what = WatchFlags::CLOSE_WRITE | WatchFlags::ATTRIB | WatchFlags::MOVE_SELF;
        let what = what | WatchFlags::DONT_FOLLOW;
        let mut watches = self.shared.watches();
        if self.shared.has_ended() {
            return Err(io::Error::other("nobody reads what inotify tells"));
        }
        // The same file has the same watch, however often it is added.
        let watch = inotify::add_watch(&self.shared.inotify, path, what)?;
        let entry = watches.entry(watch);
        let entry = entry.or_insert_with(|| Watch { bell: Arc::default(), listeners: 0 });
        entry.listeners += 1;
        Ok(Listener { shared: self.shared.clone(), bell: entry.bell.clone(), watch })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // The thread hears that this watch is gone, and ends.
        let _ = inotify::remove_watch(&self.shared.inotify, self.anchor);
    }
}

impl Listener {
    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Whether nothing will be heard any more.
    pub(crate) fn is_deaf(&self) -> bool {
        self.shared.has_ended()
    }
}

/// What the thread has. When that ends, however it does, all who listen are told, and find out.
struct Reading(Arc<Shared>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut watches = self.shared.watches();
        let Some(watch) = watches.get_mut(&self.watch) else { return };
        watch.listeners -= 1;
        if watch.listeners == 0 {
            watches.remove(&self.watch);
            // It fails if the file is gone, and its watch with it.
            let _ = inotify::remove_watch(&self.shared.inotify, self.watch);
        }
    }
}

impl Shared {
    fn watches(&self) -> MutexGuard<'_, HashMap<i32, Watch>> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    fn end(&self) {
        // With the watches locked: whoever begins to listen after this sees it, and all others hear it.
        let watches = self.watches();
        self.ended.store(true, Ordering::SeqCst);
        let all: Vec<_> = watches.values().map(|watch| watch.bell.clone()).collect();
        drop(watches);
        for bell in all {
            bell.ring();
        }
    }

    fn read(&self, anchor: i32) {
        let mut buffer = [MaybeUninit::uninit(); 8192];
        let mut reader = Reader::new(&self.inotify, &mut buffer);
        loop {
            let (watch, events) = match reader.next() {
                Ok(event) => (event.wd(), event.events()),
                Err(Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "inotify ended: waiters for files look now and then");
                    return;
                }
            };
            if watch == anchor && events.contains(ReadFlags::IGNORED) {
                return;
            }
            self.tell(watch, events);
        }
    }

    fn tell(&self, watch: i32, events: ReadFlags) {
        let is_dir = watch == self.dir.load(Ordering::SeqCst);
        if events.contains(ReadFlags::QUEUE_OVERFLOW)
            || (is_dir && events.contains(ReadFlags::MOVE_SELF))
        {
            // Nobody knows what was lost, or all files are gone with the directory.
            let all: Vec<_> = self.watches().values().map(|watch| watch.bell.clone()).collect();
            for bell in all {
                bell.ring();
            }
            return;
        }
        // Rung outside of the lock: whoever is woken may listen anew, or stop to.
        let bell = self.watches().get(&watch).map(|watch| watch.bell.clone());
        if let Some(bell) = bell {
            bell.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::pin::pin;
    use std::time::Duration;

    use super::*;

    /// Waits for a ring that something causes.
    async fn rings(listener: &Listener, cause: impl FnOnce()) {
        let mut rung = pin!(listener.bell().notified());
        rung.as_mut().enable();
        cause();
        let rung = tokio::time::timeout(Duration::from_secs(30), rung);
        rung.await.expect("the bell is rung");
    }

    #[tokio::test]
    async fn a_bell_rings_when_a_file_is_closed_unlinked_or_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let make = || drop(fs::File::create(&path).unwrap());
        let watcher = Watcher::start().unwrap();
        make();
        let listener = watcher.listen(&path).unwrap();
        let open = OpenOptions::new().write(true).open(&path).unwrap();
        rings(&listener, || drop(open)).await;
        let open = OpenOptions::new().write(true).open(&path).unwrap();
        rings(&listener, || fs::remove_file(&path).unwrap()).await;
        drop(open);
        make();
        let listener = watcher.listen(&path).unwrap();
        let _open = OpenOptions::new().write(true).open(&path).unwrap();
        let other = dir.path().join("b");
        fs::write(&other, "").unwrap();
        rings(&listener, || fs::rename(&other, &path).unwrap()).await;
    }

    #[test]
    fn listeners_of_one_file_share_a_watch_that_ends_with_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "").unwrap();
        let watcher = Watcher::start().unwrap();
        let one = watcher.listen(&path).unwrap();
        let two = watcher.listen(&path).unwrap();
        assert!(Arc::ptr_eq(one.bell(), two.bell()));
        assert_eq!(watcher.shared.watches().len(), 1);
        drop(one);
        assert_eq!(watcher.shared.watches().len(), 1);
        drop(two);
        assert_eq!(watcher.shared.watches().len(), 0);
        assert!(watcher.listen(&dir.path().join("missing")).is_err());
        assert_eq!(watcher.shared.watches().len(), 0);
    }

    #[test]
    fn the_thread_ends_with_the_watcher() {
        let watcher = Watcher::start().unwrap();
        let shared = Arc::downgrade(&watcher.shared);
        drop(watcher);
        let start = std::time::Instant::now();
        while shared.strong_count() > 0 {
            assert!(start.elapsed() < Duration::from_secs(30), "it reads on");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_was_lost_is_told_to_everybody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "").unwrap();
        let watcher = Watcher::start().unwrap();
        let listener = watcher.listen(&path).unwrap();
        let before = listener.bell().notices();
        watcher.shared.tell(-1, ReadFlags::QUEUE_OVERFLOW);
        assert!(listener.bell().notices() > before);
    }

    /// Takes the watch away whose end is the thread's, and waits for it.
    fn end(watcher: &Watcher) {
        inotify::remove_watch(&watcher.shared.inotify, watcher.anchor).unwrap();
        let start = std::time::Instant::now();
        while !watcher.shared.has_ended() {
            assert!(start.elapsed() < Duration::from_secs(30), "it reads on");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[tokio::test]
    async fn when_nobody_reads_any_more_waiters_look_by_themselves() {
        // So long that nothing is found out by a refresh.
        const LONG: Duration = Duration::from_secs(600);
        let dir = tempfile::tempdir().unwrap();
        let store = crate::File::open(dir.path()).unwrap();
        let keeper = lockkeeper_core::Keeper::new(store.clone()).ttl(LONG);
        let mutex = keeper.mutex("a");
        let guard = mutex.lock().await.unwrap();
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let mutex = mutex.clone();
                tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
            })
            .collect();
        let watcher = store.store.watcher.as_deref().unwrap();
        let start = std::time::Instant::now();
        while watcher.shared.watches().is_empty() {
            assert!(start.elapsed() < Duration::from_secs(30), "nobody listens");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        end(watcher);
        guard.release().await.unwrap();
        for waiter in waiters {
            let waiter = tokio::time::timeout(Duration::from_secs(30), waiter);
            waiter.await.expect("it looks by itself").unwrap();
        }
        // Whoever comes later does not listen to nobody, either.
        assert!(watcher.listen(&dir.path().join("a.lock")).is_err());
        let guard = mutex.lock().await.unwrap();
        let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
        tokio::time::sleep(Duration::from_millis(20)).await;
        guard.release().await.unwrap();
        let waiter = tokio::time::timeout(Duration::from_secs(30), waiter);
        waiter.await.expect("it looks by itself").unwrap().release().await.unwrap();
    }
}
