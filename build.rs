//! Compiles the kernels of the enabled architectures. Without one there is nothing to do, and nothing
//! of CUDA is needed.

#[cfg(any(feature = "sm90", feature = "sm100"))]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Where documentation is built there is no CUDA, and nothing is linked: the declarations that a test holds
    // to the header will do.
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    if std::env::var_os("DOCS_RS").is_some() {
        println!("cargo::rerun-if-changed=cuda/include/mla.rs");
        let output =
            std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
        std::fs::copy("cuda/include/mla.rs", output.join("mla.rs"))?;
        return Ok(());
    }
    mla_build::Kernels::new()
        .sources("cuda/**/*.cu")
        .header("cuda/include/mla.h")
        .include("cuda")
        .cutlass()
        .install_command("cargo xtask toolkit")
        .compile("mla")?;
    Ok(())
}

#[cfg(not(any(feature = "sm90", feature = "sm100")))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
