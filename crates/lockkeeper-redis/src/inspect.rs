//! Inspection: who holds and who waits.

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
use crate::claim::store::Store;
use crate::client::node::Node as _;
use crate::client::reconnecting::ReconnectingClient;
use crate::client::script::{Script, script};
use crate::error::{translate, unexpected};
use crate::names::{Keys, name_of, pattern};

static BREAK: LazyLock<Script> = script!("claim/one.lua" "claim/common.lua" "inspect/break.lua");
static LOOK: LazyLock<Script> = script!("inspect/look.lua");

/// How many keys the server looks at before it answers.
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
                // Keys of other programs may have names that are not valid here.
                let Ok(name) = Name::new(name) else { continue };
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
                // It is broken: after an error the caller would repeat it, and break the next holder. If this fails, the
                // next attempt or release hands over.
                let _ = self.store.hand_over(kind, &name).await;
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
            .arg(pattern(&store.prefix, start))
            .arg("COUNT")
            .arg(SCAN_COUNT);
        let answer = session.send(&scan).await.map_err(translate)?;
        let page = redis::from_redis_value::<(String, Vec<Vec<u8>>)>(answer);
        let (next, keys) = page.map_err(|error| translate(error.into()))?;
        let keys = keys.iter().filter_map(|key| std::str::from_utf8(key).ok());
        names.extend(
            keys.filter_map(|key| name_of(&store.prefix, key))
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
        let keys = Keys::new(&self.prefix, kind, name);
        let replied = self.run(&keys, script, |call| {
            keys.add_all_with_count_to(call);
            call.arg(arguments);
        });
        Ok(replied.await?.1)
    }

    /// Hands over what is free to the next waiter that is alive, behind however many dead ones.
    async fn hand_over(&self, kind: Kind, name: &Name) -> Result<()> {
        let word = if kind == Kind::Lock { "l" } else { "m" };
        // A release by an owner that holds nothing.
        let arguments = [word, &Owner::random().to_string()];
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

/// What the script saw.
struct Snapshot {
    now: u64,
    holder: Option<(String, i64, Option<String>)>,
    sharers: Vec<(String, u64, String)>,
    waiters: Vec<(String, String)>,
}

impl Snapshot {
    fn read(reply: &Value) -> Option<Self> {
        let [now, holder, left, record, sharers, waiters] = reply.as_sequence()? else {
            return None;
        };
        let text = |value: &Value| -> Option<String> {
            // Another kind of client may have written any value.
            let bytes = redis::from_redis_value::<Option<Vec<u8>>>(value.clone()).ok()??;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        };
        let holder = text(holder).map(|holder| {
            let left = if let Value::Int(left) = left { *left } else { -1 };
            (holder, left, text(record))
        });
        let sharers = sharers.as_sequence()?.iter().map(|sharer| {
            let [owner, ends, record] = sharer.as_sequence()? else { return None };
            // A score is printed as a floating-point number if it is large.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time")]
            let ends = text(ends)?.parse::<f64>().ok()? as u64;
            Some((text(owner)?, ends, text(record)?))
        });
        let waiters = waiters.as_sequence()?.iter().map(|waiter| {
            let [owner, record] = waiter.as_sequence()? else { return None };
            Some((text(owner)?, text(record)?))
        });
        Some(Self {
            now: text(now)?.parse().ok()?,
            holder,
            sharers: sharers.collect::<Option<_>>()?,
            waiters: waiters.collect::<Option<_>>()?,
        })
    }

    fn into_info(self, name: &Name, kind: Kind) -> LockInfo {
        let now = self.now;
        let mut holders = Vec::new();
        let shared = kind == Kind::Semaphore
            || self.holder.as_ref().is_some_and(|(holder, ..)| holder == "(readers)");
        if shared {
            let live = self.sharers.iter().filter(|(_, ends, _)| *ends > now);
            holders.extend(live.filter_map(|(owner, ends, record)| {
                let record = Record::read(record)?;
                Some((record.since, record.holder(owner, now, Some(*ends - now))))
            }));
        } else if let Some((owner, left, record)) = &self.holder {
            let left = u64::try_from(*left).ok();
            // The record may be that of an earlier holder, if the key was deleted and taken again.
            let record = record.as_deref().filter(|_| owner.parse::<Owner>().is_ok());
            let record = record.and_then(Record::read);
            holders.push(match record {
                Some(record) => (record.since, record.holder(owner, now, left)),
                // Another kind of client.
                None => (now, foreign(owner, left)),
            });
        }
        holders.sort_by_key(|(since, _)| *since);
        let waiters = self.waiters.iter().filter_map(|(owner, record)| {
            let record = Record::read(record).filter(|record| record.ends > now)?;
            let left = Some(record.ends - now);
            Some(Participant { fence: None, ..record.holder(owner, now, left) })
        });
        LockInfo {
            name: name.clone(),
            kind,
            holders: holders.into_iter().map(|(_, participant)| participant).collect(),
            waiters: waiters.collect(),
        }
    }
}

/// A holder that follows the plain recipe. Its value is shown as its label, if there is anything to show.
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
struct Record<'a> {
    mode: Mode,
    since: u64,
    ends: u64,
    fence: u64,
    label: &'a str,
}

impl<'a> Record<'a> {
    fn read(record: &'a str) -> Option<Self> {
        let mut words = record.splitn(10, ' ');
        let (since, fence, mode) = (words.next()?, words.next()?, words.next()?);
        let (take, of, _ttl) = (words.next()?, words.next()?, words.next()?);
        let (ends, _secret, _channel) = (words.next()?, words.next()?, words.next()?);
        let mode = match mode {
            "x" => Mode::Exclusive,
            "s" => Mode::Shared,
            _ => Mode::Permits { take: take.parse().ok()?, of: of.parse().ok()? },
        };
        Some(Self {
            mode,
            since: since.parse::<u64>().ok()? / 1000,
            ends: ends.parse().ok()?,
            fence: fence.parse().ok()?,
            label: words.next()?,
        })
    }

    fn holder(&self, owner: &str, now: u64, left: Option<u64>) -> Participant {
        Participant {
            owner: owner.parse::<Owner>().ok(),
            label: Label::new(self.label).ok(),
            mode: self.mode,
            fence: Fence::new(self.fence),
            age: Some(Duration::from_millis(now.saturating_sub(self.since))),
            remaining: left.map(Duration::from_millis),
        }
    }
}
