//! The template of a store's keys: the key of a name, and the name of a key.

use std::sync::Arc;

use lockkeeper_core::{Error, ErrorKind, Result};

use super::{SEMAPHORE, SUFFIXES};

/// The place of the name in a template.
const PLACEHOLDER: &str = "{name}";
/// The end of the keys of a fence register.
pub(super) const REGISTER: &str = ":highest";

/// The template of the holder's key: the text before and after the name.
///
/// No holder key ends like another key of a lock (`:q`, …). So the keys of two names are never the same:
/// a key that is `b:q` for one name is the queue of another, and [`KeyTemplate::holder`] refuses that name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyTemplate {
    before: Arc<str>,
    after: Arc<str>,
    names: Names,
}

/// How a name appears in its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    /// `%` and `}` become `%25` and `%7D`.
    Encoded,
    /// Unchanged, because another program builds the same keys. A name for which this is not possible is refused.
    Verbatim,
}

impl KeyTemplate {
    /// Returns the template `prefix:{{name}}`, which accepts every name.
    pub(crate) fn of_prefix(prefix: &str) -> Self {
        let before = format!("{prefix}:{{").into();
        Self { before, after: "}".into(), names: Names::Encoded }
    }

    /// Parses a template. All text but the placeholder is literal, braces included. The error states what to change.
    pub(crate) fn parse(template: &str) -> Result<Self, &'static str> {
        if template.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err("the key template must not contain whitespace or control characters");
        }
        let Some((before, after)) = template.split_once(PLACEHOLDER) else {
            return Err(
                "the key template must contain {name}, the place of the lock's name, as in \"lock:{name}\"",
            );
        };
        if after.contains(PLACEHOLDER) {
            return Err("the key template must contain {name} only once");
        }
        if before.is_empty() && after.is_empty() {
            return Err(
                "the key template must be more than {name}, or every key of the database would be a lock: write one as in \"lock:{name}\"",
            );
        }
        if reserved_end(after).is_some() {
            return Err(
                "the key template must not end in :r, :q, :i, :f, :s or :highest, as other keys of a lock do",
            );
        }
        Ok(Self { before: before.into(), after: after.into(), names: Names::Verbatim })
    }

    /// Returns whether a cluster keeps all keys of a lock in one slot: it hashes the text between the first `{` and the
    /// first `}` after it if there is any, and otherwise the whole key, which differs.
    pub(crate) fn has_hash_tag(&self) -> bool {
        match self.before.split_once('{') {
            Some((_, rest)) => match rest.split_once('}') {
                Some((tag, _)) => !tag.is_empty(),
                None => self.after.contains('}'),
            },
            None => false,
        }
    }

    /// Returns whether the hash tag, if any, contains the name.
    fn has_name_in_tag(&self) -> bool {
        self.before.split_once('{').is_some_and(|(_, rest)| !rest.contains('}'))
    }

    /// Returns the key of the exclusive holder.
    ///
    /// # Errors
    ///
    /// [`InvalidName`](ErrorKind::InvalidName) if the key would not contain the name as it is, or could be another key of
    /// another lock.
    pub(crate) fn holder(&self, name: &str) -> Result<String> {
        let mut holder =
            String::with_capacity(self.before.len() + name.len() + self.after.len() + 4);
        holder.push_str(&self.before);
        if self.names == Names::Encoded {
            encode(name, &mut holder);
            holder.push_str(&self.after);
            return Ok(holder);
        }
        if self.has_name_in_tag() && name.contains(['%', '}']) {
            return Err(Error::new(
                ErrorKind::InvalidName,
                "a name must not contain \"%\" or \"}\" where the key template has it in braces: use the option prefix, \
                 which encodes them, or a template without braces",
            ));
        }
        holder.push_str(name);
        holder.push_str(&self.after);
        match reserved_end(&holder) {
            None => Ok(holder),
            Some(end) => Err(Error::new(
                ErrorKind::InvalidName,
                format!(
                    "with this key template, the key would end in {end:?} like another key of a lock: choose another \
                     name, or a template with text after {{name}}"
                ),
            )),
        }
    }

    /// Returns a pattern for SCAN that matches the keys of all names that start with `start`, and more.
    pub(crate) fn pattern(&self, start: &str) -> String {
        let mut front = self.before.to_string();
        match self.names {
            Names::Encoded => encode(start, &mut front),
            Names::Verbatim => front.push_str(start),
        }
        let mut pattern = String::with_capacity(front.len() + self.after.len() + 10);
        for part in [&front, &*self.after] {
            for character in part.chars() {
                if "*?[]\\^".contains(character) {
                    pattern.push('\\');
                }
                pattern.push(character);
            }
            // After the start of the name, and after the template, for the suffixes.
            pattern.push('*');
        }
        pattern
    }

    /// Returns the name that a key belongs to, if it is a key of a lock or semaphore.
    pub(crate) fn name_of(&self, key: &str) -> Option<String> {
        let key = SUFFIXES[1..].iter().find_map(|suffix| key.strip_suffix(suffix)).unwrap_or(key);
        let key = key.strip_suffix(SEMAPHORE).unwrap_or(key);
        let name = key.strip_prefix(&*self.before)?.strip_suffix(&*self.after)?;
        let name = match self.names {
            Names::Encoded => name.replace("%7D", "}").replace("%25", "%"),
            Names::Verbatim => name.to_owned(),
        };
        // A key of another program may look like one that no name has.
        (self.holder(&name).ok()? == key).then_some(name)
    }
}

/// Returns the end of a holder key if another key of a lock ends so.
fn reserved_end(key: &str) -> Option<&'static str> {
    let reserved = SUFFIXES[1..].iter().chain([&SEMAPHORE, &REGISTER]);
    reserved.copied().find(|end| key.ends_with(end))
}

fn encode(name: &str, into: &mut String) {
    for part in name.split_inclusive(['%', '}']) {
        match part.as_bytes().last() {
            Some(b'%') => into.extend([&part[..part.len() - 1], "%25"]),
            Some(b'}') => into.extend([&part[..part.len() - 1], "%7D"]),
            _ => into.push_str(part),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use lockkeeper_core::Kind;

    use super::*;
    use crate::names::{Keys, register_key};

    fn holder(template: &str, name: &str) -> String {
        KeyTemplate::parse(template).unwrap().holder(name).unwrap()
    }

    /// Those of docs/backends/redis.md.
    #[test]
    fn the_name_replaces_the_placeholder_and_other_braces_are_literal() {
        for (template, key) in [
            ("lock:{name}", "lock:orders/42"),
            ("{name}:lock", "orders/42:lock"),
            ("lock:{{name}}", "lock:{orders/42}"),
            ("{shop}:lock:{name}", "{shop}:lock:orders/42"),
            ("{lock:{name}}", "{lock:orders/42}"),
            ("lockkeeper:{{name}}", "lockkeeper:{orders/42}"),
        ] {
            assert_eq!(holder(template, "orders/42"), key);
        }
        assert_eq!(holder("lock:{name}", "a:b%20{c}"), "lock:a:b%20{c}");
        assert_eq!(holder("lock:{name}", "{name}"), "lock:{name}");
    }

    #[test]
    fn a_template_without_a_name_or_with_an_ambiguous_end_is_refused() {
        for (template, expected) in [
            ("", "must contain {name}"),
            ("lock", "must contain {name}"),
            ("lock:{NAME}", "must contain {name}"),
            ("{name}", "must be more than {name}"),
            ("{name}:{name}", "only once"),
            ("a {name}", "whitespace"),
            ("a:{name}\n", "whitespace"),
            ("lock:{name}:q", "must not end in"),
            ("lock:{name}x:s", "must not end in"),
            ("lock:{{name}}:highest", "must not end in"),
        ] {
            let error = KeyTemplate::parse(template).expect_err(template);
            assert!(error.contains(expected), "{template:?}: {error}");
        }
    }

    #[test]
    fn a_name_that_cannot_stand_in_its_key_as_it_is_is_refused() {
        for (template, name) in [
            ("lock:{name}", "a:q"),
            ("lock:{name}", "a:highest"),
            ("lock:{name}", ":s"),
            ("lock:{name}q", "a:"),
            ("lock:{{name}}", "a}"),
            ("lock:{{name}}", "50%"),
            ("{lock:{name}", "}"),
        ] {
            let error = KeyTemplate::parse(template).unwrap().holder(name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidName, "{template} {name}");
        }
    }

    #[test]
    fn a_hash_tag_contains_the_name_or_is_constant() {
        for (template, has) in [
            ("lock:{{name}}", true),
            ("{lock:{name}}", true),
            ("{shop}:{name}", true),
            ("{shop}{{name}}", true),
            ("lock:{name}", false),
            ("{}lock:{name}", false),
            ("}lock:{name}", false),
            ("lock:{name}{x}", false),
            ("lock:{{name}", false),
            ("lock:{name}}", false),
        ] {
            let template_of = KeyTemplate::parse(template).unwrap();
            assert_eq!(template_of.has_hash_tag(), has, "{template}");
            if has {
                // As the server computes it: all keys have the slot of the holder.
                let keys = Keys::new(&template_of, Kind::Lock, "a{").unwrap();
                for key in keys.texts() {
                    assert_eq!(crate::names::slot(&key), keys.slot(), "{template}: {key}");
                }
            }
        }
        assert!(KeyTemplate::of_prefix("lockkeeper").has_hash_tag());
    }

    #[test]
    fn a_pattern_takes_nothing_in_a_name_for_a_wildcard() {
        assert_eq!(KeyTemplate::of_prefix("lk").pattern("a*[b]?"), "lk:{a\\*\\[b\\]\\?*}*");
        let template = KeyTemplate::parse("{name}:*").unwrap();
        assert_eq!(template.pattern("a%}"), "a%}*:\\**");
    }

    /// All names of up to four of these characters, with all keys of each. Nothing else would make keys equal.
    #[test]
    fn no_key_belongs_to_two_names_and_each_leads_back_to_its_own() {
        let mut names = vec![String::new()];
        for from in [0, 1, 9, 73] {
            let longer = names[from..].iter().flat_map(|name: &String| {
                ['a', ':', 'q', 's', 'f', '{', '}', '%'].map(|c| format!("{name}{c}"))
            });
            let longer: Vec<_> = longer.collect();
            names.extend(longer);
        }
        let parse = |template| KeyTemplate::parse(template).unwrap();
        for template in [
            KeyTemplate::of_prefix("p"),
            parse("p:{name}"),
            parse("p{name}"),
            parse("p:{{name}}"),
            parse("{name}q"),
            parse("{name}:"),
            parse("p{name}:qs"),
            parse("p{name}s:"),
            parse("p:{{name}}f"),
            parse("{p}{name}"),
        ] {
            let mut owners: HashMap<String, (&str, Kind, usize)> = HashMap::new();
            let mut accepted = 0;
            for name in &names[1..] {
                for kind in [Kind::Lock, Kind::Semaphore] {
                    let Ok(keys) = Keys::new(&template, kind, name) else { continue };
                    accepted += 1;
                    for (which, key) in keys.texts().into_iter().enumerate() {
                        let owner = (name.as_str(), kind, which);
                        assert_eq!(template.name_of(&key).as_deref(), Some(owner.0), "{key}");
                        let before = owners.insert(key.clone(), owner);
                        assert_eq!(before, None, "{key} is also a key of {owner:?}");
                    }
                }
            }
            assert!(accepted > names.len() / 2, "{template:?}: {accepted} of {}", names.len());
        }
    }

    #[test]
    fn no_name_has_the_key_of_a_register() {
        let (key, _) = register_key("lockkeeper", "a").unwrap();
        let template = KeyTemplate::parse("lockkeeper:{name}").unwrap();
        assert!(template.holder(key.strip_prefix("lockkeeper:").unwrap()).is_err());
        assert_eq!(template.name_of(&key), None);
    }
}
