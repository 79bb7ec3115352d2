//! Inspection of holders and waiters, and breaking of locks.

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use lockkeeper_core::{
    BoxFuture, ErrorKind, Fence, Inspector, Kind, Label, LockInfo, Mode, Name, Owner, Participant,
    Result,
};
use redis::Value;

use crate::backend::Redis;
use crate::claim::Again;
use crate::claim::commands::COMMANDS;
use crate::claim::record::READERS;
use crate::claim::store::Store;
use crate::client::node::Node as _;
use crate::client::reconnecting::ReconnectingClient;
use crate::client::script::{Script, script};
use crate::error::{translate, unexpected};
use crate::names::Keys;

static BREAK: LazyLock<Script> = script!("claim/one.lua" "claim/common.lua" "inspect/break.lua");
static LOOK: LazyLock<Script> = script!("inspect/look.lua");

/// The number of keys that the server examines for each `SCAN` reply.
const SCAN_COUNT: usize = 1000;

impl Inspector for Redis {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let prefix = prefix.to_owned();
        Box::pin(async move {
            let mut names = BTreeSet::new();
            for node in self.store.topology.nodes().await? {
                scan(&self.store, node.client(), &prefix, &mut names).await?;
            }
            let mut infos = Vec::new();
            for name in names {
                // A key of another program may decode to an empty name. `derived`, because wrappers such as `Slots` use names
                // that a user cannot.
                if name.is_empty() {
                    continue;
                }
                let name = Name::derived(name);
                match self.store.show(&name).await {
                    Ok(info) => infos.extend(info),
                    // Keys of a wrong type belong to other programs, too.
                    Err(error) if error.kind() == ErrorKind::Config => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(infos)
        })
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move { self.store.show(&name).await })
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let name = name.clone();
        Box::pin(async move {
            let mut broken = 0;
            for kind in [Kind::Lock, Kind::Semaphore] {
                let word = if kind == Kind::Lock { "lock" } else { "semaphore" };
                let notifies_unqueued = if self.store.notifies_unqueued() { "1" } else { "0" };
                let arguments = [word, notifies_unqueued];
                match self.store.run_on(kind, &name, &BREAK, &arguments).await? {
                    Value::Int(count) => broken += usize::try_from(count).unwrap_or(0),
                    answer => return Err(unexpected(&answer)),
                }
                // An error is ignored: the lock is broken, and a caller that retried would break the lock of the next holder.
                // The next attempt or release of any claim then hands the lock off.
                let _ = self.store.hand_off(kind, &name).await;
            }
            Ok(broken)
        })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        // Publishing every change would cost each lock a message that is rarely received.
        Box::pin(std::future::pending())
    }
}

/// Finds the names that start with `start` on one server.
async fn scan(
    store: &Store,
    client: &Arc<ReconnectingClient>,
    start: &str,
    names: &mut BTreeSet<String>,
) -> Result<()> {
    let mut cursor = "0".to_owned();
    loop {
        let session = client.session().await?;
        let mut scan = redis::cmd("SCAN");
        scan.arg(&cursor)
            .arg("MATCH")
            .arg(store.template.pattern(start))
            .arg("COUNT")
            .arg(SCAN_COUNT);
        let answer = session.send(&scan).await.map_err(translate)?;
        let page = redis::from_redis_value::<(String, Vec<Vec<u8>>)>(answer);
        let (next, keys) = page.map_err(|error| translate(error.into()))?;
        let keys = keys.iter().filter_map(|key| std::str::from_utf8(key).ok());
        names.extend(
            keys.filter_map(|key| store.template.name_of(key))
                .filter(|name| name.starts_with(start)),
        );
        cursor = next;
        if cursor == "0" {
            return Ok(());
        }
    }
}

impl Store {
    async fn run_on(
        &self,
        kind: Kind,
        name: &Name,
        script: &Script,
        arguments: &[&str],
    ) -> Result<Value> {
        let keys = Keys::new(&self.template, kind, name)?;
        let replied = self.run(&keys, script, |call| {
            call.number(Keys::ALL.len());
            keys.each(&Keys::ALL, |key| {
                call.joined(&key);
            });
            for argument in arguments {
                call.word(argument);
            }
        });
        Ok(replied.await?.1)
    }

    /// Hands a free lock off to the first live waiter, and removes the dead ones ahead of it.
    async fn hand_off(&self, kind: Kind, name: &Name) -> Result<()> {
        let word = if kind == Kind::Lock { "l" } else { "m" };
        // A release by an owner that holds nothing.
        let arguments = [word, &Owner::random().to_string(), "0", "0"];
        loop {
            let reply = self.run_on(kind, name, &COMMANDS, &arguments).await?;
            let reply = reply.as_sequence().and_then(<[Value]>::first).unwrap_or(&reply);
            if Again::read(reply).is_none() {
                return Ok(());
            }
        }
    }

    async fn show(&self, name: &Name) -> Result<Vec<LockInfo>> {
        let mut infos = Vec::new();
        for kind in [Kind::Lock, Kind::Semaphore] {
            let reply = self.run_on(kind, name, &LOOK, &[]).await?;
            let info = Snapshot::read(&reply).ok_or_else(|| unexpected(&reply))?;
            let info = info.into_info(name, kind);
            if !info.holders.is_empty() || !info.waiters.is_empty() {
                infos.push(info);
            }
        }
        Ok(infos)
    }
}

/// The state of a lock, as `look.lua` returns it.
pub(crate) struct Snapshot {
    now: u64,
    holder: Option<(String, i64)>,
    /// Each with the end of its lease.
    sharers: Vec<(u64, String)>,
    waiters: Vec<String>,
}

impl Snapshot {
    pub(crate) fn read(reply: &Value) -> Option<Self> {
        let [now, holder, left, sharers, waiters] = reply.as_sequence()? else { return None };
        let text = |value: &Value| -> Option<String> {
            // A client that follows the plain recipe may have written any value.
            let bytes = redis::from_redis_value::<Option<Vec<u8>>>(value.clone()).ok()??;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        };
        let holder = text(holder).map(|holder| {
            let left = if let Value::Int(left) = left { *left } else { -1 };
            (holder, left)
        });
        let sharers = sharers.as_sequence()?.iter().map(|sharer| {
            let [ends, record] = sharer.as_sequence()? else { return None };
            // A score is printed as a floating-point number if it is large.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time")]
            let ends = text(ends)?.parse::<f64>().ok()? as u64;
            Some((ends, text(record)?))
        });
        Some(Self {
            now: text(now)?.parse().ok()?,
            holder,
            sharers: sharers.collect::<Option<_>>()?,
            waiters: waiters.as_sequence()?.iter().map(text).collect::<Option<_>>()?,
        })
    }

    pub(crate) fn into_info(self, name: &Name, kind: Kind) -> LockInfo {
        let now = self.now;
        let mut holders = Vec::new();
        let shared = kind == Kind::Semaphore
            || self.holder.as_ref().is_some_and(|(holder, ..)| holder == READERS);
        if shared {
            let live = self.sharers.iter().filter(|(ends, _)| *ends > now);
            holders.extend(live.filter_map(|(ends, record)| {
                let record = Record::read(record)?;
                Some((record.since, record.participant(now, Some(*ends - now))))
            }));
        } else if let Some((value, left)) = &self.holder {
            let left = u64::try_from(*left).ok();
            holders.push(match Record::read(value) {
                Some(record) => (record.since, record.participant(now, left)),
                // A client that follows the plain recipe.
                None => (now, foreign(value, left)),
            });
        }
        holders.sort_by_key(|(since, _)| *since);
        let waiters = self.waiters.iter().filter_map(|record| {
            let record = Record::read(record).filter(|record| record.ends > now)?;
            let left = Some(record.ends - now);
            Some(Participant { fence: None, ..record.participant(now, left) })
        });
        LockInfo {
            name: name.clone(),
            kind,
            holders: holders.into_iter().map(|(_, participant)| participant).collect(),
            waiters: waiters.collect(),
        }
    }
}

/// Returns a holder that follows the plain recipe. Its label is the value, without control characters, unless it is empty.
fn foreign(value: &str, left: Option<u64>) -> Participant {
    let label: String = value.chars().filter(|c| !c.is_control()).take(64).collect();
    Participant {
        owner: None,
        label: Label::new(label).ok().filter(|label| !label.as_str().is_empty()),
        mode: Mode::Exclusive,
        fence: None,
        age: None,
        remaining: left.map(Duration::from_millis),
    }
}

/// The record of a holder or waiter: see common.lua.
pub(crate) struct Record<'a> {
    owner: Owner,
    mode: Mode,
    since: u64,
    /// Zero if it is not known: the lock was taken without a script and has not been renewed yet.
    fence: u64,
    ends: u64,
    label: &'a str,
}

impl<'a> Record<'a> {
    pub(crate) fn read(record: &'a str) -> Option<Self> {
        let mut words = record.splitn(11, ' ');
        let owner = words.next()?.parse().ok()?;
        let (mode, take, of) = (words.next()?, words.next()?, words.next()?);
        let (_ttl, since, fence) = (words.next()?, words.next()?, words.next()?);
        let (ends, _secret, _channel) = (words.next()?, words.next()?, words.next()?);
        let mode = match mode {
            "x" => Mode::Exclusive,
            "s" => Mode::Shared,
            _ => Mode::Permits { take: take.parse().ok()?, of: of.parse().ok()? },
        };
        Some(Self {
            owner,
            mode,
            since: since.parse::<u64>().ok()? / 1000,
            fence: fence.parse().ok()?,
            ends: ends.parse().ok()?,
            label: words.next()?,
        })
    }

    pub(crate) fn participant(&self, now: u64, left: Option<u64>) -> Participant {
        Participant {
            owner: Some(self.owner),
            label: Label::new(self.label).ok(),
            mode: self.mode,
            fence: Fence::new(self.fence),
            age: Some(Duration::from_millis(now.saturating_sub(self.since))),
            remaining: left.map(Duration::from_millis),
        }
    }
}
