//! Checks a server for problems that make its locks unsafe.

use lockkeeper_core::{ErrorKind, Finding, Result};
use tokio_postgres::Row;

use crate::backend::Postgres;
use crate::config::Settings;

const SERVER: &str = include_str!("diagnose/server.sql");

/// Checks the server of a URL for problems that make its locks unsafe: whether it can be reached, a pooler or a standby
/// in its place, TLS that an attacker can turn off, how many locks and connections it has left.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) for a wrong URL. All else is a finding.
pub async fn diagnose(url: &str) -> Result<Vec<Finding>> {
    let settings = Settings::parse(url)?;
    let mut findings = Vec::new();
    if settings.can_be_downgraded() {
        findings.push(Finding::warn(
            "TLS is used only if the server offers it (sslmode=prefer): an attacker between client and server can turn it off",
            "say sslmode=require in the URL, which checks the certificate, too",
        ));
    }
    let store = Postgres::from_settings_blocking(settings).await?;
    // A configuration error says what to do; any other means that the server cannot be reached.
    let permit = match store.query_permit().await {
        Ok(permit) => permit,
        Err(error) => {
            let advice = match error.kind() {
                ErrorKind::Config => "do as it says",
                _ => "see that the server runs and that the URL is right",
            };
            findings.push(Finding::fail(error.to_string(), advice));
            return Ok(findings);
        }
    };
    findings.push(Finding::ok("reachable, and the login is right"));
    findings.push(Finding::ok("a primary, with no pooler in between"));
    match permit.query(SERVER, Vec::new()).await {
        Ok(rows) => findings.extend(rows.first().into_iter().flat_map(check_server)),
        Err(error) => findings.push(Finding::warn(
            format!("its settings cannot be read: {error}"),
            "let the user read pg_locks and pg_stat_activity",
        )),
    }
    Ok(findings)
}

fn check_server(row: &Row) -> Vec<Finding> {
    let version: String = row.get("version");
    let mut findings = vec![Finding::ok(format!(
        "PostgreSQL {version}, which ends silent sessions (idle_session_timeout)"
    ))];
    findings.push(room(
        "locks",
        (row.get("locks"), row.get("lock_room")),
        "when it is full every statement on the server fails: raise max_locks_per_transaction",
    ));
    findings.push(room(
        "connections",
        (row.get("connections"), row.get("connection_room")),
        "raise max_connections, or lower max_connections in the URLs of its clients",
    ));
    findings.push(if row.get::<_, String>("fsync") == "on" {
        Finding::ok("fences survive a crash (fsync is on)")
    } else {
        let advice = "turn fsync on, or do without fences (fence=off)";
        Finding::warn("a crash may set fences back: fsync is off", advice)
    });
    findings
}

/// Checks how much of a resource is left: a quarter should be.
fn room(what: &str, (used, all): (i64, i64), advice: &str) -> Finding {
    let found = format!("{used} of about {all} {what} in use");
    if used > all - all / 4 { Finding::warn(found, advice) } else { Finding::ok(found) }
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::Severity;

    use super::*;

    #[test]
    fn a_quarter_of_the_room_should_be_left() {
        assert_eq!(room("locks", (0, 6400), "").severity, Severity::Ok);
        assert_eq!(room("locks", (4800, 6400), "").severity, Severity::Ok);
        assert_eq!(room("locks", (4801, 6400), "").severity, Severity::Warn);
    }
}
