//! A host that knows locks as a plugin only: no async, no generics, handles that are plain text.
//!
//! `cargo run --example plugin -p lockkeeper`
#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::time::Duration;

use lockkeeper::plugin::{KeeperPlugin, LockHandle, LockPlugin, Standing};
use lockkeeper::{Keeper, Memory};

const TTL: Duration = Duration::from_millis(300);

/// What a host loads at run time.
fn load() -> Box<dyn LockPlugin> {
    Box::new(KeeperPlugin::new(Keeper::new(Memory::new())))
}

fn main() -> Result<(), String> {
    let locks = load();

    let handle = locks.try_lock("reindex", TTL)?.ok_or("somebody has it")?;
    println!("held: {} {}", handle.key, handle.lock_id);
    assert_eq!(locks.try_lock("reindex", TTL)?, None);

    // The handle goes to a guest and comes back as text.
    let text = (handle.key.clone(), handle.lock_id.clone());
    let handle = LockHandle { key: text.0, lock_id: text.1 };
    println!("renewed: {:?}", locks.renew(&handle, TTL)?);

    // Nobody renews it any more: it ends by itself, and the next one gets it.
    let next = loop {
        match locks.try_lock("reindex", Duration::from_secs(10))? {
            Some(next) => break next,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    println!("ended; the next one is {}", next.lock_id);
    assert_eq!(locks.renew(&handle, TTL)?, Standing::Lost);
    println!("the old handle: {:?}", locks.release(handle)?);
    println!("the new one: {:?}", locks.release(next)?);
    Ok(())
}
