//! One claim on one name.

mod hold;

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use lockkeeper_core::{
    Attempt, BoxFuture, Change, Claim, ClaimSpec, Error, ErrorKind, Fence, Grant, Holder,
    LossReason, Mode, Name, Release, Renewal, Result, Retry,
};
use tokio::time::Instant;

use self::hold::Hold;
use crate::locals::{Entry, Locals, Others, Stage};
use crate::names::AdvisoryKey;
use crate::sessions::{
    Granted, HeldModes, PendingQuery, ReleaseContext, SessionPool, SessionRequest,
    connection_closed, downgrade, min_heartbeat_interval, poll_once, release,
};

/// How long a dropped claim may take to release its lock before its session is ended.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);
/// How much longer than `max_wait` the server waits, so that the engine's timeout comes first.
const LOCK_TIMEOUT_MARGIN: Duration = Duration::from_millis(200);
/// How long the server may not confirm a wait, at the least and at the most, before the wait is abandoned.
const MIN_UNCONFIRMED: Duration = Duration::from_millis(250);
const MAX_UNCONFIRMED: Duration = Duration::from_secs(2);
/// How often an attempt is sent whose connection turns out to be closed.
const MAX_ATTEMPTS: usize = 3;

/// What all claims of a store share.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) sessions: Arc<SessionPool>,
    pub(crate) locals: Arc<Locals>,
    pub(crate) fenced: bool,
    pub(crate) foreign_keys: bool,
}

impl Store {
    /// Returns the key of a name.
    pub(crate) fn key_of(&self, name: &Name) -> Result<AdvisoryKey> {
        match AdvisoryKey::parse(name) {
            None => Ok(AdvisoryKey::of(name)),
            Some(key) if self.foreign_keys => Ok(key),
            Some(_) => Err(Error::new(
                ErrorKind::InvalidName,
                "this is how the key of another program is written: open the store with foreign_keys=on to \
                 lock such keys, or choose another name",
            )),
        }
    }
}

/// A claim on one name.
pub(crate) struct PostgresClaim {
    store: Arc<Store>,
    spec: ClaimSpec,
    key: AdvisoryKey,
    /// While it holds or waits.
    entry: Option<Entry>,
    state: State,
    /// When the last attempt started.
    attempted: Instant,
    /// When the claim was created.
    started: Instant,
    shortage: Shortage,
    /// What other claims of this process had when the last attempt started.
    others: Others,
}

/// What an attempt found no session for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shortage {
    None,
    /// To wait on. The claim polls instead.
    NoneToWait,
    /// To try on.
    NoneToTry,
}

enum State {
    Idle,
    /// A try was sent and not answered yet.
    Trying(PendingQuery),
    /// A session waits for the lock on the server.
    Waiting(PendingQuery),
    Held(Hold),
    Releasing(BoxFuture<'static, Result<Release>>),
}

impl PostgresClaim {
    pub(crate) fn new(store: Arc<Store>, spec: ClaimSpec, key: AdvisoryKey) -> Self {
        let now = Instant::now();
        Self {
            key,
            store,
            spec,
            entry: None,
            state: State::Idle,
            attempted: now,
            started: now,
            shortage: Shortage::None,
            others: Others::default(),
        }
    }

    fn shared(&self) -> bool {
        self.spec.mode == Mode::Shared
    }

    fn session_request(&self) -> SessionRequest<'_> {
        SessionRequest { key: self.key, ttl: self.spec.ttl, label: self.spec.label.as_str() }
    }

    /// Makes one attempt, and resumes one whose future was dropped.
    async fn try_acquire(&mut self) -> Result<Attempt> {
        self.attempted = Instant::now();
        let mut attempts = 1;
        loop {
            match &mut self.state {
                State::Idle => {
                    if let Some(answer) = self.start_attempt().await? {
                        return Ok(answer);
                    }
                }
                State::Trying(query) => {
                    let answer = (&mut query.answer).await;
                    let dead = query.slot.session.connection.is_closed();
                    match self.record_answer(answer) {
                        Ok(Some(_)) if self.session_is_over() => {
                            self.record_loss();
                            if attempts == MAX_ATTEMPTS {
                                return Err(connection_closed());
                            }
                            attempts += 1;
                        }
                        Ok(Some(granted)) => {
                            return Ok(Attempt::Granted(self.grant(granted.alive_at)));
                        }
                        Ok(None) if self.spec.queue => return self.start_waiting().await,
                        Ok(None) => return Ok(contended(Retry::OnNotify)),
                        // A session that is over holds nothing, so the attempt can be repeated on another.
                        Err(_) if dead && attempts < MAX_ATTEMPTS => attempts += 1,
                        Err(error) => return Err(error),
                    }
                }
                State::Waiting(query) => {
                    match poll_once(&mut query.answer).await {
                        None => {
                            if let Some(retry) = self.confirm_wait().await? {
                                return Ok(contended(retry));
                            }
                        }
                        // The next round returns the grant, or tries again.
                        Some(answer) => drop(self.record_answer(answer)?),
                    }
                }
                State::Held(hold) => {
                    let connection = hold.slot.session.connection.clone();
                    let sent = Instant::now();
                    let answer = if connection.has_expired() {
                        Err(connection_closed())
                    } else {
                        connection.ping().await
                    };
                    match answer {
                        Ok(()) => return Ok(Attempt::Granted(self.grant(sent))),
                        Err(_) if connection.is_closed() || connection.has_expired() => {
                            self.record_loss();
                        }
                        Err(error) => return Err(error),
                    }
                }
                State::Releasing(releasing) => {
                    let released = releasing.as_mut().await;
                    (self.state, self.entry) = (State::Idle, None);
                    released?;
                }
            }
        }
    }

    /// Takes the first step of an attempt. Returns `None` if a query was sent whose answer decides.
    async fn start_attempt(&mut self) -> Result<Option<Attempt>> {
        let shortage_before = std::mem::replace(&mut self.shortage, Shortage::None);
        // Read first, so that no release is missed.
        self.others = self.store.locals.others(self.key, self.spec.mode);
        match self.others {
            // The lock is held: by a claim of this process, or by what the other claim waits for.
            Others { exclude: true, .. } | Others { wait: true, .. } if self.spec.queue => {
                return self.start_waiting().await.map(Some);
            }
            Others { exclude: true, .. } => return Ok(Some(contended(Retry::OnNotify))),
            Others { .. } => {}
        }
        let Some(slot) = self.store.sessions.shared_slot(self.session_request()).await? else {
            self.shortage = Shortage::NoneToTry;
            // A claim that may wait does, and there may be a session soon. If there is none the next time, the
            // engine must not take the shortage for contention.
            if !self.spec.queue || shortage_before == Shortage::NoneToTry {
                return Err(self.store.sessions.exhausted());
            }
            self.enter(Stage::WithoutSession);
            return Ok(Some(POLL));
        };
        self.state = State::Trying(PendingQuery::attempt(slot, self.shared(), self.store.fenced));
        Ok(None)
    }

    /// Waits on the server, if there is a session for that; polls if there is none.
    async fn start_waiting(&mut self) -> Result<Attempt> {
        let Some(slot) = self.store.sessions.exclusive_slot(self.session_request()).await? else {
            self.enter(Stage::WithoutSession);
            self.shortage = Shortage::NoneToWait;
            return Ok(POLL);
        };
        let waited = self.started.elapsed();
        // The caller chooses `max_wait`, which may be `Duration::MAX`.
        let limit = self
            .spec
            .max_wait
            .map(|limit| limit.saturating_sub(waited).saturating_add(LOCK_TIMEOUT_MARGIN));
        self.enter(Stage::Waiting(slot.session.clone()));
        let query = PendingQuery::wait(slot, self.shared(), self.store.fenced, limit);
        self.state = State::Waiting(query.send(&mut Context::from_waker(Waker::noop())));
        Ok(contended(Retry::OnNotify))
    }

    /// Asks the server, over another connection, whether the wait is still in progress there, and returns when to ask
    /// again. Returns `None` if the wait was abandoned: the statement was lost, the session has ended, or the grant was
    /// lost on the way back. None of these can be told from a long wait on a connection that is dead in one direction,
    /// even if TCP keepalives are answered, as a proxy in between does.
    ///
    /// The engine repeats attempts every third of the TTL, and fails a waiter whose attempts have had no answer for a
    /// TTL.
    async fn confirm_wait(&mut self) -> Result<Option<Retry>> {
        let State::Waiting(query) = &self.state else { return Ok(None) };
        let connection = query.slot.session.connection.clone();
        let is_executing =
            self.store.sessions.is_executing(&connection, self.session_request()).await?;
        let State::Waiting(query) = &mut self.state else { return Ok(None) };
        if is_executing {
            query.unconfirmed_since = None;
            return Ok(Some(Retry::OnNotify));
        }
        // The statement may be on its way to the server, or its answer on its way back.
        let grace = (connection.idle_timeout() / 6).clamp(MIN_UNCONFIRMED, MAX_UNCONFIRMED);
        let unconfirmed_since = *query.unconfirmed_since.get_or_insert_with(Instant::now);
        if let Some(left) =
            grace.checked_sub(unconfirmed_since.elapsed()).filter(|left| !left.is_zero())
        {
            return Ok(Some(Retry::After(left)));
        }
        // It may have arrived since, while this process was too busy to read it.
        if let Some(answer) = poll_once(&mut query.answer).await {
            self.record_answer(answer)?;
            return Ok(None);
        }
        tracing::debug!(name = %self.spec.name, pid = connection.pid, "the connection of a waiter is dead: it waits again on another");
        self.store.sessions.end_session(&connection, self.session_request()).await;
        // The connection was closed, so the answer is an error.
        self.state = State::Idle;
        self.enter(Stage::WithoutSession);
        Ok(None)
    }

    /// Takes note of what the claim has on the server.
    fn enter(&mut self, stage: Stage) {
        let since = if let Stage::Held(..) = stage { Instant::now() } else { self.started };
        match &self.entry {
            Some(entry) => entry.set_stage(since, stage),
            None => {
                self.entry = Some(self.store.locals.enter(self.key, &self.spec, since, stage));
            }
        }
    }

    /// Records the answer to the pending query.
    fn record_answer(&mut self, answer: Result<Option<Granted>>) -> Result<Option<Granted>> {
        let query = match std::mem::replace(&mut self.state, State::Idle) {
            State::Trying(query) | State::Waiting(query) => query,
            other => {
                self.state = other;
                return answer;
            }
        };
        let slot = query.slot;
        if let Ok(Some(granted)) = &answer {
            slot.session.stop_waiting();
            self.enter(Stage::Held(slot.session.clone(), granted.fence));
            self.state = State::Held(Hold::new(slot, granted.fence, self.attempted));
        } else {
            slot.leave();
            if let Some(entry) = &self.entry {
                entry.set_stage(self.started, Stage::WithoutSession);
            }
        }
        answer
    }

    /// Returns the grant of a lock whose session was alive at `alive_at`, after the last attempt started.
    fn grant(&mut self, alive_at: Instant) -> Grant {
        let State::Held(hold) = &mut self.state else {
            return Grant { fence: None, valid_for: None };
        };
        // The engine counts from the start of the attempt, so what the session lasts beyond that is added.
        let end = alive_at + hold.slot.session.connection.idle_timeout().min(self.spec.ttl);
        let valid_for = end.saturating_duration_since(self.attempted).min(self.spec.ttl);
        (hold.renewed, hold.valid_for) = (self.attempted, valid_for);
        Grant { fence: hold.fence, valid_for: Some(valid_for) }
    }

    /// Returns whether the session that holds the lock is known to be over. The grant and the end of its session may
    /// arrive together; such a grant is not handed out.
    fn session_is_over(&self) -> bool {
        matches!(&self.state, State::Held(hold) if hold.slot.session.connection.is_closed())
    }

    /// Records that the session is over.
    fn record_loss(&mut self) {
        if let State::Held(hold) = std::mem::replace(&mut self.state, State::Idle) {
            hold.slot.session.connection.close();
        }
        self.entry = None;
    }

    async fn next_change(&mut self) -> Change {
        loop {
            match &mut self.state {
                State::Held(hold) => {
                    let session = &hold.slot.session;
                    tokio::select! {
                        () = session.connection.closed.cancelled() => {
                            return Change::Lost(LossReason::SessionEnded);
                        }
                        () = session.heartbeats.announced() => {}
                    }
                    if hold.renewed.elapsed() >= min_heartbeat_interval(self.spec.ttl) {
                        hold.joins = true;
                        return Change::LookAgain;
                    }
                }
                State::Waiting(query) => {
                    let answer = (&mut query.answer).await;
                    let Ok(Some(granted)) = self.record_answer(answer) else {
                        return Change::LookAgain;
                    };
                    if self.session_is_over() {
                        self.record_loss();
                        return Change::LookAgain;
                    }
                    let grant = self.grant(granted.alive_at);
                    // Another attempt gives a longer validity.
                    let enough = grant.valid_for >= Some(self.spec.ttl * 2 / 3);
                    return if enough { Change::Granted(grant) } else { Change::LookAgain };
                }
                State::Idle if self.shortage != Shortage::None => {
                    let (locals, mode) = (&self.store.locals, self.spec.mode);
                    tokio::select! {
                        () = locals.changed(self.key, mode, self.others) => {}
                        () = self.store.sessions.freed() => {}
                    }
                    return Change::LookAgain;
                }
                State::Trying(query) => {
                    let answer = (&mut query.answer).await;
                    // The next attempt finds the result.
                    let _ = self.record_answer(answer);
                    return Change::LookAgain;
                }
                State::Idle | State::Releasing(_) => std::future::pending().await,
            }
        }
    }

    async fn send_renewal(&mut self, ttl: Duration, kind: RenewalKind) -> Result<Renewal> {
        let State::Held(hold) = &mut self.state else {
            return Ok(Renewal::Lost(LossReason::SessionEnded));
        };
        let connection = hold.slot.session.connection.clone();
        let cause = hold.start_renewal();
        let answer = match kind {
            _ if connection.has_expired() || connection.is_closed() => Err(connection_closed()),
            RenewalKind::Renew => match connection.extend_idle_timeout(ttl).await {
                Ok(()) => hold.slot.session.renew(ttl, cause).await,
                failed => failed,
            },
            RenewalKind::Downgrade => {
                hold.held_modes = HeldModes::Either;
                downgrade(&hold.slot).await
            }
        };
        match answer {
            Ok(()) => {
                hold.valid_for = ttl.min(connection.idle_timeout());
                Ok(Renewal::Renewed { valid_for: hold.valid_for })
            }
            Err(_) if connection.is_closed() || connection.has_expired() => {
                self.record_loss();
                Ok(Renewal::Lost(LossReason::SessionEnded))
            }
            Err(error) => Err(error),
        }
    }

    /// Starts the release of what the claim has, as a future that outlives its caller.
    fn start_release(&mut self) {
        if let State::Idle = self.state {
            return;
        }
        let context = ReleaseContext {
            pool: self.store.sessions.clone(),
            ttl: self.spec.ttl,
            label: self.spec.label.clone(),
            shared: self.shared(),
        };
        let releasing: BoxFuture<'static, Result<Release>> =
            match std::mem::replace(&mut self.state, State::Idle) {
                State::Idle => return,
                State::Trying(query) => Box::pin(query.abandon_try(context)),
                State::Waiting(query) => Box::pin(query.abandon_wait(context)),
                State::Held(hold) => Box::pin(release(hold.slot, context, hold.held_modes)),
                State::Releasing(releasing) => releasing,
            };
        self.state = State::Releasing(releasing);
    }
}

/// Another claim holds the lock, and this one has no session on which it could be notified.
const POLL: Attempt = Attempt::Contended { retry: Retry::Poll, holder: Holder::Unknown };

fn contended(retry: Retry) -> Attempt {
    Attempt::Contended { retry, holder: Holder::Unknown }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RenewalKind {
    Renew,
    Downgrade,
}

impl Claim for PostgresClaim {
    fn attempt(&mut self, _floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        Box::pin(self.try_acquire())
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(self.next_change())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(self.send_renewal(ttl, RenewalKind::Renew))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            if self.shared() {
                return self.send_renewal(ttl, RenewalKind::Renew).await;
            }
            let answer = self.send_renewal(ttl, RenewalKind::Downgrade).await?;
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
        self.start_release();
        Box::pin(async move {
            let answer = match &mut self.state {
                State::Releasing(releasing) => releasing.as_mut().await,
                _ => Ok(Release::WasNotHeld),
            };
            (self.state, self.entry) = (State::Idle, None);
            answer
        })
    }
}

impl Drop for PostgresClaim {
    fn drop(&mut self) {
        self.start_release();
        let entry = self.entry.take();
        if let State::Releasing(releasing) = std::mem::replace(&mut self.state, State::Idle) {
            self.spec.background.spawn(async move {
                // Dropped, the release closes the connection.
                if tokio::time::timeout(DROP_TIMEOUT, releasing).await.is_err() {
                    tracing::warn!("a lock was not released in time: its session is ended");
                }
                drop(entry);
            });
        }
    }
}
