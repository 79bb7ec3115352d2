//! `FenceLayer`.

use axum::body::Body;
use axum::http::{HeaderValue, Method, Request, StatusCode};
use axum::response::Response;
use axum::routing::put;
use axum::{Extension, Router};
use lockkeeper::backend::BoxFuture;
use lockkeeper::{Error, ErrorKind, Fence, FenceCheck, FenceRegister, FenceStore, Name, Result};
use lockkeeper_axum::{FenceLayer, LockLayer, ProblemLayer, X_FENCE};

use crate::common::{keeper, post, rejected, request, send, text};

fn app(register: FenceRegister) -> Router {
    let fences = FenceLayer::new(register).key("order:{id}").methods([Method::PUT]);
    Router::new()
        .route(
            "/{id}",
            put(async |Extension(fence): Extension<Fence>| format!("under {fence}"))
                .get(async || "read"),
        )
        .route_layer(fences)
}

async fn write(app: &Router, path: &str, fences: &[&str]) -> Response {
    let mut request = Request::put(path);
    for fence in fences {
        request = request.header(X_FENCE, *fence);
    }
    send(app, request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn a_request_with_a_lower_fence_than_an_earlier_one_is_rejected() {
    let register = FenceRegister::in_memory();
    let app = app(register.clone());
    for (path, fence) in [("/1", "5"), ("/1", "5"), ("/1", "7"), ("/2", "1"), ("/%31", "8")] {
        let answer = write(&app, path, &[fence]).await;
        assert_eq!(answer.status(), StatusCode::OK, "{path} {fence}");
        assert_eq!(text(answer).await, format!("under {fence}"));
    }
    for fence in ["7", "1"] {
        let answer = write(&app, "/1", &[fence]).await;
        let problem = rejected(answer, StatusCode::PRECONDITION_FAILED, "stale_fence").await;
        assert_eq!(problem["lock"], "order:1");
    }
    // The register can be used without HTTP, too.
    let stale = register.check("order:1", Fence::new(7).unwrap()).await.unwrap();
    assert_eq!(stale, FenceCheck::Stale { highest: Fence::new(8).unwrap() });
}

#[tokio::test]
async fn a_missing_or_invalid_fence_is_a_client_error_and_changes_nothing() {
    let app = app(FenceRegister::in_memory());
    let bad: [&[&str]; 12] = [
        &[],
        &[""],
        &["0"],
        &["-1"],
        &["+1"],
        &["1.0"],
        &["0x10"],
        &["1e3"],
        &["9223372036854775808"],
        &["99999999999999999999999999"],
        &["5", "5"],
        &["5, 6"],
    ];
    for fences in bad {
        rejected(write(&app, "/1", fences).await, StatusCode::BAD_REQUEST, "bad_fence").await;
    }
    let mut odd = request(Method::PUT, "/1");
    odd.headers_mut().insert(X_FENCE, HeaderValue::from_bytes(b"\xff").unwrap());
    rejected(send(&app, odd).await, StatusCode::BAD_REQUEST, "bad_fence").await;
    assert_eq!(write(&app, "/1", &["1"]).await.status(), StatusCode::OK);
    assert_eq!(write(&app, "/1", &["9223372036854775807"]).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn methods_that_are_not_listed_need_no_fence() {
    let app = app(FenceRegister::in_memory());
    assert_eq!(write(&app, "/1", &["7"]).await.status(), StatusCode::OK);
    assert_eq!(text(send(&app, request(Method::GET, "/1")).await).await, "read");
}

#[derive(Debug)]
struct Down;

impl FenceStore for Down {
    fn name(&self) -> &'static str {
        "down"
    }

    fn check(&self, _: &Name, _: Fence) -> BoxFuture<'_, Result<FenceCheck>> {
        let error = Error::new(ErrorKind::Unavailable, "hunter2: connection refused");
        Box::pin(std::future::ready(Err(error)))
    }
}

#[tokio::test]
async fn if_the_register_does_not_answer_requests_are_rejected() {
    let app = app(FenceRegister::new(Down));
    let answer = write(&app, "/1", &["7"]).await;
    let problem = rejected(answer, StatusCode::SERVICE_UNAVAILABLE, "unavailable").await;
    assert!(!problem.to_string().contains("hunter2"), "{problem}");
}

/// A service acquires a lock and sends its fence to a second service that checks it.
#[tokio::test]
async fn a_paused_holder_is_rejected_by_its_fence() {
    let keeper = keeper();
    let storage = app(FenceRegister::in_memory()).layer(ProblemLayer::new(keeper.clone()));
    let paused = keeper.mutex("order:1").lock().await.unwrap();
    // The paused holder loses the lock without noticing.
    keeper.inspect().unwrap().break_lock("order:1").await.unwrap();
    let front: Router = {
        let storage = storage.clone();
        let pay = async move |held: lockkeeper_axum::Held| {
            let fence = held.fence().unwrap().to_string();
            write(&storage, "/1", &[&fence]).await
        };
        let lock = LockLayer::new(keeper.clone()).key("order:{id}");
        Router::new().route("/{id}", axum::routing::post(pay)).route_layer(lock)
    };
    assert_eq!(post(&front, "/1").await.status(), StatusCode::OK);
    let late = write(&storage, "/1", &[&paused.fence().unwrap().to_string()]).await;
    rejected(late, StatusCode::PRECONDITION_FAILED, "stale_fence").await;
}
