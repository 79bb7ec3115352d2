//! Imports point downwards only, and no modules import each other.

use lockkeeper_testkit::layers::{Layer, check};

const LAYERS: [Layer<'_>; 7] = [
    Layer {
        name: "recipes",
        modules: &["recipes"],
        below: &["locks", "engine", "stores", "support", "contract", "base"],
    },
    Layer { name: "locks", modules: &["locks"], below: &["engine", "support", "contract", "base"] },
    // Engine and stores do not import each other.
    Layer { name: "engine", modules: &["engine"], below: &["support", "contract", "base"] },
    Layer { name: "stores", modules: &["stores"], below: &["support", "contract", "base"] },
    // Helpers of engine and stores that need the contract.
    Layer { name: "support", modules: &["futures", "release"], below: &["contract", "base"] },
    Layer { name: "contract", modules: &["contract"], below: &["base"] },
    Layer {
        name: "base",
        modules: &[
            "background",
            "backoff",
            "blocking_runtime",
            "clock",
            "coalescer",
            "diagnose",
            "error",
            "fence",
            "loss",
            "name",
            "options",
            "owner",
            "text",
        ],
        below: &[],
    },
];

#[test]
fn imports_point_downwards_and_form_no_cycle() {
    check(concat!(env!("CARGO_MANIFEST_DIR"), "/src"), &LAYERS);
}
