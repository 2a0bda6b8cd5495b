//! A state belongs to one problem. A backend of another problem must refuse it before it writes
//! anything. Otherwise the state could be too small, and threads would write to each other's rows.

use std::sync::Arc;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill, DecodeState, PrefillState};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, DecodeStage, Keys, LayerConfig, Output, PrefillBackend,
    PrefillBatch, PrefillCall, PrefillStage, Query, StepLimits,
};
use mla_runtime::model::{DType, HeadDims, MlaDims};
use mla_runtime::select::Registry;
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{ArrayRef, BlockTable, CacheLayout, CacheRef, TensorMut, TensorRef};
use mla_runtime::{Error, Result};

const DIMS: MlaDims = MlaDims::new(16, HeadDims::new(8, 8, 8));
const ROW: usize = 24;
const PAGE: usize = 64;
// A length with which few units are divided among the threads.
const LEN: usize = 4096;
const MANY: usize = 64;

const REFUSAL: &str = "given one for heads = 1, accepted one for heads = 64, as the layer has it";

fn config(heads: usize) -> LayerConfig {
    let problem = Problem::new(DIMS, heads as u32, DType::F32).with_page_size(PAGE as u32);
    LayerConfig::new(problem, 0.2)
}

fn limits() -> StepLimits {
    StepLimits::new(1, 1, LEN / PAGE).with_decode_query_len(1)
}

/// Makes a device of four threads on any machine.
fn device() -> Cpu {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build();
    Cpu::with_pool(Arc::new(pool.unwrap()))
}

/// Decodes one token of `heads` heads through the call that `decode` makes. Returns the outputs,
/// with NaN where nothing was written.
fn decoded(
    heads: usize,
    decode: impl FnOnce(DecodeCall<'_, Cpu>) -> Result<()>,
) -> (Result<()>, Vec<f32>) {
    let query = vec![0.5f32; heads * ROW];
    let cache = vec![0.25f32; LEN * ROW];
    let table: Vec<i32> = (0..(LEN / PAGE) as i32).collect();
    let mut out = vec![f32::NAN; heads * 16];
    let call = || {
        let layout = CacheLayout::contiguous(DIMS, config(1).problem.kv_format, LEN / PAGE, PAGE);
        let table = BlockTable::new(ArrayRef::from_slice(&table), 1, LEN / PAGE)?;
        decode(DecodeCall::new(
            Query::Concatenated(TensorRef::from_slice(&query, [1, heads, ROW])?),
            CacheRef::new(bytemuck::cast_slice(&cache), layout)?,
            DecodeBatch::new(
                table,
                (ArrayRef::from_slice(&[LEN as i32]), LEN),
                (ArrayRef::from_slice(&[0, 1]), 1),
            ),
            Output::Plain(TensorMut::from_slice(&mut out, [1, heads, 16])?),
        ))
    };
    (call(), out)
}

/// Does the same for a prompt of one token.
fn prefilled(
    heads: usize,
    prefill: impl FnOnce(PrefillCall<'_, Cpu>) -> Result<()>,
) -> (Result<()>, Vec<f32>) {
    let rows = vec![0.5f32; heads * 16];
    let mut out = vec![f32::NAN; heads * 8];
    let call = || {
        let starts = || (ArrayRef::from_slice(&[0, 1]), 1);
        prefill(PrefillCall::new(
            TensorRef::from_slice(&rows, [1, heads, 16])?,
            Keys::Packed(TensorRef::from_slice(&rows, [1, heads, 16])?),
            TensorRef::from_slice(&rows[..heads * 8], [1, heads, 8])?,
            Output::Plain(TensorMut::from_slice(&mut out, [1, heads, 8])?),
            starts(),
            starts(),
        ))
    };
    (call(), out)
}

fn refused(field: &str, (result, out): (Result<()>, Vec<f32>)) {
    let error: Error = result.unwrap_err();
    assert_eq!(error.to_string(), format!("{field}: {REFUSAL}"));
    assert!(out.iter().all(|x| x.is_nan()), "something was written");
}

fn right((result, out): (Result<()>, Vec<f32>), value: f32) {
    result.unwrap();
    assert!(out.iter().all(|x| (x - value).abs() < 1e-5), "{out:?}");
}

#[test]
fn decode_refuses_foreign_state() {
    let cpu = device();
    let [few, many] = [1, MANY].map(|heads| CpuDecode::new(&cpu, &config(heads)).unwrap());
    let state = |backend: &CpuDecode| DecodeBackend::state(backend, &cpu, &limits()).unwrap();
    let run = |backend: &CpuDecode, heads, state: &mut DecodeState| {
        decoded(heads, |call| {
            // SAFETY: the arrays are those of one request; the backend compares the state itself.
            unsafe { DecodeBackend::decode(backend, &cpu, call, state, &()) }
        })
    };
    right(run(&few, 1, &mut state(&few)), 0.25);
    right(run(&many, MANY, &mut state(&many)), 0.25);
    refused("state", run(&many, MANY, &mut state(&few)));
    // A state also works for another instance of the same problem.
    let same = CpuDecode::new(&cpu, &config(MANY)).unwrap();
    right(run(&many, MANY, &mut state(&same)), 0.25);
    // It also works for a device with another number of threads.
    let alone = Cpu::with_pool(Arc::new(
        rayon::ThreadPoolBuilder::new()
            .num_threads(1)
            .build()
            .unwrap(),
    ));
    let mut own = DecodeBackend::state(&many, &alone, &limits()).unwrap();
    right(run(&many, MANY, &mut own), 0.25);
}

#[test]
fn prefill_refuses_foreign_state() {
    let cpu = device();
    let [few, many] = [1, MANY].map(|heads| CpuPrefill::new(&cpu, &config(heads)).unwrap());
    let state = |backend: &CpuPrefill| PrefillBackend::state(backend, &cpu, &limits()).unwrap();
    let run = |state: &mut PrefillState| {
        prefilled(MANY, |call| {
            // SAFETY: the arrays are those of one request; the backend compares the state itself.
            unsafe { PrefillBackend::prefill(&many, &cpu, call, state, &()) }
        })
    };
    right(run(&mut state(&many)), 0.5);
    refused("state", run(&mut state(&few)));
}

#[test]
fn selected_refuse_foreign_state() {
    let cpu = device();
    let registry = Registry::linked().unwrap();
    let decode = [1, MANY].map(|heads| {
        let config = config(heads);
        registry.instantiate_decode("CPU", &cpu, &config).unwrap()
    });
    let prefill = [1, MANY].map(|heads| {
        let config = config(heads);
        registry.instantiate_prefill("CPU", &cpu, &config).unwrap()
    });
    let states = |at: usize| {
        (
            decode[at].state(&cpu, &limits()),
            decode[at].metadata(&cpu, &limits()),
        )
    };
    let run = |state: usize, metadata: usize| {
        let (mut state, metadata) = (states(state).0.unwrap(), states(metadata).1.unwrap());
        decoded(MANY, |call| {
            // SAFETY: the arrays are those of one request; the backend compares state and metadata.
            unsafe { decode[1].decode(&cpu, call, &mut state, &metadata) }
        })
    };
    right(run(1, 1), 0.25);
    refused("state or metadata", run(0, 1));
    refused("state or metadata", run(1, 0));

    let run = |of: usize| {
        let mut state = prefill[of].state(&cpu, &limits()).unwrap();
        let metadata = prefill[1].metadata(&cpu, &limits()).unwrap();
        prefilled(MANY, |call| {
            // SAFETY: the contract of a call: the arrays are those of one request.
            unsafe { prefill[1].prefill(&cpu, call, &mut state, &metadata) }
        })
    };
    right(run(1), 0.5);
    refused("state or metadata", run(0));
    prepares(&cpu, &prefill[1], [&prefill[0], &prefill[1]]);
}

/// Checks `prepare`, which safe code can call.
fn prepares<S: PrefillStage<Device = Cpu>>(cpu: &Cpu, backend: &S, [other, own]: [&S; 2]) {
    let batch = PrefillBatch::new(&[1], &[1]);
    let prepare = |state: &S, metadata: &S| {
        let mut state = state.state(cpu, &limits()).unwrap();
        let mut metadata = metadata.metadata(cpu, &limits()).unwrap();
        backend.prepare(cpu, &batch, &mut state, &mut metadata)
    };
    prepare(own, own).unwrap();
    for (state, metadata) in [(other, own), (own, other)] {
        let error = prepare(state, metadata).unwrap_err().to_string();
        assert_eq!(error, format!("state or metadata: {REFUSAL}"));
    }
}
