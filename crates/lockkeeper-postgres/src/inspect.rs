//! Inspection, from `pg_locks`, from the table of names, and from the records of this process about its own claims.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use lockkeeper_core::{
    BoxFuture, Error, ErrorKind, Fence, Inspector, Kind, Label, LockInfo, Mode, Name, Owner,
    Participant, Result, Slots,
};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::backend::RawBackend;
use crate::claim::Store;
use crate::local_claims::LocalClaim;
use crate::name_table::WITHOUT;
use crate::names::{AdvisoryKey, NO_KEY};
use crate::sessions::Argument;

const LOCKS: &str = include_str!("inspect/locks.sql");
const NAMED_LOCKS: &str = include_str!("inspect/named_locks.sql");
const TERMINATE: &str = include_str!("inspect/terminate.sql");

/// How long a terminated session may take to end.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(5);

/// A lock that a session holds or waits for, as the server shows it.
struct ServerLock {
    key: AdvisoryKey,
    pid: i32,
    mode: Mode,
    granted: bool,
    age: Option<Duration>,
    label: Option<Label>,
    /// The name, from the table of names.
    name: Option<Name>,
    owner: Option<Owner>,
    fence: Option<Fence>,
}

impl ServerLock {
    /// Creates a lock from a row of `named_locks.sql`.
    fn named(row: &Row) -> Self {
        let mut lock = Self::new(row);
        let name = row.get::<_, Option<&[u8]>>("name").and_then(|name| str::from_utf8(name).ok());
        // A name with another key is not of this lock.
        let name = name.filter(|name| lock.key.is_locked_for(name));
        lock.name = name.map(|name| Name::derived(name.to_owned()));
        if lock.name.is_some() && row.get::<_, Option<bool>>("described") == Some(true) {
            let label =
                row.get::<_, Option<&[u8]>>("own_label").and_then(|it| str::from_utf8(it).ok());
            lock.label = label.and_then(|label| Label::new(label).ok()).or(lock.label);
            let age = row.get::<_, Option<f64>>("age").map(|age| age.max(0.0));
            lock.age = age.and_then(|age| Duration::try_from_secs_f64(age).ok()).or(lock.age);
            lock.owner = row.get::<_, Option<&str>>("owner").and_then(|owner| owner.parse().ok());
            let fence = row.get::<_, Option<i64>>("fence").and_then(|it| u64::try_from(it).ok());
            lock.fence = fence.and_then(Fence::new);
        }
        lock
    }

    fn new(row: &Row) -> Self {
        let mode: &str = row.get("mode");
        let label: &str = row.get("label");
        let waited: Option<f64> = row.get("waited");
        Self {
            key: AdvisoryKey::from_pg_locks(
                row.get("classid"),
                row.get("objid"),
                row.get("objsubid"),
            ),
            pid: row.get("pid"),
            mode: if mode == "ShareLock" { Mode::Shared } else { Mode::Exclusive },
            granted: row.get("granted"),
            age: waited.and_then(|waited| Duration::try_from_secs_f64(waited).ok()),
            label: Label::new(label).ok().filter(|_| !label.is_empty()),
            name: None,
            owner: None,
            fence: None,
        }
    }

    /// Returns the holder or waiter of this lock. For a claim of this process it has details that the server does not have.
    fn participant(&self, local_claims: &[LocalClaim]) -> Participant {
        let own = local_claims.iter().find(|own| own.uses(self.pid));
        own.map_or_else(
            || Participant {
                owner: self.owner,
                label: self.label.clone(),
                mode: self.mode,
                fence: self.fence,
                age: self.age,
                remaining: None,
            },
            |own| Participant { mode: self.mode, ..own.participant() },
        )
    }
}

impl Store {
    /// Returns every advisory lock of the database, with their names as far as they are known. If the table of names cannot be
    /// read, `required` decides: an error that states what to do, or the locks without names.
    async fn server_locks(&self, required: Required) -> Result<Vec<ServerLock>> {
        let permit = self.sessions.query_permit_without(NO_KEY).await?;
        match &self.names {
            Some(names) => match names.query(&permit, NAMED_LOCKS).await {
                Ok(rows) => return Ok(rows.iter().map(ServerLock::named).collect()),
                Err(error) if permit.0.connection.is_closed() => return Err(error),
                Err(error) if required == Required::Names => {
                    if let Some(error) = names.explain(&permit, &error).await {
                        return Err(error);
                    }
                }
                Err(_) => {}
            },
            None if required == Required::Names => {
                let message =
                    format!("the names of locks are not kept (names_table=off); {WITHOUT}");
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
            None => {}
        }
        Ok(permit.query(LOCKS, Vec::new()).await?.iter().map(ServerLock::new).collect())
    }

    /// Returns the locks of all keys for which `name_of` returns a name. Its second argument is the name in the table of names.
    async fn locks_named(
        &self,
        required: Required,
        name_of: impl Fn(AdvisoryKey, Option<&Name>) -> Option<Name>,
    ) -> Result<Vec<LockInfo>> {
        let seen = self.server_locks(required).await?;
        let stored: HashMap<AdvisoryKey, &Name> =
            seen.iter().filter_map(|lock| Some((lock.key, lock.name.as_ref()?))).collect();
        let own = self.local_claims.all();
        let mut infos: BTreeMap<AdvisoryKey, LockInfo> = BTreeMap::new();
        let mut add = |key: AdvisoryKey, granted: bool, participant: Participant| {
            let Some(name) = name_of(key, stored.get(&key).copied()) else { return };
            let info = infos.entry(key).or_insert_with(|| LockInfo {
                name,
                kind: Kind::Lock,
                holders: Vec::new(),
                waiters: Vec::new(),
            });
            if granted { info.holders.push(participant) } else { info.waiters.push(participant) }
        };
        for seen in &seen {
            let local_claims = own.get(&seen.key).map_or(&[][..], Vec::as_slice);
            add(seen.key, seen.granted, seen.participant(local_claims));
        }
        // The statement of a wait, or its answer, may be in flight.
        for (key, local) in own
            .iter()
            .flat_map(|(key, local_claims)| local_claims.iter().map(move |local| (key, local)))
        {
            let is_seen = seen.iter().any(|seen| seen.key == *key && local.uses(seen.pid));
            if local.is_waiting() && !is_seen {
                add(*key, false, local.participant());
            }
        }
        let mut infos: Vec<LockInfo> = infos.into_values().collect();
        infos.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(infos)
    }

    /// Returns the names of keys that start with `prefix`, from the claims of this process and from the table of names. The
    /// name of any other key is the key itself, if the prefix is empty.
    fn names(&self, prefix: String) -> impl Fn(AdvisoryKey, Option<&Name>) -> Option<Name> + use<> {
        let own = self.local_claims.all();
        let name = move |key| own.get(&key)?.first().map(|local: &LocalClaim| local.name.clone());
        move |key, stored| {
            let name = name(key).or_else(|| stored.cloned());
            let name = if prefix.is_empty() { name.or_else(|| Name::new(key).ok()) } else { name };
            name.filter(|name| name.starts_with(&prefix))
        }
    }

    /// Returns the names of the keys that a semaphore consists of.
    fn parts(semaphore: &str) -> impl Fn(AdvisoryKey, Option<&Name>) -> Option<Name> + use<> {
        let parts: HashMap<AdvisoryKey, Name> =
            Slots::parts(semaphore).map(|name| (AdvisoryKey::of(&name), name)).collect();
        move |key, _| parts.get(&key).cloned()
    }
}

/// What inspection needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Required {
    /// The locks, and their names as far as they are known.
    Locks,
    /// The names of the locks of all processes.
    Names,
}

impl Inspector for RawBackend {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        if let Some(semaphore) = prefix.strip_suffix('\0') {
            return Box::pin(self.0.locks_named(Required::Locks, Store::parts(semaphore)));
        }
        // An empty list would mean that none of them is held.
        let required = if prefix.is_empty() { Required::Locks } else { Required::Names };
        let names = self.0.names(prefix.to_owned());
        Box::pin(self.0.locks_named(required, names))
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move {
            let key = self.0.key_of(&name)?;
            let named = move |seen, _: Option<&Name>| (seen == key).then(|| name.clone());
            self.0.locks_named(Required::Locks, named).await
        })
    }

    /// Terminates the sessions that hold the name. All other locks of these sessions are lost, too.
    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let key = self.0.key_of(name);
        Box::pin(async move {
            let key = key?;
            let seen = self.0.server_locks(Required::Locks).await?;
            let held = seen.iter().filter(|seen| seen.key == key && seen.granted);
            let pids: Vec<i32> = held.map(|seen| seen.pid).collect();
            if pids.is_empty() {
                return Ok(0);
            }
            // Not over a session that is about to be terminated.
            let permit = self.0.sessions.query_permit_without(key).await?;
            let within = i64::try_from(TERMINATE_TIMEOUT.as_millis()).unwrap_or(i64::MAX);
            let (pids, within): (Argument, Argument) = (Box::new(pids), Box::new(within));
            let arguments = vec![(pids, Type::INT4_ARRAY), (within, Type::INT8)];
            let ended = permit.query(TERMINATE, arguments).await?;
            let ended: i64 = ended.first().map_or(0, |row| row.get(0));
            Ok(usize::try_from(ended).unwrap_or_default())
        })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}
