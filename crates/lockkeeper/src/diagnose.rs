//! Checks of a store, by URL.

use lockkeeper_core::{ErrorKind, Finding, Result};

use crate::open;

/// Checks the store that a URL names for problems that make its locks unsafe: whether it is reachable, whether it can
/// lose data, and whether other clients can interfere.
///
/// Acquires no lock and changes nothing, except that it creates a missing directory of the file store. An empty result
/// is no proof that the store is safe.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) for a malformed URL or a store that this build does not support. An unreachable store
/// is a finding.
pub async fn diagnose(url: &str) -> Result<Vec<Finding>> {
    let scheme = open::scheme_of(url)?;
    match scheme.as_str() {
        scheme if open::is_registered(scheme) => by_opening(url).await,
        #[cfg(feature = "file")]
        "file" => lockkeeper_file::diagnose(url),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => lockkeeper_postgres::diagnose(url).await,
        #[cfg(feature = "redis")]
        scheme if scheme.starts_with("redis") || scheme == "redlock" => {
            lockkeeper_redis::diagnose(url).await
        }
        _ => by_opening(url).await,
    }
}

/// Checks a store without specific checks: reports whether it can be opened.
async fn by_opening(url: &str) -> Result<Vec<Finding>> {
    match open::open(url).await {
        Ok(_) => Ok(vec![Finding::ok("the store can be opened")]),
        Err(error) if error.kind() == ErrorKind::Config => Err(error),
        Err(error) => Ok(vec![Finding::fail(
            error.to_string(),
            "check that the store is running and reachable",
        )]),
    }
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use super::*;
    use crate::Severity;

    #[tokio::test]
    async fn a_store_without_specific_checks_is_opened() {
        let findings = diagnose("memory:").await.unwrap();
        assert!(findings.iter().all(|finding| finding.severity == Severity::Ok));
        assert_eq!(diagnose("nosuch:").await.unwrap_err().kind(), ErrorKind::Config);
    }
}
