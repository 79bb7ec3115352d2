//! Waits with timeouts that are long enough for a busy machine.
//!
//! ```
//! use lockkeeper_testkit::wait::{eventually, soon};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let task = tokio::spawn(async { 7 });
//! eventually("the task ends", async || task.is_finished()).await;
//! assert_eq!(soon("its output", task).await.unwrap(), 7);
//! # });
//! ```

use std::future::Future;
use std::panic::Location;
use std::time::Duration;

/// Longer than any successful operation takes, even on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// Aborts this test process if it still runs after this time, so that a hanging test fails. Only the first call has an
/// effect.
pub fn no_longer_than(limit: Duration) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(move || {
            std::thread::sleep(limit);
            eprintln!("a test hangs: aborting the process after {limit:?}");
            std::process::abort();
        });
    });
}

/// Awaits a future that should complete soon.
///
/// # Panics
///
/// If it takes longer than 30 seconds. The message names the operation and the caller.
#[track_caller]
pub fn soon<T, F: Future<Output = T>>(what: &str, future: F) -> impl Future<Output = T> {
    // In an async function, `Location::caller` would not be the caller.
    let from = Location::caller();
    async move {
        let output = tokio::time::timeout(SOON, future).await;
        output.unwrap_or_else(|_| panic!("{what}: not within {SOON:?}, awaited at {from}"))
    }
}

/// Waits until a condition holds, and checks it every few milliseconds.
///
/// # Panics
///
/// If it does not hold within 30 seconds. The message names the condition and the caller.
#[track_caller]
pub fn eventually(
    what: &str,
    mut condition: impl AsyncFnMut() -> bool,
) -> impl Future<Output = ()> {
    soon(what, async move {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_timeout_names_the_operation_and_the_caller() {
        let line = line!() + 1;
        let waiting = tokio::spawn(soon("never", std::future::pending::<()>()));
        let message = waiting.await.unwrap_err().into_panic();
        let message = message.downcast_ref::<String>().unwrap();
        let place = format!("{}:{line}:", file!());
        assert!(message.starts_with("never: not within 30s, awaited at "), "{message}");
        assert!(message.contains(&place), "{message}");
    }
}
