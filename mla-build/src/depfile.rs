//! The dependencies that nvcc writes with `-MD -MF`: one Make rule.

use std::path::{Path, PathBuf};

/// Returns the prerequisites of the rule as paths from `folder`, where the compiler ran.
///
/// GCC doubles a dollar and nvcc does not. `$$` is therefore two dollars if such a file exists, and
/// otherwise one.
pub(crate) fn files(text: &str, folder: &Path) -> Vec<PathBuf> {
    let file = |word: PathBuf| {
        let path = folder.join(&word);
        match word.to_str().filter(|word| word.contains("$$")) {
            Some(word) if !path.exists() => folder.join(word.replace("$$", "$")),
            _ => path,
        }
    };
    parse(text).into_iter().map(file).collect()
}

/// Returns the prerequisites of the rule in order, without its target.
///
/// A backslash escapes a space and a hash. At the end of a line it continues the line.
fn parse(text: &str) -> Vec<PathBuf> {
    // The rule's colon is the first one before a space or the end of the line. A target may contain
    // other colons.
    let Some(body) = text.match_indices(':').find_map(|(at, _)| {
        let rest = &text[at + 1..];
        rest.starts_with([' ', '\t', '\n', '\r', '\\'])
            .then_some(rest)
    }) else {
        return Vec::new();
    };
    let mut paths = Vec::new();
    let mut word = String::new();
    let mut characters = body.chars().peekable();
    while let Some(c) = characters.next() {
        match (c, characters.peek()) {
            ('\\', Some('\n')) => {
                characters.next();
                finish(&mut word, &mut paths);
            }
            ('\\', Some('\r')) => {
                characters.next();
                characters.next_if_eq(&'\n');
                finish(&mut word, &mut paths);
            }
            ('\\', Some(' ' | '#')) => word.extend(characters.next()),
            (' ' | '\t' | '\n' | '\r', _) => finish(&mut word, &mut paths),
            _ => word.push(c),
        }
    }
    finish(&mut word, &mut paths);
    paths
}

fn finish(word: &mut String, paths: &mut Vec<PathBuf>) {
    if !word.is_empty() {
        paths.push(std::mem::take(word).into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_of_nvcc_is_read() {
        let text = "a.o : cuda/a.cu \\\n    /usr/include/stdc-predef.h \\\n    \
                    /t/bin/..//include/cuda_runtime.h\n";
        let paths = parse(text);
        assert_eq!(
            paths,
            [
                "cuda/a.cu",
                "/usr/include/stdc-predef.h",
                "/t/bin/..//include/cuda_runtime.h"
            ]
            .map(PathBuf::from)
        );
    }

    #[test]
    fn escapes_are_undone() {
        let paths = parse("out dir/a.o: my\\ kernel.cu price$$.h \\#odd.h \\\r\n tab.h\n");
        assert_eq!(
            paths,
            ["my kernel.cu", "price$$.h", "#odd.h", "tab.h"].map(PathBuf::from)
        );
    }

    #[test]
    fn a_dollar_is_read_in_both_spellings() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["one$.h", "two$$.h"] {
            std::fs::write(at(name), "").unwrap();
        }
        let read = files("a.o: one$$.h one$.h two$$.h\n", folder.path());
        assert_eq!(read, [at("one$.h"), at("one$.h"), at("two$$.h")]);
    }

    #[test]
    fn text_that_is_no_rule_has_no_dependencies() {
        assert!(parse("").is_empty());
        assert!(parse("no rule here").is_empty());
        assert!(parse("a.o:\n").is_empty());
    }
}
