//! Which connection serves which claim.
//!
//! Locks that are held or tried share connections; a waiter has one to itself for as long as it waits.
//! Never do two claims of one key sit on one: a session that holds a lock is granted it again.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deadpool_postgres::Pool;
use lockkeeper_core::{Label, Result};
use tokio::runtime::{self, Handle};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_postgres::{Config, NoTls};
use tokio_util::sync::CancellationToken;

use crate::config::Options;
use crate::error::{translate, unavailable};
use crate::key::{Key, NO_KEY};
use crate::link::{Link, STUCK, Wire, gone, patience_for, session_for};
use crate::pooled::{self, Pooled};
use crate::seat::{Seat, Visit};
use crate::tls::Tls;

/// The ttl that a connection is made for when it is not known for whom.
const USUAL_TTL: Duration = Duration::from_secs(30);
/// How many locks share a connection, if there may be another.
const SHARE: usize = 64;

/// Where connections come from.
pub(crate) enum Source {
    Server { config: Box<Config>, tls: Tls },
    Pool(Pool),
}

/// All connections of a store.
pub(crate) struct Links {
    source: Source,
    options: Options,
    table: Mutex<Table>,
    /// Told when a connection may be free for somebody who found none.
    freed: Arc<Notify>,
}

#[derive(Default)]
struct Table {
    links: Vec<Arc<Link>>,
    /// How many are being opened, and how many of these to wait on.
    opening: usize,
    to_wait: usize,
    /// The one that is being opened to be shared, by the runtime that it will belong to: whoever comes
    /// meanwhile can share it, too.
    underway: HashMap<runtime::Id, Opening>,
}

/// A connection that is being opened, by a task of its own: it does not matter whether those who want it
/// are polled.
#[derive(Clone)]
struct Opening(watch::Receiver<Option<Result<()>>>, Instant);

impl Opening {
    fn is_underway(&self) -> bool {
        // It is an error if the task was dropped with its runtime.
        self.0.has_changed().is_ok() && self.0.borrow().is_none()
    }

    /// Returns whether it takes so long that a claim of `ttl` should open another: if the greeting of the server was
    /// lost, it is stuck until `connect_timeout`.
    fn is_late(&self, ttl: Duration) -> bool {
        self.1.elapsed() >= session_for(ttl) / 2
    }

    async fn done(mut self) -> Result<()> {
        match self.0.wait_for(Option::is_some).await {
            Ok(opened) => opened.clone().unwrap_or(Ok(())),
            Err(_) => Err(gone()),
        }
    }
}

/// Who wants to sit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guest<'a> {
    pub(crate) key: Key,
    pub(crate) ttl: Duration,
    pub(crate) label: &'a str,
}

/// What there is for a guest.
enum Offer {
    Seat(Seat, Fit),
    /// A connection is being opened: after that, there may be a seat.
    Opening(Opening),
    Nothing,
}

/// Whether a seat's session is as its guest wants it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fit {
    Right,
    /// It is to be made longer, or relabelled.
    ToBeSettled,
}

impl Links {
    pub(crate) fn new(source: Source, options: Options) -> Self {
        Self { source, options, table: Mutex::default(), freed: Arc::default() }
    }

    /// Ready when there may be a connection for one who found none.
    pub(crate) async fn freed(&self) {
        self.freed.notified().await;
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn limit(&self) -> usize {
        match &self.source {
            Source::Server { .. } => self.options.max_connections,
            Source::Pool(pool) => pool.status().max_size.min(self.options.max_connections),
        }
    }

    /// A seat to hold or to try a lock on; `None` if every connection has that key, or waits, and there
    /// may not be more.
    pub(crate) async fn shared(self: &Arc<Self>, guest: Guest<'_>) -> Result<Option<Seat>> {
        let mut refused = None;
        loop {
            match self.offer_shared(guest, refused.is_none()) {
                Offer::Seat(seat, fit) => {
                    if let Some(seat) = self.take(seat, fit, guest).await? {
                        return Ok(Some(seat));
                    }
                }
                // If it cannot be had and there are others, these have to do.
                Offer::Opening(opening) => refused = opening.done().await.err(),
                Offer::Nothing => return refused.map_or(Ok(None), Err),
            }
        }
    }

    /// A seat to wait on, alone; `None` if there may not be more connections. One is always left to hold, to try and to
    /// confirm waits on. Otherwise claims that wait for each other's locks would never end, and a wait that cannot be
    /// confirmed fails after a TTL.
    pub(crate) async fn own(self: &Arc<Self>, guest: Guest<'_>) -> Result<Option<Seat>> {
        loop {
            match self.offer_own(guest, true) {
                Offer::Seat(seat, fit) => {
                    if let Some(seat) = self.take(seat, fit, guest).await? {
                        return Ok(Some(seat));
                    }
                }
                Offer::Opening(opening) => match opening.done().await {
                    Ok(()) => {}
                    // The server may let in fewer than there may be. If it is down, a try will tell.
                    Err(error) if error.is_retryable() => return Ok(None),
                    Err(error) => return Err(error),
                },
                Offer::Nothing => return Ok(None),
            }
        }
    }

    /// A seat to wait on that is there at once, and just as it is to be.
    pub(crate) fn own_at_once(self: &Arc<Self>, guest: Guest<'_>) -> Option<Seat> {
        match self.offer_own(guest, false) {
            Offer::Seat(seat, Fit::Right) if !seat.link.is_drowsy() => Some(seat),
            Offer::Seat(seat, _) => {
                seat.leave();
                None
            }
            Offer::Opening(_) | Offer::Nothing => None,
        }
    }

    /// Returns a visit to any connection that does not have this key, for a question about no lock of this process.
    pub(crate) async fn any_without(self: &Arc<Self>, key: Key) -> Result<Visit> {
        let label = Label::default();
        let (ttl, label) = (USUAL_TTL, label.as_str());
        let seat = self.shared(Guest { key, ttl, label }).await?;
        self.visit_instead(seat)
    }

    /// Any connection that answers, for a question about no lock of it.
    pub(crate) async fn visit(self: &Arc<Self>, guest: Guest<'_>) -> Result<Visit> {
        let (here, patience) = (Handle::current().id(), patience_for(guest.ttl));
        let visit = |table: &Table| {
            let links = table.links.iter().filter(|link| link.runtime.id() == here);
            let mut awake = links.filter(|link| !link.is_closed() && !link.is_drowsy());
            awake.find_map(|link| link.visit(patience))
        };
        if let Some(visit) = visit(&self.table()) {
            return Ok(visit);
        }
        let seat = self.shared(Guest { key: NO_KEY, ..guest }).await?;
        self.visit_instead(seat)
    }

    /// Replaces a seat by a visit, so that no waiter takes the connection in between.
    fn visit_instead(&self, seat: Option<Seat>) -> Result<Visit> {
        let seat = seat.ok_or_else(|| self.exhausted())?;
        let visit = seat.link.visit(Duration::MAX);
        seat.leave();
        visit.ok_or_else(|| self.exhausted())
    }

    pub(crate) fn exhausted(&self) -> lockkeeper_core::Error {
        unavailable(format!(
            "all {} connections that there may be are in use: raise max_connections",
            self.limit()
        ))
    }

    fn offer_shared(self: &Arc<Self>, guest: Guest<'_>, may_open: bool) -> Offer {
        let mut table = self.table();
        let here = Handle::current().id();
        table.links.retain(|link| !link.is_closed());
        let answers_within = |link: &Arc<Link>, patience| {
            if link.runtime.id() == here { link.seats_without(guest.key, patience) } else { None }
        };
        let free = |link: &Arc<Link>| answers_within(link, patience_for(guest.ttl));
        let sit = |link: &Arc<Link>, fit| {
            link.sit(guest.key, false);
            Offer::Seat(Seat::new(link.clone(), guest.key), fit)
        };
        let right = |link: &&Arc<Link>| {
            free(link).is_some_and(|seats| seats < SHARE)
                && is_near(link, guest.ttl)
                && self.fit(link, &guest) == Fit::Right
        };
        if let Some(link) = table.links.iter().find(right) {
            return sit(link, Fit::Right);
        }
        // One that nobody sits on takes any label; but not a much shorter session than it has.
        let empty = |link: &&Arc<Link>| free(link) == Some(0) && is_near(link, guest.ttl);
        if let Some(link) = table.links.iter().find(empty) {
            return sit(link, Fit::ToBeSettled);
        }
        if may_open {
            let underway = table.underway.get(&here).filter(|opening| opening.is_underway());
            let underway = underway.cloned();
            if let Some(opening) = underway.as_ref().filter(|opening| !opening.is_late(guest.ttl)) {
                return Offer::Opening(opening.clone());
            }
            if self.has_room(&mut table, 0, None) {
                let (opening, task) = self.open(&mut table, guest, false);
                table.underway.insert(here, opening.clone());
                return start(table, opening, task);
            }
            if let Some(opening) = underway {
                return Offer::Opening(opening);
            }
        }
        // Crowded: any will do.
        let least =
            table.links.iter().filter_map(|link| Some((answers_within(link, STUCK)?, link)));
        match least.min_by_key(|(seats, _)| *seats) {
            Some((_, link)) => sit(link, self.fit(link, &guest)),
            None => Offer::Nothing,
        }
    }

    fn offer_own(self: &Arc<Self>, guest: Guest<'_>, may_open: bool) -> Offer {
        let mut table = self.table();
        let here = Handle::current().id();
        table.links.retain(|link| !link.is_closed());
        let waiting = table.links.iter().filter(|link| link.is_waiting()).count() + table.to_wait;
        if waiting + 1 >= self.limit() {
            return Offer::Nothing;
        }
        let seats = |link: &Arc<Link>| {
            link.seats(patience_for(guest.ttl)).filter(|_| link.runtime.id() == here)
        };
        // A wait is confirmed over another connection of this runtime. Without one, the claim polls instead.
        let confirms = |waiting: &Arc<Link>| {
            table.links.iter().any(|link| !Arc::ptr_eq(link, waiting) && seats(link).is_some())
        };
        let empty = |link: &&Arc<Link>| {
            seats(link) == Some(0) && is_near(link, guest.ttl) && confirms(link)
        };
        if let Some(link) = table.links.iter().find(empty) {
            let fit = self.fit(link, &guest);
            link.sit(guest.key, true);
            return Offer::Seat(Seat::new(link.clone(), guest.key), fit);
        }
        // The last one that there may be is for holding, trying and confirming, if there is none for that.
        let kept = table.links.iter().find(|link| seats(link).is_some()).cloned();
        let spare = usize::from(kept.is_none());
        if may_open && self.has_room(&mut table, spare, kept.as_ref()) {
            let (opening, task) = self.open(&mut table, guest, true);
            return start(table, opening, task);
        }
        Offer::Nothing
    }

    /// Returns whether there may be one more, and so many beside it. An unused connection makes room, except `kept`.
    fn has_room(&self, table: &mut Table, spare: usize, kept: Option<&Arc<Link>>) -> bool {
        let limit = self.limit();
        let is_kept = |link: &Arc<Link>| kept.is_some_and(|kept| Arc::ptr_eq(kept, link));
        let unused = |link: &Arc<Link>| link.is_unused() && !is_kept(link);
        while table.links.len() + table.opening + spare >= limit {
            let Some(unused) = table.links.iter().position(unused) else {
                return false;
            };
            table.links.swap_remove(unused);
        }
        true
    }

    fn label<'a>(&'a self, guest: &Guest<'a>) -> &'a str {
        self.options.application_name.as_deref().unwrap_or(guest.label)
    }

    fn fit(&self, link: &Link, guest: &Guest<'_>) -> Fit {
        if link.suits(guest.ttl, self.label(guest)) { Fit::Right } else { Fit::ToBeSettled }
    }

    /// Makes a seat's session what its guest needs; `None` if the session turns out to be over.
    async fn take(&self, seat: Seat, fit: Fit, guest: Guest<'_>) -> Result<Option<Seat>> {
        let link = seat.link.clone();
        let seat = Unasked(Some(seat));
        let answer = match fit {
            Fit::ToBeSettled => link.settle(guest.ttl, self.label(&guest)).await,
            Fit::Right if link.is_drowsy() => link.ping().await,
            Fit::Right => Ok(()),
        };
        match answer {
            Ok(()) => Ok(seat.take()),
            Err(_) if link.is_closed() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What opens a connection, on which nobody sits then. A place among those that are allowed is kept for it.
    fn open(
        self: &Arc<Self>,
        table: &mut Table,
        guest: Guest<'_>,
        waits: bool,
    ) -> (Opening, impl Future<Output = ()> + Send + use<>) {
        let place = Place::keep(self, table, waits);
        let (links, ttl, label) = (self.clone(), guest.ttl, self.label(&guest).to_owned());
        let (tell, opening) = watch::channel(None);
        let task = async move {
            let within = links.options.connect_timeout;
            let opened = tokio::time::timeout(within, async {
                let link = links.connect(ttl, waits).await?;
                link.settle_here(ttl, &label).await?;
                Ok(link)
            });
            let opened = opened.await.unwrap_or_else(|_| {
                Err(unavailable(format!("the server did not let us in within {within:.1?}")))
            });
            let opened = opened.map(|link| links.table().links.push(link));
            drop(place);
            tell.send_replace(Some(opened));
        };
        (Opening(opening, Instant::now()), task)
    }

    pub(crate) async fn connect(self: &Arc<Self>, ttl: Duration, waits: bool) -> Result<Arc<Link>> {
        let closed = CancellationToken::new();
        match &self.source {
            Source::Server { config, tls } => {
                let (client, connection) = tls.connect(&watchful(config, ttl)).await?;
                let bell = Bell(closed.clone(), self.freed.clone());
                let task = tokio::spawn(async move {
                    let _bell = bell;
                    connection.await;
                });
                let wire = Wire::Own(client, task.abort_handle());
                Ok(Arc::new(Link::new(wire, closed, self.freed.clone()).await?))
            }
            Source::Pool(pool) => {
                // Whoever waits for a lock can also look now and then: it takes what nobody needs.
                let patience = if waits { Duration::ZERO } else { self.options.connect_timeout };
                let pooled = Pooled::get(pool, patience).await?;
                let bell = Bell(closed.clone(), self.freed.clone());
                let wire = Wire::Pooled(pooled);
                let link = Arc::new(Link::new(wire, closed, self.freed.clone()).await?);
                let (links, watched) = (Arc::downgrade(self), Arc::downgrade(&link));
                tokio::spawn(async move {
                    pooled::ended(&watched).await;
                    // It is closed when it is dropped, and not before.
                    if let Some(links) = links.upgrade() {
                        links.table().links.retain(|link| !link.is_closed());
                    }
                    drop(bell);
                });
                Ok(link)
            }
        }
    }

    /// Asks the server to end what a connection is doing.
    pub(crate) async fn cancel(&self, link: &Link) -> Result<()> {
        let token = link.cancel_token();
        match &self.source {
            Source::Server { tls, .. } => tls.cancel(&token).await,
            // How the pool encrypts is not known here. If it must, this fails.
            Source::Pool(_) => token.cancel_query(NoTls).await.map_err(translate),
        }
    }
}

/// Starts to open a connection, when the table is free again: a runtime that ends drops the task at once, and
/// the place that is kept for it then needs the table.
fn start(
    table: MutexGuard<'_, Table>,
    opening: Opening,
    task: impl Future<Output = ()> + Send + 'static,
) -> Offer {
    drop(table);
    tokio::spawn(task);
    Offer::Opening(opening)
}

/// The configuration, with a look at whether the server's machine is there, about as often as the server
/// looks for ours. What the user has set stays.
fn watchful(config: &Config, ttl: Duration) -> Config {
    const UNSET: Duration = Duration::from_secs(2 * 60 * 60);
    let (mut config, session) = (config.clone(), session_for(ttl));
    let at_most = |time: Duration| time.clamp(Duration::from_secs(1), UNSET);
    if config.get_keepalives_idle() == UNSET {
        config.keepalives_idle(at_most(session / 2));
    }
    if config.get_keepalives_interval().is_none() {
        config.keepalives_interval(at_most(session / 6)).keepalives_retries(3);
    }
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(at_most(session));
    }
    config
}

/// Whether a session ends soon enough after a lease of `ttl` does. It cannot be made shorter.
fn is_near(link: &Link, ttl: Duration) -> bool {
    link.session() / 2 <= session_for(ttl)
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.table();
        f.debug_struct("Links").field("links", &table.links).finish_non_exhaustive()
    }
}

/// Rung when a connection has ended: its session is over, and there is room for another.
struct Bell(CancellationToken, Arc<Notify>);

impl Drop for Bell {
    fn drop(&mut self) {
        self.0.cancel();
        self.1.notify_one();
    }
}

/// A place kept for a connection that is being opened.
struct Place {
    links: Arc<Links>,
    waits: bool,
}

impl Place {
    fn keep(links: &Arc<Links>, table: &mut Table, waits: bool) -> Self {
        table.opening += 1;
        table.to_wait += usize::from(waits);
        Self { links: links.clone(), waits }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.links.table();
        table.opening -= 1;
        table.to_wait -= usize::from(self.waits);
    }
}

/// A seat on which nothing has been asked yet: it can be left at any time.
struct Unasked(Option<Seat>);

impl Unasked {
    fn take(mut self) -> Option<Seat> {
        self.0.take()
    }
}

impl Drop for Unasked {
    fn drop(&mut self) {
        if let Some(seat) = self.0.take() {
            seat.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use lockkeeper_testkit::server::PostgresServer;

    use super::*;
    use crate::config::Settings;

    fn links(url: &str) -> Arc<Links> {
        let Settings { driver, options, .. } = Settings::parse(url).unwrap();
        let tls = Tls::new(None, driver.get_ssl_mode()).unwrap();
        Arc::new(Links::new(Source::Server { config: Box::new(driver), tls }, options))
    }

    /// As the session itself sees them: for sockets, the server asks the operating system.
    async fn settings(link: &Arc<Link>) -> Vec<String> {
        let sql = "SELECT setting FROM pg_settings WHERE name IN ('idle_session_timeout', \
                   'tcp_user_timeout', 'tcp_keepalives_idle', 'tcp_keepalives_interval', \
                   'tcp_keepalives_count', 'client_connection_check_interval', 'application_name') \
                   ORDER BY name";
        let rows = link.ask(sql, Vec::new()).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    #[tokio::test]
    async fn a_session_is_told_how_long_to_live_and_how_to_look_for_its_client() {
        let server = PostgresServer::start_or_panic();
        let links = links(&format!("{}?sslmode=disable", server.url()));
        let key = Key::from_i64(1);
        let guest = Guest { key, ttl: Duration::from_secs(60), label: "me" };
        let seat = links.shared(guest).await.unwrap().unwrap();
        let expected = ["me", "1000", "60000", "3", "30", "10", "60000"];
        assert_eq!(settings(&seat.link).await, expected);
        // A longer lease makes it longer, and a shorter one not shorter.
        for ttl in [120, 70] {
            seat.link.lengthen(Duration::from_secs(ttl)).await.unwrap();
            let expected = ["me", "1000", "120000", "3", "60", "20", "120000"];
            assert_eq!(settings(&seat.link).await, expected);
        }
        seat.link.settle(Duration::from_secs(70), "another").await.unwrap();
        let expected = ["another", "1000", "120000", "3", "60", "20", "120000"];
        assert_eq!(settings(&seat.link).await, expected);
        seat.leave();
    }

    #[test]
    fn a_connection_looks_for_its_server_as_often_as_that_looks_for_it() {
        let config: Config = "postgres://me@host/db".parse().unwrap();
        let watched = watchful(&config, Duration::from_secs(60));
        assert_eq!(watched.get_keepalives_idle(), Duration::from_secs(30));
        assert_eq!(watched.get_keepalives_interval(), Some(Duration::from_secs(10)));
        assert_eq!(watched.get_keepalives_retries(), Some(3));
        assert_eq!(watched.get_tcp_user_timeout(), Some(&Duration::from_secs(60)));
        let own =
            "postgres://me@host/db?keepalives_idle=7&keepalives_interval=8&tcp_user_timeout=9";
        let watched = watchful(&own.parse().unwrap(), Duration::from_secs(60));
        assert_eq!(watched.get_keepalives_idle(), Duration::from_secs(7));
        assert_eq!(watched.get_keepalives_interval(), Some(Duration::from_secs(8)));
        assert_eq!(watched.get_tcp_user_timeout(), Some(&Duration::from_secs(9)));
    }
}
