//! Locks around the handlers of axum, and around the services of tower that are not axum's.
//!
//! | | |
//! |---|---|
//! | [`LockLayer`] | one request at a time for each order, on all instances; the others get 409 |
//! | [`Held`] | the lock of this request and its fence, for a handler |
//! | [`LockError`] | an error of a handler's own locks, as a response |
//! | [`ProblemLayer`] | how refusals are worded, once for the app: another status than 409, who holds |
//! | [`FenceLayer`] | on the other side: refuses requests whose fence is stale |
//!
//! Refusals are `application/problem+json` (RFC 9457), with the members `title`, `status`, `detail`, `lock` (the name),
//! `reason` (`not_acquired`, `unavailable`, `lost`, `bad_name`, `stale_fence`, `bad_fence`, `internal`) and, if it is switched on, `holder`. What
//! exactly went wrong goes to the log, by `tracing`, and not to the client.
//!
//! # What is locked
//!
//! A layer takes its key from the value that the handler's extractor parsed
//! ([`key_from`](LockLayer::key_from)), so that all spellings of one resource have one lock and one fence. A
//! [template](LockLayer::key) over the text of the path does not have that property.
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

/// The code in the guide, so that it is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/fencing.md")]
struct Guide;
