//! Compares the CPU backends with the f64 reference, and tests their refusals.

mod common;

use half::bf16;
use mla_conformance::{Bits, DecodeCase, Failure, PrefillCase};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, Keys, LayerConfig, Output, PrefillBackend,
    PrefillBatch, PrefillCall, Query, StepLimits,
};
use mla_runtime::model::{DType, Element, HeadDims, KvFormat, MlaDims};
use mla_runtime::select::Registry;
use mla_runtime::spec::{KeyLayout, Problem, QueryFormat};
use mla_runtime::tensor::{ArrayRef, BlockTable, CacheLayout, CacheRef, TensorMut, TensorRef};
use proptest::prelude::*;

use common::Random;

// Makes a device with this number of threads on any machine.
fn cpu_of(threads: usize) -> Cpu {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    Cpu::with_pool(pool.unwrap().into())
}

fn config(problem: Problem) -> LayerConfig {
    LayerConfig::new(problem, 1.0 / (problem.dims.head.qk() as f32).sqrt())
}

const LIMITS: StepLimits = StepLimits::new(64, 4096, 1024)
    .with_decode_query_len(1)
    .with_context_rows(4096);

// Runs a case in each way that the processor supports. Each must agree with the reference, and must
// not depend on the number of threads.
fn each_way(check: impl Fn(&Cpu) -> std::result::Result<Bits, Failure>) {
    let ways: [fn(Cpu) -> Cpu; 3] = [|cpu| cpu, Cpu::without_matrix_unit, Cpu::portable];
    for way in ways {
        let [one, three] = [1, 3].map(|threads| match check(&way(cpu_of(threads))) {
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

fn problem(dims: MlaDims, heads: usize) -> Problem {
    Problem::new(dims, heads as u32, DType::BF16)
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

#[test]
fn prefill_crosses_units_of_rows() {
    let dims = MlaDims::new(64, HeadDims::new(32, 32, 64));
    let case = PrefillCase {
        key_lens: vec![700],
        seed: 2,
        ..PrefillCase::new(problem(dims, 2), &[600])
    };
    for dtype in [DType::F32, DType::BF16] {
        check_prefill(dtype, &case);
    }
}

// The conformance suite tests the inputs that a backend prefers. These tests cover all that it
// supports. A NaN must reach the results of exactly the rows that see it. With these lengths, some
// rows of a block see a key that others do not, in the first tile and in later ones.
proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn prefill_matches_the_reference(
        dims in (1u32..70, 0u32..20, 1u32..70),
        heads in 1usize..4,
        lens in prop::collection::vec((0usize..90, 0usize..300), 0..4),
        (causal, split, lse) in any::<(bool, bool, bool)>(),
        gap in 0usize..3,
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
            gap,
            lse,
            nan_queries: places(&queries, [tq, heads, qk]),
            nan_keys: places(&keys, [tk, heads, qk]),
            nan_values: places(&values, [tk, heads, v]),
            key_layout: Some(if split { KeyLayout::Split } else { KeyLayout::Packed }),
            seed,
            ..PrefillCase::new(problem(dims, heads), &query_lens)
        };
        for dtype in DType::ALL {
            check_prefill(*dtype, &case);
        }
    }

    #[test]
    fn decode_matches_the_reference(
        latent in prop::sample::select(vec![128u32, 256]),
        rope in 0u32..40,
        heads in 1usize..40,
        format in prop::sample::select(KvFormat::ALL),
        page_size in 1u32..70,
        lens in prop::collection::vec((0usize..4, 0usize..600), 0..5),
        sparse in prop::option::of(0usize..300),
        (concatenated, lse) in any::<(bool, bool)>(),
        gap in 0usize..3,
        (queries, rows) in (picks(), picks()),
        seed: u64,
    ) {
        let dims = MlaDims::new(latent, HeadDims::new(16, rope, 16));
        let width = dims.row() as usize;
        let mut problem = problem(dims, heads);
        (problem.kv_format, problem.page_size) = (format, page_size);
        problem.sparse = sparse.is_some();
        let query_lens: Vec<usize> = lens.iter().map(|lens| lens.0).collect();
        let seq_lens: Vec<usize> = lens.iter().map(|lens| lens.1).collect();
        let nan_row = |[request, position, column]: &[usize; 3]| {
            let request = request % seq_lens.len().max(1);
            let len = seq_lens.get(request).filter(|len| **len > 0)?;
            Some([request, position % len, column % width])
        };
        let case = DecodeCase {
            nan_queries: places(&queries, [query_lens.iter().sum(), heads, width]),
            nan_rows: rows.iter().filter_map(nan_row).collect(),
            query_lens,
            list_width: sparse.unwrap_or(0),
            query_format: Some(match concatenated {
                true => QueryFormat::Concatenated,
                false => QueryFormat::Split,
            }),
            gap,
            lse,
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

// Returns places in a tensor `[tokens, heads, columns]`; none if it has no elements.
fn places(picks: &[[usize; 3]], shape: [usize; 3]) -> Vec<[usize; 3]> {
    if shape.contains(&0) {
        return Vec::new();
    }
    let within = |pick: &[usize; 3]| std::array::from_fn(|axis| pick[axis] % shape[axis]);
    picks.iter().map(within).collect()
}

// At most three picks for `places`, and none in most cases.
fn picks() -> impl Strategy<Value = Vec<[usize; 3]>> {
    let some = prop::collection::vec(prop::array::uniform3(any::<usize>()), 1..4);
    prop_oneof![2 => Just(Vec::new()), 1 => some]
}

// Views the first elements.
fn rows<T: Element>(data: &[T], shape: [usize; 3]) -> TensorRef<'_, Cpu> {
    let count: usize = shape.into_iter().product();
    TensorRef::from_slice(&data[..count], shape).unwrap()
}

// Checks that the rows of a prompt do not depend on later rows, for every end of a block of rows.
fn check_prompts<T: Element>(cpu: &Cpu) {
    let (heads, max) = (2, 40);
    let mut random = Random(5);
    let [query, keys, values] = [192, 192, 128].map(|width| random.fill::<T>(max * heads * width));
    let config = config(Problem::new(MlaDims::R1, heads as u32, T::DTYPE));
    let backend = CpuPrefill::new(cpu, &config).unwrap();
    let mut state = backend.state(cpu, &LIMITS).unwrap();
    let mut prompt = |len: usize| {
        let mut out = vec![T::from_f32(0.0); len * heads * 128];
        let starts = [0, len as i32];
        let call = PrefillCall::new(
            rows(&query, [len, heads, 192]),
            Keys::Packed(rows(&keys, [len, heads, 192])),
            rows(&values, [len, heads, 128]),
            Output::Plain(TensorMut::from_slice(&mut out, [len, heads, 128]).unwrap()),
            (ArrayRef::from_slice(&starts), len),
            (ArrayRef::from_slice(&starts), len),
        );
        // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
        unsafe { backend.prefill(cpu, call, &mut state, &()) }.unwrap();
        bytemuck::cast_slice::<T, u8>(&out).to_vec()
    };
    let all = prompt(max);
    for len in 1..max {
        let some = prompt(len);
        assert!(some == all[..some.len()], "{} of {len} rows", T::DTYPE);
    }
}

#[test]
fn rows_are_independent() {
    for cpu in [Cpu::new(), Cpu::new().without_matrix_unit()] {
        check_prompts::<f32>(&cpu);
        check_prompts::<bf16>(&cpu);
    }
}

// A call of one request over a cache of f32. Each test changes it to make a mistake, to use a kind
// of output, or to give it the state of another problem.
struct Small {
    heads: usize,
    page_size: usize,
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

    fn new(heads: usize, page_size: usize, len: usize) -> Self {
        let (mut random, pages) = (Random(9), len.div_ceil(page_size));
        Self {
            heads,
            page_size,
            query: random.fill(heads * 12),
            tokens: 1,
            cache: random.fill(pages * page_size * 12),
            table: (0..pages as i32).rev().collect(),
            seq_lens: vec![len as i32],
            starts: vec![0, 1],
        }
    }

    fn config(&self) -> LayerConfig {
        let problem = Problem::new(Self::DIMS, self.heads as u32, DType::F32);
        config(problem.with_page_size(self.page_size as u32))
    }

    fn decode<'a>(&'a self, out: Output<'a, Cpu>) -> Result<DecodeCall<'a, Cpu>> {
        let pages = self.table.len();
        let layout = CacheLayout::contiguous(Self::DIMS, KvFormat::F32, pages, self.page_size);
        let query = TensorRef::from_slice(&self.query, [1, self.heads, 12])?;
        Ok(DecodeCall::new(
            Query::Concatenated(query.broadcast(0, self.tokens)?),
            CacheRef::new(bytemuck::cast_slice(&self.cache), layout)?,
            DecodeBatch::new(
                BlockTable::new(ArrayRef::from_slice(&self.table), 1, pages)?,
                (ArrayRef::from_slice(&self.seq_lens), self.cache.len()),
                (ArrayRef::from_slice(&self.starts), 1),
            ),
            out,
        ))
    }

    fn prefill<'a>(&'a self, out: Output<'a, Cpu>) -> Result<PrefillCall<'a, Cpu>> {
        let heads = self.heads;
        let query = TensorRef::from_slice(&self.query[..heads * 8], [1, heads, 8])?;
        Ok(PrefillCall::new(
            query.broadcast(0, self.tokens)?,
            Keys::Packed(TensorRef::from_slice(
                &self.cache[..heads * 16],
                [2, heads, 8],
            )?),
            TensorRef::from_slice(&self.cache[8..][..heads * 8], [2, heads, 4])?,
            out,
            (ArrayRef::from_slice(&self.starts), 1),
            (ArrayRef::from_slice(&[0, 2]), 2),
        ))
    }

    fn decoded<'a>(&'a self, out: Output<'a, Cpu>) -> Result<()> {
        let backend = CpuDecode::new(&Cpu::new(), &self.config())?;
        let mut state = backend.state(&Cpu::new(), &LIMITS)?;
        // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
        unsafe { backend.decode(&Cpu::new(), self.decode(out)?, &mut state, &()) }
    }

    fn prefilled<'a>(&'a self, out: Output<'a, Cpu>) -> Result<()> {
        let backend = CpuPrefill::new(&Cpu::new(), &self.config())?;
        let mut state = backend.state(&Cpu::new(), &LIMITS)?;
        // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
        unsafe { backend.prefill(&Cpu::new(), self.prefill(out)?, &mut state, &()) }
    }
}

#[test]
fn quantised_outputs_encode_plain_ones() {
    let small = || Small::new(2, 2, 3);
    type Attend = for<'a> fn(&'a Small, Output<'a, Cpu>) -> Result<()>;
    for (attend, width) in [(Small::decoded as Attend, 8), (Small::prefilled, 4)] {
        let mut plain = vec![0.0f32; 2 * width];
        let out = TensorMut::from_slice(&mut plain, [1, 2, width]).unwrap();
        attend(&small(), Output::Plain(out)).unwrap();
        let mut bytes = vec![0x7fu8; 2 * width];
        let quantised = |small: &Small, bytes: &mut [u8], scale| {
            attend(small, Output::Fp8 { bytes, scale }).map_err(|error| error.to_string())
        };
        quantised(&small(), &mut bytes, 0.01).unwrap();
        let codes = plain.iter().map(|x| mla_cpu::fp8::encode(x / 0.01));
        assert!(codes.eq(bytes.iter().copied()));
        assert!(bytes.iter().any(|code| code & 0x7f != 0));

        let refused = quantised(&small(), &mut bytes[1..], 1.0).unwrap_err();
        assert!(refused.starts_with("out: given"), "{refused}");
        assert_eq!(
            quantised(&small(), &mut bytes, 0.0).unwrap_err(),
            "out scale: given 0, accepted a finite number above 0"
        );
        // An output without bytes, for a number of tokens that exceeds any memory.
        let mut many = small();
        many.tokens = 1 << 62;
        let refused = quantised(&many, &mut [], 1.0).unwrap_err();
        let start = "out: given 0 bytes, accepted 18446744073709551615 bytes";
        assert!(refused.starts_with(start), "{refused}");
    }
}

#[test]
fn bad_batches_are_named() {
    type Change = fn(&mut Small);
    let mistakes: [(Change, &str); 5] = [
        (
            |small| small.table[1] = 2,
            "block table entry: given 2 at [0, 1], accepted 0 and up below 2",
        ),
        (
            |small| small.seq_lens[0] = 5,
            "sequence length: given 5 of request 0, accepted at most 4 (2 pages of 2)",
        ),
        (
            |small| small.seq_lens[0] = -1,
            "sequence length: given -1 of request 0, accepted 0 to 48, as the batch says",
        ),
        (
            |small| small.starts = vec![1, 0],
            "query starts: given 1 at [0], accepted ascending numbers from 0 to at most 1",
        ),
        (
            |small| small.seq_lens = vec![1, 1],
            "seq_lens: given 2, accepted 1, one per request of the block table",
        ),
    ];
    for (change, message) in mistakes {
        let mut small = Small::new(2, 2, 3);
        change(&mut small);
        let mut out = vec![5.0f32; 16];
        let to = TensorMut::from_slice(&mut out, [1, 2, 8]).unwrap();
        let refused = small.decoded(Output::Plain(to)).unwrap_err();
        assert_eq!(refused.to_string(), message);
        assert!(out.iter().all(|x| *x == 5.0));
    }
}

const MANY: usize = 64;

// Calls of one head and of many. The few units of many heads at this length are divided among
// threads.
fn few_and_many() -> [Small; 2] {
    [1, MANY].map(|heads| Small::new(heads, 64, 4096))
}

// Runs a call. Returns its outputs, of which there must be none if it is refused.
fn attended(
    call: &Small,
    width: usize,
    run: impl for<'a> FnOnce(&'a Small, Output<'a, Cpu>) -> Result<()>,
) -> Result<Vec<f32>> {
    let mut out = vec![f32::NAN; MANY * width];
    let to = TensorMut::from_slice(&mut out, [1, MANY, width])?;
    let result = run(call, Output::Plain(to));
    let is_written = |value: &f32| !value.is_nan();
    assert!(out.iter().all(|value| is_written(value) == result.is_ok()));
    result.map(|()| out)
}

fn refused(field: &str, result: Result<Vec<f32>>) {
    let accepted = "given one for heads = 1, accepted one for heads = 64, as the layer has it";
    assert_eq!(
        result.unwrap_err().to_string(),
        format!("{field}: {accepted}")
    );
}

// A state belongs to one problem. A backend of another problem must refuse it before it writes
// anything. Otherwise the state could be too small, and threads would write to each other's rows.
#[test]
fn states_of_other_problems_are_refused() {
    let [cpu, alone] = [4, 1].map(cpu_of);
    let [few, many] = few_and_many();
    let [of_few, of_many] = [&few, &many].map(|of| CpuDecode::new(&cpu, &of.config()).unwrap());
    let run = |backend: &CpuDecode, device: &Cpu| {
        let mut state = backend.state(device, &LIMITS).unwrap();
        // SAFETY: the CPU's backend checks the arrays of a call, and the problem of a state.
        attended(&many, 8, |many, out| unsafe {
            of_many.decode(&cpu, many.decode(out)?, &mut state, &())
        })
    };
    let expected = run(&of_many, &cpu).unwrap();
    refused("state", run(&of_few, &cpu));
    // A state also works for another instance of the same problem, and for a device with another
    // number of threads.
    let same = CpuDecode::new(&cpu, &many.config()).unwrap();
    assert_eq!(run(&same, &cpu).unwrap(), expected);
    assert_eq!(run(&of_many, &alone).unwrap(), expected);

    let [of_few, of_many] = [&few, &many].map(|of| CpuPrefill::new(&cpu, &of.config()).unwrap());
    let run = |backend: &CpuPrefill| {
        let mut state = backend.state(&cpu, &LIMITS).unwrap();
        // SAFETY: the CPU's backend checks the arrays of a call, and the problem of a state.
        attended(&many, 4, |many, out| unsafe {
            of_many.prefill(&cpu, many.prefill(out)?, &mut state, &())
        })
    };
    run(&of_many).unwrap();
    refused("state", run(&of_few));
}

// The same holds for backends that are selected at run time, and for their metadata.
#[test]
fn selected_refuse_foreign_state() {
    use mla_runtime::backend::{DecodeStage as _, PrefillStage as _};

    let (cpu, registry) = (cpu_of(4), Registry::linked().unwrap());
    let ([few, many], field) = (few_and_many(), "state or metadata");
    let decode = [&few, &many].map(|of| {
        let config = of.config();
        registry.instantiate_decode("CPU", &cpu, &config).unwrap()
    });
    let run = |state: usize, metadata: usize| {
        let mut state = decode[state].state(&cpu, &LIMITS).unwrap();
        let metadata = decode[metadata].metadata(&cpu, &LIMITS).unwrap();
        // SAFETY: the arrays are those of one request; the backend compares state and metadata.
        attended(&many, 8, |many, out| unsafe {
            decode[1].decode(&cpu, many.decode(out)?, &mut state, &metadata)
        })
    };
    run(1, 1).unwrap();
    refused(field, run(0, 1));
    refused(field, run(1, 0));

    let prefill = [&few, &many].map(|of| {
        let config = of.config();
        registry.instantiate_prefill("CPU", &cpu, &config).unwrap()
    });
    // `prepare` can be called by safe code, so it compares both, too.
    for (state, metadata) in [(1, 1), (0, 1), (1, 0)] {
        let is_own = [state, metadata] == [1, 1];
        let mut state = prefill[state].state(&cpu, &LIMITS).unwrap();
        let mut metadata = prefill[metadata].metadata(&cpu, &LIMITS).unwrap();
        let batch = PrefillBatch::new(&[1], &[1]);
        let prepared = prefill[1].prepare(&cpu, &batch, &mut state, &mut metadata);
        // SAFETY: the arrays are those of one request; the backend compares state and metadata.
        let result = attended(&many, 4, |many, out| unsafe {
            prefill[1].prefill(&cpu, many.prefill(out)?, &mut state, &metadata)
        });
        if is_own {
            prepared.unwrap();
            result.unwrap();
        } else {
            refused(field, prepared.map(|()| Vec::new()));
            refused(field, result);
        }
    }
}
