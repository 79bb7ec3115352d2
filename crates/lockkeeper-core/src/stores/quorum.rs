//! One store out of several independent ones: what Redlock is.

mod votes;

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Mutex as AsyncMutex;

use crate::background::Background;
use crate::clock::{Moment, sleep_until};
use crate::contract::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fences, Grant, Inspector,
    Mode, Release, Renewal,
};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::release::{LEAVE_WITHIN, release_until_confirmed};
use votes::{LastGrant, Refusal, Said, Votes, granted, nth_longest};

/// A lock that is held when a majority of independent stores says so.
///
/// All nodes are asked in parallel, and the answer is there when a majority's is: a node that hangs
/// costs nothing, and up to half of them, less one, may be down.
///
/// # What it guarantees
///
/// Two holds of a name never have a majority at the same time. Nodes may restart without their data, any number of them
/// and at any time: a node that has been up for less than [`min_uptime`](Self::min_uptime) does not vote, and by then the
/// holds that it had granted have ended. This needs a `min_uptime` of at least the longest ttl that clients use for a name,
/// also by `extend`. It is the ttl of the claim that asks unless set, which is enough where all clients of a name use
/// the same ttl.
///
/// The lease counts from before the first node was asked. The fence of a hold is at
/// least the highest that any node of its majority gave, and is written back to a majority before the
/// guard exists: so the next majority, which has a node in common with this one, gives a higher one. If that node has
/// restarted in between, the next fence is still higher where fences follow the nodes' clocks, as those of Redis do, and
/// these clocks differ by less than `min_uptime`. A node whose fences the others refuse, because its clock is more than an
/// hour ahead of theirs, does not count.
///
/// `tests/simulation.rs` checks these promises with random clients, faults, restarts and clocks.
///
/// # What it does not
///
/// - **A node that loses data without a restart is not noticed:** `FLUSHALL`, evicted or deleted keys, a restored backup. If a
///   hold has no more than a majority, because the other nodes were down or taken when it was acquired, one such node is enough
///   for a second holder, and where clocks differ also for a lower fence.
/// - **There is no queue:** the claim that asks at the right moment gets the lock.
/// - **Votes can split.** If several claims ask at the same moment, each may get some nodes and none a majority.
///   That is not contention: the engine asks again after random pauses, for a try at most two seconds, and then answers
///   [`ErrorKind::Undecided`]. A try also ends so if a holder's majority includes nodes that are down now, because then
///   nobody can tell whether it has one.
/// - **No semaphores:** permits cannot be counted by majority.
#[derive(Debug, Clone)]
pub struct Quorum {
    nodes: Arc<[Arc<dyn Backend>]>,
    node_timeout: Duration,
    min_uptime: Option<Duration>,
}

impl Quorum {
    /// A quorum of nodes that know nothing of each other.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for fewer than three nodes, which could bear the loss of none, for the same
    /// node twice, or for a node without leases.
    pub fn new(nodes: impl IntoIterator<Item = Arc<dyn Backend>>) -> Result<Self> {
        let nodes: Arc<[Arc<dyn Backend>]> = nodes.into_iter().collect();
        if nodes.len() < 3 {
            let message = format!("a quorum has at least 3 nodes, not {}", nodes.len());
            return Err(Error::new(ErrorKind::Config, message));
        }
        let same = |a: &Arc<dyn Backend>, b: &Arc<dyn Backend>| {
            std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
        };
        let twice = |(i, node)| nodes[..i].iter().any(|other| same(node, other));
        if nodes.iter().enumerate().any(twice) {
            return Err(Error::new(
                ErrorKind::Config,
                "a quorum needs nodes that are not the same",
            ));
        }
        if nodes.iter().any(|node| !node.capabilities().leases) {
            return Err(Error::new(ErrorKind::Config, "a quorum needs nodes with leases"));
        }
        Ok(Self { nodes, node_timeout: Duration::from_millis(500), min_uptime: None })
    }

    /// Sets how long a node's answer is awaited if there is no majority without it (500 ms if not
    /// set). Should be small beside the ttl.
    #[must_use]
    pub fn node_timeout(mut self, node_timeout: Duration) -> Self {
        self.node_timeout = node_timeout;
        self
    }

    /// Sets how long a node must have been up before it votes (the ttl of the claim that asks if not set).
    ///
    /// A node that restarts without its data does not know the holds it had granted, and must not grant them again
    /// before they have ended. Set this to the longest ttl in use if clients use different ones or extend their leases. Set
    /// zero only for nodes that lose nothing when they restart (Redis with `appendfsync always`).
    #[must_use]
    pub fn min_uptime(mut self, min_uptime: Duration) -> Self {
        self.min_uptime = Some(min_uptime);
        self
    }
}

impl Backend for Quorum {
    fn name(&self) -> &'static str {
        "quorum"
    }

    fn capabilities(&self) -> Capabilities {
        let every =
            |can: fn(Capabilities) -> bool| self.nodes.iter().all(|node| can(node.capabilities()));
        let raisable = every(|node| node.fences == Fences::Raisable);
        Capabilities {
            leases: true,
            fair: false,
            push: false,
            shared: every(|node| node.shared),
            permits: false,
            downgrade: every(|node| node.downgrade),
            fences: if raisable { Fences::Raisable } else { Fences::None },
        }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        if let Mode::Permits { .. } = spec.mode {
            return Err(Error::unsupported("semaphores"));
        }
        let min_uptime = Some(self.min_uptime.unwrap_or(spec.ttl));
        let node = |node: &Arc<dyn Backend>| {
            // No queue on any node: places in five queues would be five different places.
            // No fence of a ticket either: a node may have a higher one than its majority.
            let spec = ClaimSpec { queue: false, min_uptime, ticket: None, ..spec.clone() };
            let claim = node.claim(spec)?;
            Ok(Node { claim: Arc::new(AsyncMutex::new(claim)), op: None })
        };
        let nodes = self.nodes.iter().map(node).collect::<Result<Vec<_>>>()?;
        Ok(Box::new(QuorumClaim {
            majority: nodes.len() / 2 + 1,
            nodes,
            raises: self.capabilities().fences == Fences::Raisable,
            ttl: spec.ttl,
            node_timeout: self.node_timeout.min(spec.ttl),
            background: spec.background,
            granted: false,
            listened_to: Vec::new(),
            last: None,
            downgraded: false,
        }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        None
    }
}

struct QuorumClaim {
    nodes: Vec<Node>,
    majority: usize,
    raises: bool,
    ttl: Duration,
    node_timeout: Duration,
    background: Background,
    granted: bool,
    /// Of a claim that waits: which nodes refused it for the sake of the holder that has a majority. Their notices say
    /// that this holder has released; those of other nodes only that another claim lost a split vote.
    listened_to: Vec<bool>,
    /// What was granted last, if nothing was given back since.
    last: Option<LastGrant>,
    /// A downgrade was asked for. From then on it is asked for instead of a renewal: a node that was slow may
    /// not have heard of it yet.
    downgraded: bool,
}

/// One node's claim, and what it has been asked and not answered.
struct Node {
    claim: Arc<AsyncMutex<Box<dyn Claim>>>,
    op: Option<Op>,
}

/// A question under way. Polled by whatever the quorum does next, and in the background if that is
/// nothing.
struct Op {
    answer: BoxFuture<'static, Answer>,
    ask: Ask,
}

impl Op {
    fn releases(&self) -> bool {
        matches!(self.ask, Ask::Release(_))
    }
}

enum Answer {
    Attempt(Result<Attempt>),
    Renewal(Result<Renewal>),
    Release(Option<Release>),
}

/// What to ask a node.
#[derive(Clone, Copy)]
enum Ask {
    Attempt(Option<Fence>),
    Renew(Duration),
    Downgrade(Duration),
    Release(Duration),
}

impl Node {
    /// Asks, unless a release is under way: that must be confirmed first. Both have the same owner, and
    /// a release that came late would free what an attempt got in the meantime.
    fn ask(&mut self, ask: Ask, node_timeout: Duration) {
        if self.op.as_ref().is_some_and(Op::releases) {
            return;
        }
        // A release waits for what is under way, but not for ever: a node that hangs must not keep its
        // lock for longer than need be. A renewal waits for an attempt, which may not have been sent yet:
        // given up, it would leave that node without us, and a majority would be one node weaker than
        // it need be. Anything else that was not answered is given up: an answer lost.
        let before = self.op.take().filter(|op| match ask {
            Ask::Release(_) => true,
            Ask::Renew(_) | Ask::Downgrade(_) => matches!(op.ask, Ask::Attempt(_)),
            Ask::Attempt(_) => false,
        });
        let claim = self.claim.clone();
        let answer = Box::pin(async move {
            if let Some(before) = before {
                let _ = tokio::time::timeout(node_timeout, before.answer).await;
            }
            let mut claim = claim.lock_owned().await;
            match ask {
                Ask::Attempt(floor) => Answer::Attempt(claim.attempt(floor).await),
                Ask::Renew(ttl) => Answer::Renewal(claim.renew(ttl).await),
                Ask::Downgrade(ttl) => Answer::Renewal(claim.downgrade(ttl).await),
                Ask::Release(ttl) => {
                    Answer::Release(release_until_confirmed(&mut **claim, ttl, |_| {}).await)
                }
            }
        });
        self.op = Some(Op { answer, ask });
    }
}

impl QuorumClaim {
    fn ask_all(&mut self, ask: Ask) {
        for node in &mut self.nodes {
            node.ask(ask, self.node_timeout);
        }
    }

    /// The next answer of any node; `None` when none is to come, or none in time.
    async fn next_answer(&mut self, end: Moment) -> Option<(usize, Answer)> {
        let nodes = &mut self.nodes;
        let answers = std::future::poll_fn(|cx| {
            let mut awaited = false;
            for (i, node) in nodes.iter_mut().enumerate() {
                let Some(op) = &mut node.op else { continue };
                if let Poll::Ready(answer) = op.answer.as_mut().poll(cx) {
                    node.op = None;
                    return Poll::Ready(Some((i, answer)));
                }
                awaited = true;
            }
            if awaited { Poll::Pending } else { Poll::Ready(None) }
        });
        tokio::select! {
            biased;
            answer = answers => answer,
            () = sleep_until(Some(end)) => None,
        }
    }

    async fn acquire(&mut self, floor: Option<Fence>) -> Result<Attempt> {
        let mut end = Moment::now().add(self.node_timeout);
        self.listened_to.clear();
        self.ask_all(Ask::Attempt(floor));
        let mut last = self.last.take().filter(|last| floor <= Some(last.fence));
        let asked = |node: &Node| match &node.op {
            Some(op) if op.releases() => Said::Absent,
            _ => Said::Nothing,
        };
        let mut said: Vec<Said> = self.nodes.iter().map(asked).collect();
        // To which fence each node was asked to raise its own.
        let mut raised = vec![None; self.nodes.len()];
        let mut fence = None;
        loop {
            match self.next_answer(end).await {
                Some((i, Answer::Attempt(Err(refusal))))
                    if raised[i].is_some() && refusal.kind() == ErrorKind::Config =>
                {
                    // That fence is implausible on this node, which still has what it granted. Nodes that gave
                    // it do not count, and a majority of the others decides.
                    let refused = raised[i].take();
                    for said in &mut said {
                        if matches!(said, Said::Granted(grant) if grant.fence >= refused) {
                            *said = Said::Failed(refusal.clone());
                        }
                    }
                    fence = fence.filter(|fence| Some(*fence) < refused);
                }
                Some((i, Answer::Attempt(answer))) => {
                    said[i] = Said::from(answer);
                    if matches!(&said[i], Said::Granted(grant) if grant.fence < raised[i]) {
                        let message = "a node keeps its fence low";
                        said[i] = Said::Failed(Error::new(ErrorKind::Unavailable, message));
                    }
                }
                Some((i, Answer::Release(_))) => {
                    // What an earlier round left there is gone: now it can be asked.
                    said[i] = Said::Nothing;
                    self.nodes[i].ask(Ask::Attempt(fence.or(floor)), self.node_timeout);
                    continue;
                }
                Some((_, Answer::Renewal(_))) => continue,
                None => {
                    // Unless the last grant cannot be confirmed, and what a majority says now is another.
                    let granted = granted(&said, None).count() >= self.majority;
                    if !granted || fence.is_some() || last.take().is_none() {
                        break;
                    }
                    end = Moment::now().add(self.node_timeout);
                }
            }
            if self.raises && fence.is_none() && granted(&said, None).count() >= self.majority {
                let (same, open) = last.as_ref().map_or((0, 0), |last| last.standing(&said));
                if same >= self.majority {
                    fence = last.as_ref().map(|last| last.fence);
                } else if same + open < self.majority {
                    // From here on this is the fence, whatever the others say.
                    fence = granted(&said, None).filter_map(|(_, grant)| grant.fence).max();
                }
            }
            for (i, grant) in granted(&said, None) {
                if grant.fence < fence && raised[i].is_none() {
                    raised[i] = fence;
                    self.nodes[i].ask(Ask::Attempt(fence), self.node_timeout);
                }
            }
            let leases = granted(&said, fence).filter_map(|(_, grant)| grant.valid_for);
            if let Some(valid_for) = nth_longest(leases, self.majority)
                && (fence.is_some() || !self.raises)
            {
                self.granted = true;
                self.last = fence.map(|fence| LastGrant::new(fence, &said));
                return Ok(Attempt::Granted(Grant { fence, valid_for: Some(valid_for) }));
            }
            if Votes::new(&said, self.majority).is_decided() {
                break;
            }
        }
        self.withdraw(&said).await;
        self.refused(&said)
    }

    /// Gives back what some nodes gave in a round without a majority, so that another claim can have one, and awaits
    /// their confirmation: the answer to a failed attempt must not be there before its traces are gone. A node that
    /// has not answered the attempt is not waited for.
    async fn withdraw(&mut self, said: &[Said]) {
        self.granted = false;
        for (node, said) in self.nodes.iter_mut().zip(said) {
            // A node that was contended has nothing of ours, and will tell us when it is free.
            if !matches!(said, Said::Contended { .. } | Said::Undecided) {
                node.ask(Ask::Release(self.ttl), self.node_timeout);
            }
        }
        let granted = |said: &Said| matches!(said, Said::Granted(_));
        let mut unconfirmed: Vec<bool> = said.iter().map(granted).collect();
        let end = Moment::now().add(self.node_timeout.min(LEAVE_WITHIN));
        while unconfirmed.contains(&true) {
            let Some((i, _)) = self.next_answer(end).await else { break };
            unconfirmed[i] = false;
        }
    }

    /// The answer to an attempt without a majority.
    fn refused(&mut self, said: &[Said]) -> Result<Attempt> {
        let votes = Votes::new(said, self.majority);
        match votes.refusal() {
            Refusal::Taken { holder, retry } => {
                let by_holder = |said: &Said| matches!(said, Said::Contended { holder: other, .. } if *other == holder);
                self.listened_to = said.iter().map(by_holder).collect();
                Ok(Attempt::Contended { retry, holder })
            }
            Refusal::Split => Ok(Attempt::Undecided),
            Refusal::Failed => {
                let why = said.iter().find_map(|said| match said {
                    Said::Failed(error) => Some(error.to_string()),
                    _ => None,
                });
                let (all, timeout, answered) =
                    (self.nodes.len(), self.node_timeout, votes.answered());
                let why = why.unwrap_or_else(|| format!("no answer within {timeout:?}"));
                let message = if answered < self.majority {
                    format!("only {answered} of {all} nodes answered: {why}")
                } else {
                    format!("no majority of {all} nodes confirmed the fence: {why}")
                };
                Err(Error::new(votes.error_kind(), message))
            }
        }
    }

    async fn renewal(&mut self, ask: Ask) -> Result<Renewal> {
        let end = Moment::now().add(self.node_timeout);
        self.ask_all(ask);
        let (mut leases, mut lost, mut why) = (Vec::new(), 0, None);
        while let Some((_, answer)) = self.next_answer(end).await {
            match answer {
                Answer::Renewal(Ok(Renewal::Renewed { valid_for })) => leases.push(valid_for),
                Answer::Renewal(Ok(Renewal::Held)) => leases.push(Duration::MAX),
                Answer::Renewal(Ok(Renewal::Lost(reason))) => {
                    lost += 1;
                    // That of the node that decides.
                    if lost > self.nodes.len() - self.majority {
                        return Ok(Renewal::Lost(reason));
                    }
                }
                Answer::Renewal(Err(error)) => why = Some(error),
                Answer::Attempt(_) | Answer::Release(_) => {}
            }
            // Only a true majority renews: nodes that say nothing count for nothing.
            if let Some(valid_for) = nth_longest(leases.iter().copied(), self.majority) {
                self.granted = true;
                return Ok(Renewal::Renewed { valid_for });
            }
        }
        let (renewed, all) = (leases.len(), self.nodes.len());
        let why = why.map_or_else(|| "the rest said nothing".to_owned(), |why| why.to_string());
        let message = format!("only {renewed} of {all} nodes renewed: {why}");
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    async fn give_back(&mut self) -> Result<Release> {
        let end = Moment::now().add(self.node_timeout);
        self.ask_all(Ask::Release(self.ttl));
        let (mut released, mut confirmed) = (0, 0);
        while let Some((_, answer)) = self.next_answer(end).await {
            if let Answer::Release(Some(release)) = answer {
                confirmed += 1;
                released += usize::from(release == Release::Released);
            }
            let silent = self.nodes.len() - confirmed;
            if released >= self.majority || confirmed >= self.majority && silent == 0 {
                break;
            }
            if confirmed >= self.majority && released + silent < self.majority {
                break;
            }
        }
        if confirmed < self.majority {
            let all = self.nodes.len();
            let message = format!("only {confirmed} of {all} nodes confirmed the release");
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        // A node that has not answered yet is seen to in the background.
        self.finish_in_background();
        // A majority that released held, also if it was another claim of this owner that was granted.
        let silent = self.nodes.len() - confirmed;
        let held = released >= self.majority || self.granted && released + silent >= self.majority;
        (self.granted, self.downgraded, self.last) = (false, false, None);
        Ok(if held { Release::Released } else { Release::WasNotHeld })
    }

    /// Leaves releases that are under way to the background.
    fn finish_in_background(&mut self) {
        for node in &mut self.nodes {
            if let Some(op) = node.op.take_if(|op| op.releases()) {
                self.background.spawn(async move {
                    op.answer.await;
                });
            }
        }
    }

    async fn news(&mut self) -> Change {
        let (granted, listened_to) = (self.granted, &self.listened_to);
        let listen = |(i, node): (usize, &Node)| -> Option<BoxFuture<'static, Change>> {
            if !granted && !listened_to.get(i).copied().unwrap_or(false) {
                return None;
            }
            let claim = node.claim.clone();
            Some(Box::pin(async move { claim.lock_owned().await.changed().await }))
        };
        let mut ears: Vec<_> = self.nodes.iter().enumerate().map(listen).collect();
        let (mut lost, mut notices) = (0, 0);
        let (majority, all) = (self.majority, self.nodes.len());
        let nodes = &mut self.nodes;
        std::future::poll_fn(|cx| {
            for (node, ear) in nodes.iter_mut().zip(&mut ears) {
                // What is under way goes on while we listen.
                if let Some(op) = &mut node.op {
                    if op.answer.as_mut().poll(cx).is_pending() {
                        continue;
                    }
                    node.op = None;
                }
                let Some(Poll::Ready(change)) = ear.as_mut().map(|ear| ear.as_mut().poll(cx))
                else {
                    continue;
                };
                *ear = None;
                match change {
                    Change::Lost(reason) if granted && lost == all - majority => {
                        return Poll::Ready(Change::Lost(reason));
                    }
                    Change::Lost(_) => lost += 1,
                    Change::LookAgain | Change::Granted(_) => notices += 1,
                }
            }
            // Whoever releases tells a majority. Asking at the first word would find the rest taken.
            if (granted && notices > 0) || notices + lost >= majority {
                return Poll::Ready(Change::LookAgain);
            }
            Poll::Pending
        })
        .await
    }
}

impl Claim for QuorumClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        Box::pin(self.acquire(floor))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(self.news())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let ask = if self.downgraded { Ask::Downgrade(ttl) } else { Ask::Renew(ttl) };
        Box::pin(self.renewal(ask))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.downgraded = true;
        Box::pin(self.renewal(Ask::Downgrade(ttl)))
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        Box::pin(self.give_back())
    }
}

impl Drop for QuorumClaim {
    fn drop(&mut self) {
        self.finish_in_background();
    }
}
