use std::time::Duration;

use super::*;

const READER: Mode = Mode::Shared;
const WRITER: Mode = Mode::Exclusive;

/// A hold of `a` by a unique owner.
fn hold(mode: Mode, fence: u64, start: u64, end: u64) -> Hold {
    let (name, owner) = ("a".into(), format!("{mode:?}{fence}-{start}-{end}"));
    Hold { name, owner, mode, fence: Fence::new(fence), start, end: Some(end) }
}

fn permits(take: u32, of: u32, start: u64, end: u64) -> Hold {
    hold(Mode::Permits { take, of }, 0, start, end)
}

fn history(holds: impl IntoIterator<Item = Hold>) -> History {
    let history = History::new();
    holds.into_iter().for_each(|hold| history.add(hold));
    history
}

/// Returns the only violation of these holds.
#[track_caller]
fn violation(holds: impl IntoIterator<Item = Hold>) -> Violation {
    let mut violations = history(holds).check().unwrap_err();
    assert_eq!(violations.len(), 1, "{violations:?}");
    violations.remove(0)
}

#[track_caller]
fn assert_clean(holds: impl IntoIterator<Item = Hold>) {
    history(holds).assert_clean();
}

#[test]
fn two_exclusive_holds_at_once_are_an_overlap() {
    let (first, second) = (hold(WRITER, 1, 0, 10), hold(WRITER, 2, 9, 20));
    let found = violation([second.clone(), first.clone()]);
    assert_eq!(found, Violation::Overlap { first, second });
}

#[test]
fn a_reader_beside_a_writer_is_an_overlap() {
    let (first, second) = (hold(WRITER, 1, 0, 10), hold(READER, 1, 5, 6));
    let found = violation([first.clone(), second.clone()]);
    assert_eq!(found, Violation::Overlap { first, second });
}

#[test]
fn a_writer_beside_a_reader_is_an_overlap() {
    let (first, second) = (hold(READER, 0, 0, 10), hold(WRITER, 1, 5, 6));
    let found = violation([first.clone(), second.clone()]);
    assert_eq!(found, Violation::Overlap { first, second });
}

#[test]
fn an_overlap_with_a_hold_that_is_not_adjacent_is_reported() {
    let long = hold(READER, 0, 0, 100);
    let found = violation([long.clone(), hold(READER, 0, 1, 2), hold(WRITER, 1, 50, 60)]);
    assert!(matches!(found, Violation::Overlap { first, .. } if first == long));
}

#[test]
fn a_hold_of_no_length_inside_another_is_an_overlap() {
    let found = violation([hold(WRITER, 1, 0, 10), hold(WRITER, 2, 5, 5)]);
    assert!(matches!(found, Violation::Overlap { .. }));
}

#[test]
fn a_hold_without_an_end_overlaps_all_later_holds() {
    let open = Hold { end: None, ..hold(WRITER, 1, 0, 0) };
    let found = violation([open, hold(WRITER, 2, u64::MAX - 1, u64::MAX)]);
    assert!(matches!(found, Violation::Overlap { .. }));
}

#[test]
fn more_permits_than_the_smallest_limit_are_a_violation() {
    let last = permits(2, 4, 2, 10);
    let found = violation([permits(1, 3, 0, 10), permits(1, 4, 1, 10), last.clone()]);
    assert_eq!(found, Violation::ExcessPermits { last, in_use: 4, of: 3 });
}

#[test]
fn a_smaller_limit_applies_only_while_its_holder_holds() {
    assert_clean([permits(1, 1, 0, 10), permits(3, 4, 10, 20), permits(1, 4, 11, 20)]);
    let found = violation([permits(3, 4, 10, 20), permits(1, 1, 11, 20)]);
    assert!(matches!(found, Violation::ExcessPermits { in_use: 4, of: 1, .. }));
}

#[test]
fn equal_fences_of_two_exclusive_holds_are_a_violation() {
    let (before, after) = (hold(WRITER, 7, 0, 10), hold(WRITER, 7, 10, 20));
    let found = violation([after.clone(), before.clone()]);
    assert_eq!(found, Violation::Fence { before, after });
}

#[test]
fn a_fence_below_that_of_a_much_earlier_hold_is_a_violation() {
    let before = hold(WRITER, 9, 0, 1);
    let found = violation([before.clone(), hold(WRITER, 0, 2, 3), hold(WRITER, 8, 4, 5)]);
    assert!(matches!(found, Violation::Fence { before: high, .. } if high == before));
}

#[test]
fn a_shared_fence_may_equal_the_previous_exclusive_one_but_not_be_lower() {
    assert_clean([hold(WRITER, 7, 0, 1), hold(READER, 7, 1, 3), hold(READER, 7, 2, 3)]);
    let (before, after) = (hold(WRITER, 7, 0, 1), hold(READER, 6, 1, 3));
    let found = violation([before.clone(), after.clone()]);
    assert_eq!(found, Violation::Fence { before, after });
}

#[test]
fn shared_fences_are_compared_with_exclusive_ones_only() {
    assert_clean([hold(WRITER, 3, 0, 1), hold(READER, 5, 1, 3), hold(READER, 4, 2, 3)]);
    assert_clean([hold(READER, 5, 0, 1), hold(WRITER, 4, 1, 2)]);
}

#[test]
fn a_hold_that_ends_before_it_starts_is_reported_and_excluded_from_other_checks() {
    let wrong = hold(WRITER, 1, 10, 9);
    let found = violation([wrong.clone(), hold(WRITER, 1, 0, 20)]);
    assert_eq!(found, Violation::EndsBeforeStart(wrong));
}

#[test]
fn every_violation_is_one_line_that_shows_the_holds() {
    let line = violation([hold(WRITER, 1, 0, 10), hold(WRITER, 2, 9, 20)]).to_string();
    let shown = "two holds overlap: [a Exclusive1-0-10 exclusive 1 0 10] and \
                 [a Exclusive2-9-20 exclusive 2 9 20]";
    assert_eq!(line, shown);
    let line = violation([permits(2, 1, 0, 10)]).to_string();
    assert!(line.starts_with("2 of 1 permits are in use, with [a "), "{line}");
    let line = violation([hold(WRITER, 2, 0, 1), hold(WRITER, 1, 1, 2)]).to_string();
    assert!(line.starts_with("a fence does not rise: [a "), "{line}");
    let line = violation([hold(WRITER, 1, 1, 0)]).to_string();
    assert!(line.starts_with("a hold ends before it starts: [a "), "{line}");
}

#[test]
fn a_clean_history_has_a_summary() {
    let other = Hold { name: "b".into(), end: None, ..hold(WRITER, 1, 5, 0) };
    let holds = [
        hold(WRITER, 1, 0, 10),
        hold(READER, 1, 10, 30),
        hold(READER, 1, 20, 40),
        hold(READER, 2, 30, 35),
        hold(WRITER, 3, 40, 50),
        other,
    ];
    let summary = history(holds).check().unwrap();
    assert_eq!(summary, Summary { holds: 6, names: 2, open: 1, max_concurrent: 2 });
}

#[test]
fn an_empty_history_is_clean() {
    assert_eq!(History::new().check(), Ok(Summary::default()));
}

#[test]
fn adjacent_holds_do_not_overlap() {
    assert_clean([hold(WRITER, 1, 0, 10), hold(WRITER, 2, 10, 20), hold(READER, 2, 20, 30)]);
    let reversed = [(4, 9, 9), (3, 5, 9), (2, 5, 5), (1, 5, 5)];
    assert_clean(reversed.map(|(fence, start, end)| hold(WRITER, fence, start, end)));
    assert_clean([permits(1, 1, 0, 10), permits(1, 1, 10, 20)]);
}

#[test]
fn a_semaphore_and_a_lock_of_one_name_are_independent() {
    assert_clean([hold(WRITER, 1, 0, 10), permits(2, 2, 5, 15), hold(WRITER, 2, 10, 20)]);
}

#[test]
fn names_are_independent() {
    let other = Hold { name: "b".into(), ..hold(WRITER, 1, 5, 15) };
    assert_clean([hold(WRITER, 1, 0, 10), other]);
}

#[test]
fn a_history_of_thirty_thousand_holds_is_checked() {
    let writers = (0..10_000).map(|n| hold(WRITER, n + 1, 10 * n, 10 * n + 4));
    let readers = (0..10_000).map(|n| hold(READER, n + 1, 10 * n + 4, 10 * n + 10));
    // All concurrent, and each ends before the one that started before it: the worst case for a sweep.
    let crowd = (0..10_000).map(|n| permits(1, 10_000, n, 1_000_000 - n));
    let history = history(writers.chain(readers).chain(crowd));
    let summary = history.check().unwrap();
    assert_eq!(summary, Summary { holds: 30_000, names: 2, open: 0, max_concurrent: 10_000 });
    history.add(hold(WRITER, 20_000, 55_555, 55_556));
    let violations = history.check().unwrap_err();
    assert!(matches!(violations[0], Violation::Overlap { .. }), "{}", violations[0]);
}

#[test]
fn consecutive_holds_are_clean() {
    let history = History::new();
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let history = history.clone();
            std::thread::spawn(move || {
                let name = thread.to_string();
                for fence in 1..=100 {
                    let open = history.begin(&name, thread, WRITER, Fence::new(fence));
                    let hold = open.end();
                    assert!(hold.start <= hold.end.unwrap());
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(history.assert_clean().holds, 400);
}

#[test]
fn dropping_an_open_hold_ends_it() {
    let history = History::new();
    let open = history.begin("a", 1, WRITER, None);
    assert_eq!(history.check().unwrap().open, 1);
    drop(open);
    let _next = history.begin("a", 2, WRITER, None);
    assert_eq!(history.assert_clean().open, 1);
}

#[test]
fn a_hold_ends_at_its_deadline_if_that_is_before_its_release() {
    let history = History::new();
    let open = history.begin("a", 1, WRITER, None);
    let deadline = Instant::now();
    open.until(deadline + Duration::from_secs(60));
    assert!(open.hold().end.unwrap() > open.hold().start + 50_000_000_000);
    open.until(deadline);
    // The other owner acquires after the deadline and before the first detects its loss.
    let other = history.begin("a", 2, WRITER, None);
    open.end();
    other.end();
    history.assert_clean();
}

#[test]
fn a_hold_ends_at_its_release_if_that_is_before_its_deadline() {
    let history = History::new();
    let open = history.begin("a", 1, WRITER, None);
    open.until(Instant::now() + Duration::from_secs(60));
    open.end();
    history.begin("a", 2, WRITER, None).end();
    history.assert_clean();
}

#[test]
fn a_discarded_hold_is_not_checked() {
    let history = History::new();
    let open = history.begin("a", 1, WRITER, None);
    history.begin("a", 2, WRITER, None).discard();
    open.end();
    assert_eq!(history.assert_clean().holds, 1);
}

#[test]
fn a_hold_added_again_gets_its_end() {
    let history = History::new();
    let ended = hold(WRITER, 1, 0, 10);
    history.add(Hold { end: None, ..ended.clone() });
    history.add(hold(WRITER, 2, 10, 20));
    history.add(ended.clone());
    assert_eq!(history.assert_clean().holds, 2);
    assert_eq!(history.holds()[0], ended);
}

#[test]
fn the_holds_of_a_killed_process_end_with_it() {
    let history = history([hold(WRITER, 1, 0, 10), Hold { end: None, ..hold(WRITER, 2, 10, 0) }]);
    history.end_all(20);
    history.add(hold(WRITER, 3, 20, 30));
    history.assert_clean();
    assert_eq!(history.holds()[0].end, Some(10));
}

#[test]
fn a_hold_is_parsed_from_its_line() {
    let strange = "a b%20\n\t\0\u{7f}%\u{2028}\u{1f512}é";
    for mode in [WRITER, READER, Mode::Permits { take: 2, of: 5 }] {
        for (fence, end) in [(None, None), (Some(Fence::MAX), Some(u64::MAX))] {
            let (name, owner) = (strange.to_owned(), String::new());
            let hold = Hold { name, owner, mode, fence, start: 3, end };
            let line = hold.to_string();
            assert_eq!(line.lines().count(), 1, "{line}");
            assert_eq!(line.parse(), Ok(hold), "{line}");
        }
    }
}

#[test]
fn a_malformed_line_is_rejected() {
    let lines = [
        "",
        "a b exclusive 1 2",
        "a b exclusive 1 2 3 4",
        "a b greedy 1 2 3",
        "a b permits:1 1 2 3",
        "a b exclusive 0 2 3",
        "a b exclusive 1 - 3",
        "a b exclusive 1 2 x",
        "a% b exclusive 1 2 3",
        "a%ff b exclusive 1 2 3",
    ];
    for line in lines {
        let error = line.parse::<Hold>().unwrap_err();
        assert!(error.to_string().starts_with("not a hold"), "{error}");
    }
}
