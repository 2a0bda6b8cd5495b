//! Selects backends whose attributes do not name the targets of their kernels.

use mla_runtime::backend::{DecodeBackend, Entry, PrefillBackend};
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Capability, Problem, Target};

#[macro_use]
#[path = "../../../common/mod.rs"]
mod common;

prefill_backend!(Literal on common::Bytes: sm = "90|100", dtypes = "f16,bf16", requires_r1 = true);

decode_backend!(EveryGpu on common::Bytes: sm = "80+", dtypes = "bf16");

decode_backend!(OfHopper on common::Bytes: sm = "80+", dtypes = "bf16", feature = "sm90");

// These kernels do not depend on the package's families.
const AT_RUN_TIME: &[&str] = &["compute_80"];

decode_backend!(Elsewhere on common::Bytes: sm = "80+", dtypes = "bf16", compiled = AT_RUN_TIME);

decode_backend!(OnProcessors on common::Bytes<true>: sm = "any", dtypes = "bf16");

/// Returns the cause that keeps a backend from running on a GPU of this capability, and the remedy.
fn cause(entry: &Entry, major: u8, minor: u8) -> Option<[String; 2]> {
    let target = Target::dry_run(Capability::new(major, minor));
    let cause = entry.availability_on(target, true).err()?;
    Some([cause.to_string(), cause.remedy()])
}

fn with(remedy: &str) -> Option<[String; 2]> {
    Some(["compiled for: sm_90a".to_owned(), remedy.to_owned()])
}

#[test]
fn left_out_gpu_is_a_reason() {
    let feature = with("build with `--features sm100`");
    for entry in [Literal::ENTRY, EveryGpu::ENTRY] {
        assert_eq!(cause(&entry, 9, 0), None, "{}", entry.spec.name);
        for (major, minor) in [(8, 0), (10, 0), (10, 3), (12, 0)] {
            assert_eq!(cause(&entry, major, minor), feature, "{}", entry.spec.name);
        }
    }
}

#[test]
fn left_out_gpu_in_a_selection() {
    let registry = Registry::linked().unwrap();
    let on = |major| {
        let target = Target::dry_run(Capability::new(major, 0));
        SelectionRequest::new(target, Problem::new(MlaDims::R1, 16, DType::BF16))
    };
    assert_eq!(registry.select(&on(9)).unwrap().prefill, Literal::SPEC);
    let request = on(10).with_prefill("LITERAL");
    let refused = registry.select(&request).unwrap_err().to_string();
    assert!(refused.contains("compiled for: sm_90a"), "{refused}");
}

#[test]
fn the_key_feature_names_the_family() {
    assert_eq!(cause(&OfHopper::ENTRY, 9, 0), None);
    let other = with("choose a backend with kernels for this GPU");
    assert_eq!(cause(&OfHopper::ENTRY, 10, 0), other);
}

#[test]
fn foreign_kernels_are_exempt() {
    assert_eq!(cause(&Elsewhere::ENTRY, 12, 0), None);
    let here = OnProcessors::ENTRY.availability_on(Target::CPU, false);
    assert_eq!(here, Ok(()));
}
