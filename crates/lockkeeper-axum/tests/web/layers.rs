//! `LockLayer` without failures: contention, keys, methods, nesting.

use std::convert::Infallible;
use std::io;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{Method, Request, Response, StatusCode};
use axum::routing::{any, get, post as post_route};
use futures_util::stream::once;
use lockkeeper::Keeper;
use lockkeeper_axum::{Held, LockLayer};
use lockkeeper_testkit::wait::soon;
use tower::{Layer as _, Service as _, ServiceExt as _, service_fn};

use crate::common::{
    Gate, header, keeper, post, rejected, request, secs, send, start_request, text,
    wait_for_waiters, wait_until_free,
};

/// An app in which each order is paid by one request at a time.
fn shop(keeper: &Keeper, gate: &Gate, lock: impl Fn(LockLayer) -> LockLayer) -> Router {
    let lock = lock(LockLayer::new(keeper.clone())).key("order:{order_id}");
    Router::new()
        .route("/orders/{order_id}/pay", any(async |State(gate): State<Gate>| gate.pass().await))
        .route_layer(lock)
        .with_state(gate.clone())
}

#[tokio::test]
async fn while_an_order_is_paid_a_second_request_for_it_is_rejected_and_other_orders_are_not() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = shop(&keeper, &gate, |lock| lock.ttl(secs(600)));
    let first = start_request(&app, "/orders/42/pay", &gate).await;

    let second = post(&app, "/orders/42/pay").await;
    // The remaining lease, rounded up.
    let retry_after: u64 = header(&second, "retry-after").unwrap().parse().unwrap();
    assert!((570..=600).contains(&retry_after), "{retry_after}");
    let problem = rejected(second, StatusCode::CONFLICT, "not_acquired").await;
    assert_eq!(problem["lock"], "order:42");
    assert_eq!(problem.get("holder"), None);

    gate.open(2);
    assert_eq!(post(&app, "/orders/43/pay").await.status(), StatusCode::OK);
    assert_eq!(soon("the first", first).await.unwrap().status(), StatusCode::OK);
    assert_eq!(gate.started(), 2);
    wait_until_free(&keeper).await;
}

#[tokio::test]
async fn the_lock_is_free_when_the_response_arrives() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = shop(&keeper, &gate, |lock| lock);
    for _ in 0..50 {
        gate.open(1);
        assert_eq!(post(&app, "/orders/42/pay").await.status(), StatusCode::OK);
        assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_request_that_waits_is_served_after_the_release() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = shop(&keeper, &gate, |lock| lock.wait(secs(600)));
    let first = start_request(&app, "/orders/42/pay", &gate).await;
    let second = tokio::spawn({
        let app = app.clone();
        async move { post(&app, "/orders/42/pay").await }
    });
    wait_for_waiters(&keeper, "order:42", 1).await;
    gate.open(2);
    for answer in [first, second] {
        assert_eq!(soon("a response", answer).await.unwrap().status(), StatusCode::OK);
    }
    assert_eq!((gate.started(), gate.max_running()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_wait_times_out_is_rejected_and_leaves_the_queue() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = shop(&keeper, &gate, |lock| lock.wait(secs(5)));
    let guard = keeper.mutex("order:42").lock().await.unwrap();
    let start = tokio::time::Instant::now();
    let answer = post(&app, "/orders/42/pay").await;
    assert!(start.elapsed() >= secs(5));
    rejected(answer, StatusCode::CONFLICT, "not_acquired").await;
    wait_for_waiters(&keeper, "order:42", 0).await;
    drop(guard);
    wait_until_free(&keeper).await;
}

#[tokio::test]
async fn parameters_are_decoded_before_they_are_compared() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = shop(&keeper, &gate, |lock| lock);
    for (name, path) in [
        ("order:42", "/orders/%34%32/pay"),
        ("order:a/b", "/orders/a%2Fb/pay"),
        ("order:{x}", "/orders/%7Bx%7D/pay"),
        ("order:größe 🔒", "/orders/gr%C3%B6%C3%9Fe%20%F0%9F%94%92/pay"),
        ("order:%32", "/orders/%2532/pay"),
    ] {
        let guard = keeper.mutex(name).lock().await.unwrap();
        let problem = rejected(post(&app, path).await, StatusCode::CONFLICT, "not_acquired").await;
        assert_eq!(problem["lock"], name);
        guard.release().await.unwrap();
        gate.open(1);
        assert_eq!(post(&app, path).await.status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn a_parameter_that_is_not_a_valid_name_is_a_client_error() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = shop(&keeper, &gate, |lock| lock);
    let long = format!("/orders/{}/pay", "x".repeat(1100));
    for path in ["/orders/%00/pay", "/orders/%FF/pay", &long] {
        rejected(post(&app, path).await, StatusCode::BAD_REQUEST, "bad_name").await;
    }
    assert_eq!(gate.started(), 0);
}

#[tokio::test]
async fn a_route_without_the_parameter_is_not_served() {
    let (keeper, gate) = (keeper(), Gate::new());
    let lock = LockLayer::new(keeper.clone()).key("order:{order_id}");
    let stay = async |State(gate): State<Gate>| gate.pass().await;
    let app = Router::new()
        .route("/orders/{id}/pay", post_route(stay))
        .route("/pay", post_route(stay))
        .layer(lock.clone())
        .with_state(gate.clone());
    for path in ["/orders/42/pay", "/pay", "/nowhere"] {
        rejected(post(&app, path).await, StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    }
    // Around a whole router, no route has been matched yet.
    let router = Router::new().route("/orders/{order_id}/pay", post_route(async || "paid"));
    let mut around = lock.layer(router);
    let call = around.call(request(Method::POST, "/orders/42/pay"));
    rejected(call.await.unwrap(), StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    assert_eq!(gate.started(), 0);
}

#[tokio::test]
async fn a_route_with_two_parameters_of_one_name_is_not_served() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("order:{id}");
    let orders: Router =
        Router::new().route("/orders/{id}", post_route(async || "paid")).route_layer(lock);
    let nested = Router::new().nest("/shops/{id}", orders.clone());
    let service = Router::new().nest_service("/shops/{id}", orders.clone());
    for app in [nested, service] {
        // The handler would get order 2 under the lock of order 1.
        let answer = post(&app, "/shops/1/orders/2").await;
        rejected(answer, StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    }
    let app = Router::new().nest("/shops/{shop}", orders);
    assert_eq!(text(post(&app, "/shops/1/orders/2").await).await, "paid");
    wait_until_free(&keeper).await;
}

#[tokio::test]
async fn a_route_layer_does_not_change_404_responses() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = shop(&keeper, &gate, |lock| lock);
    assert_eq!(post(&app, "/nowhere").await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn methods_that_are_not_listed_are_served_without_a_lock() {
    let (keeper, gate) = (keeper(), Gate::new());
    let held = async |held: Option<Held>| held.map_or("free", |_| "held");
    let lock = LockLayer::new(keeper.clone()).key("order:{id}").methods([Method::GET]);
    let app: Router = Router::new().route("/{id}", any(held)).route_layer(lock);
    let _guard = keeper.mutex("order:1").lock().await.unwrap();
    for (method, locked) in
        [(Method::GET, true), (Method::HEAD, true), (Method::POST, false), (Method::OPTIONS, false)]
    {
        let answer = send(&app, request(method.clone(), "/1")).await;
        let expected = if locked { StatusCode::CONFLICT } else { StatusCode::OK };
        assert_eq!(answer.status(), expected, "{method}");
        let answer = text(send(&app, request(method.clone(), "/2")).await).await;
        if method != Method::HEAD {
            assert_eq!(answer, if locked { "held" } else { "free" }, "{method}");
        }
    }
    // By default, all methods except OPTIONS are locked.
    let app = shop(&keeper, &gate, |lock| lock);
    gate.open(1);
    let answer = send(&app, request(Method::OPTIONS, "/orders/1/pay")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    for method in [Method::GET, Method::HEAD, Method::DELETE, Method::PATCH] {
        let answer = send(&app, request(method.clone(), "/orders/1/pay")).await;
        assert_eq!(answer.status(), StatusCode::CONFLICT, "{method}");
    }
}

#[tokio::test]
async fn a_head_request_to_a_get_handler_is_locked() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("report").methods([Method::GET]);
    let app: Router = Router::new().route("/", get(async || "report")).route_layer(lock);
    let _guard = keeper.mutex("report").lock().await.unwrap();
    let answer = send(&app, request(Method::HEAD, "/")).await;
    assert_eq!(answer.status(), StatusCode::CONFLICT);
}

#[tokio::test]
async fn nested_layers_hold_both_locks_and_the_handler_sees_both_fences() {
    let keeper = keeper();
    let app: Router = Router::new()
        .route(
            "/{shop}/{order}",
            post_route(async |Path((shop, order)): Path<(String, String)>, held: Held| {
                let outer = held.outer().unwrap();
                assert_eq!((outer.name(), held.name()), (&*format!("shop:{shop}"), &*order));
                assert!(
                    outer.fence().is_some() && held.fence().is_some() && outer.outer().is_none()
                );
                "both"
            }),
        )
        .route_layer(LockLayer::new(keeper.clone()).key("{order}"))
        .route_layer(LockLayer::new(keeper.clone()).key("shop:{shop}"));
    assert_eq!(text(post(&app, "/a/1").await).await, "both");
    for name in ["shop:a", "1"] {
        let guard = keeper.mutex(name).lock().await.unwrap();
        let problem =
            rejected(post(&app, "/a/1").await, StatusCode::CONFLICT, "not_acquired").await;
        assert_eq!(problem["lock"], name);
        guard.release().await.unwrap();
        // The outer lock is released, too.
        assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn two_layers_with_the_same_key_reject_and_release_their_locks() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("{order}");
    let app: Router = Router::new()
        .route("/{order}", post_route(async || "paid"))
        .route_layer(lock.clone())
        .route_layer(lock);
    rejected(post(&app, "/1").await, StatusCode::CONFLICT, "not_acquired").await;
    assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
}

#[tokio::test]
async fn held_without_a_layer_is_a_server_error() {
    let app: Router = Router::new()
        .route("/", post_route(async |_: Held| "held"))
        .route("/maybe", post_route(async |held: Option<Held>| held.is_none().to_string()));
    rejected(post(&app, "/").await, StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    assert_eq!(text(post(&app, "/maybe").await).await, "true");
}

#[tokio::test]
async fn a_guard_that_the_handler_takes_covers_a_streamed_body() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("order:{id}");
    let app: Router = Router::new()
        .route(
            "/{id}",
            post_route(async |held: Held| {
                let guard = held.take().unwrap();
                assert!(held.take().is_none());
                Body::from_stream(once(async move {
                    assert!(guard.is_held());
                    Ok::<_, Infallible>("guarded")
                }))
            }),
        )
        .route_layer(lock);
    let streaming = post(&app, "/1").await;
    assert_eq!(streaming.status(), StatusCode::OK);
    rejected(post(&app, "/1").await, StatusCode::CONFLICT, "not_acquired").await;
    assert_eq!(text(streaming).await, "guarded");
    wait_until_free(&keeper).await;
    assert_eq!(post(&app, "/1").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn any_tower_service_can_be_locked_by_a_key_from_the_request() {
    let (keeper, gate) = (keeper(), Gate::new());
    let lock = LockLayer::new(keeper.clone())
        .key_fn(|head| Some(head.headers.get("x-account")?.to_str().ok()?.to_owned()));
    let service = lock.layer(service_fn({
        let gate = gate.clone();
        move |request: Request<String>| {
            let gate = gate.clone();
            async move {
                let held = request.extensions().get::<Held>().cloned();
                gate.open(1);
                gate.pass().await;
                match request.body().as_str() {
                    "fail" => Err(io::Error::other("it failed")),
                    _ => Ok(Response::new(held.map_or("free".to_owned(), |h| h.name().to_owned()))),
                }
            }
        }
    }));
    let call = |account: Option<&str>, body: &str| {
        let request = Request::builder();
        let request = match account {
            Some(account) => request.header("x-account", account),
            None => request,
        };
        service.clone().oneshot(request.body(body.to_owned()).unwrap())
    };
    assert_eq!(text(call(Some("7"), "").await.unwrap()).await, "7");
    // A request without a key is served without a lock, and an error of the service is passed through.
    assert_eq!(text(call(None, "").await.unwrap()).await, "free");
    assert_eq!(call(Some("7"), "fail").await.unwrap_err().to_string(), "it failed");
    assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
    let _guard = keeper.mutex("7").lock().await.unwrap();
    rejected(call(Some("7"), "").await.unwrap(), StatusCode::CONFLICT, "not_acquired").await;
    assert_eq!(gate.started(), 3);
}
