//! Imports point downwards only, and no modules import each other.

use lockkeeper_testkit::layers::{Layer, check};

const LAYERS: [Layer<'_>; 7] = [
    Layer { name: "diagnose", modules: &["diagnose"], below: &["backend", "config", "files"] },
    Layer {
        name: "backend",
        modules: &["backend"],
        below: &["locks", "config", "files", "notify", "base"],
    },
    // Both work on the store that `backend` wraps, and neither imports the other.
    Layer { name: "locks", modules: &["claim", "inspect"], below: &["files", "notify", "base"] },
    Layer { name: "config", modules: &["config"], below: &["base"] },
    Layer {
        name: "files",
        modules: &["store", "turnstile", "dir", "record", "lock_file"],
        below: &["notify", "base"],
    },
    // The inotify client, which is independent of locks.
    Layer { name: "notify", modules: &["notify"], below: &[] },
    Layer { name: "base", modules: &["error", "names"], below: &[] },
];

#[test]
fn imports_point_downwards_and_form_no_cycle() {
    check(concat!(env!("CARGO_MANIFEST_DIR"), "/src"), &LAYERS);
}
