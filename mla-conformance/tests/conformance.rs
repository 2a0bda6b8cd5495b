//! Checks that the CPU backends conform to their specs, and that failures of others name the
//! remedy.

#[macro_use]
#[path = "../../mla-runtime/tests/common/mod.rs"]
mod common;

use std::sync::atomic::{AtomicU32, Ordering};

use mla_conformance::{self as conformance, DecodeTopic};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Output, Query, StepLimits,
};
use mla_runtime::tensor::{CacheRef, Memory as _, TensorMut};
use mla_runtime::{Error, Result, mla_backend};

mod decode {
    use super::*;
    mla_conformance::decode_conformance!(CpuDecode, Cpu::new());

    mod portable {
        use super::*;
        mla_conformance::decode_conformance!(CpuDecode, Cpu::new().portable());
    }

    mod without_matrix_unit {
        use super::*;
        mla_conformance::decode_conformance!(CpuDecode, Cpu::new().without_matrix_unit());
    }
}

mod prefill {
    use super::*;
    mla_conformance::prefill_conformance!(CpuPrefill, Cpu::new());

    mod portable {
        use super::*;
        mla_conformance::prefill_conformance!(CpuPrefill, Cpu::new().portable());
    }

    mod without_matrix_unit {
        use super::*;
        mla_conformance::prefill_conformance!(CpuPrefill, Cpu::new().without_matrix_unit());
    }
}

// Backends that contradict their specs: the CPU's own, each with one mistake.
macro_rules! mistaken {
    ($name:ident, [$($key:tt)*], new: $new:expr, call: $call:expr $(, plan: $plan:expr)?) => {
        struct $name(CpuDecode);

        #[mla_backend($($key)*)]
        impl DecodeBackend for $name {
            type Device = Cpu;
            type State = <CpuDecode as DecodeBackend>::State;
            type Metadata = ();

            fn new(device: &Cpu, config: &LayerConfig) -> Result<Self> {
                let new: fn(LayerConfig) -> Result<LayerConfig> = $new;
                CpuDecode::new(device, &new(*config)?).map(Self)
            }

            fn state(&self, device: &Cpu, limits: &StepLimits) -> Result<Self::State> {
                DecodeBackend::state(&self.0, device, limits)
            }

            fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
                Ok(())
            }

            fn prepare(
                &self,
                device: &Cpu,
                batch: &DecodeBatch<'_, Cpu>,
                state: &mut Self::State,
                metadata: &mut (),
            ) -> Result<()> {
                $(
                    let plan: fn(&DecodeBatch<'_, Cpu>) -> Result<()> = $plan;
                    plan(batch)?;
                )?
                DecodeBackend::prepare(&self.0, device, batch, state, metadata)
            }

            unsafe fn decode(
                &self,
                device: &Cpu,
                call: DecodeCall<'_, Cpu>,
                state: &mut Self::State,
                metadata: &(),
            ) -> Result<()> {
                let change: fn(DecodeCall<'_, Cpu>) -> DecodeCall<'_, Cpu> = $call;
                // SAFETY: the caller keeps to the same contract.
                unsafe { DecodeBackend::decode(&self.0, device, change(call), state, metadata) }
            }
        }
    };
}

mistaken! {
    WrongScale, [sm = "any", dtypes = "f32,bf16"],
    new: |mut config| {
        config.softmax_scale *= 1.2;
        Ok(config)
    },
    call: |call| call
}

mistaken! {
    FewHeads, [sm = "any", dtypes = "bf16", heads = "1..=128"],
    new: |config| match config.problem.heads {
        128 => Err(Error::argument("heads", 128, "1 to 64")),
        _ => Ok(config),
    },
    call: |call| call
}

mistaken! {
    NoLse, [sm = "any", dtypes = "bf16", lse_precision = "dtype"],
    new: Ok,
    call: |mut call| {
        call.lse = None;
        call
    }
}

mistaken! {
    NoSinks, [sm = "any", dtypes = "bf16", features = "sinks"],
    new: Ok,
    call: |mut call| {
        call.sinks = None;
        call
    }
}

mistaken! {
    BetweenRows, [sm = "any", dtypes = "bf16", features = "strided_outputs"],
    new: Ok,
    call: |mut call| {
        if let Output::Plain(out) = call.out {
            let (layout, bytes) = (*out.layout(), out.into_bytes());
            let row = layout.shape[1] * layout.shape[2] * layout.dtype.bytes();
            if let Some(byte) = bytes.get_mut(row) {
                *byte = 0;
            }
            call.out = Output::Plain(TensorMut::new(bytes, layout).unwrap());
        }
        call
    }
}

mistaken! {
    NoSecondCache, [
        sm = "any", dtypes = "bf16", query_len = "ragged", sparse = "required",
        features = "second_cache",
    ],
    new: Ok,
    call: |mut call| {
        call.slots = call.slots.map(|slots| slots.with_second(None));
        call
    }
}

mistaken! {
    OwnStrides, [sm = "any", dtypes = "bf16", query_len = "ragged", features = "split_cache"],
    new: Ok,
    call: |mut call| {
        let mut layout = *call.cache.layout();
        if let Some(strides) = &mut layout.split_rope {
            // Pages of rotary keys that are as far apart as if nothing lay between them.
            strides.page_stride = layout.page_size * strides.row_stride;
            call.cache =
                CacheRef::split(call.cache.bytes(), call.cache.rope_bytes(), layout).unwrap();
        }
        call
    }
}

mistaken! {
    AlwaysCausal, [
        sm = "any", dtypes = "bf16", query_len = "ragged", features = "non_causal",
    ],
    new: Ok,
    call: |mut call| {
        call.batch = call.batch.with_causal(true);
        call
    }
}

mistaken! {
    NoDenseRequests, [
        sm = "any", dtypes = "bf16", query_len = "ragged", sparse = "required",
        features = "dense_requests",
    ],
    new: Ok,
    call: |mut call| {
        call.slots = call.slots.map(|slots| slots.with_dense_within(0));
        call
    }
}

mistaken! {
    OtherScale, [sm = "any", dtypes = "bf16", quant_output = true],
    new: Ok,
    call: |mut call| {
        if let Output::Fp8 { bytes, scale } = call.out {
            call.out = Output::Fp8 { bytes, scale: 2.0 * scale };
        }
        call
    }
}

fn host_lens(batch: &DecodeBatch<'_, Cpu>) -> Result<()> {
    let given = batch.host.map(drop);
    given.ok_or_else(|| Error::argument("host lengths", "none", "each request's"))
}

mistaken! {
    PlansInSecret, [sm = "any", dtypes = "bf16"],
    new: Ok,
    call: |call| call,
    plan: host_lens
}

mistaken! {
    PlansOnHost, [sm = "any", dtypes = "bf16", plans_on_host = true],
    new: Ok,
    call: |call| call,
    plan: host_lens
}

static CALLS: AtomicU32 = AtomicU32::new(0);

mistaken! {
    EachTimeAnother, [sm = "any", dtypes = "f32", features = "deterministic"],
    new: |mut config| {
        config.softmax_scale *= 1.0 + 1e-6 * CALLS.fetch_add(1, Ordering::Relaxed) as f32;
        Ok(config)
    },
    call: |call| call
}

mistaken! {
    ReadsLines, [sm = "any", dtypes = "f32,bf16", alignment = 16],
    new: Ok,
    call: |mut call| {
        let Query::Split { latent, .. } = &call.query else {
            return call;
        };
        if !Cpu::address(latent.bytes()).is_multiple_of(32) {
            call.lse = None;
        }
        call
    }
}

const ANY_GPU: &[&str] = &["compute_80"];

struct OtherGpu;

#[mla_backend(sm = "100", dtypes = "bf16", compiled = ANY_GPU)]
impl DecodeBackend for OtherGpu {
    decode_body!(common::Bytes<false>);
}

fn said<B: DecodeBackend>(device: &B::Device, topic: DecodeTopic) -> String {
    let failure = conformance::decode::<B>(device, topic).expect_err("a mistake");
    failure.to_string()
}

#[test]
fn a_spec_that_contradicts_its_implementation_is_told_what_to_do() {
    let cpu = Cpu::new();
    let message = said::<FewHeads>(&cpu, DecodeTopic::Heads);
    assert_eq!(
        message,
        "FEW_HEADS: the spec accepts L=512 (P,R,V)=(128,64,128), heads = 128, dtype = bf16, kv = \
         bf16, page size = 64, query_len = single, but `new` refuses it: heads: given 128, \
         accepted 1 to 64. Narrow the key of #[mla_backend] that lets it through, or make the \
         implementation take it"
    );
    // Cases within the implementation's limit still pass.
    conformance::decode::<FewHeads>(&cpu, DecodeTopic::SingleTokens).unwrap();

    let message = said::<PlansInSecret>(&cpu, DecodeTopic::SingleTokens);
    assert!(
        message.contains("`prepare` refuses it: host lengths: given none, accepted each request's"),
        "{message}"
    );
    conformance::decode::<PlansOnHost>(&cpu, DecodeTopic::SingleTokens).unwrap();

    let message = said::<OtherGpu>(&common::Bytes, DecodeTopic::SingleTokens);
    assert_eq!(
        message,
        "OTHER_GPU: the spec accepts no problem of this suite on sm 9.0; what speaks against the \
         plainest: capability: given 9.0, accepted 10.0. Give it a device that it accepts, or \
         widen the keys of #[mla_backend]"
    );
}

#[test]
fn wrong_numbers_are_found() {
    let cpu = Cpu::new();
    for topic in [
        DecodeTopic::SingleTokens,
        DecodeTopic::Formats,
        DecodeTopic::LongContexts,
        DecodeTopic::ThroughTheRegistry,
    ] {
        let message = said::<WrongScale>(&cpu, topic);
        assert!(message.starts_with("WRONG_SCALE: "), "{message}");
        assert!(message.contains(", but should be "), "{message}");
    }
    let message = said::<NoLse>(&cpu, DecodeTopic::SingleTokens);
    assert!(
        message.starts_with("NO_LSE: lse[0, 0] is NaN, but should be "),
        "{message}"
    );
    let message = said::<NoSinks>(&cpu, DecodeTopic::Sinks);
    assert!(message.starts_with("NO_SINKS: out["), "{message}");
    for (message, name) in [
        (
            said::<NoSecondCache>(&cpu, DecodeTopic::SecondCache),
            "NO_SECOND_CACHE",
        ),
        (
            said::<NoDenseRequests>(&cpu, DecodeTopic::DenseRequests),
            "NO_DENSE_REQUESTS",
        ),
        (
            said::<OtherScale>(&cpu, DecodeTopic::QuantisedOutputs),
            "OTHER_SCALE",
        ),
    ] {
        assert!(
            message.starts_with(&format!("{name}: out[0, 0, 0] is ")),
            "{message}"
        );
    }
    let message = said::<OwnStrides>(&cpu, DecodeTopic::SplitCache);
    assert!(message.starts_with("OWN_STRIDES: out[0, 0, "), "{message}");
    let message = said::<AlwaysCausal>(&cpu, DecodeTopic::NonCausal);
    assert!(message.starts_with("ALWAYS_CAUSAL: out["), "{message}");
    let message = said::<BetweenRows>(&cpu, DecodeTopic::Strides);
    assert!(
        message.starts_with("BETWEEN_ROWS: wrote byte 16384 of out, which lies between its rows"),
        "{message}"
    );
    let message = said::<ReadsLines>(&cpu, DecodeTopic::Alignment);
    assert!(
        message.starts_with(
            "READS_LINES: with tensors that are no better aligned than the spec asks for: \
             READS_LINES: lse[0, 0] is NaN"
        ),
        "{message}"
    );
    conformance::decode::<ReadsLines>(&cpu, DecodeTopic::SingleTokens).unwrap();
    let message = said::<EachTimeAnother>(&cpu, DecodeTopic::Repetition);
    assert!(
        message.starts_with("EACH_TIME_ANOTHER: a second run gives other bits"),
        "{message}"
    );
}
