//! Registered URL schemes.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use lockkeeper::backend::register;
use lockkeeper::{Error, ErrorKind, Memory, Severity};

#[track_caller]
fn rejected(answer: lockkeeper::Result<()>) -> String {
    let error = answer.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    error.to_string()
}

#[tokio::test]
async fn the_opener_of_a_registered_scheme_receives_the_whole_url() {
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
fn blocking_code_opens_a_registered_scheme() {
    register("test-blocking", |_| async { Ok(Memory::new()) }).unwrap();
    let keeper = lockkeeper::blocking::open("test-blocking:").unwrap();
    keeper.mutex("a").blocking_lock().unwrap().blocking_release().unwrap();
}

#[test]
fn a_scheme_that_is_taken_is_rejected_and_keeps_its_opener() {
    let opened = Arc::new(AtomicUsize::new(0));
    let counts = opened.clone();
    let first = move |_| {
        counts.fetch_add(1, Ordering::SeqCst);
        async { Ok(Memory::new()) }
    };
    register("test-taken", first).unwrap();
    // Built-in schemes are taken whether their feature is on or off.
    for taken in ["test-taken", "Test-Taken", "memory", "REDIS", "rediss+cluster", "postgresql"] {
        let message = rejected(register(taken, |_| async { Ok(Memory::new()) }));
        let name = taken.to_ascii_lowercase();
        assert!(message.contains(&format!("the store scheme {name:?} is taken")), "{message}");
    }
    lockkeeper::blocking::open("test-taken:").unwrap();
    assert_eq!(opened.load(Ordering::SeqCst), 1);
}

#[test]
fn an_invalid_scheme_is_rejected() {
    for bad in ["", " ", "a b", "1a", "-a", "a_b", "a:", "é", "a/b", "etcd\n"] {
        let message = rejected(register(bad, |_| async { Ok(Memory::new()) }));
        assert!(message.contains("not a URL scheme"), "{bad:?}: {message}");
    }
    let message = rejected(register("etcd://user:hunter2@host", |_| async { Ok(Memory::new()) }));
    assert!(!message.contains("hunter2"), "{message}");
}

#[tokio::test]
async fn the_error_for_an_unknown_scheme_lists_the_registered_ones() {
    register("test-listed", |_| async { Ok(Memory::new()) }).unwrap();
    let error = lockkeeper::open("test-unknown://user:hunter2@host").await.unwrap_err();
    let message = error.to_string();
    assert!(message.contains("unknown store scheme \"test-unknown\""), "{message}");
    assert!(message.contains("test-listed:"), "{message}");
    assert!(!message.contains("hunter2"), "{message}");
}

#[tokio::test]
async fn open_returns_the_error_of_the_opener() {
    let fail =
        |_| async { Err::<Memory, _>(Error::new(ErrorKind::Unavailable, "connection refused")) };
    register("test-fails", fail).unwrap();
    let error = lockkeeper::open("test-fails://host").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("connection refused"), "{error}");
}

#[tokio::test]
async fn a_registered_store_is_diagnosed_by_opening_it() {
    // The prefix of a built-in scheme must not select the checks of that store.
    register("redis-like", |_| async { Ok(Memory::new()) }).unwrap();
    let findings = lockkeeper::diagnose("redis-like:").await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].severity, Severity::Ok, "{findings:?}");
}

#[test]
fn one_of_several_concurrent_registrations_succeeds() {
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
