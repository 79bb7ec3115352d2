//! The scripts that run on the server. Each is a step of a lock, on the server's time, and may be run
//! twice.

use std::sync::LazyLock;

/// A script, and what the server calls it.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) code: &'static str,
    pub(crate) hash: String,
}

macro_rules! script {
    ($($file:literal)+) => {
        LazyLock::new(|| {
            let code = concat!($(include_str!(concat!("scripts/", $file, ".lua")), "\n",)+);
            Script { code, hash: redis::Script::new(code).get_hash().to_owned() }
        })
    };
}

pub(crate) static STEPS: LazyLock<Script> = script!("steps_at_once" "common" "steps");
pub(crate) static RENEW: LazyLock<Script> = script!("renew");
pub(crate) static DOWNGRADE: LazyLock<Script> = script!("one" "common" "downgrade");
pub(crate) static BREAK: LazyLock<Script> = script!("one" "common" "break");
pub(crate) static LOOK: LazyLock<Script> = script!("look");
/// Only few need it, and its first run brings it along.
pub(crate) static FENCE: LazyLock<Script> = script!("fence");

/// Those that a new connection makes sure of.
pub(crate) fn all() -> [&'static Script; 5] {
    [&STEPS, &RENEW, &DOWNGRADE, &BREAK, &LOOK]
}
