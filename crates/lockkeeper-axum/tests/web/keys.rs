//! Keys from extractors.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRef, FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{Method, Request, StatusCode};
use axum::response::Response;
use axum::routing::{post as post_route, put};
use axum::{Extension, Router};
use lockkeeper::{Fence, FenceRegister, Keeper};
use lockkeeper_axum::{FenceLayer, Held, LockLayer, X_FENCE};
use lockkeeper_testkit::wait::soon;

use crate::common::{
    Gate, keeper, post, rejected, request, send, start_request, text, wait_until_free,
};

/// Spellings of one order, as `Path<u64>` parses them.
const SPELLINGS: [&str; 5] = ["42", "042", "+42", "%34%32", "%2B0042"];

async fn pay(Path(_): Path<u64>, held: Held, State(gate): State<Gate>) -> String {
    gate.pass().await;
    held.name().to_owned()
}

fn shop(keeper: &Keeper, gate: &Gate) -> Router {
    let lock = LockLayer::new(keeper.clone())
        .key_from::<Path<u64>, _>(|Path(order_id)| format!("order:{order_id}"));
    Router::new()
        .route("/orders/{order_id}/pay", post_route(pay))
        .route("/orders/{order_id}/pay/", post_route(pay))
        .route_layer(lock)
        .with_state(gate.clone())
}

async fn write(app: &Router, path: &str, fence: u64) -> Response {
    let request = Request::put(path).header(X_FENCE, fence).body(Body::empty()).unwrap();
    send(app, request).await
}

#[tokio::test]
async fn all_spellings_of_an_order_share_one_lock() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = shop(&keeper, &gate);
    let first = start_request(&app, "/orders/42/pay", &gate).await;
    for spelling in SPELLINGS {
        for slash in ["", "/"] {
            let path = format!("/orders/{spelling}/pay{slash}");
            let answer = post(&app, &path).await;
            let problem = rejected(answer, StatusCode::CONFLICT, "not_acquired").await;
            assert_eq!(problem["lock"], "order:42", "{path}");
        }
    }
    gate.open(2);
    assert_eq!(text(soon("the first", first).await.unwrap()).await, "order:42");
    assert_eq!(text(post(&app, "/orders/43/pay").await).await, "order:43");
    assert_eq!(gate.started(), 2);
    wait_until_free(&keeper).await;
}

#[tokio::test]
async fn all_spellings_of_an_order_share_one_fence() {
    let fences = FenceLayer::new(FenceRegister::in_memory())
        .key_from::<Path<u64>, _>(|Path(order_id)| format!("order:{order_id}"));
    let written = async |Path(_): Path<u64>, Extension(fence): Extension<Fence>| fence.to_string();
    let app: Router = Router::new().route("/orders/{order_id}", put(written)).route_layer(fences);
    for (at, spelling) in (0..).zip(SPELLINGS) {
        let path = format!("/orders/{spelling}");
        assert_eq!(text(write(&app, &path, 7 + at).await).await, (7 + at).to_string());
        for spelling in SPELLINGS {
            let stale = write(&app, &format!("/orders/{spelling}"), 6 + at).await;
            let problem = rejected(stale, StatusCode::PRECONDITION_FAILED, "stale_fence").await;
            assert_eq!(problem["lock"], "order:42");
        }
    }
}

#[tokio::test]
async fn a_request_that_the_extractor_rejects_gets_the_response_of_the_extractor_and_no_lock() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = shop(&keeper, &gate);
    let plain: Router =
        Router::new().route("/orders/{order_id}/pay", post_route(async |Path(_): Path<u64>| ()));
    for order_id in ["x", "-1", "4 2", "18446744073709551616", "%FF", "42%00"] {
        let path = format!("/orders/{}/pay", order_id.replace(' ', "%20"));
        let (answer, without) = (post(&app, &path).await, post(&plain, &path).await);
        assert_eq!(answer.status(), StatusCode::BAD_REQUEST, "{path}");
        assert_eq!(answer.headers(), without.headers(), "{path}");
        assert_eq!(text(answer).await, text(without).await, "{path}");
    }
    assert_eq!(gate.started(), 0);
    wait_until_free(&keeper).await;

    // No route was matched, so there are no path parameters. The request is not served without a lock.
    let lock = LockLayer::new(keeper.clone()).key_from(|Path(id): Path<u64>| id.to_string());
    let outside: Router = Router::new().fallback(async || "served").layer(lock);
    let answer = post(&outside, "/orders/42/pay").await;
    assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn the_extractor_does_not_run_for_methods_that_are_not_listed() {
    let lock = LockLayer::new(keeper())
        .key_from(|Path(id): Path<u64>| format!("order:{id}"))
        .methods([Method::POST]);
    let app: Router =
        Router::new().route("/{id}", put(async |held: Option<Held>| held.is_none().to_string()));
    let app = app.route_layer(lock);
    assert_eq!(text(send(&app, request(Method::PUT, "/x")).await).await, "true");
}

/// A tenant, from an extractor that uses a header and a table in the router's state.
#[derive(Debug)]
struct Tenant(u32);

#[derive(Clone)]
struct Tenants(Arc<[(&'static str, u32)]>);

impl<S> FromRequestParts<S> for Tenant
where
    S: Send + Sync,
    Tenants: FromRef<S>,
{
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, StatusCode> {
        let host = parts.headers.get("host").and_then(|host| host.to_str().ok());
        let host = host.unwrap_or_default().to_ascii_lowercase();
        let tenants = Tenants::from_ref(state);
        let known = tenants.0.iter().find(|(name, _)| *name == host);
        known.map(|(_, id)| Self(*id)).ok_or(StatusCode::FORBIDDEN)
    }
}

#[tokio::test]
async fn a_key_can_use_several_extractors_and_the_state() {
    let tenants = Tenants([("a.example", 1), ("b.example", 2)].into());
    let lock = LockLayer::new(keeper()).key_from_with_state(
        tenants.clone(),
        |(Tenant(tenant), Path(order_id)): (Tenant, Path<u64>)| format!("{tenant}/{order_id}"),
    );
    let name = async |_: Tenant, held: Held| held.name().to_owned();
    let app = Router::new().route("/{id}", post_route(name)).route_layer(lock).with_state(tenants);
    let call = async |host: &str| {
        let request = Request::post("/042").header("host", host).body(Body::empty()).unwrap();
        send(&app, request).await
    };
    assert_eq!(text(call("a.example").await).await, "1/42");
    assert_eq!(text(call("A.EXAMPLE").await).await, "1/42");
    assert_eq!(text(call("b.example").await).await, "2/42");
    assert_eq!(call("c.example").await.status(), StatusCode::FORBIDDEN);
}
