//! How a claim receives notifications.

use std::sync::Arc;

use lockkeeper_core::{Background, ClaimSpec, Owner, Result};

use super::node::LockNode;
use super::notifications::Mailbox;
use crate::client::node::Node as _;
use crate::client::session::Session;
use crate::error::translate;
use crate::names::Keys;

/// The mailbox of a claim, on the node that has its keys.
pub(super) struct Inbox {
    owner: Owner,
    keys: Keys,
    background: Background,
    registration: Option<Registration>,
    /// For a claim that waits without a queue entry.
    subscription: Option<Subscription>,
}

#[derive(Clone)]
pub(super) struct Registration {
    node: Arc<LockNode>,
    pub(super) mailbox: Arc<Mailbox>,
}

/// The session on which a claim subscribes to releases, and whether the server has confirmed it.
struct Subscription {
    session: Arc<Session>,
    is_confirmed: bool,
}

impl Inbox {
    pub(super) fn new(spec: &ClaimSpec, keys: &Keys) -> Self {
        let (owner, keys, background) = (spec.owner, keys.clone(), spec.background.clone());
        Self { owner, keys, background, registration: None, subscription: None }
    }

    /// Registers a mailbox at the node. A claim that may have to wait calls this before it sends anything: a message may
    /// arrive before the reply.
    pub(super) fn register_at(&mut self, node: &Arc<LockNode>) {
        if self.registration.as_ref().is_some_and(|at| Arc::ptr_eq(&at.node, node)) {
            return;
        }
        self.unregister();
        let mailbox = node.mailboxes.add(self.owner);
        self.registration = Some(Registration { node: node.clone(), mailbox });
    }

    fn unregister(&mut self) {
        self.unsubscribe();
        if let Some(Registration { node, mailbox }) = self.registration.take() {
            node.mailboxes.remove(self.owner, &mailbox);
        }
    }

    pub(super) fn registration(&self) -> Option<Registration> {
        self.registration.clone()
    }

    /// Subscribes to releases, for a claim without a queue entry. Returns true if the subscription is new.
    pub(super) async fn subscribe(&mut self, at: &Registration) -> Result<bool> {
        let session = at.node.client().session().await?;
        if self.subscription.as_ref().is_some_and(|subscription| {
            subscription.is_confirmed && Arc::ptr_eq(&subscription.session, &session)
        }) {
            return Ok(false);
        }
        let channel = self.keys.holder();
        at.node.mailboxes.listen(channel, &at.mailbox);
        self.subscription = Some(Subscription { session: session.clone(), is_confirmed: false });
        session.subscribe(channel).await.map_err(translate)?;
        self.subscription = Some(Subscription { session, is_confirmed: true });
        Ok(true)
    }

    pub(super) fn unsubscribe(&mut self) {
        let (Some(subscription), Some(at)) = (self.subscription.take(), &self.registration) else {
            return;
        };
        let session = subscription.session;
        let channel = self.keys.holder().to_owned();
        if at.node.mailboxes.stop_listening(&channel, &at.mailbox) && !session.gone().is_cancelled()
        {
            let node = at.node.clone();
            self.background.spawn(async move {
                // Another claim may have subscribed in the meantime.
                if !node.mailboxes.is_listening(&channel) {
                    let _ = session.unsubscribe(&channel).await;
                    if node.mailboxes.is_listening(&channel) {
                        let _ = session.subscribe(&channel).await;
                    }
                }
            });
        }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.unregister();
    }
}
