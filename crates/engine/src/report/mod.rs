//! What the commands print: tables, what backends can do, plans, one-line errors.

mod capabilities;
mod explain;
mod table;

use std::error::Error;

use attn_metadata::Selection;

pub use capabilities::{BackendRow, capability_rows, capability_text};
pub use explain::{ExplainError, ExplainRequest, Explained, explain};
pub use table::Table;

/// What was chosen, in one line: one name, or who prefills and who decodes.
#[must_use]
pub fn chosen(selection: &Selection) -> String {
    selection.to_string().lines().next().unwrap_or_default().to_owned()
}

/// An error and its causes in one line, joined by `": "`; a cause that its effect already quotes is not repeated.
#[must_use]
pub fn error_chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.ends_with(&text) {
            line = format!("{line}: {text}");
        }
        cause = error.source();
    }
    one_line(&line)
}

/// Text without line feeds, for a message that is one line.
#[must_use]
pub fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_follow_their_effects_in_one_line() {
        let error = Outer(std::io::Error::other("in\nner"));
        assert_eq!(error_chain(&error), "outer: in ner");
    }
}
