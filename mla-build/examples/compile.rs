//! Compiles the kernels below a folder without Cargo, since the library also works outside build
//! scripts.
//!
//! `cargo run -p mla-build --example compile -- FOLDER OUTPUT --sources 'cuda/**/*.cu' --family
//! sm90`

use std::path::PathBuf;

use clap::Parser;
use mla_build::{Kernels, Wheel, report};

/// Compile the CUDA kernels below a folder into a static library.
#[derive(Parser)]
struct Arguments {
    /// The folder that sources and includes are relative to. Without this argument, the program
    /// runs as a build script of Cargo.
    #[arg(requires = "output")]
    root: Option<PathBuf>,
    /// The folder for the library.
    output: Option<PathBuf>,
    /// Globs of the sources.
    #[arg(long, default_value = "cuda/**/*.cu")]
    sources: Vec<String>,
    /// A library and the glob of its sources: NAME=GLOB. Repeat this for several libraries. By
    /// default, all sources go into one library, `kernels`.
    #[arg(long, value_parser = pair)]
    library: Vec<(String, String)>,
    /// A family of kernels, by the name of its feature. `none` leaves the choice to the features
    /// of the package.
    #[arg(long, default_value = "sm90")]
    family: Vec<String>,
    /// Build without a family, too.
    #[arg(long)]
    optional: bool,
    /// The header that declares what Rust calls.
    #[arg(long)]
    header: Option<PathBuf>,
    /// Include roots.
    #[arg(long)]
    include: Vec<PathBuf>,
    /// The declarations to take where only bindings are asked for.
    #[arg(long)]
    declarations: Option<PathBuf>,
    /// A family's own header: FAMILY=HEADER.
    #[arg(long, value_parser = pair)]
    family_header: Vec<(String, String)>,
    /// Folders of objects that were compiled before.
    #[arg(long)]
    prebuilt: Vec<PathBuf>,
    /// Require the CUTLASS headers and make them an include root.
    #[arg(long)]
    cutlass: bool,
    /// A pinned wheel and a folder of it, whose headers count as the system's:
    /// NAME==VERSION:FOLDER.
    #[arg(long, value_parser = wheel)]
    wheel: Vec<Wheel>,
    /// The C++ compiler.
    #[arg(long)]
    host_compiler: Option<PathBuf>,
    /// The largest number of compilers that run at once. The default is what the jobserver of a
    /// parent process allows.
    #[arg(long)]
    jobs: Option<usize>,
}

fn wheel(text: &str) -> Result<Wheel, String> {
    let parts = text.split_once("==").and_then(|(name, rest)| {
        let (version, folder) = rest.split_once(':')?;
        Some(Wheel::new(name, version).system(folder))
    });
    parts.ok_or_else(|| "accepted: NAME==VERSION:FOLDER".to_owned())
}

fn pair(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=');
    parts
        .map(|(name, glob)| (name.to_owned(), glob.to_owned()))
        .ok_or_else(|| "accepted: two names with = between them".to_owned())
}

fn main() -> Result<(), mla_build::Error> {
    let arguments = Arguments::parse();
    let mut kernels = Kernels::new();
    if let (Some(root), Some(output)) = (&arguments.root, &arguments.output) {
        kernels = kernels.root(root).out_dir(output);
    }
    if let Some(jobs) = arguments.jobs {
        kernels = kernels.jobs(jobs);
    }
    for family in arguments.family.iter().filter(|family| *family != "none") {
        kernels = kernels.enable(family);
    }
    if arguments.optional {
        kernels = kernels.optional();
    }
    if let Some(header) = arguments.header {
        kernels = kernels.header(header);
    }
    for folder in arguments.include {
        kernels = kernels.include(folder);
    }
    if let Some(file) = arguments.declarations {
        kernels = kernels.declarations(file);
    }
    for (family, header) in arguments.family_header {
        kernels = kernels.family_header(family, header);
    }
    for folder in arguments.prebuilt {
        kernels = kernels.prebuilt(folder);
    }
    if arguments.cutlass {
        kernels = kernels.cutlass();
    }
    for wheel in arguments.wheel {
        kernels = kernels.wheel(wheel);
    }
    if let Some(path) = arguments.host_compiler {
        kernels = kernels.host_compiler(path);
    }
    for (name, glob) in &arguments.library {
        let built = kernels.clone().sources(glob).compile(name)?;
        println!("{}", report::table(&built.report));
    }
    if arguments.library.is_empty() {
        for glob in arguments.sources {
            kernels = kernels.sources(glob);
        }
        println!("{}", report::table(&kernels.compile("kernels")?.report));
    }
    Ok(())
}
