//! A claim on one name.

mod hold;
mod store;

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use lockkeeper_core::{
    Attempt, BoxFuture, Change, Claim, ClaimSpec, Fence, Grant, Holder, LossReason, Mode, Release,
    Renewal, Result, Retry,
};
use tokio::time::Instant;

use self::hold::Hold;
pub(crate) use self::store::Store;
use crate::local_claims::{Entry, OtherClaims, Stage};
use crate::names::AdvisoryKey;
use crate::sessions::{
    Granted, HeldModes, PendingQuery, ReleaseContext, SessionRequest, connection_closed, downgrade,
    min_heartbeat_interval, poll_once, release,
};

/// The timeout of the release of a dropped claim. After that, its session is ended.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);
/// How much longer than `max_wait` the server waits, so that the engine times out first.
const LOCK_TIMEOUT_MARGIN: Duration = Duration::from_millis(200);
/// The bounds of how long a wait may go unconfirmed by the server before it is abandoned.
const MIN_UNCONFIRMED: Duration = Duration::from_millis(250);
const MAX_UNCONFIRMED: Duration = Duration::from_secs(2);
/// How many times an attempt is sent if its connection turns out to be closed.
const MAX_ATTEMPTS: usize = 3;

/// A claim on one name.
pub(crate) struct PostgresClaim {
    store: Arc<Store>,
    spec: ClaimSpec,
    key: AdvisoryKey,
    /// The claim's entry in `Store::local_claims`, while it holds or waits.
    entry: Option<Entry>,
    state: State,
    /// When the last attempt started.
    attempted: Instant,
    /// When the claim was created.
    started: Instant,
    missing_session: MissingSession,
    /// What other claims of this process had on the key when the last attempt started.
    others: OtherClaims,
}

/// What the last attempt found no session for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MissingSession {
    None,
    /// For a wait on the server. The claim polls instead.
    ForWait,
    /// For a try.
    ForTry,
}

enum State {
    Idle,
    /// A try was sent, and its answer is pending.
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
            missing_session: MissingSession::None,
            others: OtherClaims::default(),
        }
    }

    fn shared(&self) -> bool {
        self.spec.mode == Mode::Shared
    }

    fn session_request(&self) -> SessionRequest<'_> {
        SessionRequest {
            key: self.key,
            ttl: self.spec.ttl,
            label: self.spec.label.as_str(),
            fencing: Some(&self.store.fencing),
        }
    }

    /// Makes an attempt, or resumes one whose future was dropped.
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
                    let connection = query.slot.session.connection.clone();
                    match self.record_answer(answer) {
                        Ok(Some(_)) if self.session_has_ended() => {
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
                        // An ended session holds no lock, so the attempt can be repeated on another. After an error about
                        // its sequence, the session is prepared again.
                        Err(_)
                            if attempts < MAX_ATTEMPTS
                                && (connection.is_closed()
                                    || !self.store.fencing.is_prepared(&connection)) =>
                        {
                            attempts += 1;
                        }
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
                        // The next iteration returns the grant, or tries again.
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

    /// Starts an attempt. Returns `None` if it sent a query, whose answer decides.
    async fn start_attempt(&mut self) -> Result<Option<Attempt>> {
        let missing_before = std::mem::replace(&mut self.missing_session, MissingSession::None);
        // Read before the attempt, so that no release is missed.
        self.others = self.store.local_claims.others(self.key, self.spec.mode);
        match self.others {
            // The lock is held: by another claim of this process, or by the holder that another claim waits for.
            OtherClaims { exclude: true, .. } | OtherClaims { wait: true, .. }
                if self.spec.queue =>
            {
                return self.start_waiting().await.map(Some);
            }
            OtherClaims { exclude: true, .. } => return Ok(Some(contended(Retry::OnNotify))),
            OtherClaims { .. } => {}
        }
        let Some(slot) = self.store.sessions.shared_slot(self.session_request()).await? else {
            self.missing_session = MissingSession::ForTry;
            // A claim that may wait polls once for a session. If there is none again, the attempt fails: a missing session
            // is not contention.
            if !self.spec.queue || missing_before == MissingSession::ForTry {
                return Err(self.store.sessions.exhausted());
            }
            self.set_stage(Stage::WithoutSession);
            return Ok(Some(POLL));
        };
        let fencing = self.store.fencing.clone();
        self.state = State::Trying(PendingQuery::attempt(slot, self.shared(), fencing));
        Ok(None)
    }

    /// Waits on the server if there is a session for it, and polls otherwise.
    async fn start_waiting(&mut self) -> Result<Attempt> {
        let Some(slot) = self.store.sessions.exclusive_slot(self.session_request()).await? else {
            self.set_stage(Stage::WithoutSession);
            self.missing_session = MissingSession::ForWait;
            return Ok(POLL);
        };
        let waited = self.started.elapsed();
        // The caller chooses `max_wait`, which may be `Duration::MAX`.
        let limit = self
            .spec
            .max_wait
            .map(|limit| limit.saturating_sub(waited).saturating_add(LOCK_TIMEOUT_MARGIN));
        self.set_stage(Stage::Waiting(slot.session.clone()));
        let query = PendingQuery::wait(slot, self.shared(), self.store.fencing.clone(), limit);
        self.state = State::Waiting(query.send(&mut Context::from_waker(Waker::noop())));
        Ok(contended(Retry::OnNotify))
    }

    /// Checks over another connection whether the wait is in progress on the server. Returns when to check again, or `None`
    /// if the wait has ended or was abandoned.
    ///
    /// A wait is abandoned if its statement or its grant was lost, or if its session has ended. On a connection that is dead
    /// in one direction, each of these looks like a long wait. TCP keepalives do not detect that if a proxy answers them.
    /// Covered by `tests/sessions/half_open.rs`.
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
        // The statement or its answer may be in flight.
        let grace = (connection.idle_timeout() / 6).clamp(MIN_UNCONFIRMED, MAX_UNCONFIRMED);
        let unconfirmed_since = *query.unconfirmed_since.get_or_insert_with(Instant::now);
        if let Some(left) =
            grace.checked_sub(unconfirmed_since.elapsed()).filter(|left| !left.is_zero())
        {
            return Ok(Some(Retry::After(left)));
        }
        // The answer may have arrived while this process was too busy to read it.
        if let Some(answer) = poll_once(&mut query.answer).await {
            self.record_answer(answer)?;
            return Ok(None);
        }
        tracing::debug!(name = %self.spec.name.escape_debug(), pid = connection.pid, "the connection of a waiter is dead: waiting again on another connection");
        self.store.sessions.end_session(&connection, self.session_request()).await;
        // The connection is closed, so the answer would be an error.
        self.state = State::Idle;
        self.set_stage(Stage::WithoutSession);
        Ok(None)
    }

    /// Records what the claim has on the server.
    fn set_stage(&mut self, stage: Stage) {
        let since = if let Stage::Held(..) = stage { Instant::now() } else { self.started };
        match &self.entry {
            Some(entry) => entry.set_stage(since, stage),
            None => {
                self.entry =
                    Some(self.store.local_claims.register(self.key, &self.spec, since, stage));
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
            self.set_stage(Stage::Held(slot.session.clone(), granted.fence));
            self.state = State::Held(Hold::new(slot, granted.fence, self.attempted));
        } else {
            slot.end_unused();
            if let Some(entry) = &self.entry {
                entry.set_stage(self.started, Stage::WithoutSession);
            }
        }
        answer
    }

    /// Returns the grant of a held lock. `alive_at` is a time after the start of the last attempt at which the session was
    /// alive.
    fn grant(&mut self, alive_at: Instant) -> Grant {
        let State::Held(hold) = &mut self.state else {
            return Grant { fence: None, fence_is_past: false, valid_for: None };
        };
        // The engine counts the validity from the start of the attempt, so the time from there to `alive_at` is added.
        let end = alive_at + hold.slot.session.connection.idle_timeout().min(self.spec.ttl);
        let valid_for = end.saturating_duration_since(self.attempted).min(self.spec.ttl);
        (hold.renewed, hold.valid_for) = (self.attempted, valid_for);
        Grant { fence: hold.fence, fence_is_past: false, valid_for: Some(valid_for) }
    }

    /// Returns whether the session that holds the lock is known to have ended. The grant may arrive together with the end of
    /// its session, and is not returned then.
    fn session_has_ended(&self) -> bool {
        matches!(&self.state, State::Held(hold) if hold.slot.session.connection.is_closed())
    }

    /// Records that the session has ended.
    fn record_loss(&mut self) {
        if let State::Held(hold) = std::mem::replace(&mut self.state, State::Idle) {
            hold.slot.session.connection.close();
        }
        self.entry = None;
    }

    /// Records for the table of names that the claim lasts. The engine calls `changed` of a hold only when it has lasted for
    /// some milliseconds, and of a waiter when it starts to wait.
    fn record_name(&mut self) {
        if let State::Held(hold) = &mut self.state
            && !std::mem::replace(&mut hold.is_recorded, true)
            && let Some(entry) = &self.entry
        {
            entry.lasts();
        }
        if let State::Held(_) | State::Waiting(_) = self.state {
            self.store.write_names();
        }
    }

    async fn next_change(&mut self) -> Change {
        self.record_name();
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
                    if self.session_has_ended() {
                        self.record_loss();
                        return Change::LookAgain;
                    }
                    let grant = self.grant(granted.alive_at);
                    // If little of the validity is left, another attempt returns a longer one.
                    let is_long = grant.valid_for >= Some(self.spec.ttl * 2 / 3);
                    return if is_long { Change::Granted(grant) } else { Change::LookAgain };
                }
                State::Idle if self.missing_session != MissingSession::None => {
                    let (local_claims, mode) = (&self.store.local_claims, self.spec.mode);
                    tokio::select! {
                        () = local_claims.changed(self.key, mode, self.others) => {}
                        () = self.store.sessions.freed() => {}
                    }
                    return Change::LookAgain;
                }
                State::Trying(query) => {
                    let answer = (&mut query.answer).await;
                    // The next attempt returns the result.
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

    /// Starts to release the lock, or to abandon the query in flight. The claim keeps the future, so that the release
    /// continues if its caller is dropped.
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

/// The answer to a claim that has no session on which the server could notify it.
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

    fn set_fence(&mut self, _fence: Fence) {}

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        self.start_release();
        Box::pin(async move {
            let answer = match &mut self.state {
                State::Releasing(releasing) => releasing.as_mut().await,
                _ => Ok(Release::WasNotHeld),
            };
            (self.state, self.entry) = (State::Idle, None);
            self.store.write_names();
            answer
        })
    }
}

impl Drop for PostgresClaim {
    fn drop(&mut self) {
        self.start_release();
        let (entry, name, store) = (self.entry.take(), self.spec.name.clone(), self.store.clone());
        if let State::Releasing(releasing) = std::mem::replace(&mut self.state, State::Idle) {
            self.spec.background.spawn(async move {
                // On a timeout, dropping the release closes the connection.
                if tokio::time::timeout(DROP_TIMEOUT, releasing).await.is_err() {
                    tracing::warn!(name = %name.escape_debug(), "lock not released within {DROP_TIMEOUT:?}: closing its connection");
                }
                drop(entry);
                store.write_names();
            });
        }
    }
}
