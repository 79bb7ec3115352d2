//! Waiting for what a test is about, with patience that no busy machine exhausts.
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

/// Longer than anything takes that works, even on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// Ends this test process if it still runs after this long: then one of its tests hangs, and whoever waits
/// for it should not. Only the first call counts. What ends with the process ends, too.
pub fn no_longer_than(limit: Duration) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(move || {
            std::thread::sleep(limit);
            eprintln!(
                "a test hangs: those that have not ended by now, after {limit:?}, never will"
            );
            std::process::abort();
        });
    });
}

/// Awaits what should not take long.
///
/// # Panics
///
/// If it takes half a minute. The message names what was waited for, and where.
#[track_caller]
pub fn soon<T, F: Future<Output = T>>(what: &str, future: F) -> impl Future<Output = T> {
    // An async function would not know its caller.
    let from = Location::caller();
    async move {
        let output = tokio::time::timeout(SOON, future).await;
        output.unwrap_or_else(|_| panic!("{what}: not within {SOON:?}, awaited at {from}"))
    }
}

/// Waits until something is so, and looks every few milliseconds.
///
/// # Panics
///
/// If it is not within half a minute. The message names what was waited for, and where.
#[track_caller]
pub fn eventually(what: &str, mut so: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    soon(what, async move {
        while !so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_in_vain_tells_what_for_and_where() {
        let line = line!() + 1;
        let waiting = tokio::spawn(soon("pigs fly", std::future::pending::<()>()));
        let message = waiting.await.unwrap_err().into_panic();
        let message = message.downcast_ref::<String>().unwrap();
        let place = format!("{}:{line}:", file!());
        assert!(message.starts_with("pigs fly: not within 30s, awaited at "), "{message}");
        assert!(message.contains(&place), "{message}");
    }
}
