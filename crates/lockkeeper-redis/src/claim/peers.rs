//! The nodes of one quorum, which must be different servers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockkeeper_core::{Error, Result};

use crate::client::identity::Identity;
use crate::error::config;

/// Which server each node of a quorum is connected to.
#[derive(Debug)]
struct Peers(Mutex<Vec<Node>>);

/// What is known of a node.
#[derive(Debug, Clone, Default)]
struct Node {
    /// The address and the run id of the server it was last connected to.
    server: Option<(String, String)>,
    /// Set while the node is another name for the server of an earlier one.
    duplicate: Option<Error>,
}

/// A node of a quorum, and its peers.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    peers: Arc<Peers>,
    index: usize,
}

impl Peer {
    /// Creates the peers of a quorum of `count` nodes.
    pub(crate) fn all(count: usize) -> Vec<Self> {
        let peers = Arc::new(Peers(Mutex::new(vec![Node::default(); count])));
        (0..count).map(|index| Self { peers: peers.clone(), index }).collect()
    }

    fn nodes(&self) -> MutexGuard<'_, Vec<Node>> {
        self.peers.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a new connection. Returns an error if another node is connected to the same run of a server: one server
    /// would have two votes.
    ///
    /// A server that does not report its run id cannot be compared.
    pub(crate) fn connected(&self, identity: &Identity) -> Result<()> {
        let address = identity.address().to_string();
        let Some(run) = identity.run() else { return Ok(()) };
        let mut nodes = self.nodes();
        let same = nodes.iter().enumerate().find_map(|(index, node)| {
            let (other, other_run) = node.server.as_ref()?;
            (index != self.index && other_run == run).then(|| other.clone())
        });
        let Some(node) = nodes.get_mut(self.index) else { return Ok(()) };
        if let Some(other) = same {
            let error = config(format!(
                "the nodes {other} and {address} are the same server: name each server once"
            ));
            *node = Node { server: None, duplicate: Some(error.clone()) };
            return Err(error);
        }
        *node = Node { server: Some((address, run.to_owned())), duplicate: None };
        Ok(())
    }

    /// Returns the error that stops this node from voting: another node is a duplicate. (A duplicate node itself is rejected
    /// when it connects, and checked again at each reconnect.)
    pub(crate) fn refusal(&self) -> Option<Error> {
        let nodes = self.nodes();
        let others = nodes.iter().enumerate().filter(|(index, _)| *index != self.index);
        others.into_iter().find_map(|(_, node)| node.duplicate.clone())
    }

    /// Returns the error of a node that is a duplicate, if any is.
    pub(crate) fn duplicate(&self) -> Option<Error> {
        self.nodes().iter().find_map(|node| node.duplicate.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(host: &str, run: &str) -> Identity {
        Identity::of(host, Some(run))
    }

    #[test]
    fn a_server_has_one_vote_until_one_of_its_names_leads_elsewhere() {
        let peers = Peer::all(3);
        peers[0].connected(&server("a", "run-1")).unwrap();
        peers[1].connected(&server("b", "run-2")).unwrap();
        // Again, after its connection was lost.
        peers[0].connected(&server("a", "run-1")).unwrap();
        let error = peers[2].connected(&server("alias", "run-1")).unwrap_err();
        assert!(error.to_string().contains("a:6379 and alias:6379"), "{error}");
        assert!(peers[0].refusal().is_some() && peers[1].refusal().is_some());
        assert!(peers[2].refusal().is_none(), "a duplicate is checked when it connects");
        peers[2].connected(&server("alias", "run-3")).unwrap();
        assert!(peers.iter().all(|peer| peer.refusal().is_none() && peer.duplicate().is_none()));
        // A server that does not report its run id is not compared.
        peers[0].connected(&Identity::of("a", None)).unwrap();
    }
}
