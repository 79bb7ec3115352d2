//! What a lock around a service does when nothing goes wrong but that others hold it.

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
    Room, at_work, header, keeper, nothing_left, post, queued, refused, request, secs, send, text,
};

/// Orders that are paid one request at a time, in a room.
fn shop(keeper: &Keeper, room: &Room, lock: impl Fn(LockLayer) -> LockLayer) -> Router {
    let lock = lock(LockLayer::new(keeper.clone())).key("order:{order_id}");
    Router::new()
        .route("/orders/{order_id}/pay", any(async |State(room): State<Room>| room.stay().await))
        .route_layer(lock)
        .with_state(room.clone())
}

#[tokio::test]
async fn while_one_pays_an_order_another_is_refused_and_other_orders_are_not() {
    let (keeper, room) = (keeper(), Room::new());
    let app = shop(&keeper, &room, |lock| lock.ttl(secs(600)));
    let first = at_work(&app, "/orders/42/pay", &room).await;

    let second = post(&app, "/orders/42/pay").await;
    // What is left of ten minutes, rounded up.
    let retry_after: u64 = header(&second, "retry-after").unwrap().parse().unwrap();
    assert!((570..=600).contains(&retry_after), "{retry_after}");
    let problem = refused(second, StatusCode::CONFLICT, "not_acquired").await;
    assert_eq!(problem["lock"], "order:42");
    assert_eq!(problem.get("holder"), None);

    room.let_out(2);
    assert_eq!(post(&app, "/orders/43/pay").await.status(), StatusCode::OK);
    assert_eq!(soon("the first", first).await.unwrap().status(), StatusCode::OK);
    assert_eq!(room.entered(), 2);
    nothing_left(&keeper).await;
}

#[tokio::test]
async fn who_has_the_answer_finds_the_lock_free() {
    let (keeper, room) = (keeper(), Room::new());
    let app = shop(&keeper, &room, |lock| lock);
    for _ in 0..50 {
        room.let_out(1);
        assert_eq!(post(&app, "/orders/42/pay").await.status(), StatusCode::OK);
        assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_request_that_may_wait_is_served_when_its_turn_comes() {
    let (keeper, room) = (keeper(), Room::new());
    let app = shop(&keeper, &room, |lock| lock.wait(secs(600)));
    let first = at_work(&app, "/orders/42/pay", &room).await;
    let second = tokio::spawn({
        let app = app.clone();
        async move { post(&app, "/orders/42/pay").await }
    });
    queued(&keeper, "order:42", 1).await;
    room.let_out(2);
    for answer in [first, second] {
        assert_eq!(soon("an answer", answer).await.unwrap().status(), StatusCode::OK);
    }
    assert_eq!((room.entered(), room.most()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_has_waited_in_vain_is_refused_and_leaves_the_queue() {
    let (keeper, room) = (keeper(), Room::new());
    let app = shop(&keeper, &room, |lock| lock.wait(secs(5)));
    let guard = keeper.mutex("order:42").lock().await.unwrap();
    let start = tokio::time::Instant::now();
    let answer = post(&app, "/orders/42/pay").await;
    assert!(start.elapsed() >= secs(5));
    refused(answer, StatusCode::CONFLICT, "not_acquired").await;
    queued(&keeper, "order:42", 0).await;
    drop(guard);
    nothing_left(&keeper).await;
}

#[tokio::test]
async fn parameters_are_decoded_before_they_are_compared() {
    let (keeper, room) = (keeper(), Room::new());
    let app = shop(&keeper, &room, |lock| lock);
    for (name, path) in [
        ("order:42", "/orders/%34%32/pay"),
        ("order:a/b", "/orders/a%2Fb/pay"),
        ("order:{x}", "/orders/%7Bx%7D/pay"),
        ("order:größe 🔒", "/orders/gr%C3%B6%C3%9Fe%20%F0%9F%94%92/pay"),
        ("order:%32", "/orders/%2532/pay"),
    ] {
        let guard = keeper.mutex(name).lock().await.unwrap();
        let problem = refused(post(&app, path).await, StatusCode::CONFLICT, "not_acquired").await;
        assert_eq!(problem["lock"], name);
        guard.release().await.unwrap();
        room.let_out(1);
        assert_eq!(post(&app, path).await.status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn a_parameter_that_no_name_can_have_is_the_clients_fault() {
    let (keeper, room) = (keeper(), Room::new());
    let app = shop(&keeper, &room, |lock| lock);
    let long = format!("/orders/{}/pay", "x".repeat(1100));
    for path in ["/orders/%00/pay", "/orders/%FF/pay", &long] {
        refused(post(&app, path).await, StatusCode::BAD_REQUEST, "bad_name").await;
    }
    assert_eq!(room.entered(), 0);
}

#[tokio::test]
async fn a_route_without_the_parameter_is_never_served_without_the_lock() {
    let (keeper, room) = (keeper(), Room::new());
    let lock = LockLayer::new(keeper.clone()).key("order:{order_id}");
    let stay = async |State(room): State<Room>| room.stay().await;
    let app = Router::new()
        .route("/orders/{id}/pay", post_route(stay))
        .route("/pay", post_route(stay))
        .layer(lock.clone())
        .with_state(room.clone());
    for path in ["/orders/42/pay", "/pay", "/nowhere"] {
        refused(post(&app, path).await, StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    }
    // Around a whole router, no route has been found yet.
    let router = Router::new().route("/orders/{order_id}/pay", post_route(async || "paid"));
    let mut around = lock.layer(router);
    let call = around.call(request(Method::POST, "/orders/42/pay"));
    refused(call.await.unwrap(), StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    assert_eq!(room.entered(), 0);
}

#[tokio::test]
async fn a_parameter_that_a_route_has_twice_is_never_taken_for_the_wrong_one() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("order:{id}");
    let orders: Router =
        Router::new().route("/orders/{id}", post_route(async || "paid")).route_layer(lock);
    let nested = Router::new().nest("/shops/{id}", orders.clone());
    let service = Router::new().nest_service("/shops/{id}", orders.clone());
    for app in [nested, service] {
        // The handler would be told of order 2, and the lock was that of order 1.
        let answer = post(&app, "/shops/1/orders/2").await;
        refused(answer, StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    }
    let app = Router::new().nest("/shops/{shop}", orders);
    assert_eq!(text(post(&app, "/shops/1/orders/2").await).await, "paid");
    nothing_left(&keeper).await;
}

#[tokio::test]
async fn a_route_layer_leaves_what_is_not_found_alone() {
    let (keeper, room) = (keeper(), Room::new());
    let app = shop(&keeper, &room, |lock| lock);
    assert_eq!(post(&app, "/nowhere").await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn methods_that_were_not_asked_for_are_let_through_without_a_lock() {
    let (keeper, room) = (keeper(), Room::new());
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
    // Unless something is said, all are locked but the one that only asks.
    let app = shop(&keeper, &room, |lock| lock);
    room.let_out(1);
    let answer = send(&app, request(Method::OPTIONS, "/orders/1/pay")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    for method in [Method::GET, Method::HEAD, Method::DELETE, Method::PATCH] {
        let answer = send(&app, request(method.clone(), "/orders/1/pay")).await;
        assert_eq!(answer.status(), StatusCode::CONFLICT, "{method}");
    }
}

#[tokio::test]
async fn a_head_request_to_a_get_handler_is_locked_like_it() {
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
        let problem = refused(post(&app, "/a/1").await, StatusCode::CONFLICT, "not_acquired").await;
        assert_eq!(problem["lock"], name);
        guard.release().await.unwrap();
        // The outer one was given back, too.
        assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn two_layers_with_the_same_key_refuse_and_leave_nothing_behind() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("{order}");
    let app: Router = Router::new()
        .route("/{order}", post_route(async || "paid"))
        .route_layer(lock.clone())
        .route_layer(lock);
    refused(post(&app, "/1").await, StatusCode::CONFLICT, "not_acquired").await;
    assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
}

#[tokio::test]
async fn a_handler_that_wants_a_lock_which_nobody_took_is_a_fault_of_the_server() {
    let app: Router = Router::new()
        .route("/", post_route(async |_: Held| "held"))
        .route("/maybe", post_route(async |held: Option<Held>| held.is_none().to_string()));
    refused(post(&app, "/").await, StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    assert_eq!(text(post(&app, "/maybe").await).await, "true");
}

#[tokio::test]
async fn a_guard_that_the_handler_takes_covers_what_is_streamed_after_it() {
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
    refused(post(&app, "/1").await, StatusCode::CONFLICT, "not_acquired").await;
    assert_eq!(text(streaming).await, "guarded");
    nothing_left(&keeper).await;
    assert_eq!(post(&app, "/1").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn any_tower_service_can_be_locked_by_a_key_from_the_request() {
    let (keeper, room) = (keeper(), Room::new());
    let lock = LockLayer::new(keeper.clone())
        .key_fn(|head| Some(head.headers.get("x-account")?.to_str().ok()?.to_owned()));
    let service = lock.layer(service_fn({
        let room = room.clone();
        move |request: Request<String>| {
            let room = room.clone();
            async move {
                let held = request.extensions().get::<Held>().cloned();
                room.let_out(1);
                room.stay().await;
                match request.body().as_str() {
                    "fail" => Err(io::Error::other("it failed")),
                    _ => Ok(Response::new(held.map_or("free".to_owned(), |h| h.name().to_owned()))),
                }
            }
        }
    }));
    let ask = |account: Option<&str>, body: &str| {
        let request = Request::builder();
        let request = match account {
            Some(account) => request.header("x-account", account),
            None => request,
        };
        service.clone().oneshot(request.body(body.to_owned()).unwrap())
    };
    assert_eq!(text(ask(Some("7"), "").await.unwrap()).await, "7");
    // A request without an account needs none, and an error of the service is the service's.
    assert_eq!(text(ask(None, "").await.unwrap()).await, "free");
    assert_eq!(ask(Some("7"), "fail").await.unwrap_err().to_string(), "it failed");
    assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
    let _guard = keeper.mutex("7").lock().await.unwrap();
    refused(ask(Some("7"), "").await.unwrap(), StatusCode::CONFLICT, "not_acquired").await;
    assert_eq!(room.entered(), 3);
}
