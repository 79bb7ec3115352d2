//! URL schemes of other crates' stores.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use lockkeeper::backend::register;
use lockkeeper::{Error, ErrorKind, Memory, Severity};

#[track_caller]
fn refused(answer: lockkeeper::Result<()>) -> String {
    let error = answer.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    error.to_string()
}

#[tokio::test]
async fn a_registered_scheme_is_opened_in_any_case_with_the_whole_url() {
    let memory = Memory::new();
    let store = memory.clone();
    let opener = move |url: String| {
        let store = store.clone();
        async move {
            assert_eq!(url, "Test-Whole+v1.0://user@host/a?b=c");
            Ok(store)
        }
    };
    register("TEST-whole+v1.0", opener).unwrap();
    let keeper = lockkeeper::open("Test-Whole+v1.0://user@host/a?b=c").await.unwrap();
    let _guard = keeper.mutex("a").lock().await.unwrap();
    let other = lockkeeper::Keeper::new(memory);
    assert!(other.mutex("a").try_lock().await.unwrap().is_none(), "the same store");
    let findings = lockkeeper::diagnose("Test-Whole+v1.0://user@host/a?b=c").await.unwrap();
    assert!(!findings.is_empty());
}

#[test]
fn a_registered_scheme_is_opened_in_blocking_code() {
    register("test-blocking", |_| async { Ok(Memory::new()) }).unwrap();
    let keeper = lockkeeper::blocking::open("test-blocking:").unwrap();
    keeper.mutex("a").blocking_lock().unwrap().blocking_release().unwrap();
}

#[test]
fn a_scheme_that_is_taken_is_refused_and_stays_what_it_was() {
    let opened = Arc::new(AtomicUsize::new(0));
    let counts = opened.clone();
    let first = move |_| {
        counts.fetch_add(1, Ordering::SeqCst);
        async { Ok(Memory::new()) }
    };
    register("test-taken", first).unwrap();
    // Also those of Lockkeeper itself, with the feature on or off.
    for taken in ["test-taken", "Test-Taken", "memory", "REDIS", "rediss+cluster", "postgresql"] {
        let message = refused(register(taken, |_| async { Ok(Memory::new()) }));
        let name = taken.to_ascii_lowercase();
        assert!(message.contains(&format!("the store scheme {name:?} is taken")), "{message}");
    }
    lockkeeper::blocking::open("test-taken:").unwrap();
    assert_eq!(opened.load(Ordering::SeqCst), 1);
}

#[test]
fn what_cannot_be_a_scheme_is_refused() {
    for bad in ["", " ", "a b", "1a", "-a", "a_b", "a:", "é", "a/b", "etcd\n"] {
        let message = refused(register(bad, |_| async { Ok(Memory::new()) }));
        assert!(message.contains("not a URL scheme"), "{bad:?}: {message}");
    }
    let message = refused(register("etcd://user:hunter2@host", |_| async { Ok(Memory::new()) }));
    assert!(!message.contains("hunter2"), "{message}");
}

#[tokio::test]
async fn an_unknown_scheme_is_answered_with_the_registered_ones() {
    register("test-listed", |_| async { Ok(Memory::new()) }).unwrap();
    let error = lockkeeper::open("test-unknown://user:hunter2@host").await.unwrap_err();
    let message = error.to_string();
    assert!(message.contains("unknown store scheme \"test-unknown\""), "{message}");
    assert!(message.contains("test-listed:"), "{message}");
    assert!(!message.contains("hunter2"), "{message}");
}

#[tokio::test]
async fn the_error_of_an_opener_is_that_of_open() {
    let fail =
        |_| async { Err::<Memory, _>(Error::new(ErrorKind::Unavailable, "nothing listens there")) };
    register("test-fails", fail).unwrap();
    let error = lockkeeper::open("test-fails://host").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("nothing listens there"), "{error}");
}

#[tokio::test]
async fn a_store_without_checks_of_its_own_is_diagnosed_by_opening_it() {
    // A scheme that starts like another is not that one.
    register("redis-like", |_| async { Ok(Memory::new()) }).unwrap();
    let findings = lockkeeper::diagnose("redis-like:").await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].severity, Severity::Ok, "{findings:?}");
}

#[test]
fn of_threads_that_register_one_scheme_at_the_same_time_one_succeeds() {
    let barrier = Arc::new(Barrier::new(8));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let barrier = barrier.clone();
            std::thread::spawn(move || {
                barrier.wait();
                register("test-raced", |_| async { Ok(Memory::new()) }).is_ok()
            })
        })
        .collect();
    let registered = threads.into_iter().map(|thread| thread.join().unwrap());
    assert_eq!(registered.filter(|ok| *ok).count(), 1);
}
