//! The raw tier. An engine with its own memory pool calls the C interface with addresses, strides
//! and a stream. Only the pool allocates memory.
//!
//! ```console
//! $ cargo run --release --features sm90 --example raw_pool
//! ```
//!
//! A decode step consists of a cache write, the product of q_nope and W_UK, attention, and the
//! product of its output and W_UV. Every latent is a vector of ones. A head's output is therefore
//! the sum of its value weights over the latent, whatever the scores are.

use std::error::Error;
use std::mem::zeroed;

use half::bf16;
use mla_kernels::device::cudarc::driver::sys::CUstream;
use mla_kernels::device::cudarc::driver::{CudaContext, result};
use mla_kernels::{present_gpu, raw};

const HEADS: usize = 16;
const REQUESTS: usize = 8;
const LEN: usize = 300;
const PAGE: usize = 64;
const PAGES: usize = LEN.div_ceil(PAGE);

/// An allocation whose memory is handed out from the front, and the stream that fills it.
struct Pool {
    base: u64,
    next: u64,
    end: u64,
    stream: CUstream,
}

impl Pool {
    /// # Safety
    ///
    /// The context is current. The context and the stream live until the pool is dropped.
    unsafe fn new(bytes: usize, stream: CUstream) -> Result<Self, Box<dyn Error>> {
        // SAFETY: the context is current, as the caller says.
        let base = unsafe { result::malloc_sync(bytes) }?;
        Ok(Self {
            base,
            next: base,
            end: base + bytes as u64,
            stream,
        })
    }

    fn take(&mut self, bytes: usize) -> Result<u64, String> {
        let address = self.next.next_multiple_of(256);
        self.next = address + bytes as u64;
        match self.next <= self.end {
            true => Ok(address),
            false => Err(format!("the pool has no {bytes} bytes left")),
        }
    }

    /// Allocates a range, and fills it with these bytes.
    fn filled(&mut self, bytes: &[u8]) -> Result<u64, Box<dyn Error>> {
        let address = self.take(bytes.len())?;
        // SAFETY: the range belongs to the pool. The host's bytes are ordinary memory, which the
        // driver has read when the call returns.
        unsafe { result::memcpy_htod_async(address, bytes, self.stream) }?;
        Ok(address)
    }

    fn halves(&mut self, values: impl Iterator<Item = bf16>) -> Result<u64, Box<dyn Error>> {
        self.filled(&values.flat_map(bf16::to_le_bytes).collect::<Vec<_>>())
    }

    /// Allocates a decode's workspace. The counters at its beginning have to be zero before the
    /// first launch.
    fn workspace(&mut self, bytes: usize) -> Result<u64, Box<dyn Error>> {
        let address = self.take(bytes)?;
        let counters = bytes.min(raw::MLA_DECODE_COUNTER_BYTES as usize);
        // SAFETY: the range belongs to the pool.
        unsafe { result::memset_d8_async(address, 0, counters, self.stream) }?;
        Ok(address)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the stream exists, as the caller of `new` promises. All work on it has ended when
        // the pool's memory is freed, which happens once. An error of the driver is ignored,
        // because the process ends here.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::free_sync(self.base);
        }
    }
}

/// Addresses of the engine's tensors.
struct Tensors {
    /// Weights in the layout of checkpoints: `[H · (128 + 128), 512]`.
    weights: u64,
    query: u64,
    latent: u64,
    rope: u64,
    cache: u64,
    slots: u64,
    table: u64,
    lens: u64,
    absorbed: u64,
    attended: u64,
    out: u64,
}

/// The number of cached tokens of all requests, which are written into the cache at once.
const TOKENS: usize = REQUESTS * LEN;

impl Tensors {
    fn new(pool: &mut Pool, weights: &[bf16]) -> Result<Self, Box<dyn Error>> {
        let number = |at: usize, period: usize, middle: f32| {
            bf16::from_f32((at % period) as f32 * 0.1 - middle)
        };
        let slots: Vec<i64> = (0..TOKENS)
            .map(|token| (token / LEN * PAGES * PAGE + token % LEN) as i64)
            .collect();
        let table: Vec<i32> = (0..(REQUESTS * PAGES) as i32).collect();
        Ok(Self {
            weights: pool.halves(weights.iter().copied())?,
            query: pool.halves((0..REQUESTS * HEADS * 192).map(|at| number(at, 17, 0.8)))?,
            latent: pool.halves((0..TOKENS * 512).map(|_| bf16::ONE))?,
            rope: pool.halves((0..TOKENS * 64).map(|at| number(at, 13, 0.6)))?,
            cache: pool.take(2 * REQUESTS * PAGES * PAGE * 576)?,
            slots: pool.filled(bytemuck::cast_slice(&slots))?,
            table: pool.filled(bytemuck::cast_slice(&table))?,
            lens: pool.filled(bytemuck::cast_slice(&[LEN as i32; REQUESTS]))?,
            absorbed: pool.take(2 * REQUESTS * HEADS * 512)?,
            attended: pool.take(2 * REQUESTS * HEADS * 512)?,
            out: pool.take(2 * OUTPUTS)?,
        })
    }

    fn cache_write(&self) -> raw::MlaCacheWriteParams {
        // SAFETY: the struct has only numbers and pointers, which may be zero.
        let mut write: raw::MlaCacheWriteParams = unsafe { zeroed() };
        write.latent = self.latent as *const _;
        write.rope = self.rope as *const _;
        write.slots = self.slots as *const _;
        write.cache = self.cache as *mut _;
        write.latent_token_stride = 512;
        write.rope_token_stride = 64;
        // Strides are in bytes, since rows of some formats are not whole elements.
        write.cache_page_stride = (PAGE * 576 * 2) as i64;
        write.cache_slot_stride = 576 * 2;
        // Rotary keys follow the latents of their rows.
        write.pages = (REQUESTS * PAGES) as i64;
        write.tokens = TOKENS as i32;
        write.page_size = PAGE as i32;
        write.latent_dim = 512;
        write.rope_dim = 64;
        write.dtype = raw::MLA_DTYPE_BF16 as i32;
        write.cache_format = raw::MLA_CACHE_BF16 as i32;
        write.cache_scale = 1.0;
        write
    }

    /// Returns the parameters of q_lat = q_nope · W_UK, with weights that are contiguous along n.
    fn absorb(&self) -> raw::MlaHeadGemmParams {
        raw::MlaHeadGemmParams {
            input: self.query as *const _,
            weights: self.weights as *const _,
            out: self.absorbed as *mut _,
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
            ready: 0,
        }
    }

    /// Returns the parameters of out = o_lat · W_UV, with weights that are contiguous along k.
    fn values(&self) -> raw::MlaHeadGemmParams {
        raw::MlaHeadGemmParams {
            input: self.attended as *const _,
            weights: (self.weights + 2 * 128 * 512) as *const _,
            out: self.out as *mut _,
            input_token_stride: (HEADS * 512) as i64,
            input_head_stride: 512,
            weights_k_stride: 1,
            weights_n_stride: 512,
            out_token_stride: (HEADS * 128) as i64,
            out_head_stride: 128,
            k: 512,
            n: 128,
            ..self.absorb()
        }
    }

    /// Returns the parameters without a workspace, whose size depends on them.
    fn decode(&self) -> raw::MlaDecodeParams {
        // SAFETY: the struct has only numbers and pointers, which may be zero.
        let mut decode: raw::MlaDecodeParams = unsafe { zeroed() };
        decode.q_latent = self.absorbed as *const _;
        decode.q_rope = (self.query + 2 * 128) as *const _;
        decode.cache = self.cache as *const _;
        decode.block_table = self.table as *const _;
        decode.kv_lens = self.lens as *const _;
        decode.out = self.attended as *mut _;
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
        decode
    }
}

/// Elements of the output.
const OUTPUTS: usize = REQUESTS * HEADS * 128;

fn main() -> Result<(), Box<dyn Error>> {
    // The presence of a driver is checked first, since cudarc would panic without one.
    present_gpu().map_err(|cause| format!("{cause}; {}", cause.remedy()))?;
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    // SAFETY: the context is current. It and the stream are dropped after the pool.
    let mut pool = unsafe { Pool::new(64 << 20, stream.cu_stream()) }?;
    let weights: Vec<bf16> = (0..HEADS * 256 * 512)
        .map(|at| bf16::from_f32(((at * 7919) % 2001) as f32 * 1e-4 - 0.1))
        .collect();
    let tensors = Tensors::new(&mut pool, &weights)?;
    launch(&mut pool, &tensors)?;
    let mut out = vec![0u8; 2 * OUTPUTS];
    // SAFETY: the range is the output's. The host's bytes are read only after the copy is done.
    unsafe { result::memcpy_dtoh_async(&mut out, tensors.out, stream.cu_stream()) }?;
    stream.synchronize()?;
    let largest = largest_error(&out, &weights);
    println!("{REQUESTS} requests of {LEN} tokens: largest error {largest:.1e}");
    // The outputs are sums of about 1, rounded to bf16 once or twice.
    if largest < 0.02 {
        Ok(())
    } else {
        Err(format!("an error of {largest}").into())
    }
}

/// Enqueues the step.
fn launch(pool: &mut Pool, tensors: &Tensors) -> Result<(), Box<dyn Error>> {
    let (write, absorb, values) = (tensors.cache_write(), tensors.absorb(), tensors.values());
    let mut decode = tensors.decode();
    let mut workspace_bytes = 0;
    // SAFETY: both parameters are values on this stack.
    unsafe {
        raw::check(
            "workspace",
            raw::mla_decode_sm90_workspace(&decode, &mut workspace_bytes),
        )
    }?;
    decode.workspace = pool.workspace(workspace_bytes)? as *mut _;
    decode.workspace_bytes = workspace_bytes;
    let stream = pool.stream.cast();
    // SAFETY: the context is current. Every address belongs to the pool, holds what its strides and
    // extents say, and stays valid until the stream has passed the launches.
    unsafe {
        raw::check("load", raw::mla_load_helpers())?;
        raw::check("cache write", raw::mla_cache_write(&write, stream))?;
        raw::check("W_UK", raw::mla_head_gemm(&absorb, stream))?;
        raw::check("decode", raw::mla_decode_sm90(&decode, stream))?;
        raw::check("W_UV", raw::mla_head_gemm(&values, stream))?;
    }
    Ok(())
}

/// Returns the largest difference from the sums of each head's value weights over the latent.
fn largest_error(out: &[u8], weights: &[bf16]) -> f32 {
    let mut largest = 0f32;
    for (at, bytes) in out.chunks_exact(2).enumerate() {
        let value = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let (head, v) = (at / 128 % HEADS, at % 128);
        let row = (head * 256 + 128 + v) * 512;
        let sum: f32 = weights[row..row + 512].iter().map(|w| w.to_f32()).sum();
        // A NaN counts as an error here. `max` would ignore it.
        let error = (value - sum).abs();
        largest = if error.is_nan() {
            f32::MAX
        } else {
            largest.max(error)
        };
    }
    largest
}
