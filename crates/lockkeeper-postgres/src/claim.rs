//! One claim on one lock.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use lockkeeper_core::{
    Attempt, BoxFuture, Change, Claim, ClaimSpec, Fence, Grant, Holder, LossReason, Mode, Release,
    Renewal, Result, Retry,
};
use tokio::time::Instant;

use crate::backend::Store;
use crate::flight::{Farewell, Flight, Granted, at_once, downgrade, release};
use crate::key::Key;
use crate::link::gone;
use crate::links::Guest;
use crate::queue::Entry;
use crate::seat::Seat;

/// How long a claim that is dropped may take to end before its connection does.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// How much longer the server lets a waiter wait than it wants to: its own clock is to be the first.
const GRACE: Duration = Duration::from_millis(200);
/// How long a wait may be unknown to the server, at the least and at the most, before it is given up.
const LEAST_DOUBT: Duration = Duration::from_millis(250);
const MOST_DOUBT: Duration = Duration::from_secs(2);
/// How often an ask is repeated whose connection turned out to be dead.
const TRIES: usize = 3;

pub(crate) struct PgClaim {
    store: Arc<Store>,
    spec: ClaimSpec,
    key: Key,
    /// Made at the first ask.
    entry: Option<Entry>,
    state: State,
    /// When the last ask began.
    asked: Instant,
    /// When the first one did.
    began: Instant,
    /// How often somebody here had let go when the last ask began.
    releases: u64,
    /// Whether that found others of this process before it in the queue.
    behind: bool,
    lack: Lack,
}

/// What an ask had no connection for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lack {
    Nothing,
    /// To wait on: it can only look now and then.
    Waiting,
    /// To look with, even.
    Looking,
}

enum State {
    Nothing,
    /// Asked without waiting, and not answered yet.
    Asking(Flight),
    /// The server lets it wait.
    Waiting(Flight),
    Held(Hold),
    Leaving(BoxFuture<'static, Result<Release>>),
}

struct Hold {
    seat: Seat,
    fence: Option<Fence>,
    /// A downgrade has been sent: it is held in one mode, or the other, or both.
    downgraded: bool,
}

impl PgClaim {
    pub(crate) fn new(store: Arc<Store>, spec: ClaimSpec, key: Key) -> Self {
        let now = Instant::now();
        Self {
            key,
            store,
            spec,
            entry: None,
            state: State::Nothing,
            asked: now,
            began: now,
            releases: 0,
            behind: false,
            lack: Lack::Nothing,
        }
    }

    fn shared(&self) -> bool {
        self.spec.mode == Mode::Shared
    }

    fn guest(&self) -> Guest<'_> {
        Guest { key: self.key, ttl: self.spec.ttl, label: self.spec.label.as_str() }
    }

    async fn ask(&mut self) -> Result<Attempt> {
        self.asked = Instant::now();
        let mut tries = 1;
        loop {
            match &mut self.state {
                State::Nothing => {
                    if let Some(answer) = self.start().await? {
                        return Ok(answer);
                    }
                }
                State::Asking(flight) => {
                    let answer = (&mut flight.answer).await;
                    let dead = flight.seat.link.is_closed();
                    match self.landed(answer) {
                        Ok(Some(_)) if self.has_ended() => {
                            self.lose();
                            if tries == TRIES {
                                return Err(gone());
                            }
                            tries += 1;
                        }
                        Ok(Some(granted)) => {
                            return Ok(Attempt::Granted(self.grant(granted.since)));
                        }
                        Ok(None) if self.spec.queue => return self.queue().await,
                        Ok(None) => return Ok(contended(Retry::OnNotify)),
                        // A dead session has no locks: the next is asked as if there had been none.
                        Err(_) if dead && tries < TRIES => tries += 1,
                        Err(error) => return Err(error),
                    }
                }
                State::Waiting(flight) => {
                    match at_once(&mut flight.answer).await {
                        None => {
                            if let Some(retry) = self.confirm().await? {
                                return Ok(contended(retry));
                            }
                        }
                        // What it has is found out below, or asked for again.
                        Some(answer) => drop(self.landed(answer)?),
                    }
                }
                State::Held(hold) => {
                    let link = hold.seat.link.clone();
                    let sent = Instant::now();
                    let answer = if link.has_lapsed() { Err(gone()) } else { link.ping().await };
                    match answer {
                        Ok(()) => return Ok(Attempt::Granted(self.grant(sent))),
                        Err(_) if link.is_closed() || link.has_lapsed() => self.lose(),
                        Err(error) => return Err(error),
                    }
                }
                State::Leaving(leaving) => {
                    let left = leaving.as_mut().await;
                    self.state = State::Nothing;
                    if let Some(entry) = &self.entry {
                        entry.let_go();
                    }
                    left?;
                }
            }
        }
    }

    /// Takes the first step of an ask; `None` if there is an answer to be awaited now.
    async fn start(&mut self) -> Result<Option<Attempt>> {
        let Self { entry, store, spec, key, .. } = self;
        let entry = entry.get_or_insert_with(|| store.locals.enter(*key, spec));
        let mode = spec.mode;
        // Before anything is looked at, so that no release is missed.
        self.releases = entry.releases();
        let lacked = std::mem::replace(&mut self.lack, Lack::Nothing);
        if spec.queue {
            self.behind = !entry.queue(spec);
            if self.behind {
                return Ok(Some(contended(Retry::OnNotify)));
            }
            if let Some(flight) = entry.sent() {
                self.state = State::Waiting(flight);
                return Ok(None);
            }
            if entry.is_held_here(mode) {
                return self.queue().await.map(Some);
            }
        } else if entry.others_wait() || entry.is_held_here(mode) {
            return Ok(Some(contended(Retry::OnNotify)));
        }
        let Some(seat) = self.store.links.shared(self.guest()).await? else {
            self.lack = Lack::Looking;
            // Whoever can wait has its place now, and there may be a connection soon. But the engine is not
            // to believe for ever that it is others who hold the lock.
            if !self.spec.queue || lacked == Lack::Looking {
                return Err(self.store.links.exhausted());
            }
            return Ok(Some(UNTOLD));
        };
        self.state = State::Asking(Flight::attempt(seat, self.shared(), self.store.fenced));
        Ok(None)
    }

    /// Lets the server let it wait, if there is a connection for that.
    async fn queue(&mut self) -> Result<Attempt> {
        if self.begin_to_wait().await? {
            return Ok(contended(Retry::OnNotify));
        }
        self.lack = Lack::Waiting;
        Ok(UNTOLD)
    }

    /// Sends the wait; false if there is no connection for it.
    async fn begin_to_wait(&mut self) -> Result<bool> {
        let Some(seat) = self.store.links.own(self.guest()).await? else { return Ok(false) };
        let waited = self.began.elapsed();
        // The caller chooses `max_wait`: it may be `Duration::MAX`.
        let limit =
            self.spec.max_wait.map(|limit| limit.saturating_sub(waited).saturating_add(GRACE));
        if let Some(entry) = &self.entry {
            entry.waits_on(Some(seat.link.pid));
        }
        let flight = Flight::wait(seat, self.shared(), self.store.fenced, limit);
        self.state = State::Waiting(flight.send(&mut Context::from_waker(Waker::noop())));
        Ok(true)
    }

    /// Asks the server, on another connection, whether the wait is still under way there, and says when to ask
    /// again. `None` if the wait was given up: the statement was lost, the session has ended, or the grant was
    /// lost on the way back. None of these can be told from a long wait on a line that is silent in one
    /// direction, even if TCP's own probes are answered, as a proxy in between does.
    ///
    /// The engine asks every third of the TTL, and fails a waiter whose asks have had no answer for a TTL.
    async fn confirm(&mut self) -> Result<Option<Retry>> {
        let State::Waiting(flight) = &self.state else { return Ok(None) };
        let link = flight.seat.link.clone();
        let at_work = self.store.links.is_at_work(&link, self.guest()).await?;
        let State::Waiting(flight) = &mut self.state else { return Ok(None) };
        if at_work {
            flight.doubted = None;
            return Ok(Some(Retry::OnNotify));
        }
        // The statement may be on its way to the server, or its answer on its way back.
        let grace = (link.session() / 6).clamp(LEAST_DOUBT, MOST_DOUBT);
        let doubted = *flight.doubted.get_or_insert_with(Instant::now);
        if let Some(left) = grace.checked_sub(doubted.elapsed()).filter(|left| !left.is_zero()) {
            return Ok(Some(Retry::After(left)));
        }
        // It may have arrived since: this process may have been too busy to read it.
        if let Some(answer) = at_once(&mut flight.answer).await {
            self.landed(answer)?;
            return Ok(None);
        }
        tracing::debug!(name = %self.spec.name, pid = link.pid, "the line of a waiter is dead: it waits again");
        self.store.links.end_session(&link, self.guest()).await;
        // The line was cut above: the answer is an error.
        self.state = State::Nothing;
        if let Some(entry) = &self.entry {
            entry.waits_on(None);
        }
        Ok(None)
    }

    /// Leaves the queue, and sends the wait of whoever is first then. What had been sent for this one is
    /// its question now.
    fn leave_queue(&mut self) {
        let (Some(entry), store, key) = (&self.entry, &self.store, self.key) else { return };
        let sent = entry.leave_queue(|next, ttl| {
            let guest = Guest { key, ttl, label: next.label.as_str() };
            let seat = store.links.own_at_once(guest)?;
            let flight = Flight::wait(seat, next.mode == Mode::Shared, store.fenced, None);
            Some(flight.send(&mut Context::from_waker(Waker::noop())))
        });
        if let Some(flight) = sent {
            self.state = State::Waiting(flight);
        }
    }

    /// Takes note of how a question ended.
    fn landed(&mut self, answer: Result<Option<Granted>>) -> Result<Option<Granted>> {
        let flight = match std::mem::replace(&mut self.state, State::Nothing) {
            State::Asking(flight) | State::Waiting(flight) => flight,
            other => {
                self.state = other;
                return answer;
            }
        };
        let seat = flight.seat;
        let Some(entry) = &self.entry else { return answer };
        if let Ok(Some(granted)) = &answer {
            seat.link.stop_waiting();
            entry.hold(&self.spec, granted.fence, seat.link.clone());
            self.leave_queue();
            self.state = State::Held(Hold { seat, fence: granted.fence, downgraded: false });
        } else {
            seat.leave();
            entry.waits_on(None);
        }
        answer
    }

    /// What is held, by a session that has lived since some moment after the last ask began.
    fn grant(&self, since: Instant) -> Grant {
        let State::Held(hold) = &self.state else { return Grant { fence: None, valid_for: None } };
        // The engine counts from before the ask: what the session has beyond that moment.
        let end = since + hold.seat.link.session().min(self.spec.ttl);
        let valid_for = end.saturating_duration_since(self.asked).min(self.spec.ttl);
        Grant { fence: hold.fence, valid_for: Some(valid_for) }
    }

    /// Whether the session that holds the lock is known to be over. The grant and the end of its session may arrive
    /// together: then there is nothing to hand out.
    fn has_ended(&self) -> bool {
        matches!(&self.state, State::Held(hold) if hold.seat.link.is_closed())
    }

    /// The session is over.
    fn lose(&mut self) {
        if let State::Held(hold) = std::mem::replace(&mut self.state, State::Nothing) {
            hold.seat.link.kill();
        }
        if let Some(entry) = &self.entry {
            entry.let_go();
        }
    }

    async fn listen(&mut self) -> Change {
        loop {
            match &mut self.state {
                State::Held(hold) => {
                    hold.seat.link.closed.cancelled().await;
                    return Change::Lost(LossReason::SessionEnded);
                }
                State::Waiting(flight) => {
                    let answer = (&mut flight.answer).await;
                    let Ok(Some(granted)) = self.landed(answer) else { return Change::LookAgain };
                    if self.has_ended() {
                        self.lose();
                        return Change::LookAgain;
                    }
                    let grant = self.grant(granted.since);
                    // Less than a fresh ask would give: then it is worth asking.
                    let enough = grant.valid_for >= Some(self.spec.ttl * 2 / 3);
                    return if enough { Change::Granted(grant) } else { Change::LookAgain };
                }
                State::Nothing => {
                    let Some(entry) = &self.entry else { return std::future::pending().await };
                    let lack = self.lack;
                    tokio::select! {
                        // Whose turn has come, though nobody could send its wait for it, asks.
                        () = entry.first(), if self.behind => match entry.sent() {
                            Some(flight) => self.state = State::Waiting(flight),
                            None => return Change::LookAgain,
                        },
                        // It would be told of each hand-over between those before it.
                        () = entry.released(self.releases), if !self.behind => {
                            return Change::LookAgain;
                        }
                        () = self.store.links.freed(), if lack != Lack::Nothing => {
                            return Change::LookAgain;
                        }
                    }
                }
                State::Asking(flight) => {
                    let answer = (&mut flight.answer).await;
                    // Whatever it is, whoever asks next finds out.
                    let _ = self.landed(answer);
                    return Change::LookAgain;
                }
                State::Leaving(_) => std::future::pending().await,
            }
        }
    }

    async fn renewed(&mut self, ttl: Duration, step: Step) -> Result<Renewal> {
        let State::Held(hold) = &mut self.state else {
            return Ok(Renewal::Lost(LossReason::SessionEnded));
        };
        let link = hold.seat.link.clone();
        let answer = match step {
            _ if link.has_lapsed() || link.is_closed() => Err(gone()),
            Step::Renew if link.session() >= ttl => link.ping().await,
            Step::Renew => match link.lengthen(ttl).await {
                Ok(()) => link.ping().await,
                failed => failed,
            },
            Step::Downgrade => {
                hold.downgraded = true;
                downgrade(&hold.seat).await
            }
        };
        match answer {
            Ok(()) => Ok(Renewal::Renewed { valid_for: ttl.min(link.session()) }),
            Err(_) if link.is_closed() || link.has_lapsed() => {
                self.lose();
                Ok(Renewal::Lost(LossReason::SessionEnded))
            }
            Err(error) => Err(error),
        }
    }

    /// Ends whatever there is, as something that can be awaited by whoever comes.
    fn leave(&mut self) {
        if let State::Nothing = self.state {
            return;
        }
        let farewell = Farewell {
            links: self.store.links.clone(),
            ttl: self.spec.ttl,
            label: self.spec.label.clone(),
            shared: self.shared(),
        };
        let leaving: BoxFuture<'static, Result<Release>> =
            match std::mem::replace(&mut self.state, State::Nothing) {
                State::Nothing => return,
                State::Asking(flight) => Box::pin(flight.abandon(farewell, false)),
                State::Waiting(flight) => Box::pin(flight.abandon(farewell, true)),
                State::Held(hold) => Box::pin(release(hold.seat, farewell, hold.downgraded)),
                State::Leaving(leaving) => leaving,
            };
        self.state = State::Leaving(leaving);
    }
}

/// Another claim holds the lock, and this one has no connection on which it could be notified.
const UNTOLD: Attempt = Attempt::Contended { retry: Retry::Poll, holder: Holder::Unknown };

fn contended(retry: Retry) -> Attempt {
    Attempt::Contended { retry, holder: Holder::Unknown }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Renew,
    Downgrade,
}

impl Claim for PgClaim {
    fn attempt(&mut self, _floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        Box::pin(self.ask())
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(self.listen())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(self.renewed(ttl, Step::Renew))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            if self.shared() {
                return self.renewed(ttl, Step::Renew).await;
            }
            let answer = self.renewed(ttl, Step::Downgrade).await?;
            if let Renewal::Renewed { .. } = answer {
                self.spec.mode = Mode::Shared;
                if let Some(entry) = &self.entry {
                    entry.downgrade();
                }
            }
            Ok(answer)
        })
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        self.leave_queue();
        self.leave();
        Box::pin(async move {
            let State::Leaving(leaving) = &mut self.state else { return Ok(Release::WasNotHeld) };
            let answer = leaving.as_mut().await;
            self.state = State::Nothing;
            if let Some(entry) = &self.entry {
                entry.let_go();
            }
            answer
        })
    }
}

impl Drop for PgClaim {
    fn drop(&mut self) {
        self.leave_queue();
        self.leave();
        let entry = self.entry.take();
        if let State::Leaving(leaving) = std::mem::replace(&mut self.state, State::Nothing) {
            self.spec.background.spawn(async move {
                // What has not ended by then ends with its connection.
                if tokio::time::timeout(LAST_WORDS, leaving).await.is_err() {
                    tracing::warn!("a lock was not given back in time: its session is ended");
                }
                drop(entry);
            });
        }
    }
}
