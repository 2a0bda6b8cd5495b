//! The CPU backends against the f64 reference.

use half::{bf16, f16};
use mla_runtime::backend::{
    Chunk, DecodeBackend, DecodeBatch, DecodeCall, Keys, LayerConfig, Output, PrefillBackend,
    PrefillBatch, PrefillCall, Query, SlotLists, StepLimits,
};
use mla_runtime::cache::{BlockTable, CacheLayout, CacheMut, CacheRef};
use mla_runtime::cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::device::Device;
use mla_runtime::dims::{HeadDims, MlaDims};
use mla_runtime::dtype::{DType, Element};
use mla_runtime::kv_format::KvFormat;
use mla_runtime::lse::LseMut;
use mla_runtime::problem::Problem;
use mla_runtime::reference::{self, Array};
use mla_runtime::tensor::{ArrayRef, Layout, TensorMut, TensorRef};
use proptest::prelude::*;

/// Uniform in [−1, 1), repeatable.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn below(&mut self, bound: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * bound as f32) as usize % bound.max(1)
    }

    fn fill<T: Element>(&mut self, len: usize) -> Vec<T> {
        (0..len).map(|_| T::from_f32(self.next())).collect()
    }
}

/// What an output may differ by. Outputs here are averages of values below 1 in magnitude. f32
/// computes within a few roundings of the largest score (at most 8 here) times 2^−24. In bf16 and
/// f16 the output is rounded once, which is half a unit in the last place of a value below 1; and
/// where a processor multiplies bf16 the weights are rounded to 2^−9 of themselves as well, which
/// moves an average of values below 1 by at most as much.
fn tolerance<T: Element>() -> f64 {
    match T::DTYPE.name() {
        "f32" => 2e-5,
        "f16" => 6e-4,
        _ => 6e-3,
    }
}

fn pools(portable: bool) -> [Cpu; 2] {
    [1, 3].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let cpu = Cpu::with_pool(pool.into());
        if portable { cpu.portable() } else { cpu }
    })
}

fn config(problem: Problem) -> LayerConfig {
    LayerConfig {
        problem,
        softmax_scale: 1.0 / (problem.dims.head.qk() as f32).sqrt(),
    }
}

fn starts(lens: &[usize]) -> Vec<i32> {
    let mut starts = vec![0];
    for len in lens {
        starts.push(starts[starts.len() - 1] + *len as i32);
    }
    starts
}

fn limits(query_len: usize) -> StepLimits {
    StepLimits {
        requests: 64,
        tokens: 4096,
        decode_query_len: query_len,
        pages_per_request: 1024,
        context_rows: 4096,
    }
}

fn assert_close(got: f64, want: f64, tolerance: f64, what: &str) {
    let close = got == want || (got - want).abs() <= tolerance * want.abs().max(1.0);
    assert!(
        close,
        "{what}: got {got}, want {want}, tolerance {tolerance}"
    );
}

struct PrefillCase {
    dims: MlaDims,
    heads: usize,
    query_lens: Vec<usize>,
    key_lens: Vec<usize>,
    causal: bool,
    split: bool,
    // Elements between tokens beyond a row's own.
    gap: usize,
    seed: u64,
}

fn check_prefill<T: Element>(case: &PrefillCase) {
    check_prefill_on::<T>(case, true);
    // Only bf16 has another way to go.
    if T::DTYPE == DType::BF16 {
        check_prefill_on::<T>(case, false);
    }
}

fn check_prefill_on<T: Element>(case: &PrefillCase, portable: bool) {
    let PrefillCase {
        dims, heads, gap, ..
    } = *case;
    let [p, r, v] = [dims.head.nope, dims.head.rope, dims.head.v].map(|n| n as usize);
    let mut random = Random(case.seed);
    let (tq, tk) = (
        case.query_lens.iter().sum::<usize>(),
        case.key_lens.iter().sum::<usize>(),
    );
    let layout = |tokens: usize, heads: usize, width: usize| {
        let mut layout = Layout::contiguous(T::DTYPE, [tokens, heads, width]);
        layout.strides[0] += gap;
        layout
    };
    let len = |tokens: usize, heads: usize, width: usize| tokens * (heads * width + gap);
    let query = random.fill::<T>(len(tq, heads, p + r));
    let nope = random.fill::<T>(len(tk, heads, p));
    let rope = random.fill::<T>(len(tk, 1, r));
    let values = random.fill::<T>(len(tk, heads, v));
    let at = |data: &[T], layout: Layout, t: usize, h: usize, k: usize| {
        f64::from(data[t * layout.strides[0] + h * layout.strides[1] + k].to_f32())
    };
    let key = |t: usize, h: usize, k: usize| {
        if k < p {
            at(&nope, layout(tk, heads, p), t, h, k)
        } else {
            at(&rope, layout(tk, 1, r), t, 0, k - p)
        }
    };
    let mut packed = vec![T::from_f32(0.0); tk * heads * (p + r)];
    for t in 0..tk {
        for h in 0..heads {
            for k in 0..p + r {
                packed[(t * heads + h) * (p + r) + k] = T::from_f32(key(t, h, k) as f32);
            }
        }
    }
    let (query_starts, key_starts) = (starts(&case.query_lens), starts(&case.key_lens));
    let problem = Problem::new(dims, heads as u32, T::DTYPE);
    let mut results = Vec::new();
    for cpu in pools(portable) {
        let backend = CpuPrefill::new(&cpu, &config(problem)).unwrap();
        let mut state = backend.state(&cpu, &limits(1)).unwrap();
        backend.metadata(&cpu, &limits(1)).unwrap();
        let lens: Vec<u32> = case.query_lens.iter().map(|len| *len as u32).collect();
        backend
            .prepare(
                &cpu,
                &PrefillBatch {
                    query_lens: &lens,
                    chunks: &[],
                },
                &mut state,
                &mut (),
            )
            .unwrap();
        // Filled, to see that every element is written and none beside.
        let mut out = vec![T::from_f32(77.0); len(tq, heads, v)];
        let mut lse = vec![77.0f32; heads * tq];
        let tensor = |data, layout| {
            TensorRef::<Cpu>::new(bytemuck::cast_slice::<T, u8>(data), layout).unwrap()
        };
        let call = PrefillCall {
            query: tensor(&query, layout(tq, heads, p + r)),
            keys: if case.split {
                Keys::Split {
                    nope: tensor(&nope, layout(tk, heads, p)),
                    rope: tensor(&rope, layout(tk, 1, r)),
                }
            } else {
                Keys::Packed(TensorRef::from_slice(&packed, [tk, heads, p + r]).unwrap())
            },
            values: tensor(&values, layout(tk, heads, v)),
            out: Output::Plain(
                TensorMut::new(bytemuck::cast_slice_mut(&mut out), layout(tq, heads, v)).unwrap(),
            ),
            lse: Some(LseMut::from_slice(&mut lse, heads, tq).unwrap()),
            query_starts: ArrayRef::from_slice(&query_starts),
            key_starts: ArrayRef::from_slice(&key_starts),
            max_query_len: case.query_lens.iter().copied().max().unwrap_or(0),
            max_key_len: case.key_lens.iter().copied().max().unwrap_or(0),
        };
        if case.causal {
            backend.new_tokens(&cpu, call, &mut state, &()).unwrap();
        } else {
            let lens: Vec<u32> = case.key_lens.iter().map(|len| *len as u32).collect();
            let chunk = Chunk {
                index: 0,
                key_lens: &lens,
            };
            backend
                .context_chunk(&cpu, chunk, call, &mut state, &())
                .unwrap();
        }
        results.push((out, lse));
    }
    assert_same_bits(&results);

    let (out, lse) = &results[0];
    for request in 0..case.query_lens.len() {
        let (q0, k0) = (query_starts[request] as usize, key_starts[request] as usize);
        let (n, m) = (case.query_lens[request], case.key_lens[request]);
        let queries = Array::from_fn([n, heads, p + r], |t, h, k| {
            at(&query, layout(tq, heads, p + r), q0 + t, h, k)
        });
        let keys = Array::from_fn([m, heads, p + r], |t, h, k| key(k0 + t, h, k));
        let values = Array::from_fn([m, heads, v], |t, h, k| {
            at(&values, layout(tk, heads, v), k0 + t, h, k)
        });
        let scale = f64::from(config(problem).softmax_scale);
        let want = reference::expanded(&queries, &keys, &values, scale, case.causal);
        for t in 0..n {
            for h in 0..heads {
                for k in 0..v {
                    let got = at(out, layout(tq, heads, v), q0 + t, h, k);
                    assert_close(got, want.out.row(t, h)[k], tolerance::<T>(), "out");
                }
                let got = f64::from(lse[h * tq + q0 + t]);
                assert_close(got, want.lse[t][h], 2e-5, "lse");
            }
        }
    }
    for t in 0..tq {
        for k in 0..gap {
            assert_eq!(out[t * (heads * v + gap) + heads * v + k].to_f32(), 77.0);
        }
    }
}

fn assert_same_bits<T: Element>(results: &[(Vec<T>, Vec<f32>)]) {
    let bits = |(out, lse): &(Vec<T>, Vec<f32>)| {
        (
            bytemuck::cast_slice::<T, u8>(out).to_vec(),
            bytemuck::cast_slice::<f32, u8>(lse).to_vec(),
        )
    };
    for other in &results[1..] {
        assert!(
            bits(&results[0]) == bits(other),
            "the result depends on the number of threads"
        );
    }
}

struct DecodeCase {
    dims: MlaDims,
    heads: usize,
    format: KvFormat,
    page_size: usize,
    query_lens: Vec<usize>,
    seq_lens: Vec<usize>,
    // Slots per query token, where the call is sparse.
    sparse: Option<usize>,
    concatenated: bool,
    seed: u64,
}

fn check_decode<T: Element>(case: &DecodeCase) {
    check_decode_on::<T>(case, true);
    // Only bf16 has another way to go.
    if T::DTYPE == DType::BF16 {
        check_decode_on::<T>(case, false);
    }
}

fn check_decode_on<T: Element>(case: &DecodeCase, portable: bool) {
    let DecodeCase {
        dims,
        heads,
        format,
        page_size,
        ..
    } = *case;
    let (l, r) = (dims.latent as usize, dims.head.rope as usize);
    let mut random = Random(case.seed);
    let tokens: usize = case.query_lens.iter().sum();
    let max_pages = case
        .seq_lens
        .iter()
        .map(|len| len.div_ceil(page_size))
        .max()
        .unwrap_or(0)
        + 2;
    let used: usize = case
        .seq_lens
        .iter()
        .map(|len| len.div_ceil(page_size))
        .sum();
    let pages = used + 3;

    // Pages in a random order, garbage where no page is, NaN in every slot that holds no token.
    let mut order: Vec<i32> = (0..pages as i32).collect();
    for i in (1..pages).rev() {
        order.swap(i, random.below(i + 1));
    }
    let mut table = vec![2_147_480_000i32; case.seq_lens.len() * max_pages];
    let mut layout = CacheLayout::contiguous(dims, format, pages, page_size);
    if format == KvFormat::Fp8 {
        layout.scale = 0.037;
    }
    let row_bytes = layout.row_stride;
    let mut cache = vec![0xffu8; pages * page_size * row_bytes];
    let (mut slots, mut latent, mut rope) = (Vec::new(), Vec::new(), Vec::new());
    let mut next = 0;
    for (request, len) in case.seq_lens.iter().enumerate() {
        for token in 0..*len {
            if token % page_size == 0 {
                table[request * max_pages + token / page_size] = order[next];
                next += 1;
            }
            let page = table[request * max_pages + token / page_size] as i64;
            slots.push(page * page_size as i64 + (token % page_size) as i64);
            latent.extend(random.fill::<f32>(l));
            rope.extend(random.fill::<f32>(r));
        }
    }
    Cpu::new()
        .write_cache(
            TensorRef::from_slice(&latent, [slots.len(), 1, l]).unwrap(),
            TensorRef::from_slice(&rope, [slots.len(), 1, r]).unwrap(),
            ArrayRef::from_slice(&slots),
            CacheMut::new(&mut cache[..], layout).unwrap(),
        )
        .unwrap();
    let stored = |slot: usize| {
        let bytes = &cache[slot * row_bytes..(slot + 1) * row_bytes];
        reference::decode_row(format, l, r, bytes, f64::from(layout.scale))
    };
    for (index, slot) in slots.iter().enumerate() {
        let row: Vec<f64> = latent[index * l..(index + 1) * l]
            .iter()
            .chain(&rope[index * r..(index + 1) * r])
            .map(|x| f64::from(*x))
            .collect();
        // f32 division by the scale may round where f64 does not: compare what is exact.
        if format != KvFormat::Fp8 {
            let bytes = reference::encode_row(format, l, &row, f64::from(layout.scale));
            let slot = *slot as usize;
            assert_eq!(
                cache[slot * row_bytes..(slot + 1) * row_bytes],
                bytes,
                "row {index}"
            );
        }
    }

    let query = random.fill::<T>(tokens * heads * (l + r));
    let part = |range: std::ops::Range<usize>| -> Vec<T> {
        query
            .chunks((l + r).max(1))
            .flat_map(|row| row[range.clone()].to_vec())
            .collect()
    };
    let (q_latent, q_rope) = (part(0..l), part(l..l + r));
    let query_starts = starts(&case.query_lens);
    let seq_lens: Vec<i32> = case.seq_lens.iter().map(|len| *len as i32).collect();
    let lists: Option<Vec<i32>> = case.sparse.map(|width| {
        (0..tokens * width)
            .map(|_| match random.below(5) {
                0 => -1,
                1 => (pages * page_size) as i32 + random.below(1000) as i32,
                _ if slots.is_empty() => -7,
                _ => slots[random.below(slots.len())] as i32,
            })
            .collect()
    });
    let mut problem = Problem::new(dims, heads as u32, T::DTYPE);
    problem.kv_format = format;
    problem.sparse = lists.is_some();
    let config = config(problem);
    let mut results = Vec::new();
    for cpu in pools(portable) {
        let backend = CpuDecode::new(&cpu, &config).unwrap();
        let max_query_len = case.query_lens.iter().copied().max().unwrap_or(0);
        let mut state = backend.state(&cpu, &limits(max_query_len)).unwrap();
        let mut out = vec![T::from_f32(77.0); tokens * heads * l];
        let mut lse = vec![77.0f32; heads * tokens];
        let batch = DecodeBatch {
            block_table: BlockTable::new(ArrayRef::from_slice(&table), seq_lens.len(), max_pages)
                .unwrap(),
            seq_lens: ArrayRef::from_slice(&seq_lens),
            query_starts: ArrayRef::from_slice(&query_starts),
            max_query_len,
            max_seq_len: case.seq_lens.iter().copied().max().unwrap_or(0),
        };
        backend.prepare(&cpu, &batch, &mut state, &mut ()).unwrap();
        let call = DecodeCall {
            query: if case.concatenated {
                Query::Concatenated(TensorRef::from_slice(&query, [tokens, heads, l + r]).unwrap())
            } else {
                Query::Split {
                    latent: TensorRef::from_slice(&q_latent, [tokens, heads, l]).unwrap(),
                    rope: TensorRef::from_slice(&q_rope, [tokens, heads, r]).unwrap(),
                }
            },
            cache: CacheRef::new(&cache[..], layout).unwrap(),
            batch,
            out: Output::Plain(TensorMut::from_slice(&mut out, [tokens, heads, l]).unwrap()),
            lse: Some(LseMut::from_slice(&mut lse, heads, tokens).unwrap()),
            slots: lists.as_ref().map(|lists| SlotLists {
                slots: ArrayRef::from_slice(lists),
                width: case.sparse.unwrap(),
            }),
        };
        backend.decode(&cpu, call, &mut state, &()).unwrap();
        results.push((out, lse));
    }
    assert_same_bits(&results);

    let (out, lse) = &results[0];
    let mut first = 0;
    for (request, n) in case.query_lens.iter().enumerate() {
        let t0 = query_starts[request] as usize;
        let scale = f64::from(config.softmax_scale);
        let queries = Array::from_fn([*n, heads, l + r], |t, h, k| {
            f64::from(query[((t0 + t) * heads + h) * (l + r) + k].to_f32())
        });
        let all: Vec<Vec<f64>> = slots[first..first + case.seq_lens[request]]
            .iter()
            .map(|slot| stored(*slot as usize))
            .collect();
        first += case.seq_lens[request];
        let dense = reference::absorbed(&queries, &all, l, scale);
        for t in 0..*n {
            let listed = lists.as_ref().map(|lists| {
                let width = case.sparse.unwrap();
                let rows: Vec<Vec<f64>> = lists[(t0 + t) * width..(t0 + t + 1) * width]
                    .iter()
                    .filter(|slot| (0..(pages * page_size) as i32).contains(*slot))
                    .map(|slot| stored(*slot as usize))
                    .collect();
                let query = Array {
                    shape: [1, heads, l + r],
                    data: queries.data[t * heads * (l + r)..(t + 1) * heads * (l + r)].to_vec(),
                };
                reference::absorbed(&query, &rows, l, scale)
            });
            for h in 0..heads {
                let (want, want_lse) = match &listed {
                    Some(listed) => (listed.out.row(0, h), listed.lse[0][h]),
                    None => (dense.out.row(t, h), dense.lse[t][h]),
                };
                for (k, want) in want.iter().enumerate() {
                    let got = f64::from(out[((t0 + t) * heads + h) * l + k].to_f32());
                    assert_close(got, *want, tolerance::<T>(), "out");
                }
                let got = f64::from(lse[h * tokens + t0 + t]);
                assert_close(got, want_lse, 2e-5, "lse");
            }
        }
    }
}

const SMALL: MlaDims = MlaDims::new(128, HeadDims::new(24, 16, 20));

#[test]
fn prefill_takes_every_dtype_and_key_layout() {
    for split in [false, true] {
        for causal in [false, true] {
            let case = PrefillCase {
                dims: MlaDims::R1,
                heads: 3,
                query_lens: vec![70, 0, 1, 33],
                key_lens: vec![70, 5, 300, 20],
                causal,
                split,
                gap: 8,
                seed: 1,
            };
            check_prefill::<f32>(&case);
            check_prefill::<f16>(&case);
            check_prefill::<bf16>(&case);
        }
    }
}

#[test]
fn prefill_crosses_tiles_and_blocks() {
    let case = PrefillCase {
        dims: MlaDims::new(64, HeadDims::new(32, 32, 64)),
        heads: 2,
        query_lens: vec![600],
        key_lens: vec![700],
        causal: true,
        split: true,
        gap: 0,
        seed: 2,
    };
    check_prefill::<f32>(&case);
    check_prefill::<bf16>(&case);
}

#[test]
fn decode_takes_every_cache_format() {
    for format in KvFormat::ALL {
        for sparse in [None, Some(37)] {
            let case = DecodeCase {
                dims: SMALL,
                heads: 16,
                format: *format,
                page_size: 16,
                query_lens: vec![1, 2, 0, 3, 1],
                seq_lens: vec![300, 17, 4, 2, 0],
                sparse,
                concatenated: sparse.is_some(),
                seed: 3,
            };
            match format {
                KvFormat::F32 => check_decode::<f32>(&case),
                KvFormat::F16 => check_decode::<f16>(&case),
                KvFormat::BF16 => check_decode::<bf16>(&case),
                KvFormat::Fp8 | KvFormat::Fp8DsMla => {
                    check_decode::<f32>(&case);
                    check_decode::<f16>(&case);
                    check_decode::<bf16>(&case);
                }
            }
        }
    }
}

#[test]
fn decode_splits_long_contexts() {
    for (heads, query_len) in [(16, 1), (40, 2), (1, 1)] {
        let case = DecodeCase {
            dims: MlaDims::R1,
            heads,
            format: KvFormat::BF16,
            page_size: 64,
            query_lens: vec![query_len],
            seq_lens: vec![2100],
            sparse: None,
            concatenated: false,
            seed: 4,
        };
        check_decode::<bf16>(&case);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn prefill_matches_the_reference(
        dims in (1u32..40, 0u32..20, 1u32..40),
        heads in 1usize..4,
        lens in prop::collection::vec((0usize..50, 0usize..70), 0..4),
        causal: bool,
        split: bool,
        gap in 0usize..3,
        seed: u64,
    ) {
        let case = PrefillCase {
            dims: MlaDims::new(8, HeadDims::new(dims.0, dims.1, dims.2)),
            heads,
            query_lens: lens.iter().map(|lens| lens.0).collect(),
            key_lens: lens.iter().map(|lens| lens.1).collect(),
            causal,
            split,
            gap,
            seed,
        };
        check_prefill::<f32>(&case);
        check_prefill::<bf16>(&case);
    }

    #[test]
    fn decode_matches_the_reference(
        latent in prop::sample::select(vec![128u32, 256]),
        rope in 0u32..40,
        heads in 1usize..20,
        format in prop::sample::select(KvFormat::ALL),
        page_size in 1usize..20,
        lens in prop::collection::vec((0usize..4, 0usize..90), 0..5),
        sparse in prop::option::of(0usize..30),
        concatenated: bool,
        seed: u64,
    ) {
        let case = DecodeCase {
            dims: MlaDims::new(latent, HeadDims::new(16, rope, 16)),
            heads,
            format,
            page_size,
            query_lens: lens.iter().map(|lens| lens.0).collect(),
            seq_lens: lens.iter().map(|lens| lens.1).collect(),
            sparse,
            concatenated,
            seed,
        };
        match format {
            KvFormat::F32 => check_decode::<f32>(&case),
            KvFormat::F16 => check_decode::<f16>(&case),
            KvFormat::BF16 | KvFormat::Fp8 | KvFormat::Fp8DsMla => check_decode::<bf16>(&case),
        }
    }
}

// One request of three tokens over a cache of f32, as a call into which a test puts its mistake or
// its kind of output.
struct Small {
    query: Vec<f32>,
    cache: Vec<f32>,
    table: Vec<i32>,
    seq_lens: Vec<i32>,
    starts: Vec<i32>,
}

impl Small {
    const DIMS: MlaDims = MlaDims::new(8, HeadDims::new(4, 4, 4));

    fn new() -> Self {
        let mut random = Random(9);
        Self {
            query: random.fill(2 * 12),
            cache: random.fill(2 * 2 * 12),
            table: vec![1, 0],
            seq_lens: vec![3],
            starts: vec![0, 1],
        }
    }

    fn decode<'a>(&'a self, out: Output<'a, Cpu>) -> mla_runtime::Result<()> {
        let cpu = Cpu::new();
        let problem = Problem::new(Self::DIMS, 2, DType::F32);
        let backend = CpuDecode::new(&cpu, &config(problem))?;
        let mut state = backend.state(&cpu, &limits(1))?;
        let layout = CacheLayout::contiguous(Self::DIMS, KvFormat::F32, 2, 2);
        let call = DecodeCall {
            query: Query::Concatenated(TensorRef::from_slice(&self.query, [1, 2, 12])?),
            cache: CacheRef::new(bytemuck::cast_slice(&self.cache), layout)?,
            batch: DecodeBatch {
                block_table: BlockTable::new(ArrayRef::from_slice(&self.table), 1, 2)?,
                seq_lens: ArrayRef::from_slice(&self.seq_lens),
                query_starts: ArrayRef::from_slice(&self.starts),
                max_query_len: 1,
                max_seq_len: 100,
            },
            out,
            lse: None,
            slots: None,
        };
        backend.decode(&cpu, call, &mut state, &())
    }

    fn prefill<'a>(&'a self, out: Output<'a, Cpu>) -> mla_runtime::Result<()> {
        let cpu = Cpu::new();
        let problem = Problem::new(Self::DIMS, 2, DType::F32);
        let backend = CpuPrefill::new(&cpu, &config(problem))?;
        let mut state = backend.state(&cpu, &limits(1))?;
        let call = PrefillCall {
            query: TensorRef::from_slice(&self.query, [1, 2, 8])?,
            keys: Keys::Packed(TensorRef::from_slice(&self.cache, [2, 2, 8])?),
            values: TensorRef::from_slice(&self.cache[20..], [2, 2, 4])?,
            out,
            lse: None,
            query_starts: ArrayRef::from_slice(&self.starts),
            key_starts: ArrayRef::from_slice(&[0, 2]),
            max_query_len: 1,
            max_key_len: 2,
        };
        backend.new_tokens(&cpu, call, &mut state, &())
    }
}

#[test]
fn quantised_outputs_are_the_plain_ones_encoded() {
    let small = Small::new();
    type Attend = for<'a> fn(&'a Small, Output<'a, Cpu>) -> mla_runtime::Result<()>;
    for (attend, width) in [(Small::decode as Attend, 8), (Small::prefill as Attend, 4)] {
        let mut plain = vec![0.0f32; 2 * width];
        attend(
            &small,
            Output::Plain(TensorMut::from_slice(&mut plain, [1, 2, width]).unwrap()),
        )
        .unwrap();
        let mut bytes = vec![0x7fu8; 2 * width];
        attend(
            &small,
            Output::Fp8 {
                bytes: &mut bytes,
                scale: 0.01,
            },
        )
        .unwrap();
        let want: Vec<u8> = plain
            .iter()
            .map(|x| mla_runtime::cpu::fp8::encode(x / 0.01))
            .collect();
        assert_eq!(bytes, want);
        assert!(bytes.iter().any(|code| code & 0x7f != 0));

        let error = attend(
            &small,
            Output::Fp8 {
                bytes: &mut bytes[1..],
                scale: 1.0,
            },
        )
        .unwrap_err();
        assert!(error.to_string().starts_with("out: given"), "{error}");
        let error = attend(
            &small,
            Output::Fp8 {
                bytes: &mut bytes,
                scale: 0.0,
            },
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "out scale: given 0, accepted a finite number above 0"
        );
    }
}

#[test]
fn bad_batches_are_named() {
    let mistake = |change: fn(&mut Small), message: &str| {
        let mut small = Small::new();
        change(&mut small);
        let mut out = vec![5.0f32; 16];
        let error = small
            .decode(Output::Plain(
                TensorMut::from_slice(&mut out, [1, 2, 8]).unwrap(),
            ))
            .unwrap_err();
        assert_eq!(error.to_string(), message);
        assert!(out.iter().all(|x| *x == 5.0));
    };
    mistake(
        |small| small.table[1] = 2,
        "block table entry: given 2 at [0, 1], accepted 0 and up below 2",
    );
    mistake(
        |small| small.seq_lens[0] = 5,
        "sequence length: given 5 of request 0, accepted at most 4 (2 pages of 2)",
    );
    mistake(
        |small| small.seq_lens[0] = -1,
        "sequence length: given -1 of request 0, accepted 0 to 100, as the batch says",
    );
    mistake(
        |small| small.starts = vec![1, 0],
        "query starts: given [1, 0], accepted ascending from 0 to at most 1",
    );
    mistake(
        |small| small.seq_lens = vec![1, 1],
        "sequence lengths: given 2, accepted 1, one per request of the block table",
    );
}
