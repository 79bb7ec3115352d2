//! What the nodes of a quorum answered in one round, and what that makes together.

use std::time::Duration;

use crate::contract::{Attempt, Grant, Holder, Retry};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;

/// A grant of a majority.
pub(super) struct LastGrant {
    pub(super) fence: Fence,
    /// What each node gave; `None` for one that was not waited for.
    nodes: Vec<Option<Fence>>,
}

impl LastGrant {
    pub(super) fn new(fence: Fence, said: &[Said]) -> Self {
        let given = |said: &Said| match said {
            Said::Granted(grant) => grant.fence,
            _ => None,
        };
        Self { fence, nodes: said.iter().map(given).collect() }
    }

    /// How many nodes say what they said then, so that nobody else had them in between, and how many may
    /// still say so.
    pub(super) fn standing(&self, said: &[Said]) -> (usize, usize) {
        let (mut same, mut open) = (0, 0);
        for (before, said) in self.nodes.iter().zip(said).filter(|(before, _)| before.is_some()) {
            match said {
                Said::Granted(grant) if grant.fence == *before => same += 1,
                Said::Nothing => open += 1,
                _ => {}
            }
        }
        (same, open)
    }
}

/// What a node has said in this round.
#[derive(Clone)]
pub(super) enum Said {
    Nothing,
    /// Not asked, because what an earlier round left on the node has not been given back yet.
    Absent,
    Granted(Grant),
    Contended {
        retry: Retry,
        holder: Holder,
    },
    /// The node is a store that could not decide itself.
    Undecided,
    Failed(Error),
}

impl From<Result<Attempt>> for Said {
    fn from(answer: Result<Attempt>) -> Self {
        match answer {
            Ok(Attempt::Granted(grant)) => Said::Granted(grant),
            Ok(Attempt::Contended { retry, holder }) => Said::Contended { retry, holder },
            Ok(Attempt::Undecided) => Said::Undecided,
            Err(error) => Said::Failed(error),
        }
    }
}

/// The nodes that granted with at least this fence.
pub(super) fn granted(said: &[Said], fence: Option<Fence>) -> impl Iterator<Item = (usize, Grant)> {
    said.iter().enumerate().filter_map(move |(i, said)| match said {
        Said::Granted(grant) if grant.fence >= fence => Some((i, *grant)),
        _ => None,
    })
}

/// For how long at least `n` of them last.
pub(super) fn nth_longest(leases: impl Iterator<Item = Duration>, n: usize) -> Option<Duration> {
    let mut leases: Vec<Duration> = leases.collect();
    leases.sort_unstable_by(|a, b| b.cmp(a));
    leases.get(n - 1).copied()
}

/// What a round without a majority for this claim came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// A majority of the nodes is held by one other holder.
    Taken { holder: Holder, retry: Retry },
    /// A majority answered, and no holder has a majority as far as they know.
    Split,
    /// Fewer than a majority answered, or none of them refused.
    Failed,
}

/// The answers of one round, in the order of the nodes.
pub(super) struct Votes<'a> {
    said: &'a [Said],
    majority: usize,
}

impl<'a> Votes<'a> {
    pub(super) fn new(said: &'a [Said], majority: usize) -> Self {
        Self { said, majority }
    }

    fn count(&self, which: impl Fn(&Said) -> bool) -> usize {
        self.said.iter().filter(|said| which(said)).count()
    }

    /// How many nodes granted or refused.
    pub(super) fn answered(&self) -> usize {
        self.count(|said| !matches!(said, Said::Nothing | Said::Absent | Said::Failed(_)))
    }

    fn refused(&self) -> usize {
        self.count(|said| matches!(said, Said::Contended { .. } | Said::Undecided))
    }

    fn held_by(&self, holder: Holder) -> usize {
        self.count(|said| matches!(said, Said::Contended { holder: other, .. } if *other == holder))
    }

    /// The holder that most nodes name.
    fn leader(&self) -> Option<Holder> {
        let holders = self.said.iter().filter_map(|said| match said {
            Said::Contended { holder, .. } => Some(*holder),
            _ => None,
        });
        holders.max_by_key(|holder| self.held_by(*holder))
    }

    /// Whether this claim cannot have a majority any more, and further answers would not change why.
    ///
    /// While that is open the round goes on: one node that is contended and two that are down must not look like a
    /// store that is down, and a holder whose third node is slow must not look like a split vote.
    pub(super) fn is_decided(&self) -> bool {
        let spare = self.said.len() - self.majority;
        let failed = self.count(|said| matches!(said, Said::Failed(_)));
        if failed > spare {
            return true;
        }
        // A node that has not confirmed a release yet is slow or down. The round does not wait for it, because others
        // cannot have what this claim got in the meantime: two claims that each waited so would hardly ever meet
        // with both of their nodes free.
        let absent = self.count(|said| matches!(said, Said::Absent));
        if failed + absent + self.refused() <= spare || self.answered() < self.majority {
            return false;
        }
        let silent = self.count(|said| matches!(said, Said::Nothing));
        let most = self.leader().map_or(0, |holder| self.held_by(holder));
        most >= self.majority || most + silent < self.majority
    }

    /// Why this claim has no majority.
    pub(super) fn refusal(&self) -> Refusal {
        if self.answered() < self.majority || self.refused() == 0 {
            return Refusal::Failed;
        }
        match self.leader() {
            Some(holder) if self.held_by(holder) >= self.majority => {
                let hints = self.said.iter().filter_map(|said| match said {
                    Said::Contended { retry, holder: other } if *other == holder => Some(*retry),
                    _ => None,
                });
                Refusal::Taken { holder, retry: hints.fold(Retry::OnNotify, Retry::sooner) }
            }
            _ => Refusal::Split,
        }
    }

    /// The kind of error for a round that failed: that of the nodes' errors if all have the same and asking again is
    /// of no use.
    pub(super) fn error_kind(&self) -> ErrorKind {
        let mut kinds = self.said.iter().filter_map(|said| match said {
            Said::Failed(error) => {
                Some(if error.is_retryable() { ErrorKind::Unavailable } else { error.kind() })
            }
            _ => None,
        });
        let first = kinds.next().unwrap_or(ErrorKind::Unavailable);
        let failed = self.count(|said| matches!(said, Said::Failed(_)));
        let enough = failed > self.said.len() - self.majority;
        if enough && kinds.all(|kind| kind == first) { first } else { ErrorKind::Unavailable }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::Owner;

    fn granted() -> Said {
        Said::Granted(Grant { fence: None, valid_for: None })
    }

    fn held(holder: Holder) -> Said {
        Said::Contended { retry: Retry::OnNotify, holder }
    }

    fn down() -> Said {
        Said::Failed(Error::new(ErrorKind::Unavailable, "down"))
    }

    fn judge(said: &[Said]) -> (bool, Refusal) {
        let votes = Votes::new(said, said.len() / 2 + 1);
        (votes.is_decided(), votes.refusal())
    }

    #[test]
    fn a_lock_is_taken_only_if_one_holder_has_a_majority() {
        let (a, b) = (Holder::Owner(Owner::random()), Holder::Owner(Owner::random()));
        let taken = |holder| (true, Refusal::Taken { holder, retry: Retry::OnNotify });
        let split = (true, Refusal::Split);
        assert_eq!(judge(&[held(a), held(a), granted()]), taken(a));
        assert_eq!(judge(&[held(a), held(b), granted()]), split);
        assert_eq!(judge(&[held(a), held(a), held(b), granted(), held(a)]), taken(a));
        assert_eq!(judge(&[held(a), held(a), held(b), granted(), held(b)]), split);
        // Readers hold together.
        let readers = Holder::Readers;
        assert_eq!(judge(&[held(readers), granted(), held(readers)]), taken(readers));
        assert_eq!(judge(&[held(readers), granted(), held(a)]), split);
        // A node that is down may or may not be the third of a holder.
        assert_eq!(judge(&[held(a), held(a), granted(), granted(), down()]).1, Refusal::Split);
        assert_eq!(judge(&[held(a), held(a), held(a), down(), down()]), taken(a));
        assert_eq!(judge(&[held(a), down(), down()]), (true, Refusal::Failed));
    }

    #[test]
    fn a_round_goes_on_while_a_silent_node_can_change_the_answer() {
        let (a, b) = (Holder::Owner(Owner::random()), Holder::Owner(Owner::random()));
        let open = |said: &[Said]| !Votes::new(said, said.len() / 2 + 1).is_decided();
        // This claim may still get its majority.
        assert!(open(&[granted(), held(a), Said::Nothing]));
        // The other may have one.
        assert!(open(&[held(a), held(b), Said::Nothing]));
        assert!(open(&[held(a), held(a), held(b), Said::Nothing, granted()]));
        assert!(!open(&[held(a), held(b), held(b), Said::Nothing, granted(), held(a), granted()]));
        assert!(!open(&[held(a), held(a), Said::Nothing]));
        // One that was not even asked cannot.
        assert!(!open(&[granted(), held(a), Said::Absent]));
        assert!(open(&[granted(), Said::Absent, Said::Absent]));
    }

    #[test]
    fn nodes_that_all_refuse_for_good_are_no_store_that_is_down() {
        let wrong = || Said::Failed(Error::new(ErrorKind::Config, "wrong password"));
        let kind = |said: &[Said]| Votes::new(said, 2).error_kind();
        assert_eq!(kind(&[wrong(), wrong(), granted()]), ErrorKind::Config);
        assert_eq!(kind(&[wrong(), down(), granted()]), ErrorKind::Unavailable);
        assert_eq!(kind(&[wrong(), Said::Nothing, Said::Nothing]), ErrorKind::Unavailable);
    }
}
