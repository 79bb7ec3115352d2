//! Queries sentinels for the address of the master.

use futures_util::future::select_ok;
use lockkeeper_core::{Error, Result};
use redis::Value;

use super::settings::{Address, Settings};
use super::{handshake, stream};
use crate::error::{at, config, translate, unavailable};

/// Queries all sentinels concurrently and returns the first reply.
pub(super) async fn find_master(
    settings: &Settings,
    sentinels: &[Address],
    master: &str,
) -> Result<Address> {
    let queries = sentinels.iter().map(|sentinel| {
        Box::pin(async move {
            let reply = query(settings, sentinel, master);
            let reply = tokio::time::timeout(settings.connect_timeout, reply).await;
            let reply = reply.unwrap_or_else(|_| Err(unavailable("no answer in time")));
            reply.map_err(|error| at(sentinel, &error))
        })
    });
    let (address, _) = select_ok(queries).await.map_err(|error| {
        Error::new(error.kind(), format!("no sentinel reports the master {master:?}: {error}"))
    })?;
    Ok(address)
}

async fn query(settings: &Settings, sentinel: &Address, master: &str) -> Result<Address> {
    let mut settings = settings.clone();
    (settings.username, settings.database) = (None, 0);
    settings.password = settings.sentinel_password.take();
    // If the name resolves to several sentinels, any of them will do.
    let endpoints = stream::resolve(sentinel).await?;
    let connection = handshake::open_plain(&settings, sentinel, &endpoints).await?;
    let mut get = redis::cmd("SENTINEL");
    get.arg("get-master-addr-by-name").arg(master);
    let reply = connection.query(&get).await.map_err(translate)?;
    if reply == Value::Nil {
        return Err(config("unknown master: check the name after the hosts in the URL"));
    }
    let address = redis::from_redis_value::<(String, u16)>(reply);
    let (host, port) = address.map_err(|_| unavailable("the sentinel sent no address"))?;
    Ok(Address::tcp(host, port))
}
