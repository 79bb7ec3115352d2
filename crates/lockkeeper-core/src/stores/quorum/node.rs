//! One node of a quorum, and its request in flight.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::Mutex as AsyncMutex;

use crate::contract::{Attempt, BoxFuture, Change, Claim, Release, Renewal};
use crate::error::Result;
use crate::fence::Fence;
use crate::release::release_until_confirmed;

/// The claim on one node, and the request that the node has not answered yet.
pub(super) struct Node {
    claim: Arc<AsyncMutex<Box<dyn Claim>>>,
    in_flight: Option<InFlight>,
}

/// A request in flight. The quorum polls it during its next operation, or in the background.
struct InFlight {
    request: Request,
    response: BoxFuture<'static, Response>,
}

/// A request to a node. Downgrades and releases carry the fence of the hold.
#[derive(Clone, Copy)]
pub(super) enum Request {
    Attempt(Option<Fence>),
    Renew(Duration),
    Downgrade(Duration, Option<Fence>),
    Release(Duration, Option<Fence>),
}

/// The response of a node.
pub(super) enum Response {
    Attempt(Result<Attempt>),
    Renewal(Result<Renewal>),
    Release(Option<Release>),
}

impl Node {
    pub(super) fn new(claim: Box<dyn Claim>) -> Self {
        Self { claim: Arc::new(AsyncMutex::new(claim)), in_flight: None }
    }

    /// Returns whether a release is in flight.
    pub(super) fn is_releasing(&self) -> bool {
        self.in_flight.as_ref().is_some_and(|sent| matches!(sent.request, Request::Release(..)))
    }

    /// Sends a request, unless a release is in flight. The release must be confirmed first: both have the same owner, so a
    /// release that arrived late would free the grant of a later attempt.
    pub(super) fn send(&mut self, request: Request, node_timeout: Duration) {
        if self.is_releasing() {
            return;
        }
        // A release waits for the request in flight, but only until the timeout: a hung node must not stay locked for
        // longer than necessary. A renewal waits for an attempt that may not have been sent yet: cancelled, that attempt
        // would leave the hold with one node less. Any other request in flight is cancelled.
        let before = self.in_flight.take().filter(|before| match request {
            Request::Release(..) => true,
            Request::Renew(_) | Request::Downgrade(..) => {
                matches!(before.request, Request::Attempt(_))
            }
            Request::Attempt(_) => false,
        });
        let claim = self.claim.clone();
        let response = Box::pin(async move {
            if let Some(before) = before {
                let _ = tokio::time::timeout(node_timeout, before.response).await;
            }
            let mut claim = claim.lock_owned().await;
            if let Request::Downgrade(_, Some(fence)) | Request::Release(_, Some(fence)) = request {
                claim.set_fence(fence);
            }
            match request {
                Request::Attempt(floor) => Response::Attempt(claim.attempt(floor).await),
                Request::Renew(ttl) => Response::Renewal(claim.renew(ttl).await),
                Request::Downgrade(ttl, _) => Response::Renewal(claim.downgrade(ttl).await),
                Request::Release(ttl, _) => {
                    Response::Release(release_until_confirmed(&mut **claim, ttl, |_| {}).await)
                }
            }
        });
        self.in_flight = Some(InFlight { request, response });
    }

    /// Polls the request in flight. `None` if there is none.
    pub(super) fn poll_response(&mut self, cx: &mut Context<'_>) -> Option<Poll<Response>> {
        let polled = self.in_flight.as_mut()?.response.as_mut().poll(cx);
        if polled.is_ready() {
            self.in_flight = None;
        }
        Some(polled)
    }

    /// Returns a future that completes when the store of the node reports a change.
    pub(super) fn changed(&self) -> BoxFuture<'static, Change> {
        let claim = self.claim.clone();
        Box::pin(async move { claim.lock_owned().await.changed().await })
    }

    /// Takes the release in flight, if there is one, to be completed elsewhere.
    pub(super) fn take_release(&mut self) -> Option<BoxFuture<'static, Response>> {
        if self.is_releasing() { self.in_flight.take().map(|sent| sent.response) } else { None }
    }
}
