//! Invalid input is a typed error and never a panic.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Keeper, Label, Memory, Name, Owner};
use proptest::prelude::*;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

#[tokio::test(start_paused = true)]
async fn invalid_names_are_rejected() {
    let keeper = Keeper::new(Memory::new());
    let long = "x".repeat(1025);
    for bad in ["", "a\0b", "\0", long.as_str()] {
        let kinds = [
            keeper.mutex(bad).lock().await.unwrap_err().kind(),
            keeper.mutex(bad).try_lock().await.unwrap_err().kind(),
            keeper.rw_lock(bad).read().await.unwrap_err().kind(),
            keeper.semaphore(bad, 1).acquire().await.unwrap_err().kind(),
            keeper.semaphore(bad, 1).available().await.unwrap_err().kind(),
            keeper.lock_all([bad]).lock().await.unwrap_err().kind(),
            keeper.with_lock(bad, async |_| ()).await.unwrap_err().kind(),
            keeper.inspect().unwrap().show(bad).await.unwrap_err().kind(),
            keeper.inspect().unwrap().break_lock(bad).await.unwrap_err().kind(),
        ];
        assert!(kinds.iter().all(|kind| *kind == ErrorKind::InvalidName), "{bad:?}: {kinds:?}");
    }
    assert!(keeper.mutex("x".repeat(1024)).lock().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn options_out_of_range_are_rejected() {
    let keeper = Keeper::new(Memory::new());
    let mutex = keeper.mutex("a");
    let bad = [
        mutex.clone().ttl(Duration::ZERO),
        mutex.clone().ttl(Duration::from_millis(2)),
        mutex.clone().ttl(Duration::MAX),
        mutex.clone().max_hold(Duration::ZERO),
        mutex.clone().max_hold(Duration::from_nanos(1)),
        mutex.clone().label("x".repeat(257)),
        mutex.clone().label("two\nlines"),
    ];
    for mutex in bad {
        let error = mutex.lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{mutex:?}: {error}");
    }
    let all = keeper.lock_all(["a", "b"]).ttl(Duration::ZERO).lock().await.unwrap_err();
    assert_eq!(all.kind(), ErrorKind::InvalidOption);
    assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
    assert!(mutex.max_hold(Duration::MAX).label("").lock().await.is_ok());
}

#[test]
fn owners_parse_only_their_own_format() {
    let owner = Owner::random();
    assert_eq!(owner.to_string().parse::<Owner>().unwrap(), owner);
    for bad in ["", "x", &"0".repeat(31), &"g".repeat(32), &"+".repeat(32), &"0".repeat(33)] {
        assert!(bad.parse::<Owner>().is_err(), "{bad}");
    }
}

#[test]
fn the_default_label_is_valid_and_names_the_process() {
    let label = Label::default();
    assert_eq!(Label::new(label.as_str()).unwrap(), label);
    assert!(label.as_str().contains(&std::process::id().to_string()));
}

proptest! {
    #[test]
    fn every_name_is_accepted_or_rejected_with_invalid_name(name in any::<String>()) {
        let good = !name.is_empty() && name.len() <= 1024 && !name.contains('\0');
        prop_assert_eq!(Name::new(name.clone()).is_ok(), good);
        let lock = runtime().block_on(async {
            let keeper = Keeper::new(Memory::new());
            let guard = keeper.mutex(name.clone()).lock().await.map_err(|error| error.kind())?;
            let other = keeper.mutex(format!("{name}.")).try_lock().await;
            drop((guard, other));
            keeper.close().await;
            let left = keeper.inspect().unwrap().list("").await.unwrap();
            assert_eq!(left, []);
            Ok(())
        });
        let expected = if good { Ok(()) } else { Err(ErrorKind::InvalidName) };
        prop_assert_eq!(lock, expected);
    }

    #[test]
    fn every_duration_is_accepted_or_rejected_without_overflow(
        ttl in any::<Duration>(),
        max_wait in any::<Duration>(),
        max_hold in any::<Duration>(),
    ) {
        runtime().block_on(async {
            let keeper = Keeper::new(Memory::new()).ttl(ttl).max_wait(max_wait).max_hold(max_hold);
            match keeper.mutex("a").lock().await {
                Ok(guard) => {
                    assert!(guard.is_held());
                    assert!(guard.remaining().unwrap() < ttl.min(max_hold));
                    assert!(guard.expires_at().is_some());
                    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
                    let _ = guard.extend(max_wait).await;
                    guard.release().await.unwrap();
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidOption),
            }
        });
    }
}
