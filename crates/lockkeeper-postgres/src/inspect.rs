//! A look from outside: `pg_locks`, and what this process knows of its own.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use lockkeeper_core::{
    BoxFuture, Error, ErrorKind, Inspector, Kind, Label, LockInfo, Mode, Name, Participant, Result,
    Slots,
};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::backend::{Shared, Store};
use crate::key::{Key, NO_KEY};
use crate::link::Argument;
use crate::queue::{Holder, Waiter};
use crate::seat::Visit;
use crate::sql;

/// How long a session may take to end that is terminated.
const END_WITHIN: Duration = Duration::from_secs(5);

/// A lock that some session holds or awaits.
struct Seen {
    key: Key,
    pid: i32,
    mode: Mode,
    granted: bool,
    waited: Option<Duration>,
    label: Option<Label>,
}

impl Seen {
    fn new(row: &Row) -> Self {
        let mode: &str = row.get("mode");
        let label: &str = row.get("label");
        let waited: Option<f64> = row.get("waited");
        Self {
            key: Key::from_pg_locks(row.get("classid"), row.get("objid"), row.get("objsubid")),
            pid: row.get("pid"),
            mode: if mode == "ShareLock" { Mode::Shared } else { Mode::Exclusive },
            granted: row.get("granted"),
            waited: waited.and_then(|waited| Duration::try_from_secs_f64(waited).ok()),
            label: Label::new(label).ok().filter(|_| !label.is_empty()),
        }
    }

    /// What is shown of it: if it is ours, what we know, and else what the server does.
    fn participant(&self, holders: &[Holder], waiters: &[Waiter]) -> Participant {
        let mut participant = Participant {
            owner: None,
            label: self.label.clone(),
            mode: self.mode,
            fence: None,
            age: self.waited,
            remaining: None,
        };
        if let Some(own) = holders.iter().find(|own| self.granted && own.link.pid == self.pid) {
            (participant.owner, participant.label) = (Some(own.owner), Some(own.label.clone()));
            (participant.fence, participant.age) = (own.fence, Some(own.since.elapsed()));
        }
        if let Some(own) = waiters.iter().find(|own| !self.granted && own.pid == Some(self.pid)) {
            (participant.owner, participant.label) = (Some(own.owner), Some(own.label.clone()));
            participant.age = Some(own.since.elapsed());
        }
        participant
    }
}

impl Store {
    /// Every advisory lock in the database.
    async fn seen(&self) -> Result<Vec<Seen>> {
        let Visit(link) = &self.links.any_without(NO_KEY).await?;
        Ok(link.ask(sql::LOCKS, Vec::new()).await?.iter().map(Seen::new).collect())
    }

    /// What there is, of those keys to which `name_of` gives a name.
    async fn look(&self, name_of: impl Fn(Key) -> Option<Name>) -> Result<Vec<LockInfo>> {
        let seen = self.seen().await?;
        let own = self.locals.all();
        let own: HashMap<Key, _> = own.into_iter().map(|(key, _, h, w)| (key, (h, w))).collect();
        let mut infos: BTreeMap<Key, LockInfo> = BTreeMap::new();
        let mut add = |key: Key, granted: bool, participant: Participant| {
            let Some(name) = name_of(key) else { return };
            let info = infos.entry(key).or_insert_with(|| LockInfo {
                name,
                kind: Kind::Lock,
                holders: Vec::new(),
                waiters: Vec::new(),
            });
            if granted { info.holders.push(participant) } else { info.waiters.push(participant) }
        };
        for seen in &seen {
            let (holders, waiters) = own.get(&seen.key).map_or((&[][..], &[][..]), |(h, w)| (h, w));
            add(seen.key, seen.granted, seen.participant(holders, waiters));
        }
        // Those who wait behind another of this process are not known to the server, or not yet.
        for (key, (_, waiters)) in &own {
            let is_seen = |waiter: &&Waiter| {
                seen.iter().any(|seen| seen.key == *key && Some(seen.pid) == waiter.pid)
            };
            for waiter in waiters.iter().filter(|waiter| !is_seen(waiter)) {
                let participant = Participant {
                    owner: Some(waiter.owner),
                    label: Some(waiter.label.clone()),
                    mode: waiter.mode,
                    fence: None,
                    age: Some(waiter.since.elapsed()),
                    remaining: None,
                };
                add(*key, false, participant);
            }
        }
        let mut infos: Vec<LockInfo> = infos.into_values().collect();
        infos.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(infos)
    }

    /// The names of all keys: of those that this process uses what they were made of, and of all others the keys
    /// themselves.
    fn names(&self) -> impl Fn(Key) -> Option<Name> + use<> {
        let all = self.locals.all().into_iter();
        let known: HashMap<Key, Name> = all.map(|(key, name, ..)| (key, name)).collect();
        move |key| known.get(&key).cloned().or_else(|| Name::new(key).ok())
    }

    /// The names of the keys that a semaphore is made of.
    fn parts(semaphore: &str) -> impl Fn(Key) -> Option<Name> + use<> {
        let parts: HashMap<Key, Name> =
            Slots::parts(semaphore).map(|name| (Key::of(&name), name)).collect();
        move |key| parts.get(&key).cloned()
    }
}

impl Inspector for Shared {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        if prefix.is_empty() {
            return Box::pin(self.0.look(self.0.names()));
        }
        if let Some(semaphore) = prefix.strip_suffix('\0') {
            return Box::pin(self.0.look(Store::parts(semaphore)));
        }
        Box::pin(std::future::ready(Err(Error::new(
            ErrorKind::Unsupported,
            "PostgreSQL keeps hashes of names, and cannot tell which of them start with a prefix: list all keys \
             without one, or show a name",
        ))))
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move {
            let key = self.0.key_of(&name)?;
            self.0.look(move |seen| (seen == key).then(|| name.clone())).await
        })
    }

    /// Ends the sessions that hold the name: what else they hold is lost, too.
    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let key = self.0.key_of(name);
        Box::pin(async move {
            let key = key?;
            let seen = self.0.seen().await?;
            let held = seen.iter().filter(|seen| seen.key == key && seen.granted);
            let pids: Vec<i32> = held.map(|seen| seen.pid).collect();
            if pids.is_empty() {
                return Ok(0);
            }
            // Not over a connection that is about to be ended.
            let Visit(link) = &self.0.links.any_without(key).await?;
            let within = i64::try_from(END_WITHIN.as_millis()).unwrap_or(i64::MAX);
            let (pids, within): (Argument, Argument) = (Box::new(pids), Box::new(within));
            let arguments = vec![(pids, Type::INT4_ARRAY), (within, Type::INT8)];
            let ended = link.ask(sql::TERMINATE, arguments).await?;
            let ended: i64 = ended.first().map_or(0, |row| row.get(0));
            Ok(usize::try_from(ended).unwrap_or_default())
        })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}
