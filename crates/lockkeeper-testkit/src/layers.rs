//! Checks that the modules of a crate import downwards only, by reading their source.
//!
//! A crate lists its layers, from top to bottom, with the layers that each may import. The check reads paths from `use`
//! statements and from code (`crate::`, `super::` and `self::`). Comments and unit tests are ignored. `crate::Name` means
//! the module from which the crate root re-exports `Name`.
//!
//! # Examples
//!
//! ```no_run
//! use lockkeeper_testkit::layers::{Layer, check};
//!
//! let layers = [
//!     Layer { name: "store", modules: &["backend", "claim"], below: &["client", "base"] },
//!     Layer { name: "client", modules: &["client"], below: &["base"] },
//!     Layer { name: "base", modules: &["error", "names"], below: &[] },
//! ];
//! check(concat!(env!("CARGO_MANIFEST_DIR"), "/src"), &layers);
//! ```

#![allow(clippy::missing_panics_doc, reason = "a check is for tests: it panics")]

mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use source::{Crate, Import};

/// A layer: some modules of a crate.
#[derive(Debug, Clone, Copy)]
pub struct Layer<'a> {
    /// The name of the layer in messages and in `below`.
    pub name: &'a str,
    /// Modules of the crate root. Their submodules belong to the same layer.
    pub modules: &'a [&'a str],
    /// The names of the layers that it may import, in addition to itself. Not transitive.
    pub below: &'a [&'a str],
}

/// Asserts that each module belongs to a layer and imports only what its layer may, and that there are no import cycles.
///
/// A cycle is one between files. A file and its submodules count as one, unless the file only declares modules.
///
/// # Panics
///
/// If an import violates this. The message shows the offending lines.
pub fn check(src: impl AsRef<Path>, layers: &[Layer<'_>]) {
    let root = Crate::read(src.as_ref());
    let mut faults = directions(&root, layers);
    if let Some(cycle) = cycle(&root) {
        faults.push(cycle);
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn layer_of<'a>(layers: &'a [Layer<'a>], module: &str) -> Option<&'a Layer<'a>> {
    let top = module.split("::").next().unwrap_or(module);
    layers.iter().find(|layer| layer.modules.contains(&top))
}

fn directions(root: &Crate, layers: &[Layer<'_>]) -> Vec<String> {
    let mut faults = Vec::new();
    for module in root.modules.values().filter(|module| !module.path.is_empty()) {
        let Some(layer) = layer_of(layers, &module.path) else {
            faults.push(format!("{}: the module is in no layer", module.file));
            continue;
        };
        for import in &module.imports {
            let Some(to) = layer_of(layers, &import.to) else { continue };
            if to.name != layer.name && !layer.below.contains(&to.name) {
                faults.push(format!("{import}: {} imports {}", layer.name, to.name));
            }
        }
    }
    faults
}

/// Finds an import cycle and describes it.
fn cycle(root: &Crate) -> Option<String> {
    let mut edges: BTreeMap<&str, BTreeMap<&str, &Import>> = BTreeMap::new();
    for module in root.modules.values().filter(|module| !module.path.is_empty()) {
        let from = root.node(&module.path);
        for import in &module.imports {
            let to = root.node(&import.to);
            if from != to && !to.is_empty() {
                edges.entry(from).or_default().entry(to).or_insert(import);
            }
        }
    }
    let mut done = BTreeSet::new();
    let found = edges.keys().find_map(|start| visit(start, &edges, &mut Vec::new(), &mut done))?;
    let mut text = String::from("modules import each other:");
    for import in found {
        let _ = write!(text, "\n  {import}");
    }
    Some(text)
}

fn visit<'a>(
    node: &'a str,
    edges: &BTreeMap<&'a str, BTreeMap<&'a str, &'a Import>>,
    path: &mut Vec<(&'a str, &'a Import)>,
    done: &mut BTreeSet<&'a str>,
) -> Option<Vec<&'a Import>> {
    if let Some(start) = path.iter().position(|(visited, _)| *visited == node) {
        return Some(path[start..].iter().map(|(_, import)| *import).collect());
    }
    if !done.contains(node) {
        for (to, import) in edges.get(node).into_iter().flatten() {
            path.push((node, import));
            if let Some(cycle) = visit(to, edges, path, done) {
                return Some(cycle);
            }
            path.pop();
        }
        done.insert(node);
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LAYERS: [Layer<'_>; 2] = [
        Layer { name: "top", modules: &["top"], below: &["base"] },
        Layer { name: "base", modules: &["base", "other"], below: &[] },
    ];

    /// Returns the message of the check for a crate of these files; empty if it passes.
    fn faults(files: &[(&str, &str)]) -> String {
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let src = dir.path().to_owned();
        let checked = std::panic::catch_unwind(move || check(src, &LAYERS));
        checked.map_or_else(|panic| *panic.downcast::<String>().unwrap(), |()| String::new())
    }

    #[test]
    fn downward_imports_and_any_import_of_a_unit_test_pass() {
        let message = faults(&[
            ("lib.rs", "mod base;\nmod top;\npub use top::Top;\n"),
            (
                "top.rs",
                "mod part;\nuse crate::base::Base;\nuse self::part::Part;\npub struct Top;\n",
            ),
            (
                "top/part.rs",
                "use super::Top;\n/// See [`Base`](crate::nothing::Base).\npub struct Part;\n",
            ),
            (
                "base.rs",
                "pub struct Base;\n#[cfg(test)]\nmod tests {\n    use crate::top::Top;\n}\n",
            ),
        ]);
        assert_eq!(message, "");
    }

    #[test]
    fn an_upward_import_fails_with_its_line() {
        for line in [
            "use crate::top::Top;",
            "use crate::{top::Top};",
            "use crate::Top;",
            "use super::top;",
            "fn f() { crate::top::f() }",
            "mod inner {\n    use super::super::top::Top;\n}",
        ] {
            let base = format!("// A comment.\n{line}\npub struct Base;\n");
            let files = [("lib.rs", "pub use top::Top;\n"), ("top.rs", "pub struct Top;\n")];
            let message = faults(&[files[0], files[1], ("base.rs", &base)]);
            assert!(
                message.contains("base.rs:") && message.contains("base imports top"),
                "{line}: {message}"
            );
        }
    }

    #[test]
    fn a_cycle_fails_with_its_lines() {
        let message = faults(&[
            ("lib.rs", "mod base;\nmod other;\n"),
            ("base.rs", "use std::fmt;\n\nuse crate::other::Other;\npub struct Base;\n"),
            ("other.rs", "pub struct Other;\nfn f(_: crate::base::Base) {}\n"),
        ]);
        assert!(message.contains("base.rs:3: use crate::other::Other"), "{message}");
        assert!(message.contains("other.rs:2: crate::base::Base"), "{message}");
    }

    #[test]
    fn a_module_without_a_layer_fails() {
        assert!(
            faults(&[("lib.rs", ""), ("new.rs", "")]).contains("new.rs: the module is in no layer")
        );
    }
}
