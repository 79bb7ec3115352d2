//! The statements, made from the files in `sql`.

use tokio_postgres::types::{ToSql, Type};

use crate::key::{Form, Key};

pub(crate) const GREET: &str = include_str!("../sql/greet.sql");
pub(crate) const SESSION: &str = include_str!("../sql/session.sql");
pub(crate) const LOCKS: &str = include_str!("../sql/locks.sql");
pub(crate) const DIAGNOSE: &str = include_str!("../sql/diagnose.sql");
pub(crate) const TRY_TOGETHER: &str = include_str!("../sql/try_together.sql");
pub(crate) const CONFIRM: &str = include_str!("../sql/confirm.sql");
pub(crate) const END_SESSION: &str = include_str!("../sql/end_session.sql");
pub(crate) const TERMINATE: &str = include_str!("../sql/terminate.sql");

/// What makes a new session fit for holding locks, on a server of this version (its `server_version_num`).
pub(crate) fn settle(version: i32) -> String {
    const ALWAYS: &str = include_str!("../sql/settle.sql");
    const FROM_17_ON: &str = include_str!("../sql/settle_17.sql");
    if version < 170_000 { ALWAYS.to_owned() } else { format!("{ALWAYS};\n{FROM_17_ON}") }
}

/// What is done to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Try { fenced: bool },
    Wait { fenced: bool },
    Unlock,
    Share,
}

/// A statement about a key: what is prepared once for each connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Statement {
    pub(crate) verb: Verb,
    pub(crate) shared: bool,
    /// Whether the key is two numbers.
    two: bool,
}

impl Statement {
    pub(crate) fn new(verb: Verb, shared: bool, key: Key) -> Self {
        Self { verb, shared, two: matches!(key.0, Form::Two(..)) }
    }

    pub(crate) fn text(self) -> String {
        let template = match self.verb {
            Verb::Try { fenced: false } => include_str!("../sql/try.sql"),
            Verb::Try { fenced: true } => include_str!("../sql/try_fenced.sql"),
            Verb::Wait { fenced: false } => include_str!("../sql/wait.sql"),
            Verb::Wait { fenced: true } => include_str!("../sql/wait_fenced.sql"),
            Verb::Unlock => include_str!("../sql/unlock.sql"),
            Verb::Share => include_str!("../sql/share.sql"),
        };
        let [classid, objid, objsubid] = if self.two {
            ["$1::bigint & 4294967295", "$2::bigint & 4294967295", "2"]
        } else {
            ["$1::bigint >> 32 & 4294967295", "$1::bigint & 4294967295", "1"]
        };
        template
            .replace("{shared}", if self.shared { "_shared" } else { "" })
            .replace("{key}", if self.two { "$1::int, $2::int" } else { "$1::bigint" })
            .replace("{classid}", &format!("({classid})::text::oid"))
            .replace("{objid}", &format!("({objid})::text::oid"))
            .replace("{objsubid}", objsubid)
    }

    /// How many different ones there are.
    pub(crate) const COUNT: usize = 24;

    /// Which of them it is.
    pub(crate) fn index(self) -> usize {
        let verb = match self.verb {
            Verb::Try { fenced } => usize::from(fenced),
            Verb::Wait { fenced } => 2 + usize::from(fenced),
            Verb::Unlock => 4,
            Verb::Share => 5,
        };
        verb * 4 + usize::from(self.shared) * 2 + usize::from(self.two)
    }

    pub(crate) fn types(self) -> &'static [Type] {
        if self.two { &[Type::INT4, Type::INT4] } else { &[Type::INT8] }
    }
}

/// The key, as a statement's arguments.
pub(crate) struct Arguments<'a>([&'a (dyn ToSql + Sync); 2], usize);

impl<'a> Arguments<'a> {
    pub(crate) fn of(key: &'a Key) -> Self {
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

    /// An older server answers an unknown setting with an error, and no connection would be made.
    #[test]
    fn a_timeout_of_transactions_is_turned_off_where_there_is_one() {
        for version in [140_000, 150_013, 169_999] {
            assert!(!settle(version).contains("transaction_timeout ="), "{version}");
        }
        for version in [170_000, 170_002, 180_000] {
            let sql = settle(version);
            let statements: Vec<&str> = sql
                .split(';')
                .filter_map(|part| part.lines().find(|line| line.starts_with("SET")))
                .collect();
            assert_eq!(statements.last(), Some(&"SET transaction_timeout = 0"), "{version}");
            assert_eq!(statements.len(), 6, "{statements:?}");
        }
    }

    #[test]
    fn every_statement_has_a_number_of_its_own() {
        let verbs = [false, true].map(|fenced| [Verb::Try { fenced }, Verb::Wait { fenced }]);
        let verbs = verbs.into_iter().flatten().chain([Verb::Unlock, Verb::Share]);
        let keys = [Key::from_i64(1), Key::from_pair(1, 2)];
        let all = verbs.flat_map(|verb| {
            keys.iter().flat_map(move |key| {
                [false, true].map(|shared| Statement::new(verb, shared, *key).index())
            })
        });
        let all: HashSet<usize> = all.collect();
        assert_eq!(all.len(), Statement::COUNT);
        assert!(all.iter().all(|index| *index < Statement::COUNT));
    }
}
