//! A plain table: columns as wide as their widest cell, two spaces apart.

/// Lays out `rows` under `header`; the last column is not padded.
pub(crate) fn layout<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let mut widths = header.map(str::len);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.len());
        }
    }
    let mut text = line(header, widths);
    for row in rows {
        text.push('\n');
        text.push_str(&line(row.each_ref().map(String::as_str), widths));
    }
    text
}

fn line<const N: usize>(cells: [&str; N], widths: [usize; N]) -> String {
    let padded: Vec<String> = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
    padded.join("  ").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["fmt".to_owned(), "ok".to_owned()], ["documentation".to_owned(), "FAILED".to_owned()]];
        assert_eq!(
            layout(["step", "result"], &rows),
            "step           result\nfmt            ok\ndocumentation  FAILED"
        );
    }

    #[test]
    fn no_line_ends_in_blanks() {
        assert_eq!(layout(["configuration", "note"], &[["a".to_owned(), String::new()]]), "configuration  note\na");
    }
}
