//! The numbered invariants of the architecture: each must name a test that exists.
//!
//! An invariant starts a line with its number in bold, `**I7**`, and goes on to the next blank line or the next
//! invariant; somewhere in it stands its test as a path and a name, ``(test: `crates/a/tests/b.rs::name`)``.

/// The document that states them.
pub(crate) const DOCUMENT: &str = "docs/ARCHITECTURE.md";

/// One complaint for each invariant without a test, with a test that is missing, or with a number used twice.
pub(crate) fn check(document: &str, text_of: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut findings = Vec::new();
    let invariants = invariants(document);
    for (idx, (number, text)) in invariants.iter().enumerate() {
        if invariants[..idx].iter().any(|(earlier, _)| earlier == number) {
            findings.push(format!("{number}: the number is used twice"));
        }
        let tests = tests_of(text);
        if tests.is_empty() {
            findings.push(format!("{number}: names no test, as in (test: `path.rs::name`)"));
        }
        let missing = tests.into_iter().filter(|test| !exists(test, &text_of));
        findings.extend(missing.map(|test| format!("{number}: there is no test {test}")));
    }
    findings
}

/// The number and the whole text of each invariant.
fn invariants(document: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    let mut is_inside = false;
    for line in document.lines() {
        if let Some(number) = number_of(line) {
            found.push((number.to_owned(), line.to_owned()));
            is_inside = true;
        } else if line.trim().is_empty() {
            is_inside = false;
        } else if is_inside && let Some((_, text)) = found.last_mut() {
            text.push(' ');
            text.push_str(line);
        }
    }
    found
}

/// `I7` where the line starts with `**I7**`, as a paragraph or as an item of a list.
fn number_of(line: &str) -> Option<&str> {
    let line = line.trim_start().trim_start_matches(['-', '*', ' ']);
    let (number, _) = line.split_once("**")?;
    let digits = number.strip_prefix('I')?;
    (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(number)
}

/// Everything in backticks between `(test` and the closing parenthesis.
fn tests_of(text: &str) -> Vec<&str> {
    let groups = text.split("(test").skip(1).map(|rest| rest.split(')').next().unwrap_or(rest));
    groups.flat_map(|group| group.split('`').skip(1).step_by(2)).collect()
}

/// Whether the file of `path.rs::name` exists and defines a function of that name.
fn exists(test: &str, text_of: impl Fn(&str) -> Option<String>) -> bool {
    let Some((path, name)) = test.split_once(".rs::") else { return false };
    let name = name.rsplit("::").next().unwrap_or(name);
    text_of(&format!("{path}.rs")).is_some_and(|text| text.contains(&format!("fn {name}(")))
}

#[cfg(test)]
fn complaints(document: &str) -> Vec<String> {
    check(document, |path| (path == "a/b.rs").then(|| "#[test]\nfn holds() {}\n".to_owned()))
}

#[test]
fn invariants_with_their_tests_pass() {
    let document = "**I1** one line (test: `a/b.rs::holds`).\n\n- **I2** two\n  lines (tests: `a/b.rs::tests::holds`, `a/b.rs::holds`).\n";
    assert!(complaints(document).is_empty(), "{:?}", complaints(document));
    assert!(complaints("Text about **Items**, **I** and `I1`.\n").is_empty());
}

#[test]
fn invariants_without_a_test_are_found() {
    let document = "**I1** a (test: `a/b.rs::gone`)\n**I2** b (test: `a/c.rs::holds`)\n**I3** c\n\n(test: `a/b.rs::holds`)\n\n\
                    **I1** d (test: `a/b.rs::holds`)\n";
    let expected = [
        "I1: there is no test a/b.rs::gone",
        "I2: there is no test a/c.rs::holds",
        "I3: names no test, as in (test: `path.rs::name`)",
        "I1: the number is used twice",
    ];
    assert_eq!(complaints(document), expected);
}
