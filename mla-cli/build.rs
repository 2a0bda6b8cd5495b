//! Tells the program what it was built from, for the reports of benchmarks.

#[cfg(feature = "bench")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use vergen_gitcl::{Emitter, Gitcl, Rustc};

    // Without a repository or without git, a variable is not set, and the program reports it as
    // unknown.
    Emitter::default()
        .add_instructions(&Gitcl::builder().sha(false).dirty(true).build())?
        .add_instructions(&Rustc::builder().semver(true).build())?
        .emit()?;
    Ok(())
}

#[cfg(not(feature = "bench"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
