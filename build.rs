//! Compiles the kernels of the families that are turned on, and writes the list of all families, on
//! or off. With none on there is nothing to compile, and nothing of CUDA is needed.

#[cfg(feature = "gpu")]
#[path = "cuda/kernels.rs"]
mod kernels;

use std::{env, error::Error, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=Cargo.toml");
    let families = families(&fs::read_to_string("Cargo.toml")?);
    write("families.rs", &modules(&families)?)?;
    #[cfg(feature = "gpu")]
    compile(&families)?;
    Ok(())
}

/// Returns the families: the features that turn on `gpu`.
fn families(manifest: &str) -> Vec<String> {
    let lines = manifest.lines().filter(|line| !line.starts_with('#'));
    let section: Vec<_> = lines
        .skip_while(|line| *line != "[features]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .collect();
    let features = section.join("");
    let each = features
        .split(']')
        .filter_map(|feature| feature.split_once(" = ["));
    each.filter(|(_, on)| on.split(',').any(|name| name.trim() == "\"gpu\""))
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// Generates the file that `src/backends/mod.rs` includes: a module for each family, and the lists
/// to which the families add.
fn modules(families: &[String]) -> Result<String, Box<dyn Error>> {
    let root = env::var("CARGO_MANIFEST_DIR")?;
    let (mut modules, mut compiled) = (String::new(), String::new());
    let (mut prefill, mut decode) = ("()".to_owned(), "()".to_owned());
    for family in families.iter().rev() {
        let path = Path::new(&root).join(format!("src/backends/{family}/mod.rs"));
        if !path.exists() {
            let path = path.display();
            return Err(
                format!("feature {family}: it turns on `gpu`, and there is no {path}").into(),
            );
        }
        modules = format!("#[path = {path:?}]\npub mod {family};\n{modules}");
        compiled = format!(
            "    #[cfg(feature = \"{family}\")]\n    CompiledFamily {{ name: \"{family}\", \
             targets: crate::raw::compiled::{} }},\n{compiled}",
            family.to_uppercase()
        );
        prefill = format!("{family}::Prefill<{prefill}>");
        decode = format!("{family}::Decode<{decode}>");
    }
    let absent = "Those of a family that this\n\
                  /// build leaves out are absent ones, so that a refusal names the feature.";
    Ok(format!(
        "{modules}\n\
         /// The families that this build compiled, and their targets.\n\
         pub const FAMILIES: &[CompiledFamily] = &[\n{compiled}];\n\n\
         /// The features that compile a family each, on or off.\n\
         pub const FAMILY_FEATURES: &[&str] = &{families:?};\n\n\
         /// The built-in prefill backends, to [choose from](mla_runtime::dispatch). {absent}\n\
         pub type PrefillBackends = {prefill};\n\n\
         /// The built-in decode backends, to [choose from](mla_runtime::dispatch). {absent}\n\
         pub type DecodeBackends = {decode};\n"
    ))
}

/// Writes a file of the build. An equal one keeps its time, or what includes it would be compiled
/// again.
fn write(name: &str, text: &str) -> Result<(), Box<dyn Error>> {
    let path = Path::new(&env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?).join(name);
    if fs::read_to_string(&path).is_ok_and(|known| known == text) {
        return Ok(());
    }
    Ok(fs::write(path, text)?)
}

#[cfg(feature = "gpu")]
fn compile(families: &[String]) -> Result<(), Box<dyn Error>> {
    let kernels = kernels::kernels(Path::new(""), families)?
        .header("cuda/include/mla.h")
        .declarations("cuda/include/mla.rs");
    let kernels = prebuilt(with_headers(kernels, families));
    if kernels.enabled()?.is_empty() {
        // A build without kernels compiles and links nothing: the declarations that a test holds to
        // the header will do.
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

/// File that `src/gpu.rs` includes: the release of the CUDA that compiled the kernels, major and
/// minor.
#[cfg(feature = "gpu")]
fn cuda(version: Option<&str>) -> String {
    let release = version.and_then(|version| {
        let mut numbers = version.split('.').map(|number| number.parse::<u32>());
        Some([numbers.next()?.ok()?, numbers.next()?.ok()?])
    });
    format!("const CUDA_OF_KERNELS: Option<[u32; 2]> = {release:?};\n")
}

/// Adds the files that each family has in the folder of its kernels: its targets in `targets.txt`,
/// which the description of the kernels reads, and the functions that Rust calls in
/// `mla_<family>.h`.
#[cfg(feature = "gpu")]
fn with_headers(mut kernels: mla_build::Kernels, families: &[String]) -> mla_build::Kernels {
    for family in families {
        let targets = format!("cuda/{family}/targets.txt");
        // A missing file would make the build run every time.
        if Path::new(&targets).exists() {
            println!("cargo::rerun-if-changed={targets}");
        }
        let header = format!("cuda/{family}/mla_{family}.h");
        if Path::new(&header).exists() {
            kernels = kernels.family_header(family, header);
        }
    }
    kernels
}

/// Adds the objects that a release brings of each family.
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

/// Returns the declarations with a body for each function that refuses the call, so that the device
/// alone links.
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
