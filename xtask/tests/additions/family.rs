//! A made-up family, `sm89`. It has a folder of its name for each of the two languages, a feature,
//! and two lines beside the backends' modules.

use crate::tree::{Tree, contributing};

const MODULE: &str = r#"//! Kernels for Ada, made up.

use mla_runtime::backends;

mod made_up;

pub use made_up::MadeUp;

/// This family's prefill backends, and then those of a list.
pub(super) type Prefill<Rest> = backends![..Rest];

/// This family's decode backends, and then those of a list.
pub(super) type Decode<Rest> = backends![MadeUp, ..Rest];
"#;

const BACKEND: &str = r#"//! MADE_UP: its launch function refuses every call.

use mla_runtime::mla_backend;

#[cfg(feature = "sm89")]
use {
    crate::{device::Cuda, raw},
    mla_runtime::{
        Result,
        backend::{DecodeBackend, DecodeCall, LayerConfig, StepLimits},
    },
};

/// Refuses every call.
#[derive(Debug)]
pub struct MadeUp;

#[mla_backend(feature = "sm89", sm = "89", compiled = raw::compiled::SM89, dtypes = "bf16",
    priority = 99)]
impl DecodeBackend for MadeUp {
    type Device = Cuda;
    type State = ();
    type Metadata = ();

    fn new(_: &Cuda, _: &LayerConfig) -> Result<Self> {
        Ok(Self)
    }

    fn state(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    unsafe fn decode(
        &self,
        device: &Cuda,
        _: DecodeCall<'_, Cuda>,
        _: &mut (),
        _: &(),
    ) -> Result<()> {
        // SAFETY: it reads nothing and enqueues nothing.
        unsafe {
            let params = raw::MlaMadeUpParams { rows: 0 };
            raw::check("decode", raw::mla_decode_sm89(&params, device.raw_stream()))
        }
    }
}
"#;

const HEADER: &str = r#"#ifndef MLA_SM89_H
#define MLA_SM89_H

#include "../include/mla.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct MlaMadeUpParams {
    int32_t rows;
} MlaMadeUpParams;

/* Refuses every call. */
MlaStatus mla_decode_sm89(const MlaMadeUpParams* params, void* stream);

#ifdef __cplusplus
}
#endif

#endif
"#;

/// The declarations that bindgen writes for the header.
const DECLARATIONS: &str = r#"// cuda/sm89/mla_sm89.h
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct MlaMadeUpParams {
    pub rows: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaMadeUpParams"][::core::mem::size_of::<MlaMadeUpParams>() - 4usize];
    ["Alignment of MlaMadeUpParams"][::core::mem::align_of::<MlaMadeUpParams>() - 4usize];
};
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_decode_sm89"]
    pub fn mla_decode_sm89(
        params: *const MlaMadeUpParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
"#;

const KERNEL: &str = r#"#include "common/status.cuh"
#include "sm89/mla_sm89.h"

extern "C" MlaStatus mla_decode_sm89(const MlaMadeUpParams* params, void*) {
    return MlaStatus{MLA_BAD_ARGUMENT, 0, "rows", params->rows, "none"};
}
"#;

/// The files of the family, in folders of its name.
const FILES: [(&str, &str); 6] = [
    ("cuda/sm89/targets.txt", "sm_89\n"),
    ("cuda/sm89/mla_sm89.h", HEADER),
    ("cuda/sm89/mla_sm89.rs", DECLARATIONS),
    ("cuda/sm89/decode/api.cu", KERNEL),
    ("src/backends/sm89/mod.rs", MODULE),
    ("src/backends/sm89/made_up.rs", BACKEND),
];

/// The folders of the files.
const FOLDERS: [&str; 2] = ["cuda/sm89/", "src/backends/sm89/"];

/// The lines to add to existing files, each before this text.
const LINES: [(&str, &str, &str); 3] = [
    ("Cargo.toml", "sm90 = [\"gpu\"", "sm89 = [\"gpu\"]\n"),
    ("src/backends/mod.rs", "pub mod sm90;", "pub mod sm89;\n"),
    (
        "src/backends/mod.rs",
        "    sm90 \"sm90\"",
        "    sm89 \"sm89\" SM89,\n",
    ),
];

/// Returns a program that compiles if the family is `on`, or off otherwise.
fn example(on: bool) -> String {
    let families = match on {
        true => "matches!(FAMILIES, [CompiledFamily { targets: [_], .. }])",
        false => "FAMILIES.is_empty()",
    };
    format!(
        "use mla_kernels::{{DecodeBackends, FAMILIES, runtime}};\n\
         use runtime::model::{{DType, MlaDims}};\n\
         use runtime::spec::{{Capability, CompiledFamily, Problem, Target}};\n\n\
         const ADA: Target = Target::dry_run(Capability::new(8, 9));\n\
         const PROBLEM: Problem = Problem::new(MlaDims::R1, 16, DType::BF16);\n\
         const _: () = assert!({families});\n\n\
         fn main() {{\n    \
         println!(\"{{}}\", std::any::type_name::<runtime::best_decode!(DecodeBackends, ADA, \
         PROBLEM)>());\n}}\n"
    )
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p xtask --test additions -- --ignored"]
fn a_made_up_family_is_its_folders_and_three_lines() {
    let tree = Tree::for_cargo();
    for (file, text) in FILES {
        tree.write(file, text);
    }
    for (file, before, line) in LINES {
        assert_eq!(line.lines().count(), 1);
        tree.edit(file, before, &format!("{line}{before}"));
    }
    let [new, edited] = tree.changes();
    assert_eq!(new.len(), FILES.len());
    let in_folders = |file: &String| FOLDERS.iter().any(|folder| file.starts_with(folder));
    assert!(new.iter().all(in_folders), "{new:?}");
    assert_eq!(edited, contributing("Add a family of kernels", "sm89"));
    let compiled = tree.compile("cuda/sm89/decode/api.cu");
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    let check = |features: &[&str]| {
        let features = format!("--features={}", features.join(","));
        tree.check(&[
            "--package=mla-kernels",
            "--lib",
            "--example=made_up",
            &features,
        ])
    };
    // The family is compiled and selected. The compiler selects it, so a check shows this.
    tree.write("examples/made_up.rs", &example(true));
    let errors = check(&["sm89"]);
    assert!(errors.is_empty(), "{errors:#?}");
    // With its feature off, the family is known, and no other backend silently replaces it.
    tree.write("examples/made_up.rs", &example(false));
    let errors = check(&["gpu"]);
    let refused = errors.iter().any(|error| {
        error
            .message
            .contains("MADE_UP: feature `sm89` of mla-kernels is off")
    });
    assert!(refused, "{errors:#?}");
    // The family is checked together with the others, and with everything else that may name a
    // family.
    tree.write("examples/made_up.rs", "fn main() {}\n");
    let errors = tree.check(&[
        "--workspace",
        "--lib",
        "--bins",
        "--features=mla-kernels/sm80,mla-kernels/sm89,mla-kernels/sm90,mla-cli/sm90",
    ]);
    assert!(errors.is_empty(), "{errors:#?}");
}
