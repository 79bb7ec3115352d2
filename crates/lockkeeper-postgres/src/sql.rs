//! The statements, made from the files in `sql`.

use tokio_postgres::types::{ToSql, Type};

use crate::key::{Form, Key};

pub(crate) const GREET: &str = include_str!("../sql/greet.sql");
pub(crate) const SETTLE: &str = include_str!("../sql/settle.sql");
pub(crate) const SESSION: &str = include_str!("../sql/session.sql");
pub(crate) const LOCKS: &str = include_str!("../sql/locks.sql");
pub(crate) const EXAMINE: &str = include_str!("../sql/examine.sql");
pub(crate) const TERMINATE: &str = include_str!("../sql/terminate.sql");

/// What is done to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Verb {
    Try { fenced: bool },
    Wait { fenced: bool },
    Unlock,
    Share,
}

/// A statement about a key: what is prepared once for each connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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

    pub(crate) fn types(self) -> &'static [Type] {
        if self.two { &[Type::INT4, Type::INT4] } else { &[Type::INT8] }
    }
}

/// The key, as a statement's arguments.
pub(crate) fn arguments(key: &Key) -> Vec<&(dyn ToSql + Sync)> {
    match &key.0 {
        Form::One(key) => vec![key],
        Form::Two(first, second) => vec![first, second],
    }
}
