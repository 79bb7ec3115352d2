//! Messages from the server, delivered to the claims that they are for.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockkeeper_core::{Fence, Owner};
use tokio::sync::Notify;

/// Proves that a pushed grant comes from a script that has read the waiter's record.
///
/// Every attempt draws a new one and stores it in its record, so a client without access to the keys cannot know it:
/// `PUBLISH` permission alone forges no grant. A subscriber of the channel sees it when it is used, and it is accepted
/// only once. It also identifies the attempt that a grant answers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Secret(Owner);

impl Secret {
    /// Draws 128 bits from the operating system.
    pub(crate) fn random() -> Self {
        Self(Owner::random())
    }

    /// Reads exactly 32 hexadecimal digits, so that two secrets compare as two numbers of 128 bits.
    fn read(text: &str) -> Option<Self> {
        text.parse().ok().map(Self)
    }

    /// Returns the text for the waiter's record.
    pub(crate) fn reveal(self) -> impl std::fmt::Display {
        self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// A message for a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notification {
    /// A release handed the lock off to the claim, in answer to the attempt with this secret.
    Granted { secret: Secret, fence: Fence },
    /// The state of the lock may have changed.
    Changed,
}

/// The notifications of one claim.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    /// The last grant, and whether there was a change, which may be that very grant.
    pending: Mutex<(Option<Notification>, bool)>,
    arrived: Notify,
}

impl Mailbox {
    fn put(&self, notification: Notification) {
        let mut pending = lock(&self.pending);
        match notification {
            Notification::Granted { .. } => pending.0 = Some(notification),
            Notification::Changed => pending.1 = true,
        }
        drop(pending);
        self.arrived.notify_one();
    }

    fn take(&self) -> Option<Notification> {
        let mut pending = lock(&self.pending);
        let change = |changed: &mut bool| std::mem::take(changed).then_some(Notification::Changed);
        pending.0.take().or_else(|| change(&mut pending.1))
    }

    /// Waits for the next notification.
    pub(crate) async fn next(&self) -> Notification {
        loop {
            if let Some(notification) = self.take() {
                return notification;
            }
            self.arrived.notified().await;
        }
    }
}

/// The mailboxes of all claims on one server.
#[derive(Debug, Default)]
pub(crate) struct Mailboxes {
    owners: Mutex<HashMap<Owner, Arc<Mailbox>>>,
    /// Claims that wait without a queue entry, by channel.
    listeners: Mutex<HashMap<String, Vec<Arc<Mailbox>>>>,
    /// The owners of the last messages that found no mailbox. A claim that acquires a free lock adds its mailbox only after
    /// the grant.
    missed: Mutex<VecDeque<Owner>>,
}

/// The maximum length of `missed`.
const MAX_MISSED: usize = 256;

impl Mailboxes {
    pub(crate) fn add(&self, owner: Owner) -> Arc<Mailbox> {
        let mailbox = Arc::<Mailbox>::default();
        lock(&self.owners).insert(owner, mailbox.clone());
        if lock(&self.missed).contains(&owner) {
            mailbox.put(Notification::Changed);
        }
        mailbox
    }

    /// Removes a mailbox, but not one that another claim of the same owner has put in its place: a ticket
    /// may be adopted before the claim that it was taken from is gone.
    pub(crate) fn remove(&self, owner: Owner, mailbox: &Arc<Mailbox>) {
        let mut owners = lock(&self.owners);
        if owners.get(&owner).is_some_and(|current| Arc::ptr_eq(current, mailbox)) {
            owners.remove(&owner);
        }
    }

    pub(crate) fn listen(&self, channel: &str, mailbox: &Arc<Mailbox>) {
        let mut listeners = lock(&self.listeners);
        let listeners = listeners.entry(channel.to_owned()).or_default();
        if !listeners.iter().any(|other| Arc::ptr_eq(other, mailbox)) {
            listeners.push(mailbox.clone());
        }
    }

    /// Returns true if no other claim listens on the channel.
    pub(crate) fn stop_listening(&self, channel: &str, mailbox: &Arc<Mailbox>) -> bool {
        let mut listeners = lock(&self.listeners);
        let Some(list) = listeners.get_mut(channel) else { return false };
        list.retain(|other| !Arc::ptr_eq(other, mailbox));
        let empty = list.is_empty();
        if empty {
            listeners.remove(channel);
        }
        empty
    }

    pub(crate) fn is_listening(&self, channel: &str) -> bool {
        lock(&self.listeners).contains_key(channel)
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.owners).is_empty() && lock(&self.listeners).is_empty()
    }

    /// Delivers a message that was published on a channel.
    pub(crate) fn deliver(&self, channel: &[u8], message: &[u8]) {
        let Ok(message) = std::str::from_utf8(message) else { return };
        let mut words = message.split(' ');
        let (word, owner) = (words.next(), words.next().and_then(|owner| owner.parse().ok()));
        let notification = match (word, words.next(), words.next()) {
            (Some("granted"), Some(secret), Some(fence)) => {
                let fence = fence.parse().ok().and_then(Fence::new);
                let Some((secret, fence)) = Secret::read(secret).zip(fence) else { return };
                Notification::Granted { secret, fence }
            }
            (Some("look"), ..) => Notification::Changed,
            (Some("free"), ..) => {
                let Ok(channel) = std::str::from_utf8(channel) else { return };
                for mailbox in lock(&self.listeners).get(channel).into_iter().flatten() {
                    mailbox.put(Notification::Changed);
                }
                return;
            }
            _ => return,
        };
        let Some(owner) = owner else { return };
        let owners = lock(&self.owners);
        let Some(mailbox) = owners.get(&owner).cloned() else {
            // With the owners locked: a mailbox that is added now sees it.
            let mut missed = lock(&self.missed);
            missed.truncate(MAX_MISSED - 1);
            missed.push_front(owner);
            return;
        };
        drop(owners);
        mailbox.put(notification);
    }

    /// Notifies all claims: messages may have been lost.
    pub(crate) fn notify_all(&self) {
        for mailbox in lock(&self.owners).values() {
            mailbox.put(Notification::Changed);
        }
        for mailbox in lock(&self.listeners).values().flatten() {
            mailbox.put(Notification::Changed);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
