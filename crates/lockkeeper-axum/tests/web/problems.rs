//! The format of rejections.

use std::time::Duration;

use axum::Router;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::map_response;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post as post_route;
use lockkeeper::backend::{Backend, BoxFuture, Capabilities, Claim, ClaimSpec, Inspector, Quorum};
use lockkeeper::{Error, ErrorKind, Keeper, LockInfo, Memory, Name, Result};
use lockkeeper_axum::{LockError, LockLayer, ProblemLayer};
use std::sync::Arc;

use crate::common::{header, keeper, post, problem, rejected, secs, text};

fn locked(keeper: &Keeper) -> Router {
    let lock = LockLayer::new(keeper.clone()).key("order:{id}");
    Router::new().route("/{id}", post_route(async || "paid")).route_layer(lock)
}

#[tokio::test]
async fn a_problem_layer_sets_the_status_and_the_holder_for_the_whole_app() {
    let keeper = keeper().ttl(secs(600));
    let problems = ProblemLayer::new(keeper.clone()).not_acquired(StatusCode::LOCKED).show_holder();
    let own = {
        let keeper = keeper.clone();
        post_route(async move || -> Result<&'static str, LockError> {
            let guard = keeper.mutex("order:1").max_wait(Duration::ZERO).lock().await?;
            guard.release().await?;
            Ok("paid")
        })
    };
    let app = locked(&keeper).route("/own", own).layer(problems);
    assert_eq!(text(post(&app, "/1").await).await, "paid");
    assert_eq!(text(post(&app, "/own").await).await, "paid");
    let _guard = keeper.mutex("order:1").label("billing \"7\" <b>").lock().await.unwrap();
    for path in ["/1", "/own"] {
        let answer = post(&app, path).await;
        let retry_after: u64 = header(&answer, "retry-after").unwrap().parse().unwrap();
        assert!((570..=600).contains(&retry_after), "{path}: {retry_after}");
        let problem = rejected(answer, StatusCode::LOCKED, "not_acquired").await;
        assert_eq!(problem["holder"], "billing \"7\" <b>", "{path}");
        assert_eq!(problem["lock"], "order:1", "{path}");
    }
}

#[tokio::test]
async fn headers_that_inner_layers_add_to_a_rejection_are_kept() {
    let keeper = keeper();
    let add = async |mut response: Response| {
        response.headers_mut().insert("x-served-by", HeaderValue::from_static("one"));
        response
    };
    let app = locked(&keeper).layer(map_response(add)).layer(ProblemLayer::new(keeper.clone()));
    let _guard = keeper.mutex("order:1").lock().await.unwrap();
    let answer = post(&app, "/1").await;
    assert_eq!(header(&answer, "x-served-by"), Some("one"));
    rejected(answer, StatusCode::CONFLICT, "not_acquired").await;
}

#[tokio::test]
async fn headers_that_describe_the_replaced_body_are_removed() {
    let keeper = keeper();
    // Like a layer that compresses, or one that adds an ETag.
    let compress = async |mut response: Response| {
        for (name, value) in [("content-encoding", "gzip"), ("etag", "\"1\"")] {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        *response.body_mut() = "not JSON".into();
        response
    };
    let app =
        locked(&keeper).layer(map_response(compress)).layer(ProblemLayer::new(keeper.clone()));
    let _guard = keeper.mutex("order:1").lock().await.unwrap();
    let answer = post(&app, "/1").await;
    for name in ["content-encoding", "etag"] {
        assert_eq!(header(&answer, name), None);
    }
    rejected(answer, StatusCode::CONFLICT, "not_acquired").await;
}

#[tokio::test]
async fn retry_after_and_holder_ignore_a_semaphore_of_the_same_name() {
    let keeper = keeper();
    let semaphore = keeper.semaphore("order:1", 1).label("another").ttl(secs(6000));
    let _permit = semaphore.acquire().await.unwrap();
    let _guard = keeper.mutex("order:1").label("me").ttl(secs(600)).lock().await.unwrap();
    let app = locked(&keeper).layer(ProblemLayer::new(keeper.clone()).show_holder());
    let answer = post(&app, "/1").await;
    let retry_after: u64 = header(&answer, "retry-after").unwrap().parse().unwrap();
    assert!((570..=600).contains(&retry_after), "{retry_after}");
    assert_eq!(rejected(answer, StatusCode::CONFLICT, "not_acquired").await["holder"], "me");
}

#[tokio::test]
async fn a_conflict_response_of_the_service_is_not_changed() {
    let keeper = keeper();
    let conflict = async || (StatusCode::CONFLICT, "edited by another");
    let app: Router = Router::new()
        .route("/", post_route(conflict))
        .layer(ProblemLayer::new(keeper).not_acquired(StatusCode::LOCKED));
    let answer = post(&app, "/").await;
    assert_eq!(answer.status(), StatusCode::CONFLICT);
    assert_eq!(text(answer).await, "edited by another");
}

#[tokio::test]
async fn each_kind_of_error_has_its_status_and_none_discloses_details() {
    let cases = [
        (ErrorKind::TimedOut, StatusCode::CONFLICT, "not_acquired"),
        (ErrorKind::Unavailable, StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
        (ErrorKind::Lost, StatusCode::SERVICE_UNAVAILABLE, "lost"),
        (ErrorKind::Closed, StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
        (ErrorKind::InvalidName, StatusCode::BAD_REQUEST, "bad_name"),
        (ErrorKind::InvalidOption, StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        (ErrorKind::Unsupported, StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        (ErrorKind::Config, StatusCode::INTERNAL_SERVER_ERROR, "internal"),
    ];
    for (kind, status, reason) in cases {
        let error = Error::new(kind, "redis://user:hunter2@10.0.0.7/ said no");
        let source = std::io::Error::other("hunter2");
        let answer = LockError::from(error.with_source(source)).into_response();
        let headers = format!("{:?}", answer.headers());
        let problem = rejected(answer, status, reason).await;
        for secret in ["hunter2", "10.0.0.7", "redis"] {
            assert!(!problem.to_string().contains(secret), "{problem}");
            assert!(!headers.contains(secret), "{headers}");
        }
    }
    // The error itself is available to the handler.
    let error = LockError::from(Error::new(ErrorKind::Config, "no"));
    assert_eq!((error.to_string(), error.into_inner().kind()), ("no".into(), ErrorKind::Config));
}

#[tokio::test]
async fn a_name_with_special_characters_is_escaped_in_the_body() {
    let keeper = keeper();
    let name = "a\"b\\c\nd\u{1}e 🔒 </script>";
    let _guard = keeper.mutex(name).lock().await.unwrap();
    let error = keeper.mutex(name).max_wait(Duration::ZERO).lock().await.unwrap_err();
    let problem = problem(LockError::from(error).into_response()).await;
    assert_eq!(problem["lock"], name);
}

#[tokio::test]
async fn a_store_without_inspection_gets_a_rejection_without_retry_after() {
    let stores: Vec<Arc<dyn Backend>> = (0..3).map(|_| Arc::new(Memory::new()) as _).collect();
    let keeper = Keeper::new(Quorum::new(stores).unwrap());
    let app = locked(&keeper).layer(ProblemLayer::new(keeper.clone()).show_holder());
    let _guard = keeper.mutex("order:1").lock().await.unwrap();
    let answer = post(&app, "/1").await;
    assert_eq!(header(&answer, "retry-after"), None);
    assert_eq!(rejected(answer, StatusCode::CONFLICT, "not_acquired").await.get("holder"), None);
}

/// A store whose inspector fails or hangs.
#[derive(Debug)]
struct Opaque {
    inner: Memory,
    hangs: bool,
}

impl Backend for Opaque {
    fn name(&self) -> &'static str {
        "opaque"
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        self.inner.claim(spec)
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        Some(self)
    }
}

impl Inspector for Opaque {
    fn list(&self, _: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        Box::pin(std::future::pending())
    }

    fn show(&self, _: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let refused = Err(Error::new(ErrorKind::Unavailable, "connection refused"));
        let hangs = self.hangs;
        Box::pin(async move { if hangs { std::future::pending().await } else { refused } })
    }

    fn break_lock(&self, _: &Name) -> BoxFuture<'_, Result<usize>> {
        Box::pin(std::future::pending())
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn an_inspection_that_fails_or_hangs_does_not_delay_the_rejection() {
    for hangs in [false, true] {
        let keeper = Keeper::new(Opaque { inner: Memory::new(), hangs });
        let app = locked(&keeper).layer(ProblemLayer::new(keeper.clone()).show_holder());
        let _guard = keeper.mutex("order:1").lock().await.unwrap();
        let start = tokio::time::Instant::now();
        let answer = post(&app, "/1").await;
        assert!(start.elapsed() <= secs(2), "{:?}", start.elapsed());
        assert_eq!(header(&answer, "retry-after"), None);
        rejected(answer, StatusCode::CONFLICT, "not_acquired").await;
    }
}

#[tokio::test]
async fn retry_after_is_the_longest_lease_of_a_lock_and_the_shortest_of_a_semaphore() {
    let keeper = keeper();
    let readers = keeper.rw_lock("order:1");
    let _short = readers.clone().ttl(secs(600)).read().await.unwrap();
    let _long = readers.ttl(secs(6000)).read().await.unwrap();
    let answer = post(&locked(&keeper), "/1").await;
    let retry_after: u64 = header(&answer, "retry-after").unwrap().parse().unwrap();
    assert!((5900..=6000).contains(&retry_after), "{retry_after}");

    let gpu = keeper.semaphore("gpu", 2);
    let _long = gpu.clone().ttl(secs(6000)).acquire().await.unwrap();
    let _short = gpu.clone().ttl(secs(600)).acquire().await.unwrap();
    let app: Router = Router::new()
        .route(
            "/gpu",
            post_route(async move || {
                gpu.max_wait(Duration::ZERO).acquire().await.map(drop).map_err(LockError::from)
            }),
        )
        .layer(ProblemLayer::new(keeper));
    let answer = post(&app, "/gpu").await;
    let retry_after: u64 = header(&answer, "retry-after").unwrap().parse().unwrap();
    assert!((570..=600).contains(&retry_after), "{retry_after}");
}
