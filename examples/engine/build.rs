//! Compiles the engine's own kernels, for the operations of a model besides attention and GEMMs.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "gpu")]
    mla_build::Kernels::new()
        .sources("kernels/**/*.cu")
        .header("kernels/rows.h")
        .compile("engine_rows")?;
    Ok(())
}
