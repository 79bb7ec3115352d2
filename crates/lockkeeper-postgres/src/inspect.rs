//! Inspection, from `pg_locks` and from the records of this process about its own claims.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use lockkeeper_core::{
    BoxFuture, Error, ErrorKind, Inspector, Kind, Label, LockInfo, Mode, Name, Participant, Result,
    Slots,
};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::backend::RawBackend;
use crate::claim::Store;
use crate::local_claims::LocalClaim;
use crate::names::{AdvisoryKey, NO_KEY};
use crate::sessions::Argument;

const LOCKS: &str = include_str!("inspect/locks.sql");
const TERMINATE: &str = include_str!("inspect/terminate.sql");

/// How long a terminated session may take to end.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(5);

/// A lock that a session holds or waits for, as the server shows it.
struct ServerLock {
    key: AdvisoryKey,
    pid: i32,
    mode: Mode,
    granted: bool,
    waited: Option<Duration>,
    label: Option<Label>,
}

impl ServerLock {
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
            waited: waited.and_then(|waited| Duration::try_from_secs_f64(waited).ok()),
            label: Label::new(label).ok().filter(|_| !label.is_empty()),
        }
    }

    /// Returns the holder or waiter of this lock. For a claim of this process it has details that the server does not have.
    fn participant(&self, local_claims: &[LocalClaim]) -> Participant {
        let own = local_claims.iter().find(|own| own.uses(self.pid));
        own.map_or_else(
            || Participant {
                owner: None,
                label: self.label.clone(),
                mode: self.mode,
                fence: None,
                age: self.waited,
                remaining: None,
            },
            |own| Participant { mode: self.mode, ..own.participant() },
        )
    }
}

impl Store {
    /// Returns every advisory lock of the database.
    async fn server_locks(&self) -> Result<Vec<ServerLock>> {
        let permit = self.sessions.query_permit_without(NO_KEY).await?;
        Ok(permit.query(LOCKS, Vec::new()).await?.iter().map(ServerLock::new).collect())
    }

    /// Returns the locks of all keys for which `name_of` returns a name.
    async fn locks_named(
        &self,
        name_of: impl Fn(AdvisoryKey) -> Option<Name>,
    ) -> Result<Vec<LockInfo>> {
        let seen = self.server_locks().await?;
        let own = self.local_claims.all();
        let mut infos: BTreeMap<AdvisoryKey, LockInfo> = BTreeMap::new();
        let mut add = |key: AdvisoryKey, granted: bool, participant: Participant| {
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

    /// Returns the names of keys: the original name for keys that this process uses, and the key itself for others.
    fn names(&self) -> impl Fn(AdvisoryKey) -> Option<Name> + use<> {
        let own = self.local_claims.all();
        let name = move |key| own.get(&key)?.first().map(|local: &LocalClaim| local.name.clone());
        move |key| name(key).or_else(|| Name::new(key).ok())
    }

    /// Returns the names of the keys that a semaphore consists of.
    fn parts(semaphore: &str) -> impl Fn(AdvisoryKey) -> Option<Name> + use<> {
        let parts: HashMap<AdvisoryKey, Name> =
            Slots::parts(semaphore).map(|name| (AdvisoryKey::of(&name), name)).collect();
        move |key| parts.get(&key).cloned()
    }
}

impl Inspector for RawBackend {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        if prefix.is_empty() {
            return Box::pin(self.0.locks_named(self.0.names()));
        }
        if let Some(semaphore) = prefix.strip_suffix('\0') {
            return Box::pin(self.0.locks_named(Store::parts(semaphore)));
        }
        Box::pin(std::future::ready(Err(Error::new(
            ErrorKind::Unsupported,
            "PostgreSQL keeps hashes of names and cannot search them by prefix: list all keys without a prefix, or show one name",
        ))))
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move {
            let key = self.0.key_of(&name)?;
            self.0.locks_named(move |seen| (seen == key).then(|| name.clone())).await
        })
    }

    /// Terminates the sessions that hold the name. All other locks of these sessions are lost, too.
    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let key = self.0.key_of(name);
        Box::pin(async move {
            let key = key?;
            let seen = self.0.server_locks().await?;
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
