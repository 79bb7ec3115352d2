//! Distributed locks as middleware for axum handlers and other tower services.
//!
//! | | |
//! |---|---|
//! | [`LockLayer`] | serves one request at a time per key, across all instances; rejects others with 409 |
//! | [`Held`] | the lock of the current request and its fence, as an extractor |
//! | [`LockError`] | converts the error of a lock that a handler takes itself into a response |
//! | [`ProblemLayer`] | configures rejections for the whole app: a status other than 409, the label of the holder |
//! | [`FenceLayer`] | for the protected service: rejects requests whose fence is stale |
//!
//! Rejections are `application/problem+json` (RFC 9457) with the members `title`, `status`, `detail`, `lock` (the
//! name), `reason` (`not_acquired`, `unavailable`, `lost`, `bad_name`, `stale_fence`, `bad_fence`, `internal`) and
//! optionally `holder`. The cause goes to the log, through `tracing`, and not to the client.
//!
//! # Choosing the key
//!
//! Derive the key from the value that the handler's extractor parses ([`key_from`](LockLayer::key_from)). All spellings
//! of a resource then share one lock and one fence. A [template](LockLayer::key) over the text of the path does not
//! guarantee that.
//!
//! # Examples
//!
//! ```
//! use axum::{Router, extract::Path, routing::post};
//! use lockkeeper_axum::{Held, LockLayer};
//!
//! async fn pay(Path(order_id): Path<u64>, held: Held) -> String {
//!     format!("{order_id} paid under fence {:?}", held.fence())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper::Result<()> {
//! let keeper = lockkeeper::open("memory:").await?; // redis://… for more than one instance
//! let lock = LockLayer::new(keeper)
//!     .key_from(|Path(order_id): Path<u64>| format!("order:{order_id}"));
//! let app: Router = Router::new()
//!     .route("/orders/{order_id}/pay", post(pay))
//!     .route_layer(lock);
//! # let _ = app;
//! # Ok(())
//! # }
//! ```

mod fence_layer;
mod held;
mod lock_layer;
mod problem;
mod problem_layer;
mod target;

pub use fence_layer::{FenceLayer, FenceService, X_FENCE};
pub use held::{Held, NotHeld};
pub use lock_layer::{LockLayer, LockService};
pub use problem::LockError;
pub use problem_layer::{ProblemLayer, ProblemService};
pub use target::{Key, NoKey};

/// Compiles and runs the code of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/fencing.md")]
struct Guide;
