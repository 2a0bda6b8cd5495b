//! Decodes by their descriptions, beside the library's launches of the same problems.

use half::bf16;
use mla_kernels::Cuda;
use mla_kernels::raw::{self, MlaDecodeParams, MlaStatus};
use mla_runtime::model::KvFormat::{self, BF16, Fp8};
use mla_runtime::model::{DType, MlaDims};

use super::{
    Buffer, LATENT, Numbers, ROPE, agree, at, device, download, download_all, gpu, manifest,
    numbers, pair, run, small, upload, upload_all,
};
use crate::calls;

const REQUESTS: usize = 3;
const PAGE_SIZE: usize = 64;
const MAX_PAGES: usize = 12;
const PAGES: usize = REQUESTS * MAX_PAGES;

struct Decode {
    /// The library's call.
    params: MlaDecodeParams,
    workspace: Buffer,
    /// Outputs by the description, and by the library.
    out: [Buffer; 2],
    lse: [Buffer; 2],
    _inputs: [Buffer; 4],
}

impl Decode {
    /// Draws a causal decode whose cache has values of bf16, or of e4m3 with one scale.
    fn new(gpu: &Cuda, heads: usize, query_len: usize, format: KvFormat) -> Self {
        let rows = REQUESTS * query_len * heads;
        let (slots, row) = (PAGES * PAGE_SIZE, LATENT + ROPE);
        let cache = match format {
            KvFormat::Fp8 => {
                let codes = (0..slots * row).map(|i| ((i * 13 + i / row) % 0x70) as u8);
                upload(gpu, &codes.collect::<Vec<_>>()).unwrap()
            }
            _ => small(gpu, slots * row, 2).0,
        };
        let (query, _) = small(gpu, rows * row, 5);
        let table = (0..PAGES as i32).map(|i| (i * 7) % PAGES as i32);
        let table = upload_all(gpu, &table.collect::<Vec<_>>());
        let lens = upload_all(gpu, &[700i32, 33, 420]);
        let out = pair(gpu, rows * LATENT * 2, 0xff);
        let lse = pair(gpu, rows * 4, 0xff);
        let workspace = upload(gpu, &vec![0; 64 << 20]).unwrap();
        let [heads, query_len] = [heads, query_len].map(|count| count as i32);
        let batch = [REQUESTS as i32, MAX_PAGES as i32];
        let params = MlaDecodeParams {
            q_latent: at(&query) as *const _,
            q_rope: (at(&query) + 2 * LATENT as i64) as *const _,
            cache: at(&cache) as *const _,
            block_table: at(&table) as *const _,
            kv_lens: at(&lens) as *const _,
            out: at(&out[1]) as *mut _,
            lse: at(&lse[1]) as *mut _,
            workspace: at(&workspace) as *mut _,
            workspace_bytes: 64 << 20,
            // The order in which the library multiplies by a power of two makes no difference.
            cache_scale: if format == Fp8 { 0.25 } else { 1.0 },
            ..calls::decode(MlaDims::R1, DType::BF16, format, [heads, query_len], batch)
        };
        Self {
            params,
            workspace,
            out,
            lse,
            _inputs: [cache, query, table, lens],
        }
    }

    /// The numbers that all kernels of decode take under the same names.
    fn numbers(&self) -> Numbers {
        let p = MlaDecodeParams {
            out: at(&self.out[0]) as *mut _,
            lse: at(&self.lse[0]) as *mut _,
            ..self.params
        };
        let mut given = fields! {
            "p.", p;
            q_latent q_rope out lse block_table kv_lens q_latent_token_stride q_latent_head_stride
            q_rope_token_stride q_rope_head_stride out_token_stride out_head_stride lse_head_stride
            block_table_stride requests heads query_len page_size causal
        };
        let scale = p.softmax_scale * p.cache_scale * std::f32::consts::LOG2_E;
        given.extend(numbers([
            ("p.counters", at(&self.workspace)),
            ("p.scale_log2", scale.to_bits().into()),
            ("p.out_scale", p.cache_scale.to_bits().into()),
        ]));
        given
    }

    /// The place of the cache, with strides in bytes. The names of the numbers have a prefix.
    fn cache(&self, prefix: &str) -> Numbers {
        let p = &self.params;
        let bytes = if p.cache_scale == 1.0 { 2 } else { 1 };
        let [slot, page] = [p.cache_slot_stride, p.cache_page_stride].map(|it| it * bytes);
        [
            ("cache", p.cache.addr() as i64),
            ("cache_slot_stride", slot),
            ("cache_page_stride", page),
            ("cache_rope", p.cache.addr() as i64 + LATENT as i64 * bytes),
            ("cache_rope_slot_stride", slot),
            ("cache_rope_page_stride", page),
        ]
        .map(|(name, number)| (format!("{prefix}{name}"), number))
        .into()
    }

    /// Checks that the bits of both launches are the same, and that the counters are 0 after them.
    fn agrees(&self, gpu: &Cuda, call: &str, library: MlaStatus) {
        agree(gpu, call, library, &[&self.out, &self.lse]);
        let workspace = download(gpu, &self.workspace).unwrap();
        assert!(workspace[..4096].iter().all(|&byte| byte == 0), "counters");
        let values: Vec<bf16> = download_all(gpu, &self.out[0]);
        let written = self.params.tokens as usize * self.params.heads as usize * LATENT;
        let mut values = values[..written].iter();
        assert!(values.all(|it| it.is_finite()), "{call}");
    }
}

#[cfg(feature = "sm90")]
#[test]
#[ignore = "needs a Hopper GPU and `cargo xtask cubins`: \
            cargo test -r --features sm90 --test gpu -- --ignored cubins"]
fn hoppers_dense_decode_has_the_librarys_bits_by_its_description_alone() {
    let gpu = &*gpu();
    let manifest = manifest();
    let source = "cuda/sm90/decode/dense/instantiations/bf16.cu";
    // A kernel of each number of rows, of each number of CTAs of a group, and of each cache.
    for (heads, query_len, format, group_ctas, tile) in [
        (8, 1, BF16, 1, "at most 8 rows"),
        (16, 1, BF16, 1, "9 to 16 rows"),
        (16, 2, BF16, 1, "17 to 32 rows"),
        (64, 1, BF16, 1, "33 to 64 rows"),
        (
            128,
            1,
            BF16,
            2,
            "more than 64 rows, group_ctas is 2, more than",
        ),
        (96, 2, BF16, 3, "more than 64 rows, group_ctas is not 2"),
        (16, 1, Fp8, 1, "at most 16 rows"),
        (64, 1, Fp8, 1, "33 to 64 rows"),
        (128, 1, Fp8, 2, "more than 64 rows, group_ctas is 2"),
    ] {
        let decode = Decode::new(gpu, heads, query_len, format);
        let cache = match format {
            Fp8 => "e4m3 with one scale",
            _ => "bf16",
        };
        let call = format!("dense decode of bf16, 512 + 64 wide, from a cache of {cache}: {tile}");
        let [multiprocessors, l2_bytes, ..] = device(gpu);
        let mut given = decode.numbers();
        given.extend(decode.cache(""));
        given.extend(fields!("", decode.params; tokens max_pages pages));
        given.extend(numbers([
            ("group_ctas", group_ctas),
            ("multiprocessors", multiprocessors),
            ("l2_bytes", l2_bytes),
        ]));
        run(gpu, &manifest, [source, &call], &given);
        // SAFETY: the arguments are those of memory that lives until the end of this test.
        let status = unsafe { raw::mla_decode_sm90(&decode.params, gpu.raw_stream()) };
        decode.agrees(gpu, &call, status);
    }
}

#[cfg(feature = "sm80")]
#[test]
#[ignore = "needs a GPU and `cargo xtask cubins`: \
            cargo test -r --features sm80 --test gpu -- --ignored cubins"]
fn portable_decode_has_the_librarys_bits_by_its_description_alone() {
    let gpu = &*gpu();
    let manifest = manifest();
    let [multiprocessors, _, shared_of_cta, shared_of_sm] = device(gpu);
    // A request whose table has room for many pages is no short batch.
    let short = (3, MAX_PAGES);
    let long = (1, 4096);
    for (rows, format, (requests, max_pages), tile, ctas_of_sm) in [
        (16, BF16, short, "32", 2),
        (16, Fp8, short, "32", 3),
        (32, BF16, long, "16", 2),
        (
            64,
            BF16,
            long,
            "32 tokens, roles for warps, which hold 16",
            1,
        ),
        (64, Fp8, long, "16", 1),
    ] {
        let mut decode = Decode::new(gpu, rows, 1, format);
        decode.params.requests = requests;
        decode.params.tokens = requests;
        decode.params.max_pages = max_pages as i32;
        let (file, cache) = match format {
            Fp8 => ("e4m3", "of e4m3 with one scale"),
            _ => ("plain", "of the queries' dtype"),
        };
        let source = format!("cuda/sm80/decode/instantiations/bf16_512_{file}.cu");
        let call = format!(
            "decode of bf16, latents of 512, cache {cache}: tiles of {rows} of p.query_len * \
             p.heads rows, KV tiles of {tile}"
        );
        let mut given = decode.numbers();
        given.extend(decode.cache("p."));
        given.extend(fields!("p.", decode.params; rope_dim));
        given.extend(numbers([
            ("p.slots", (PAGES * PAGE_SIZE) as i64),
            ("p.max_kv_len", i32::MAX.into()),
            ("multiprocessors", multiprocessors),
            ("shared_of_cta", shared_of_cta),
            ("shared_of_sm", shared_of_sm),
            ("ctas_of_sm", ctas_of_sm),
        ]));
        run(gpu, &manifest, [&source, &call], &given);
        let p = &decode.params;
        // SAFETY: the arguments are those of memory that lives until the end of this test.
        let status = unsafe { raw::mla_decode_sm80(p, std::ptr::null(), gpu.raw_stream()) };
        decode.agrees(gpu, &call, status);
    }
}
