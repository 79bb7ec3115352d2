//! Text from other processes and servers, made safe to display.

use std::borrow::Cow;

/// Returns whether a character is invisible or changes how text is displayed: control characters (a terminal executes
/// `ESC` sequences), line and paragraph separators, bidirectional controls, zero-width and other invisible characters.
/// Two texts that differ only in these look alike.
///
/// The ranges are Unicode's general categories `Cc`, `Cf`, `Zl` and `Zp`, and its property
/// `Default_Ignorable_Code_Point`.
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}'
            | '\u{890}'..='\u{891}' | '\u{8e2}' | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
            | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// Returns the text with each [hidden](is_hidden) character written as in Rust: `\n`, `\u{1b}`, `\u{202e}`.
///
/// Backslashes are not escaped, so escaped text does not change. The result cannot be parsed back: for that, use quotes
/// (`{:?}`) instead.
pub fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\n' | '\r' | '\t' => shown.extend(c.escape_debug()),
            c if is_hidden(c) => shown.extend(c.escape_unicode()),
            c => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_escaped() {
        let shown = [
            ("\x1b[2J", r"\u{1b}[2J"),
            ("a\nb\tc\r", r"a\nb\tc\r"),
            ("\u{9b}31m", r"\u{9b}31m"),
            ("gpj.\u{202e}exe", r"gpj.\u{202e}exe"),
            ("a\u{200b}b\u{feff}", r"a\u{200b}b\u{feff}"),
            ("\u{2066}x\u{2069}", r"\u{2066}x\u{2069}"),
            ("line\u{2028}", r"line\u{2028}"),
            ("\u{7f}\u{e0041}\u{3164}", r"\u{7f}\u{e0041}\u{3164}"),
        ];
        for (text, expected) in shown {
            assert_eq!(visible(text), expected);
            assert_eq!(visible(expected), expected, "escaped text does not change");
        }
    }

    #[test]
    fn visible_text_is_not_changed() {
        for text in ["", "orders/42", r"C:\temp", "Über 日本語 🔒", "e\u{301}", "नमस्ते", "שלום"]
        {
            assert!(matches!(visible(text), Cow::Borrowed(_)), "{text}");
        }
    }
}
