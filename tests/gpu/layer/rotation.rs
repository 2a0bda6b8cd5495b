//! Compares a step of decodes whose cache write rotates with one whose tensors were rotated before.

use mla_kernels::Cuda;
use mla_kernels::device::Buffer;
use mla_runtime::layer::LayerCall;
use mla_runtime::model::{DType, KvFormat, RotaryStyle};
use mla_runtime::tensor::{ArrayRef, Layout, Rotary, TensorMut};

use super::batch::{Batch, Case, Engine, Outcome};
use super::{GpuLayer, gpu_layer};
use crate::common::{get, gpu, put, upload, upload_all};
use crate::tensors::{rotary_tables, view};

const POSITIONS: usize = 2000;

/// The tables, and each token's position: its request's context plus its index among the new
/// tokens.
struct Tables {
    cos_sin: [Vec<f32>; 2],
    positions: Vec<i64>,
    style: RotaryStyle,
}

impl Tables {
    fn new(batch: &Batch, style: RotaryStyle) -> Self {
        let positions = batch.requests.iter().flat_map(|request| {
            (0..request.q).map(|token| i64::from(request.kv.saturating_sub(request.q) + token))
        });
        Self {
            cos_sin: rotary_tables(POSITIONS, batch.case.dims.head.rope as usize / 2),
            positions: positions.collect(),
            style,
        }
    }

    /// Returns the batch with rotated queries and keys.
    fn turned(&self, batch: &Batch) -> Batch {
        let (case, mut turned) = (&batch.case, batch.clone());
        let (qk, rope) = (case.dims.head.qk() as usize, case.dims.head.rope as usize);
        self.turn(case.dtype, &mut turned.query, case.heads as usize, qk, rope);
        self.turn(case.dtype, &mut turned.rope, 1, rope, rope);
        turned
    }

    /// Rotates the last columns of each of a token's rows of `width`.
    fn turn(&self, dtype: DType, bytes: &mut [u8], rows: usize, width: usize, rope: usize) {
        let half = rope / 2;
        for row in 0..self.positions.len() * rows {
            let position = self.positions[row / rows] as usize;
            for pair in 0..half {
                let (first, second) = match self.style {
                    RotaryStyle::Interleaved => (2 * pair, 2 * pair + 1),
                    RotaryStyle::Halves => (pair, pair + half),
                };
                let at = |element| row * width + width - rope + element;
                let (a, b) = (get(dtype, bytes, at(first)), get(dtype, bytes, at(second)));
                let [cos, sin] = self.cos_sin.each_ref().map(|it| it[position * half + pair]);
                put(dtype, bytes, at(first), a * cos - b * sin);
                put(dtype, bytes, at(second), b * cos + a * sin);
            }
        }
    }

    /// Uploads the cosines and sines.
    fn on(&self, device: &Cuda) -> [Buffer; 2] {
        let tables = self.cos_sin.each_ref();
        tables.map(|table| upload_all(device, table))
    }

    /// Returns a rotation by these tables, without positions.
    fn rotary<'a>(&self, [cos, sin]: &'a [Buffer; 2]) -> Rotary<'a, Cuda> {
        let shape = [1, POSITIONS, self.cos_sin[0].len() / POSITIONS];
        let table = |buffer| view::<Cuda>(buffer, DType::F32, shape).unwrap();
        Rotary::new(None, [table(cos), table(sin)], self.style)
    }

    fn run(&self, batch: &Batch, layer: &GpuLayer) -> Outcome {
        let device = layer.device();
        let mut workspace = layer.workspace(&batch.case.limits()).unwrap();
        batch.prepare(layer, &mut workspace).unwrap();
        let mut engine = Engine::new(device, batch).unwrap();
        let positions = upload_all(device, &self.positions);
        let positions = ArrayRef::new(positions.bytes(), batch.tokens()).unwrap();
        let tables = self.on(device);
        let rotary = self.rotary(&tables);
        let mut call = engine.call(batch.tokens()).unwrap();
        call.rotary = Some(rotary.with_positions(positions));
        layer.forward(&mut workspace, call).unwrap();
        engine.outcome(device).unwrap()
    }

    /// Runs a call that uses the step's positions.
    fn run_unrotated(&self, batch: &Batch, layer: &GpuLayer) -> Outcome {
        let device = layer.device();
        let (case, tokens) = (&batch.case, batch.tokens());
        let (heads, head) = (case.heads as usize, case.dims.head);
        let mut workspace = layer.workspace(&case.limits()).unwrap();
        batch.prepare(layer, &mut workspace).unwrap();
        let mut query = upload(device, &batch.query).unwrap();
        let mut rope = upload(device, &batch.rope).unwrap();
        let mut engine = Engine::new(device, batch).unwrap();
        let of = |shape| Layout::contiguous(case.dtype, shape);
        let tables = self.on(device);
        let call = engine.call(tokens).unwrap();
        let call = LayerCall::unrotated(
            call.weights,
            TensorMut::new(query.bytes_mut(), of([tokens, heads, head.qk() as usize])).unwrap(),
            call.latent,
            TensorMut::new(rope.bytes_mut(), of([tokens, 1, head.rope as usize])).unwrap(),
            self.rotary(&tables),
            call.cache,
            call.out,
        )
        .with_lse(call.lse);
        layer.forward_unrotated(&mut workspace, call).unwrap();
        engine.outcome(device).unwrap()
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_rotating_cache_write_is_a_rotation_beforehand() {
    let gpu = &*gpu();
    let few = [(1, 700), (3, 90), (1, 1), (4, 1600), (1, 0)];
    let many: Vec<(u32, u32)> = (0..30).map(|at| (1, 10 * at)).collect();
    for (style, heads, requests, kv_format) in [
        (RotaryStyle::Interleaved, 16, &few[..], KvFormat::BF16),
        (RotaryStyle::Halves, 16, &few[..], KvFormat::BF16),
        (RotaryStyle::Interleaved, 128, &few[..], KvFormat::Fp8),
        (RotaryStyle::Halves, 128, &many[..], KvFormat::BF16),
        (RotaryStyle::Interleaved, 16, &many[..], KvFormat::Fp8),
    ] {
        let case = Case {
            kv_format,
            ..Case::new(heads, requests)
        };
        let batch = Batch::new(&case);
        let tables = Tables::new(&batch, style);
        let layer = gpu_layer(gpu, &case);
        let expected = tables.turned(&batch).run(&layer).unwrap();
        tables.run(&batch, &layer).is_that_of(&expected, &case);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn any_step_is_rotated_as_beforehand() {
    let gpu = &*gpu();
    let mixed = [(200, 200), (1, 700), (150, 1100), (2, 90), (1, 0)];
    for (style, heads, requests) in [
        (RotaryStyle::Interleaved, 16, &mixed[..]),
        (RotaryStyle::Halves, 128, &mixed[..]),
        (RotaryStyle::Interleaved, 16, &[(1, 700), (2, 90)]),
    ] {
        let case = Case::new(heads, requests);
        let batch = Batch::new(&case);
        let tables = Tables::new(&batch, style);
        let layer = gpu_layer(gpu, &case);
        let expected = tables.turned(&batch).run(&layer).unwrap();
        tables
            .run_unrotated(&batch, &layer)
            .is_that_of(&expected, &case);
    }
}
