//! Imports point downwards only, without cycles.

use lockkeeper_testkit::layers::{Layer, check};

const LAYERS: [Layer<'_>; 7] = [
    Layer {
        name: "fuzzing",
        modules: &["fuzzing"],
        below: &["inspection", "claim", "client", "base"],
    },
    Layer {
        name: "inspection",
        modules: &["inspect", "diagnose"],
        below: &["backend", "claim", "config", "client", "base"],
    },
    Layer { name: "backend", modules: &["backend"], below: &["claim", "config", "client", "base"] },
    Layer { name: "claim", modules: &["claim"], below: &["client", "base"] },
    Layer { name: "config", modules: &["config"], below: &["client", "base"] },
    // The transport, without lock logic.
    Layer { name: "client", modules: &["client"], below: &["base"] },
    Layer { name: "base", modules: &["error", "names"], below: &[] },
];

#[test]
fn imports_point_downwards_and_form_no_cycle() {
    check(concat!(env!("CARGO_MANIFEST_DIR"), "/src"), &LAYERS);
}
