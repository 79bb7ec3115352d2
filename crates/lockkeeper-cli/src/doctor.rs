//! `doctor`: checks a store for problems that make its locks unsafe.

use std::fmt::Write as _;

use lockkeeper::Severity;
use lockkeeper::text::visible;
use serde_json::json;

use crate::args;
use crate::failure::Failure;
use crate::output::{self, Paint, print};
use crate::store;

/// Prints the findings. Returns 0, 1 or 2: the exit code for the most severe one.
pub(crate) async fn doctor(args: &args::Doctor) -> Result<u8, Failure> {
    let url = store::url(&args.store)?;
    let findings = lockkeeper::diagnose(&url).await?;
    let paint = Paint::stdout();
    let mut text = String::new();
    for finding in &findings {
        if args.json {
            text += &output::json_line(&json!(finding));
            continue;
        }
        let (word, colour) = match finding.severity {
            Severity::Ok => ("OK  ", output::GREEN),
            Severity::Warn => ("WARN", output::YELLOW),
            Severity::Fail => ("FAIL", output::RED),
        };
        let _ = write!(text, "{}  {}", paint.paint(colour, word), visible(&finding.what));
        if let Some(advice) = &finding.advice {
            let _ = write!(text, ": {}", visible(advice));
        }
        text.push('\n');
    }
    print(&text)?;
    Ok(match findings.iter().map(|finding| finding.severity).max() {
        Some(Severity::Fail) => 2,
        Some(Severity::Warn) => 1,
        Some(Severity::Ok) | None => 0,
    })
}
