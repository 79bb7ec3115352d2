//! One store made of several independent ones, as in Redlock.

mod node;
mod votes;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::background::Background;
use crate::clock::{Moment, sleep_until};
use crate::contract::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fences, Inspector, Mode,
    Release, Renewal,
};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::release::LEAVE_WITHIN;
use node::{Node, Request, Response};
use votes::{LastGrant, Refusal, Round, Vote, nth_longest};

/// A store made of independent stores, its *nodes*. A lock is held if a majority of the nodes grants it.
///
/// Requests go to all nodes in parallel, and the result is known as soon as a majority has answered. A hung node adds no
/// latency to that. Fewer than half of the nodes may be down.
///
/// # What it guarantees
///
/// Two holds of a name never have a majority at the same time. Any number of nodes may restart without their data at any
/// time: a node that has been up for less than [`min_uptime`](Self::min_uptime) does not vote, and by then the holds that
/// it had granted have expired. This requires a `min_uptime` of at least the longest TTL that clients use for a name,
/// including `extend`. The default is the TTL of the claim, which is enough if all clients of a name use the same TTL.
///
/// The lease counts from before the first request was sent.
///
/// Fences rise. The fence of a hold is the highest that any node of its majority returned, and the release carries it to
/// the nodes. The next majority shares a node with this one. Either the release freed that node, which then has the fence,
/// or the lease expired there, and its clock is past the fence. For the second case, the fence may be above that of
/// each node of the majority by at most a quarter of the TTL. If clocks differ by more, or if the fences of the nodes do not
/// follow a clock or are ahead of it, then the fence is written back to a majority before the guard exists, at the cost of
/// another round trip.
///
/// If the shared node has restarted since, the next fence is still higher where fences follow the nodes' clocks, as on
/// Redis, and these clocks differ by less than `min_uptime`. A node whose fences the others refuse, because its clock is
/// more than an hour ahead of theirs, does not count.
///
/// `tests/simulation.rs` and `tests/quorum_fences.rs` check these guarantees with random clients, faults, restarts and
/// clocks.
///
/// # What it does not guarantee
///
/// - **Data loss without a restart is not detected:** `FLUSHALL`, evicted or deleted keys, a restored backup. If a hold has
///   a bare majority, because the other nodes were down or held when it was acquired, then one node that loses its data is
///   enough for a second holder and, if clocks differ, for a lower fence.
/// - **A hold that is broken on its nodes may be followed by a lower fence.** `break_lock` on the stores of the nodes does
///   not know the fence of the hold. The next fence can be lower if the clocks of the nodes differ by more than the hold
///   lasted.
/// - **`extend` may shorten the lease on the nodes by less than requested.** The nodes keep the lock until their clocks have
///   passed its fence. The guard honours the shorter TTL. If the client crashes after that, the nodes may keep the lock for
///   up to twice the difference of their clocks. If a hold is detached after `extend` has shortened its TTL, the process
///   that adopts it cannot know that difference, and a lower fence may follow.
/// - **There is no queue.** The first claim that reaches a majority of free nodes acquires the lock.
/// - **Votes can split.** If several claims are attempted at the same time, each may get some nodes and none a majority.
///   That is not contention: the engine retries with random pauses, for a try at most two seconds, and then returns
///   [`ErrorKind::Undecided`]. The same applies to a try if nodes of a holder's majority are down, because the
///   remaining nodes cannot show that it has a majority.
/// - **There are no semaphores.** Permits cannot be counted by majority.
#[derive(Debug, Clone)]
pub struct Quorum {
    nodes: Arc<[Arc<dyn Backend>]>,
    node_timeout: Duration,
    min_uptime: Option<Duration>,
}

impl Quorum {
    /// Creates a quorum of nodes that do not replicate each other.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for fewer than three nodes, which tolerate no failure, for the same node twice, or for a node
    /// without leases.
    pub fn new(nodes: impl IntoIterator<Item = Arc<dyn Backend>>) -> Result<Self> {
        let nodes: Arc<[Arc<dyn Backend>]> = nodes.into_iter().collect();
        let config = |message: String| Err(Error::new(ErrorKind::Config, message));
        if nodes.len() < 3 {
            return config(format!("a quorum needs at least 3 nodes, not {}", nodes.len()));
        }
        let same = |a: &Arc<dyn Backend>, b: &Arc<dyn Backend>| {
            std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
        };
        let twice = |(i, node)| nodes[..i].iter().any(|other| same(node, other));
        if nodes.iter().enumerate().any(twice) {
            return config("the list of nodes has a duplicate: list each node once".to_owned());
        }
        if let Some(node) = nodes.iter().find(|node| !node.capabilities().leases) {
            return config(format!("a quorum needs nodes with leases: {} has none", node.name()));
        }
        Ok(Self { nodes, node_timeout: Duration::from_millis(500), min_uptime: None })
    }

    /// Sets the timeout for a node whose answer is needed for a majority (500 ms by default). It should be short compared
    /// to the TTL.
    #[must_use]
    pub fn node_timeout(mut self, node_timeout: Duration) -> Self {
        self.node_timeout = node_timeout;
        self
    }

    /// Sets how long a node must have been up before it votes (by default the TTL of the claim).
    ///
    /// A node that restarted without its data does not know the holds that it had granted, and must not grant the locks
    /// again before those holds have expired. If clients use different TTLs or extend their leases, set this to the longest
    /// TTL in use. Set it to zero only for nodes that lose nothing when they restart (Redis with `appendfsync always`).
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
            // No queue on the nodes: each node would have a different order.
            // No fence of a ticket either: a node may have a higher one than its majority.
            let spec = ClaimSpec { queue: false, min_uptime, ticket: None, ..spec.clone() };
            node.claim(spec).map(Node::new)
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
            fence: spec.ticket,
            // The lead at the grant is not known for an adopted hold.
            min_lease: if spec.ticket.is_some() { spec.ttl / 2 } else { Duration::ZERO },
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
    /// Whether all nodes have raisable fences.
    raises: bool,
    ttl: Duration,
    node_timeout: Duration,
    background: Background,
    granted: bool,
    /// For a waiter: the nodes that reported the holder with a majority. A notification of such a node means that this
    /// holder has released. That of another node only means that another claim lost a split vote.
    listened_to: Vec<bool>,
    /// The last grant, if it was not released since.
    last: Option<LastGrant>,
    /// The highest fence that this claim was granted, or that of its ticket, until it is released.
    fence: Option<Fence>,
    /// The shortest lease that a renewal may leave on the nodes: none may expire before its clock is past the fence.
    min_lease: Duration,
    /// Whether a downgrade was requested. Renewals are then sent as downgrades, because a slow node may have missed it.
    downgraded: bool,
}

impl QuorumClaim {
    fn send_all(&mut self, request: Request) {
        for node in &mut self.nodes {
            node.send(request, self.node_timeout);
        }
    }

    /// Returns the next response of any node; `None` if no request is in flight, or no response arrives before `end`.
    async fn next_response(&mut self, end: Moment) -> Option<(usize, Response)> {
        let nodes = &mut self.nodes;
        let responses = poll_fn(|cx| {
            let mut in_flight = false;
            for (i, node) in nodes.iter_mut().enumerate() {
                match node.poll_response(cx) {
                    Some(Poll::Ready(response)) => return Poll::Ready(Some((i, response))),
                    Some(Poll::Pending) => in_flight = true,
                    None => {}
                }
            }
            if in_flight { Poll::Pending } else { Poll::Ready(None) }
        });
        tokio::select! {
            biased;
            response = responses => response,
            () = sleep_until(Some(end)) => None,
        }
    }

    async fn attempt_all(&mut self, floor: Option<Fence>) -> Result<Attempt> {
        let start = Moment::now();
        let mut end = start.add(self.node_timeout);
        self.listened_to.clear();
        self.send_all(Request::Attempt(floor));
        let last = self.last.take().filter(|last| floor <= Some(last.fence));
        let vote = |node: &Node| if node.is_releasing() { Vote::Releasing } else { Vote::Pending };
        let votes = self.nodes.iter().map(vote).collect();
        let mut round = Round::new(votes, last, self.fence, self.max_lead(start));
        loop {
            match self.next_response(end).await {
                Some((i, Response::Attempt(answer))) => round.record(i, answer),
                Some((i, Response::Release(_))) => {
                    // The grant of an earlier round is released: now the node can vote.
                    round.votes[i] = Vote::Pending;
                    self.nodes[i].send(Request::Attempt(round.fence.or(floor)), self.node_timeout);
                    continue;
                }
                Some((_, Response::Renewal(_))) => continue,
                None if round.forget_last() => end = Moment::now().add(self.node_timeout),
                None => break,
            }
            round.max_lead = self.max_lead(start);
            if self.raises {
                round.choose_fence();
            }
            for (i, fence) in round.take_raises() {
                self.nodes[i].send(Request::Attempt(Some(fence)), self.node_timeout);
            }
            if let Some(grant) = round.grant()
                && (grant.fence.is_some() || !self.raises)
            {
                self.granted = true;
                self.fence = self.fence.max(grant.fence);
                self.min_lease = round.longest_lead() * 2;
                self.last = grant.fence.map(|fence| LastGrant::new(fence, &round.votes));
                return Ok(Attempt::Granted(grant));
            }
            if round.is_decided() {
                break;
            }
        }
        self.withdraw(&round.votes).await;
        self.refused(&round)
    }

    /// Returns how far the fence may be above that of a node without being written back, in microseconds.
    ///
    /// A quarter of the TTL, so that the clock of the node is past the fence long before its lease expires. A node may have
    /// read its clock for the fence some time after the lease began, but within the time that the round has taken.
    fn max_lead(&self, start: Moment) -> u64 {
        let most = (self.ttl / 4).min(Fence::MAX_AHEAD);
        let most = most.saturating_sub(Moment::now().since(start));
        u64::try_from(most.as_micros()).unwrap_or(u64::MAX)
    }

    /// Releases the grants of a round without a majority, so that another claim can get one, and waits for confirmation:
    /// a failed attempt must leave nothing in the store. A node that has not answered the attempt is not waited for.
    async fn withdraw(&mut self, votes: &[Vote]) {
        self.granted = false;
        for (node, vote) in self.nodes.iter_mut().zip(votes) {
            // A contended node has no grant of this claim, and its claim must stay subscribed to notifications.
            if !vote.is_refusal() {
                node.send(Request::Release(self.ttl, self.fence), self.node_timeout);
            }
        }
        let mut unconfirmed: Vec<bool> = votes.iter().map(|vote| vote.grant().is_some()).collect();
        let end = Moment::now().add(self.node_timeout.min(LEAVE_WITHIN));
        while unconfirmed.contains(&true) {
            let Some((i, _)) = self.next_response(end).await else { break };
            unconfirmed[i] = false;
        }
    }

    /// Returns the answer to an attempt without a majority.
    fn refused(&mut self, round: &Round) -> Result<Attempt> {
        match round.refusal() {
            Refusal::Held { holder, retry } => {
                self.listened_to = round.votes.iter().map(|vote| vote.names(holder)).collect();
                Ok(Attempt::Contended { retry, holder })
            }
            Refusal::Split => Ok(Attempt::Undecided),
            Refusal::Failed => {
                let why = round.votes.iter().find_map(Vote::error).map(Error::to_string);
                let (all, timeout, answered) =
                    (self.nodes.len(), self.node_timeout, round.answered());
                let why = why.unwrap_or_else(|| format!("no answer within {timeout:?}"));
                let message = if answered < self.majority {
                    format!("only {answered} of {all} nodes answered: {why}")
                } else {
                    format!("no majority of {all} nodes confirmed the fence: {why}")
                };
                Err(Error::new(round.error_kind(), message))
            }
        }
    }

    async fn renew_all(&mut self, ttl: Duration) -> Result<Renewal> {
        let lease = ttl.max(self.min_lease);
        let request = if self.downgraded {
            Request::Downgrade(lease, self.fence)
        } else {
            Request::Renew(lease)
        };
        let end = Moment::now().add(self.node_timeout);
        self.send_all(request);
        let (mut leases, mut lost, mut why) = (Vec::new(), 0, None);
        while let Some((_, response)) = self.next_response(end).await {
            match response {
                Response::Renewal(Ok(Renewal::Renewed { valid_for })) => {
                    leases.push(valid_for.min(ttl));
                }
                Response::Renewal(Ok(Renewal::Held)) => leases.push(Duration::MAX),
                Response::Renewal(Ok(Renewal::Lost(reason))) => {
                    lost += 1;
                    // The reason of the node that makes a majority impossible.
                    if lost > self.nodes.len() - self.majority {
                        return Ok(Renewal::Lost(reason));
                    }
                }
                Response::Renewal(Err(error)) => why = Some(error),
                Response::Attempt(_) | Response::Release(_) => {}
            }
            // A node that does not answer does not count.
            if let Some(valid_for) = nth_longest(leases.iter().copied(), self.majority) {
                self.granted = true;
                return Ok(Renewal::Renewed { valid_for });
            }
        }
        let (renewed, all) = (leases.len(), self.nodes.len());
        let why = why.map_or_else(|| "the others did not answer".to_owned(), |why| why.to_string());
        let message = format!("only {renewed} of {all} nodes renewed: {why}");
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    async fn release_all(&mut self) -> Result<Release> {
        let end = Moment::now().add(self.node_timeout);
        self.send_all(Request::Release(self.ttl, self.fence));
        let (mut released, mut confirmed) = (0, 0);
        while let Some((_, response)) = self.next_response(end).await {
            if let Response::Release(Some(release)) = response {
                confirmed += 1;
                released += usize::from(release == Release::Released);
            }
            let silent = self.nodes.len() - confirmed;
            let was_not_held = confirmed >= self.majority && released + silent < self.majority;
            if released >= self.majority || was_not_held {
                break;
            }
        }
        if confirmed < self.majority {
            let all = self.nodes.len();
            let message = format!("only {confirmed} of {all} nodes confirmed the release");
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        self.finish_releases_in_background();
        // A majority of releases proves a hold, even if another claim of this owner was granted it.
        let silent = self.nodes.len() - confirmed;
        let held = released >= self.majority || self.granted && released + silent >= self.majority;
        (self.granted, self.downgraded, self.last) = (false, false, None);
        (self.fence, self.min_lease) = (None, Duration::ZERO);
        Ok(if held { Release::Released } else { Release::WasNotHeld })
    }

    fn finish_releases_in_background(&mut self) {
        for release in self.nodes.iter_mut().filter_map(Node::take_release) {
            self.background.spawn(async move {
                release.await;
            });
        }
    }

    async fn next_change(&mut self) -> Change {
        let (granted, listened_to) = (self.granted, &self.listened_to);
        let listen = |(i, node): (usize, &Node)| {
            let listens = granted || listened_to.get(i).copied().unwrap_or(false);
            listens.then(|| node.changed())
        };
        let mut changes: Vec<_> = self.nodes.iter().enumerate().map(listen).collect();
        let (mut lost, mut notices) = (0, 0);
        let (majority, all) = (self.majority, self.nodes.len());
        let nodes = &mut self.nodes;
        poll_fn(|cx| {
            for (node, changed) in nodes.iter_mut().zip(&mut changes) {
                // A request in flight has the node's claim locked.
                if let Some(Poll::Pending) = node.poll_response(cx) {
                    continue;
                }
                let polled = changed.as_mut().map(|changed| changed.as_mut().poll(cx));
                let Some(Poll::Ready(change)) = polled else { continue };
                *changed = None;
                match change {
                    Change::Lost(reason) if granted && lost == all - majority => {
                        return Poll::Ready(Change::Lost(reason));
                    }
                    Change::Lost(_) => lost += 1,
                    Change::LookAgain | Change::Granted(_) => notices += 1,
                }
            }
            // A release notifies a majority. An attempt at the first notification would find the other nodes held.
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
        Box::pin(self.attempt_all(floor))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(self.next_change())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(self.renew_all(ttl))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.downgraded = true;
        Box::pin(self.renew_all(ttl))
    }

    fn set_fence(&mut self, fence: Fence) {
        self.fence = self.fence.max(Some(fence));
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        Box::pin(self.release_all())
    }
}

impl Drop for QuorumClaim {
    fn drop(&mut self) {
        self.finish_releases_in_background();
    }
}
