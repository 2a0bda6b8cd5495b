//! The programs of a toolkit that take part in a compilation, identified by their contents. The
//! version that nvcc reports does not show that `ptxas` was replaced.

use std::path::{Path, PathBuf};

use super::Cuda;

/// Paths of programs relative to the toolkit. A folder stands for all files in it.
const PROGRAMS: &[&str] = &[
    "bin/nvcc.profile",
    "bin/cudafe++",
    "bin/cicc",
    "bin/ptxas",
    "bin/fatbinary",
    "bin/bin2c",
    "bin/crt",
    "nvvm/bin",
    "nvvm/libdevice",
    "nvvm/lib64",
];

impl Cuda {
    /// Returns the existing files, with names that do not depend on the toolkit's path.
    pub(crate) fn programs(&self) -> Vec<(String, PathBuf)> {
        let mut programs = vec![("nvcc".to_owned(), self.nvcc.clone())];
        for name in PROGRAMS {
            let path = self.found.path.join(name);
            if path.is_dir() {
                let mut inside = files(&path);
                inside.sort();
                for file in inside {
                    programs.push((format!("{name}/{file}"), path.join(&file)));
                }
            } else if path.is_file() {
                programs.push(((*name).to_owned(), path));
            }
        }
        programs
    }
}

fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.path().is_file())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}
