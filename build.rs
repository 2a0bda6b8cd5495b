//! Compiles the kernels of the families that are turned on. Without one there is nothing to do, and
//! nothing of CUDA is needed.

#[cfg(feature = "gpu")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let kernels = mla_build::Kernels::new()
        .sources("cuda/**/*.cu")
        .header("cuda/include/mla.h")
        .declarations("cuda/include/mla.rs")
        .include("cuda")
        .cutlass()
        // Machine code for four targets and PTX: a quarter of the bytes, for every driver since CUDA 12.4's.
        .flag_for("cuda/sm80/**/*.cu", "--compress-mode=size")
        // A switch over the cache formats names them all.
        .flag("-Xcompiler=-Werror=switch")
        .install_command("cargo xtask toolkit");
    let kernels = prebuilt(kernels);
    if kernels.enabled()?.is_empty() {
        // Nothing is compiled or linked: the declarations that a test holds to the header will do.
        println!("cargo::rerun-if-changed=cuda/include/mla.rs");
        let output =
            std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
        let declarations = std::fs::read_to_string("cuda/include/mla.rs")?;
        std::fs::write(output.join("mla.rs"), refusing(&declarations))?;
        kernels.constants("mla")?;
        return Ok(());
    }
    kernels.compile("mla")?;
    Ok(())
}

/// With the objects that a release brings of each family.
#[cfg(feature = "gpu")]
fn prebuilt(kernels: mla_build::Kernels) -> mla_build::Kernels {
    #[cfg(feature = "sm80")]
    let kernels = kernels.prebuilt(mla_kernels_sm80::FOLDER);
    #[cfg(feature = "sm90")]
    let kernels = kernels.prebuilt(mla_kernels_sm90::FOLDER);
    #[cfg(feature = "sm100")]
    let kernels = kernels.prebuilt(mla_kernels_sm100::FOLDER);
    kernels
}

/// The declarations with a body for each function, by which it refuses: so that the device alone links.
#[cfg(feature = "gpu")]
fn refusing(declarations: &str) -> String {
    let lines = declarations.lines();
    let named = lines.filter(|line| !line.trim_start().starts_with("#[link_name"));
    named
        .map(|line| format!("{line}\n"))
        .collect::<String>()
        .replace("unsafe extern \"C\" {\n    pub fn ", "pub unsafe fn ")
        .replace(
            ") -> MlaStatus;\n}",
            ") -> MlaStatus {\n    super::left_out()\n}",
        )
}

#[cfg(not(feature = "gpu"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
