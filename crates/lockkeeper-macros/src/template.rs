//! Keys with arguments in them: `order:{order_id}`.

/// A part of a key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Text, as it is.
    Text(String),
    /// An argument, or a field of it.
    Argument { name: String, field: Option<String> },
}

/// Takes a key apart; the error says what is wrong with it.
pub(crate) fn parse(key: &str) -> Result<Vec<Piece>, String> {
    if key.is_empty() {
        return Err("a key must not be empty".to_owned());
    }
    if key.contains('\0') {
        return Err("a key must not contain NUL".to_owned());
    }
    let (mut pieces, mut text) = (Vec::new(), String::new());
    let mut rest = key;
    while let Some(at) = rest.find(['{', '}']) {
        text.push_str(&rest[..at]);
        let (brace, after) = rest[at..].split_at(1);
        if after.starts_with(brace) {
            text.push_str(brace);
            rest = &after[1..];
            continue;
        }
        if brace == "}" {
            return Err("a `}` without a `{`: write `}}` for a brace in the key".to_owned());
        }
        let Some(end) = after.find('}') else {
            return Err("a `{` without a `}`: write `{{` for a brace in the key".to_owned());
        };
        if !text.is_empty() {
            pieces.push(Piece::Text(std::mem::take(&mut text)));
        }
        pieces.push(argument(&after[..end])?);
        rest = &after[end + 1..];
    }
    text.push_str(rest);
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
    Ok(pieces)
}

/// What stands between braces.
fn argument(inside: &str) -> Result<Piece, String> {
    let (name, field) = match inside.split_once('.') {
        Some((name, field)) => (name, Some(field)),
        None => (inside, None),
    };
    let is_field = |field: &str| {
        is_name(field) || (!field.is_empty() && field.bytes().all(|b| b.is_ascii_digit()))
    };
    if !is_name(name) || !field.is_none_or(is_field) {
        return Err(format!(
            "`{{{inside}}}` in the key: only `{{argument}}` and `{{argument.field}}` can be there"
        ));
    }
    Ok(Piece::Argument { name: name.to_owned(), field: field.map(str::to_owned) })
}

/// Whether it may be the name of an argument or a field. Whether there is one is another question.
fn is_name(text: &str) -> bool {
    text != "_"
        && text.starts_with(|c: char| c.is_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Piece {
        Piece::Text(text.to_owned())
    }

    fn of(name: &str, field: Option<&str>) -> Piece {
        Piece::Argument { name: name.to_owned(), field: field.map(str::to_owned) }
    }

    #[test]
    fn a_key_is_text_and_arguments() {
        assert_eq!(parse("nightly"), Ok(vec![text("nightly")]));
        assert_eq!(parse("order:{id}"), Ok(vec![text("order:"), of("id", None)]));
        assert_eq!(
            parse("{a}{b.c}/{self.d}/{pair.0}é"),
            Ok(vec![
                of("a", None),
                of("b", Some("c")),
                text("/"),
                of("self", Some("d")),
                text("/"),
                of("pair", Some("0")),
                text("é"),
            ])
        );
        assert_eq!(parse("{type}{größe}"), Ok(vec![of("type", None), of("größe", None)]));
    }

    #[test]
    fn doubled_braces_are_braces() {
        assert_eq!(parse("{{a}}"), Ok(vec![text("{a}")]));
        assert_eq!(parse("{{{a}}}"), Ok(vec![text("{"), of("a", None), text("}")]));
    }

    #[test]
    fn anything_but_an_argument_or_its_field_is_refused() {
        let bad = [
            "", "a\0b", "{", "}", "a}b", "{a", "{}", "{ a }", "{_}", "{0}", "{a.}", "{.a}",
            "{a.b.c}", "{a()}", "{a:?}", "{a.b()}", "{a + b}", "{{a}", "{a}}", "{a.1b}", "{r#a}",
            "{\"a\"}", "{a-b}",
        ];
        for key in bad {
            assert!(parse(key).is_err(), "{key:?} was taken for {:?}", parse(key));
        }
    }
}
