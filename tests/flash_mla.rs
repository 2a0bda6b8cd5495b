//! FLASHMLA on a Hopper GPU against the CPU's decode backend, on batches with poison wherever nothing may
//! be read.

#![cfg(feature = "sm90")]

// Each test binary uses its own part of the helpers.
#[allow(dead_code)]
mod common;

use common::{download, gpu, normal, rng, upload};
use half::{bf16, f16};
use mla_kernels::Cuda;
use mla_kernels::flash_mla::FlashMla;
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Output, Query, StepLimits,
};
use mla_runtime::cache::{BlockTable, CacheLayout, CacheRef};
use mla_runtime::cpu::{Cpu, CpuDecode};
use mla_runtime::device::Device;
use mla_runtime::dims::MlaDims;
use mla_runtime::dtype::DType;
use mla_runtime::kv_format::KvFormat;
use mla_runtime::lse::{LseLayout, LseMut};
use mla_runtime::problem::Problem;
use mla_runtime::spec::QueryLen;
use mla_runtime::tensor::{ArrayRef, Layout, TensorMut, TensorRef};
use rand::RngExt as _;
use rand::seq::SliceRandom as _;

const LATENT: usize = 512;
const ROW: usize = 576;

/// What an unused entry of a block table holds: far outside any cache.
const GARBAGE: i32 = 2_147_480_000;

struct Case {
    heads: usize,
    /// Query and cache tokens of each request.
    requests: Vec<(usize, usize)>,
    page_size: usize,
    dtype: DType,
    /// Pages that no request has, in front of the others: they move offsets up.
    spare_pages: usize,
    /// Elements between one query head's row and the next beyond the row itself.
    slack: usize,
}

impl Case {
    fn new(heads: usize, requests: Vec<(usize, usize)>) -> Self {
        Self {
            heads,
            requests,
            page_size: 64,
            dtype: DType::BF16,
            spare_pages: 3,
            slack: 0,
        }
    }

    fn tokens(&self) -> usize {
        self.requests.iter().map(|(query, _)| query).sum()
    }

    fn pages_of(&self, len: usize) -> usize {
        len.div_ceil(self.page_size)
    }

    fn config(&self) -> LayerConfig {
        let mut problem = Problem::new(MlaDims::R1, self.heads as u32, self.dtype);
        problem.page_size = self.page_size as u32;
        problem.query_len = QueryLen::Ragged;
        LayerConfig {
            problem,
            softmax_scale: 1.0 / 192f32.sqrt(),
        }
    }

    fn limits(&self) -> StepLimits {
        StepLimits {
            requests: self.requests.len(),
            tokens: self.tokens(),
            decode_query_len: self
                .requests
                .iter()
                .map(|(query, _)| *query)
                .max()
                .unwrap_or(1),
            pages_per_request: self.max_pages(),
            context_rows: 0,
        }
    }

    fn max_pages(&self) -> usize {
        // One more than needed, so that there is garbage behind every request.
        self.requests
            .iter()
            .map(|(_, len)| self.pages_of(*len))
            .max()
            .unwrap_or(0)
            + 1
    }
}

/// A case's numbers, in host memory.
#[derive(Clone)]
struct Numbers {
    queries: Vec<u8>,
    cache: Vec<u8>,
    pages: usize,
    block_table: Vec<i32>,
    lens: Vec<i32>,
    starts: Vec<i32>,
}

fn bytes_of(dtype: DType, value: f32) -> [u8; 2] {
    match dtype {
        DType::F16 => f16::from_f32(value).to_le_bytes(),
        _ => bf16::from_f32(value).to_le_bytes(),
    }
}

impl Numbers {
    fn random(case: &Case, seed: u64) -> Self {
        let mut rng = rng(seed);
        let value = |rng: &mut _| (normal(rng) * 0.1).clamp(-1.0, 1.0);
        let row = ROW + case.slack;
        // All ones is NaN in either dtype.
        let mut queries = vec![0xff; case.tokens() * case.heads * row * 2];
        for head in queries.chunks_exact_mut(row * 2) {
            for element in head[..ROW * 2].chunks_exact_mut(2) {
                element.copy_from_slice(&bytes_of(case.dtype, value(&mut rng)));
            }
        }
        let used: usize = case
            .requests
            .iter()
            .map(|(_, len)| case.pages_of(*len))
            .sum();
        let pages = used + case.spare_pages;
        let mut order: Vec<usize> = (case.spare_pages..pages).collect();
        order.shuffle(&mut rng);
        let mut cache = vec![0xff; pages * case.page_size * ROW * 2];
        let max_pages = case.max_pages();
        let mut block_table = vec![GARBAGE; case.requests.len() * max_pages];
        let mut next = order.into_iter();
        // Rows repeat from a pool: what matters is that they differ, not that there are billions.
        let pool: Vec<[u8; 2]> = (0..1 << 16)
            .map(|_| bytes_of(case.dtype, value(&mut rng)))
            .collect();
        for (request, (_, len)) in case.requests.iter().enumerate() {
            for page in 0..case.pages_of(*len) {
                let place = next.next().expect("a page for every page");
                block_table[request * max_pages + page] = place as i32;
                let rows = case.page_size.min(len - page * case.page_size);
                let start = place * case.page_size * ROW * 2;
                let first = rng.random_range(0..pool.len());
                let elements = cache[start..start + rows * ROW * 2].chunks_exact_mut(2);
                for (element, value) in elements.zip(pool.iter().cycle().skip(first)) {
                    element.copy_from_slice(value);
                }
            }
        }
        let mut starts = vec![0];
        for (query, _) in &case.requests {
            starts.push(starts[starts.len() - 1] + *query as i32);
        }
        let lens = case.requests.iter().map(|(_, len)| *len as i32).collect();
        Self {
            queries,
            cache,
            pages,
            block_table,
            lens,
            starts,
        }
    }
}

/// A case's numbers in a device's memory, and room for the results.
struct Step<D: Device> {
    queries: D::Buffer,
    cache: D::Buffer,
    block_table: D::Buffer,
    lens: D::Buffer,
    starts: D::Buffer,
    out: D::Buffer,
    lse: D::Buffer,
    pages: usize,
}

impl<D: Device> Step<D> {
    fn new(device: &D, case: &Case, numbers: &Numbers) -> Result<Self> {
        let rows = case.tokens() * case.heads;
        let poison = |bytes| upload(device, &vec![0xff; bytes]);
        Ok(Self {
            queries: upload(device, &numbers.queries)?,
            cache: upload(device, &numbers.cache)?,
            block_table: upload(device, bytemuck::cast_slice(&numbers.block_table))?,
            lens: upload(device, bytemuck::cast_slice(&numbers.lens))?,
            starts: upload(device, bytemuck::cast_slice(&numbers.starts))?,
            out: poison(rows * LATENT * 2)?,
            lse: poison(rows * 4)?,
            pages: numbers.pages,
        })
    }

    fn enqueue<B: DecodeBackend<Device = D>>(
        &mut self,
        device: &D,
        case: &Case,
        backend: &B,
        state: &mut B::State,
        metadata: &mut B::Metadata,
    ) -> Result<()> {
        let (tokens, requests) = (case.tokens(), case.requests.len());
        let row = ROW + case.slack;
        let queries = TensorRef::new(
            D::bytes(&self.queries),
            Layout {
                dtype: case.dtype,
                shape: [tokens, case.heads, ROW],
                strides: [case.heads * row, row, 1],
            },
        )?;
        let layout = CacheLayout::contiguous(
            MlaDims::R1,
            KvFormat::of(case.dtype),
            self.pages,
            case.page_size,
        );
        let table = ArrayRef::new(D::bytes(&self.block_table), requests * case.max_pages())?;
        let batch = DecodeBatch {
            block_table: BlockTable::new(table, requests, case.max_pages())?,
            seq_lens: ArrayRef::new(D::bytes(&self.lens), requests)?,
            query_starts: ArrayRef::new(D::bytes(&self.starts), requests + 1)?,
            max_query_len: case.limits().decode_query_len,
            max_seq_len: case.requests.iter().map(|(_, len)| *len).max().unwrap_or(0),
        };
        backend.prepare(device, &batch, state, metadata)?;
        let call = DecodeCall {
            query: Query::Split {
                latent: queries.narrow(2, 0..LATENT)?,
                rope: queries.narrow(2, LATENT..ROW)?,
            },
            cache: CacheRef::new(D::bytes(&self.cache), layout)?,
            batch,
            out: Output::Plain(TensorMut::new(
                D::bytes_mut(&mut self.out),
                Layout::contiguous(case.dtype, [tokens, case.heads, LATENT]),
            )?),
            lse: Some(LseMut::new(
                D::bytes_mut(&mut self.lse),
                LseLayout::heads_first(case.heads, tokens),
            )?),
            slots: None,
        };
        backend.decode(device, call, state, metadata)
    }

    fn results(&self, device: &D) -> Result<(Vec<u8>, Vec<u8>)> {
        Ok((download(device, &self.out)?, download(device, &self.lse)?))
    }
}

fn run<B: DecodeBackend>(device: &B::Device, case: &Case, numbers: &Numbers) -> (Vec<u8>, Vec<u8>) {
    let backend = B::new(device, &case.config()).unwrap();
    let mut state = backend.state(device, &case.limits()).unwrap();
    let mut metadata = backend.metadata(device, &case.limits()).unwrap();
    let mut step = Step::new(device, case, numbers).unwrap();
    step.enqueue(device, case, &backend, &mut state, &mut metadata)
        .unwrap();
    step.results(device).unwrap()
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let pairs = bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match dtype {
        DType::F16 => pairs
            .map(|pair| f16::from_le_bytes(pair).to_f32())
            .collect(),
        _ => pairs
            .map(|pair| bf16::from_le_bytes(pair).to_f32())
            .collect(),
    }
}

/// The conventions of the field's own tests: an output passes within 8e-4 or 2.01/128 of the expected
/// value and a cosine difference below 5e-6, a log-sum-exp within 1e-6 or 8.01/65536.
fn assert_close(name: &str, dtype: DType, got: &(Vec<u8>, Vec<u8>), want: &(Vec<u8>, Vec<u8>)) {
    let (out, expected) = (floats(dtype, &got.0), floats(dtype, &want.0));
    let (mut product, mut squares) = (0f64, 0f64);
    for (i, (a, b)) in out.iter().zip(&expected).enumerate() {
        let error = (a - b).abs();
        assert!(
            error <= 8e-4 || error <= b.abs() * 2.01 / 128.0,
            "{name}: out[{i}] is {a}, expected {b}"
        );
        product += f64::from(*a) * f64::from(*b);
        squares += f64::from(*a).powi(2) + f64::from(*b).powi(2);
    }
    let difference = if squares == 0.0 {
        0.0
    } else {
        1.0 - 2.0 * product / squares
    };
    // Both sides are rounded to the dtype here, so twice the tolerance against an exact reference.
    assert!(
        difference < 1e-5,
        "{name}: cosine difference {difference:e}"
    );
    let lse: &[f32] = bytemuck::cast_slice(&got.1);
    let expected: &[f32] = bytemuck::cast_slice(&want.1);
    for (i, (a, b)) in lse.iter().zip(expected).enumerate() {
        let close = a == b || (a - b).abs() <= 1e-6f32.max(b.abs() * 8.01 / 65536.0);
        assert!(close, "{name}: lse[{i}] is {a}, expected {b}");
    }
}

fn check(name: &str, case: &Case, seed: u64) {
    let numbers = Numbers::random(case, seed);
    let want = run::<CpuDecode>(&Cpu::new(), case, &numbers);
    let got = run::<FlashMla>(&gpu(), case, &numbers);
    assert_close(name, case.dtype, &got, &want);
    let again = run::<FlashMla>(&gpu(), case, &numbers);
    assert!(got == again, "{name}: a second run differs");
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test --features sm90 -- --include-ignored"]
fn every_number_of_heads_and_query_tokens_agrees_with_the_cpu() {
    let lens = [0, 1, 63, 64, 65, 127, 128, 129, 191, 1000, 4641];
    for heads in [1, 3, 8, 9, 16, 20, 40, 63, 64, 96, 126, 128] {
        for query in [1, 2, 3, 4, 8] {
            let requests = lens.iter().map(|len| (query, *len)).collect();
            let case = Case::new(heads, requests);
            check(
                &format!("{heads} heads, {query} query tokens"),
                &case,
                (heads * 10 + query) as u64,
            );
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test --features sm90 -- --include-ignored"]
fn random_ragged_batches_agree_with_the_cpu() {
    let mut rng = rng(7);
    for round in 0..40 {
        let requests = (0..rng.random_range(1..=40))
            .map(|_| {
                let query = rng.random_range(0..=8);
                let len = rng.random_range(0..=if round % 4 == 0 { 6000 } else { 700 });
                (query, len)
            })
            .collect();
        let mut case = Case::new(rng.random_range(1..=128), requests);
        case.page_size = common::pick(&mut rng, &[16, 32, 48, 64, 128, 256]);
        case.dtype = common::pick(&mut rng, &[DType::F16, DType::BF16]);
        case.slack = 8 * rng.random_range(0..4);
        check(&format!("round {round}"), &case, round);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test --features sm90 -- --include-ignored"]
fn large_batches_and_long_contexts_agree_with_the_cpu() {
    let mut rng = rng(8);
    let many = (0..1024).map(|_| (1, rng.random_range(0..300))).collect();
    check("1024 requests", &Case::new(16, many), 1);
    check(
        "131072 tokens",
        &Case::new(16, vec![(1, 131_072), (2, 5)]),
        2,
    );
    check(
        "131072 tokens, 128 heads",
        &Case::new(128, vec![(1, 131_072)]),
        3,
    );
    check(
        "four requests of very different length",
        &Case::new(16, vec![(4, 4641), (4, 45_118), (4, 1730), (4, 1696)]),
        4,
    );
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test --features sm90 -- --include-ignored"]
fn offsets_beyond_two_to_the_31_elements_agree_with_the_cpu() {
    let mut case = Case::new(16, vec![(1, 700), (2, 333)]);
    case.spare_pages = (1usize << 31) / (64 * ROW) + 1;
    check("a cache of more than 4 GiB", &case, 5);
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test --features sm90 -- --include-ignored"]
fn a_captured_step_replays_with_other_lengths_and_pages() {
    let gpu = gpu();
    let case = Case::new(16, vec![(1, 3000), (1, 40), (1, 0), (1, 700)]);
    let numbers = Numbers::random(&case, 11);
    // Other lengths, within the pages of the first request: its rows are the only ones that are all there.
    let pages = case.max_pages();
    let mut shorter = numbers.block_table.clone();
    for (request, row) in shorter.chunks_exact_mut(pages).enumerate() {
        row.copy_from_slice(&numbers.block_table[..pages]);
        row[..case.pages_of(2900)].rotate_left(request);
    }
    let steps = [
        (numbers.lens.clone(), numbers.block_table.clone()),
        (vec![1, 2800, 129, 0], shorter),
        (numbers.lens.clone(), numbers.block_table.clone()),
    ];
    let backend = FlashMla::new(&gpu, &case.config()).unwrap();
    let mut state = backend.state(&gpu, &case.limits()).unwrap();
    let mut step = Step::<Cuda>::new(&gpu, &case, &numbers).unwrap();
    let graph = gpu
        .capture(|gpu| step.enqueue(gpu, &case, &backend, &mut state, &mut ()))
        .unwrap();
    for (lens, block_table) in steps {
        gpu.upload(bytemuck::cast_slice(&lens), Cuda::bytes_mut(&mut step.lens))
            .unwrap();
        let table = bytemuck::cast_slice(&block_table);
        gpu.upload(table, Cuda::bytes_mut(&mut step.block_table))
            .unwrap();
        // SAFETY: `step` and `state` hold everything that the capture was given, and only this stream
        // uses it.
        unsafe { graph.replay() }.unwrap();
        let got = step.results(&gpu).unwrap();
        let eager = Numbers {
            lens,
            block_table,
            ..numbers.clone()
        };
        let mut fresh = Step::<Cuda>::new(&gpu, &case, &eager).unwrap();
        fresh
            .enqueue(&gpu, &case, &backend, &mut state, &mut ())
            .unwrap();
        assert!(
            got == fresh.results(&gpu).unwrap(),
            "a replay differs from the step run at once"
        );
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test --features sm90 -- --include-ignored"]
fn what_does_not_fit_is_refused_by_name() {
    let gpu = gpu();
    let case = Case::new(16, vec![(1, 100)]);
    let backend = FlashMla::new(&gpu, &case.config()).unwrap();
    let mut limits = case.limits();
    limits.decode_query_len = 9;
    let refused = backend
        .state(&gpu, &limits)
        .err()
        .expect("9 query tokens are too many");
    assert_eq!(refused.to_string(), "query_len: given 9, accepted 1..=8");
    let mut state = backend.state(&gpu, &case.limits()).unwrap();
    let longer = Case::new(16, vec![(2, 100)]);
    let numbers = Numbers::random(&longer, 1);
    let mut step = Step::<Cuda>::new(&gpu, &longer, &numbers).unwrap();
    let refused = step
        .enqueue(&gpu, &longer, &backend, &mut state, &mut ())
        .unwrap_err();
    assert!(
        refused.to_string().starts_with("max_query_len: given 2"),
        "{refused}"
    );
}
