//! Decodes by their descriptions, beside the library's launches of the same problems.

use half::bf16;
use mla_kernels::Cuda;
use mla_kernels::raw::{self, MlaDecodeParams};
use serde_json::Value;

use super::{
    Buffer, LATENT, Numbers, PathBuf, ROPE, Result, agree, at, device, download, gpu, manifest,
    numbers, pair, run, small, upload, values,
};

const REQUESTS: usize = 3;
const PAGE_SIZE: usize = 64;
const MAX_PAGES: usize = 12;
const PAGES: usize = REQUESTS * MAX_PAGES;

struct Decode {
    /// The library's call.
    params: MlaDecodeParams,
    buffers: Vec<Buffer>,
    workspace: Buffer,
    /// Outputs by the description, and by the library.
    out: [Buffer; 2],
    lse: [Buffer; 2],
}

impl Decode {
    /// Draws a causal decode whose cache has values of bf16, or of e4m3 with one scale.
    fn new(gpu: &Cuda, heads: usize, query_len: usize, format: i32) -> Self {
        let tokens = REQUESTS * query_len;
        let slots = PAGES * PAGE_SIZE;
        let row = LATENT + ROPE;
        let upload = |bytes: &[u8]| upload(gpu, bytes).unwrap();
        let cache = match format {
            3 => {
                let codes = (0..slots * row).map(|i| ((i * 13 + i / row) % 0x70) as u8);
                upload(&codes.collect::<Vec<_>>())
            }
            _ => small(gpu, slots * row, 2).0,
        };
        let (q_latent, _) = small(gpu, tokens * heads * LATENT, 5);
        let (q_rope, _) = small(gpu, tokens * heads * ROPE, 7);
        let table = (0..PAGES as i32).map(|i| (i * 7) % PAGES as i32);
        let table = upload(bytemuck::cast_slice(&table.collect::<Vec<_>>()));
        let lens = upload(bytemuck::cast_slice(&[700i32, 33, 420]));
        let out = pair(gpu, tokens * heads * LATENT * 2, 0xff);
        let lse = pair(gpu, tokens * heads * 4, 0xff);
        let workspace = upload(&vec![0; 64 << 20]);
        let params = MlaDecodeParams {
            q_latent: at(&q_latent) as *const _,
            q_rope: at(&q_rope) as *const _,
            cache: at(&cache) as *const _,
            block_table: at(&table) as *const _,
            kv_lens: at(&lens) as *const _,
            out: at(&out[1]) as *mut _,
            lse: at(&lse[1]) as *mut _,
            workspace: at(&workspace) as *mut _,
            workspace_bytes: 64 << 20,
            q_latent_token_stride: (heads * LATENT) as i64,
            q_latent_head_stride: LATENT as i64,
            q_rope_token_stride: (heads * ROPE) as i64,
            q_rope_head_stride: ROPE as i64,
            cache_page_stride: (PAGE_SIZE * row) as i64,
            cache_slot_stride: row as i64,
            block_table_stride: MAX_PAGES as i64,
            out_token_stride: (heads * LATENT) as i64,
            out_head_stride: LATENT as i64,
            lse_head_stride: tokens as i64,
            pages: PAGES as i64,
            requests: REQUESTS as i32,
            tokens: tokens as i32,
            heads: heads as i32,
            query_len: query_len as i32,
            page_size: PAGE_SIZE as i32,
            max_pages: MAX_PAGES as i32,
            latent_dim: LATENT as i32,
            rope_dim: ROPE as i32,
            q_dtype: 0,
            cache_format: format,
            causal: 1,
            softmax_scale: 1.0 / 24.0,
            cache_scale: if format == 3 { 0.25 } else { 1.0 },
            // SAFETY: every field is a number or a pointer.
            ..unsafe { std::mem::zeroed() }
        };
        Self {
            params,
            buffers: vec![cache, q_latent, q_rope, table, lens],
            workspace,
            out,
            lse,
        }
    }

    /// The numbers that all kernels of decode take under the same names.
    fn numbers(&self) -> Numbers {
        let p = &self.params;
        let cache_scale = p.cache_scale;
        let scale = p.softmax_scale * cache_scale * std::f32::consts::LOG2_E;
        numbers([
            ("p.q_latent", at(&self.buffers[1])),
            ("p.q_rope", at(&self.buffers[2])),
            ("p.out", at(&self.out[0])),
            ("p.lse", at(&self.lse[0])),
            ("p.block_table", at(&self.buffers[3])),
            ("p.kv_lens", at(&self.buffers[4])),
            ("p.counters", at(&self.workspace)),
            ("p.q_latent_token_stride", p.q_latent_token_stride),
            ("p.q_latent_head_stride", p.q_latent_head_stride),
            ("p.q_rope_token_stride", p.q_rope_token_stride),
            ("p.q_rope_head_stride", p.q_rope_head_stride),
            ("p.out_token_stride", p.out_token_stride),
            ("p.out_head_stride", p.out_head_stride),
            ("p.lse_head_stride", p.lse_head_stride),
            ("p.block_table_stride", p.block_table_stride),
            ("p.requests", p.requests.into()),
            ("p.heads", p.heads.into()),
            ("p.query_len", p.query_len.into()),
            ("p.page_size", p.page_size.into()),
            ("p.causal", 1),
            ("p.scale_log2", scale.to_bits().into()),
            ("p.out_scale", cache_scale.to_bits().into()),
        ])
    }

    /// Launches by the description, and then by the library. The bits must be the same.
    fn agrees<const N: usize>(
        &self,
        gpu: &Cuda,
        manifest: &(PathBuf, Value),
        kernel: [&str; 2],
        more: [(&str, i64); N],
        library: impl FnOnce(&MlaDecodeParams) -> Result<()>,
    ) {
        let mut given = self.numbers();
        given.extend(numbers(more));
        run(gpu, manifest, kernel, &given);
        let workspace = download(gpu, &self.workspace).unwrap();
        assert!(workspace[..4096].iter().all(|&byte| byte == 0), "counters");
        let values: Vec<bf16> = values(gpu, &self.out[0]);
        let written = self.params.tokens as usize * self.params.heads as usize * LATENT;
        let mut values = values[..written].iter();
        assert!(values.all(|it| it.is_finite()), "{kernel:?}");
        agree(
            gpu,
            kernel[1],
            library(&self.params),
            &[&self.out, &self.lse],
        );
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
        (8, 1, 2, 1, "at most 8 rows"),
        (16, 1, 2, 1, "9 to 16 rows"),
        (16, 2, 2, 1, "17 to 32 rows"),
        (64, 1, 2, 1, "33 to 64 rows"),
        (
            128,
            1,
            2,
            2,
            "more than 64 rows, group_ctas is 2, more than",
        ),
        (96, 2, 2, 3, "more than 64 rows, group_ctas is not 2"),
        (16, 1, 3, 1, "at most 16 rows"),
        (64, 1, 3, 1, "33 to 64 rows"),
        (128, 1, 3, 2, "more than 64 rows, group_ctas is 2"),
    ] {
        let decode = Decode::new(gpu, heads, query_len, format);
        let p = &decode.params;
        let (cache, bytes) = match format {
            3 => ("e4m3 with one scale", 1),
            _ => ("bf16", 2),
        };
        let call = format!("dense decode of bf16, 512 + 64 wide, from a cache of {cache}: {tile}");
        let address = p.cache.addr() as i64;
        let [slot, page] = [p.cache_slot_stride, p.cache_page_stride].map(|it| it * bytes);
        let [multiprocessors, l2_bytes, ..] = device(gpu);
        let more = [
            ("group_ctas", group_ctas),
            ("multiprocessors", multiprocessors),
            ("l2_bytes", l2_bytes),
            ("tokens", p.tokens.into()),
            ("max_pages", p.max_pages.into()),
            ("pages", p.pages),
            ("cache", address),
            ("cache_slot_stride", slot),
            ("cache_page_stride", page),
            ("cache_rope", address + LATENT as i64 * bytes),
            ("cache_rope_slot_stride", slot),
            ("cache_rope_page_stride", page),
        ];
        // SAFETY: the arguments are those of memory that lives until the end of this test.
        let library =
            |p: &_| unsafe { raw::check("decode", raw::mla_decode_sm90(p, gpu.raw_stream())) };
        decode.agrees(gpu, &manifest, [source, &call], more, library);
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
    for (heads, format, requests, max_pages, file, tile, ctas_of_sm) in [
        (
            16,
            2,
            3,
            MAX_PAGES,
            "plain",
            "16 of p.query_len * p.heads rows, KV tiles of 32",
            2,
        ),
        (
            16,
            3,
            3,
            MAX_PAGES,
            "e4m3",
            "16 of p.query_len * p.heads rows, KV tiles of 32",
            3,
        ),
        (
            32,
            2,
            1,
            4096,
            "plain",
            "32 of p.query_len * p.heads rows, KV tiles of 16",
            2,
        ),
        (
            64,
            2,
            1,
            4096,
            "plain",
            "64 of p.query_len * p.heads rows, KV tiles of 32 tokens, roles for warps, which \
             hold 16",
            1,
        ),
        (
            64,
            3,
            1,
            4096,
            "e4m3",
            "64 of p.query_len * p.heads rows, KV tiles of 16",
            1,
        ),
    ] {
        let mut decode = Decode::new(gpu, heads, 1, format);
        decode.params.requests = requests;
        decode.params.tokens = requests;
        decode.params.max_pages = max_pages as i32;
        let p = &decode.params;
        let (cache, bytes) = match format {
            3 => ("of e4m3 with one scale", 1),
            _ => ("of the queries' dtype", 2),
        };
        let source = format!("cuda/sm80/decode/instantiations/bf16_512_{file}.cu");
        let call = format!("decode of bf16, latents of 512, cache {cache}: tiles of {tile}");
        let address = p.cache.addr() as i64;
        let [slot, page] = [p.cache_slot_stride, p.cache_page_stride].map(|it| it * bytes);
        let more = [
            ("p.cache", address),
            ("p.cache_slot_stride", slot),
            ("p.cache_page_stride", page),
            ("p.cache_rope", address + LATENT as i64 * bytes),
            ("p.cache_rope_slot_stride", slot),
            ("p.cache_rope_page_stride", page),
            ("p.slots", (PAGES * PAGE_SIZE) as i64),
            ("p.max_kv_len", i32::MAX.into()),
            ("p.rope_dim", ROPE as i64),
            ("multiprocessors", multiprocessors),
            ("shared_of_cta", shared_of_cta),
            ("shared_of_sm", shared_of_sm),
            ("ctas_of_sm", ctas_of_sm),
        ];
        let library = |p: &_| {
            // SAFETY: the arguments are those of memory that lives until the end of this test.
            unsafe {
                let launched = raw::mla_decode_sm80(p, std::ptr::null(), gpu.raw_stream());
                raw::check("decode", launched)
            }
        };
        decode.agrees(gpu, &manifest, [&source, &call], more, library);
    }
}
