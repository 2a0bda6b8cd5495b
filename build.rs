//! Compiles the kernels of the families that are turned on. With none on there is nothing to
//! compile, and nothing of CUDA is needed.

#[cfg(feature = "gpu")]
#[path = "cuda/kernels.rs"]
mod kernels;

use std::error::Error;
#[cfg(feature = "gpu")]
use std::{env, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "gpu")]
    {
        // The test `launches` has a runtime of its own, which takes the place of CUDA's. A package
        // has no tests, and Cargo refuses arguments for tests that there are not.
        if Path::new("tests").exists() {
            println!("cargo::rustc-link-arg-tests=-Wl,--allow-multiple-definition");
        }
        compile()?;
    }
    Ok(())
}

/// Writes a file into the build's output folder. A file that has this text already is left alone,
/// since a new modification time would make Cargo compile its users again.
#[cfg(feature = "gpu")]
fn write(name: &str, text: &str) -> Result<(), Box<dyn Error>> {
    let path = Path::new(&env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?).join(name);
    if fs::read_to_string(&path).is_ok_and(|known| known == text) {
        return Ok(());
    }
    Ok(fs::write(path, text)?)
}

#[cfg(feature = "gpu")]
fn compile() -> Result<(), Box<dyn Error>> {
    let root = Path::new("");
    let mut kernels = kernels::kernels(root)?
        .header("cuda/include/mla.h")
        .declarations("cuda/include/mla.rs");
    let mut headers = kernels::of_families(root, "mla_*.h")?;
    if cfg!(feature = "division") {
        headers.extend(kernels::of_families(root, "mla_*_division.h")?);
    }
    for (family, header) in headers {
        kernels = kernels.family_header(family, header);
    }
    for (_, targets) in kernels::of_families(root, "targets.txt")? {
        println!("cargo::rerun-if-changed={targets}");
    }
    let kernels = prebuilt(kernels);
    if kernels.enabled()?.is_empty() {
        // A build without kernels compiles and links nothing. It takes the checked-in declarations,
        // which a test compares with the header.
        println!("cargo::rerun-if-changed=cuda/include/mla.rs");
        write(
            "mla.rs",
            &refusing(&fs::read_to_string("cuda/include/mla.rs")?),
        )?;
        kernels.constants("mla")?;
        return write("cuda.rs", &cuda(None));
    }
    let built = kernels.compile("mla")?;
    let compilers = built.report.toolkit.into_iter();
    let mut versions = compilers
        .filter(|it| it.part == "CUDA")
        .map(|it| it.version);
    write("cuda.rs", &cuda(versions.next().flatten().as_deref()))
}

/// Returns the text of the file that `src/gpu.rs` includes: major and minor number of the CUDA
/// release that compiled the kernels.
#[cfg(feature = "gpu")]
fn cuda(version: Option<&str>) -> String {
    let release = version.and_then(|version| {
        let mut numbers = version.split('.').map(|number| number.parse::<u32>());
        Some([numbers.next()?.ok()?, numbers.next()?.ok()?])
    });
    format!("const CUDA_OF_KERNELS: Option<[u32; 2]> = {release:?};\n")
}

/// Adds the prebuilt objects of each family.
#[cfg(feature = "gpu")]
fn prebuilt(kernels: mla_build::Kernels) -> mla_build::Kernels {
    #[cfg(feature = "sm80")]
    let kernels = kernels
        .prebuilt(mla_kernels_sm80::FOLDER)
        .prebuilt(mla_kernels_sm80_decode::FOLDER);
    #[cfg(feature = "sm90")]
    let kernels = kernels.prebuilt(mla_kernels_sm90::FOLDER);
    #[cfg(feature = "sm100")]
    let kernels = kernels.prebuilt(mla_kernels_sm100::FOLDER);
    kernels
}

/// Gives each declared function a body that refuses the call. A build without kernels then links.
#[cfg(feature = "gpu")]
fn refusing(declarations: &str) -> String {
    let lines = declarations.lines();
    let named = lines.filter(|line| !line.trim_start().starts_with("#[link_name"));
    named
        .map(|line| format!("{line}\n"))
        .collect::<String>()
        .replace(
            "unsafe extern \"C\" {\n    pub fn ",
            "pub unsafe extern \"C\" fn ",
        )
        .replace(
            ") -> MlaStatus;\n}",
            ") -> MlaStatus {\n    super::left_out()\n}",
        )
}
