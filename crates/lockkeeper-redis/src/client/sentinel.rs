//! Sentinels: where the master is.

use futures_util::future::select_ok;
use lockkeeper_core::{Error, Result};
use redis::Value;

use super::settings::{Address, Settings};
use super::{handshake, stream};
use crate::error::{at, config, translate, unavailable};

/// Asks all sentinels at once, and returns the first answer.
pub(super) async fn find_master(
    settings: &Settings,
    sentinels: &[Address],
    master: &str,
) -> Result<Address> {
    let asked = sentinels.iter().map(|sentinel| {
        Box::pin(async move {
            let asked = ask(settings, sentinel, master);
            let answer = tokio::time::timeout(settings.connect_timeout, asked).await;
            let answer = answer.unwrap_or_else(|_| Err(unavailable("no answer in time")));
            answer.map_err(|error| at(sentinel, &error))
        })
    });
    let (address, _) = select_ok(asked).await.map_err(|error| {
        Error::new(error.kind(), format!("no sentinel knows the master: {error}"))
    })?;
    Ok(address)
}

async fn ask(settings: &Settings, sentinel: &Address, master: &str) -> Result<Address> {
    let mut settings = settings.clone();
    (settings.username, settings.database) = (None, 0);
    settings.password = settings.sentinel_password.take();
    // If the name resolves to several sentinels, each of them knows the master.
    let ips = stream::resolve(sentinel).await?;
    let connection = handshake::open_plain(&settings, sentinel, &ips).await?;
    let mut get = redis::cmd("SENTINEL");
    get.arg("get-master-addr-by-name").arg(master);
    let reply = connection.query(&get).await.map_err(translate)?;
    if reply == Value::Nil {
        return Err(config(format!("it knows no master {master:?}")));
    }
    let address = redis::from_redis_value::<(String, u16)>(reply);
    let (host, port) = address.map_err(|_| unavailable("it gave no address"))?;
    Ok(Address { host, port })
}
