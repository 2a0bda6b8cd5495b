//! Comments that begin without a subject. There must be none.
//!
//! A comment says what a thing is or does, and begins with a noun or a verb. A comment that begins
//! with a word of [`HEADLESS`] has no subject.

use std::{fs, path::Path};

use anyhow::ensure;
use ra_ap_rustc_lexer::{DocStyle, FrontmatterAllowed, TokenKind, tokenize};

use crate::Workspace;

/// Words with which a comment must not begin.
const HEADLESS: &[&str] = &[
    "What", "Whether", "Where", "Which", "Who", "How", "As", "Of", "By", "Those", "That", "So",
    "Because",
];

pub(crate) fn run() -> anyhow::Result<()> {
    let mut found = Found::default();
    read_folder(&Workspace::find()?.root, Path::new(""), &mut found)?;
    let Found { blocks, headless } = found;
    println!(
        "{} of {blocks} comment blocks begin without a subject",
        headless.len()
    );
    ensure!(
        headless.is_empty(),
        "{}\nwithout a subject is what begins with {}",
        headless.join("\n"),
        HEADLESS.join(", ")
    );
    Ok(())
}

/// The comments in the files of a tree.
#[derive(Default)]
struct Found {
    /// All comment blocks.
    blocks: usize,
    /// Path, line and text of each block without a subject.
    headless: Vec<String>,
}

/// Returns the comment blocks of a Rust or CUDA source. A block is a run of line comments of one
/// kind on consecutive lines. It is given by its first line and that line's number. Rust's lexer
/// reads both languages, since line comments, strings and character literals of C++ have the same
/// spelling.
fn blocks(source: &str) -> Vec<(usize, &str)> {
    let mut blocks = Vec::new();
    let (mut offset, mut line) = (0, 1);
    // The kind of the preceding comment, as long as only the end of its line has followed.
    let mut open: Option<Option<DocStyle>> = None;
    for token in tokenize(source, FrontmatterAllowed::No) {
        let text = &source[offset..offset + token.len as usize];
        offset += text.len();
        let line_ends = text.matches('\n').count();
        match token.kind {
            TokenKind::LineComment { doc_style } => {
                if open != Some(doc_style) {
                    blocks.push((line, text));
                }
                open = Some(doc_style);
            }
            TokenKind::Whitespace if line_ends == 1 => {}
            _ => open = None,
        }
        line += line_ends;
    }
    blocks
}

fn is_headless(comment: &str) -> bool {
    let text = comment.trim_start_matches(|it: char| !it.is_alphabetic());
    let word = text.split(|it: char| !it.is_alphabetic()).next();
    word.is_some_and(|word| HEADLESS.contains(&word))
}

fn read_folder(root: &Path, folder: &Path, found: &mut Found) -> anyhow::Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let name = entry?.file_name();
        let path = folder.join(&name);
        // The folder of a build holds copies of sources.
        if name.to_string_lossy().starts_with('.') || name == "target" {
            continue;
        }
        if root.join(&path).is_dir() {
            read_folder(root, &path, found)?;
            continue;
        }
        let extension = path.extension().and_then(|it| it.to_str());
        if !matches!(extension, Some("rs" | "cu" | "cuh" | "h")) {
            continue;
        }
        let source = fs::read_to_string(root.join(&path))?;
        for (line, text) in blocks(&source) {
            found.blocks += 1;
            if is_headless(text) {
                let place = path.display();
                found
                    .headless
                    .push(format!("{place}:{line}: {}", text.trim_end()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_begin_with_a_subject() {
        run().unwrap();
    }

    #[test]
    fn comments_are_read_in_blocks() {
        let source = "//! One\n//! So\n\n/// Two\n// Of three\nlet a = 'x'; // Four\n    // So on\n\
                      let b = 1'000; // Five\n\n// Six\n\n// Seven\nint c; /* What */ // Eight\n";
        assert_eq!(
            blocks(source),
            [
                (1, "//! One"),
                (4, "/// Two"),
                (5, "// Of three"),
                (6, "// Four"),
                (8, "// Five"),
                (10, "// Six"),
                (12, "// Seven"),
                (13, "// Eight"),
            ]
        );
    }

    #[test]
    fn strings_hold_no_comments() {
        let source =
            "let a = \"\n// What\n\"; let b = r#\"// \"Of\"\n// By\"#; let c = '\"'; // Those";
        assert_eq!(blocks(source), [(4, "// Those")]);
    }

    #[test]
    fn the_first_word_decides() {
        for word in HEADLESS {
            assert!(is_headless(&format!("// {word} it is")), "{word}");
            assert!(is_headless(&format!("/// **{word}**, it is")), "{word}");
            assert!(!is_headless(&format!("// Words: {word}")), "{word}");
        }
        for text in [
            "// Offsets",
            "// Assumes",
            "//",
            "// --- Soft",
            "// \u{d7} So",
        ] {
            assert_eq!(is_headless(text), text.ends_with("So"), "{text}");
        }
    }

    #[test]
    fn a_file_anywhere_below_the_root_is_read() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        fs::create_dir_all(folder.path().join("a/target"))?;
        for file in ["a/b.cuh", "a/target/b.rs", "a/b.md", "c.rs"] {
            fs::write(folder.path().join(file), "// Noun\n\n// What\n")?;
        }
        let mut found = Found::default();
        read_folder(folder.path(), Path::new(""), &mut found)?;
        found.headless.sort();
        assert_eq!(found.headless, ["a/b.cuh:3: // What", "c.rs:3: // What"]);
        assert_eq!(found.blocks, 4);
        Ok(())
    }
}
