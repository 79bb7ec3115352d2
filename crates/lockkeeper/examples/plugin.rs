//! A host that uses locks through the plugin trait: no async, no generics, handles of plain text.
//!
//! `cargo run --example plugin -p lockkeeper`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::time::Duration;

use lockkeeper::plugin::{KeeperPlugin, LockHandle, LockPlugin, Standing};
use lockkeeper::{Keeper, Memory};

const TTL: Duration = Duration::from_millis(300);

/// Represents a plugin that the host loads at run time.
fn load() -> Box<dyn LockPlugin> {
    Box::new(KeeperPlugin::new(Keeper::new(Memory::new())))
}

fn main() -> Result<(), String> {
    let locks = load();

    let handle = locks.try_lock("reindex", TTL)?.ok_or("another client holds it")?;
    println!("held: {} {}", handle.key, handle.lock_id);
    assert_eq!(locks.try_lock("reindex", TTL)?, None);

    // The handle crosses the plugin boundary as text.
    let text = (handle.key.clone(), handle.lock_id.clone());
    let handle = LockHandle { key: text.0, lock_id: text.1 };
    println!("renewed: {:?}", locks.renew(&handle, TTL)?);

    // Without a further renewal the lease expires, and another client acquires the lock.
    let next = loop {
        match locks.try_lock("reindex", Duration::from_secs(10))? {
            Some(next) => break next,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    println!("expired; the next holder is {}", next.lock_id);
    assert_eq!(locks.renew(&handle, TTL)?, Standing::Lost);
    println!("the old handle: {:?}", locks.release(handle)?);
    println!("the new handle: {:?}", locks.release(next)?);
    Ok(())
}
