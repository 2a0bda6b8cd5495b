//! How the sources of this folder are compiled: what the build script begins with, and whatever
//! else compiles them.

use std::{fs, io, path::Path};

use mla_build::{Family, Kernels};

/// The kernels of the package in the folder `root`, without headers, and with no family on. Each
/// of `families` has in its folder, in `targets.txt`, one of nvcc's names in a line, the targets
/// of one that mla-build does not know.
///
/// # Errors
///
/// A `targets.txt` that cannot be read.
pub(crate) fn kernels(root: &Path, families: &[String]) -> io::Result<Kernels> {
    let mut kernels = Kernels::new()
        .sources("cuda/**/*.cu")
        .include("cuda")
        .cutlass()
        // Machine code for four targets and PTX: a quarter of the bytes, for every driver since
        // CUDA 12.4's.
        .flag_for("cuda/{all,sm80}/**/*.cu", "--compress-mode=size")
        // Its registers are counted for this PTX: others of nvcc's spill. It has no instruction of
        // later GPUs.
        .ptx_for("cuda/sm80/prefill/**/*.cu", "compute_80")
        // A switch over the cache formats names them all.
        .flag("-Xcompiler=-Werror=switch")
        .install_command("cargo xtask toolkit");
    for family in families {
        match fs::read_to_string(root.join(format!("cuda/{family}/targets.txt"))) {
            Ok(targets) => kernels = kernels.family(Family::new(family, targets.lines())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(kernels)
}
