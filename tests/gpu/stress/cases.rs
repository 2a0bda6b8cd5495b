//! Random problems for each kernel, as calls of the C interface.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::null;

use mla_kernels::raw::{self, MlaStatus};
use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use super::machine::{Machine, Memory, Region, Values};

/// A problem, and the outputs of its launch.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) outputs: Vec<Region>,
    launch: Box<dyn Fn(*mut c_void) -> MlaStatus>,
    // The launch has addresses in it.
    _memory: Memory,
}

impl Case {
    pub(super) fn enqueue(&self, machine: &Machine) {
        let status = (self.launch)(machine.raw_stream());
        assert_eq!(status.code, raw::MLA_OK as i32, "{}: refused", self.name);
    }
}

/// A kernel, and the workspace that all of its cases share: the next launch finds the state that
/// the one before left there.
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
        let mut draws = Draw {
            machine,
            rng,
            workspace: Workspace {
                region: machine.zeros(&mut workspace, WORKSPACE_BYTES),
                fresh: Cell::new(true),
            },
        };
        let cases = (0..cases).map(|at| draw(&mut draws, at)).collect();
        kernels.push(Kernel {
            name,
            cases,
            _workspace: workspace,
        });
    };
    let bf16 = Type::Bf16;
    let f16 = Type::F16;
    #[cfg(feature = "sm90")]
    {
        use Rows::{DsMla, Fp8, Same};
        add("sm90 sparse, bf16, up to 32 heads", &mut |d, at| match at {
            0 => d.two_lists(bf16, Same, 32, 528, 132),
            1 => d.two_lists(bf16, Same, 16, 528, 132),
            2 => d.padded_list(bf16),
            _ => d.sparse(SPARSE_90, bf16, Same, &[1, 5, 8, 12, 16, 20, 32]),
        });
        add("sm90 sparse, f16, up to 32 heads", &mut |d, _| {
            d.sparse(SPARSE_90, f16, Same, &[1, 5, 8, 12, 16, 20, 32])
        });
        add("sm90 sparse, bf16, more heads", &mut |d, _| {
            d.sparse(SPARSE_90, bf16, Same, &[33, 48, 63, 64, 65, 96, 127, 128])
        });
        add("sm90 sparse, e4m3", &mut |d, at| match at {
            0 => d.two_lists(bf16, Fp8, 128, 264, 66),
            1 => d.gaps(bf16, Fp8, 16),
            2 => d.gaps(bf16, Fp8, 32),
            _ => d.sparse(SPARSE_90, bf16, Fp8, &HEADS),
        });
        add("sm90 sparse, fp8_ds_mla, bf16", &mut |d, at| match at {
            0 => d.two_lists(bf16, DsMla, 128, 264, 66),
            1 => d.gaps(bf16, DsMla, 16),
            _ => d.sparse(SPARSE_90, bf16, DsMla, &HEADS),
        });
        add("sm90 sparse, fp8_ds_mla, f16", &mut |d, _| {
            d.sparse(SPARSE_90, f16, DsMla, &HEADS)
        });
        add("sm90 decode, bf16", &mut |d, _| {
            d.decode(DECODE_90, bf16, Same)
        });
        add("sm90 decode, f16", &mut |d, _| {
            d.decode(DECODE_90, f16, Same)
        });
        add("sm90 decode, e4m3", &mut |d, _| {
            d.decode(DECODE_90, bf16, Fp8)
        });
        add("sm90 prefill (128, 64, 128)", &mut |d, _| {
            d.prefill(PREFILL_90, bf16, [128, 64, 128])
        });
        add("sm90 prefill (192, 64, 256)", &mut |d, _| {
            d.prefill(PREFILL_90, f16, [192, 64, 256])
        });
        add("sm90 prefill (64, 32, 64)", &mut |d, _| {
            d.prefill(PREFILL_90, bf16, [64, 32, 64])
        });
        add("index logits", &mut |d, _| d.logits());
        add("top-k", &mut |d, _| d.topk());
    }
    #[cfg(feature = "sm80")]
    {
        use Rows::{DsMla, Fp8, Same};
        add("sm80 sparse", &mut |d, _| {
            d.sparse(SPARSE_80, bf16, Same, &HEADS)
        });
        add("sm80 sparse, fp8_ds_mla", &mut |d, _| {
            d.sparse(SPARSE_80, f16, DsMla, &HEADS)
        });
        add("sm80 decode, bf16", &mut |d, _| {
            d.decode(DECODE_80, bf16, Same)
        });
        add("sm80 decode, e4m3", &mut |d, _| {
            d.decode(DECODE_80, f16, Fp8)
        });
        add("sm80 prefill (128, 64, 128)", &mut |d, _| {
            d.prefill(PREFILL_80, bf16, [128, 64, 128])
        });
    }
    add("cache write", &mut |d, _| d.cache_write());
    add("head product", &mut |d, _| d.head_product());
    kernels
}

const HEADS: [i32; 14] = [1, 5, 8, 12, 16, 20, 32, 33, 48, 64, 65, 96, 127, 128];
/// Size of a workspace: more than any launch here needs.
const WORKSPACE_BYTES: usize = 256 << 20;
/// Leading bytes of a workspace that are zero between launches; each kernel's are fewer.
const COUNTER_BYTES: usize = 8192;
const LATENT: usize = 512;
const ROPE: usize = 64;

/// The function that launches, given parameters, and a workspace and its bytes.
struct Launch<P> {
    family: &'static str,
    call: unsafe fn(&P, Region, *mut c_void) -> MlaStatus,
}

#[cfg(feature = "sm90")]
const SPARSE_90: Launch<raw::MlaSparseParams> = Launch {
    family: "sm90",
    // SAFETY: as the function's caller owes.
    call: |p, _, stream| unsafe { raw::mla_sparse_sm90(p, stream) },
};
#[cfg(feature = "sm90")]
const DECODE_90: Launch<raw::MlaDecodeParams> = Launch {
    family: "sm90",
    // SAFETY: as the function's caller owes.
    call: |p, _, stream| unsafe { raw::mla_decode_sm90(p, stream) },
};
#[cfg(feature = "sm90")]
const PREFILL_90: Launch<raw::MlaPrefillParams> = Launch {
    family: "sm90",
    // SAFETY: as the function's caller owes.
    call: |p, _, stream| unsafe { raw::mla_prefill_sm90(p, stream) },
};
#[cfg(feature = "sm80")]
const SPARSE_80: Launch<raw::MlaSparseParams> = Launch {
    family: "sm80",
    // SAFETY: as the function's caller owes; null limits are those of the device.
    call: |p, workspace, stream| unsafe {
        raw::mla_sparse_sm80(p, null(), workspace.pointer(), workspace.bytes, stream)
    },
};
#[cfg(feature = "sm80")]
const DECODE_80: Launch<raw::MlaDecodeParams> = Launch {
    family: "sm80",
    // SAFETY: as the function's caller owes; null limits are those of the device.
    call: |p, _, stream| unsafe { raw::mla_decode_sm80(p, null(), stream) },
};
#[cfg(feature = "sm80")]
const PREFILL_80: Launch<raw::MlaPrefillParams> = Launch {
    family: "sm80",
    // SAFETY: as the function's caller owes; null limits are those of the device.
    call: |p, _, stream| unsafe { raw::mla_prefill_sm80(p, null(), stream) },
};

#[derive(Clone, Copy, Debug)]
enum Type {
    Bf16,
    F16,
}

impl Type {
    fn number(self) -> i32 {
        match self {
            Self::Bf16 => raw::MLA_DTYPE_BF16 as i32,
            Self::F16 => raw::MLA_DTYPE_F16 as i32,
        }
    }
    fn values(self) -> Values {
        match self {
            Self::Bf16 => Values::Bf16,
            Self::F16 => Values::F16,
        }
    }
}

/// The rows of a cache.
#[derive(Clone, Copy, Debug)]
enum Rows {
    Same,
    Fp8,
    DsMla,
}

impl Rows {
    fn number(self, of: Type) -> i32 {
        (match (self, of) {
            (Self::Same, Type::Bf16) => raw::MLA_CACHE_BF16,
            (Self::Same, Type::F16) => raw::MLA_CACHE_F16,
            (Self::Fp8, _) => raw::MLA_CACHE_FP8,
            (Self::DsMla, _) => raw::MLA_CACHE_FP8_DS_MLA,
        }) as i32
    }
    fn bytes(self) -> usize {
        match self {
            Self::Same => (LATENT + ROPE) * 2,
            Self::Fp8 => LATENT + ROPE,
            Self::DsMla => 656,
        }
    }
    fn values(self, of: Type) -> Values {
        match self {
            Self::Same => of.values(),
            Self::Fp8 => Values::E4m3,
            Self::DsMla => Values::DsMla,
        }
    }
    /// Bytes of a latent, behind which the rotary key lies.
    fn latent_bytes(self) -> usize {
        match self {
            Self::Same => LATENT * 2,
            Self::Fp8 => LATENT,
            Self::DsMla => 528,
        }
    }
    /// The unit of a dense cache's strides in bytes.
    fn unit(self) -> usize {
        match self {
            Self::Same => 2,
            Self::Fp8 | Self::DsMla => 1,
        }
    }
}

/// A workspace, whose part behind the counters is poisoned before its first use.
struct Workspace {
    region: Region,
    fresh: Cell<bool>,
}

struct Draw<'a> {
    machine: &'a Machine,
    rng: &'a mut StdRng,
    workspace: Workspace,
}

/// Lists of slots, token by token, and how many entries of each count.
struct Lists {
    width: usize,
    entries: Vec<i32>,
    counts: Option<Vec<i32>>,
}

/// The heads of a sparse problem, the pages of its caches, and the lists of one or both.
struct Listed {
    heads: i32,
    pages: i32,
    first: Lists,
    second: Option<Lists>,
}

impl Draw<'_> {
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.random_range(0..of.len())]
    }

    fn random(&mut self, memory: &mut Memory, bytes: usize, values: Values) -> Region {
        let seed = self.rng.random();
        self.machine.random(memory, bytes, values, seed)
    }

    fn workspace(&self) -> Region {
        if self.workspace.fresh.replace(false) {
            self.machine
                .fill(self.workspace.region, COUNTER_BYTES, 0xff);
        }
        self.workspace.region
    }

    fn long_tailed(&mut self, low: i32, high: i32) -> i32 {
        let (low, high) = (f64::from(low).ln(), f64::from(high).ln());
        self.rng.random_range(low..=high).exp() as i32
    }

    /// A list for each token: padded at its end, with gaps, scattered, of one slot, or empty.
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

    /// Lists whose first entries are valid, as many as `keys` says of each token.
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
        of: Type,
        rows: Rows,
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
        self.sparse_of(launch, of, rows, listed)
    }

    /// Lists in two caches, of different lengths in turn. The first `first` tokens, one for each
    /// CTA, have 128 entries in one cache and 552 in the other; the next ones have 40 in each, and
    /// the rest have whole tiles of 128.
    #[cfg(feature = "sm90")]
    fn two_lists(&mut self, of: Type, rows: Rows, heads: i32, tokens: usize, first: usize) -> Case {
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
        let listed = Listed {
            heads,
            pages: 100,
            first: one,
            second: Some(two),
        };
        self.sparse_of(SPARSE_90, of, rows, listed)
    }

    /// Makes a case without a second cache. Each CTA has three padded lists: a long one, one of 40
    /// keys, and one of two tiles.
    #[cfg(feature = "sm90")]
    fn padded_list(&mut self, of: Type) -> Case {
        let keys: Vec<_> = (0..396).map(|token| [296, 40, 128][token / 132]).collect();
        let lists = self.prefixes(2048, 6400, &keys, false);
        let listed = Listed {
            heads: 32,
            pages: 100,
            first: lists,
            second: None,
        };
        self.sparse_of(SPARSE_90, of, Rows::Same, listed)
    }

    /// Makes a case without a second cache. Each list has twelve times 40 valid entries before a
    /// gap, and whole tiles behind.
    #[cfg(feature = "sm90")]
    fn gaps(&mut self, of: Type, rows: Rows, heads: i32) -> Case {
        let mut lists = self.prefixes(4096, 6400, &[4096; 132], false);
        for list in lists.entries.chunks_mut(4096) {
            for gap in list.chunks_mut(256).take(12) {
                gap[40..].fill(-1);
            }
        }
        let listed = Listed {
            heads,
            pages: 100,
            first: lists,
            second: None,
        };
        self.sparse_of(SPARSE_90, of, rows, listed)
    }

    fn sparse_of(
        &mut self,
        launch: Launch<raw::MlaSparseParams>,
        of: Type,
        rows: Rows,
        listed: Listed,
    ) -> Case {
        let Listed {
            heads,
            pages,
            first,
            second,
        } = listed;
        let mut memory = Memory::default();
        let tokens = first.entries.len() / first.width;
        let values = tokens * heads as usize;
        let q = self.random(&mut memory, values * (LATENT + ROPE) * 2, of.values());
        let out = self.machine.zeros(&mut memory, values * LATENT * 2);
        let lse = self.machine.zeros(&mut memory, values * 4);
        let mut upload = |draw: &mut Self, lists: &Lists| {
            let bytes = pages as usize * 64 * rows.bytes();
            let cache = draw.random(&mut memory, bytes, rows.values(of));
            raw::MlaListedCache {
                cache: cache.pointer::<c_void>(),
                cache_rope: cache
                    .pointer::<u8>()
                    .wrapping_add(rows.latent_bytes())
                    .cast(),
                lists: draw.machine.upload(&mut memory, &lists.entries).pointer(),
                counts: lists.counts.as_ref().map_or(null(), |counts| {
                    draw.machine.upload(&mut memory, counts).pointer()
                }),
                cache_page_stride: 64 * rows.bytes() as i64,
                cache_slot_stride: rows.bytes() as i64,
                cache_rope_page_stride: 64 * rows.bytes() as i64,
                cache_rope_slot_stride: rows.bytes() as i64,
                list_stride: lists.width as i64,
                pages: i64::from(pages),
                width: lists.width as i32,
                page_size: 64,
            }
        };
        let one = upload(self, &first);
        let two = second.as_ref().map(|lists| upload(self, lists));
        let name = format!(
            "{} sparse {of:?} {rows:?}, {heads} heads, {tokens} tokens, width {} and {}, counts {}",
            launch.family,
            first.width,
            second.as_ref().map_or(0, |lists| lists.width),
            first.counts.is_some(),
        );
        let params = raw::MlaSparseParams {
            q_latent: q.pointer(),
            q_rope: q.pointer::<u16>().wrapping_add(LATENT).cast(),
            cache: one.cache,
            cache_rope: one.cache_rope,
            lists: one.lists,
            counts: one.counts,
            second: two.unwrap_or_default(),
            out: out.pointer(),
            lse: lse.pointer(),
            q_latent_token_stride: (heads as usize * (LATENT + ROPE)) as i64,
            q_latent_head_stride: (LATENT + ROPE) as i64,
            q_rope_token_stride: (heads as usize * (LATENT + ROPE)) as i64,
            q_rope_head_stride: (LATENT + ROPE) as i64,
            cache_page_stride: one.cache_page_stride,
            cache_slot_stride: one.cache_slot_stride,
            cache_rope_page_stride: one.cache_rope_page_stride,
            cache_rope_slot_stride: one.cache_rope_slot_stride,
            list_stride: one.list_stride,
            out_token_stride: (heads as usize * LATENT) as i64,
            out_head_stride: LATENT as i64,
            lse_head_stride: tokens as i64,
            pages: one.pages,
            tokens: tokens as i32,
            heads,
            width: one.width,
            page_size: one.page_size,
            latent_dim: LATENT as i32,
            rope_dim: ROPE as i32,
            q_dtype: of.number(),
            cache_format: rows.number(of),
            softmax_scale: 0.04,
            cache_scale: 0.3,
            ..raw::MlaSparseParams::default()
        };
        let workspace = self.workspace();
        Case {
            name,
            outputs: vec![out, lse],
            // SAFETY: all addresses are of this case's memory or of the workspace, as large as the
            // extents and strides say.
            launch: Box::new(move |stream| unsafe { (launch.call)(&params, workspace, stream) }),
            _memory: memory,
        }
    }

    fn decode(&mut self, launch: Launch<raw::MlaDecodeParams>, of: Type, rows: Rows) -> Case {
        let mut memory = Memory::default();
        let requests = self.pick(&[1, 3, 8, 33, 100]);
        let heads = self.pick(&[1, 8, 16, 20, 32, 64, 96, 128]);
        let query_len = self.pick(&[1, 1, 2, 4]);
        let longest = if requests > 30 { 600 } else { 6000 };
        let lens: Vec<i32> = (0..requests)
            .map(|_| self.long_tailed(1, longest).max(query_len))
            .collect();
        let max_pages = lens.iter().max().unwrap() / 64 + 2;
        let pages = requests * max_pages;
        let mut table: Vec<i32> = (0..pages).collect();
        table.shuffle(self.rng);
        let tokens = (requests * query_len) as usize;
        let values = tokens * heads as usize;
        let q = self.random(&mut memory, values * (LATENT + ROPE) * 2, of.values());
        let bytes = pages as usize * 64 * rows.bytes();
        let cache = self.random(&mut memory, bytes, rows.values(of));
        let out = self.machine.zeros(&mut memory, values * LATENT * 2);
        let lse = self.machine.zeros(&mut memory, values * 4);
        let workspace = self.workspace();
        let params = raw::MlaDecodeParams {
            q_latent: q.pointer(),
            q_rope: q.pointer::<u16>().wrapping_add(LATENT).cast(),
            cache: cache.pointer(),
            cache_rope: cache
                .pointer::<u8>()
                .wrapping_add(rows.latent_bytes())
                .cast(),
            block_table: self.machine.upload(&mut memory, &table).pointer(),
            kv_lens: self.machine.upload(&mut memory, &lens).pointer(),
            out: out.pointer(),
            lse: lse.pointer(),
            workspace: workspace.pointer(),
            workspace_bytes: workspace.bytes,
            q_latent_token_stride: (heads as usize * (LATENT + ROPE)) as i64,
            q_latent_head_stride: (LATENT + ROPE) as i64,
            q_rope_token_stride: (heads as usize * (LATENT + ROPE)) as i64,
            q_rope_head_stride: (LATENT + ROPE) as i64,
            cache_page_stride: (64 * rows.bytes() / rows.unit()) as i64,
            cache_slot_stride: (rows.bytes() / rows.unit()) as i64,
            cache_rope_page_stride: (64 * rows.bytes() / rows.unit()) as i64,
            cache_rope_slot_stride: (rows.bytes() / rows.unit()) as i64,
            block_table_stride: i64::from(max_pages),
            out_token_stride: (heads as usize * LATENT) as i64,
            out_head_stride: LATENT as i64,
            lse_head_stride: tokens as i64,
            pages: i64::from(pages),
            requests,
            tokens: tokens as i32,
            heads,
            query_len,
            page_size: 64,
            max_pages,
            latent_dim: LATENT as i32,
            rope_dim: ROPE as i32,
            q_dtype: of.number(),
            cache_format: rows.number(of),
            causal: 1,
            softmax_scale: 0.04,
            cache_scale: 0.3,
            ..raw::MlaDecodeParams::default()
        };
        Case {
            name: format!(
                "{} decode {of:?} {rows:?}, {heads} heads, {query_len} tokens of {requests} \
                 requests, lengths up to {}",
                launch.family,
                lens.iter().max().unwrap()
            ),
            outputs: vec![out, lse],
            // SAFETY: as in `sparse_of`; lengths and pages are within the table and the cache.
            launch: Box::new(move |stream| unsafe { (launch.call)(&params, workspace, stream) }),
            _memory: memory,
        }
    }

    fn prefill(
        &mut self,
        launch: Launch<raw::MlaPrefillParams>,
        of: Type,
        dims: [usize; 3],
    ) -> Case {
        let mut memory = Memory::default();
        let [nope, rope, value] = dims;
        let heads = self.pick(&[1, 4, 8, 16, 40, 128]);
        let requests = self.pick(&[1, 2, 5, 20]);
        let causal = self.rng.random_bool(0.5);
        let max = if heads > 16 { 200 } else { 1500 };
        let queries: Vec<i32> = (0..requests).map(|_| self.long_tailed(1, max)).collect();
        let keys: Vec<i32> = queries
            .iter()
            .map(|&q| {
                if causal {
                    q
                } else {
                    q + self.long_tailed(1, 2000)
                }
            })
            .collect();
        let starts = |lens: &[i32]| -> Vec<i32> {
            std::iter::once(0)
                .chain(lens.iter().scan(0, |sum, len| {
                    *sum += len;
                    Some(*sum)
                }))
                .collect()
        };
        let (query_starts, key_starts) = (starts(&queries), starts(&keys));
        let (query_tokens, key_tokens) = (query_starts[requests], key_starts[requests]);
        let many = heads as usize;
        let (all_queries, all_keys) = (query_tokens as usize * many, key_tokens as usize * many);
        let query = self.random(&mut memory, all_queries * (nope + rope) * 2, of.values());
        let key = self.random(&mut memory, all_keys * (nope + rope) * 2, of.values());
        let values = self.random(&mut memory, all_keys * value * 2, of.values());
        let out = self.machine.zeros(&mut memory, all_queries * value * 2);
        let lse = self.machine.zeros(&mut memory, all_queries * 4);
        let workspace = self.workspace();
        let params = raw::MlaPrefillParams {
            query: query.pointer(),
            key_nope: key.pointer(),
            key_rope: key.pointer::<u16>().wrapping_add(nope).cast(),
            value: values.pointer(),
            out: out.pointer(),
            lse: lse.pointer(),
            cu_query_lens: self.machine.upload(&mut memory, &query_starts).pointer(),
            cu_key_lens: self.machine.upload(&mut memory, &key_starts).pointer(),
            workspace: workspace.pointer(),
            workspace_bytes: workspace.bytes,
            query_token_stride: (many * (nope + rope)) as i64,
            query_head_stride: (nope + rope) as i64,
            key_nope_token_stride: (many * (nope + rope)) as i64,
            key_nope_head_stride: (nope + rope) as i64,
            key_rope_token_stride: (many * (nope + rope)) as i64,
            key_rope_head_stride: (nope + rope) as i64,
            value_token_stride: (many * value) as i64,
            value_head_stride: value as i64,
            out_token_stride: (many * value) as i64,
            out_head_stride: value as i64,
            lse_head_stride: i64::from(query_tokens),
            query_tokens,
            key_tokens,
            requests: requests as i32,
            heads,
            max_query_len: *queries.iter().max().unwrap(),
            max_key_len: *keys.iter().max().unwrap(),
            nope_dim: nope as i32,
            rope_dim: rope as i32,
            value_dim: value as i32,
            dtype: of.number(),
            causal: i32::from(causal),
            softmax_scale: 0.07,
        };
        Case {
            name: format!(
                "{} prefill {of:?} {dims:?}, {heads} heads, {query_tokens} tokens of {requests} \
                 requests, {key_tokens} keys, causal {causal}",
                launch.family
            ),
            outputs: vec![out, lse],
            // SAFETY: as in `sparse_of`; the starts rise from 0 to the tokens.
            launch: Box::new(move |stream| unsafe { (launch.call)(&params, workspace, stream) }),
            _memory: memory,
        }
    }

    /// Requests of the indexer: where query tokens begin, lengths, and a table of pages of 64.
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
        let starts = std::iter::once(0)
            .chain(queries.iter().scan(0, |sum, q| {
                *sum += q;
                Some(*sum)
            }))
            .collect();
        let max_pages = lens.iter().max().unwrap() / 64 + 1;
        let mut table: Vec<i32> = (0..requests * max_pages).collect();
        table.shuffle(self.rng);
        (starts, lens, table, max_pages)
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
        // A page's scales lie behind its values; e4m3 bytes of this kind are finite numbers as f32,
        // too.
        let cache = self.random(&mut memory, table.len() * 64 * 132, Values::E4m3);
        let logits = self.machine.zeros(&mut memory, rows * columns * 4);
        let params = raw::MlaIndexLogitsParams {
            queries: queries.pointer(),
            weights: weights.pointer(),
            cache: cache.pointer(),
            query_starts: self.machine.upload(&mut memory, &starts).pointer(),
            seq_lens: self.machine.upload(&mut memory, &lens).pointer(),
            block_table: self.machine.upload(&mut memory, &table).pointer(),
            logits: logits.pointer(),
            page_stride: 64 * 132,
            block_table_stride: i64::from(max_pages),
            logits_stride: columns as i64,
            pages: table.len() as i64,
            rows: rows as i32,
            first_token: 0,
            requests: lens.len() as i32,
            columns: columns as i32,
            max_pages,
            page_size: 64,
            heads: heads as i32,
            width: 128,
            after_queries: 0,
        };
        Case {
            name: format!("index logits, {heads} heads, {rows} rows, lengths {lens:?}"),
            outputs: vec![logits],
            // SAFETY: as in `sparse_of`.
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
        let params = raw::MlaTopkParams {
            logits: logits.pointer(),
            query_starts: self.machine.upload(&mut memory, &starts).pointer(),
            seq_lens: self.machine.upload(&mut memory, &lens).pointer(),
            block_table: self.machine.upload(&mut memory, &table).pointer(),
            lists: lists.pointer(),
            logits_stride: columns as i64,
            block_table_stride: i64::from(max_pages),
            list_stride: topk as i64,
            pages: table.len() as i64,
            rows: rows as i32,
            first_token: 0,
            requests: lens.len() as i32,
            columns: columns as i32,
            topk: topk as i32,
            max_pages,
            page_size: 64,
            after_logits: 0,
        };
        Case {
            name: format!("top-k {topk}, {rows} rows, lengths {lens:?}"),
            outputs: vec![lists],
            // SAFETY: as in `sparse_of`.
            launch: Box::new(move |stream| unsafe { raw::mla_topk_sm90(&params, stream) }),
            _memory: memory,
        }
    }

    fn cache_write(&mut self) -> Case {
        let mut memory = Memory::default();
        let of = self.pick(&[Type::Bf16, Type::F16]);
        let rows = self.pick(&[Rows::Same, Rows::Fp8, Rows::DsMla]);
        let tokens = self.pick(&[1, 7, 64, 500]);
        let latent = self.random(&mut memory, tokens * LATENT * 2, of.values());
        let rope = self.random(&mut memory, tokens * ROPE * 2, of.values());
        let mut slots: Vec<i64> = (0..1024).collect();
        slots.shuffle(self.rng);
        slots.truncate(tokens);
        let cache = self.machine.zeros(&mut memory, 1024 * rows.bytes());
        let params = raw::MlaCacheWriteParams {
            latent: latent.pointer(),
            rope: rope.pointer(),
            slots: self.machine.upload_long(&mut memory, &slots).pointer(),
            cache: cache.pointer(),
            cache_rope: cache
                .pointer::<u8>()
                .wrapping_add(rows.latent_bytes())
                .cast(),
            latent_token_stride: LATENT as i64,
            rope_token_stride: ROPE as i64,
            cache_page_stride: 64 * rows.bytes() as i64,
            cache_slot_stride: rows.bytes() as i64,
            cache_rope_page_stride: 64 * rows.bytes() as i64,
            cache_rope_slot_stride: rows.bytes() as i64,
            pages: 16,
            tokens: tokens as i32,
            page_size: 64,
            latent_dim: LATENT as i32,
            rope_dim: ROPE as i32,
            dtype: of.number(),
            cache_format: rows.number(of),
            cache_scale: 0.3,
            ..raw::MlaCacheWriteParams::default()
        };
        Case {
            name: format!("cache write, {of:?}, {rows:?}, {tokens} tokens"),
            outputs: vec![cache],
            // SAFETY: as in `sparse_of`; slots differ.
            launch: Box::new(move |stream| unsafe { raw::mla_cache_write(&params, stream) }),
            _memory: memory,
        }
    }

    fn head_product(&mut self) -> Case {
        let mut memory = Memory::default();
        let of = self.pick(&[Type::Bf16, Type::F16]);
        let (k, n) = self.pick(&[(128, 512), (512, 128)]);
        let heads = self.pick(&[1, 16, 128]);
        let tokens = self.pick(&[1, 3, 8, 30]);
        let input = self.random(&mut memory, tokens * heads * k * 2, of.values());
        let weights = self.random(&mut memory, heads * k * n * 2, of.values());
        let out = self.machine.zeros(&mut memory, tokens * heads * n * 2);
        let params = raw::MlaHeadProductParams {
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
            dtype: of.number(),
            ..raw::MlaHeadProductParams::default()
        };
        Case {
            name: format!("head product {k} x {n}, {of:?}, {heads} heads, {tokens} tokens"),
            outputs: vec![out],
            // SAFETY: as in `sparse_of`.
            launch: Box::new(move |stream| unsafe { raw::mla_head_product(&params, stream) }),
            _memory: memory,
        }
    }
}
