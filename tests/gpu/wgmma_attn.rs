//! WGMMA_ATTN against the f64 reference and the CPU device: lengths around every tile boundary,
//! mixed in one batch, and random batches; keys fewer and more than queries, packed and split; NaN
//! around everything and in other requests; offsets beyond 2^31 elements; bad arguments; a launch
//! and four replays of its graph, with the same bits; graphs captured with loose bounds.
use std::ops::Range;

use mla_conformance::reference::{self, Array};
use mla_cpu::{Cpu, CpuPrefill};
use mla_kernels::backends::sm90::WgmmaAttn;
use mla_kernels::device::Buffer;
use mla_kernels::{Cuda, raw};
use mla_runtime::Error;
use mla_runtime::backend::{
    Chunk, Keys, LayerConfig, Output, PrefillBackend, PrefillBatch, PrefillCall, StepLimits,
};
use mla_runtime::model::{DType, HeadDims, MlaDims};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{ArrayRef, Layout, LseLayout, LseMut, Memory, TensorMut, TensorRef};
use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::common::{download, gpu, rng, upload};
use crate::refusals::{WrongField, each_is_refused, prefill_without_addresses};
use crate::tensors::{On, Tensor, difference, normal};

// Rows of NaN before and behind each tensor.
const MARGIN: usize = 130;

const R1: HeadDims = HeadDims::R1;
const WIDE: HeadDims = HeadDims::new(192, 64, 256);
const SMALL: HeadDims = HeadDims::new(64, 32, 64);

#[derive(Clone)]
struct Case {
    dims: HeadDims,
    dtype: DType,
    heads: usize,
    lens: Vec<(usize, usize)>,
    causal: bool,
    split: bool,
    // Elements between rows, a multiple of eight.
    gap: usize,
    // Amplitude of queries and keys.
    amplitude: f32,
    // Maximum number of query tokens and of keys that the call states; `None`: the exact ones.
    bounds: Option<(usize, usize)>,
}

impl Case {
    fn tokens(&self) -> (usize, usize) {
        self.lens
            .iter()
            .fold((0, 0), |(q, k), len| (q + len.0, k + len.1))
    }

    fn bounds(&self) -> (usize, usize) {
        self.bounds.unwrap_or_else(|| {
            let max = |len: fn(&(usize, usize)) -> usize| self.lens.iter().map(len).max();
            (max(|len| len.0).unwrap_or(0), max(|len| len.1).unwrap_or(0))
        })
    }

    fn config(&self) -> LayerConfig {
        let dims = MlaDims::new(512, self.dims);
        LayerConfig::new(
            Problem::new(dims, self.heads as u32, self.dtype),
            1.0 / (self.dims.qk() as f32).sqrt(),
        )
    }

    fn limits(&self) -> StepLimits {
        StepLimits::new(self.lens.len(), self.tokens().0, 1).with_context_rows(self.tokens().1)
    }

    // Makes a tensor of NaN with gaps between tokens, between two margins.
    fn poison(&self, tokens: usize, heads: usize, width: usize) -> Tensor {
        let row = heads * width + self.gap;
        let layout = Layout {
            dtype: self.dtype,
            shape: [tokens, heads, width],
            strides: [row, width, 1],
        };
        let mut tensor = Tensor::poison(layout, MARGIN * row);
        tensor.bytes.resize((tokens + 2 * MARGIN) * row * 2, 0xff);
        tensor
    }

    // The same with random elements.
    fn random(
        &self,
        rng: &mut StdRng,
        [tokens, heads, width]: [usize; 3],
        amplitude: f32,
    ) -> Tensor {
        let mut tensor = self.poison(tokens, heads, width);
        tensor.fill(|_, _| normal(rng) * amplitude);
        tensor
    }
}

// Puts NaN into the rows of some tokens.
fn poison(tensor: &mut Tensor, tokens: &Range<usize>) {
    let row = tensor.layout.strides[0] * 2;
    let [start, end] = [tokens.start, tokens.end].map(|token| tensor.offset + token * row);
    tensor.bytes[start..end].fill(0xff);
}

struct Inputs {
    query: Tensor,
    nope: Tensor,
    rope: Tensor,
    packed: Tensor,
    values: Tensor,
    query_starts: Vec<i32>,
    key_starts: Vec<i32>,
}

impl Inputs {
    fn new(case: &Case, seed: u64) -> Self {
        let rng = &mut rng(seed);
        let (tq, tk) = case.tokens();
        let (p, r, v) = (
            case.dims.nope as usize,
            case.dims.rope as usize,
            case.dims.v as usize,
        );
        let amplitude = case.amplitude;
        let nope = case.random(rng, [tk, case.heads, p], amplitude);
        let rope = case.random(rng, [tk, 1, r], amplitude);
        let mut packed = case.poison(tk, case.heads, p + r);
        packed.fill(|[i, j, k], _| match k < p {
            true => nope.at([i, j, k]),
            false => rope.at([i, 0, k - p]),
        });
        let starts = |len: fn(&(usize, usize)) -> usize| {
            let mut sum = 0;
            let ends = case.lens.iter().map(|pair| {
                sum += len(pair) as i32;
                sum
            });
            std::iter::once(0).chain(ends).collect()
        };
        Self {
            query: case.random(rng, [tq, case.heads, p + r], amplitude),
            values: case.random(rng, [tk, case.heads, v], 0.1),
            nope,
            rope,
            packed,
            query_starts: starts(|pair| pair.0),
            key_starts: starts(|pair| pair.1),
        }
    }
}

#[derive(PartialEq)]
struct Outcome {
    out: Vec<u8>,
    lse: Vec<f32>,
}

// A backend with its operands in device memory.
struct Bench<'a, B: PrefillBackend> {
    device: &'a B::Device,
    case: &'a Case,
    out: Tensor,
    backend: B,
    state: B::State,
    metadata: B::Metadata,
    operands: [On<B::Device>; 5],
    starts: [<B::Device as Memory>::Buffer; 2],
    on_device: On<B::Device>,
    lse_buffer: <B::Device as Memory>::Buffer,
}

impl<'a, B: PrefillBackend> Bench<'a, B> {
    fn new(device: &'a B::Device, case: &'a Case, inputs: &Inputs) -> Self {
        let backend = B::new(device, &case.config()).unwrap();
        let limits = case.limits();
        let out = case.poison(case.tokens().0, case.heads, case.dims.v as usize);
        let bytes = |starts: &[i32]| -> Vec<u8> {
            starts
                .iter()
                .flat_map(|start| start.to_ne_bytes())
                .collect()
        };
        let mut state = backend.state(device, &limits).unwrap();
        let mut metadata = backend.metadata(device, &limits).unwrap();
        let query_lens: Vec<u32> = case.lens.iter().map(|len| len.0 as u32).collect();
        let batch = PrefillBatch::new(&query_lens, &query_lens);
        backend
            .prepare(device, &batch, &mut state, &mut metadata)
            .unwrap();
        Self {
            operands: [
                &inputs.query,
                &inputs.nope,
                &inputs.rope,
                &inputs.packed,
                &inputs.values,
            ]
            .map(|tensor| On::new(device, tensor).unwrap()),
            starts: [&inputs.query_starts, &inputs.key_starts]
                .map(|starts| upload(device, &bytes(starts)).unwrap()),
            on_device: On::new(device, &out).unwrap(),
            lse_buffer: upload(
                device,
                &vec![0xff; (case.tokens().0 * case.heads).max(1) * 4],
            )
            .unwrap(),
            device,
            case,
            out,
            backend,
            state,
            metadata,
        }
    }

    fn enqueue(&mut self) -> Result<(), Error> {
        let case = self.case;
        let query_lens: Vec<u32> = case.lens.iter().map(|len| len.0 as u32).collect();
        let key_lens: Vec<u32> = case.lens.iter().map(|len| len.1 as u32).collect();
        let [query, nope, rope, packed, values] = &self.operands;
        let keys = if case.split {
            Keys::Split {
                nope: nope.read()?,
                rope: rope.read()?,
            }
        } else {
            Keys::Packed(packed.read()?)
        };
        let (tokens, count) = (case.tokens().0, case.lens.len() + 1);
        let (max_query_len, max_key_len) = case.bounds();
        let starts = |at: usize| {
            let bytes = <B::Device as Memory>::bytes(&self.starts[at]);
            ArrayRef::<B::Device, i32>::new(bytes, count)
        };
        let lse = <B::Device as Memory>::bytes_mut(&mut self.lse_buffer);
        let call = PrefillCall::new(
            query.read()?,
            keys,
            values.read()?,
            Output::Plain(self.on_device.write()?),
            (starts(0)?, max_query_len),
            (starts(1)?, max_key_len),
        )
        .with_lse(LseMut::new(
            lse,
            LseLayout::heads_first(case.heads, tokens),
        )?);
        let (state, metadata) = (&mut self.state, &self.metadata);
        let chunk = (!case.causal).then_some(Chunk::new(0, &query_lens, &key_lens));
        // SAFETY: lengths, starts and pages are those of the case, for which all tensors were made.
        unsafe {
            self.backend
                .prefill(self.device, call.with_chunk(chunk), state, metadata)
        }
    }

    fn outcome(&self) -> Outcome {
        let lse = download(self.device, &self.lse_buffer).unwrap();
        Outcome {
            out: self.on_device.download(self.device).unwrap(),
            lse: lse
                .chunks_exact(4)
                .map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]]))
                .collect(),
        }
    }
}

fn expected(case: &Case, inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
    let (tokens, width) = (case.tokens().0, case.dims.v as usize);
    let mut out = vec![0.0; tokens * case.heads * width];
    let mut lse = vec![0.0; tokens * case.heads];
    let (mut q0, mut k0) = (0, 0);
    for &(queries, keys) in &case.lens {
        let part = |host: &Tensor, start: usize, len: usize| {
            Array::from_fn([len, case.heads, host.layout.shape[2]], |i, j, k| {
                f64::from(host.at([start + i, j, k]))
            })
        };
        let attended = reference::expanded(
            &part(&inputs.query, q0, queries),
            &part(&inputs.packed, k0, keys),
            &part(&inputs.values, k0, keys),
            f64::from(case.config().softmax_scale),
            case.causal,
        );
        for token in 0..queries {
            for head in 0..case.heads {
                let row = (q0 + token) * case.heads + head;
                out[row * width..][..width].copy_from_slice(attended.out.row(token, head));
                lse[head * tokens + q0 + token] = attended.lse[token][head];
            }
        }
        (q0, k0) = (q0 + queries, k0 + keys);
    }
    (out, lse)
}

// Compares by the tolerances of the peers' own tests of prefill.
fn compare(
    name: &str,
    case: &Case,
    host: &Tensor,
    outcome: &Outcome,
    expected: &(Vec<f64>, Vec<f64>),
) {
    let width = case.dims.v as usize;
    let given = Tensor {
        bytes: outcome.out.clone(),
        ..host.clone()
    };
    let (mut product, mut squares) = (0.0, 0.0);
    for token in 0..case.tokens().0 {
        for head in 0..case.heads {
            for column in 0..width {
                let a = f64::from(given.at([token, head, column]));
                let b = expected.0[(token * case.heads + head) * width + column];
                let error = (a - b).abs();
                assert!(
                    error <= 1e-3 || error <= b.abs() * 8.01 / 128.0,
                    "{name}: out[{token}, {head}, {column}] = {a}, expected {b}"
                );
                product += a * b;
                squares += a * a + b * b;
            }
        }
    }
    if squares > 0.0 {
        let distance = 1.0 - 2.0 * product / squares;
        assert!(distance < 7e-6, "{name}: cosine difference {distance}");
    }
    assert_eq!(outcome.lse.len(), expected.1.len().max(1), "{name}");
    for (at, (a, b)) in outcome.lse.iter().zip(&expected.1).enumerate() {
        let a = f64::from(*a);
        // Scores that are small beside their terms keep the rounding errors of these terms in f32.
        let terms = f64::from(case.amplitude.powi(2)) * 1e-6;
        let tolerance = (b.abs() * 2.01 / 65536.0).max(1e-5).max(terms);
        assert!(
            a == *b || (a - b).abs() <= tolerance,
            "{name}: lse[{at}] = {a}, expected {b}"
        );
    }
    // Bytes around the elements are as they were.
    let mut untouched = host.clone();
    untouched.fill(|at, _| given.at(at));
    assert_eq!(
        difference(&given.bytes, &untouched.bytes),
        None,
        "{name}: wrote outside of the output"
    );
}

fn check(case: &Case, seed: u64) {
    let inputs = Inputs::new(case, seed);
    let expected = expected(case, &inputs);

    let cpu = Cpu::new();
    let mut oracle = Bench::<CpuPrefill>::new(&cpu, case, &inputs);
    oracle.enqueue().unwrap();
    compare("CPU", case, &oracle.out, &oracle.outcome(), &expected);

    let gpu = &*gpu();
    let mut bench = Bench::<WgmmaAttn>::new(gpu, case, &inputs);
    bench.enqueue().unwrap();
    let first = bench.outcome();
    compare("WGMMA_ATTN", case, &bench.out, &first, &expected);

    let graph = gpu.capture(|_| bench.enqueue()).unwrap();
    for _ in 0..4 {
        // SAFETY: `bench` owns all memory of the captured launch, and outlives this.
        unsafe { graph.replay() }.unwrap();
        assert!(
            bench.outcome() == first,
            "a run differs from the one before"
        );
    }
}

fn case(dims: HeadDims, dtype: DType, heads: usize, lens: &[(usize, usize)]) -> Case {
    Case {
        dims,
        dtype,
        heads,
        lens: lens.to_vec(),
        causal: true,
        split: true,
        gap: 0,
        amplitude: 1.0,
        bounds: None,
    }
}

fn same(lens: &[usize]) -> Vec<(usize, usize)> {
    lens.iter().map(|&len| (len, len)).collect()
}

const BOUNDARIES: [usize; 12] = [0, 1, 127, 128, 129, 63, 0, 64, 65, 255, 256, 257];

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn lengths_around_every_tile_boundary_mix_in_one_batch() {
    for dims in [R1, WIDE, SMALL] {
        for dtype in [DType::BF16, DType::F16] {
            for split in [false, true] {
                let case = Case {
                    split,
                    gap: if split { 0 } else { 8 },
                    ..case(dims, dtype, 2, &same(&BOUNDARIES))
                };
                check(&case, 1);
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn keys_may_be_more_or_fewer_than_queries() {
    let more = [(100, 400), (1, 257), (256, 700), (0, 77), (130, 641)];
    // Rows that see nothing, within a tile and in whole tiles.
    let fewer = [(400, 100), (257, 1), (10, 0), (130, 129), (0, 0), (300, 40)];
    for lens in [&more[..], &fewer[..]] {
        for dims in [R1, WIDE, SMALL] {
            for causal in [true, false] {
                let case = Case {
                    causal,
                    gap: 16,
                    ..case(dims, DType::BF16, 2, lens)
                };
                check(&case, 2);
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn any_number_of_heads_and_of_requests() {
    for heads in [1, 3, 16, 128] {
        check(&case(R1, DType::BF16, heads, &same(&[150, 20])), 3);
    }
    check(&case(R1, DType::BF16, 1, &same(&[5; 300])), 4);
    // Short requests in three sections, of which the second has no tokens.
    let mut lens = vec![0; 40];
    (lens[0], lens[1], lens[38], lens[39]) = (150, 20, 257, 129);
    check(&case(R1, DType::BF16, 128, &same(&lens)), 6);
    // A long request among short ones, whose queries end before the second half of a tile.
    check(
        &case(SMALL, DType::BF16, 1, &same(&[2500, 1, 37, 64, 65])),
        5,
    );
}

// Checks that the keys of few query tiles are divided among CTAs, evenly and not, and beside whole
// tiles.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn few_query_tiles_on_long_contexts_agree() {
    let batches: [(usize, &[(usize, usize)]); 5] = [
        (1, &[(16, 20_000)]),
        (3, &[(129, 3000), (1, 2999)]),
        (8, &[(64, 2048)]),
        (2, &[(300, 1300), (0, 500), (40, 130), (257, 5000)]),
        (4, &[(1000, 1000)]),
    ];
    for (heads, lens) in batches {
        for dims in [R1, WIDE, SMALL] {
            for causal in [false, true] {
                let case = Case {
                    causal,
                    ..case(dims, DType::BF16, heads, lens)
                };
                check(&case, 13);
            }
        }
    }
}

// A captured graph's bounds have to hold for each batch that it is replayed for.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn a_graph_with_loose_bounds_replays_for_other_lengths() {
    let gpu = &*gpu();
    let captured = [(300, 700), (0, 77), (1, 257), (130, 641), (257, 64)];
    // Lengths with the same number of tokens, in other requests.
    let replayed = [(0, 5), (600, 690), (63, 344), (20, 0), (5, 700)];
    for dims in [R1, WIDE, SMALL] {
        for causal in [true, false] {
            let exact = Case {
                causal,
                ..case(dims, DType::BF16, 2, &captured)
            };
            let other = Case {
                lens: replayed.to_vec(),
                ..exact.clone()
            };
            let inputs = Inputs::new(&exact, 12);
            let other_inputs = Inputs::new(&other, 12);
            let outcomes = [expected(&exact, &inputs), expected(&other, &other_inputs)];
            for bounds in [
                (601, 701),
                (4096, 700),
                (600, 10_000),
                (40_000, 300_000),
                (1_000_000, 1_000_000),
            ] {
                let case = Case {
                    bounds: Some(bounds),
                    ..exact.clone()
                };
                let mut bench = Bench::<WgmmaAttn>::new(gpu, &case, &inputs);
                let graph = gpu.capture(|_| bench.enqueue()).unwrap();
                let batches = [(&exact, &inputs), (&other, &other_inputs)];
                for (at, (batch, inputs)) in batches.into_iter().enumerate() {
                    let starts = [&inputs.query_starts, &inputs.key_starts];
                    for (buffer, starts) in bench.starts.iter_mut().zip(starts) {
                        gpu.upload(bytemuck::cast_slice(starts), Cuda::bytes_mut(buffer))
                            .unwrap();
                    }
                    // SAFETY: `bench` owns all memory of the captured launch, and outlives this.
                    unsafe { graph.replay() }.unwrap();
                    let name = format!("batch {at} within {bounds:?}");
                    compare(&name, batch, &bench.out, &bench.outcome(), &outcomes[at]);
                }
            }
        }
    }
}

// The kernel weighs against a reference that it raises afterwards; here that comes too late, and it
// has to start over.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn scores_may_rise_beyond_what_weights_can_hold() {
    for amplitude in [3.0, 7.0, 20.0] {
        for dims in [R1, WIDE, SMALL] {
            for dtype in [DType::BF16, DType::F16] {
                for causal in [false, true] {
                    let case = Case {
                        causal,
                        amplitude,
                        ..case(dims, dtype, 2, &[(300, 1100), (70, 640), (130, 129)])
                    };
                    check(&case, 7);
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn random_ragged_batches_agree() {
    let mut rng = rng(8);
    for round in 0..32 {
        let heads = match round % 4 {
            0 => rng.random_range(1..=128),
            _ => rng.random_range(1..=6),
        };
        // Bound on the reference's multiplications.
        let mut left = 3_000_000 / heads;
        let lens = (0..rng.random_range(1..=60))
            .map(|_| {
                let mut len = || match rng.random_range(0..4) {
                    0 => BOUNDARIES[rng.random_range(0..BOUNDARIES.len())],
                    1 => rng.random_range(0..1500),
                    _ => rng.random_range(0..300),
                };
                let (queries, keys) = (len(), len());
                let keys = if round % 3 == 0 { queries } else { keys };
                if queries * keys > left {
                    return (queries % 3, keys % 3);
                }
                left -= queries * keys;
                (queries, keys)
            })
            .collect::<Vec<_>>();
        let dims = [R1, R1, WIDE, SMALL][rng.random_range(0..4)];
        let dtype = [DType::BF16, DType::F16][rng.random_range(0..2)];
        let case = Case {
            causal: rng.random_range(0..4) > 0,
            split: rng.random(),
            gap: 8 * rng.random_range(0..3),
            amplitude: [0.3, 1.0, 4.0][rng.random_range(0..3)],
            ..case(dims, dtype, heads, &lens)
        };
        check(&case, 100 + round);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn what_another_request_holds_changes_nothing() {
    let gpu = &*gpu();
    let lens = [(100, 70), (200, 331), (130, 130), (64, 64), (1, 300)];
    for causal in [true, false] {
        for split in [true, false] {
            let case = Case {
                causal,
                split,
                ..case(R1, DType::BF16, 3, &lens)
            };
            let inputs = Inputs::new(&case, 9);
            let mut bench = Bench::<WgmmaAttn>::new(gpu, &case, &inputs);
            bench.enqueue().unwrap();
            let clean = bench.outcome();

            let mut poisoned = Inputs::new(&case, 9);
            let starts = |starts: &[i32], request: usize| {
                starts[request] as usize..starts[request + 1] as usize
            };
            for request in [1, 3] {
                let keys = starts(&inputs.key_starts, request);
                poison(&mut poisoned.query, &starts(&inputs.query_starts, request));
                for host in [
                    &mut poisoned.nope,
                    &mut poisoned.rope,
                    &mut poisoned.packed,
                    &mut poisoned.values,
                ] {
                    poison(host, &keys);
                }
            }
            let mut bench = Bench::<WgmmaAttn>::new(gpu, &case, &poisoned);
            bench.enqueue().unwrap();
            let other = bench.outcome();
            let (tokens, row) = (case.tokens().0, bench.out.layout.strides[0] * 2);
            for request in [0, 2, 4] {
                let queries = starts(&inputs.query_starts, request);
                let bytes = (MARGIN + queries.start) * row..(MARGIN + queries.end) * row;
                assert!(clean.out[bytes.clone()] == other.out[bytes]);
                for head in 0..case.heads {
                    let lse = head * tokens + queries.start..head * tokens + queries.end;
                    assert!(clean.lse[lse.clone()] == other.lse[lse]);
                }
            }
        }
    }
}

// A tensor with other strides, in a GPU's memory that is zero elsewhere.
struct Spread {
    buffer: Buffer,
    layout: Layout,
}

impl Spread {
    fn new(gpu: &Cuda, host: &Tensor, strides: [usize; 3]) -> Self {
        let layout = Layout {
            strides,
            ..host.layout
        };
        let buffer = gpu.allocate(layout.span_bytes().unwrap()).unwrap();
        let mut spread = Self { buffer, layout };
        for (at, from) in spread.rows(host) {
            let row = &host.bytes[from];
            let (_, tail) = Cuda::split_mut(Cuda::bytes_mut(&mut spread.buffer), at.start);
            let (to, _) = Cuda::split_mut(tail, row.len());
            gpu.upload(row, to).unwrap();
        }
        spread
    }

    // Returns the range of each token's row of each head: in the buffer's bytes, and in the host's.
    fn rows(&self, host: &Tensor) -> Vec<(Range<usize>, Range<usize>)> {
        let ([tokens, heads, width], [a, b, _]) = (self.layout.shape, self.layout.strides);
        let every = (0..tokens).flat_map(|i| (0..heads).map(move |j| (i, j)));
        every
            .map(|(i, j)| {
                let [c, d, _] = host.layout.strides;
                let (at, from) = ((i * a + j * b) * 2, host.offset + (i * c + j * d) * 2);
                (at..at + width * 2, from..from + width * 2)
            })
            .collect()
    }

    fn view(&self) -> TensorRef<'_, Cuda> {
        TensorRef::new(Cuda::bytes(&self.buffer), self.layout).unwrap()
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn offsets_beyond_two_to_the_31_elements_change_nothing() {
    let gpu = &*gpu();
    // Heads far apart, and tokens.
    for (len, far) in [(300, [0, 1 << 31, 1]), (9, [1 << 28, 0, 1])] {
        let case = case(R1, DType::BF16, 2, &same(&[len]));
        let inputs = Inputs::new(&case, 10);
        let mut compact = Bench::<WgmmaAttn>::new(gpu, &case, &inputs);
        compact.enqueue().unwrap();
        let expected = compact.outcome();

        let spread = |host: &Tensor| {
            let width = host.layout.shape[2];
            let strides = match far {
                [0, head, _] => [width, head, 1],
                [token, ..] => [token, width, 1],
            };
            Spread::new(gpu, host, strides)
        };
        let [query, nope, rope, values] =
            [&inputs.query, &inputs.nope, &inputs.rope, &inputs.values].map(spread);
        let mut out = spread(&compact.out);
        let rows = out.rows(&compact.out);
        let (layout, tokens) = (out.layout, case.tokens().0);
        let starts = |at: usize| ArrayRef::<Cuda, i32>::new(Cuda::bytes(&compact.starts[at]), 2);
        let mut lse = gpu.allocate(tokens * case.heads * 4).unwrap();
        let lse = LseMut::new(
            Cuda::bytes_mut(&mut lse),
            LseLayout::heads_first(case.heads, tokens),
        );
        let call = PrefillCall::new(
            query.view(),
            Keys::Split {
                nope: nope.view(),
                rope: rope.view(),
            },
            values.view(),
            Output::Plain(TensorMut::new(Cuda::bytes_mut(&mut out.buffer), layout).unwrap()),
            (starts(0).unwrap(), len),
            (starts(1).unwrap(), len),
        )
        .with_lse(lse.unwrap());
        let mut state = compact.backend.state(gpu, &case.limits()).unwrap();
        // SAFETY: lengths, starts and pages are those of the case, for which all tensors were made.
        unsafe { compact.backend.prefill(gpu, call, &mut state, &()) }.unwrap();
        for (at, from) in rows {
            let mut row = vec![0; at.len()];
            gpu.download(Cuda::byte_range(Cuda::bytes(&out.buffer), at), &mut row)
                .unwrap();
            assert!(row == expected.out[from]);
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn what_the_kernel_cannot_take_is_refused_by_name() {
    let gpu = &*gpu();
    // A gap of one element leaves the first row, and every other, not aligned to 16 bytes.
    let case = Case {
        gap: 1,
        ..case(R1, DType::BF16, 2, &same(&[8]))
    };
    let inputs = Inputs::new(&case, 6);
    let error = Bench::<WgmmaAttn>::new(gpu, &case, &inputs)
        .enqueue()
        .unwrap_err();
    assert!(
        matches!(&error, Error::Argument { field, .. } if *field == "query"),
        "{error}"
    );

    // Partial results of three splits for each SM, of 128 rows in f32.
    let bytes = WgmmaAttn::new(gpu, &case.config())
        .unwrap()
        .workspace_bytes(gpu, &case.limits())
        .unwrap();
    assert!((1..=32 << 20).contains(&bytes), "{bytes}");
    let mut config = case.config();
    config.softmax_scale = f32::NAN;
    let error = WgmmaAttn::new(gpu, &config).unwrap_err();
    assert!(
        matches!(&error, Error::Argument { field, .. } if *field == "softmax_scale"),
        "{error}"
    );
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn each_bad_argument_of_the_raw_call_is_named_before_anything_is_launched() {
    let gpu = &*gpu();
    let case = case(R1, DType::BF16, 2, &same(&[100, 30]));
    let inputs = Inputs::new(&case, 11);
    let bench = Bench::<WgmmaAttn>::new(gpu, &case, &inputs);
    let bytes = WgmmaAttn::new(gpu, &case.config())
        .unwrap()
        .workspace_bytes(gpu, &case.limits())
        .unwrap();
    let workspace = gpu.allocate(bytes as usize).unwrap();
    let address = |operand: &On<Cuda>| operand.read().unwrap().bytes().address();
    let [query, nope, rope, _, values] = &bench.operands;
    let mut good = prefill_without_addresses();
    good.query = address(query) as *const _;
    good.key_nope = address(nope) as *const _;
    good.key_rope = address(rope) as *const _;
    good.value = address(values) as *const _;
    good.out = address(&bench.on_device) as *mut _;
    good.lse = bench.lse_buffer.address() as *mut _;
    good.cu_query_lens = bench.starts[0].address() as *const _;
    good.cu_key_lens = bench.starts[1].address() as *const _;
    good.workspace = workspace.address() as *mut _;
    good.workspace_bytes = workspace.len();
    good.softmax_scale = case.config().softmax_scale;
    let wrong: &[WrongField<raw::MlaPrefillParams>] = &[
        ("heads", |p| p.heads = 0),
        ("heads", |p| p.heads = 65536),
        ("requests", |p| p.requests = 0),
        ("query_tokens", |p| p.query_tokens = -1),
        ("key_tokens", |p| p.key_tokens = -1),
        ("max_query_len", |p| p.max_query_len = -1),
        ("max_query_len", |p| p.max_query_len = i32::MAX),
        ("max_key_len", |p| p.max_key_len = -1),
        ("dtype", |p| p.dtype = raw::MLA_DTYPE_F32 as i32),
        ("nope_dim", |p| p.nope_dim = 192),
        ("query", |p| p.query = std::ptr::null()),
        ("query", |p| p.query = p.query.wrapping_byte_add(8)),
        ("key_nope", |p| p.key_nope = std::ptr::null()),
        ("key_nope", |p| p.key_nope = p.key_nope.wrapping_byte_add(2)),
        ("key_rope", |p| p.key_rope = std::ptr::null()),
        ("key_rope", |p| p.key_rope = p.key_rope.wrapping_byte_add(2)),
        ("value", |p| p.value = std::ptr::null()),
        ("value", |p| p.value = p.value.wrapping_byte_add(4)),
        ("out", |p| p.out = std::ptr::null_mut()),
        ("out", |p| p.out = p.out.wrapping_byte_add(2)),
        ("query_token_stride", |p| p.query_token_stride = 0),
        ("query_token_stride", |p| p.query_token_stride = 385),
        ("query_head_stride", |p| p.query_head_stride = -8),
        ("key_nope_token_stride", |p| {
            p.key_nope_token_stride = 1 << 39
        }),
        ("key_nope_head_stride", |p| p.key_nope_head_stride = 0),
        ("key_rope_token_stride", |p| p.key_rope_token_stride = 4),
        ("key_rope_head_stride", |p| p.key_rope_head_stride = -8),
        ("value_token_stride", |p| p.value_token_stride = 0),
        ("value_head_stride", |p| p.value_head_stride = 129),
        ("out_token_stride", |p| p.out_token_stride = 0),
        ("out_head_stride", |p| p.out_head_stride = 2),
        ("cu_query_lens", |p| p.cu_query_lens = std::ptr::null()),
        ("cu_key_lens", |p| {
            p.cu_key_lens = p.cu_key_lens.wrapping_byte_add(2)
        }),
        ("lse", |p| p.lse = p.lse.wrapping_byte_add(2)),
        ("lse_head_stride", |p| p.lse_head_stride = 129),
        ("lse_head_stride", |p| p.lse_head_stride = 1 << 39),
        ("softmax_scale", |p| p.softmax_scale = 0.0),
        ("softmax_scale", |p| p.softmax_scale = f32::NAN),
        ("workspace", |p| p.workspace = std::ptr::null_mut()),
        ("workspace", |p| {
            p.workspace = p.workspace.wrapping_byte_add(16)
        }),
        ("workspace_bytes", |p| p.workspace_bytes -= 1),
    ];
    // SAFETY: what is refused is not launched, and everything else is as the good call has it.
    each_is_refused(&good, wrong, |params| unsafe {
        raw::mla_prefill_sm90(params, gpu.raw_stream())
    });
    let outcome = bench.outcome();
    assert!(
        outcome.out.iter().all(|byte| *byte == 0xff) && outcome.lse.iter().all(|x| x.is_nan()),
        "a refused call has written"
    );
    // SAFETY: the call describes what `bench` and `workspace` hold.
    let status = unsafe { raw::mla_prefill_sm90(&good, gpu.raw_stream()) };
    // SAFETY: the status is that of a function of `raw`.
    unsafe { raw::check("prefill", status) }.unwrap();
    let expected = expected(&case, &inputs);
    compare(
        "the raw call",
        &case,
        &bench.out,
        &bench.outcome(),
        &expected,
    );
    assert!(
        download(gpu, &workspace).unwrap()[..raw::MLA_PREFILL_COUNTER_BYTES as usize]
            .iter()
            .all(|byte| *byte == 0),
        "a launch leaves its counters as it found them"
    );
}
