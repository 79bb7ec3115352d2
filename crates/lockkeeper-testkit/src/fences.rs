//! The behaviour that every fence register must have.

use lockkeeper_core::{ErrorKind, Fence, FenceCheck, FenceRegister};
use tokio::task::JoinSet;

use crate::wait::soon;

/// The number of fences that are checked concurrently, per name.
const CONCURRENT: u64 = 24;
/// The number of names.
const NAMES: u64 = 12;

/// Checks a register through several handles, as from several processes. The checks use the handles in
/// turn. All names start with `register`.
///
/// # Panics
///
/// If the register accepts a stale fence or rejects a valid one.
pub async fn check_register(handles: &[FenceRegister]) {
    a_lower_fence_is_stale_and_the_same_passes_again(handles).await;
    names_are_independent(handles).await;
    fences_are_compared_as_numbers_over_their_whole_range(handles).await;
    of_concurrent_fences_the_highest_is_stored(handles).await;
    let refused = handles[0].check("", fence(1)).await;
    assert_eq!(refused.map_err(|error| error.kind()), Err(ErrorKind::InvalidName));
}

fn fence(number: u64) -> Fence {
    Fence::new(number).expect("a fence")
}

/// Uses the handles in turn.
async fn check(handles: &[FenceRegister], name: &str, number: u64) -> FenceCheck {
    let handle = &handles[usize::try_from(number).unwrap_or(0) % handles.len()];
    let checked = soon("a check", handle.check(name, fence(number))).await;
    checked.unwrap_or_else(|error| panic!("{error}"))
}

async fn a_lower_fence_is_stale_and_the_same_passes_again(handles: &[FenceRegister]) {
    let stale = FenceCheck::Stale { highest: fence(7) };
    let expected = [(5, FenceCheck::Passed), (5, FenceCheck::Passed), (7, FenceCheck::Passed)];
    let expected = expected.into_iter().chain([(5, stale), (6, stale), (7, FenceCheck::Passed)]);
    for (number, expected) in expected {
        assert_eq!(check(handles, "register", number).await, expected, "{number}");
    }
}

async fn names_are_independent(handles: &[FenceRegister]) {
    let long = format!("register {}", "x".repeat(1015));
    let names =
        ["register a", "register A", "register a ", "register {a}", "register a}", "register %7D"];
    let names = names.into_iter().chain(["register 🔒", "register 'a'--", "register\na", &long]);
    for (number, name) in (1..=9).rev().zip(names) {
        assert_eq!(check(handles, name, number).await, FenceCheck::Passed, "{name:?}");
        assert_eq!(check(handles, name, number).await, FenceCheck::Passed, "{name:?}");
    }
}

async fn fences_are_compared_as_numbers_over_their_whole_range(handles: &[FenceRegister]) {
    let max = Fence::MAX.get();
    // As text or as floating-point numbers, these would compare differently.
    let rising = [1, 9, 10, 99, 100, (1 << 53) - 1, 1 << 53, (1 << 53) + 1, max - 1, max];
    for pair in rising.windows(2) {
        assert_eq!(check(handles, "register range", pair[1]).await, FenceCheck::Passed);
        let stale = FenceCheck::Stale { highest: fence(pair[1]) };
        assert_eq!(check(handles, "register range", pair[0]).await, stale);
    }
}

async fn of_concurrent_fences_the_highest_is_stored(handles: &[FenceRegister]) {
    let mut checks = JoinSet::new();
    for round in 0..CONCURRENT {
        for name in 0..NAMES {
            // Each name gets all fences in a different order.
            let number = 1 + (round * 7 + name * 5) % CONCURRENT;
            let handles = handles.to_vec();
            checks.spawn(async move {
                let passed = check(&handles, &format!("register {name}"), number).await;
                (name, number, passed)
            });
        }
    }
    while let Some(checked) = checks.join_next().await {
        let (name, number, checked) = checked.expect("a check does not panic");
        if number == CONCURRENT {
            assert_eq!(checked, FenceCheck::Passed, "register {name}");
        }
        if let FenceCheck::Stale { highest } = checked {
            assert!(highest > fence(number), "register {name}");
        }
    }
    for name in 0..NAMES {
        let stale = FenceCheck::Stale { highest: fence(CONCURRENT) };
        assert_eq!(check(handles, &format!("register {name}"), CONCURRENT - 1).await, stale);
    }
}
