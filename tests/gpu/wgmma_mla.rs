//! WGMMA_MLA on a Hopper GPU against the CPU's decode backend, on batches with poison in all memory
//! that must not be read.

use mla_cpu::{Cpu, CpuDecode};
use mla_kernels::Cuda;
use mla_kernels::backends::sm90::WgmmaMla;
use mla_kernels::device::Buffer;
use mla_kernels::raw;
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Output, Query, StepLimits,
};
use mla_runtime::device::Device;
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheRef, Layout, LseLayout, LseMut, Memory, TensorMut,
    TensorRef,
};
use rand::RngExt as _;
use rand::seq::SliceRandom as _;

use crate::common::{download, get, gpu, put, rng, upload};
use crate::refusals::{WrongField, each_is_refused};
use crate::tensors::{normal, pick};

const LATENT: usize = 512;
const ROW: usize = 576;

/// 1 / sqrt(192).
const SCALE: f32 = 0.072_168_78;

/// Unused entry of a block table: far outside any cache.
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
    /// The cache's format: of `dtype`, or e4m3 with a scale.
    kv: KvFormat,
    scale: f32,
    /// Bytes between one cache row and the next beyond the row itself: a multiple of 16.
    cache_slack: usize,
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
            kv: KvFormat::BF16,
            scale: 1.0,
            cache_slack: 0,
        }
    }

    fn dtype(self, dtype: DType) -> Self {
        Self {
            dtype,
            kv: KvFormat::of(dtype),
            ..self
        }
    }

    fn fp8(self, scale: f32) -> Self {
        Self {
            kv: KvFormat::Fp8,
            scale,
            ..self
        }
    }

    fn cache_layout(&self, pages: usize) -> CacheLayout {
        let mut layout = CacheLayout::contiguous(MlaDims::R1, self.kv, pages, self.page_size);
        layout.row_stride += self.cache_slack;
        layout.page_stride = layout.row_stride * self.page_size + self.cache_slack;
        layout.scale = self.scale;
        layout
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
        problem.kv_format = self.kv;
        LayerConfig::new(problem, SCALE)
    }

    fn limits(&self) -> StepLimits {
        StepLimits::new(self.requests.len(), self.tokens(), self.max_pages()).with_decode_query_len(
            self.requests
                .iter()
                .map(|(query, _)| *query)
                .max()
                .unwrap_or(1),
        )
    }

    fn max_pages(&self) -> usize {
        // The table has a page more than needed, so that there is garbage behind every request.
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

impl Numbers {
    fn random(case: &Case, seed: u64) -> Self {
        let mut rng = rng(seed);
        let value = |rng: &mut _| (normal(rng) * 0.1).clamp(-1.0, 1.0);
        let row = ROW + case.slack;
        // All ones is NaN in either dtype.
        let mut queries = vec![0xff; case.tokens() * case.heads * row * 2];
        for head in queries.chunks_exact_mut(row * 2) {
            for element in 0..ROW {
                put(case.dtype, head, element, value(&mut rng));
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
        let layout = case.cache_layout(pages);
        let row_bytes = case.kv.row_bytes(MlaDims::R1);
        // All ones is NaN in e4m3 too.
        let mut cache = vec![0xff; pages * layout.page_stride];
        let max_pages = case.max_pages();
        let mut block_table = vec![GARBAGE; case.requests.len() * max_pages];
        let mut next = order.into_iter();
        // Rows repeat from a pool: what matters is that they differ, not that there are billions.
        let pool: Vec<u8> = match case.kv {
            // Every finite byte of either sign, subnormal ones included, but few of the largest.
            KvFormat::Fp8 => (0..1 << 17)
                .map(|_| rng.random_range(0..0x48) | (rng.random_range(0..2) << 7))
                .collect(),
            _ => {
                let mut pool = vec![0; 2 << 16];
                (0..1 << 16).for_each(|at| put(case.dtype, &mut pool, at, value(&mut rng)));
                pool
            }
        };
        for (request, (_, len)) in case.requests.iter().enumerate() {
            for page in 0..case.pages_of(*len) {
                let place = next.next().expect("a page for every page");
                block_table[request * max_pages + page] = place as i32;
                for row in 0..case.page_size.min(len - page * case.page_size) {
                    let start = place * layout.page_stride + row * layout.row_stride;
                    let first = 2 * rng.random_range(0..(pool.len() - row_bytes) / 2);
                    cache[start..start + row_bytes]
                        .copy_from_slice(&pool[first..first + row_bytes]);
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
        let layout = case.cache_layout(self.pages);
        let table = ArrayRef::new(D::bytes(&self.block_table), requests * case.max_pages())?;
        let batch = DecodeBatch::new(
            BlockTable::new(table, requests, case.max_pages())?,
            (
                ArrayRef::new(D::bytes(&self.lens), requests)?,
                case.requests.iter().map(|(_, len)| *len).max().unwrap_or(0),
            ),
            (
                ArrayRef::new(D::bytes(&self.starts), requests + 1)?,
                case.limits().decode_query_len,
            ),
        );
        backend.prepare(device, &batch, state, metadata)?;
        let call = DecodeCall::new(
            Query::Split {
                latent: queries.narrow(2, 0..LATENT)?,
                rope: queries.narrow(2, LATENT..ROW)?,
            },
            CacheRef::new(D::bytes(&self.cache), layout)?,
            batch,
            Output::Plain(TensorMut::new(
                D::bytes_mut(&mut self.out),
                Layout::contiguous(case.dtype, [tokens, case.heads, LATENT]),
            )?),
        )
        .with_lse(LseMut::new(
            D::bytes_mut(&mut self.lse),
            LseLayout::heads_first(case.heads, tokens),
        )?);
        // SAFETY: lengths, starts and pages are those of the case, for which all tensors were made.
        unsafe { backend.decode(device, call, state, metadata) }
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
    let elements = 0..bytes.len() / dtype.bytes();
    elements.map(|at| get(dtype, bytes, at)).collect()
}

/// Compares by the conventions of the field's own tests: an output passes within 8e-4 or 2.01/128
/// of the expected value and a cosine difference below 5e-6, a log-sum-exp within 1e-6 or
/// 8.01/65536.
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
    // The tolerance is twice that against an exact reference, since both sides are rounded to the
    // dtype here.
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
    let gpu = &*gpu();
    let got = run::<WgmmaMla>(gpu, case, &numbers);
    assert_close(name, case.dtype, &got, &want);
    let again = run::<WgmmaMla>(gpu, case, &numbers);
    assert!(got == again, "{name}: a second run differs");
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn every_number_of_heads_and_query_tokens_agrees_with_the_cpu() {
    // Requests with room for up to 512 tokens have a kernel of their own if there are more than 64
    // rows; the table has a page more than needed.
    let long = [0, 1, 63, 64, 65, 127, 128, 129, 191, 1000, 4641];
    let short = [0, 1, 63, 64, 65, 127, 128, 129, 191, 320, 448];
    for heads in [1, 3, 8, 9, 16, 20, 40, 48, 63, 64, 96, 126, 128] {
        for query in [1, 2, 3, 4, 8, 9, 16] {
            for (name, lens) in [("long", &long), ("short", &short)] {
                let requests = lens.iter().map(|len| (query, *len)).collect();
                let case = Case::new(heads, requests);
                check(
                    &format!("{heads} heads, {query} query tokens, {name}"),
                    &case,
                    (heads * 10 + query) as u64,
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn random_ragged_batches_agree_with_the_cpu() {
    let mut rng = rng(7);
    for round in 0..40 {
        let requests = (0..rng.random_range(1..=40))
            .map(|_| {
                let query = rng.random_range(0..=16);
                let len = rng.random_range(0..=[6000, 700, 200, 700][round as usize % 4]);
                (query, len)
            })
            .collect();
        let mut case = Case::new(rng.random_range(1..=128), requests);
        case.page_size = pick(&mut rng, &[16, 32, 48, 64, 128, 256]);
        case = case.dtype(pick(&mut rng, &[DType::F16, DType::BF16]));
        case.slack = 8 * rng.random_range(0..4);
        case.cache_slack = 16 * rng.random_range(0..4);
        check(&format!("round {round}"), &case, round);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn e4m3_caches_agree_with_the_cpu() {
    let mut rng = rng(9);
    let lens = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 1000, 4641];
    for heads in [1, 3, 8, 9, 16, 20, 40, 63, 64, 96, 126, 128] {
        let query = rng.random_range(1..=16);
        let requests = lens.iter().map(|len| (query, *len)).collect();
        let dtype = pick(&mut rng, &[DType::F16, DType::BF16]);
        let mut case = Case::new(heads, requests).dtype(dtype).fp8(0.013);
        case.page_size = pick(&mut rng, &[16, 48, 64, 128]);
        case.cache_slack = 16 * rng.random_range(0..3);
        check(
            &format!("e4m3, {heads} heads, {query} query tokens"),
            &case,
            heads as u64,
        );
    }
    // The scale belongs to the scores and to the output.
    for scale in [1.0 / 3.0, 1.0, 0.000_3] {
        let case = Case::new(16, vec![(1, 3000), (2, 700)]).fp8(scale);
        check(&format!("e4m3, scale {scale}"), &case, 3);
    }
    let many = (0..500).map(|_| (1, rng.random_range(0..300))).collect();
    check("e4m3, 500 requests", &Case::new(16, many).fp8(0.02), 4);
    check(
        "e4m3, 131072 tokens",
        &Case::new(16, vec![(1, 131_072)]).fp8(0.02),
        5,
    );
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
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
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn offsets_beyond_two_to_the_31_elements_agree_with_the_cpu() {
    let mut case = Case::new(16, vec![(1, 700), (2, 333)]);
    case.spare_pages = (1usize << 31) / (64 * ROW) + 1;
    check("a cache of more than 4 GiB", &case, 5);
}

// CTAs that never wait for the other splits of their query tile make all of them fall back, unless
// all have already arrived: then one CTA combines the whole tile.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn falling_back_gives_the_same_bits() {
    let gpu = &*gpu();
    let mut rng = rng(31);
    let mut lens = |requests| -> Vec<_> {
        (0..requests)
            .map(|_| (1, rng.random_range(1..=4000)))
            .collect()
    };
    // Few splits, many splits, and tiles in line, where a CTA has other work after its split.
    let cases = [
        Case::new(16, vec![(1, 1000)]),
        Case::new(16, vec![(1, 20_000)]),
        Case::new(64, vec![(1, 20_000)]),
        Case::new(128, vec![(1, 9000), (1, 3000)]),
        // Query tiles of five CTAs, and of thirteen.
        Case::new(48, vec![(6, 9000), (6, 3000)]),
        Case::new(52, vec![(16, 5000)]),
        Case::new(40, vec![(8, 6000)]).fp8(0.5),
        Case::new(16, lens(40)),
        Case::new(128, lens(150)),
        Case::new(16, lens(40)).fp8(0.5),
        Case::new(64, lens(150)).fp8(0.5),
    ];
    for (seed, case) in (23..).zip(&cases) {
        let numbers = Numbers::random(case, seed);
        let step = Step::<Cuda>::new(gpu, case, &numbers).unwrap();
        let backend = WgmmaMla::new(gpu, &case.config()).unwrap();
        let bytes = backend.workspace_bytes(gpu, &case.limits()).unwrap();
        let workspace = upload(gpu, &vec![0; bytes as usize]).unwrap();
        let mut params = raw_call(&step, case, &workspace);
        if case.kv == KvFormat::Fp8 {
            params.cache_format = raw::MLA_CACHE_FP8 as i32;
            params.cache_scale = case.scale;
        }
        let mut expected = None;
        for patience in [0, -1, 2000] {
            params.split_patience = patience;
            for launch in 0..50 {
                // SAFETY: the parameters describe memory that lives as long as the step and the
                // workspace.
                let status = unsafe { raw::mla_decode_sm90(&params, gpu.raw_stream()) };
                // SAFETY: the status is that of a function of `raw`.
                unsafe { raw::check("decode", status) }.unwrap();
                let got = step.results(gpu).unwrap();
                let expected = expected.get_or_insert_with(|| got.clone());
                assert!(
                    got == *expected,
                    "{} heads, patience {patience}: launch {launch} differs",
                    case.heads
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn what_does_not_fit_is_refused_by_name() {
    let gpu = &*gpu();
    let case = Case::new(16, vec![(1, 100)]);
    let backend = WgmmaMla::new(gpu, &case.config()).unwrap();
    let mut limits = case.limits();
    limits.decode_query_len = 17;
    let refused = backend
        .state(gpu, &limits)
        .err()
        .expect("17 query tokens are too many");
    assert_eq!(refused.to_string(), "query_len: given 17, accepted 1..=16");
    let mut state = backend.state(gpu, &case.limits()).unwrap();
    let longer = Case::new(16, vec![(2, 100)]);
    let numbers = Numbers::random(&longer, 1);
    let mut step = Step::<Cuda>::new(gpu, &longer, &numbers).unwrap();
    let refused = step
        .enqueue(gpu, &longer, &backend, &mut state, &mut ())
        .unwrap_err();
    assert!(
        refused.to_string().starts_with("max_query_len: given 2"),
        "{refused}"
    );
}

// Makes a raw call that would be launched as it stands: all requests have equally many query
// tokens.
fn raw_call(step: &Step<Cuda>, case: &Case, workspace: &Buffer) -> raw::MlaDecodeParams {
    raw::MlaDecodeParams {
        q_latent: step.queries.address() as *const _,
        q_rope: (step.queries.address() + 2 * LATENT as u64) as *const _,
        cache: step.cache.address() as *const _,
        block_table: step.block_table.address() as *const _,
        kv_lens: step.lens.address() as *const _,
        out: step.out.address() as *mut _,
        lse: step.lse.address() as *mut _,
        workspace: workspace.address() as *mut _,
        workspace_bytes: workspace.len(),
        q_latent_token_stride: (case.heads * ROW) as i64,
        q_latent_head_stride: ROW as i64,
        q_rope_token_stride: (case.heads * ROW) as i64,
        q_rope_head_stride: ROW as i64,
        cache_page_stride: (case.page_size * ROW) as i64,
        cache_slot_stride: ROW as i64,
        cache_rope: (step.cache.address() + 2 * LATENT as u64) as *const _,
        cache_rope_page_stride: (case.page_size * ROW) as i64,
        cache_rope_slot_stride: ROW as i64,
        block_table_stride: case.max_pages() as i64,
        out_token_stride: (case.heads * LATENT) as i64,
        out_head_stride: LATENT as i64,
        lse_head_stride: case.tokens() as i64,
        pages: step.pages as i64,
        requests: case.requests.len() as i32,
        tokens: case.tokens() as i32,
        heads: case.heads as i32,
        query_len: case.requests[0].0 as i32,
        page_size: case.page_size as i32,
        max_pages: case.max_pages() as i32,
        latent_dim: LATENT as i32,
        rope_dim: (ROW - LATENT) as i32,
        q_dtype: raw::MLA_DTYPE_BF16 as i32,
        cache_format: raw::MLA_CACHE_BF16 as i32,
        causal: 1,
        softmax_scale: SCALE,
        cache_scale: 1.0,
        ..Default::default()
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn each_bad_argument_of_the_raw_call_is_named_before_anything_is_launched() {
    let gpu = &*gpu();
    let case = Case::new(16, vec![(1, 100), (1, 3)]);
    let numbers = Numbers::random(&case, 1);
    let step = Step::<Cuda>::new(gpu, &case, &numbers).unwrap();
    let backend = WgmmaMla::new(gpu, &case.config()).unwrap();
    let bytes = backend.workspace_bytes(gpu, &case.limits()).unwrap();
    let workspace = gpu.allocate(bytes as usize).unwrap();
    let good = raw_call(&step, &case, &workspace);
    let wrong: &[WrongField<raw::MlaDecodeParams>] = &[
        ("heads", |p| p.heads = 0),
        ("heads", |p| p.heads = 129),
        ("query_len", |p| p.query_len = 0),
        ("query_len", |p| p.query_len = 17),
        ("requests", |p| p.requests = 0),
        ("requests", |p| p.requests = 1025),
        ("latent_dim", |p| p.latent_dim = 256),
        ("rope_dim", |p| p.rope_dim = 32),
        ("q_dtype", |p| p.q_dtype = raw::MLA_DTYPE_F32 as i32),
        ("cache_format", |p| {
            p.cache_format = raw::MLA_CACHE_F16 as i32
        }),
        ("cache_scale", |p| {
            p.cache_format = raw::MLA_CACHE_FP8 as i32;
            p.cache_scale = 0.0;
        }),
        ("cache_slot_stride", |p| {
            p.cache_format = raw::MLA_CACHE_FP8 as i32;
            p.cache_slot_stride = 584;
        }),
        ("tokens", |p| p.tokens = 1),
        ("tokens", |p| p.tokens = -1),
        ("page_size", |p| p.page_size = 0),
        ("page_size", |p| p.page_size = 24),
        ("pages", |p| p.pages = 0),
        ("max_pages", |p| p.max_pages = 0),
        ("max_pages", |p| p.max_pages = (1 << 29) / p.page_size + 1),
        ("max_pages", |p| {
            // The table's width is within the bound of one request.
            (p.requests, p.tokens) = (1024, 1024);
            p.max_pages = (1 << 28) / p.page_size;
        }),
        ("block_table_stride", |p| p.block_table_stride = 1),
        ("block_table_stride", |p| p.block_table_stride = 1 << 39),
        ("q_latent", |p| p.q_latent = std::ptr::null()),
        ("q_latent", |p| p.q_latent = p.q_latent.wrapping_byte_add(2)),
        ("q_rope", |p| p.q_rope = std::ptr::null()),
        ("q_rope", |p| p.q_rope = p.q_rope.wrapping_byte_add(8)),
        ("cache", |p| p.cache = std::ptr::null()),
        ("cache", |p| p.cache = p.cache.wrapping_byte_add(4)),
        ("out", |p| p.out = std::ptr::null_mut()),
        ("out", |p| p.out = p.out.wrapping_byte_add(2)),
        ("q_latent_token_stride", |p| p.q_latent_token_stride = -8),
        ("q_latent_head_stride", |p| p.q_latent_head_stride = 577),
        ("q_rope_token_stride", |p| p.q_rope_token_stride = 4),
        ("q_rope_head_stride", |p| p.q_rope_head_stride = -1),
        ("out_token_stride", |p| p.out_token_stride = 1),
        ("out_head_stride", |p| p.out_head_stride = 513),
        ("out_head_stride", |p| p.out_head_stride = 1 << 39),
        ("cache_slot_stride", |p| {
            (p.cache_slot_stride, p.cache_rope_slot_stride) = (568, 568)
        }),
        ("cache_slot_stride", |p| p.cache_slot_stride = 504),
        ("cache_rope", |p| {
            p.cache_rope = p.cache_rope.wrapping_byte_add(4)
        }),
        ("cache_rope_slot_stride", |p| p.cache_rope_slot_stride = 56),
        ("cache_rope_slot_stride", |p| p.cache_rope_slot_stride = 68),
        ("cache_rope_page_stride", |p| {
            p.cache_rope_page_stride = 1 << 39
        }),
        ("cache_slot_stride", |p| p.cache_slot_stride = 577),
        ("cache_slot_stride", |p| p.cache_slot_stride = 1 << 39),
        ("cache_page_stride", |p| p.cache_page_stride = 8),
        ("cache_page_stride", |p| p.cache_page_stride = 1 << 39),
        ("block_table", |p| p.block_table = std::ptr::null()),
        ("kv_lens", |p| p.kv_lens = p.kv_lens.wrapping_byte_add(1)),
        ("cu_q_lens", |p| {
            p.cu_q_lens = std::ptr::dangling::<u8>().wrapping_add(1).cast()
        }),
        ("lse", |p| p.lse = p.lse.wrapping_byte_add(2)),
        ("lse_head_stride", |p| p.lse_head_stride = 1),
        ("lse_head_stride", |p| p.lse_head_stride = 1 << 39),
        ("softmax_scale", |p| p.softmax_scale = 0.0),
        ("softmax_scale", |p| p.softmax_scale = f32::NAN),
        ("softmax_scale", |p| p.softmax_scale = f32::INFINITY),
        ("workspace", |p| p.workspace = std::ptr::null_mut()),
        ("workspace", |p| {
            p.workspace = p.workspace.wrapping_byte_add(16)
        }),
        ("workspace_bytes", |p| p.workspace_bytes -= 1),
    ];
    // SAFETY: what is refused is not launched, and everything else is as the good call has it.
    each_is_refused(&good, wrong, |params| unsafe {
        raw::mla_decode_sm90(params, gpu.raw_stream())
    });
    let (out, lse) = step.results(gpu).unwrap();
    assert!(
        out.iter().chain(&lse).all(|byte| *byte == 0xff),
        "a refused call has written"
    );
    // SAFETY: the call describes what `step` and `workspace` hold.
    let status = unsafe { raw::mla_decode_sm90(&good, gpu.raw_stream()) };
    // SAFETY: the status is that of a function of `raw`.
    unsafe { raw::check("decode", status) }.unwrap();
    let want = run::<CpuDecode>(&Cpu::new(), &case, &numbers);
    assert_close(
        "the raw call",
        case.dtype,
        &step.results(gpu).unwrap(),
        &want,
    );
}
