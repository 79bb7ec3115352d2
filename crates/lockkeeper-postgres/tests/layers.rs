//! Checks that imports point downwards only and form no cycle.

use lockkeeper_testkit::layers::{Layer, check};

const LAYERS: [Layer<'_>; 6] = [
    Layer {
        name: "inspection",
        modules: &["inspect", "diagnose"],
        below: &["backend", "claim", "sessions", "base"],
    },
    Layer { name: "backend", modules: &["backend"], below: &["claim", "sessions", "base"] },
    Layer {
        name: "claim",
        modules: &["claim", "local_claims", "name_table"],
        below: &["sessions", "base"],
    },
    // Locks and fence registers in transactions need no claim.
    Layer {
        name: "transactions",
        modules: &["transaction", "fences"],
        below: &["sessions", "base"],
    },
    Layer { name: "sessions", modules: &["sessions"], below: &["base"] },
    Layer { name: "base", modules: &["config", "error", "names"], below: &[] },
];

#[test]
fn imports_point_downwards_and_form_no_cycle() {
    check(concat!(env!("CARGO_MANIFEST_DIR"), "/src"), &LAYERS);
}
