//! Compiles kernels into cubins and PTX with a manifest. A program can load them through the
//! driver, and links nothing.

use std::{fs, path::PathBuf};

use anyhow::Context;
use mla_build::code::{Code, FILE};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

// The kernels are compiled in the same way as in the build of the working tree.
use crate::{Workspace, sass::described};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The families to compile.
    #[arg(long, value_delimiter = ',', default_values = ["sm80", "sm90"])]
    families: Vec<String>,
    /// A glob for the sources to compile, below cuda.
    #[arg(long, default_value = "**")]
    only: String,
    /// The output folder, which is emptied first [default: target/cubins].
    #[arg(long)]
    out: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let folder = match &arguments.out {
        Some(folder) => std::path::absolute(folder)?,
        None => workspace.target.join("cubins"),
    };
    described(&workspace.root, &arguments.families, &arguments.only)?
        .declarations("cuda/include/mla.rs")
        .out_dir(workspace.target.join("cubins-build"))
        .code(&folder)
        .compile("mla")?;
    let path = folder.join(FILE);
    let code: Code = serde_json::from_slice(&fs::read(&path)?)?;
    let mut manifest = serde_json::to_value(&code)?;
    let files = manifest["files"].as_array_mut();
    for file in files.context("a description without files")? {
        let name = file["file"].as_str().context("a file without a name")?;
        let hash = Sha256::digest(fs::read(folder.join(name))?);
        let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        file["sha256"] = json!(digits);
    }
    fs::write(&path, serde_json::to_string_pretty(&manifest)? + "\n")?;
    print!("{}", summary(&code, &manifest));
    println!("{}", folder.display());
    Ok(())
}

/// Lists the kernels that can be launched with the manifest alone, and those for which it has no
/// launch.
fn summary(code: &Code, manifest: &Value) -> String {
    let kernels: Vec<_> = code.files.iter().flat_map(|file| &file.kernels).collect();
    let described = kernels.iter().filter(|kernel| kernel.launch.is_some());
    let (described, all) = (described.count(), kernels.len());
    let files = manifest["files"].as_array().map_or(0, Vec::len);
    format!(
        "{files} files, {all} kernels: {described} with their launch, {} with their parameters' \
         sizes alone\n",
        all - described
    )
}
