//! Cases that a plugin must pass on every store.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lockkeeper::ReleaseOutcome;
use lockkeeper::plugin::{LockHandle, LockPlugin, Standing};

/// Longer than any case runs.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(1);

/// A store under test.
pub(crate) struct Store<'a> {
    /// Creates a plugin on the store.
    pub(crate) plugin: &'a dyn Fn() -> Box<dyn LockPlugin>,
    /// Whether a handle is valid in another plugin than the one that created it.
    pub(crate) leases: bool,
}

type Case = fn(&Store<'_>);

pub(crate) fn check(store: &Store<'_>) {
    let cases: [(&str, Case); 9] = [
        ("contention is `None`, and a release lets the next client acquire", contention),
        ("a handle that is not renewed expires after its ttl", ends_with_its_ttl),
        ("a renewed handle outlives its ttl", outlives_its_ttl),
        ("a renewal may shorten the lease", shorter),
        ("a forged handle affects no hold", forged),
        ("invalid arguments are errors", refused),
        ("a handle is two strings", two_strings),
        ("threads and tasks exclude each other", threads),
        ("a handle is valid in another plugin if the store has leases", another_plugin),
    ];
    for (name, case) in cases {
        eprintln!("case: {name}");
        case(store);
    }
}

#[track_caller]
fn lock(plugin: &dyn LockPlugin, key: &str, ttl: Duration) -> LockHandle {
    plugin.try_lock(key, ttl).unwrap().unwrap_or_else(|| panic!("{key} is held"))
}

/// Tries until it acquires the lock.
#[track_caller]
fn lock_soon(plugin: &dyn LockPlugin, key: &str) -> LockHandle {
    let start = Instant::now();
    loop {
        if let Some(handle) = plugin.try_lock(key, LONG).unwrap() {
            return handle;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{key} stays held");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn contention(store: &Store<'_>) {
    let (one, two) = ((store.plugin)(), (store.plugin)());
    let handle = lock(&*one, "contention", LONG);
    assert_eq!(handle.key, "contention");
    assert_eq!(two.try_lock("contention", LONG).unwrap(), None);
    assert_eq!(one.try_lock("contention", LONG).unwrap(), None, "locks are not re-entrant");
    let other = lock(&*two, "other", LONG);
    assert_eq!(one.renew(&handle, LONG).unwrap(), Standing::Held);
    assert_eq!(one.release(handle.clone()).unwrap(), ReleaseOutcome::Released);
    let next = lock_soon(&*two, "contention");
    assert_ne!(next.lock_id, handle.lock_id);
    // The handle is stale: it does not affect the next holder.
    assert_eq!(one.renew(&handle, LONG).unwrap(), Standing::Lost);
    assert_eq!(one.release(handle).unwrap(), ReleaseOutcome::AlreadyLost);
    assert_eq!(one.try_lock("contention", LONG).unwrap(), None);
    assert_eq!(two.release(next).unwrap(), ReleaseOutcome::Released);
    assert_eq!(two.release(other).unwrap(), ReleaseOutcome::Released);
}

fn ends_with_its_ttl(store: &Store<'_>) {
    let (one, two) = ((store.plugin)(), (store.plugin)());
    let start = Instant::now();
    let stale = lock(&*one, "ends", SHORT);
    let next = lock_soon(&*two, "ends");
    assert!(start.elapsed() >= SHORT * 9 / 10, "after {:?}", start.elapsed());
    assert_eq!(one.renew(&stale, LONG).unwrap(), Standing::Lost);
    assert_eq!(one.release(stale).unwrap(), ReleaseOutcome::AlreadyLost);
    assert_eq!(one.try_lock("ends", LONG).unwrap(), None, "the next holder still holds it");
    assert_eq!(two.renew(&next, LONG).unwrap(), Standing::Held);
    assert_eq!(two.release(next).unwrap(), ReleaseOutcome::Released);
}

fn outlives_its_ttl(store: &Store<'_>) {
    let (one, two) = ((store.plugin)(), (store.plugin)());
    let start = Instant::now();
    let handle = loop {
        let handle = lock_for(&*one, "outlives");
        // Retries if the machine stalled for the whole ttl.
        if one.renew(&handle, LONG).unwrap() == Standing::Held {
            break handle;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "never renewed in time");
    };
    std::thread::sleep(SHORT * 3 / 2);
    assert_eq!(two.try_lock("outlives", LONG).unwrap(), None);
    assert_eq!(one.release(handle).unwrap(), ReleaseOutcome::Released);
}

fn lock_for(plugin: &dyn LockPlugin, key: &str) -> LockHandle {
    loop {
        if let Some(handle) = plugin.try_lock(key, SHORT).unwrap() {
            return handle;
        }
    }
}

fn shorter(store: &Store<'_>) {
    let (one, two) = ((store.plugin)(), (store.plugin)());
    let handle = lock(&*one, "shorter", LONG);
    assert_eq!(one.renew(&handle, SHORT).unwrap(), Standing::Held);
    let next = lock_soon(&*two, "shorter");
    assert_eq!(one.release(handle).unwrap(), ReleaseOutcome::AlreadyLost);
    two.release(next).unwrap();
}

fn forged(store: &Store<'_>) {
    let plugin = (store.plugin)();
    let (a, b) = (lock(&*plugin, "forged/a", LONG), lock(&*plugin, "forged/b", LONG));
    let crossed = LockHandle { key: a.key.clone(), lock_id: b.lock_id.clone() };
    let invented = LockHandle { key: a.key.clone(), lock_id: "0".repeat(32) };
    for forged in [crossed, invented] {
        assert_eq!(plugin.renew(&forged, SHORT).unwrap(), Standing::Lost);
        assert_eq!(plugin.release(forged).unwrap(), ReleaseOutcome::AlreadyLost);
    }
    for handle in [a, b] {
        assert_eq!(plugin.try_lock(&handle.key, LONG).unwrap(), None);
        assert_eq!(plugin.release(handle).unwrap(), ReleaseOutcome::Released);
    }
}

fn refused(store: &Store<'_>) {
    let plugin = (store.plugin)();
    for (key, ttl) in [("", LONG), ("a\0b", LONG), ("a", Duration::ZERO), ("a", Duration::MAX)] {
        let error = plugin.try_lock(key, ttl).unwrap_err();
        assert!(!error.is_empty() && !error.contains('\n'), "{error}");
    }
    let handle = lock(&*plugin, "refused", LONG);
    assert!(plugin.renew(&handle, Duration::ZERO).is_err());
    let other = LockHandle { key: "refused".to_owned(), lock_id: "not-an-id".to_owned() };
    for error in [plugin.renew(&other, LONG).unwrap_err(), plugin.release(other).unwrap_err()] {
        assert!(error.contains("not-an-id"), "{error}");
    }
    assert_eq!(plugin.renew(&handle, LONG).unwrap(), Standing::Held);
    assert_eq!(plugin.release(handle).unwrap(), ReleaseOutcome::Released);
}

fn two_strings(store: &Store<'_>) {
    let plugin = (store.plugin)();
    let key = "two strings/é \"{}\"";
    let handle = lock(&*plugin, key, LONG);
    let json = serde_json::to_value(&handle).unwrap();
    assert_eq!(json, serde_json::json!({ "key": key, "lock_id": handle.lock_id }));
    let back: LockHandle = serde_json::from_value(json).unwrap();
    assert_eq!(back, handle);
    assert_eq!(plugin.renew(&back, LONG).unwrap(), Standing::Held);
    assert_eq!(plugin.release(back).unwrap(), ReleaseOutcome::Released);
}

/// Plain threads, and a task in a current-thread runtime.
fn threads(store: &Store<'_>) {
    let plugin = &*(store.plugin)();
    let (inside, held) = (&AtomicBool::new(false), &AtomicUsize::new(0));
    let exclude = move || {
        for _ in 0..10 {
            let handle = lock_soon(plugin, "threads");
            assert!(!inside.swap(true, Ordering::SeqCst), "two holders at a time");
            held.fetch_add(1, Ordering::SeqCst);
            inside.store(false, Ordering::SeqCst);
            assert_eq!(plugin.release(handle).unwrap(), ReleaseOutcome::Released);
        }
    };
    std::thread::scope(|threads| {
        threads.spawn(exclude);
        threads.spawn(exclude);
        threads.spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async { exclude() });
        });
    });
    assert_eq!(held.load(Ordering::SeqCst), 30);
}

fn another_plugin(store: &Store<'_>) {
    let (one, two) = ((store.plugin)(), (store.plugin)());
    let handle = lock(&*one, "another", LONG);
    if store.leases {
        drop(one);
        assert_eq!(two.try_lock("another", LONG).unwrap(), None, "the hold outlives its plugin");
        assert_eq!(two.renew(&handle, LONG).unwrap(), Standing::Held);
        assert_eq!(two.release(handle).unwrap(), ReleaseOutcome::Released);
    } else {
        assert_eq!(two.renew(&handle, LONG).unwrap(), Standing::Lost);
        assert_eq!(two.release(handle).unwrap(), ReleaseOutcome::AlreadyLost);
        assert_eq!(
            two.try_lock("another", LONG).unwrap(),
            None,
            "the session of the other plugin holds it"
        );
        drop(one);
        let next = lock_soon(&*two, "another");
        two.release(next).unwrap();
    }
}
