// The best backend is asked for at compile time, but no backend fits.

#![allow(unexpected_cfgs)]

use mla_cpu::{CpuDecode, CpuPrefill};
use mla_runtime::backend::DecodeBackend;
use mla_runtime::dispatch::backends;
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::spec::{Capability, Problem, Target};
use mla_runtime::{best_decode, best_prefill, mla_backend};

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

const ANY_GPU: &[&str] = &["compute_80"];

struct Hopper;

#[mla_backend(sm = "90", compiled = ANY_GPU, dtypes = "bf16", heads = "16|128", page_sizes = "64", kv = "bf16,fp8")]
impl DecodeBackend for Hopper {
    decode_body!(common::Bytes);
}

struct Later;

// Represents another crate's backend. Within one crate, a name can be used only once.
impl DecodeBackend for Later {
    decode_body!(common::Bytes);
    const SPEC: mla_runtime::spec::BackendSpec = <Hopper as DecodeBackend>::SPEC;
}

struct LeftOut;

#[mla_backend(feature = "sm1000", sm = "80+", dtypes = "f16,bf16")]
impl DecodeBackend for LeftOut {
    decode_body!(common::Bytes);
}

const SM90: Target = Target::dry_run(Capability::new(9, 0));
const R1: Problem = Problem::new(MlaDims::R1, 128, DType::BF16);

const PAGES_OF_48: Problem = R1.with_page_size(48).with_heads(24);

fn none_fits(_: best_decode!([Hopper, CpuDecode, LeftOut], SM90, PAGES_OF_48)) {}

fn only_left_out(_: best_decode!([LeftOut], SM90, R1)) {}

fn nothing_listed(_: best_prefill!([], SM90, R1)) {}

fn one_name_twice(_: best_decode!([Hopper, Later], SM90, R1)) {}

const NO_HEADS: Problem = R1.with_heads(0);

fn no_heads(_: best_decode!([Hopper], SM90, NO_HEADS)) {}

const ODD_LATENT: Problem = R1
    .with_dims(MlaDims::new(100, MlaDims::R1.head))
    .with_kv_format(KvFormat::Fp8DsMla);

fn odd_latent(_: best_decode!([Hopper], SM90, ODD_LATENT)) {}

type Wrong = backends![CpuPrefill];

fn of_the_other_phase(_: best_decode!(Wrong, Target::CPU, R1)) {}

fn main() {}
