//! Rules over Rust code, with comments and literals blanked.

use crate::code::{self, Function};
use crate::tree::{File, Finding};

const MAX_FUNCTION_LINES: usize = 80;

/// Functions that may be longer: path, name, reason.
pub(crate) const LONG_FUNCTIONS: &[(&str, &str, &str)] = &[];

/// Files, or folders with a slash at the end, that may hold unsafe code: path, reason.
const UNSAFE_ALLOWED: &[(&str, &str)] = &[
    ("crates/attn-reference/src/cpu/isa/", "SIMD intrinsics"),
    ("crates/attn-cuda/src/device/", "calls of the driver"),
    ("crates/attn-cuda/src/params.rs", "the promise that structs have the kernels' layout"),
    ("crates/attn-cuda/src/launches.rs", "kernel launches"),
];

/// Code that waits for its author, or a test that nobody runs.
pub(crate) fn no_leftover_code(file: &File) -> Vec<Finding> {
    let code = code_of(file);
    let mut findings = Vec::new();
    for needle in ["todo!(", "unimplemented!(", "dbg!(", "#[ignore"] {
        let found = code.match_indices(needle);
        findings.extend(found.map(|(at, _)| file.finding(code::line_of(&code, at), format!("leftover {needle}"))));
    }
    findings
}

/// Unsafe code outside the files that are reviewed for it.
pub(crate) fn unsafe_only_where_allowed(file: &File) -> Vec<Finding> {
    let is_allowed = |(allowed, _): &(&str, &str)| {
        file.path == *allowed || (allowed.ends_with('/') && file.path.starts_with(allowed))
    };
    if UNSAFE_ALLOWED.iter().any(is_allowed) {
        return Vec::new();
    }
    let code = code_of(file);
    let lines = code::words(&code, "unsafe").map(|at| code::line_of(&code, at));
    lines.map(|line_idx| file.finding(line_idx, "unsafe code outside the allow list")).collect()
}

/// An unsafe block or implementation without its reason.
pub(crate) fn unsafe_says_why(file: &File) -> Vec<Finding> {
    let code = code_of(file);
    let lines: Vec<&str> = file.text.lines().collect();
    let needs_reason = |at: usize| {
        let rest = code[at + "unsafe".len()..].trim_start();
        rest.starts_with('{') || rest.starts_with("impl")
    };
    let unsafe_lines = code::words(&code, "unsafe").filter(|&at| needs_reason(at)).map(|at| code::line_of(&code, at));
    let unexplained = unsafe_lines.filter(|&line_idx| !has_reason(&lines, line_idx));
    unexplained.map(|line_idx| file.finding(line_idx, "unsafe code without a SAFETY comment before it")).collect()
}

/// Whether a SAFETY comment stands on the line, or above it in the same statement or its comment.
fn has_reason(lines: &[&str], line_idx: usize) -> bool {
    let is_reason = |line: &str| line.contains("// SAFETY:");
    let mut above = lines[..line_idx].iter().rev().take_while(|line| {
        let line = line.trim();
        line.starts_with("//") || !(line.is_empty() || line.ends_with([';', '}']))
    });
    is_reason(lines[line_idx]) || above.any(|line| is_reason(line))
}

/// A function that does not fit on a screen or two.
pub(crate) fn no_long_function(file: &File) -> Vec<Finding> {
    let is_waived = |name: &str| LONG_FUNCTIONS.iter().any(|(path, waived, _)| *path == file.path && *waived == name);
    let found = long_functions(file).filter(|function| !is_waived(&function.name));
    let what = |f: &LongFunction| format!("{} has {} lines (at most {MAX_FUNCTION_LINES})", f.name, f.num_lines);
    found.map(|function| file.finding(function.line_idx, what(&function))).collect()
}

/// A function over the limit, waived or not.
pub(crate) struct LongFunction {
    pub(crate) name: String,
    line_idx: usize,
    num_lines: usize,
}

/// The functions of a file that are over the limit.
pub(crate) fn long_functions(file: &File) -> impl Iterator<Item = LongFunction> {
    let code = code_of(file);
    let to_long = |Function { name, line_idx, num_lines }: Function<'_>| LongFunction {
        name: name.to_owned(),
        line_idx,
        num_lines,
    };
    let long: Vec<LongFunction> =
        code::functions(&code).filter(|function| function.num_lines > MAX_FUNCTION_LINES).map(to_long).collect();
    long.into_iter()
}

/// `lib.rs` is the table of contents: documentation, modules and re-exports.
pub(crate) fn lib_has_no_function(file: &File) -> Vec<Finding> {
    if !file.path.ends_with("src/lib.rs") {
        return Vec::new();
    }
    let code = code_of(file);
    let what = |name: &str| format!("function {name} in lib.rs: move it to a module");
    code::functions(&code).map(|function| file.finding(function.line_idx, what(function.name))).collect()
}

/// Empty for what is not Rust.
fn code_of(file: &File) -> String {
    if file.is_one_of(&[".rs"]) { code::code_only(&file.text) } else { String::new() }
}

#[cfg(test)]
fn lines(rule: crate::Rule, path: &str, text: &str) -> Vec<usize> {
    let findings = rule(&File::new(path, text.as_bytes().to_vec()));
    let mut lines: Vec<usize> = findings.iter().map(|finding| finding.line).collect();
    lines.sort_unstable();
    lines
}

#[test]
fn leftover_code_is_found_and_mentions_are_not() {
    assert_eq!(
        lines(no_leftover_code, "a.rs", "todo!()\n#[ignore = \"slow\"]\ndbg!(1)\nunimplemented!()\n"),
        [1, 2, 3, 4]
    );
    assert!(lines(no_leftover_code, "a.rs", "// todo!()\nlet a = \"dbg!(1)\";\n").is_empty());
    assert!(lines(no_leftover_code, "a.md", "todo!()\n").is_empty());
}

#[test]
fn unsafe_code_is_found_outside_the_allow_list() {
    let text = "#![forbid(unsafe_code)]\nunsafe fn a() {}\n";
    assert_eq!(lines(unsafe_only_where_allowed, "crates/kvpool/src/a.rs", text), [2]);
    assert!(lines(unsafe_only_where_allowed, "crates/attn-reference/src/cpu/isa/simd.rs", text).is_empty());
    assert!(lines(unsafe_only_where_allowed, "a.rs", "#![forbid(unsafe_code)]\n// unsafe\n").is_empty());
}

#[test]
fn unsafe_blocks_without_a_reason_are_found() {
    let bare =
        "fn a() {\n    // SAFETY: for b.\n    unsafe { b() };\n    unsafe { c() };\n}\nunsafe impl Send for D {}\n";
    assert_eq!(lines(unsafe_says_why, "a.rs", bare), [4, 6]);
    let explained = "// SAFETY: long,\n// and so on.\nlet a =\n    unsafe { b() };\nlet c = unsafe { d() }; // SAFETY: e.\nunsafe fn f() {}\n";
    assert!(lines(unsafe_says_why, "a.rs", explained).is_empty());
}

#[test]
fn long_functions_are_found() {
    let of = |num_lines: usize| format!("\nfn a() {{\n{}}}\n", "b();\n".repeat(num_lines - 2));
    assert_eq!(lines(no_long_function, "a.rs", &of(MAX_FUNCTION_LINES + 1)), [2]);
    assert!(lines(no_long_function, "a.rs", &of(MAX_FUNCTION_LINES)).is_empty());
}

#[test]
fn functions_in_lib_are_found_and_elsewhere_are_not() {
    let text = "//! fn in documentation {}\npub mod a;\npub fn b() {}\n";
    assert_eq!(lines(lib_has_no_function, "crates/a/src/lib.rs", text), [3]);
    assert!(lines(lib_has_no_function, "crates/a/src/b.rs", text).is_empty());
    assert!(lines(lib_has_no_function, "crates/a/src/lib.rs", "pub mod a;\npub use a::B;\n").is_empty());
}
