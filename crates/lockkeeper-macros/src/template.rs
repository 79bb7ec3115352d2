//! The placeholders of a key: `{argument}` and `{argument.field}`.

use lockkeeper_syntax::template::{self, Piece};

/// An argument or one of its fields.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Argument {
    pub(crate) name: String,
    pub(crate) field: Option<String>,
}

/// Parses a key. The error is a message for the user.
pub(crate) fn parse(key: &str) -> Result<Vec<Piece<Argument>>, String> {
    template::parse(key, argument)
}

/// Parses the text between two braces.
fn argument(inside: &str) -> Result<Argument, String> {
    let (name, field) = match inside.split_once('.') {
        Some((name, field)) => (name, Some(field)),
        None => (inside, None),
    };
    let is_field = |field: &str| {
        is_name(field) || (!field.is_empty() && field.bytes().all(|b| b.is_ascii_digit()))
    };
    if !is_name(name) || !field.is_none_or(is_field) {
        return Err(format!(
            "`{{{inside}}}` in the key is not supported: use `{{argument}}` or `{{argument.field}}`"
        ));
    }
    Ok(Argument { name: name.to_owned(), field: field.map(str::to_owned) })
}

/// Returns whether the text has the form of a name. The compiler checks that it exists.
fn is_name(text: &str) -> bool {
    text != "_"
        && text.starts_with(|c: char| c.is_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Piece<Argument> {
        Piece::Text(text.to_owned())
    }

    fn of(name: &str, field: Option<&str>) -> Piece<Argument> {
        let field = field.map(str::to_owned);
        Piece::Placeholder(Argument { name: name.to_owned(), field })
    }

    #[test]
    fn a_key_is_text_and_arguments() {
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
    fn only_arguments_and_their_fields_are_accepted() {
        let bad = [
            "", "a\0b", "{", "a}b", "{}", "{ a }", "{_}", "{0}", "{a.}", "{.a}", "{a.b.c}",
            "{a()}", "{a:?}", "{a.b()}", "{a + b}", "{a.1b}", "{r#a}", "{\"a\"}", "{a-b}",
        ];
        for key in bad {
            assert!(parse(key).is_err(), "{key:?} was parsed as {:?}", parse(key));
        }
    }
}
