//! The raw tier: an engine with a memory pool of its own calls the C interface with addresses,
//! strides and a stream. Nothing here allocates but the pool.
//!
//! ```console
//! $ cargo run --release --features sm90 --example raw_pool
//! ```
//!
//! A step of decodes by hand: cache write, q_nope · W_UK, attention, · W_UV. Every latent is a
//! vector of ones, so whatever the scores, a head's output is the sum of its value weights over the
//! latent.

use std::error::Error;
use std::mem::zeroed;

use half::bf16;
use mla_kernels::device::cudarc::driver::{CudaContext, result};
use mla_kernels::{present_gpu, raw};

const HEADS: usize = 16;
const REQUESTS: usize = 8;
const LEN: usize = 300;
const PAGE: usize = 64;
const PAGES: usize = LEN.div_ceil(PAGE);

/// One allocation, handed out from the front.
struct Pool {
    next: u64,
    end: u64,
}

impl Pool {
    fn take(&mut self, bytes: usize) -> Result<u64, String> {
        let address = self.next.next_multiple_of(256);
        self.next = address + bytes as u64;
        match self.next <= self.end {
            true => Ok(address),
            false => Err(format!("the pool has no {bytes} bytes left")),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    // Without a driver, cudarc would panic.
    present_gpu().map_err(|cause| format!("{cause}; {}", cause.remedy()))?;
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let raw_stream = stream.cu_stream();
    const POOL: usize = 64 << 20;
    // SAFETY: the context is current, and the pool is freed at the end of `main`, after the stream
    // has passed everything.
    let base = unsafe { result::malloc_sync(POOL) }?;
    let mut pool = Pool {
        next: base,
        end: base + POOL as u64,
    };
    // SAFETY: the ranges that it is given come from the pool, and the host's bytes are ordinary
    // memory, which the driver has read when the call returns.
    let upload = |address: u64, bytes: &[u8]| unsafe {
        result::memcpy_htod_async(address, bytes, raw_stream)
    };
    // SAFETY: as above.
    let clear = |address: u64, bytes: usize| unsafe {
        result::memset_d8_async(address, 0, bytes, raw_stream)
    };
    let halves = |values: &[bf16]| -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    };

    // The engine's tensors. Weights as checkpoints have them: [H · (128 + 128), 512].
    let host_weights: Vec<bf16> = (0..HEADS * 256 * 512)
        .map(|at| bf16::from_f32(((at * 7919) % 2001) as f32 * 1e-4 - 0.1))
        .collect();
    let weights = pool.take(2 * host_weights.len())?;
    upload(weights, &halves(&host_weights))?;
    let query = pool.take(2 * REQUESTS * HEADS * 192)?;
    let numbers =
        (0..REQUESTS * HEADS * 192).map(|at| bf16::from_f32((at % 17) as f32 * 0.1 - 0.8));
    upload(query, &halves(&numbers.collect::<Vec<_>>()))?;
    // The rows of all tokens, written into the cache at once, request after request.
    let tokens = REQUESTS * LEN;
    let latent = pool.take(2 * tokens * 512)?;
    upload(latent, &halves(&vec![bf16::ONE; tokens * 512]))?;
    let rope = pool.take(2 * tokens * 64)?;
    let numbers = (0..tokens * 64).map(|at| bf16::from_f32((at % 13) as f32 * 0.1 - 0.6));
    upload(rope, &halves(&numbers.collect::<Vec<_>>()))?;
    let cache = pool.take(2 * REQUESTS * PAGES * PAGE * 576)?;
    let slots: Vec<i64> = (0..tokens)
        .map(|token| (token / LEN * PAGES * PAGE + token % LEN) as i64)
        .collect();
    let slots_at = pool.take(8 * tokens)?;
    upload(slots_at, bytemuck::cast_slice(&slots))?;
    let table: Vec<i32> = (0..(REQUESTS * PAGES) as i32).collect();
    let table_at = pool.take(4 * table.len())?;
    upload(table_at, bytemuck::cast_slice(&table))?;
    let lens = pool.take(4 * REQUESTS)?;
    upload(lens, bytemuck::cast_slice(&[LEN as i32; REQUESTS]))?;
    let absorbed = pool.take(2 * REQUESTS * HEADS * 512)?;
    let attended = pool.take(2 * REQUESTS * HEADS * 512)?;
    let out = pool.take(2 * REQUESTS * HEADS * 128)?;

    // SAFETY: plain numbers and pointers, for which zeros are values.
    let mut write: raw::MlaCacheWriteParams = unsafe { zeroed() };
    write.latent = latent as *const _;
    write.rope = rope as *const _;
    write.slots = slots_at as *const _;
    write.cache = cache as *mut _;
    write.latent_token_stride = 512;
    write.rope_token_stride = 64;
    // Bytes, since rows of some formats are no whole elements.
    write.cache_page_stride = (PAGE * 576 * 2) as i64;
    write.cache_slot_stride = 576 * 2;
    write.pages = (REQUESTS * PAGES) as i64;
    write.tokens = tokens as i32;
    write.page_size = PAGE as i32;
    write.latent_dim = 512;
    write.rope_dim = 64;
    write.dtype = raw::MLA_DTYPE_BF16 as i32;
    write.cache_format = raw::MLA_CACHE_BF16 as i32;
    write.cache_scale = 1.0;

    // q_lat = q_nope · W_UK: neighbours of the weights lie along n.
    let product = raw::MlaHeadProductParams {
        input: query as *const _,
        weights: weights as *const _,
        out: absorbed as *mut _,
        input_token_stride: (HEADS * 192) as i64,
        input_head_stride: 192,
        weights_head_stride: 256 * 512,
        weights_k_stride: 512,
        weights_n_stride: 1,
        out_token_stride: (HEADS * 512) as i64,
        out_head_stride: 512,
        tokens: REQUESTS as i32,
        heads: HEADS as i32,
        k: 128,
        n: 512,
        dtype: raw::MLA_DTYPE_BF16 as i32,
        constant_weights: 1,
    };
    // out = o_lat · W_UV: neighbours lie along k.
    let values = raw::MlaHeadProductParams {
        input: attended as *const _,
        weights: (weights + 2 * 128 * 512) as *const _,
        out: out as *mut _,
        input_token_stride: (HEADS * 512) as i64,
        input_head_stride: 512,
        weights_k_stride: 1,
        weights_n_stride: 512,
        out_token_stride: (HEADS * 128) as i64,
        out_head_stride: 128,
        k: 512,
        n: 128,
        ..product
    };

    // SAFETY: as above.
    let mut decode: raw::MlaDecodeParams = unsafe { zeroed() };
    decode.q_latent = absorbed as *const _;
    decode.q_rope = (query + 2 * 128) as *const _;
    decode.cache = cache as *const _;
    decode.block_table = table_at as *const _;
    decode.kv_lens = lens as *const _;
    decode.out = attended as *mut _;
    decode.q_latent_token_stride = (HEADS * 512) as i64;
    decode.q_latent_head_stride = 512;
    decode.q_rope_token_stride = (HEADS * 192) as i64;
    decode.q_rope_head_stride = 192;
    decode.cache_page_stride = (PAGE * 576) as i64;
    decode.cache_slot_stride = 576;
    decode.block_table_stride = PAGES as i64;
    decode.out_token_stride = (HEADS * 512) as i64;
    decode.out_head_stride = 512;
    decode.pages = (REQUESTS * PAGES) as i64;
    decode.requests = REQUESTS as i32;
    decode.tokens = REQUESTS as i32;
    decode.heads = HEADS as i32;
    decode.query_len = 1;
    decode.page_size = PAGE as i32;
    decode.max_pages = PAGES as i32;
    decode.latent_dim = 512;
    decode.rope_dim = 64;
    decode.q_dtype = raw::MLA_DTYPE_BF16 as i32;
    decode.cache_format = raw::MLA_CACHE_BF16 as i32;
    decode.causal = 1;
    decode.softmax_scale = 192f32.powf(-0.5);
    decode.cache_scale = 1.0;
    let mut workspace_bytes = 0;
    // SAFETY: both are values on this stack.
    raw::check("workspace", unsafe {
        raw::mla_decode_sm90_workspace(&decode, &mut workspace_bytes)
    })?;
    let workspace = pool.take(workspace_bytes)?;
    clear(workspace, raw::MLA_DECODE_COUNTER_BYTES as usize)?;
    decode.workspace = workspace as *mut _;
    decode.workspace_bytes = workspace_bytes;

    let stream_pointer = raw_stream.cast();
    // SAFETY: the context is current; every address is the pool's, holds what its strides and
    // extents say, and stays until the stream has passed the launches.
    unsafe {
        raw::check("load", raw::mla_load_helpers())?;
        raw::check("cache write", raw::mla_cache_write(&write, stream_pointer))?;
        raw::check("W_UK", raw::mla_head_product(&product, stream_pointer))?;
        raw::check("decode", raw::mla_decode_sm90(&decode, stream_pointer))?;
        raw::check("W_UV", raw::mla_head_product(&values, stream_pointer))?;
    }

    let mut host = vec![0u8; 2 * REQUESTS * HEADS * 128];
    // SAFETY: the range is the output's; the copy is waited for before the host's bytes are read.
    unsafe { result::memcpy_dtoh_async(&mut host, out, raw_stream) }?;
    stream.synchronize()?;
    // SAFETY: the pool's address, freed once, after everything that used it.
    unsafe { result::free_sync(base) }?;

    let mut largest = 0f32;
    for (at, bytes) in host.chunks_exact(2).enumerate() {
        let value = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let (head, v) = (at / 128 % HEADS, at % 128);
        let row = (head * 256 + 128 + v) * 512;
        let sum: f32 = host_weights[row..row + 512]
            .iter()
            .map(|w| w.to_f32())
            .sum();
        largest = largest.max((value - sum).abs());
    }
    println!("{REQUESTS} requests of {LEN} tokens: largest error {largest:.1e}");
    // Sums of about 1, rounded to bf16 once or twice.
    if largest < 0.02 {
        Ok(())
    } else {
        Err(format!("an error of {largest}").into())
    }
}
