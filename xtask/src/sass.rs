//! Compares the machine code of two revisions, except for symbol names. A change that only renames
//! or moves code must not alter it.

// Both revisions are compiled in the same way as in the build of the working tree.
#[path = "../../cuda/kernels.rs"]
mod kernels;

use std::{
    collections::{BTreeMap, HashMap},
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, bail, ensure};
use mla_build::Kernels;

use crate::{Workspace, pip, succeed, text_of};

/// The disassemblers, which are not part of the toolkit. They can read the output of earlier
/// compilers. There is no wheel with them as old as the toolkit.
const PACKAGES: &[&str] = &[
    "nvidia-cuda-cuobjdump==13.2.51",
    "nvidia-cuda-nvdisasm==13.2.51",
];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The revision to compare with.
    #[arg(default_value = "HEAD")]
    before: String,
    /// The other revision [default: the working tree].
    after: Option<String>,
    /// The families to compile.
    #[arg(long, value_delimiter = ',', default_value = "sm90")]
    families: Vec<String>,
    /// Compile only sources whose path below `cuda/` matches this glob.
    #[arg(long, default_value = "**/*.cu")]
    only: String,
    /// Python whose pip downloads cuobjdump and nvdisasm once, if PATH does not have them.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Compile this tree into `--out` and exit. The command calls itself with this argument, since
    /// a build writes lines for Cargo to its standard output.
    #[arg(long, hide = true, requires = "out")]
    compile: Option<PathBuf>,
    #[arg(long, hide = true)]
    out: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let (Some(tree), Some(out)) = (&arguments.compile, &arguments.out) {
        return compile(arguments, tree, out);
    }
    let workspace = Workspace::find()?;
    let tools = Tools::find(arguments, &workspace)?;
    let folder = tempfile::tempdir()?;
    let before = checked_out(&workspace, &arguments.before, folder.path())?;
    let after = match &arguments.after {
        Some(revision) => checked_out(&workspace, revision, folder.path())?,
        None => workspace.root.clone(),
    };
    let functions = |name: &str, tree: &Path| {
        let out = folder.path().join(name);
        fs::create_dir(&out)?;
        tools.functions(&build(arguments, tree, &out)?)
    };
    report(&functions("before", &before)?, &functions("after", &after)?)
}

/// A function in machine code, for one target.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Function {
    /// The name that the compiler wrote.
    symbol: String,
    code: Code,
}

/// The parts of a function to compare.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Code {
    target: String,
    /// Registers, stack, shared and constant memory.
    resources: String,
    /// Instructions with their encodings.
    lines: Vec<String>,
}

/// Returns the folder of a revision's kernels, below `folder`.
fn checked_out(workspace: &Workspace, revision: &str, folder: &Path) -> anyhow::Result<PathBuf> {
    let mut git = Command::new("git");
    git.args(["rev-parse", "--verify", "--quiet"])
        .arg(format!("{revision}^{{commit}}"))
        .current_dir(&workspace.root);
    let commit = text_of(&mut git).with_context(|| {
        format!("revision: given {revision}, accepted a commit of this repository")
    })?;
    let commit = commit.trim().to_owned();
    let tree = folder.join(&commit);
    if tree.exists() {
        return Ok(tree);
    }
    fs::create_dir(&tree)?;
    let mut archive = Command::new("git")
        .args(["archive", &commit, "cuda"])
        .current_dir(&workspace.root)
        .stdout(Stdio::piped())
        .spawn()?;
    let unpacked = Command::new("tar")
        .arg("-x")
        .current_dir(&tree)
        .stdin(archive.stdout.take().context("git has no output")?)
        .status()
        .context("tar does not start")?;
    ensure!(
        archive.wait()?.success() && unpacked.success(),
        "{commit} has no folder cuda"
    );
    Ok(tree)
}

/// Compiles a tree in a separate process, and returns the library.
fn build(arguments: &Arguments, tree: &Path, out: &Path) -> anyhow::Result<PathBuf> {
    let mut compile = Command::new(env::current_exe()?);
    compile
        .args(["sass", "--families", &arguments.families.join(",")])
        .args(["--only", &arguments.only, "--compile"])
        .arg(tree)
        .arg("--out")
        .arg(out)
        .stdout(Stdio::null());
    succeed(&mut compile)?;
    let library = out.join("library");
    Ok(fs::read_to_string(&library)?.into())
}

/// Describes the kernels of a tree, of these families and of sources below `cuda` that match a
/// glob.
pub(crate) fn described(tree: &Path, families: &[String], only: &str) -> anyhow::Result<Kernels> {
    let kernels = kernels::kernels(tree)?.root(tree);
    let kernels = kernels.only_sources(format!("cuda/{only}"));
    Ok(families.iter().fold(kernels, Kernels::enable))
}

fn compile(arguments: &Arguments, tree: &Path, out: &Path) -> anyhow::Result<()> {
    let kernels = described(tree, &arguments.families, &arguments.only)?;
    let built = kernels.out_dir(out).compile("mla")?;
    fs::write(
        out.join("library"),
        built.library.to_string_lossy().as_ref(),
    )?;
    Ok(())
}

/// The disassemblers.
struct Tools {
    cuobjdump: PathBuf,
    /// The value of PATH that cuobjdump needs.
    path: std::ffi::OsString,
}

impl Tools {
    fn find(arguments: &Arguments, workspace: &Workspace) -> anyhow::Result<Self> {
        let path = env::var_os("PATH").unwrap_or_default();
        let on_path = |name: &str| {
            env::split_paths(&path)
                .map(|folder| folder.join(name))
                .find(|file| file.is_file())
        };
        if let (Some(cuobjdump), Some(_)) = (on_path("cuobjdump"), on_path("nvdisasm")) {
            return Ok(Self { cuobjdump, path });
        }
        let folder = workspace.target.join("sass-tools");
        let bin = PACKAGES
            .iter()
            .map(|package| installed(&arguments.python, &folder, package))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let cuobjdump = bin[0].join("cuobjdump");
        let path = env::join_paths(bin.into_iter().chain(env::split_paths(&path)))?;
        Ok(Self { cuobjdump, path })
    }

    fn output(&self, option: &str, library: &Path) -> anyhow::Result<String> {
        let mut cuobjdump = Command::new(&self.cuobjdump);
        text_of(cuobjdump.arg(option).arg(library).env("PATH", &self.path))
    }

    /// Returns the functions of a library, in no particular order.
    fn functions(&self, library: &Path) -> anyhow::Result<Vec<Function>> {
        let resources = resources(&self.output("-res-usage", library)?);
        let functions = functions(&self.output("-sass", library)?, &resources);
        ensure!(
            !functions.is_empty(),
            "{} holds no machine code",
            library.display()
        );
        Ok(functions)
    }
}

/// Returns the folder of a wheel's programs. Each wheel is installed into a separate folder, since
/// two of them have files with the same names.
fn installed(python: &Path, folder: &Path, package: &str) -> anyhow::Result<PathBuf> {
    let target = folder.join(package);
    if !target.exists() {
        fs::create_dir_all(folder)?;
        let staging = tempfile::tempdir_in(folder)?;
        println!("installing {package}");
        succeed(pip(python, staging.path()).arg(package))?;
        fs::rename(staging.keep(), &target)?;
    }
    Ok(target.join("nvidia/cu13/bin"))
}

/// The resources of functions, by target and symbol.
type Resources = HashMap<(String, String), String>;

/// Reads the output of `cuobjdump -res-usage`.
fn resources(text: &str) -> Resources {
    let mut lines = text.lines();
    let mut target = String::new();
    let mut found = HashMap::new();
    while let Some(line) = lines.next() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix("arch = ") {
            target = name.to_owned();
        } else if let Some(name) = line.strip_prefix("Function ")
            && let Some(usage) = lines.next()
        {
            let name = name.trim_end_matches(':').to_owned();
            found.insert((target.clone(), name), usage.trim().to_owned());
        }
    }
    found
}

/// Reads the functions from the output of `cuobjdump -sass`. Only headings contain names of
/// symbols.
fn functions(text: &str, resources: &Resources) -> Vec<Function> {
    let mut target = String::new();
    let mut functions: Vec<Function> = Vec::new();
    for line in text.lines() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix("arch = ") {
            target = name.to_owned();
        } else if let Some(name) = line.strip_prefix("Function : ") {
            functions.push(Function {
                symbol: name.to_owned(),
                code: Code {
                    target: target.clone(),
                    resources: resources
                        .get(&(target.clone(), name.to_owned()))
                        .cloned()
                        .unwrap_or_default(),
                    lines: Vec::new(),
                },
            });
        } else if line.starts_with("/*")
            && let Some(function) = functions.last_mut()
        {
            // The columns of encodings depend on the longest instruction of a file.
            let words: Vec<_> = line.split_whitespace().collect();
            function.code.lines.push(words.join(" "));
        }
    }
    functions
}

/// Returns the functions of `these` whose code is not among `those`. Equal functions are matched
/// one to one.
fn unmatched<'a>(these: &'a [Function], those: &[Function]) -> Vec<&'a Function> {
    let mut counts: HashMap<&Code, usize> = HashMap::new();
    for function in those {
        *counts.entry(&function.code).or_default() += 1;
    }
    these
        .iter()
        .filter(|function| match counts.get_mut(&function.code) {
            Some(count) if *count > 0 => {
                *count -= 1;
                false
            }
            _ => true,
        })
        .collect()
}

fn report(before: &[Function], after: &[Function]) -> anyhow::Result<()> {
    let (gone, new) = (unmatched(before, after), unmatched(after, before));
    let mut targets: BTreeMap<&str, usize> = BTreeMap::new();
    for function in after {
        *targets.entry(&function.code.target).or_default() += 1;
    }
    let targets: Vec<_> = targets
        .iter()
        .map(|(target, count)| format!("{count} for {target}"))
        .collect();
    println!(
        "{} functions before, {} after ({})",
        before.len(),
        after.len(),
        targets.join(", ")
    );
    if gone.is_empty() && new.is_empty() {
        println!("the machine code is the same, symbol names aside");
        return Ok(());
    }
    for (sign, functions) in [("-", &gone), ("+", &new)] {
        for function in functions.iter() {
            println!(
                "{sign} {} {} ({} instructions, {})",
                function.code.target,
                function.symbol,
                function.code.lines.len() / 2,
                function.code.resources
            );
        }
    }
    bail!(
        "{} functions are gone and {} are new",
        gone.len(),
        new.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "
Fatbin elf code:
================
arch = sm_90a

\t\tFunction : _Z1av
\t.headerflags\t@\"EF_CUDA_SM90\"
        /*0000*/                   LDC R1, c[0x0][0x28] ;   /* 0x00000a00ff017b82 */
                                                            /* 0x000fe20000000800 */
        /*0010*/                   EXIT ;                   /* 0x000000000000794d */
                                                            /* 0x000fea0003800000 */
\t\t..........

\t\tFunction : _Z1bv
        /*0000*/                   EXIT ;                   /* 0x000000000000794d */
                                                            /* 0x000fea0003800000 */
";

    const USAGE: &str = "
Fatbin elf code:
================
arch = sm_90a

Resource usage:
 Common:
  GLOBAL:0
 Function _Z1av:
  REG:8 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:528
 Function _Z1bv:
  REG:4 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:528
";

    fn parsed(dump: &str) -> Vec<Function> {
        functions(dump, &resources(USAGE))
    }

    #[test]
    fn a_function_is_its_target_its_resources_and_its_instructions() {
        let functions = parsed(DUMP);
        assert_eq!(functions.len(), 2);
        let first = &functions[0];
        assert_eq!(first.symbol, "_Z1av");
        assert_eq!(first.code.target, "sm_90a");
        assert!(first.code.resources.starts_with("REG:8"));
        assert_eq!(first.code.lines.len(), 4);
        assert_eq!(functions[1].code.lines.len(), 2);
    }

    #[test]
    fn names_and_order_do_not_matter_and_code_and_number_do() {
        let before = parsed(DUMP);
        let mut after = before.clone();
        after.reverse();
        after[0].symbol = "_Z7renamedv".to_owned();
        report(&before, &after).unwrap();
        after[0].code.lines[0] = "/*0000*/ NOP ; /* 0x0 */".to_owned();
        assert!(report(&before, &after).is_err());
        // A second copy of an existing function counts as new.
        let mut twice = before.clone();
        twice.push(before[0].clone());
        assert_eq!(unmatched(&twice, &before).len(), 1);
        assert!(unmatched(&before, &twice).is_empty());
    }

    #[test]
    fn where_an_encoding_stands_does_not_matter() {
        let wider = DUMP.replace(" ;  ", " ;          ");
        assert_ne!(wider, DUMP);
        report(&parsed(DUMP), &parsed(&wider)).unwrap();
    }

    #[test]
    fn registers_count_even_where_instructions_are_the_same() {
        let before = parsed(DUMP);
        let after = functions(DUMP, &resources(&USAGE.replace("REG:8", "REG:9")));
        assert_eq!(unmatched(&before, &after).len(), 1);
    }
}
