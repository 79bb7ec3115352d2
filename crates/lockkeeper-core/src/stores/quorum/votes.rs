//! The votes of the nodes in one round of attempts, and their outcome.

use std::time::Duration;

use crate::contract::{Attempt, Grant, Holder, Retry};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;

/// The answer of a node in one round.
#[derive(Clone)]
pub(super) enum Vote {
    /// No answer yet.
    Pending,
    /// No attempt sent, because the release of an earlier grant is not confirmed yet.
    Releasing,
    Answered(Result<Attempt>),
}

impl Vote {
    pub(super) fn grant(&self) -> Option<Grant> {
        if let Self::Answered(Ok(Attempt::Granted(grant))) = self { Some(*grant) } else { None }
    }

    pub(super) fn error(&self) -> Option<&Error> {
        if let Self::Answered(Err(error)) = self { Some(error) } else { None }
    }

    /// Returns whether the node answered without a grant. A node may itself be a store that could not decide.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::Answered(Ok(Attempt::Contended { .. } | Attempt::Undecided)))
    }

    fn contention(&self) -> Option<(Holder, Retry)> {
        match self {
            Self::Answered(Ok(Attempt::Contended { holder, retry })) => Some((*holder, *retry)),
            _ => None,
        }
    }

    /// Returns whether the node reported this holder.
    pub(super) fn names(&self, holder: Holder) -> bool {
        self.contention().is_some_and(|(other, _)| other == holder)
    }
}

/// A grant by a majority.
pub(super) struct LastGrant {
    pub(super) fence: Fence,
    /// The fence that each node granted; `None` if its answer was not waited for.
    nodes: Vec<Option<Fence>>,
}

impl LastGrant {
    pub(super) fn new(fence: Fence, votes: &[Vote]) -> Self {
        Self { fence, nodes: votes.iter().map(|vote| vote.grant()?.fence).collect() }
    }

    /// Returns how many nodes granted the same fence again, so no other claim held them since, and how many still may.
    fn repeated(&self, votes: &[Vote]) -> (usize, usize) {
        let (mut same, mut pending) = (0, 0);
        for (before, vote) in self.nodes.iter().zip(votes).filter(|(before, _)| before.is_some()) {
            same += usize::from(vote.grant().is_some_and(|grant| grant.fence == *before));
            pending += usize::from(matches!(vote, Vote::Pending));
        }
        (same, pending)
    }
}

/// Returns how long at least `n` of the leases last.
pub(super) fn nth_longest(leases: impl Iterator<Item = Duration>, n: usize) -> Option<Duration> {
    let mut leases: Vec<Duration> = leases.collect();
    leases.sort_unstable_by(|a, b| b.cmp(a));
    leases.get(n - 1).copied()
}

/// The outcome of a round without a majority for this claim.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// One other holder has a majority of the nodes.
    Held { holder: Holder, retry: Retry },
    /// A majority answered, and no holder is known to have a majority.
    Split,
    /// Less than a majority answered, or none of them refused.
    Failed,
}

/// One round of attempts, with the votes in the order of the nodes.
pub(super) struct Round {
    pub(super) votes: Vec<Vote>,
    majority: usize,
    /// The fence of the grant, once a majority has granted.
    pub(super) fence: Option<Fence>,
    /// The fence to which the client raises that of each node.
    raised: Vec<Option<Fence>>,
    /// The last grant of this claim, while its nodes may still repeat it.
    last: Option<LastGrant>,
    /// The fence that this claim was granted before, if any. The next one is not lower.
    before: Option<Fence>,
    /// How far the fence may be above that of a node of the majority, in microseconds, if the node's clock had reached its
    /// own fence.
    pub(super) max_lead: u64,
}

impl Round {
    pub(super) fn new(
        votes: Vec<Vote>,
        last: Option<LastGrant>,
        before: Option<Fence>,
        max_lead: u64,
    ) -> Self {
        let (majority, raised) = (votes.len() / 2 + 1, vec![None; votes.len()]);
        Self { votes, majority, fence: None, raised, last, before, max_lead }
    }

    /// Records the answer of a node.
    pub(super) fn record(&mut self, i: usize, answer: Result<Attempt>) {
        if let Err(refusal) = &answer
            && refusal.kind() == ErrorKind::Config
            && let Some(refused) = self.raised[i].take()
        {
            // The fence is implausible to this node, which keeps its own grant. The nodes that granted that fence do not
            // count, and a majority of the others decides.
            for vote in &mut self.votes {
                if vote.grant().is_some_and(|grant| grant.fence >= Some(refused)) {
                    *vote = Vote::Answered(Err(refusal.clone()));
                }
            }
            self.fence = self.fence.filter(|fence| *fence < refused);
            self.before = self.before.filter(|fence| *fence < refused);
            return;
        }
        self.votes[i] = Vote::Answered(match answer {
            Ok(Attempt::Granted(grant)) if grant.fence < self.raised[i] => {
                Err(Error::new(ErrorKind::Unavailable, "the node did not raise its fence"))
            }
            answer => answer,
        });
    }

    fn granted(&self) -> impl Iterator<Item = (usize, Grant)> {
        self.votes.iter().enumerate().filter_map(|(i, vote)| Some((i, vote.grant()?)))
    }

    /// Returns whether a node that granted this can belong to the majority of the chosen fence: once it is free again, it
    /// grants no fence that is as low.
    ///
    /// It has granted that fence itself, or its clock is past it before its lease expires. In the second case the release
    /// tells it the fence.
    fn confirms(&self, grant: Grant) -> bool {
        grant.fence >= self.fence || grant.fence_is_past && self.lead(grant) <= self.max_lead
    }

    /// Returns how far the chosen fence is above that of a node, in microseconds.
    fn lead(&self, grant: Grant) -> u64 {
        let number = |fence: Option<Fence>| fence.map_or(0, Fence::get);
        number(self.fence).saturating_sub(number(grant.fence))
    }

    /// Returns how far the chosen fence is above those of the nodes that confirm it, at most.
    pub(super) fn longest_lead(&self) -> Duration {
        let confirming = self.granted().filter(|(_, grant)| self.confirms(*grant));
        Duration::from_micros(confirming.map(|(_, grant)| self.lead(grant)).max().unwrap_or(0))
    }

    fn needs_fence(&self) -> bool {
        self.fence.is_none() && self.granted().count() >= self.majority
    }

    /// Stops waiting for the nodes to repeat the last grant. Returns whether that lets a majority grant with another fence.
    pub(super) fn forget_last(&mut self) -> bool {
        self.needs_fence() && self.last.take().is_some()
    }

    /// Chooses the fence of the grant, once a majority has granted: that of the last grant if a majority repeats it,
    /// otherwise the highest so far, and not below that of the last grant. Later votes do not change it.
    pub(super) fn choose_fence(&mut self) {
        if !self.needs_fence() {
            return;
        }
        let last = self.last.as_ref();
        let (same, pending) = last.map_or((0, 0), |last| last.repeated(&self.votes));
        if same >= self.majority {
            self.fence = last.map(|last| last.fence);
        } else if same + pending < self.majority {
            let highest = self.granted().filter_map(|(_, grant)| grant.fence).max();
            self.fence = highest.max(self.before);
        }
    }

    /// Returns the nodes that do not confirm the chosen fence and must raise their own. Each is returned once.
    pub(super) fn take_raises(&mut self) -> Vec<(usize, Fence)> {
        let Some(fence) = self.fence else { return Vec::new() };
        let low = self.granted().filter(|(_, grant)| !self.confirms(*grant));
        let low = low.filter(|(i, _)| self.raised[*i].is_none());
        let raises: Vec<_> = low.map(|(i, _)| (i, fence)).collect();
        for (i, fence) in &raises {
            self.raised[*i] = Some(*fence);
        }
        raises
    }

    /// Returns the grant, if a majority confirms the chosen fence.
    pub(super) fn grant(&self) -> Option<Grant> {
        let confirming = self.granted().filter(|(_, grant)| self.confirms(*grant));
        let leases = confirming.filter_map(|(_, grant)| grant.valid_for);
        let valid_for = nth_longest(leases, self.majority)?;
        Some(Grant { fence: self.fence, fence_is_past: false, valid_for: Some(valid_for) })
    }

    fn count(&self, which: impl Fn(&Vote) -> bool) -> usize {
        self.votes.iter().filter(|vote| which(vote)).count()
    }

    /// Returns how many nodes granted or refused.
    pub(super) fn answered(&self) -> usize {
        self.count(|vote| matches!(vote, Vote::Answered(Ok(_))))
    }

    fn failed(&self) -> usize {
        self.count(|vote| vote.error().is_some())
    }

    fn refused(&self) -> usize {
        self.count(Vote::is_refusal)
    }

    fn held_by(&self, holder: Holder) -> usize {
        self.count(|vote| vote.names(holder))
    }

    /// Returns the holder that most nodes report.
    fn main_holder(&self) -> Option<Holder> {
        let holders = self.votes.iter().filter_map(Vote::contention);
        holders.map(|(holder, _)| holder).max_by_key(|holder| self.held_by(*holder))
    }

    /// Returns whether this claim cannot get a majority any more, and further votes do not change the reason.
    ///
    /// Otherwise the round continues: one contended node and two that are down must not be reported as a store that is
    /// down, nor a holder whose third node is slow as a split vote.
    pub(super) fn is_decided(&self) -> bool {
        let spare = self.votes.len() - self.majority;
        let failed = self.failed();
        if failed > spare {
            return true;
        }
        // A node that has not confirmed a release is slow or down, and the round does not wait for it: meanwhile other
        // claims could not have the nodes that this claim got. Two claims that both waited would rarely find all of
        // their nodes free.
        let releasing = self.count(|vote| matches!(vote, Vote::Releasing));
        if failed + releasing + self.refused() <= spare || self.answered() < self.majority {
            return false;
        }
        let pending = self.count(|vote| matches!(vote, Vote::Pending));
        let most = self.main_holder().map_or(0, |holder| self.held_by(holder));
        most >= self.majority || most + pending < self.majority
    }

    /// Returns why this claim has no majority.
    pub(super) fn refusal(&self) -> Refusal {
        if self.answered() < self.majority || self.refused() == 0 {
            return Refusal::Failed;
        }
        match self.main_holder() {
            Some(holder) if self.held_by(holder) >= self.majority => {
                let hints = self.votes.iter().filter(|vote| vote.names(holder));
                let hints = hints.filter_map(Vote::contention).map(|(_, retry)| retry);
                Refusal::Held { holder, retry: hints.fold(Retry::OnNotify, Retry::sooner) }
            }
            _ => Refusal::Split,
        }
    }

    /// Returns the kind of error of a failed round: the kind of the nodes' errors if it is the same for all and not
    /// retryable, otherwise `Unavailable`.
    pub(super) fn error_kind(&self) -> ErrorKind {
        let errors = self.votes.iter().filter_map(Vote::error);
        let mut kinds = errors.map(|error| match error.kind() {
            _ if error.is_retryable() => ErrorKind::Unavailable,
            kind => kind,
        });
        let first = kinds.next().unwrap_or(ErrorKind::Unavailable);
        let enough = self.failed() > self.votes.len() - self.majority;
        if enough && kinds.all(|kind| kind == first) { first } else { ErrorKind::Unavailable }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::Owner;

    fn granted() -> Vote {
        Vote::Answered(Ok(Attempt::Granted(Grant {
            fence: None,
            fence_is_past: false,
            valid_for: None,
        })))
    }

    fn held(holder: Holder) -> Vote {
        Vote::Answered(Ok(Attempt::Contended { retry: Retry::OnNotify, holder }))
    }

    fn down() -> Vote {
        Vote::Answered(Err(Error::new(ErrorKind::Unavailable, "down")))
    }

    fn round(votes: &[Vote]) -> Round {
        Round::new(votes.to_vec(), None, None, 0)
    }

    fn outcome(votes: &[Vote]) -> (bool, Refusal) {
        let round = round(votes);
        (round.is_decided(), round.refusal())
    }

    #[test]
    fn a_lock_is_contended_only_if_one_holder_has_a_majority() {
        let (a, b) = (Holder::Owner(Owner::random()), Holder::Owner(Owner::random()));
        let contended = |holder| (true, Refusal::Held { holder, retry: Retry::OnNotify });
        let split = (true, Refusal::Split);
        assert_eq!(outcome(&[held(a), held(a), granted()]), contended(a));
        assert_eq!(outcome(&[held(a), held(b), granted()]), split);
        assert_eq!(outcome(&[held(a), held(a), held(b), granted(), held(a)]), contended(a));
        assert_eq!(outcome(&[held(a), held(a), held(b), granted(), held(b)]), split);
        // Readers count as one holder.
        let readers = Holder::Readers;
        assert_eq!(outcome(&[held(readers), granted(), held(readers)]), contended(readers));
        assert_eq!(outcome(&[held(readers), granted(), held(a)]), split);
        // A node that is down may or may not be the third of a holder.
        assert_eq!(outcome(&[held(a), held(a), granted(), granted(), down()]).1, Refusal::Split);
        assert_eq!(outcome(&[held(a), held(a), held(a), down(), down()]), contended(a));
        assert_eq!(outcome(&[held(a), down(), down()]), (true, Refusal::Failed));
    }

    #[test]
    fn a_round_continues_while_a_pending_vote_can_change_the_outcome() {
        let (a, b) = (Holder::Owner(Owner::random()), Holder::Owner(Owner::random()));
        let open = |votes: &[Vote]| !round(votes).is_decided();
        // This claim may still get a majority.
        assert!(open(&[granted(), held(a), Vote::Pending]));
        // Another holder may have one.
        assert!(open(&[held(a), held(b), Vote::Pending]));
        assert!(open(&[held(a), held(a), held(b), Vote::Pending, granted()]));
        assert!(!open(&[held(a), held(b), held(b), Vote::Pending, granted(), held(a), granted()]));
        assert!(!open(&[held(a), held(a), Vote::Pending]));
        // A node to which no attempt was sent cannot change it.
        assert!(!open(&[granted(), held(a), Vote::Releasing]));
        assert!(open(&[granted(), Vote::Releasing, Vote::Releasing]));
    }

    #[test]
    fn nodes_that_fail_permanently_are_not_reported_as_unavailable() {
        let wrong = || Vote::Answered(Err(Error::new(ErrorKind::Config, "wrong password")));
        let kind = |votes: &[Vote]| round(votes).error_kind();
        assert_eq!(kind(&[wrong(), wrong(), granted()]), ErrorKind::Config);
        assert_eq!(kind(&[wrong(), down(), granted()]), ErrorKind::Unavailable);
        assert_eq!(kind(&[wrong(), Vote::Pending, Vote::Pending]), ErrorKind::Unavailable);
    }
}
