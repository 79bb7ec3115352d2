//! Lua scripts.

use redis::{RedisError, ServerErrorKind};

/// A script and its SHA-1, for `EVALSHA`.
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

/// Returns whether the server no longer has a script, because it restarted or its scripts were flushed.
pub(crate) fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ServerErrorKind::NoScript.into()
}

/// Creates a static [`Script`] by concatenating Lua files. The paths are relative to the file that uses the macro.
macro_rules! script {
    ($($file:literal)+) => {
        std::sync::LazyLock::new(|| {
            $crate::client::script::Script::new(concat!($(include_str!($file), "\n",)+))
        })
    };
}

pub(crate) use script;
