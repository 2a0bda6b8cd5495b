//! The Rust declarations of the kernels' C interface, in files beside its headers.

use std::{fs, path::Path};

use anyhow::{Context, ensure};
use cargo_metadata::Message;

use crate::{Workspace, messages};

pub(crate) fn run() -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let all = made(&workspace)?;
    // The declarations of each header follow a line that names it.
    for of_header in all.split("\n// ") {
        let of_header = of_header.trim_start_matches("// ");
        let (header, items) = of_header.split_once('\n').context("no declarations")?;
        let header = Path::new(header);
        ensure!(
            workspace.root.join(header).is_file(),
            "the declarations name no header: {}",
            header.display()
        );
        let file = header.with_extension("rs");
        let text = format!("// {}\n{}\n", header.display(), items.trim_end());
        let path = workspace.root.join(&file);
        if fs::read_to_string(&path).is_ok_and(|known| known == text) {
            println!("{}: as it was", file.display());
            continue;
        }
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("{}: written", file.display());
    }
    Ok(())
}

/// Returns the declarations that bindgen writes for the headers of all families. The package itself
/// need not compile, since it may lack the very declarations that will be written.
fn made(workspace: &Workspace) -> anyhow::Result<String> {
    let features = families(workspace)?.join(",") + ",division";
    let mut check = workspace.cargo();
    check
        .args(["check", "--quiet", "--package=mla-kernels"])
        .arg(format!("--features={features}"))
        .env("MLA_BUILD_ONLY", "new-bindings");
    let (_, messages) = messages(&mut check)?;
    let scripts = messages.into_iter().filter_map(|message| match message {
        Message::BuildScriptExecuted(script) => Some(script),
        _ => None,
    });
    let mut own = scripts.filter(|it| it.package_id.repr.contains("#mla-kernels@"));
    let script = own.next_back().with_context(|| {
        format!(
            "the build script of mla-kernels failed; \
             `MLA_BUILD_ONLY=new-bindings cargo check -p mla-kernels --features {features}` says \
             why"
        )
    })?;
    let path = script.out_dir.join("mla.rs");
    fs::read_to_string(&path).with_context(|| path.to_string())
}

/// The features that turn on `gpu`: the families.
fn families(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut packages = workspace.metadata()?.packages.into_iter();
    let package = packages.find(|package| package.name.as_str() == "mla-kernels");
    let features = package.context("no package mla-kernels")?.features;
    let families = features
        .into_iter()
        .filter(|(_, on)| on.iter().any(|it| it == "gpu"));
    Ok(families.map(|(name, _)| name).collect())
}
