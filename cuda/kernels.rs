//! Compilation of the sources of this folder: shared by the build script and by whatever else
//! compiles them.

use std::{fs, io, path::Path};

use mla_build::{Family, Kernels};

/// Describes the kernels of the package in the folder `root`, without headers and with no family
/// on. A family that mla-build does not know lists its targets in `targets.txt` in its folder, one
/// of nvcc's names in a line.
///
/// # Errors
///
/// A folder or a `targets.txt` that cannot be read.
pub(crate) fn kernels(root: &Path) -> io::Result<Kernels> {
    let mut kernels = Kernels::new()
        .sources("cuda/**/*.cu")
        .include("cuda")
        .cutlass()
        // Machine code for four targets and PTX: a quarter of the bytes, for every driver since
        // CUDA 12.4's.
        .flag_for("cuda/{all,sm80}/**/*.cu", "--compress-mode=size")
        // Later GPUs have no further instruction that these kernels would use, so they get this
        // PTX, which has run on a Hopper. The registers of prefill are tuned for it: from nvcc's
        // PTX for other targets it spills.
        .ptx_for("cuda/sm80/**/*.cu", "compute_80")
        // Caches of e4m3 are converted by an instruction that 8.0 lacks.
        .ptx_for("cuda/sm80/decode/instantiations/*_e4m3*.cu", "compute_89")
        // A switch over the cache formats names them all.
        .flag("-Xcompiler=-Werror=switch")
        .launches("cuda/launches.json")
        .install_command("cargo xtask toolkit");
    for (family, targets) in of_families(root, "targets.txt")? {
        let targets = fs::read_to_string(root.join(targets))?;
        kernels = kernels.family(Family::new(family, targets.lines()));
    }
    Ok(kernels)
}

/// Returns the families that have a file of this name in their folders, and the files; `*` in the
/// name stands for the family's.
///
/// # Errors
///
/// If the folders cannot be read.
pub(crate) fn of_families(root: &Path, name: &str) -> io::Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(root.join("cuda"))? {
        let family = entry?.file_name().to_string_lossy().into_owned();
        let file = format!("cuda/{family}/{}", name.replace('*', &family));
        if root.join(&file).is_file() {
            files.push((family, file));
        }
    }
    files.sort();
    Ok(files)
}
