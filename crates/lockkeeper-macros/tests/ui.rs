//! What the compiler says about code with `#[locked]`: to mistakes an error that explains them, to correct code nothing.
//!
//! `TRYBUILD=overwrite cargo test -p lockkeeper-macros --test ui` writes the expected messages anew: look at the
//! difference before you commit it.

#[test]
fn mistakes_are_explained_where_they_were_made() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}

#[test]
fn correct_code_gets_no_warning() {
    trybuild::TestCases::new().pass("tests/ui/pass/*.rs");
}

/// The same code once more, so that Clippy sees it.
#[rustfmt::skip]
#[path = "ui/pass/no_warnings.rs"]
mod no_warnings;

#[test]
fn correct_code_runs() {
    no_warnings::main();
}
