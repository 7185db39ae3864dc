//! Rules over bytes and lines, whatever the language.

use crate::code;
use crate::tree::{File, Finding};

const MAX_LINES: usize = 600;
const MAX_BINARY_BYTES: usize = 1 << 20;
/// Compressed kernels of one source file for one kind of GPU: there is nothing to split them by.
const MAX_IMAGE_BYTES: usize = 2 << 20;
const IMAGES: &str = "crates/attn-cuda/images/";

/// Source files that may be longer: path, reason.
pub(crate) const LONG_FILES: &[(&str, &str)] = &[];

/// A binary file over 1 MiB does not belong into the history.
pub(crate) fn no_large_binary(file: &File) -> Vec<Finding> {
    let most = if file.path.starts_with(IMAGES) { MAX_IMAGE_BYTES } else { MAX_BINARY_BYTES };
    let is_large = file.is_binary && file.num_bytes > most;
    is_large
        .then(|| file.finding(0, format!("binary file of {} bytes (at most {} MiB)", file.num_bytes, most >> 20)))
        .into_iter()
        .collect()
}

/// A source file that nobody reads in one go.
pub(crate) fn no_long_file(file: &File) -> Vec<Finding> {
    let is_waived = LONG_FILES.iter().any(|(path, _)| *path == file.path);
    let what = || format!("{} lines (at most {MAX_LINES}): split the file by what it owns", file.text.lines().count());
    (is_long(file) && !is_waived).then(|| file.finding(MAX_LINES, what())).into_iter().collect()
}

/// Whether a source file has more lines than allowed, waived or not.
pub(crate) fn is_long(file: &File) -> bool {
    file.is_one_of(&[".rs", ".cu", ".cuh"]) && file.text.lines().count() > MAX_LINES
}

/// A note to oneself: solve it, or open an issue.
pub(crate) fn no_leftover_note(file: &File) -> Vec<Finding> {
    let notes = [concat!("FIX", "ME"), concat!("XX", "X")];
    let mut findings = Vec::new();
    for note in notes {
        let found = code::words(&file.text, note);
        findings.extend(found.map(|at| file.finding(code::line_of(&file.text, at), format!("leftover note {note}"))));
    }
    findings
}

/// A path of one machine, which no other has.
pub(crate) fn no_machine_path(file: &File) -> Vec<Finding> {
    let folders = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/tm", "p/")];
    let mut findings = Vec::new();
    for folder in folders {
        for (at, _) in file.text.match_indices(folder) {
            let before = file.text[..at].chars().next_back();
            let is_absolute = !before.is_some_and(|c| c.is_alphanumeric() || "_-.})]*".contains(c));
            let after = file.text[at + folder.len()..].chars().next();
            if is_absolute && after.is_some_and(char::is_alphabetic) {
                findings
                    .push(file.finding(code::line_of(&file.text, at), format!("path of one machine, under {folder}")));
            }
        }
    }
    findings
}

/// The host of a package registry: name packages, and let each client know where they come from.
pub(crate) fn no_registry_host(file: &File) -> Vec<Finding> {
    let hosts = [
        concat!("crates", ".io"),
        concat!("py", "pi.org"),
        concat!("python", "hosted.org"),
        concat!("npm", "js"),
        concat!("proxy.go", "lang.org"),
    ];
    if file.path == "Cargo.lock" {
        return Vec::new();
    }
    let found = |line: &str| hosts.iter().copied().find(|host| line.contains(host));
    let lines = file.text.lines().enumerate();
    lines.filter_map(|(idx, line)| Some(file.finding(idx, format!("registry host {}", found(line)?)))).collect()
}

/// No tab, no carriage return, no blank at a line's end; one line feed at the file's end, except in data.
pub(crate) fn clean_whitespace(file: &File) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line_idx, line) in file.text.split('\n').enumerate() {
        if line.contains('\t') {
            findings.push(file.finding(line_idx, "tab"));
        }
        if line.ends_with(char::is_whitespace) {
            findings.push(file.finding(line_idx, "blank or carriage return at the line's end"));
        }
    }
    let ends_well = file.text.ends_with('\n') && !file.text.ends_with("\n\n");
    if !ends_well && !file.text.is_empty() && !file.is_one_of(&[".json", ".svg"]) {
        findings.push(file.finding(file.text.lines().count() - 1, "the file does not end in exactly one line feed"));
    }
    findings
}

#[cfg(test)]
fn lines(rule: crate::Rule, path: &str, text: &str) -> Vec<usize> {
    let findings = rule(&File::new(path, text.as_bytes().to_vec()));
    let mut lines: Vec<usize> = findings.iter().map(|finding| finding.line).collect();
    lines.sort_unstable();
    lines
}

#[test]
fn large_binaries_are_found_and_large_texts_are_not() {
    assert_eq!(no_large_binary(&File::new("a.bin", vec![0; MAX_BINARY_BYTES + 1])).len(), 1);
    assert_eq!(no_large_binary(&File::new("a.bin", vec![0; MAX_BINARY_BYTES])).len(), 0);
    assert_eq!(no_large_binary(&File::new("a.json", vec![b'1'; MAX_BINARY_BYTES + 1])).len(), 0);
}

#[test]
fn long_sources_are_found_and_long_data_is_not() {
    let [long, short] = [MAX_LINES + 1, MAX_LINES].map(|num_lines| "x\n".repeat(num_lines));
    assert_eq!(lines(no_long_file, "a.cuh", &long), [MAX_LINES + 1]);
    assert!(lines(no_long_file, "a.rs", &short).is_empty());
    assert!(lines(no_long_file, "a.json", &long).is_empty());
}

#[test]
fn leftover_notes_are_found_and_longer_words_are_not() {
    assert_eq!(lines(no_leftover_note, "a.md", concat!("a\n// FIX", "ME: b\nXX", "X\n")), [2, 3]);
    assert!(lines(no_leftover_note, "a.md", concat!("XX", "XX 0xXX", "X1 FIX", "MEs\n")).is_empty());
}

#[test]
fn machine_paths_are_found_and_other_paths_are_not() {
    assert_eq!(lines(no_machine_path, "a", concat!("a\n`/tm", "p/x`\n\"/ho", "me/me\"\n")), [2, 3]);
    assert!(
        lines(no_machine_path, "a", concat!("docs/wo", "rk/x /tm", "p/ $DIR}/ro", "ot/x /tm", "p/$NAME\n")).is_empty()
    );
}

#[test]
fn registry_hosts_are_found_outside_the_lock_file() {
    let text = concat!("a\nhttps://crates", ".io/x\n");
    assert_eq!(lines(no_registry_host, "README.md", text), [2]);
    assert!(lines(no_registry_host, "Cargo.lock", text).is_empty());
    assert!(lines(no_registry_host, "README.md", "crates and their documentation\n").is_empty());
}

#[test]
fn unclean_whitespace_is_found() {
    assert_eq!(lines(clean_whitespace, "a", "a\n\tb\nc \nd\r\n"), [2, 3, 4]);
    assert_eq!(lines(clean_whitespace, "a", "a\nb"), [2]);
    assert_eq!(lines(clean_whitespace, "a", "a\n\n"), [2]);
    assert!(lines(clean_whitespace, "a", "a\n\n  b\n").is_empty());
    assert!(lines(clean_whitespace, "a.json", "{}").is_empty());
}
