//! A guess at a fence that is above every node's own.
//!
//! Nodes give different fences: each its own clock's time, or one more than its last. The highest of a majority must
//! then be written back, which is another round. If all are asked for a fence that is a little ahead of all of them,
//! they give just that, and there is nothing to write back.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::clock::Moment;
use crate::fence::Fence;

/// The most that a guess is ahead of what was seen, beyond what it has to be.
const MOST_AHEAD: Duration = Duration::from_millis(10);
/// After so many good guesses, about, one is too low: so they are never too high for long.
const GOOD_GUESSES: i64 = 32;

/// How far the nodes' fences are ahead of this machine's clock. A wrong one costs a round, and nothing else.
#[derive(Debug, Default)]
pub(super) struct Lead(Mutex<Option<i64>>);

/// What a round asked its nodes for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guess {
    asked: Moment,
    guessed: Option<Fence>,
    /// The least that will do, whatever was guessed.
    floor: Option<Fence>,
}

impl Lead {
    /// What to ask nodes for now.
    pub(super) fn guess(&self, floor: Option<Fence>) -> Guess {
        let asked = Moment::now();
        let lead = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let guessed = lead.and_then(|lead| micros(asked).checked_add(lead));
        let guessed = guessed.and_then(|guess| u64::try_from(guess).ok()).and_then(Fence::new);
        Guess { asked, guessed, floor }
    }

    /// Learns from the highest fence of a majority. Not from one that is just what was asked for: nobody knows how
    /// far below it the nodes are, and what grew with each guess would grow without end.
    pub(super) fn learn(&self, guess: &Guess, highest: Fence) {
        let took = micros_of(Moment::now().since(guess.asked).min(MOST_AHEAD));
        let mut lead = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = i64::try_from(highest.get()).unwrap_or(i64::MAX);
        if Some(highest) > guess.fence() {
            *lead = Some(seen.saturating_sub(micros(guess.asked)).saturating_add(took));
        } else if Some(highest) == guess.guessed {
            // Somebody else may have learned in the meantime, so this is taken from what is known now.
            *lead = lead.map(|lead| lead.saturating_sub(took / GOOD_GUESSES + 1));
        }
    }
}

impl Guess {
    /// The fence to ask for.
    pub(super) fn fence(&self) -> Option<Fence> {
        self.guessed.max(self.floor)
    }
}

/// A moment as a number, as stores' clocks have them.
fn micros(moment: Moment) -> i64 {
    micros_of(moment.since(Moment::EPOCH))
}

fn micros_of(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(number: i64) -> Fence {
        Fence::new(u64::try_from(number).unwrap()).unwrap()
    }

    /// A node's clock, which is ahead of ours.
    fn node() -> i64 {
        micros(Moment::now()) + 1_000_000_000_000
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_guessed_before_something_was_seen() {
        let lead = Lead::default();
        assert_eq!(lead.guess(None).fence(), None);
        assert_eq!(lead.guess(Some(fence(7))).fence(), Some(fence(7)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_guess_is_ahead_of_nodes_whose_clocks_go_on_as_ours_does() {
        let lead = Lead::default();
        let first = lead.guess(None);
        tokio::time::advance(Duration::from_micros(300)).await;
        lead.learn(&first, fence(node()));
        tokio::time::advance(Duration::from_secs(3600)).await;
        let guess = lead.guess(None);
        // Half of a round trip later, when it gets there.
        tokio::time::advance(Duration::from_micros(150)).await;
        let ahead = i64::try_from(guess.fence().unwrap().get()).unwrap() - node();
        assert!((0..=600).contains(&ahead), "{ahead}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_asked_for_at_least_is_asked_for() {
        let lead = Lead::default();
        lead.learn(&lead.guess(None), fence(1_000_000));
        assert_eq!(lead.guess(Some(Fence::MAX)).fence(), Some(Fence::MAX));
        assert!(lead.guess(Some(fence(1))).fence() >= Some(fence(1_000_000)));
    }

    #[tokio::test(start_paused = true)]
    async fn guesses_do_not_run_away_from_the_clock_however_many_are_made() {
        let lead = Lead::default();
        let (mut hits, mut misses) = (0, 0);
        let mut last = 0;
        for round in 0..10_000 {
            // Those who ask for other names at the same time: the keeper has seen their fences.
            let floor = (round % 3 == 0).then(|| fence(last + 1)).filter(|_| last > 0);
            let guess = lead.guess(floor);
            tokio::time::advance(Duration::from_micros(100 + round % 50)).await;
            let given = node().max(last + 1);
            let given = fence(given).max(guess.fence().unwrap_or(fence(1)));
            tokio::time::advance(Duration::from_micros(100)).await;
            lead.learn(&guess, given);
            (hits, misses) =
                if Some(given) == guess.fence() { (hits + 1, misses) } else { (hits, misses + 1) };
            last = i64::try_from(given.get()).unwrap();
            let ahead = last - node();
            assert!(ahead < 1_000, "round {round}: ahead by {ahead} µs");
        }
        assert!(hits > 20 * misses, "{hits} hits, {misses} misses");
    }

    #[tokio::test(start_paused = true)]
    async fn what_others_of_this_process_have_just_been_given_teaches_nothing() {
        let lead = Lead::default();
        lead.learn(&lead.guess(None), fence(node()));
        let before = lead.guess(None).fence().unwrap();
        for _ in 0..100 {
            let theirs = lead.guess(None).fence().unwrap();
            let guess = lead.guess(Some(theirs.next()));
            tokio::time::advance(Duration::from_micros(10)).await;
            lead.learn(&guess, guess.fence().unwrap());
        }
        // The clock has gone on for a thousand microseconds.
        assert_eq!(lead.guess(None).fence().unwrap().get(), before.get() + 1_000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_guess_that_was_too_high_comes_down() {
        let lead = Lead::default();
        let took = Duration::from_millis(1);
        let slow = lead.guess(None);
        tokio::time::advance(took).await;
        lead.learn(&slow, fence(node()));
        for _ in 0..2 * GOOD_GUESSES {
            let guess = lead.guess(None);
            tokio::time::advance(took).await;
            lead.learn(&guess, guess.fence().unwrap());
        }
        assert!(lead.guess(None).fence() <= Some(fence(node())));
    }
}
