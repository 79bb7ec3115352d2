//! What the compiler says to those who use `#[locked]` in a wrong way.
//!
//! `TRYBUILD=overwrite cargo test -p lockkeeper-macros --test ui` writes the expected messages anew: look at the
//! difference before you commit it.

#[test]
fn mistakes_are_explained_where_they_were_made() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
