//! Compilation of the sources of this folder, for the build script and for others that compile
//! them.

use std::{fs, io, path::Path};

use mla_build::{Family, Kernels};

/// Describes the kernels of the package in the folder `root`, without headers and with no family
/// on. If mla-build does not know a family, the family's folder has a `targets.txt`, which lists
/// its targets by nvcc's names, one in a line.
///
/// # Errors
///
/// If a folder or a `targets.txt` cannot be read.
pub(crate) fn kernels(root: &Path) -> io::Result<Kernels> {
    let mut kernels = Kernels::new()
        .sources("cuda/**/*.cu")
        .include("cuda")
        .cutlass()
        // Machine code for four targets and PTX take a quarter of the bytes this way. Every driver
        // since that of CUDA 12.4 can load them.
        .flag_for("cuda/{all,sm80}/**/*.cu", "--compress-mode=size")
        // GPUs without machine code get this PTX, which has run on a Hopper. These kernels would
        // use no instruction that only later GPUs have. The registers of prefill are tuned for this
        // PTX. With nvcc's PTX for other targets, prefill spills.
        .ptx_for("cuda/sm80/**/*.cu", "compute_80")
        // The exception is the instruction that converts caches of e4m3, which 8.0 lacks.
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

/// Returns the families that have a file of this name in their folders, and the files. `*` in the
/// name stands for the family's name.
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
