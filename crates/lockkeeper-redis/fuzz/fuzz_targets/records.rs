#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| lockkeeper_redis::fuzzing::records(input));
