//! Checks a server for problems that make its locks unsafe.

use lockkeeper_core::{ErrorKind, Finding, Result};
use tokio_postgres::Row;

use crate::backend::Postgres;
use crate::config::{FenceSource, Settings};
use crate::name_table::{NameTable, Rights};

const SERVER: &str = include_str!("diagnose/server.sql");

/// Checks the server of a URL for problems that make its locks unsafe: an unreachable server, a pooler or a standby in its
/// place, TLS that an attacker can turn off, fences that this role cannot draw, a lack of free locks or connections, and
/// `fsync`. Changes nothing on the server.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) for a malformed URL. Every other problem is a finding.
pub async fn diagnose(url: &str) -> Result<Vec<Finding>> {
    let settings = Settings::parse(url)?;
    let mut findings = Vec::new();
    let has_fences = settings.options.fences != FenceSource::Off;
    if settings.can_be_downgraded() {
        findings.push(Finding::warn(
            "TLS is used only if the server offers it (sslmode=prefer): an attacker between client and server can turn it off",
            "set sslmode=require in the URL, which also verifies the certificate",
        ));
    }
    let store = Postgres::from_settings_blocking(settings).await?;
    // The message of a configuration error states what to do. Any other error means that the server cannot be reached.
    let permit = match store.query_permit().await {
        Ok(permit) => permit,
        Err(error) => {
            let advice = match error.kind() {
                ErrorKind::Config => "change the configuration as the message states",
                _ => "check that the server is running and that the URL is correct",
            };
            findings.push(Finding::fail(error.to_string(), advice));
            return Ok(findings);
        }
    };
    findings.push(Finding::ok("reachable, and the login is right"));
    findings.push(Finding::ok("a primary server, with no pooler in front of it"));
    match store.check_fences(&permit).await {
        Ok(()) if has_fences => findings.push(Finding::ok("this role can draw fences")),
        Ok(()) => {}
        Err(error) => findings.push(Finding::fail(
            error.to_string(),
            "follow the message, or turn fences off (fence=off)",
        )),
    }
    match permit.query(SERVER, Vec::new()).await {
        Ok(rows) => findings.extend(rows.first().into_iter().flat_map(check_server)),
        Err(error) => findings.push(Finding::warn(
            format!("the settings of the server cannot be read: {error}"),
            "allow the user to read pg_locks and pg_stat_activity",
        )),
    }
    if let Some(names) = store.names() {
        match names.rights(&permit).await {
            Ok(rights) => findings.push(check_names(names, &rights)),
            Err(error) => findings.push(Finding::warn(
                format!("the privileges on the table of names cannot be read: {error}"),
                "allow the user to read the system catalogs, or set names_table=off",
            )),
        }
    }
    Ok(findings)
}

fn check_names(names: &NameTable, rights: &Rights) -> Finding {
    let table = names.name();
    if let Some(reason) = rights.distrust() {
        let found = format!("the table of names {table} is not used: {reason}");
        return Finding::fail(found, names.advice(rights));
    }
    if rights.usable {
        return Finding::ok(format!("names of locks are listed from the table {table}"));
    }
    if !rights.exists && rights.creatable {
        return Finding::ok(format!(
            "names of locks are listed from the table {table}, created on first use"
        ));
    }
    let what = if rights.exists { "use" } else { "create" };
    let found =
        format!("`ls` cannot show the names of locks: this role may not {what} the table {table}");
    Finding::warn(found, names.advice(rights))
}

fn check_server(row: &Row) -> Vec<Finding> {
    let version: String = row.get("version");
    let mut findings = vec![Finding::ok(format!(
        "PostgreSQL {version}, which ends idle sessions (idle_session_timeout)"
    ))];
    findings.push(room(
        "locks",
        (row.get("locks"), row.get("lock_room")),
        "raise max_locks_per_transaction: when the lock table is full, statements fail on the whole server",
    ));
    findings.push(room(
        "connections",
        (row.get("connections"), row.get("connection_room")),
        "raise max_connections of the server, or lower max_connections in the URLs of its clients",
    ));
    findings.push(if row.get::<_, String>("fsync") == "on" {
        Finding::ok("fences survive a crash (fsync is on)")
    } else {
        let advice = "turn fsync on, or turn fences off (fence=off)";
        Finding::warn("fences may repeat after a crash of the server: fsync is off", advice)
    });
    findings
}

/// Warns if less than a quarter of a resource is left.
fn room(what: &str, (used, all): (i64, i64), advice: &str) -> Finding {
    let found = format!("{used} of about {all} {what} in use");
    if used > all - all / 4 { Finding::warn(found, advice) } else { Finding::ok(found) }
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::Severity;

    use super::*;

    #[test]
    fn less_than_a_quarter_of_free_locks_is_a_warning() {
        assert_eq!(room("locks", (0, 6400), "").severity, Severity::Ok);
        assert_eq!(room("locks", (4800, 6400), "").severity, Severity::Ok);
        assert_eq!(room("locks", (4801, 6400), "").severity, Severity::Warn);
    }
}
