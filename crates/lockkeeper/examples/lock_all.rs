//! Concurrent transfers, each of which locks two accounts at once.
//!
//! `cargo run --example lock_all -p lockkeeper`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use lockkeeper::{Keeper, Memory, ReleaseOutcome, Result};
use tokio::task::JoinSet;

const NAMES: [&str; 3] = ["alice", "bob", "carol"];

/// Balances that are read and written in two steps, so that concurrent changes of one account lose money.
#[derive(Default)]
struct Bank([AtomicI64; 3]);

impl Bank {
    async fn add(&self, account: usize, amount: i64) {
        let balance = self.0[account].load(Ordering::SeqCst);
        tokio::task::yield_now().await;
        self.0[account].store(balance + amount, Ordering::SeqCst);
    }

    fn show(&self) -> i64 {
        let balances = self.0.each_ref().map(|balance| balance.load(Ordering::SeqCst));
        for (name, balance) in NAMES.iter().zip(balances) {
            println!("{name:>6} {balance:>5}");
        }
        balances.iter().sum()
    }
}

async fn transfer(keeper: &Keeper, bank: &Bank, from: usize, to: usize) -> Result<ReleaseOutcome> {
    let names = [from, to].map(|account| format!("accounts/{}", NAMES[account]));
    let guards = keeper.lock_all(names).lock().await?;
    let work = async {
        bank.add(from, -10).await;
        bank.add(to, 10).await;
    };
    guards.while_held(work).await?;
    guards.release().await
}

#[tokio::main]
async fn main() -> Result<()> {
    let keeper = Keeper::new(Memory::new());
    let bank = Arc::new(Bank::default());
    for account in 0..3 {
        bank.add(account, 1000).await;
    }

    // Every pair in both directions: acquired one after the other, these locks would deadlock.
    let mut transfers = JoinSet::new();
    for _ in 0..100 {
        for (from, to) in [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2), (0, 1)] {
            let (keeper, bank) = (keeper.clone(), bank.clone());
            transfers.spawn(async move { transfer(&keeper, &bank, from, to).await });
        }
    }
    let done = transfers.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;

    println!("{} transfers without a deadlock", done.len());
    let sum = bank.show();
    assert_eq!(sum, 3000, "the sum has changed");
    println!("{:>6} {sum:>5}, as before", "sum");
    Ok(())
}
