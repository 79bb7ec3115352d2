// The attribute causes no warning in code that has none without it.
#![deny(warnings)]

use lockkeeper::{Keeper, Memory, Result, locked};

#[locked(key = "a")]
async fn one_line() -> Result<()> { Ok(()) }

#[locked(key = "a")]
fn one_line_blocking() -> Result<()> { Ok(()) }

#[locked(key = "a", reentrant)]
async fn one_line_reentrant() -> Result<()> { Ok(()) }

#[locked(key = "a", reentrant)]
fn one_line_blocking_reentrant() -> Result<()> { Ok(()) }

#[locked(key = "a")]
async fn one_line_call() -> Result<()> { one_line().await }

#[locked(key = "a")]
async fn one_line_return() -> Result<u64> { let value = 1; Ok(value) }

#[locked(key = "a")]
async fn several_lines() -> Result<()> {
    one_line().await?;
    one_line_call().await
}

#[locked(key = "a")]
async fn several_lines_blocking() -> Result<()> {
    one_line_blocking()?;
    one_line_blocking_reentrant()
}

#[locked(key = "order:{order_id}", mode = "shared", wait = "1s", ttl = "10s")]
async fn argument(order_id: u64) -> Result<u64> { Ok(order_id) }

#[locked(key = "order:{order_id}", permits = 3)]
async fn moved_argument(order_id: String) -> Result<String> { Ok(order_id) }

#[locked(key = "a", keeper = "keeper")]
async fn given_keeper(keeper: &Keeper) -> Result<bool> { Ok(keeper.inspect().is_ok()) }

#[locked(key = "a", keeper = "keeper")]
fn given_blocking_keeper(keeper: &Keeper) -> Result<()> { drop(keeper.clone()); Ok(()) }

#[locked(key = "{value}")]
async fn generic<T>(value: T) -> Result<T> where T: Clone + std::fmt::Display { Ok(value.clone()) }

#[locked(key = "{text}")]
async fn borrows<'a>(text: &'a str) -> Result<&'a str> { Ok(text) }

#[locked(key = "a")]
async fn iterates(up_to: u32) -> Result<impl Iterator<Item = u32>> { Ok(0..up_to) }

#[locked(key = "a")]
fn iterates_blocking(up_to: u32) -> Result<impl Iterator<Item = u32>> { Ok(0..up_to) }

#[locked(key = "a")]
async fn own_error() -> Result<(), Box<dyn std::error::Error + Send + Sync>> { Err("own")? }

#[locked(key = "a")]
async fn early(return_early: bool) -> Result<u8> { if return_early { return Ok(1); } Ok(2) }

/// Has documentation.
#[must_use = "it is a result"]
#[locked(key = "a")]
async fn outer_attribute() -> Result<()> { Ok(()) }

#[locked(key = "a")]
async fn inner_attribute() -> Result<()> { #![allow(unused_variables)] let unused = 1; Ok(()) }

#[locked(key = "a")]
async fn nested_block() -> Result<u8> { let value = { let one = 1; one + 1 }; Ok(value) }

#[locked(key = "a")]
async fn matches(value: Option<u8>) -> Result<u8> { match value { Some(value) => Ok(value), None => Ok(0) } }

struct Account {
    id: u64,
    balance: u64,
}

impl Account {
    #[locked(key = "account:{self.id}")]
    async fn balance(&self) -> Result<u64> { Ok(self.balance) }

    #[locked(key = "account:{self.id}")]
    async fn deposit(&mut self, amount: u64) -> Result<()> { self.balance += amount; Ok(()) }

    #[locked(key = "account:{self.id}")]
    fn close(self) -> Result<u64> { Ok(self.balance) }
}

pub(crate) fn main() {
    let keeper = Keeper::new(Memory::new());
    let account = || Account { id: 1, balance: 2 };
    // Creates the futures, so that no function is unused, but does not poll them: no keeper is installed.
    drop((one_line(), one_line_reentrant(), one_line_call(), one_line_return(), several_lines()));
    drop((several_lines_blocking(), argument(1), moved_argument(String::new()), given_keeper(&keeper)));
    drop((generic("a"), borrows("a"), iterates(1), own_error(), early(true)));
    drop((outer_attribute(), inner_attribute()));
    drop((nested_block(), matches(None), account().balance(), account().deposit(1)));
    assert!(one_line_blocking().is_err());
    assert!(one_line_blocking_reentrant().is_err());
    assert!(iterates_blocking(1).is_err());
    assert!(account().close().is_err());
    let _ = given_blocking_keeper;
}
