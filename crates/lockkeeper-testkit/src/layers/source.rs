//! Reads the modules of a crate and their imports. Relies on the layout that rustfmt produces.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fmt, fs};

/// The modules of a crate, by path, as in `engine::hold`. The path of the root is empty.
pub(super) struct Crate {
    pub(super) modules: BTreeMap<String, Module>,
}

pub(super) struct Module {
    pub(super) path: String,
    pub(super) file: String,
    pub(super) imports: Vec<Import>,
    /// Whether it has items other than `mod` and `use`.
    has_items: bool,
}

/// A path to another module.
pub(super) struct Import {
    file: String,
    line: usize,
    text: String,
    pub(super) to: String,
}

impl fmt::Display for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.text)
    }
}

/// A path in the source, resolved to segments from the crate root.
struct Mention {
    line: usize,
    text: String,
    segments: Vec<String>,
}

impl Crate {
    pub(super) fn read(src: &Path) -> Self {
        let mut files = Vec::new();
        collect(src, src, &mut files);
        let mut reexports = BTreeMap::new();
        let mut parsed = Vec::new();
        for (path, file, text) in files {
            let lines = code(&text);
            if path.is_empty() {
                reexports = root_names(&lines);
            }
            let has_items = has_items(&lines);
            parsed.push((mentions(&path, &lines), path, file, has_items));
        }
        let known: Vec<String> = parsed.iter().map(|(_, path, ..)| path.clone()).collect();
        let modules = parsed.into_iter().map(|(mentions, path, file, has_items)| {
            let imports = mentions.into_iter().map(|Mention { line, text, segments }| {
                let to = resolve(&segments, &known, &reexports);
                Import { file: file.clone(), line, text, to }
            });
            let imports = imports.filter(|import| import.to != path).collect();
            (path.clone(), Module { path, file, imports, has_items })
        });
        Self { modules: modules.collect() }
    }

    /// Returns the node of a module in the graph of imports: its highest ancestor that does more than declare modules, or
    /// itself.
    pub(super) fn node<'a>(&'a self, path: &'a str) -> &'a str {
        let ends = path.match_indices("::").map(|(end, _)| end).chain([path.len()]);
        let mut ancestors = ends.map(|end| &path[..end]);
        let found = ancestors.find(|path| self.modules.get(*path).is_some_and(|it| it.has_items));
        found.unwrap_or(path)
    }
}

/// Collects the files of a directory: module path, name and text. Skips `tests.rs` files.
fn collect(src: &Path, dir: &Path, files: &mut Vec<(String, String, String)>) {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("a directory entry").path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            collect(src, &path, files);
        } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("tests.rs") {
            let relative = path.strip_prefix(src).expect("a file below the source");
            let module = relative.with_extension("").to_string_lossy().replace(['/', '\\'], "::");
            let module = module.strip_suffix("::mod").unwrap_or(&module);
            let module = if matches!(module, "lib" | "main") { "" } else { module };
            let text = fs::read_to_string(&path).expect("a readable file");
            files.push((module.to_owned(), relative.display().to_string(), text));
        }
    }
}

/// Returns the lines of code, with their depth of inline modules. Skips comments and unit tests.
fn code(text: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    // The indentation of the open inline modules.
    let mut inline: Vec<usize> = Vec::new();
    let mut skipped: Option<usize> = None;
    let mut is_test = false;
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let (trimmed, indent) = (code.trim(), line.len() - line.trim_start().len());
        let closes = trimmed == "}";
        if let Some(start) = skipped {
            skipped = if closes && indent == start { None } else { Some(start) };
            continue;
        }
        if closes && inline.last() == Some(&indent) {
            inline.pop();
        }
        if trimmed.starts_with("#[cfg(test)]") || trimmed.starts_with("#[cfg(all(test") {
            is_test = true;
            continue;
        }
        if trimmed.is_empty() || trimmed.starts_with("#[") {
            continue;
        }
        let opens = trimmed.ends_with('{');
        if std::mem::take(&mut is_test) {
            skipped = opens.then_some(indent);
            continue;
        }
        let is_module = trimmed.split(' ').any(|word| word == "mod");
        lines.push(Line { number: number + 1, text: trimmed.to_owned(), depth: inline.len() });
        if is_module && opens {
            inline.push(indent);
        }
    }
    lines
}

struct Line {
    number: usize,
    text: String,
    /// The number of inline modules around it.
    depth: usize,
}

/// Joins `use` statements that span several lines. Returns line number, depth and text.
fn statements(lines: &[Line]) -> Vec<(usize, usize, String)> {
    let mut statements: Vec<(usize, usize, String)> = Vec::new();
    let mut open = false;
    for line in lines {
        match statements.last_mut() {
            Some((_, _, text)) if open => *text += &line.text,
            _ => statements.push((line.number, line.depth, line.text.clone())),
        }
        let text = &statements.last().expect("just pushed").2;
        open = use_path(text).is_some() && !text.ends_with(';');
    }
    statements
}

/// Returns the path of a `use` statement.
fn use_path(text: &str) -> Option<&str> {
    let text = text.strip_prefix("pub ").unwrap_or(text);
    let text = match text.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ").map_or(text, |(_, rest)| rest),
        None => text,
    };
    text.strip_prefix("use ").map(|path| path.trim_end_matches(';'))
}

/// Expands `a::{b, c::d}` to `a::b` and `a::c::d`.
fn expand(path: &str) -> Vec<String> {
    let path = path.trim();
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let inside = rest.strip_suffix('}').unwrap_or(rest);
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in inside.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().expect("never empty").push(c);
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| expand(part)).map(|part| format!("{before}{part}")).collect()
}

fn has_items(lines: &[Line]) -> bool {
    statements(lines).iter().any(|(_, _, text)| {
        let is_module = text.ends_with(';') && text.split(' ').any(|word| word == "mod");
        use_path(text).is_none() && !is_module
    })
}

fn mentions(module: &str, lines: &[Line]) -> Vec<Mention> {
    let mut mentions = Vec::new();
    for (line, depth, text) in statements(lines) {
        let paths = match use_path(&text) {
            Some(path) => expand(path),
            None => in_code(&text),
        };
        for path in paths {
            if let Some(segments) = absolute(module, depth, &path) {
                let is_use = use_path(&text).is_some();
                let text = if is_use { format!("use {path}") } else { path };
                mentions.push(Mention { line, text, segments });
            }
        }
    }
    mentions
}

/// Returns the paths in a line of code that start in this crate.
fn in_code(text: &str) -> Vec<String> {
    let is_path = |c: char| c.is_alphanumeric() || matches!(c, '_' | ':');
    let words = text.split(|c| !is_path(c));
    let starts = ["crate::", "super::", "self::"];
    let paths = words.filter(|word| starts.iter().any(|start| word.starts_with(start)));
    paths.map(ToOwned::to_owned).collect()
}

/// Returns the segments of a path from the crate root; `None` if it is in another crate or an inline module.
fn absolute(module: &str, depth: usize, path: &str) -> Option<Vec<String>> {
    let path = path.split(" as ").next().unwrap_or(path);
    let mut segments: Vec<&str> = path.split("::").map(str::trim).collect();
    let mut from: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
    match segments[0] {
        "crate" => from.clear(),
        "super" | "self" => {
            // The first `super`s leave inline modules.
            let mut inside = depth;
            while let Some(&("super" | "self")) = segments.first() {
                if segments.remove(0) == "super" {
                    match inside.checked_sub(1) {
                        Some(left) => inside = left,
                        None => from.truncate(from.len().saturating_sub(1)),
                    }
                }
            }
            if inside > 0 {
                return None;
            }
            segments.insert(0, "");
        }
        _ => return None,
    }
    segments.remove(0);
    Some(from.into_iter().chain(segments).map(ToOwned::to_owned).collect())
}

/// Returns the names that the crate root re-exports, with their paths.
fn root_names(lines: &[Line]) -> BTreeMap<String, Vec<String>> {
    let mut names = BTreeMap::new();
    for (_, _, text) in statements(lines) {
        for path in use_path(&text).map(expand).unwrap_or_default() {
            let path = path.strip_prefix("crate::").unwrap_or(&path);
            let segments: Vec<String> = path.split("::").map(ToOwned::to_owned).collect();
            let last = segments.last().cloned().unwrap_or_default();
            names.insert(last, segments);
        }
    }
    names
}

/// Returns the module of a path: its longest prefix that is a module, or the module that a re-export refers to.
fn resolve(
    segments: &[String],
    known: &[String],
    reexports: &BTreeMap<String, Vec<String>>,
) -> String {
    let longest = |segments: &[String]| {
        let starts = (1..=segments.len()).rev().map(|end| segments[..end].join("::"));
        starts.into_iter().find(|start| known.contains(start))
    };
    let reexported = || segments.first().and_then(|name| longest(reexports.get(name)?));
    longest(segments).or_else(reexported).unwrap_or_default()
}
