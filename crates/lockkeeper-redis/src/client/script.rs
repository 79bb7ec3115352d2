//! Lua scripts.

use redis::{RedisError, ServerErrorKind};

/// A script, and the hash by which the server knows it.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) code: &'static str,
    pub(crate) hash: String,
}

impl Script {
    pub(crate) fn new(code: &'static str) -> Self {
        Self { code, hash: redis::Script::new(code).get_hash().to_owned() }
    }
}

/// Whether the server does not know a script: it restarted, or its scripts were flushed.
pub(crate) fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ServerErrorKind::NoScript.into()
}

/// Makes a static [`Script`] of Lua files, one after the other. The paths are relative to the file that uses it.
macro_rules! script {
    ($($file:literal)+) => {
        std::sync::LazyLock::new(|| {
            $crate::client::script::Script::new(concat!($(include_str!($file), "\n",)+))
        })
    };
}

pub(crate) use script;
