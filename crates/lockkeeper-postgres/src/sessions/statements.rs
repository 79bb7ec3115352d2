//! The statements of a session, from the files in `sql`.

use tokio_postgres::types::{ToSql, Type};

use crate::config::FenceSource;
use crate::names::{AdvisoryKey, Form};

pub(crate) const HANDSHAKE: &str = include_str!("sql/handshake.sql");
pub(crate) const CONFIGURE: &str = include_str!("sql/configure.sql");
pub(crate) const TRY_BATCH_SEQUENCE: &str = include_str!("sql/try_batch_sequence.sql");
pub(crate) const TRY_BATCH_XID: &str = include_str!("sql/try_batch_xid.sql");
pub(crate) const CONFIRM_WAIT: &str = include_str!("sql/confirm_wait.sql");
pub(crate) const FIND_SEQUENCE: &str = include_str!("sql/find_sequence.sql");
pub(crate) const OPEN_SEQUENCE: &str = include_str!("sql/open_sequence.sql");
pub(crate) const FLUSH_SEQUENCE: &str = include_str!("sql/flush_sequence.sql");
pub(crate) const LOCK_TRANSACTION_IDS: &str = include_str!("sql/lock_transaction_ids.sql");
pub(crate) const END_SESSION: &str = include_str!("sql/end_session.sql");

/// Returns the SQL that configures a new session, for a server of this version (`server_version_num`).
pub(crate) fn defaults(version: i32) -> String {
    const ALWAYS: &str = include_str!("sql/defaults.sql");
    const FROM_17_ON: &str = include_str!("sql/defaults_17.sql");
    if version < 170_000 { ALWAYS.to_owned() } else { format!("{ALWAYS};\n{FROM_17_ON}") }
}

/// What a statement does with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Try { fences: FenceSource },
    Wait { fences: FenceSource },
    Unlock,
    Share,
}

/// A statement about a key. Each is prepared once per connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Statement {
    pub(crate) operation: Operation,
    pub(crate) shared: bool,
    /// Whether the key is a pair of numbers.
    is_pair: bool,
}

impl Statement {
    pub(crate) fn new(operation: Operation, shared: bool, key: AdvisoryKey) -> Self {
        Self { operation, shared, is_pair: matches!(key.0, Form::Two(..)) }
    }

    pub(crate) fn text(self) -> String {
        let template = match self.operation {
            Operation::Try { fences } => match fences {
                FenceSource::Off => include_str!("sql/try.sql"),
                FenceSource::TransactionIds => include_str!("sql/try_xid.sql"),
                FenceSource::Sequence => include_str!("sql/try_sequence.sql"),
            },
            Operation::Wait { fences } => match fences {
                FenceSource::Off => include_str!("sql/wait.sql"),
                FenceSource::TransactionIds => include_str!("sql/wait_xid.sql"),
                FenceSource::Sequence => include_str!("sql/wait_sequence.sql"),
            },
            Operation::Unlock => include_str!("sql/unlock.sql"),
            Operation::Share => include_str!("sql/share.sql"),
        };
        let sequence = if self.is_pair { "$3::oid" } else { "$2::oid" };
        // A reader's fence is the last one: that of the last writer of this name, or a higher one. Zero, which is never
        // accepted, instead of the NULL of a sequence that was reset.
        let fence = if self.shared {
            format!("coalesce(pg_sequence_last_value({sequence}), 0)")
        } else {
            format!("nextval({sequence})")
        };
        let [classid, objid, objsubid] = if self.is_pair {
            ["$1::bigint & 4294967295", "$2::bigint & 4294967295", "2"]
        } else {
            ["$1::bigint >> 32 & 4294967295", "$1::bigint & 4294967295", "1"]
        };
        template
            .replace("{shared}", if self.shared { "_shared" } else { "" })
            .replace("{key}", if self.is_pair { "$1::int, $2::int" } else { "$1::bigint" })
            .replace("{fence}", &fence)
            .replace("{classid}", &format!("({classid})::text::oid"))
            .replace("{objid}", &format!("({objid})::text::oid"))
            .replace("{objsubid}", objsubid)
    }

    /// The number of different statements.
    pub(crate) const COUNT: usize = 32;

    /// Returns the index of this statement, below `COUNT`.
    pub(crate) fn index(self) -> usize {
        let operation = match self.operation {
            Operation::Try { fences } => fences as usize,
            Operation::Wait { fences } => 3 + fences as usize,
            Operation::Unlock => 6,
            Operation::Share => 7,
        };
        operation * 4 + usize::from(self.shared) * 2 + usize::from(self.is_pair)
    }

    /// Returns whether the last argument is a sequence.
    pub(crate) fn has_sequence(self) -> bool {
        let (Operation::Try { fences } | Operation::Wait { fences }) = self.operation else {
            return false;
        };
        fences == FenceSource::Sequence
    }

    pub(crate) fn types(self) -> &'static [Type] {
        match (self.is_pair, self.has_sequence()) {
            (false, false) => &[Type::INT8],
            (false, true) => &[Type::INT8, Type::OID],
            (true, false) => &[Type::INT4, Type::INT4],
            (true, true) => &[Type::INT4, Type::INT4, Type::OID],
        }
    }
}

/// A key as the arguments of a statement, perhaps with a sequence: three values, and how many of them are used.
pub(crate) struct Arguments<'a>([&'a (dyn ToSql + Sync); 3], usize);

impl<'a> Arguments<'a> {
    pub(crate) fn of(key: &'a AdvisoryKey) -> Self {
        match &key.0 {
            Form::One(key) => Self([key, key, key], 1),
            Form::Two(first, second) => Self([first, second, second], 2),
        }
    }

    pub(crate) fn with_sequence(mut self, sequence: &'a u32) -> Self {
        self.0[self.1] = sequence;
        self.1 += 1;
        self
    }

    pub(crate) fn get(&self) -> &[&'a (dyn ToSql + Sync)] {
        &self.0[..self.1]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// An older server rejects the unknown setting, and every connection would fail.
    #[test]
    fn transaction_timeout_is_turned_off_from_version_17_on() {
        for version in [140_000, 150_013, 169_999] {
            assert!(!defaults(version).contains("transaction_timeout ="), "{version}");
        }
        for version in [170_000, 170_002, 180_000] {
            let sql = defaults(version);
            let statements: Vec<&str> = sql
                .split(';')
                .filter_map(|part| part.lines().find(|line| line.starts_with("SET")))
                .collect();
            assert_eq!(statements.last(), Some(&"SET transaction_timeout = 0"), "{version}");
            assert_eq!(statements.len(), 7, "{statements:?}");
        }
    }

    #[test]
    fn every_statement_has_its_own_index() {
        let sources = [FenceSource::Off, FenceSource::TransactionIds, FenceSource::Sequence];
        let operations =
            sources.map(|fences| [Operation::Try { fences }, Operation::Wait { fences }]);
        let operations =
            operations.into_iter().flatten().chain([Operation::Unlock, Operation::Share]);
        let keys = [AdvisoryKey::from_i64(1), AdvisoryKey::from_pair(1, 2)];
        let all = operations.flat_map(|operation| {
            keys.iter().flat_map(move |key| {
                [false, true].map(|shared| Statement::new(operation, shared, *key).index())
            })
        });
        let all: HashSet<usize> = all.collect();
        assert_eq!(all.len(), Statement::COUNT);
        assert!(all.iter().all(|index| *index < Statement::COUNT));
    }
}
