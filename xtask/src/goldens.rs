//! Checked-in files that tests compare with the output of the code.

use anyhow::ensure;

use crate::Workspace;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Write the files again instead of comparing them, and then review the changes.
    #[arg(long)]
    bless: bool,
}

/// The tests that compare the files. These are the attribute's expansions and its table of keys,
/// the compiler's errors, the machine code of a dispatch, the command's output, and the benchmarks'
/// tables and picture.
const TESTS: &[&[&str]] = &[
    &["--package", "mla-macros", "--lib"],
    &["--package", "mla-runtime", "--test", "ui"],
    &["--package", "mla-runtime", "--test", "ui_build"],
    &["--package", "mla-macros-renamed", "--test", "ui"],
    &["--package", "mla-dispatch", "--test", "dispatch"],
    &["--package", "mla-cli", "--test", "command"],
    &["--package", "xtask", "--test", "benchmarks"],
];

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    for test in TESTS {
        let mut command = workspace.cargo();
        command.arg("test").args(*test);
        if arguments.bless {
            command.env("MLA_BLESS", "1").env("TRYBUILD", "overwrite");
        } else {
            command.env_remove("MLA_BLESS").env_remove("TRYBUILD");
        }
        ensure!(
            command.status()?.success(),
            "`cargo test {}` failed; where a golden file is stale, run `cargo xtask goldens \
             --bless`",
            test.join(" ")
        );
    }
    Ok(())
}
