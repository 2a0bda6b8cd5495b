//! Compares the CPU backends with the f64 reference.

mod common;

use half::bf16;
use mla_conformance::{Bits, DecodeCase, Failure, PrefillCase};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, Keys, LayerConfig, Output, PrefillBackend, PrefillCall,
    Query, StepLimits,
};
use mla_runtime::model::{DType, Element, HeadDims, KvFormat, MlaDims};
use mla_runtime::spec::{KeyLayout, Problem, QueryFormat};
use mla_runtime::tensor::{ArrayRef, BlockTable, CacheLayout, CacheRef, TensorMut, TensorRef};
use proptest::prelude::*;

use common::Random;

fn pools(restrict: fn(Cpu) -> Cpu) -> [Cpu; 2] {
    [1, 3].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        restrict(Cpu::with_pool(pool.into()))
    })
}

fn config(problem: Problem) -> LayerConfig {
    LayerConfig::new(problem, 1.0 / (problem.dims.head.qk() as f32).sqrt())
}

fn limits(query_len: usize) -> StepLimits {
    StepLimits::new(64, 4096, 1024)
        .with_decode_query_len(query_len)
        .with_context_rows(4096)
}

// Runs a case in each way that the processor supports. Each must agree with the reference, and must
// not depend on the number of threads.
fn each_way(check: impl Fn(&Cpu) -> Result<Bits, Failure>) {
    let ways: [fn(Cpu) -> Cpu; 3] = [|cpu| cpu, Cpu::without_matrix_unit, Cpu::portable];
    for way in ways {
        let [one, three] = pools(way).map(|cpu| match check(&cpu) {
            Ok(bits) => bits,
            Err(failure) => panic!("{failure}"),
        });
        assert!(one == three, "the result depends on the number of threads");
    }
}

fn check_prefill(dtype: DType, case: &PrefillCase) {
    let mut case = case.clone();
    case.problem.dtype = dtype;
    each_way(|cpu| case.check::<CpuPrefill>(cpu));
}

fn check_decode(dtype: DType, case: &DecodeCase) {
    let mut case = case.clone();
    case.problem.dtype = dtype;
    each_way(|cpu| case.check::<CpuDecode>(cpu));
}

const SMALL: MlaDims = MlaDims::new(128, HeadDims::new(24, 16, 20));

fn problem(dims: MlaDims, heads: usize) -> Problem {
    Problem::new(dims, heads as u32, DType::BF16)
}

fn key_layout(split: bool) -> Option<KeyLayout> {
    Some(if split {
        KeyLayout::Split
    } else {
        KeyLayout::Packed
    })
}

fn query_format(concatenated: bool) -> Option<QueryFormat> {
    Some(if concatenated {
        QueryFormat::Concatenated
    } else {
        QueryFormat::Split
    })
}

// The conformance suite tests the inputs that a backend prefers. These tests cover the other inputs
// that it supports.

#[test]
fn prefill_dtypes_and_key_layouts() {
    for split in [false, true] {
        for causal in [false, true] {
            let case = PrefillCase {
                key_lens: vec![70, 5, 300, 20],
                causal,
                gap: 8,
                key_layout: key_layout(split),
                ..PrefillCase::new(problem(MlaDims::R1, 3), &[70, 0, 1, 33])
            };
            for dtype in DType::ALL {
                check_prefill(*dtype, &case);
            }
        }
    }
}

#[test]
fn prefill_crosses_tiles_and_blocks() {
    let dims = MlaDims::new(64, HeadDims::new(32, 32, 64));
    let case = PrefillCase {
        key_lens: vec![700],
        seed: 2,
        ..PrefillCase::new(problem(dims, 2), &[600])
    };
    check_prefill(DType::F32, &case);
    check_prefill(DType::BF16, &case);
}

#[test]
fn decode_takes_every_cache_format() {
    for format in KvFormat::ALL {
        for sparse in [false, true] {
            let mut problem = problem(SMALL, 16);
            (problem.kv_format, problem.page_size) = (*format, 16);
            problem.sparse = sparse;
            let case = DecodeCase {
                query_lens: vec![1, 2, 0, 3, 1],
                query_format: query_format(sparse),
                seed: 3,
                ..DecodeCase::new(problem, &[300, 17, 4, 2, 0])
            };
            for dtype in DType::ALL {
                if format.dtype().is_none_or(|own| own == *dtype) {
                    check_decode(*dtype, &case);
                }
            }
        }
    }
}

#[test]
fn decode_splits_long_contexts() {
    for (heads, query_len) in [(16, 1), (40, 2), (1, 1)] {
        let case = DecodeCase {
            query_lens: vec![query_len],
            seed: 4,
            ..DecodeCase::new(problem(MlaDims::R1, heads), &[2100])
        };
        check_decode(DType::BF16, &case);
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
        lse: bool,
        gap in 0usize..3,
        seed: u64,
    ) {
        let dims = MlaDims::new(8, HeadDims::new(dims.0, dims.1, dims.2));
        let query_lens: Vec<usize> = lens.iter().map(|lens| lens.0).collect();
        let case = PrefillCase {
            key_lens: lens.iter().map(|lens| lens.1).collect(),
            causal,
            gap,
            lse,
            key_layout: key_layout(split),
            seed,
            ..PrefillCase::new(problem(dims, heads), &query_lens)
        };
        check_prefill(DType::F32, &case);
        check_prefill(DType::BF16, &case);
    }

    #[test]
    fn decode_matches_the_reference(
        latent in prop::sample::select(vec![128u32, 256]),
        rope in 0u32..40,
        heads in 1usize..20,
        format in prop::sample::select(KvFormat::ALL),
        page_size in 1u32..20,
        lens in prop::collection::vec((0usize..4, 0usize..90), 0..5),
        sparse in prop::option::of(0usize..30),
        concatenated: bool,
        lse: bool,
        gap in 0usize..3,
        seed: u64,
    ) {
        let mut problem = problem(MlaDims::new(latent, HeadDims::new(16, rope, 16)), heads);
        (problem.kv_format, problem.page_size) = (format, page_size);
        problem.sparse = sparse.is_some();
        let seq_lens: Vec<usize> = lens.iter().map(|lens| lens.1).collect();
        let case = DecodeCase {
            query_lens: lens.iter().map(|lens| lens.0).collect(),
            list_width: sparse.unwrap_or(0),
            query_format: query_format(concatenated),
            gap,
            lse,
            seed,
            ..DecodeCase::new(problem, &seq_lens)
        };
        check_decode(format.dtype().unwrap_or(DType::BF16), &case);
    }
}

// Checks that the rows of a prompt do not depend on later rows, for every end of a block of rows.
#[test]
fn rows_are_independent() {
    let (heads, max) = (2, 40);
    let mut random = Random(5);
    let [query, keys] = [(); 2].map(|()| random.fill::<f32>(max * heads * 192));
    let values = random.fill::<f32>(max * heads * 128);
    fn prompt<T: Element>(cpu: &Cpu, inputs: [&[f32]; 3], heads: usize, len: usize) -> Vec<T> {
        let [query, keys, values] =
            inputs.map(|input| input.iter().map(|x| T::from_f32(*x)).collect::<Vec<T>>());
        let mut out = vec![T::from_f32(0.0); len * heads * 128];
        let config = config(Problem::new(MlaDims::R1, heads as u32, T::DTYPE));
        let backend = CpuPrefill::new(cpu, &config).unwrap();
        let mut state = backend.state(cpu, &limits(1)).unwrap();
        let starts = [0, len as i32];
        let rows = |data, width| TensorRef::from_slice(data, [len, heads, width]).unwrap();
        let call = PrefillCall::new(
            rows(&query[..len * heads * 192], 192),
            Keys::Packed(rows(&keys[..len * heads * 192], 192)),
            rows(&values[..len * heads * 128], 128),
            Output::Plain(TensorMut::from_slice(&mut out, [len, heads, 128]).unwrap()),
            (ArrayRef::from_slice(&starts), len),
            (ArrayRef::from_slice(&starts), len),
        );
        // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
        unsafe { backend.prefill(cpu, call, &mut state, &()) }.unwrap();
        out
    }
    fn check<T: Element>(cpu: &Cpu, inputs: [&[f32]; 3], heads: usize, max: usize) {
        let all = prompt::<T>(cpu, inputs, heads, max);
        for len in 1..max {
            let some = prompt::<T>(cpu, inputs, heads, len);
            let [some, all] = [&some, &all[..some.len()]].map(bytemuck::cast_slice::<T, u8>);
            assert!(some == all, "{} of {len} rows", T::DTYPE);
        }
    }
    let inputs = [&query[..], &keys, &values];
    for cpu in [Cpu::new(), Cpu::new().without_matrix_unit()] {
        check::<f32>(&cpu, inputs, heads, max);
        check::<bf16>(&cpu, inputs, heads, max);
    }
}

// Returns places in a tensor `[tokens, heads, columns]`; none if it has no elements.
fn places(picks: &[[usize; 3]], shape: [usize; 3]) -> Vec<[usize; 3]> {
    if shape.contains(&0) {
        return Vec::new();
    }
    let within = |pick: &[usize; 3]| std::array::from_fn(|axis| pick[axis] % shape[axis]);
    picks.iter().map(within).collect()
}

// At most three picks for `places`.
fn picks() -> impl Strategy<Value = Vec<[usize; 3]>> {
    prop::collection::vec(prop::array::uniform3(any::<usize>()), 0..4)
}

// Checks that a NaN reaches the results of exactly the rows that see it. With these lengths, some
// rows of a block see a key that others do not, in the first tile and in later ones.
proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn prefill_nan_reaches_who_sees_it(
        dims in (1u32..70, 0u32..20, 1u32..70),
        heads in 1usize..4,
        lens in prop::collection::vec((0usize..90, 0usize..300), 1..4),
        causal: bool,
        split: bool,
        (queries, keys, values) in (picks(), picks(), picks()),
        seed: u64,
    ) {
        let dims = MlaDims::new(8, HeadDims::new(dims.0, dims.1, dims.2));
        let query_lens: Vec<usize> = lens.iter().map(|lens| lens.0).collect();
        let key_lens: Vec<usize> = lens.iter().map(|lens| lens.1).collect();
        let [tq, tk] = [&query_lens, &key_lens].map(|lens| lens.iter().sum());
        let (qk, v) = (dims.head.qk() as usize, dims.head.v as usize);
        let case = PrefillCase {
            key_lens,
            causal,
            nan_queries: places(&queries, [tq, heads, qk]),
            nan_keys: places(&keys, [tk, heads, qk]),
            nan_values: places(&values, [tk, heads, v]),
            key_layout: key_layout(split),
            seed,
            ..PrefillCase::new(problem(dims, heads), &query_lens)
        };
        for dtype in DType::ALL {
            check_prefill(*dtype, &case);
        }
    }

    #[test]
    fn decode_nan_reaches_who_sees_it(
        rope in 0u32..40,
        heads in 1usize..40,
        format in prop::sample::select(KvFormat::ALL),
        page_size in 1u32..70,
        lens in prop::collection::vec((0usize..4, 1usize..600), 1..4),
        sparse: bool,
        (queries, rows) in (picks(), picks()),
        seed: u64,
    ) {
        let dims = MlaDims::new(128, HeadDims::new(16, rope, 16));
        let width = dims.row() as usize;
        let mut problem = problem(dims, heads);
        (problem.kv_format, problem.page_size, problem.sparse) = (format, page_size, sparse);
        let query_lens: Vec<usize> = lens.iter().map(|lens| lens.0).collect();
        let seq_lens: Vec<usize> = lens.iter().map(|lens| lens.1).collect();
        let nan_row = |[request, position, column]: &[usize; 3]| {
            let request = request % seq_lens.len();
            [request, position % seq_lens[request], column % width]
        };
        let case = DecodeCase {
            nan_queries: places(&queries, [query_lens.iter().sum(), heads, width]),
            nan_rows: rows.iter().map(nan_row).collect(),
            query_lens,
            list_width: 300,
            seed,
            ..DecodeCase::new(problem, &seq_lens)
        };
        for dtype in DType::ALL {
            if format.dtype().is_none_or(|own| own == *dtype) {
                check_decode(*dtype, &case);
            }
        }
    }
}

// A call of one request with three tokens over a cache of f32. Each test changes it to make a
// mistake or to use a kind of output.
struct Small {
    query: Vec<f32>,
    // The number of query tokens. All of them are the same.
    tokens: usize,
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
            tokens: 1,
            cache: random.fill(2 * 2 * 12),
            table: vec![1, 0],
            seq_lens: vec![3],
            starts: vec![0, 1],
        }
    }

    fn decode<'a>(&'a self, out: Output<'a, Cpu>) -> mla_runtime::Result<()> {
        let cpu = Cpu::new();
        let problem = Problem::new(Self::DIMS, 2, DType::F32).with_page_size(2);
        let backend = CpuDecode::new(&cpu, &config(problem))?;
        let mut state = backend.state(&cpu, &limits(1))?;
        let layout = CacheLayout::contiguous(Self::DIMS, KvFormat::F32, 2, 2);
        let call = DecodeCall::new(
            Query::Concatenated(
                TensorRef::from_slice(&self.query, [1, 2, 12])?.broadcast(0, self.tokens)?,
            ),
            CacheRef::new(bytemuck::cast_slice(&self.cache), layout)?,
            DecodeBatch::new(
                BlockTable::new(ArrayRef::from_slice(&self.table), 1, 2)?,
                (ArrayRef::from_slice(&self.seq_lens), 100),
                (ArrayRef::from_slice(&self.starts), 1),
            ),
            out,
        );
        // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
        unsafe { backend.decode(&cpu, call, &mut state, &()) }
    }

    fn prefill<'a>(&'a self, out: Output<'a, Cpu>) -> mla_runtime::Result<()> {
        let cpu = Cpu::new();
        let problem = Problem::new(Self::DIMS, 2, DType::F32);
        let backend = CpuPrefill::new(&cpu, &config(problem))?;
        let mut state = backend.state(&cpu, &limits(1))?;
        let call = PrefillCall::new(
            TensorRef::from_slice(&self.query, [1, 2, 8])?.broadcast(0, self.tokens)?,
            Keys::Packed(TensorRef::from_slice(&self.cache, [2, 2, 8])?),
            TensorRef::from_slice(&self.cache[20..], [2, 2, 4])?,
            out,
            (ArrayRef::from_slice(&self.starts), 1),
            (ArrayRef::from_slice(&[0, 2]), 2),
        );
        // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
        unsafe { backend.prefill(&cpu, call, &mut state, &()) }
    }
}

#[test]
fn quantised_outputs_encode_plain_ones() {
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
            .map(|x| mla_cpu::fp8::encode(x / 0.01))
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
        // An output without bytes, for a number of tokens that exceeds any memory.
        let many = Small {
            tokens: 1 << 62,
            ..Small::new()
        };
        let out = Output::Fp8 {
            bytes: &mut bytes[..0],
            scale: 1.0,
        };
        let error = attend(&many, out).unwrap_err().to_string();
        let start = "out: given 0 bytes, accepted 18446744073709551615 bytes";
        assert!(error.starts_with(start), "{error}");
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
        "query starts: given 1 at [0], accepted ascending numbers from 0 to at most 1",
    );
    mistake(
        |small| small.seq_lens = vec![1, 1],
        "seq_lens: given 2, accepted 1, one per request of the block table",
    );
}
