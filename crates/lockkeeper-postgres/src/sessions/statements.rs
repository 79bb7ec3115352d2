//! The statements of a session, from the files in `sql`.

use tokio_postgres::types::{ToSql, Type};

use crate::names::{AdvisoryKey, Form};

pub(crate) const HANDSHAKE: &str = include_str!("sql/handshake.sql");
pub(crate) const CONFIGURE: &str = include_str!("sql/configure.sql");
pub(crate) const TRY_BATCH: &str = include_str!("sql/try_batch.sql");
pub(crate) const CONFIRM_WAIT: &str = include_str!("sql/confirm_wait.sql");
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
    Try { fenced: bool },
    Wait { fenced: bool },
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
            Operation::Try { fenced: false } => include_str!("sql/try.sql"),
            Operation::Try { fenced: true } => include_str!("sql/try_fenced.sql"),
            Operation::Wait { fenced: false } => include_str!("sql/wait.sql"),
            Operation::Wait { fenced: true } => include_str!("sql/wait_fenced.sql"),
            Operation::Unlock => include_str!("sql/unlock.sql"),
            Operation::Share => include_str!("sql/share.sql"),
        };
        let [classid, objid, objsubid] = if self.is_pair {
            ["$1::bigint & 4294967295", "$2::bigint & 4294967295", "2"]
        } else {
            ["$1::bigint >> 32 & 4294967295", "$1::bigint & 4294967295", "1"]
        };
        template
            .replace("{shared}", if self.shared { "_shared" } else { "" })
            .replace("{key}", if self.is_pair { "$1::int, $2::int" } else { "$1::bigint" })
            .replace("{classid}", &format!("({classid})::text::oid"))
            .replace("{objid}", &format!("({objid})::text::oid"))
            .replace("{objsubid}", objsubid)
    }

    /// The number of different statements.
    pub(crate) const COUNT: usize = 24;

    /// Returns the index of this statement, below `COUNT`.
    pub(crate) fn index(self) -> usize {
        let operation = match self.operation {
            Operation::Try { fenced } => usize::from(fenced),
            Operation::Wait { fenced } => 2 + usize::from(fenced),
            Operation::Unlock => 4,
            Operation::Share => 5,
        };
        operation * 4 + usize::from(self.shared) * 2 + usize::from(self.is_pair)
    }

    pub(crate) fn types(self) -> &'static [Type] {
        if self.is_pair { &[Type::INT4, Type::INT4] } else { &[Type::INT8] }
    }
}

/// A key as the arguments of a statement: two values, and how many of them are used.
pub(crate) struct Arguments<'a>([&'a (dyn ToSql + Sync); 2], usize);

impl<'a> Arguments<'a> {
    pub(crate) fn of(key: &'a AdvisoryKey) -> Self {
        match &key.0 {
            Form::One(key) => Self([key, key], 1),
            Form::Two(first, second) => Self([first, second], 2),
        }
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
            assert_eq!(statements.len(), 6, "{statements:?}");
        }
    }

    #[test]
    fn every_statement_has_its_own_index() {
        let operations =
            [false, true].map(|fenced| [Operation::Try { fenced }, Operation::Wait { fenced }]);
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
