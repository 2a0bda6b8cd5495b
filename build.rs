//! Compiles the kernels of the enabled architectures. Without one there is nothing to do, and nothing
//! of CUDA is needed.

#[cfg(any(feature = "sm90", feature = "sm100"))]
fn main() -> Result<(), mla_build::Error> {
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
