//! Compiler output for code with `#[locked]`: an explanation for invalid code, no warnings for valid code.
//!
//! `TRYBUILD=overwrite cargo test -p lockkeeper-macros --test ui` rewrites the expected messages. Review the diff
//! before you commit it.

#[test]
fn invalid_code_is_explained_at_its_location() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}

#[test]
fn valid_code_causes_no_warning() {
    trybuild::TestCases::new().pass("tests/ui/pass/*.rs");
}

/// The same code, compiled as part of this test so that Clippy checks it.
#[rustfmt::skip]
#[path = "ui/pass/no_warnings.rs"]
mod no_warnings;

#[test]
fn valid_code_runs() {
    no_warnings::main();
}
