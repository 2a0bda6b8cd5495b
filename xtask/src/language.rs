//! Comments that begin without a subject, counted per folder and held to bounds that only fall.
//!
//! A comment says what a thing is or does: it begins with a noun or a verb. One that begins with a
//! word of [`HEADLESS`] leaves its reader without a subject. `xtask/language.txt` has the bounds; a
//! folder without a line there has a bound of zero.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};
use ra_ap_rustc_lexer::{DocStyle, FrontmatterAllowed, TokenKind, tokenize};

use crate::Workspace;

/// First words of comments that have no subject.
const HEADLESS: &[&str] = &[
    "What", "Whether", "Where", "Which", "Who", "How", "As", "Of", "By", "Those", "That", "So",
];

/// The file of bounds, below the workspace's root.
const BOUNDS: &str = "xtask/language.txt";

/// The first lines of the file of bounds.
const HEADING: &str = "\
# Comment blocks that begin with What, Whether, Where, Which, Who, How, As, Of, By, Those, That or
# So, for each crate and CUDA folder: all of them, and the rustdoc summaries among them. These
# bounds only fall: `cargo xtask language --lower` writes what is there now wherever it is less.
";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Lower the bounds to what is there now. None is raised.
    #[arg(long)]
    lower: bool,
    /// List the comments of one crate or CUDA folder, as the file of bounds names it.
    #[arg(long, value_name = "FOLDER")]
    show: Option<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let root = Workspace::find()?.root;
    let folders = read_tree(&root)?;
    let path = root.join(BOUNDS);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {BOUNDS}"))?;
    let bounds = parse(&text)?;
    if let Some(folder) = &arguments.show {
        let found = folders
            .get(folder)
            .with_context(|| format!("{folder}: no crate or CUDA folder of this workspace"))?;
        for line in &found.lines {
            println!("{line}");
        }
    } else if arguments.lower {
        fs::write(&path, render(&lowered(&folders, &bounds)))?;
    } else {
        println!("{}", summary(&folders));
        let wrong = differences(&folders, &bounds);
        ensure!(
            wrong.is_empty(),
            "{}\nwithout a subject is what begins with {}",
            wrong.join("\n"),
            HEADLESS.join(", ")
        );
    }
    Ok(())
}

/// Comment blocks without a subject.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
struct Count {
    /// The number in all comments.
    blocks: usize,
    /// The number in rustdoc's alone.
    summaries: usize,
}

type Bounds = BTreeMap<String, Count>;

/// The comments of one crate or CUDA folder.
#[derive(Default)]
struct Folder {
    /// All comment blocks.
    blocks: usize,
    headless: Count,
    /// Path, line and text of each block without a subject.
    lines: Vec<String>,
}

/// A run of line comments of one kind, on lines that follow each other.
#[derive(Debug, PartialEq)]
struct Block<'a> {
    line: usize,
    /// The first line with its slashes.
    text: &'a str,
    rustdoc: bool,
}

impl Block<'_> {
    fn is_headless(&self) -> bool {
        let text = self.text.trim_start_matches(|it: char| !it.is_alphabetic());
        let word = text.split(|it: char| !it.is_alphabetic()).next();
        word.is_some_and(|word| HEADLESS.contains(&word))
    }
}

/// The comment blocks of a Rust or CUDA source. Rust's lexer reads both: line comments, strings and
/// character literals of C++ have the same spelling.
fn blocks(source: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let (mut offset, mut line) = (0, 1);
    // The kind of the comment before, while nothing but the end of its line has followed.
    let mut open: Option<Option<DocStyle>> = None;
    for token in tokenize(source, FrontmatterAllowed::No) {
        let text = &source[offset..offset + token.len as usize];
        offset += text.len();
        let line_ends = text.matches('\n').count();
        match token.kind {
            TokenKind::LineComment { doc_style } => {
                if open != Some(doc_style) {
                    let rustdoc = doc_style.is_some();
                    blocks.push(Block {
                        line,
                        text,
                        rustdoc,
                    });
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

/// Reads every crate and CUDA folder below the workspace's root.
fn read_tree(root: &Path) -> anyhow::Result<BTreeMap<String, Folder>> {
    let mut folders = BTreeMap::new();
    read_folder(root, root, Path::new("."), &mut folders)?;
    Ok(folders)
}

fn read_folder(
    root: &Path,
    folder: &Path,
    crate_folder: &Path,
    folders: &mut BTreeMap<String, Folder>,
) -> anyhow::Result<()> {
    let relative = folder.strip_prefix(root)?;
    let is_crate = relative != Path::new("") && folder.join("Cargo.toml").is_file();
    let crate_folder = if is_crate { relative } else { crate_folder };
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)?
        .map(|entry| entry.map(|it| it.path()))
        .collect::<Result<_, _>>()?;
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // A build's folder holds copies of sources.
        if name.starts_with('.') || name == "target" {
            continue;
        }
        let owner = match path.extension().and_then(|it| it.to_str()) {
            _ if path.is_dir() => {
                read_folder(root, &path, crate_folder, folders)?;
                continue;
            }
            Some("rs") => crate_folder,
            Some("cu" | "cuh" | "h") => relative,
            _ => continue,
        };
        let source = fs::read_to_string(&path)?;
        let shown = path.strip_prefix(root)?.display().to_string();
        let owner = folders.entry(owner.display().to_string()).or_default();
        count(&shown, &source, owner);
    }
    Ok(())
}

fn count(path: &str, source: &str, folder: &mut Folder) {
    for block in blocks(source) {
        folder.blocks += 1;
        if block.is_headless() {
            folder.headless.blocks += 1;
            folder.headless.summaries += usize::from(block.rustdoc);
            let text = format!("{path}:{}: {}", block.line, block.text.trim_end());
            folder.lines.push(text);
        }
    }
}

/// Reads lines of `folder blocks summaries`. If a merge leaves two lines for a folder, the greater
/// counts: `--lower` then writes one.
fn parse(text: &str) -> anyhow::Result<Bounds> {
    let mut bounds = Bounds::new();
    for line in text.lines().filter(|it| !it.starts_with('#')) {
        let fields: Vec<_> = line.split_whitespace().collect();
        let parsed = match fields[..] {
            [folder, blocks, summaries] => blocks
                .parse()
                .ok()
                .zip(summaries.parse().ok())
                .map(|(blocks, summaries)| (folder, Count { blocks, summaries })),
            _ => None,
        };
        let (folder, read) = parsed.with_context(|| {
            format!("{BOUNDS}: given {line:?}, accepted `FOLDER BLOCKS SUMMARIES`")
        })?;
        let bound = bounds.entry(folder.to_owned()).or_default();
        bound.blocks = bound.blocks.max(read.blocks);
        bound.summaries = bound.summaries.max(read.summaries);
    }
    Ok(bounds)
}

fn render(bounds: &Bounds) -> String {
    let mut text = HEADING.to_owned();
    for (folder, Count { blocks, summaries }) in bounds {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{folder} {blocks} {summaries}");
    }
    text
}

/// The bounds that hold from now on: the lesser of each bound and what is there.
fn lowered(folders: &BTreeMap<String, Folder>, bounds: &Bounds) -> Bounds {
    bounds
        .iter()
        .map(|(folder, bound)| {
            let now = folders
                .get(folder)
                .map_or(Count::default(), |it| it.headless);
            let lower = Count {
                blocks: now.blocks.min(bound.blocks),
                summaries: now.summaries.min(bound.summaries),
            };
            (folder.clone(), lower)
        })
        .filter(|(_, bound)| *bound != Count::default())
        .collect()
}

/// A line for each count that has risen above its bound, and for each bound that was not lowered.
fn differences(folders: &BTreeMap<String, Folder>, bounds: &Bounds) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut compare = |folder: &str, what: &str, now: usize, bound: usize| {
        if now > bound {
            wrong.push(format!(
                "{folder}: {now} {what} begin without a subject, allowed: {bound}; `cargo xtask \
                 language --show {folder}` lists them"
            ));
        } else if now < bound {
            wrong.push(format!(
                "{folder}: {now} {what} begin without a subject, and {BOUNDS} still allows \
                 {bound}: `cargo xtask language --lower`"
            ));
        }
    };
    let gone = bounds.keys().filter(|it| !folders.contains_key(*it));
    for folder in folders.keys().chain(gone) {
        let now = folders
            .get(folder)
            .map_or(Count::default(), |it| it.headless);
        let bound = bounds.get(folder).copied().unwrap_or_default();
        compare(folder, "comment blocks", now.blocks, bound.blocks);
        compare(folder, "rustdoc summaries", now.summaries, bound.summaries);
    }
    wrong
}

/// The share of all blocks, in words.
fn summary(folders: &BTreeMap<String, Folder>) -> String {
    let headless: usize = folders.values().map(|it| it.headless.blocks).sum();
    let blocks: usize = folders.values().map(|it| it.blocks).sum();
    format!("{headless} of {blocks} comment blocks begin without a subject")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folders(of: &[(&str, &str)]) -> BTreeMap<String, Folder> {
        let mut folders = BTreeMap::new();
        for (folder, source) in of {
            count(
                "a.rs",
                source,
                folders.entry((*folder).to_owned()).or_default(),
            );
        }
        folders
    }

    #[test]
    fn comments_are_read_in_blocks() {
        let source = "//! One\n//! So\n\n/// Two\n// Of three\nlet a = 'x'; // Four\n    // So on\n\
                      let b = 1'000; // Five\n\n// Six\n\n// Seven\nint c; /* What */ // Eight\n";
        let read = blocks(source);
        let lines: Vec<_> = read.iter().map(|it| (it.line, it.text)).collect();
        assert_eq!(
            lines,
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
        let rustdoc: Vec<_> = read.iter().map(|it| it.rustdoc).collect();
        assert_eq!(
            rustdoc,
            [true, true, false, false, false, false, false, false]
        );
    }

    #[test]
    fn strings_hold_no_comments() {
        let source =
            "let a = \"\n// What\n\"; let b = r#\"// \"Of\"\n// By\"#; let c = '\"'; // Those";
        let read: Vec<_> = blocks(source).iter().map(|it| it.text).collect();
        assert_eq!(read, ["// Those"]);
    }

    #[test]
    fn the_first_word_decides() {
        let headless = |text: &str| blocks(text)[0].is_headless();
        for word in HEADLESS {
            assert!(headless(&format!("// {word} it is")), "{word}");
            assert!(headless(&format!("/// **{word}**, it is")), "{word}");
            assert!(!headless(&format!("// Words: {word}")), "{word}");
        }
        for text in [
            "// Offsets",
            "// Assumes",
            "//",
            "// --- Soft",
            "// \u{d7} So",
        ] {
            assert_eq!(headless(text), text.ends_with("So"), "{text}");
        }
    }

    #[test]
    fn a_rise_and_a_forgotten_fall_are_told() {
        let now = folders(&[("a", "/// Of\nx\n// By\n"), ("b", "// Noun\n")]);
        let told = |bounds| differences(&now, &parse(bounds).unwrap());
        assert_eq!(told("a 2 1"), [""; 0]);
        let [blocks] = &told("# a\na 1 1")[..] else {
            panic!("one bound is exceeded")
        };
        assert!(blocks.starts_with("a: 2 comment blocks") && blocks.contains("allowed: 1"));
        let [summaries] = &told("a 2 0")[..] else {
            panic!("one bound is exceeded")
        };
        assert!(
            summaries.starts_with("a: 1 rustdoc summaries") && summaries.contains("allowed: 0")
        );
        assert_eq!(told("").len(), 2);
        for (fallen, folder) in [
            ("a 3 1", "a: 2 "),
            ("a 2 1\nb 1 0", "b: 0 "),
            ("a 2 1\nc 1 0", "c: 0 "),
        ] {
            let told = told(fallen);
            assert!(told.len() == 1 && told[0].starts_with(folder), "{told:?}");
            assert!(told[0].contains("--lower"), "{told:?}");
        }
    }

    #[test]
    fn bounds_only_fall() {
        let now = folders(&[
            ("a", "/// Of\nx\n// By\n"),
            ("b", "// So\n"),
            ("new", "// So\n"),
        ]);
        let lower = |bounds| render(&lowered(&now, &parse(bounds).unwrap()));
        let rows = |bounds| lower(bounds).replace(HEADING, "");
        assert_eq!(rows("a 9 1\nb 2 2\ngone 4 0\n"), "a 2 1\nb 1 0\n");
        // Never raised, and none is added.
        assert_eq!(rows("a 1 0\n"), "a 1 0\n");
        // Two lines that a merge left.
        assert_eq!(rows("a 2 1\na 3 0\n"), "a 2 1\n");
    }

    #[test]
    fn a_line_that_is_no_bound_is_refused() {
        for line in ["a", "a 1", "a 1 x", "a 1 2 3", "<<<<<<< HEAD"] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(line), "{error}");
        }
    }
}
