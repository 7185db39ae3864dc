//! A table of text: drawn with lines on a terminal, aligned columns in a pipe.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{ContentArrangement, Table as Drawn};

/// A table of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    #[must_use]
    pub fn new(header: &[&str]) -> Self {
        Self { header: header.iter().map(|&name| name.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// The table as text, ending in a line feed.
    #[must_use]
    pub fn to_text(&self, on_terminal: bool) -> String {
        if on_terminal { self.drawn() } else { self.plain() }
    }

    fn drawn(&self) -> String {
        let mut table = Drawn::new();
        table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
        table.set_header(&self.header);
        for row in &self.rows {
            table.add_row(row);
        }
        format!("{table}\n")
    }

    fn plain(&self) -> String {
        let lines = || [&self.header].into_iter().chain(&self.rows);
        let num_columns = lines().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| lines().filter_map(|l| l.get(column)).map(|c| c.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..num_columns).map(width).collect();
        let mut text = String::new();
        for line in lines() {
            let cells = line.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_gets_aligned_columns_and_a_terminal_gets_lines() {
        let mut table = Table::new(&["name", "x"]);
        table.push(vec!["a".to_owned(), "10".to_owned()]);
        assert_eq!(table.to_text(false), "name  x\na     10\n");
        assert!(table.to_text(true).contains('│'));
    }
}
