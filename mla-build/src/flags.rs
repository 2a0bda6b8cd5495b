//! Flags of nvcc that a build script adds: refused ones, and the files and folders that flags name.

use std::path::{Path, PathBuf};

use crate::Error;
use crate::bounded;

/// Names of refused flags without dashes, and what to use instead.
const REFUSED: &[(&str, &str)] = &[
    ("I isystem include-path system-include", "Kernels::include"),
    ("D define-macro", "Kernels::define"),
    (
        "include pre-include",
        "an #include in the sources, or Kernels::define",
    ),
    (
        "ccbin compiler-bindir",
        "the environment variable NVCC_CCBIN",
    ),
    (
        "arch gencode gpu-architecture gpu-code generate-code code",
        "Kernels::family, a feature such as sm90, or the environment variable \
         MLA_BUILD_TARGETS_<FAMILY>",
    ),
    (
        "G device-debug",
        "MLA_BUILD_LINE_INFO=1, which adds the lines of sources: with -G kernels are compiled \
         without optimisation, and the report and the budget describe other code",
    ),
    (
        "t threads split-compile split-compile-extended jobserver",
        "none: Cargo's jobserver decides how many compilers run (cargo build -j), or Kernels::jobs",
    ),
    (
        "w disable-warnings",
        "-diag-suppress=<number> for a single warning: the report lists those of ptxas",
    ),
    ("e entries", "none: all kernels of a source are compiled"),
    (
        "c compile link lib run E preprocess ptx cubin fatbin cuda optix-ir ltoir dc \
         device-c dw device-w dlink device-link shared fdevice-syntax-only r \
         relocatable-link reloc-ptx relocatable-ptx",
        "a flag that leaves the product what it is, one object per source",
    ),
    (
        "rdc relocatable-device-code dlto dlink-time-opt lto gen-opt-lto ewp \
         extensible-whole-program",
        "sources that call no device function of another: what is linked is host code alone",
    ),
    (
        "o output-file odir output-directory objtemp keep save-temps keep-dir time \
         fdevice-time-trace",
        "a flag that writes no file; the output of every compilation is in OUT_DIR",
    ),
    (
        "M MM MD MMD MF MT MP generate-dependencies generate-nonsystem-dependencies \
         generate-dependencies-with-compile generate-nonsystem-dependencies-with-compile \
         dependency-output generate-dependency-targets dependency-target-name",
        "none: the dependencies are written for the cache",
    ),
    (
        "dryrun dry-run clean-targets clean code-ls arch-ls version V help h list-gpu-code \
         list-gpu-arch",
        "a flag with which nvcc compiles",
    ),
];

/// The number of entries at the start of the list that an environment variable may hold, since its
/// whole text is part of every key.
const OF_VARIABLES: usize = 4;

/// Refuses a flag that the tool itself sets or that makes another product, and says what to do
/// instead.
pub(crate) fn check(flag: &str) -> Result<(), Error> {
    let refuse = |accepted: &str| Err(Error::setting("flag", flag, accepted));
    if !flag.starts_with('-') || flag.chars().any(char::is_whitespace) {
        return refuse("one flag with its value in one text, such as -maxrregcount=128");
    }
    // A flag must not be able to end the command line of a shell.
    if let Some(bad) = flag.chars().find(|c| "`$;|&<>\"'\\\n".contains(*c)) {
        return refuse(&format!(
            "a flag without {bad:?}: nvcc hands flags to a shell as they are"
        ));
    }
    let (name, value) = name_and_value(flag);
    let own = REFUSED.iter().find(|row| has(row, name));
    // `-rdc=false` only states the default, so it is accepted.
    if value == "false" && own.is_some_and(|(names, _)| names.starts_with("rdc ")) {
        return Ok(());
    }
    // A flag of one letter may be followed directly by its value.
    let refused = (own.map(|(_, accepted)| *accepted))
        .or_else(|| flag.starts_with("-I").then_some(REFUSED[0].1))
        .or_else(|| flag.starts_with("-D").then_some(REFUSED[1].1))
        .or_else(|| {
            passed(name, value)
                .any(|it| it.starts_with("-I"))
                .then_some(REFUSED[0].1)
        })
        .or_else(|| silences_ptxas(name, value).then_some(REFUSED_WARNINGS));
    refused.map_or(Ok(()), refuse)
}

/// True if a row of flags has this name.
fn has((names, _): &(&str, &str), name: &str) -> bool {
    names.split(' ').any(|it| it == name)
}

/// The remedy for a flag that silences ptxas.
const REFUSED_WARNINGS: &str = "ptxas with its warnings, which the report lists";

/// Splits a flag into its name without dashes and the value behind its `=`. The number of threads
/// may directly follow its letter.
fn name_and_value(flag: &str) -> (&str, &str) {
    let name = flag.trim_start_matches('-');
    let threads = name.strip_prefix('t').filter(|rest| !rest.is_empty());
    match threads.filter(|rest| rest.chars().all(|c| c.is_ascii_digit())) {
        Some(number) => ("t", number),
        None => name.split_once('=').unwrap_or((name, "")),
    }
}

fn silences_ptxas(name: &str, value: &str) -> bool {
    let is_silent = |flag: &str| matches!(flag.trim_start_matches('-'), "w" | "disable-warnings");
    matches!(name, "Xptxas" | "ptxas-options") && value.split(',').any(is_silent)
}

/// Refuses some flags in the value of an environment variable, or in a file of options. These flags
/// add code for another GPU, make another product, or change what the report says. Include roots
/// and macros are accepted there.
pub(crate) fn check_variable(variable: &str, value: &str) -> Result<(), Error> {
    for flag in value
        .split_whitespace()
        .filter(|word| word.starts_with('-'))
    {
        let (name, given) = name_and_value(flag);
        let mut rows = REFUSED[OF_VARIABLES..].iter();
        let row = rows.find(|row| has(row, name) && given != "false");
        let silent = silences_ptxas(name, given).then_some(REFUSED_WARNINGS);
        if let Some(accepted) = row.map(|(_, accepted)| *accepted).or(silent) {
            return Err(Error::setting(variable, flag, accepted));
        }
    }
    Ok(())
}

/// Refuses the same flags in files of options: those that flags name, and those that such files
/// name.
pub(crate) fn check_option_files<'a>(
    flags: impl IntoIterator<Item = &'a str>,
    root: &Path,
) -> Result<(), Error> {
    let mut texts: Vec<String> = flags.into_iter().map(str::to_owned).collect();
    let mut known = Vec::new();
    while let Some(text) = texts.pop() {
        for path in option_files(&text).map(|name| root.join(name)) {
            if !push_new(&mut known, path.clone()) {
                continue;
            }
            let content = bounded::read_to_string(&path)
                .map_err(Error::file("read the options in", &path))?;
            check_variable(&path.display().to_string(), &content)?;
            texts.push(content);
        }
    }
    Ok(())
}

/// Returns the values of a flag with one of two names: each is behind its `=`, or the next word.
fn values<'a>(text: &'a str, names: [&str; 2]) -> Vec<&'a str> {
    let words: Vec<_> = text.split_whitespace().collect();
    let each = words
        .iter()
        .enumerate()
        .filter_map(|(at, word)| match name_and_value(word) {
            (name, _) if !names.contains(&name) => None,
            (_, "") => words.get(at + 1).copied(),
            (_, value) => Some(value),
        });
    each.collect()
}

/// Returns the files of options that a text of flags names.
fn option_files(text: &str) -> impl Iterator<Item = &str> {
    let lists = values(text, ["optf", "options-file"]).into_iter();
    lists.flat_map(|list| list.split(','))
}

/// Returns the C++ compiler that the value of an environment variable names. nvcc takes the last
/// one.
pub(crate) fn host_compiler(value: &str) -> Option<&str> {
    values(value, ["ccbin", "compiler-bindir"]).pop()
}

/// Refuses a macro whose value a shell would change.
pub(crate) fn check_define(define: &str) -> Result<(), Error> {
    let bad = define.chars().find(|c| "$`".contains(*c) || c.is_control());
    let Some(bad) = bad else { return Ok(()) };
    let accepted = format!("a macro without {bad:?}, which nvcc hands to a shell");
    Err(Error::setting("define", define, accepted))
}

/// Returns the flags that a flag passes on to another compiler.
fn passed<'a>(name: &str, value: &'a str) -> impl Iterator<Item = &'a str> {
    let passes = matches!(name, "Xcompiler" | "compiler-options");
    value.split(',').filter(move |_| passes)
}

/// The files and folders that flags name in any form: `--options-file=x`, `-Xcompiler=@x`,
/// `-Xcompiler=-specs=x`. A list of dependencies does not contain the files that a compilation
/// reads because of a flag.
#[derive(Debug, Default)]
pub(crate) struct Named {
    pub(crate) files: Vec<PathBuf>,
    pub(crate) folders: Vec<PathBuf>,
}

impl Named {
    /// Collects the files that flags name, with paths relative to `root`. Files of options are
    /// searched for further names.
    pub(crate) fn new<'a>(flags: impl IntoIterator<Item = &'a str>, root: &Path) -> Self {
        let mut named = Self::default();
        let mut texts: Vec<String> = flags.into_iter().map(str::to_owned).collect();
        while let Some(text) = texts.pop() {
            for word in text.split(|c: char| c.is_whitespace() || "=,\"'".contains(c)) {
                let Some(path) = path_in(word, root) else {
                    continue;
                };
                if path.is_dir() {
                    push_new(&mut named.folders, path);
                } else if push_new(&mut named.files, path.clone()) {
                    // Only a text file can name more files.
                    texts.extend(bounded::read_to_string(path).ok());
                }
            }
        }
        named
    }

    /// Returns the hash of the files' contents.
    pub(crate) fn contents(&self) -> Result<blake3::Hash, Error> {
        let mut hasher = blake3::Hasher::new();
        for path in &self.files {
            let bytes = bounded::read(path).map_err(Error::file("read, as a flag says,", path))?;
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(&bytes);
        }
        Ok(hasher.finalize())
    }
}

/// Returns the existing path at the end of a word. It is the whole word, or the part behind a flag
/// such as `-I`, `-isystem` or `@`.
fn path_in(word: &str, root: &Path) -> Option<PathBuf> {
    const GLUED: [&str; 7] = [
        "-isystem",
        "-iquote",
        "-idirafter",
        "-include",
        "-I",
        "-B",
        "@",
    ];
    let rest = GLUED.iter().find_map(|flag| word.strip_prefix(flag));
    [Some(word), rest]
        .into_iter()
        .flatten()
        .filter(|path| !path.is_empty() && !path.starts_with('-'))
        .map(|path| root.join(path))
        .find(|path| path.exists())
}

fn push_new(list: &mut Vec<PathBuf>, path: PathBuf) -> bool {
    let new = !list.contains(&path);
    if new {
        list.push(path);
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_the_tool_sets_are_refused_with_what_to_call() {
        for (flag, word) in [
            ("-arch=sm_90a", "Kernels::family"),
            ("-gencode", "Kernels::family"),
            ("--gpu-architecture=sm_90", "Kernels::family"),
            ("-I/usr/include", "Kernels::include"),
            ("--include-path=x", "Kernels::include"),
            ("-Xcompiler=-Wall,-I/usr/include", "Kernels::include"),
            ("-DX=1", "Kernels::define"),
            ("-ccbin=g++-11", "NVCC_CCBIN"),
            ("-include=x.h", "an #include"),
            ("-G", "MLA_BUILD_LINE_INFO"),
            ("-t4", "jobserver"),
            ("-Xptxas=-w", "warnings"),
            ("--ptx", "one object per source"),
            ("-fatbin", "one object per source"),
            ("-rdc=true", "host code alone"),
            ("--keep-dir=x", "writes no file"),
            ("-MD", "for the cache"),
            ("--version", "nvcc compiles"),
            ("main.cu", "one flag"),
            ("-maxrregcount 128", "one flag"),
            ("-cubin", "one object per source"),
            ("-dc", "one object per source"),
            ("-fdevice-syntax-only", "one object per source"),
            ("-dlto", "host code alone"),
            ("--relocatable-device-code=true", "host code alone"),
            ("-keep", "writes no file"),
            ("-o", "writes no file"),
            ("-MF=x", "for the cache"),
            ("--dryrun", "nvcc compiles"),
            ("-w", "diag-suppress"),
            ("--entries", "all kernels"),
            ("-split-compile=0", "jobserver"),
            ("--threads=4", "jobserver"),
            ("-code=sm_80", "Kernels::family"),
            ("--device-debug", "MLA_BUILD_LINE_INFO"),
        ] {
            let message = check(flag).unwrap_err().to_string();
            assert!(
                message.contains(word) && message.contains(flag),
                "{flag}: {message}"
            );
        }
    }

    #[test]
    fn refused_flags_are_refused_by_name_and_variables_may_add_include_roots() {
        const NAME: &str = "NVCC_APPEND_FLAGS";
        for (row, (names, accepted)) in REFUSED.iter().enumerate() {
            for name in names.split(' ') {
                for flag in [format!("-{name}"), format!("--{name}=x")] {
                    let refused = format!("given {flag:?}, accepted {accepted}");
                    let message = check(&flag).unwrap_err().to_string();
                    assert_eq!(message, format!("flag: {refused}"));
                    let checked = check_variable(NAME, &format!("-lineinfo {flag}"));
                    let message = checked.map_err(|error| error.to_string());
                    match row < OF_VARIABLES {
                        true => assert_eq!(message, Ok(())),
                        false => assert_eq!(message, Err(format!("{NAME}: {refused}"))),
                    }
                }
            }
        }
        for flag in ["-t4", "-Xptxas=-O3,-w"] {
            check_variable(NAME, flag).unwrap_err();
        }
        check_variable(NAME, "-I /opt/include -DX=1 -rdc=false -ccbin g++-12").unwrap();
    }

    #[test]
    fn files_of_options_are_held_to_the_same_however_deep() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("outer.opt", "-lineinfo -optf inner.opt");
        write("inner.opt", "--options-file=outer.opt -DX");
        let check = |flag| check_option_files([flag], folder.path());
        check("-lineinfo --options-file outer.opt").unwrap();
        write("inner.opt", "-DX -gencode arch=compute_80,code=sm_80");
        let message = check("--options-file=outer.opt").unwrap_err().to_string();
        assert!(
            message.contains("inner.opt: given \"-gencode\", accepted Kernels::family"),
            "{message}"
        );
        let message = check("-optf gone.opt").unwrap_err().to_string();
        assert!(message.contains("gone.opt"), "{message}");
    }

    #[test]
    fn the_last_host_compiler_of_a_variable_counts() {
        assert_eq!(host_compiler("-lineinfo -ccbin g++-12"), Some("g++-12"));
        let both = "-ccbin=/a/g++ --compiler-bindir /b/g++";
        assert_eq!(host_compiler(both), Some("/b/g++"));
        assert_eq!(host_compiler("-lineinfo"), None);
    }

    #[test]
    fn nothing_of_a_flag_can_end_the_line_of_a_shell() {
        for flag in [
            "-Xcompiler=$(id)",
            "-Xcompiler=`id`",
            "-lineinfo;id",
            "-Xptxas=\"-v\"",
        ] {
            let message = check(flag).unwrap_err().to_string();
            assert!(message.contains("to a shell"), "{message}");
        }
        for define in ["X=$(id)", "X=`id`"] {
            let message = check_define(define).unwrap_err().to_string();
            assert!(message.starts_with("define: given") && message.contains("to a shell"));
        }
        check_define("X=\"it's 'text', or not\"").unwrap();
    }

    #[test]
    fn other_flags_pass() {
        for flag in [
            "-lineinfo",
            "--use_fast_math",
            "-maxrregcount=128",
            "-Xptxas=-O2",
            "-Xcompiler=-Wall,-Wextra",
            "-rdc=false",
            "-diag-suppress=177",
            "-default-stream=per-thread",
            "--options-file=flags.txt",
            "-Ofc=max",
            "-ftz=true",
            "--target-directory=x86_64-linux",
            "-g",
        ] {
            check(flag).unwrap();
            check_variable("NVCC_APPEND_FLAGS", flag).unwrap();
        }
    }

    #[test]
    fn files_and_folders_that_flags_name_are_found_through_files_of_options() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("headers")).unwrap();
        std::fs::write(at("outer.opt"), "-lineinfo --options-file inner.opt\n").unwrap();
        std::fs::write(at("inner.opt"), "-Iheaders -Xcompiler=-specs=gcc.specs").unwrap();
        std::fs::write(at("gcc.specs"), "inner.opt").unwrap();
        std::fs::write(at("response"), "").unwrap();
        let named = Named::new(
            ["--options-file=outer.opt", "-Xcompiler=@response,-O2"],
            folder.path(),
        );
        let sorted = |mut paths: Vec<PathBuf>| {
            paths.sort();
            paths
        };
        assert_eq!(
            sorted(named.files),
            ["gcc.specs", "inner.opt", "outer.opt", "response"].map(at)
        );
        assert_eq!(named.folders, [at("headers")]);
    }
}
