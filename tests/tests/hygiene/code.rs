//! Just enough of a lexer: Rust source with comments and literals blanked, and where its functions lie.

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function<'a> {
    pub(crate) name: &'a str,
    /// Line of `fn`, counted from 0.
    pub(crate) line_idx: usize,
    /// From the line of `fn` to that of the closing brace, both counted.
    pub(crate) num_lines: usize,
}

/// `source` with every byte of comments, strings and character literals turned into a blank; lines keep their numbers.
pub(crate) fn code_only(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let len = skipped_len(bytes, at);
        if len == 0 {
            out.push(bytes[at]);
            at += 1;
        } else {
            out.extend(bytes[at..at + len].iter().map(|&byte| if byte == b'\n' { b'\n' } else { b' ' }));
            at += len;
        }
    }
    String::from_utf8(out).expect("only whole characters are blanked")
}

/// How many bytes of comment or literal start at `at`; 0 where code stands there.
fn skipped_len(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let follows_word = at > 0 && is_word(bytes[at - 1]);
    match rest {
        [b'/', b'/', ..] => rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len()),
        [b'/', b'*', ..] => block_comment_len(rest),
        [b'"', ..] => quoted_len(rest, b'"'),
        [b'r', b'"' | b'#', ..] if !follows_word || bytes[at - 1] == b'b' => raw_string_len(rest),
        [b'\'', b'\\', ..] => quoted_len(rest, b'\''),
        [b'\'', ..] => char_len(rest),
        _ => 0,
    }
}

fn block_comment_len(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// The length up to the closing `quote`, where a backslash hides the byte after it.
fn quoted_len(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// 0 where `r#` starts a raw identifier.
fn raw_string_len(rest: &[u8]) -> usize {
    let num_hashes = rest[1..].iter().take_while(|&&byte| byte == b'#').count();
    if rest.get(1 + num_hashes) != Some(&b'"') {
        return 0;
    }
    let closing = [b"\"".as_slice(), &vec![b'#'; num_hashes]].concat();
    let body = &rest[num_hashes + 2..];
    let len = body.windows(closing.len()).position(|window| window == closing);
    len.map_or(rest.len(), |len| num_hashes + 2 + len + closing.len())
}

/// 0 where the quote starts a lifetime.
fn char_len(rest: &[u8]) -> usize {
    let char_len = match rest.get(1) {
        Some(byte) if *byte < 0x80 => 1,
        Some(byte) => byte.leading_ones() as usize,
        None => return 0,
    };
    if rest.get(1 + char_len) == Some(&b'\'') { char_len + 2 } else { 0 }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Where `word` stands alone in `text`, as byte offsets.
pub(crate) fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let bytes = text.as_bytes();
        let follows_word = at > 0 && is_word(bytes[at - 1]);
        !follows_word && !bytes.get(at + word.len()).is_some_and(|&byte| is_word(byte))
    })
}

/// The line of a byte offset, counted from 0.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count()
}

/// Every function with a body in `code`, which `code_only` made; nested ones count in the outer one too.
pub(crate) fn functions(code: &str) -> impl Iterator<Item = Function<'_>> {
    words(code, "fn").filter_map(|at| {
        let signature = code[at + 2..].trim_start();
        let name_len = signature.bytes().take_while(|&byte| is_word(byte)).count();
        let name = &signature[..name_len];
        let open = at + body_offset(&code[at..])?;
        let line_idx = line_of(code, at);
        let num_lines = line_of(code, open + block_len(&code[open..])) - line_idx + 1;
        (!name.is_empty()).then_some(Function { name, line_idx, num_lines })
    })
}

/// The offset of the brace that opens the body; none for a declaration.
fn body_offset(signature: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, byte) in signature.bytes().enumerate() {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' if depth == 0 => return None,
            b')' | b']' => depth -= 1,
            b';' if depth == 0 => return None,
            b'{' if depth == 0 => return Some(at),
            _ => {}
        }
    }
    None
}

/// The offset of the brace that closes the block which `code` opens with.
fn block_len(code: &str) -> usize {
    let mut depth = 0;
    for (at, byte) in code.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    code.len()
}

#[test]
fn literals_and_comments_are_blanked_and_lines_stay() {
    let source = "a /* b /* c */ d */ \"e\\\"{\" 'f' '\\'' r#\"g\"h\"# br\"i\" 'é' j // k\nl<'m>('n') r#fn";
    let code = code_only(source);
    assert_eq!(code.split_whitespace().collect::<Vec<_>>(), ["a", "b", "j", "l<'m>(", ")", "r#fn"]);
    assert_eq!((code.len(), line_of(&code, code.len())), (source.len(), 1));
}

#[test]
fn words_stand_alone() {
    assert_eq!(words("fn fna _fn (fn)", "fn").collect::<Vec<_>>(), [0, 12]);
}

#[test]
fn functions_have_their_names_and_lengths() {
    let code = "trait T {\n    fn declared(&self) -> [u8; 2];\n    fn defaulted() -> [u8; 2] {\n        [1, 2]\n    }\n}\n\
                fn one() {}\nstruct S(fn(u8));\nconst fn outer(f: fn(u8) -> u8)\nwhere\n{\n    fn inner() {}\n}\n";
    let found: Vec<(&str, usize, usize)> = functions(code).map(|f| (f.name, f.line_idx, f.num_lines)).collect();
    assert_eq!(found, [("defaulted", 2, 3), ("one", 6, 1), ("outer", 8, 5), ("inner", 11, 1)]);
}
