//! The README and the example that it shows.

#[test]
fn the_code_in_the_readme_is_the_quickstart_example() {
    let readme = include_str!("../../../README.md");
    let example = include_str!("../examples/quickstart.rs");
    let (_, code) = readme.split_once("```rust,no_run\n").expect("the README has code");
    let (code, _) = code.split_once("```").expect("the code ends");
    assert!(example.ends_with(code), "copy the code of the README into examples/quickstart.rs");
}
