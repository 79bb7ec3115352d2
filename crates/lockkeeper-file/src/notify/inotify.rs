//! inotify: one instance and one thread per store, one watch per file with listeners.
//!
//! A store belongs to no runtime: several keepers on different runtimes may use it, and each runtime may shut down. So
//! the reader is a thread and not a task.

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

use super::FileEvents;

/// An inotify instance. Dropping it ends the thread that reads its events.
#[derive(Debug)]
pub(crate) struct Watcher {
    shared: Arc<Shared>,
    /// The watch whose removal ends the thread.
    anchor: i32,
}

#[derive(Debug)]
struct Shared {
    inotify: OwnedFd,
    watches: Mutex<HashMap<i32, Watch>>,
    /// The thread has ended, so listeners get no more events.
    ended: AtomicBool,
    /// The watch of the store's directory, or -1.
    dir: AtomicI32,
}

/// A watched file.
#[derive(Debug)]
struct Watch {
    events: Arc<FileEvents>,
    listeners: usize,
}

/// A subscription to the events of one file.
#[derive(Debug)]
pub(crate) struct Listener {
    shared: Arc<Shared>,
    events: Arc<FileEvents>,
    watch: i32,
}

impl Watcher {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// If this user has too many inotify instances, or the thread cannot be started.
    pub(crate) fn start() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC)?;
        // The root directory outlives the store's directory.
        let anchor = inotify::add_watch(&inotify, "/", WatchFlags::DELETE_SELF)?;
        let (watches, ended) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { inotify, watches, ended, dir: AtomicI32::new(-1) });
        let reader = ReaderThread(shared.clone());
        let thread = thread::Builder::new().name("lockkeeper-file".to_owned());
        thread.stack_size(128 * 1024).spawn(move || reader.0.read(anchor))?;
        Ok(Self { shared, anchor })
    }

    /// Watches the store's directory. If it is moved, no lock file is in place any more, but the files themselves have no
    /// events. Best effort: the next renewal detects the move, too.
    pub(crate) fn watch_dir(&self, dir: &Path) {
        let what = WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
        let added = inotify::add_watch(&self.shared.inotify, dir, what).unwrap_or(-1);
        let before = self.shared.dir.swap(added, Ordering::SeqCst);
        if before != added && before != -1 {
            // Fails if the directory was removed, which also removed its watch.
            let _ = inotify::remove_watch(&self.shared.inotify, before);
        }
    }

    /// Listens to the file that is now at a path.
    ///
    /// # Errors
    ///
    /// If the file is missing, the user has too many watches, or the thread has ended.
    pub(crate) fn listen(&self, path: &Path) -> io::Result<Listener> {
        // Unlinking or replacing a file changes its link count, which is `IN_ATTRIB` (inotify(7)).
        let what = WatchFlags::CLOSE_WRITE | WatchFlags::ATTRIB | WatchFlags::MOVE_SELF;
        let what = what | WatchFlags::DONT_FOLLOW;
        let mut watches = self.shared.watches();
        if self.shared.has_ended() {
            return Err(io::Error::other("the inotify thread has ended"));
        }
        // Adding a watch for the same file again returns the same watch.
        let watch = inotify::add_watch(&self.shared.inotify, path, what)?;
        let entry = watches.entry(watch);
        let entry = entry.or_insert_with(|| Watch { events: Arc::default(), listeners: 0 });
        entry.listeners += 1;
        Ok(Listener { shared: self.shared.clone(), events: entry.events.clone(), watch })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // The kernel sends `IN_IGNORED` for this watch, which ends the thread.
        let _ = inotify::remove_watch(&self.shared.inotify, self.anchor);
    }
}

impl Listener {
    pub(crate) fn events(&self) -> &Arc<FileEvents> {
        &self.events
    }

    /// Returns whether there will be no more events.
    pub(crate) fn has_ended(&self) -> bool {
        self.shared.has_ended()
    }
}

/// Notifies all listeners when the thread ends, also by a panic.
struct ReaderThread(Arc<Shared>);

impl Drop for ReaderThread {
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
            // Fails if the file was removed, which also removed its watch.
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
        // Under the lock: later listeners see the flag, and earlier ones are notified.
        let watches = self.watches();
        self.ended.store(true, Ordering::SeqCst);
        let all: Vec<_> = watches.values().map(|watch| watch.events.clone()).collect();
        drop(watches);
        for events in all {
            events.add();
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
                    tracing::error!(%error, "reading from inotify failed: waiters for lock files poll from now on");
                    return;
                }
            };
            if watch == anchor && events.contains(ReadFlags::IGNORED) {
                return;
            }
            self.dispatch(watch, events);
        }
    }

    fn dispatch(&self, watch: i32, events: ReadFlags) {
        let is_dir = watch == self.dir.load(Ordering::SeqCst);
        if events.contains(ReadFlags::QUEUE_OVERFLOW)
            || (is_dir && events.contains(ReadFlags::MOVE_SELF))
        {
            // Events were lost, or the directory was moved with all files.
            let all: Vec<_> = self.watches().values().map(|watch| watch.events.clone()).collect();
            for events in all {
                events.add();
            }
            return;
        }
        // Outside of the lock: a woken task may create or drop listeners.
        let events = self.watches().get(&watch).map(|watch| watch.events.clone());
        if let Some(events) = events {
            events.add();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::pin::pin;
    use std::time::Duration;

    use super::*;

    /// Waits for the event that `cause` causes.
    async fn is_notified(listener: &Listener, cause: impl FnOnce()) {
        let mut notified = pin!(listener.events().notified());
        notified.as_mut().enable();
        cause();
        let notified = tokio::time::timeout(Duration::from_secs(30), notified);
        notified.await.expect("an event");
    }

    #[tokio::test]
    async fn listeners_are_notified_when_a_file_is_closed_unlinked_or_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let make = || drop(fs::File::create(&path).unwrap());
        let watcher = Watcher::start().unwrap();
        make();
        let listener = watcher.listen(&path).unwrap();
        let open = OpenOptions::new().write(true).open(&path).unwrap();
        is_notified(&listener, || drop(open)).await;
        let open = OpenOptions::new().write(true).open(&path).unwrap();
        is_notified(&listener, || fs::remove_file(&path).unwrap()).await;
        drop(open);
        make();
        let listener = watcher.listen(&path).unwrap();
        let _open = OpenOptions::new().write(true).open(&path).unwrap();
        let other = dir.path().join("b");
        fs::write(&other, "").unwrap();
        is_notified(&listener, || fs::rename(&other, &path).unwrap()).await;
    }

    #[test]
    fn listeners_of_one_file_share_a_watch_that_ends_with_the_last_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "").unwrap();
        let watcher = Watcher::start().unwrap();
        let one = watcher.listen(&path).unwrap();
        let two = watcher.listen(&path).unwrap();
        assert!(Arc::ptr_eq(one.events(), two.events()));
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
            assert!(start.elapsed() < Duration::from_secs(30), "the thread did not end");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn all_listeners_are_notified_of_lost_events() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "").unwrap();
        let watcher = Watcher::start().unwrap();
        let listener = watcher.listen(&path).unwrap();
        let before = listener.events().count();
        watcher.shared.dispatch(-1, ReadFlags::QUEUE_OVERFLOW);
        assert!(listener.events().count() > before);
    }

    /// Removes the anchor, and waits for the end of the thread.
    fn end(watcher: &Watcher) {
        inotify::remove_watch(&watcher.shared.inotify, watcher.anchor).unwrap();
        let start = std::time::Instant::now();
        while !watcher.shared.has_ended() {
            assert!(start.elapsed() < Duration::from_secs(30), "the thread did not end");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[tokio::test]
    async fn waiters_poll_after_the_thread_has_ended() {
        // So long that no refresh finds the free lock.
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
        let watcher = store.store.watcher.as_ref().unwrap();
        let start = std::time::Instant::now();
        while watcher.shared.watches().is_empty() {
            assert!(start.elapsed() < Duration::from_secs(30), "no waiter listens");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        end(watcher);
        guard.release().await.unwrap();
        for waiter in waiters {
            let waiter = tokio::time::timeout(Duration::from_secs(30), waiter);
            waiter.await.expect("the waiter polls").unwrap();
        }
        // Later waiters poll, too.
        assert!(watcher.listen(&dir.path().join("a.lock")).is_err());
        let guard = mutex.lock().await.unwrap();
        let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
        tokio::time::sleep(Duration::from_millis(20)).await;
        guard.release().await.unwrap();
        let waiter = tokio::time::timeout(Duration::from_secs(30), waiter);
        waiter.await.expect("the waiter polls").unwrap().release().await.unwrap();
    }
}
