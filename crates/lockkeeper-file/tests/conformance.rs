//! The conformance suite: with notifications, with polling, and without fences.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use lockkeeper_file::File;
use lockkeeper_testkit::conformance::Subject;

async fn notified() -> Subject {
    common::subject(&File::options(), "")
}

async fn polling() -> Subject {
    common::subject(&File::options().polling(true), "?polling=on")
}

async fn without_fences() -> Subject {
    common::subject(&File::options().fence(false), "?fence=off")
}

mod conformance {
    lockkeeper_testkit::conformance!(super::notified);
}

mod across_processes {
    lockkeeper_testkit::conformance_across_processes!(super::notified);
}

mod polling_conformance {
    lockkeeper_testkit::conformance!(super::polling);
}

mod polling_across_processes {
    lockkeeper_testkit::conformance_across_processes!(super::polling);
}

mod conformance_without_fences {
    lockkeeper_testkit::conformance!(super::without_fences);
}

mod across_processes_without_fences {
    lockkeeper_testkit::conformance_across_processes!(super::without_fences);
}
