//! One server that keeps locks.

use std::sync::Arc;

use lockkeeper_core::Result;
use redis::Value;

use super::commands::{COMMANDS, CommandBatcher, DOWNGRADE, RELEASE};
use super::notifications::Mailboxes;
use super::peers::Peer;
use super::renewals::{RENEW, RenewalBatcher};
use super::uncontended::RecentContention;
use crate::client::events::EventHandler;
use crate::client::identity::Identity;
use crate::client::node::{Node, Sharing};
use crate::client::reconnecting::{ReconnectingClient, Target};
use crate::client::resp::Words;
use crate::client::script::Script;
use crate::client::session::Session;
use crate::client::settings::Settings;
use crate::error::translate;

/// A server, and what all claims on it share.
#[derive(Debug)]
pub(crate) struct LockNode {
    client: Arc<ReconnectingClient>,
    pub(crate) mailboxes: Arc<Mailboxes>,
    pub(crate) contention: RecentContention,
    pub(crate) commands: CommandBatcher,
    pub(crate) renewals: RenewalBatcher,
}

impl LockNode {
    pub(crate) fn new(
        settings: Arc<Settings>,
        target: Target,
        sharing: Sharing,
        peer: Option<Peer>,
        min_replicas: u32,
    ) -> Arc<Self> {
        let mailboxes = Arc::<Mailboxes>::default();
        let events = Arc::new(Events { mailboxes: mailboxes.clone(), peer });
        let client = ReconnectingClient::new(settings, target, events);
        let contention = RecentContention::default();
        let commands = CommandBatcher::new(client.clone(), sharing);
        let renewals = RenewalBatcher::new(client.clone(), sharing, min_replicas);
        Arc::new(Self { client, mailboxes, contention, commands, renewals })
    }

    /// Runs one script, which shares no call: `add` adds its keys and arguments. Also returns the session that it ran on.
    pub(crate) async fn run(
        &self,
        script: &Script,
        add: impl Fn(&mut Words),
    ) -> Result<(Arc<Session>, Value)> {
        let session = self.client.session().await?;
        let reply = session.run(script, add).await.map_err(translate)?;
        Ok((session, reply))
    }
}

impl Node for LockNode {
    fn client(&self) -> &Arc<ReconnectingClient> {
        &self.client
    }
}

/// Delivers messages to claims, and compares the servers of a quorum.
struct Events {
    mailboxes: Arc<Mailboxes>,
    peer: Option<Peer>,
}

impl EventHandler for Events {
    fn scripts(&self) -> Vec<&'static Script> {
        vec![&RELEASE, &COMMANDS, &RENEW, &DOWNGRADE]
    }

    fn connected(&self, server: &Identity) -> Result<()> {
        self.peer.as_ref().map_or(Ok(()), |peer| peer.connected(server))
    }

    fn message(&self, channel: &[u8], message: &[u8]) {
        self.mailboxes.deliver(channel, message);
    }

    fn reconnected(&self) {
        self.mailboxes.notify_all();
    }

    fn expects_messages(&self) -> bool {
        !self.mailboxes.is_empty()
    }
}
