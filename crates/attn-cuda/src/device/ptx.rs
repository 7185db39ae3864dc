//! Owns the cutting of a module's text to one kernel. The driver compiles all that it is given, a second or two for each kernel and
//! some fifty of them in a file, of which a model needs a few.

/// How an entry point begins, in text that has one statement a line.
const ENTRY: &str = ".visible .entry ";

/// The text with `kernel` as its only entry point: what entry points share stays. `None` where it has no such kernel.
pub(super) fn only_kernel(text: &str, kernel: &str) -> Option<String> {
    let mut kept = String::new();
    let mut has_kernel = false;
    // Within an entry point: braces that are open, and whether its body has begun.
    let mut depth = 0;
    let mut body = Body::Outside;
    for line in text.lines() {
        if let (Body::Outside, Some(head)) = (body, line.strip_prefix(ENTRY)) {
            let is_kernel = head.split_once('(').is_some_and(|(name, _)| name == kernel);
            has_kernel |= is_kernel;
            body = Body::Head { is_kept: is_kernel };
        }
        if body.is_kept() {
            kept.push_str(line);
            kept.push('\n');
        }
        if let Body::Head { is_kept } | Body::Inside { is_kept } = body {
            depth += line.matches('{').count();
            depth = depth.checked_sub(line.matches('}').count())?;
            body = match (body, depth) {
                (Body::Inside { .. }, 0) => Body::Outside,
                (Body::Head { .. }, 0) => body,
                _ => Body::Inside { is_kept },
            };
        }
    }
    has_kernel.then_some(kept)
}

/// Where a line is.
#[derive(Clone, Copy)]
enum Body {
    /// In what all entry points share.
    Outside,
    /// In an entry point, before its first brace.
    Head { is_kept: bool },
    /// Behind it.
    Inside { is_kept: bool },
}

impl Body {
    const fn is_kept(self) -> bool {
        match self {
            Self::Outside => true,
            Self::Head { is_kept } | Self::Inside { is_kept } => is_kept,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::module::ImageKind;
    use super::*;
    use crate::images::ENTRIES;

    const TEXT: &str = ".version 7.4\n.global .u32 state;\n.func check(\n.param .b32 x\n)\n{\nret;\n}\n\
        .visible .entry one(\n.param .b64 p\n)\n.maxntid 32\n{\n{ .reg .b64 t; }\nret;\n}\n\
        .visible .entry one_more(\n.param .b64 p\n)\n{\ncall check;\n}\n.global .u32 last;\n";

    #[test]
    fn one_kernel_is_left_and_what_all_share() {
        let one = only_kernel(TEXT, "one").unwrap();
        assert_eq!(
            one,
            TEXT.replace(
                &TEXT[TEXT.find(".visible .entry one_more").unwrap()..TEXT.find(".global .u32 last").unwrap()],
                ""
            )
        );
        let more = only_kernel(TEXT, "one_more").unwrap();
        assert!(
            more.contains("call check;") && more.contains(".func check(") && !more.contains(".entry one("),
            "{more}"
        );
        assert!(more.ends_with(".global .u32 last;\n"));
        assert_eq!(only_kernel(TEXT, "on"), None);
        assert_eq!(only_kernel("", "one"), None);
        assert_eq!(only_kernel("}\n.visible .entry one(\n}\n", "one"), None, "braces do not match");
    }

    #[test]
    fn every_shipped_text_has_each_of_its_kernels_once() {
        for entry in ENTRIES {
            // Two of a text are enough: all are cut alike.
            if !entry.name.ends_with("d64") && !entry.name.ends_with("d128_general") && entry.head_dim_qk != 0 {
                continue;
            }
            for source in [entry.module, entry.checked] {
                for image in source.images.iter().filter(|image| image.kind == ImageKind::Ptx) {
                    let text = String::from_utf8(image.unpack().unwrap()).unwrap();
                    let cut =
                        only_kernel(&text, entry.name).unwrap_or_else(|| panic!("{}: {}", image.name, entry.name));
                    let num_entries =
                        |text: &str| text.lines().filter(|line| line.starts_with(".visible .entry ")).count();
                    assert_eq!(num_entries(&cut), 1, "{}: {}", image.name, entry.name);
                    assert!(cut.len() < text.len() || num_entries(&text) == 1);
                    let shared = &text[..text.find(".visible .entry ").unwrap()];
                    assert!(cut.starts_with(shared) && cut.ends_with("}\n"), "{}: {}", image.name, entry.name);
                    assert_eq!(cut.matches('{').count(), cut.matches('}').count());
                }
            }
        }
    }
}
