//! What makes locks on a store wrong, for whoever operates it.

use lockkeeper_core::{ErrorKind, Finding, Result};

use crate::open;

/// Looks for what makes locks on the store of a URL wrong: whether it can be reached, what it may forget,
/// who else could interfere.
///
/// It connects and reads; it takes no lock and changes nothing, except that a missing directory is made.
/// What it does not find may still be wrong.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) for a wrong URL, or a store that this build does not have. That a store cannot
/// be reached is a finding.
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

/// Diagnoses a store that has no checks of its own: whether it can be opened.
async fn by_opening(url: &str) -> Result<Vec<Finding>> {
    match open::open(url).await {
        Ok(_) => Ok(vec![Finding::ok("it can be opened")]),
        Err(error) if error.kind() == ErrorKind::Config => Err(error),
        Err(error) => Ok(vec![Finding::fail(error.to_string(), "see that it can be reached")]),
    }
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use super::*;
    use crate::Severity;

    #[tokio::test]
    async fn a_store_that_needs_no_examination_is_opened() {
        let findings = diagnose("memory:").await.unwrap();
        assert!(findings.iter().all(|finding| finding.severity == Severity::Ok));
        assert_eq!(diagnose("nosuch:").await.unwrap_err().kind(), ErrorKind::Config);
    }
}
