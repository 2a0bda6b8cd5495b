//! The failure of a unit, reduced to what a person reads first. This is the compiler's first error
//! in its own words, and a hint if the cause is known.

use std::{fmt, path::PathBuf};

/// The variable that asks for all units to be compiled even after one has failed.
pub(crate) const KEEP_GOING: &str = "MLA_BUILD_KEEP_GOING";

/// A unit that did not compile.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FailedUnit {
    /// The unit: its source relative to the package, and its targets.
    pub unit: String,
    /// The compiler's first error, with the lines that belong to it.
    pub first_error: String,
    /// A way to fix the error, if one is known.
    pub hint: Option<String>,
    /// The file with everything that the compiler printed.
    pub log: PathBuf,
}

/// All units that did not compile, in the order in which they failed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FailedUnits {
    /// The failed units, at least one.
    pub units: Vec<FailedUnit>,
    /// The number of units of the build.
    pub total: usize,
    /// The number of units that were stopped or not begun, because one of `units` failed first.
    pub stopped: usize,
}

impl FailedUnits {
    /// Returns the lines of the first unit's error, with the hint.
    pub(crate) fn first(&self) -> String {
        let Some(first) = self.units.first() else {
            return String::new();
        };
        match &first.hint {
            Some(hint) => format!("{}\nhint: {hint}", first.first_error),
            None => first.first_error.clone(),
        }
    }
}

impl fmt::Display for FailedUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((first, others)) = self.units.split_first() else {
            return Ok(());
        };
        let line = |failure: &FailedUnit| {
            failure
                .first_error
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        let log = first.log.display();
        writeln!(
            f,
            "{}\nin {}; all of its output is in {log}",
            self.first(),
            first.unit
        )?;
        for (number, failure) in others.iter().enumerate() {
            let heading = if number == 0 { "also failed:\n" } else { "" };
            writeln!(f, "{heading}  {}: {}", failure.unit, line(failure))?;
        }
        write!(f, "{} of {} units failed", self.units.len(), self.total)?;
        match self.stopped {
            0 => writeln!(f, "; the others are kept and will not be compiled again")?,
            stopped => writeln!(
                f,
                ", and {stopped} were stopped; what was compiled is kept. \
                 {KEEP_GOING}=1 compiles the others all the same"
            )?,
        }
        // A reader sees the last line of a long output first.
        write!(f, "{}", line(first))
    }
}

/// Returns the first error in what nvcc printed, with the lines that explain it.
///
/// The compilers that nvcc runs each have their own form: `file(12): error: …` (cudafe++, cicc),
/// `file:12:3: fatal error: …` (the host compiler), `ptxas error   : …`, `nvcc fatal   : …`.
pub(crate) fn first_error(log: &str, status: &str) -> String {
    const MAX_LINES: usize = 12;
    let lines: Vec<_> = log.lines().collect();
    let Some(start) = lines.iter().position(|line| is_error(line)) else {
        // Without an error line, the last lines have to do. The result is never an empty text.
        let words = lines.iter().rev().filter(|line| !line.trim().is_empty());
        let mut last: Vec<_> = words.take(MAX_LINES).copied().collect();
        last.reverse();
        return match last.is_empty() {
            true => format!("nvcc ended with {status} and printed nothing"),
            false => format!(
                "nvcc ended with {status}; its last words:\n{}",
                last.join("\n")
            ),
        };
    };
    let more = lines[start + 1..].iter().take(MAX_LINES);
    let more = more
        .take_while(|line| !line.trim().is_empty() && !is_error(line) && !line.contains("warning"));
    lines[start..=start + more.count()].join("\n")
}

fn is_error(line: &str) -> bool {
    const MARKS: &str = ": error|: fatal error|: catastrophic error| fatal   :| error   :|: Killed|\
                         Internal error|internal compiler error";
    line.starts_with("error:") || has(line, MARKS)
}

/// True if a text has one of the marks, which are separated by `|`.
fn has(text: &str, marks: &str) -> bool {
    marks.split('|').any(|mark| text.contains(mark))
}

/// True if a compiler ended because memory ran out. It said so, or the system killed it.
pub(crate) fn ran_out_of_memory(log: &str, signal: Option<i32>) -> bool {
    const MARKS: &str = "out of memory|bad_alloc|Cannot allocate memory|memory exhausted|: Killed|\
                         died due to signal 9";
    signal == Some(9) || has(log, MARKS)
}

/// Returns a way to fix an error whose cause is known.
pub(crate) fn hint(log: &str, signal: Option<i32>) -> Option<String> {
    let mut missing = log.lines().filter_map(|line| {
        let rest = line.split("fatal error: ").nth(1)?;
        rest.strip_suffix(": No such file or directory")
    });
    if let Some(header) = missing.next() {
        let folder = header.split('/').next();
        return Some(match folder {
            Some("cutlass" | "cute") => {
                format!("{header} belongs to CUTLASS: call Kernels::cutlass in the build script")
            }
            _ => format!(
                "no include root holds {header}: add the folder that does with Kernels::include"
            ),
        });
    }
    // The first text is nvcc's, the others are those of GCC and Clang for a C++ unit.
    let linkage = "linkage specification is incompatible|conflicting declaration of|\
                   has a different language linkage";
    let known = [
        (
            has(log, "unsupported GNU version|unsupported clang version"),
            "this nvcc does not take a host compiler that new: name an older one in NVCC_CCBIN",
        ),
        (
            ran_out_of_memory(log, signal),
            "the compiler ran out of memory: build with fewer jobs (cargo build -j 1), or split \
             the unit",
        ),
        (
            has(log, "No space left on device"),
            "the disk is full: free some space, or move the target folder with CARGO_TARGET_DIR",
        ),
        (
            has(log, "not supported on .target|requires .target"),
            "the instruction needs another architecture: the source belongs into that \
             architecture's folder",
        ),
        (
            has(log, linkage) && log.contains("extern \"C\""),
            "the header declares it without extern \"C\": put its declarations between #ifdef \
             __cplusplus, extern \"C\" {, #endif and their end",
        ),
    ];
    let mut hints = known.into_iter().filter(|(is_it, _)| *is_it);
    hints.next().map(|(_, hint)| hint.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_of_each_compiler_is_found_with_its_explanation() {
        let log = "cuda/a.cu(3): warning #177-D: unused\n\n\
                   cuda/a.cu(12): error: identifier \"x\" is undefined\n    x = 3;\n    ^\n\n\
                   cuda/a.cu(14): error: expected a \";\"\n";
        assert_eq!(
            first_error(log, "exit status: 2"),
            "cuda/a.cu(12): error: identifier \"x\" is undefined\n    x = 3;\n    ^"
        );
        for line in [
            "a.cu:1:10: fatal error: x.h: No such file or directory",
            "ptxas error   : Entry function 'k' uses too much shared data",
            "nvcc fatal   : Unsupported gpu architecture 'compute_100a'",
            "ptxas fatal   : Unresolved extern function 'f'",
        ] {
            assert_eq!(first_error(&format!("noise\n{line}\n"), ""), line);
        }
    }

    #[test]
    fn the_message_is_never_empty() {
        assert_eq!(
            first_error("", "exit status: 1"),
            "nvcc ended with exit status: 1 and printed nothing"
        );
        assert!(first_error("strange\n", "signal: 11").contains("strange"));
    }

    #[test]
    fn known_causes_have_a_hint() {
        let hinted = |log: &str, signal, word: &str| {
            let hint = hint(log, signal).unwrap_or_default();
            assert!(hint.contains(word), "{log}: {hint}");
        };
        hinted(
            "a.cu:1:10: fatal error: cute/tensor.hpp: No such file or directory",
            None,
            "Kernels::cutlass",
        );
        hinted(
            "a.cu:1:10: fatal error: mine.h: No such file or directory",
            None,
            "Kernels::include",
        );
        hinted(
            "#error -- unsupported GNU version! gcc versions later than 15 are not supported!",
            None,
            "NVCC_CCBIN",
        );
        hinted("", Some(9), "fewer jobs");
        hinted(
            "a.cu(7): error: linkage specification is incompatible with previous \"f\" (declared \
             at line 3 of a.h)\n    extern \"C\" int f(void) {\n",
            None,
            "between #ifdef __cplusplus",
        );
        hinted(
            "cc1plus: out of memory allocating 65536 bytes",
            None,
            "fewer jobs",
        );
        hinted(
            "ptxas: Instruction 'wgmma' not supported on .target 'sm_80'",
            None,
            "folder",
        );
        assert_eq!(hint("cuda/a.cu(12): error: expected a \";\"", None), None);
    }
}
