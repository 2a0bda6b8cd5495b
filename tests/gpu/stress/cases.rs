//! Random problems for each kernel, as calls of the C interface.

use std::ffi::c_void;
use std::ptr::null;

use mla_kernels::raw::{self, MlaStatus};
use mla_runtime::model::{DType, KvFormat, MlaDims};
use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use super::machine::{Machine, Memory, Region, Values};
use crate::calls::{self, dims_of, dtype_number};
use crate::tensors::pick;

/// A problem, with the outputs of its launch.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) outputs: Vec<Region>,
    launch: Box<dyn Fn(*mut c_void) -> MlaStatus>,
    // The launch contains addresses in this memory.
    _memory: Memory,
}

impl Case {
    pub(super) fn enqueue(&self, machine: &Machine) {
        let status = (self.launch)(machine.raw_stream());
        assert_eq!(status.code, raw::MLA_OK as i32, "{}: refused", self.name);
    }
}

/// A kernel, and the workspace that all of its cases share. A launch finds the state that the
/// preceding one left there.
pub(super) struct Kernel {
    pub(super) name: &'static str,
    pub(super) cases: Vec<Case>,
    _workspace: Memory,
}

/// Draws the problems of all kernels.
pub(super) fn kernels(machine: &Machine, rng: &mut StdRng, cases: usize) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    let mut add = |name, draw: &mut dyn FnMut(&mut Draw<'_>, usize) -> Case| {
        let mut workspace = Memory::default();
        let mut draws = Draw::new(machine, rng, &mut workspace);
        let cases = (0..cases).map(|at| draw(&mut draws, at)).collect();
        kernels.push(Kernel {
            name,
            cases,
            _workspace: workspace,
        });
    };
    macro_rules! add {
        ($($name:literal, |$draw:ident, $at:pat_param| $case:expr;)*) => {
            $(add($name, &mut |$draw, $at| $case);)*
        };
    }
    #[cfg(feature = "sm90")]
    add! {
        "sm90 sparse, bf16, up to 32 heads", |d, at| match at {
            0 => d.two_lists(KvFormat::BF16, 32, 528, 132),
            1 => d.two_lists(KvFormat::BF16, 16, 528, 132),
            2 => d.padded_list(),
            _ => d.sparse(SPARSE_90, DType::BF16, KvFormat::BF16, FEW_HEADS),
        };
        "sm90 sparse, f16, up to 32 heads", |d, _|
            d.sparse(SPARSE_90, DType::F16, KvFormat::F16, FEW_HEADS);
        "sm90 sparse, bf16, more heads", |d, _|
            d.sparse(SPARSE_90, DType::BF16, KvFormat::BF16, MORE_HEADS);
        "sm90 sparse, e4m3", |d, at| match at {
            0 => d.two_lists(KvFormat::Fp8, 128, 264, 66),
            1 => d.gaps(KvFormat::Fp8, 16),
            2 => d.gaps(KvFormat::Fp8, 32),
            _ => d.sparse(SPARSE_90, DType::BF16, KvFormat::Fp8, HEADS),
        };
        "sm90 sparse, fp8_ds_mla, bf16", |d, at| match at {
            0 => d.two_lists(KvFormat::Fp8DsMla, 128, 264, 66),
            1 => d.gaps(KvFormat::Fp8DsMla, 16),
            _ => d.sparse(SPARSE_90, DType::BF16, KvFormat::Fp8DsMla, HEADS),
        };
        "sm90 sparse, fp8_ds_mla, f16", |d, _|
            d.sparse(SPARSE_90, DType::F16, KvFormat::Fp8DsMla, HEADS);
        "sm90 sparse (512, 0), bf16, up to 32 heads", |d, at| match at {
            0 => d.of_row(512, 0).padded_list(),
            1 => d.of_row(512, 0).two_lists(KvFormat::BF16, 16, 528, 132),
            _ => d.sparse(SPARSE_90, DType::BF16, KvFormat::BF16, FEW_HEADS),
        };
        "sm90 sparse (512, 0), f16, more heads", |d, _|
            d.of_row(512, 0).sparse(SPARSE_90, DType::F16, KvFormat::F16, MORE_HEADS);
        "sm90 sparse (512, 0), e4m3", |d, _|
            d.of_row(512, 0).sparse(SPARSE_90, DType::BF16, KvFormat::Fp8, HEADS);
        "sm90 sparse (512, 0), fp8_ds_mla", |d, _|
            d.of_row(512, 0).sparse(SPARSE_90, DType::BF16, KvFormat::Fp8DsMla, HEADS);
        "sm90 sparse, fp8_per_token", |d, _|
            d.sparse(SPARSE_90, DType::F16, KvFormat::Fp8PerToken, HEADS);
        "sm90 decode (512, 0)", |d, _|
            d.of_row(512, 0).decode(DECODE_90, DType::BF16, KvFormat::BF16);
        "sm90 decode (256, 64)", |d, _|
            d.of_row(256, 64).decode(DECODE_90, DType::BF16, KvFormat::BF16);
        "sm90 decode (256, 32)", |d, _|
            d.of_row(256, 32).decode(DECODE_90, DType::F16, KvFormat::F16);
        "sm90 decode, bf16", |d, _| d.decode(DECODE_90, DType::BF16, KvFormat::BF16);
        "sm90 decode, f16", |d, _| d.decode(DECODE_90, DType::F16, KvFormat::F16);
        "sm90 decode, e4m3", |d, _| d.decode(DECODE_90, DType::BF16, KvFormat::Fp8);
        "sm90 decode, fp8_per_token", |d, _|
            d.decode(DECODE_90, DType::BF16, KvFormat::Fp8PerToken);
        "sm90 prefill (128, 64, 128)", |d, _| d.prefill(PREFILL_90, DType::BF16, [128, 64, 128]);
        "sm90 prefill (192, 64, 256)", |d, _| d.prefill(PREFILL_90, DType::F16, [192, 64, 256]);
        "sm90 prefill (192, 64, 128)", |d, _| d.prefill(PREFILL_90, DType::BF16, [192, 64, 128]);
        "sm90 prefill (64, 64, 128)", |d, _| d.prefill(PREFILL_90, DType::F16, [64, 64, 128]);
        "sm90 prefill (256, 0, 256)", |d, _| d.prefill(PREFILL_90, DType::BF16, [256, 0, 256]);
        "sm90 prefill (64, 32, 64)", |d, _| d.prefill(PREFILL_90, DType::BF16, [64, 32, 64]);
        "index logits", |d, _| d.logits();
        "top-k", |d, _| d.topk();
    }
    #[cfg(feature = "sm80")]
    add! {
        "sm80 sparse", |d, _| d.sparse(SPARSE_80, DType::BF16, KvFormat::BF16, HEADS);
        "sm80 sparse, fp8_ds_mla", |d, _|
            d.sparse(SPARSE_80, DType::F16, KvFormat::Fp8DsMla, HEADS);
        "sm80 sparse, fp8_per_token", |d, _|
            d.sparse(SPARSE_80, DType::BF16, KvFormat::Fp8PerToken, HEADS);
        "sm80 sparse (512, 0)", |d, _|
            d.of_row(512, 0).sparse(SPARSE_80, DType::BF16, KvFormat::Fp8, HEADS);
        "sm80 decode, fp8_per_token", |d, _|
            d.decode(DECODE_80, DType::BF16, KvFormat::Fp8PerToken);
        "sm80 decode, bf16", |d, _| d.decode(DECODE_80, DType::BF16, KvFormat::BF16);
        "sm80 decode, e4m3", |d, _| d.decode(DECODE_80, DType::F16, KvFormat::Fp8);
        "sm80 prefill (128, 64, 128)", |d, _| d.prefill(PREFILL_80, DType::BF16, [128, 64, 128]);
        "sm80 prefill (192, 64, 128)", |d, _| d.prefill(PREFILL_80, DType::F16, [192, 64, 128]);
    }
    add! {
        "cache write", |d, _| d.cache_write();
        "head GEMM", |d, _| d.head_gemm();
        "copy rows", |d, _| d.copy_rows();
        "dequantize", |d, _| d.dequantize();
    }
    kernels
}

#[cfg(feature = "sm90")]
const FEW_HEADS: &[i32] = &[1, 5, 8, 12, 16, 20, 32];
#[cfg(feature = "sm90")]
const MORE_HEADS: &[i32] = &[33, 48, 63, 64, 65, 96, 127, 128];
const HEADS: &[i32] = &[1, 5, 8, 12, 16, 20, 32, 33, 48, 64, 65, 96, 127, 128];
/// Size of a workspace, more than any launch here needs.
const WORKSPACE_BYTES: usize = 256 << 20;
/// Number of bytes at a workspace's beginning that are zero between launches. Each kernel has fewer
/// counters.
const COUNTER_BYTES: usize = 8192;
const DIMS: MlaDims = MlaDims::R1;
const LATENT: usize = 512;
const ROPE: usize = 64;

/// The function that launches, given parameters, a workspace, and the workspace's size.
struct Launch<P> {
    family: &'static str,
    call: unsafe fn(&P, Region, *mut c_void) -> MlaStatus,
}

macro_rules! launches {
    ($($feature:literal, $name:ident: $params:ident, $call:expr;)*) => {$(
        #[cfg(feature = $feature)]
        const $name: Launch<raw::$params> = Launch {
            family: $feature,
            // SAFETY: the function's caller keeps its contract. Null limits are those of the
            // device.
            call: |params, workspace, stream| unsafe { $call(params, workspace, stream) },
        };
    )*};
}

launches! {
    "sm90", SPARSE_90: MlaSparseParams, |p, _, stream| raw::mla_sparse_sm90(p, stream);
    "sm90", DECODE_90: MlaDecodeParams, |p, _, stream| raw::mla_decode_sm90(p, stream);
    "sm90", PREFILL_90: MlaPrefillParams, |p, _, stream| raw::mla_prefill_sm90(p, stream);
    "sm80", SPARSE_80: MlaSparseParams, |p, workspace: Region, stream|
        raw::mla_sparse_sm80(p, null(), workspace.pointer(), workspace.bytes, stream);
    "sm80", DECODE_80: MlaDecodeParams, |p, _, stream| raw::mla_decode_sm80(p, null(), stream);
    "sm80", PREFILL_80: MlaPrefillParams, |p, _, stream| raw::mla_prefill_sm80(p, null(), stream);
}

fn values(of: DType) -> Values {
    match of {
        DType::F16 => Values::F16,
        DType::BF16 => Values::Bf16,
        DType::F32 => Values::F32,
    }
}

fn cache_values(rows: KvFormat, dims: MlaDims) -> Values {
    match (rows.dtype(), rows) {
        (Some(of), _) => values(of),
        (None, KvFormat::Fp8DsMla) => Values::DsMla(rows.row_bytes(dims) as u32 / 4),
        (None, _) => Values::E4m3,
    }
}

/// Returns the address of rotary keys in a cache of these rows.
pub(crate) fn rotary_keys(rows: KvFormat, dims: MlaDims, cache: *const c_void) -> *const c_void {
    cache.wrapping_byte_add(rows.latent_bytes(dims))
}

/// Returns L, R and both together.
fn widths(dims: MlaDims) -> [usize; 3] {
    [dims.latent, dims.head.rope, dims.row()].map(|width| width as usize)
}

/// Returns the sum of the lengths before each request, and of all lengths.
fn starts(lens: &[i32]) -> Vec<i32> {
    let sums = lens.iter().scan(0, |sum, len| {
        *sum += len;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

/// Parameters of a launch, and the memory that they point to, except the workspace.
pub(crate) struct Call<P> {
    pub(crate) params: P,
    /// The output, and the log-sum-exp.
    pub(crate) outputs: [Region; 2],
    pub(crate) memory: Memory,
}

impl<P: Copy + 'static> Call<P> {
    /// Launches the call with other parameters, and returns the words of its outputs.
    #[cfg(feature = "sm90")]
    pub(crate) fn launched(
        &self,
        machine: &Machine,
        params: &P,
        launch: impl Fn(&P) -> MlaStatus,
    ) -> [Vec<u32>; 2] {
        // SAFETY: the status was returned by a function of `raw`.
        unsafe { raw::check("a raw call", launch(params)) }.unwrap();
        self.outputs.map(|output| machine.download(output))
    }

    fn case(self, draw: &Draw<'_>, name: String, launch: Launch<P>) -> Case {
        let (params, workspace) = (self.params, draw.workspace);
        Case {
            name,
            outputs: self.outputs.to_vec(),
            // SAFETY: all addresses belong to this call's memory or to the workspace, with the
            // sizes that the extents and strides say. Lengths and pages are within the table and
            // the cache, and starts rise from 0 to the tokens.
            launch: Box::new(move |stream| unsafe { (launch.call)(&params, workspace, stream) }),
            _memory: self.memory,
        }
    }
}

/// Draws calls over one workspace.
pub(crate) struct Draw<'a> {
    machine: &'a Machine,
    rng: &'a mut StdRng,
    workspace: Region,
    /// The dimensions of decodes.
    dims: MlaDims,
    /// Values between the queries of one token and those of the next. With some, the rows are not
    /// evenly spaced, and kernels copy them one by one.
    query_gap: usize,
}

/// Lists of slots for all tokens, and the number of entries of each that count.
pub(crate) struct Lists {
    pub(crate) width: usize,
    pub(crate) entries: Vec<i32>,
    pub(crate) counts: Option<Vec<i32>>,
}

/// The heads of a sparse problem, the pages of its caches, and the lists of one or both.
pub(crate) struct Listed {
    pub(crate) heads: i32,
    pub(crate) pages: i32,
    pub(crate) first: Lists,
    pub(crate) second: Option<Lists>,
}

impl<'a> Draw<'a> {
    /// Makes a workspace of zeros. The part after the counters is poisoned.
    pub(crate) fn new(machine: &'a Machine, rng: &'a mut StdRng, memory: &mut Memory) -> Self {
        let workspace = machine.zeros(memory, WORKSPACE_BYTES);
        machine.fill(workspace, COUNTER_BYTES, 0xff);
        Self {
            machine,
            rng,
            workspace,
            dims: DIMS,
            query_gap: 0,
        }
    }

    /// Draws decodes of rows of these widths from now on.
    pub(crate) fn of_row(&mut self, latent: u32, rope: u32) -> &mut Self {
        self.dims = dims_of(latent, rope);
        self
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        pick(self.rng, of)
    }

    fn random(&mut self, memory: &mut Memory, bytes: usize, values: Values) -> Region {
        let seed = self.rng.random();
        self.machine.random(memory, bytes, values, seed)
    }

    fn long_tailed(&mut self, low: i32, high: i32) -> i32 {
        let (low, high) = (f64::from(low).ln(), f64::from(high).ln());
        self.rng.random_range(low..=high).exp() as i32
    }

    /// Makes a list for each token: padded at its end, with gaps, scattered, of one slot, or empty.
    fn lists(&mut self, tokens: usize, width: usize, slots: i32) -> Lists {
        let mode = self.rng.random_range(0..6);
        let mut entries = vec![-1; tokens * width];
        for list in entries.chunks_mut(width.max(1)) {
            let valid = self.rng.random_range(0..=width);
            let mut at = 0;
            while at < width {
                let run = match mode {
                    0 | 1 => valid,
                    2 => self.rng.random_range(1..=160),
                    3 => self.rng.random_range(1..=48),
                    4 => usize::from(at == 0),
                    _ => 0,
                };
                for entry in list.iter_mut().skip(at).take(run) {
                    *entry = match self.rng.random_range(0..40) {
                        0 => self.pick(&[-7, i32::MIN, i32::MAX, slots]),
                        _ => self.rng.random_range(0..slots),
                    };
                }
                at += run;
                at += match mode {
                    2 => 128 * self.rng.random_range(1..=3),
                    3 => self.rng.random_range(1..=64),
                    _ => width,
                };
            }
        }
        let counts = self.rng.random_bool(0.6).then(|| {
            (0..tokens)
                .map(|_| self.rng.random_range(-2..=width as i32 + 3))
                .collect()
        });
        Lists {
            width,
            entries,
            counts,
        }
    }

    /// Makes lists whose first entries are valid. `keys` has their number for each token.
    #[cfg(feature = "sm90")]
    fn prefixes(&mut self, width: usize, slots: i32, keys: &[usize], with_counts: bool) -> Lists {
        let mut entries = vec![-1; keys.len() * width];
        for (list, &keys) in entries.chunks_mut(width).zip(keys) {
            list[..keys].fill_with(|| self.rng.random_range(0..slots));
        }
        Lists {
            width,
            entries,
            counts: with_counts.then(|| keys.iter().map(|&keys| keys as i32).collect()),
        }
    }

    fn sparse(
        &mut self,
        launch: Launch<raw::MlaSparseParams>,
        of: DType,
        rows: KvFormat,
        heads: &[i32],
    ) -> Case {
        let heads = self.pick(heads);
        let tokens = self.pick(&[1, 2, 3, 8, 16, 33, 64, 131, 133, 200, 264, 300]);
        let width = self.pick(&[17, 64, 128, 500, 2048]);
        let pages = self.pick(&[40, 400]);
        let first = self.lists(tokens, width, pages * 64);
        let second = (launch.family == "sm90" && self.rng.random_bool(0.5)).then(|| {
            let width = self.pick(&[64, 512]);
            self.lists(tokens, width, pages * 64)
        });
        let listed = Listed {
            heads,
            pages,
            first,
            second,
        };
        self.sparse_case(launch, of, rows, &listed)
    }

    fn sparse_case(
        &mut self,
        launch: Launch<raw::MlaSparseParams>,
        of: DType,
        rows: KvFormat,
        listed: &Listed,
    ) -> Case {
        let (first, second) = (&listed.first, &listed.second);
        let name = format!(
            "{} sparse {of} {rows} {:?}, {} heads, {} tokens, width {} and {}, counts {}",
            launch.family,
            widths(self.dims),
            listed.heads,
            first.entries.len() / first.width,
            first.width,
            second.as_ref().map_or(0, |lists| lists.width),
            first.counts.is_some(),
        );
        self.query_gap = self.pick(&[0, 8]);
        self.sparse_of(of, rows, listed).case(self, name, launch)
    }

    #[cfg(feature = "sm90")]
    fn listed(&mut self, rows: KvFormat, heads: i32, first: Lists, second: Option<Lists>) -> Case {
        let listed = Listed {
            heads,
            pages: 100,
            first,
            second,
        };
        self.sparse_case(SPARSE_90, DType::BF16, rows, &listed)
    }

    /// Makes lists in two caches, with different lengths in turn. The first `first` tokens, one for
    /// each CTA, have 128 entries in one cache and 552 in the other. The next ones have 40 in each,
    /// and the rest have whole tiles of 128.
    #[cfg(feature = "sm90")]
    fn two_lists(&mut self, rows: KvFormat, heads: i32, tokens: usize, first: usize) -> Case {
        let keys = |in_first, between, rest| -> Vec<usize> {
            (0..tokens)
                .map(|token| match token / first {
                    0 => in_first,
                    1 | 2 if token < 3 * first => between,
                    _ => rest,
                })
                .collect()
        };
        let one = self.prefixes(128, 6400, &keys(128, 40, 128), true);
        let two = self.prefixes(552, 6400, &keys(552, 40, 128), true);
        self.listed(rows, heads, one, Some(two))
    }

    /// Makes a case without a second cache. Each CTA has three padded lists: a long one, one of 40
    /// keys, and one of two tiles.
    #[cfg(feature = "sm90")]
    fn padded_list(&mut self) -> Case {
        let keys: Vec<_> = (0..396).map(|token| [296, 40, 128][token / 132]).collect();
        let lists = self.prefixes(2048, 6400, &keys, false);
        self.listed(KvFormat::BF16, 32, lists, None)
    }

    /// Makes a case without a second cache. Each list has 480 valid entries before a gap, and whole
    /// tiles after it.
    #[cfg(feature = "sm90")]
    fn gaps(&mut self, rows: KvFormat, heads: i32) -> Case {
        let mut lists = self.prefixes(4096, 6400, &[4096; 132], false);
        for list in lists.entries.chunks_mut(4096) {
            for gap in list.chunks_mut(256).take(12) {
                gap[40..].fill(-1);
            }
        }
        self.listed(rows, heads, lists, None)
    }

    pub(crate) fn sparse_of(
        &mut self,
        of: DType,
        rows: KvFormat,
        listed: &Listed,
    ) -> Call<raw::MlaSparseParams> {
        let &Listed {
            heads,
            pages,
            ref first,
            ref second,
        } = listed;
        let mut memory = Memory::default();
        let (dims, [latent, _, row_values]) = (self.dims, widths(self.dims));
        let tokens = first.entries.len() / first.width;
        let count = tokens * heads as usize;
        let query_token = heads as usize * row_values + self.query_gap;
        let q = self.random(&mut memory, tokens * query_token * 2, values(of));
        let out = self.machine.zeros(&mut memory, count * latent * 2);
        let lse = self.machine.zeros(&mut memory, count * 4);
        let row = rows.pitch(dims);
        let mut upload = |draw: &mut Self, lists: &Lists| {
            let bytes = pages as usize * 64 * row;
            let cache = draw.random(&mut memory, bytes, cache_values(rows, dims));
            let counts = lists.counts.as_ref();
            raw::MlaListedCache {
                cache: cache.pointer(),
                cache_rope: rotary_keys(rows, dims, cache.pointer()),
                lists: draw.machine.upload(&mut memory, &lists.entries).pointer(),
                counts: counts.map_or(null(), |counts| {
                    draw.machine.upload(&mut memory, counts).pointer()
                }),
                cache_page_stride: 64 * row as i64,
                cache_slot_stride: row as i64,
                cache_rope_page_stride: 64 * row as i64,
                cache_rope_slot_stride: row as i64,
                list_stride: lists.width as i64,
                pages: i64::from(pages),
                width: lists.width as i32,
                page_size: 64,
            }
        };
        let one = upload(self, first);
        let two = second.as_ref().map(|lists| upload(self, lists));
        let extents = [tokens as i32, first.width as i32, pages];
        let params = raw::MlaSparseParams {
            q_latent: q.pointer(),
            q_rope: q.pointer::<u16>().wrapping_add(latent).cast(),
            cache: one.cache,
            cache_rope: one.cache_rope,
            lists: one.lists,
            counts: one.counts,
            second: two.unwrap_or_default(),
            out: out.pointer(),
            lse: lse.pointer(),
            q_latent_token_stride: query_token as i64,
            q_rope_token_stride: query_token as i64,
            cache_rope_page_stride: one.cache_rope_page_stride,
            cache_rope_slot_stride: one.cache_rope_slot_stride,
            cache_scale: 0.3,
            ..calls::sparse(dims, of, rows, heads, extents)
        };
        Call {
            params,
            outputs: [out, lse],
            memory,
        }
    }

    fn decode(&mut self, launch: Launch<raw::MlaDecodeParams>, of: DType, rows: KvFormat) -> Case {
        let requests = self.pick(&[1, 3, 8, 33, 100]);
        let heads = self.pick(&[1, 8, 16, 20, 32, 64, 96, 128]);
        let query_len = self.pick(&[1, 1, 2, 4]);
        let longest = if requests > 30 { 600 } else { 6000 };
        let lens: Vec<i32> = (0..requests)
            .map(|_| self.long_tailed(1, longest).max(query_len))
            .collect();
        self.query_gap = self.pick(&[0, 8]);
        let name = format!(
            "{} decode {of} {rows} {:?}, {heads} heads, {query_len} tokens of {requests} requests, \
             lengths up to {}, query gap {}",
            launch.family,
            widths(self.dims),
            lens.iter().max().unwrap(),
            self.query_gap,
        );
        let call = self.decode_of(of, rows, [heads, query_len], &lens);
        call.case(self, name, launch)
    }

    /// Makes a dense decode in which each request has `query_len` query tokens.
    pub(crate) fn decode_of(
        &mut self,
        of: DType,
        rows: KvFormat,
        [heads, query_len]: [i32; 2],
        lens: &[i32],
    ) -> Call<raw::MlaDecodeParams> {
        let mut memory = Memory::default();
        let (dims, [latent, _, row_values]) = (self.dims, widths(self.dims));
        let requests = lens.len() as i32;
        let max_pages = lens.iter().max().unwrap() / 64 + 2;
        let pages = requests * max_pages;
        let mut table: Vec<i32> = (0..pages).collect();
        table.shuffle(self.rng);
        let tokens = (requests * query_len) as usize;
        let count = tokens * heads as usize;
        let query_token = heads as usize * row_values + self.query_gap;
        let q = self.random(&mut memory, tokens * query_token * 2, values(of));
        let bytes = pages as usize * 64 * rows.pitch(dims);
        let cache = self.random(&mut memory, bytes, cache_values(rows, dims));
        let out = self.machine.zeros(&mut memory, count * latent * 2);
        let lse = self.machine.zeros(&mut memory, count * 4);
        let plain = calls::decode(dims, of, rows, [heads, query_len], [requests, max_pages]);
        let params = raw::MlaDecodeParams {
            q_latent: q.pointer(),
            q_rope: q.pointer::<u16>().wrapping_add(latent).cast(),
            cache: cache.pointer(),
            cache_rope: rotary_keys(rows, dims, cache.pointer()),
            block_table: self.machine.upload(&mut memory, &table).pointer(),
            kv_lens: self.machine.upload(&mut memory, lens).pointer(),
            out: out.pointer(),
            lse: lse.pointer(),
            workspace: self.workspace.pointer(),
            workspace_bytes: self.workspace.bytes,
            q_latent_token_stride: query_token as i64,
            q_rope_token_stride: query_token as i64,
            cache_rope_page_stride: plain.cache_page_stride,
            cache_rope_slot_stride: plain.cache_slot_stride,
            ..plain
        };
        Call {
            params,
            outputs: [out, lse],
            memory,
        }
    }

    fn prefill(
        &mut self,
        launch: Launch<raw::MlaPrefillParams>,
        of: DType,
        dims: [usize; 3],
    ) -> Case {
        let heads = self.pick(&[1, 4, 8, 16, 40, 128]);
        let requests = self.pick(&[1, 2, 5, 20]);
        let causal = self.rng.random_bool(0.5);
        let max = if heads > 16 { 200 } else { 1500 };
        let queries: Vec<i32> = (0..requests).map(|_| self.long_tailed(1, max)).collect();
        let mut keys = queries.clone();
        if !causal {
            keys.iter_mut()
                .for_each(|len| *len += self.long_tailed(1, 2000));
        }
        let call = self.prefill_of(of, dims, heads, causal, [&queries, &keys]);
        let name = format!(
            "{} prefill {of} {dims:?}, {heads} heads, {} tokens of {requests} requests, {} keys, \
             causal {causal}",
            launch.family, call.params.query_tokens, call.params.key_tokens,
        );
        call.case(self, name, launch)
    }

    /// Makes a prefill with contiguous rows. The two parts of a key are side by side.
    pub(crate) fn prefill_of(
        &mut self,
        of: DType,
        [nope, rope, value]: [usize; 3],
        heads: i32,
        causal: bool,
        lens: [&[i32]; 2],
    ) -> Call<raw::MlaPrefillParams> {
        let mut memory = Memory::default();
        let starts = lens.map(starts);
        let [query_tokens, key_tokens] = starts.each_ref().map(|starts| starts[lens[0].len()]);
        let [max_query_len, max_key_len] = lens.map(|lens| *lens.iter().max().unwrap());
        let [cu_query_lens, cu_key_lens] =
            starts.map(|starts| self.machine.upload(&mut memory, &starts).pointer());
        let many = heads as usize;
        let [queries, keys] = [query_tokens, key_tokens].map(|tokens| tokens as usize * many);
        let [query, key] = [queries, keys]
            .map(|rows| self.random(&mut memory, rows * (nope + rope) * 2, values(of)));
        let values = self.random(&mut memory, keys * value * 2, values(of));
        let out = self.machine.zeros(&mut memory, queries * value * 2);
        let lse = self.machine.zeros(&mut memory, queries * 4);
        let key_strides = [many * (nope + rope), nope + rope].map(|stride| stride as i64);
        let params = raw::MlaPrefillParams {
            query: query.pointer(),
            key_nope: key.pointer(),
            key_rope: key.pointer::<u16>().wrapping_add(nope).cast(),
            value: values.pointer(),
            out: out.pointer(),
            lse: lse.pointer(),
            cu_query_lens,
            cu_key_lens,
            workspace: self.workspace.pointer(),
            workspace_bytes: self.workspace.bytes,
            key_nope_token_stride: key_strides[0],
            key_nope_head_stride: key_strides[1],
            key_rope_token_stride: key_strides[0],
            key_rope_head_stride: key_strides[1],
            causal: i32::from(causal),
            batch_invariant: self.pick(&[0, 0, 1]),
            ..calls::prefill(
                [nope, rope, value].map(|width| width as i32),
                of,
                [heads, lens[0].len() as i32],
                [query_tokens, key_tokens],
                [max_query_len, max_key_len],
            )
        };
        Call {
            params,
            outputs: [out, lse],
            memory,
        }
    }

    /// Makes requests of the indexer: starts of query tokens, lengths, and a table of pages of 64.
    #[cfg(feature = "sm90")]
    fn indexed(&mut self) -> (Vec<i32>, Vec<i32>, Vec<i32>, i32) {
        let requests = self.pick(&[1, 2, 5, 16]);
        let queries: Vec<i32> = (0..requests)
            .map(|_| self.pick(&[1, 1, 2, 5, 40]))
            .collect();
        let lens: Vec<i32> = queries
            .iter()
            .map(|&q| q + self.long_tailed(1, 6000))
            .collect();
        let max_pages = lens.iter().max().unwrap() / 64 + 1;
        let mut table: Vec<i32> = (0..requests * max_pages).collect();
        table.shuffle(self.rng);
        (starts(&queries), lens, table, max_pages)
    }

    #[cfg(feature = "sm90")]
    fn logits(&mut self) -> Case {
        let mut memory = Memory::default();
        let (starts, lens, table, max_pages) = self.indexed();
        let heads = self.pick(&[32, 64]);
        let rows = *starts.last().unwrap() as usize;
        let columns = (max_pages * 64) as usize;
        let queries = self.random(&mut memory, rows * heads * 128, Values::E4m3);
        let weights = self.random(&mut memory, rows * heads * 4, Values::F32);
        // A page's scales follow its values. These e4m3 bytes are also finite numbers as f32.
        let cache = self.random(&mut memory, table.len() * 64 * 132, Values::E4m3);
        let logits = self.machine.zeros(&mut memory, rows * columns * 4);
        let extents = [rows as i32, lens.len() as i32, columns as i32];
        let params = raw::MlaIndexLogitsParams {
            queries: queries.pointer(),
            weights: weights.pointer(),
            cache: cache.pointer(),
            query_starts: self.machine.upload(&mut memory, &starts).pointer(),
            seq_lens: self.machine.upload(&mut memory, &lens).pointer(),
            block_table: self.machine.upload(&mut memory, &table).pointer(),
            logits: logits.pointer(),
            ..calls::index_logits(heads as i32, extents, [64, max_pages], table.len() as i64)
        };
        Case {
            name: format!("index logits, {heads} heads, {rows} rows, lengths {lens:?}"),
            outputs: vec![logits],
            // SAFETY: as in `Call::case`.
            launch: Box::new(move |stream| unsafe { raw::mla_index_logits_sm90(&params, stream) }),
            _memory: memory,
        }
    }

    #[cfg(feature = "sm90")]
    fn topk(&mut self) -> Case {
        let mut memory = Memory::default();
        let (starts, lens, table, max_pages) = self.indexed();
        let rows = *starts.last().unwrap() as usize;
        let columns = (max_pages * 64) as usize;
        let topk = self.pick(&[64, 512, 2048]);
        let logits = self.random(&mut memory, rows * columns * 4, Values::F32);
        let lists = self.machine.zeros(&mut memory, rows * topk * 4);
        let extents = [rows as i32, lens.len() as i32, columns as i32];
        let params = raw::MlaTopkParams {
            logits: logits.pointer(),
            query_starts: self.machine.upload(&mut memory, &starts).pointer(),
            seq_lens: self.machine.upload(&mut memory, &lens).pointer(),
            block_table: self.machine.upload(&mut memory, &table).pointer(),
            lists: lists.pointer(),
            ..calls::topk(topk as i32, extents, max_pages, table.len() as i64)
        };
        Case {
            name: format!("top-k {topk}, {rows} rows, lengths {lens:?}"),
            outputs: vec![lists],
            // SAFETY: as in `Call::case`.
            launch: Box::new(move |stream| unsafe { raw::mla_topk_sm90(&params, stream) }),
            _memory: memory,
        }
    }

    fn cache_write(&mut self) -> Case {
        let mut memory = Memory::default();
        let of = self.pick(&[DType::BF16, DType::F16]);
        let rows = self.pick(&[
            KvFormat::of(of),
            KvFormat::Fp8,
            KvFormat::Fp8DsMla,
            KvFormat::Fp8PerToken,
        ]);
        let row = rows.pitch(DIMS);
        let tokens = self.pick(&[1, 7, 64, 500]);
        let latent = self.random(&mut memory, tokens * LATENT * 2, values(of));
        let rope = self.random(&mut memory, tokens * ROPE * 2, values(of));
        let mut slots: Vec<i64> = (0..1024).collect();
        slots.shuffle(self.rng);
        slots.truncate(tokens);
        let cache = self.machine.zeros(&mut memory, 1024 * row);
        let plain = calls::cache_write(DIMS, of, rows, tokens as i32, 16);
        let params = raw::MlaCacheWriteParams {
            latent: latent.pointer(),
            rope: rope.pointer(),
            slots: self.machine.upload(&mut memory, &slots).pointer(),
            cache: cache.pointer(),
            cache_rope: rotary_keys(rows, DIMS, cache.pointer()).cast_mut(),
            cache_rope_page_stride: plain.cache_page_stride,
            cache_rope_slot_stride: plain.cache_slot_stride,
            ..plain
        };
        Case {
            name: format!("cache write, {of}, {rows}, {tokens} tokens"),
            outputs: vec![cache],
            // SAFETY: as in `Call::case`. All slots are different.
            launch: Box::new(move |stream| unsafe { raw::mla_cache_write(&params, stream) }),
            _memory: memory,
        }
    }

    fn head_gemm(&mut self) -> Case {
        let mut memory = Memory::default();
        let of = self.pick(&[DType::BF16, DType::F16]);
        let (k, n) = self.pick(&[(128, 512), (512, 128)]);
        let heads = self.pick(&[1, 16, 128]);
        let tokens = self.pick(&[1, 3, 8, 30]);
        let input = self.random(&mut memory, tokens * heads * k * 2, values(of));
        let weights = self.random(&mut memory, heads * k * n * 2, values(of));
        let out = self.machine.zeros(&mut memory, tokens * heads * n * 2);
        let params = raw::MlaHeadGemmParams {
            input: input.pointer(),
            weights: weights.pointer(),
            out: out.pointer(),
            input_token_stride: (heads * k) as i64,
            input_head_stride: k as i64,
            weights_head_stride: (k * n) as i64,
            weights_k_stride: n as i64,
            weights_n_stride: 1,
            out_token_stride: (heads * n) as i64,
            out_head_stride: n as i64,
            tokens: tokens as i32,
            heads: heads as i32,
            k: k as i32,
            n: n as i32,
            dtype: dtype_number(of),
            ..Default::default()
        };
        Case {
            name: format!("head GEMM {k} x {n}, {of}, {heads} heads, {tokens} tokens"),
            outputs: vec![out],
            // SAFETY: as in `Call::case`.
            launch: Box::new(move |stream| unsafe { raw::mla_head_gemm(&params, stream) }),
            _memory: memory,
        }
    }

    /// Makes a copy of rows from an engine's own order to that of a step, or back. Some rows are
    /// not copied, and columns may be strided.
    fn copy_rows(&mut self) -> Case {
        let mut memory = Memory::default();
        let bytes = self.pick(&[2, 4]);
        let rows = self.pick(&[1, 7, 64, 500]);
        let heads = self.pick(&[1, 16, 128]);
        let width = self.pick(&[1, 33, 64, 192, 512]);
        let padding = self.pick(&[0, 0, 1, 8]);
        let to_rows = rows + self.pick(&[0, 3, 300]);
        let elements = rows * heads * width;
        let from = self.random(&mut memory, elements * bytes, Values::Bf16);
        let to_bytes = (to_rows * heads * (width + padding) * bytes).next_multiple_of(4);
        let to = self.machine.zeros(&mut memory, to_bytes);
        let mut places: Vec<i64> = (0..to_rows as i64).collect();
        places.shuffle(self.rng);
        places.truncate(rows);
        for place in &mut places {
            if self.rng.random_bool(0.1) {
                *place = self.pick(&[-1, to_rows as i64]);
            }
        }
        let params = raw::MlaCopyRowsParams {
            from: from.pointer(),
            places: self.machine.upload(&mut memory, &places).pointer(),
            to: to.pointer(),
            rows: rows as i64,
            to_rows: to_rows as i64,
            heads: heads as i64,
            width: width as i64,
            from_strides: [(heads * width) as i64, width as i64, 1],
            to_strides: [
                (heads * (width + padding)) as i64,
                (width + padding) as i64,
                1,
            ],
            element_bytes: bytes as i32,
        };
        Case {
            name: format!(
                "copy rows, {rows} of {heads} x {width} to {to_rows} of {}, {bytes} bytes",
                width + padding
            ),
            outputs: vec![to],
            // SAFETY: as in `Call::case`. Places within the tensor are all different.
            launch: Box::new(move |stream| unsafe { raw::mla_copy_rows(&params, stream) }),
            _memory: memory,
        }
    }

    fn dequantize(&mut self) -> Case {
        let mut memory = Memory::default();
        let (dtype, bytes) = self.pick(&[
            (raw::MLA_DTYPE_BF16, 2),
            (raw::MLA_DTYPE_F16, 2),
            (raw::MLA_DTYPE_F32, 4),
        ]);
        let rows: usize = self.pick(&[1, 100, 128, 513]);
        let columns: usize = self.pick(&[1, 127, 512, 520]);
        let first_row = self.pick(&[0, 0, 64, 127]);
        let blocks = (first_row + rows).div_ceil(128) * columns.div_ceil(128);
        let codes = self.random(&mut memory, rows * columns, Values::E4m3);
        let scales = self.random(&mut memory, blocks * 4, Values::F32);
        let out = self
            .machine
            .zeros(&mut memory, (rows * columns * bytes).next_multiple_of(4));
        let params = raw::MlaDequantizeParams {
            codes: codes.pointer(),
            scales: scales.pointer(),
            out: out.pointer(),
            out_row_stride: columns as i64,
            rows: rows as i64,
            columns: columns as i64,
            first_row: first_row as i32,
            dtype: dtype as i32,
        };
        Case {
            name: format!("dequantize {rows} x {columns} from row {first_row} to dtype {dtype}"),
            outputs: vec![out],
            // SAFETY: as in `Call::case`, with a scale for each block of 128 x 128.
            launch: Box::new(move |stream| unsafe { raw::mla_dequantize(&params, stream) }),
            _memory: memory,
        }
    }
}
