//! The command lines that clangd reads. clangd speaks clang's dialect of CUDA, so flags of nvcc are
//! translated to clang's.

use crate::{
    compiler::Compiler,
    unit::{Language, Unit},
};

/// Flags of nvcc that clang spells otherwise. `{}` in the second spelling stands for a value of the
/// first.
const SPELLED: &[(&str, &str)] = &[
    ("lineinfo", "-gline-tables-only"),
    ("generate-line-info", "-gline-tables-only"),
    ("G", "-g"),
    ("device-debug", "-g"),
    ("use_fast_math", "-ffast-math"),
    ("ftz", "-fgpu-flush-denormals-to-zero"),
    ("default-stream", "-fgpu-default-stream={}"),
    ("std", "-std={}"),
    ("optimize", "-O{}"),
    ("undefine-macro", "-U{}"),
];

impl Compiler {
    /// Returns the arguments for a unit: its macros, include roots and flags.
    pub(crate) fn for_clangd(&self, unit: &Unit) -> Vec<String> {
        let mut arguments = vec!["clang++".to_owned()];
        let flags = self.fixed(unit).into_iter();
        match unit.language {
            Language::Cuda => {
                let cuda = ["-x", "cuda", "-nocudalib", "-Wno-unknown-cuda-version"];
                arguments.extend(cuda.map(str::to_owned));
                // clang compiles for one target, and does not know targets for a family of GPUs.
                if let Some(target) = unit.targets.first() {
                    let exact = if target.to_string() == "sm_90a" {
                        "a"
                    } else {
                        ""
                    };
                    arguments.push(format!("--cuda-gpu-arch=sm_{}{exact}", target.number));
                }
                arguments.push(format!("--cuda-path={}", self.cuda.found.path.display()));
                arguments.extend(flags.flat_map(|flag| in_clang(&flag)));
            }
            Language::Cpp => arguments.extend(flags),
        }
        for include in &self.includes {
            let flag = if include.is_system { "-isystem" } else { "-I" };
            arguments.push(format!("{flag}{}", include.folder.display()));
        }
        arguments.push(format!("-isystem{}", self.cuda.include.display()));
        arguments.extend(["-c".to_owned(), unit.source.clone()]);
        arguments
    }
}

/// Translates a flag of nvcc to clang's. A flag that clang does not know is left out. Extended
/// lambdas, for example, need no flag there.
fn in_clang(flag: &str) -> Vec<String> {
    let shared = ["-D", "-U", "-O", "-W", "-g"].iter();
    let is_shared = shared.into_iter().any(|start| flag.starts_with(start));
    if is_shared && !flag.starts_with("-gen") {
        return vec![flag.to_owned()];
    }
    let name = flag.trim_start_matches('-');
    let (name, value) = name.split_once('=').unwrap_or((name, ""));
    match name {
        "Xcompiler" | "compiler-options" => value.split(',').map(str::to_owned).collect(),
        "Xptxas" | "ptxas-options" => {
            let options = value.split(',').flat_map(|option| ["-Xcuda-ptxas", option]);
            options.map(str::to_owned).collect()
        }
        "maxrregcount" => in_clang(&format!("-Xptxas=--maxrregcount={value}")),
        "ftz" | "use_fast_math" if value == "false" => Vec::new(),
        "fmad" if value == "false" => vec!["-ffp-contract=off".to_owned()],
        "fmad" => vec!["-ffp-contract=fast".to_owned()],
        _ => SPELLED
            .iter()
            .filter(|(nvcc, _)| *nvcc == name)
            .map(|(_, clang)| clang.replace("{}", value))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_told_in_the_words_of_clang() {
        for (nvcc, clang) in [
            ("-DTILE=64", "-DTILE=64"),
            ("-std=c++20", "-std=c++20"),
            ("-lineinfo", "-gline-tables-only"),
            ("--use_fast_math", "-ffast-math"),
            ("-Xcompiler=-fPIC,-Wall", "-fPIC -Wall"),
            ("-Xptxas=-v,-O2", "-Xcuda-ptxas -v -Xcuda-ptxas -O2"),
            ("-maxrregcount=128", "-Xcuda-ptxas --maxrregcount=128"),
            ("--fmad=false", "-ffp-contract=off"),
            ("-O3", "-O3"),
            ("-gencode=arch=compute_90a,code=sm_90a", ""),
            ("--expt-relaxed-constexpr", ""),
        ] {
            assert_eq!(in_clang(nvcc).join(" "), clang, "{nvcc}");
        }
    }
}
