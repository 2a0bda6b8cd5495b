//! Tests of rows in an engine's own order, and of drafts that see each other, on a GPU.

use mla_kernels::Cuda;
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::plan::slots::SKIPPED;
use rand::RngExt as _;
use rand::seq::SliceRandom as _;

use super::batch::{Batch, Case, Engine, Outcome};
use super::{GpuLayer, MIXED, check, gpu_layer};
use crate::common::{gpu, rng};

/// Moves rows of `bytes` bytes each to their places among `rows` rows of bytes 0xff.
fn spread(packed: &[u8], bytes: usize, places: &[usize], rows: usize) -> Vec<u8> {
    let mut spread = vec![0xff; rows * bytes];
    for (from, &place) in packed.chunks(bytes).zip(places) {
        spread[place * bytes..][..bytes].copy_from_slice(from);
    }
    spread
}

/// Runs a batch whose requests begin at these rows of tensors with `rows` rows.
fn run(gpu: &Cuda, layer: &GpuLayer, batch: &Batch, starts: &[usize], rows: usize) -> Outcome {
    let limits = batch.case.limits().with_call_rows(rows);
    let mut workspace = layer.workspace(&limits).unwrap();
    let step = batch.step(&workspace).unwrap();
    let step = step.with_row_starts(starts, rows).unwrap();
    workspace.prepare(layer, &step).unwrap();
    let places = places(batch, starts);
    let mut own = batch.clone();
    for packed in [&mut own.query, &mut own.latent, &mut own.rope] {
        *packed = spread(packed, packed.len() / places.len(), &places, rows);
    }
    // An engine makes tensors with this number of rows.
    own.slots.resize(rows, SKIPPED);
    let mut engine = Engine::new(gpu, &own).unwrap();
    engine.forward(layer, &mut workspace, rows).unwrap();
    engine.outcome(gpu).unwrap()
}

/// Returns the row of each token.
fn places(batch: &Batch, starts: &[usize]) -> Vec<usize> {
    let requests = batch.requests.iter().zip(starts);
    requests
        .flat_map(|(request, start)| *start..start + request.q as usize)
        .collect()
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn any_rows_have_the_packed_bits() {
    let gpu = &*gpu();
    for seed in 0..12 {
        let rng = &mut rng(seed);
        let case = Case {
            seed,
            ..Case::new(if seed % 2 == 0 { 16 } else { 5 }, MIXED)
        };
        let batch = Batch::new(&case);
        let layer = gpu_layer(gpu, &case);
        let packed = batch.run(&layer).unwrap();
        let mut order: Vec<usize> = (0..batch.requests.len()).collect();
        order.shuffle(rng);
        let (mut starts, mut end) = (vec![0; order.len()], 0);
        for request in order {
            end += rng.random_range(0..4);
            starts[request] = end;
            end += batch.requests[request].q as usize;
        }
        let rows = end + 3;
        let own = run(gpu, &layer, &batch, &starts, rows);
        let places = places(&batch, &starts);
        let heads = case.heads as usize;
        let bytes = heads * case.dims.head.v as usize * case.dtype.bytes();
        assert!(
            own.out == spread(&packed.out, bytes, &places, rows),
            "seed {seed}"
        );
        let lse = packed.lse.chunks(4 * places.len());
        let lse: Vec<u8> = lse
            .flat_map(|head| spread(head, 4, &places, rows))
            .collect();
        assert!(own.lse == lse && own.cache == packed.cache, "seed {seed}");
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn drafts_that_see_each_other_agree_with_the_cpu() {
    let gpu = &*gpu();
    for (kv_format, dtype) in [
        (KvFormat::BF16, DType::BF16),
        (KvFormat::F16, DType::F16),
        (KvFormat::Fp8, DType::BF16),
    ] {
        for threshold in [0, 4, 16] {
            let case = Case {
                kv_format,
                dtype,
                threshold,
                causal: false,
                ..Case::new(
                    16,
                    &[(1, 700), (4, 9), (3, 200), (16, 900), (12, 13), (70, 500)],
                )
            };
            check(gpu, &case);
        }
    }
}
