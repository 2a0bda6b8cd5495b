//! The CPU device and its backends. They run everywhere, and tests of all other backends compare
//! with them.
//!
//! Tensors are borrowed from typed slices without a copy:
//!
//! ```
//! use half::bf16;
//! use mla_cpu::Cpu;
//! use mla_runtime::device::Device;
//! use mla_runtime::tensor::{TensorMut, TensorRef};
//!
//! let (a, b) = ([bf16::ONE; 6], [bf16::ONE; 12]);
//! let mut c = [bf16::ZERO; 8];
//! Cpu::new().gemm(
//!     TensorRef::from_slice(&a, [1, 2, 3])?,
//!     TensorRef::from_slice(&b, [1, 3, 4])?,
//!     TensorMut::from_slice(&mut c, [1, 2, 4])?,
//! )?;
//! assert_eq!(c, [bf16::from_f32(3.0); 8]);
//! # Ok::<(), mla_runtime::Error>(())
//! ```
//!
//! Work is spread over a thread pool, but no result depends on the number of threads. Each task's
//! computation, and the order in which parts are added up, depend only on the shapes. Results do
//! depend on the processor. If it can multiply bf16, attention in bf16 uses its matrix unit or
//! AVX-512's products of pairs. The softmax's weights are then rounded to bf16 (see
//! [`Cpu::portable`]). Products are added up in another order with AVX-512 than without it.
//!
//! Unsafe code is confined to three uses: threads write to disjoint elements, the `gemm` crate is
//! called, and AVX-512 and AMX instructions are executed. The tests run under AddressSanitizer and
//! LeakSanitizer, with the commands in CONTRIBUTING.md. Calls of the backends are unsafe, as those
//! of any backend, but these backends check the contents of a call's arrays.

mod attention;
mod buffer;
mod cache;
mod copy;
mod decode;
#[cfg(target_arch = "x86_64")]
mod dots;
pub mod fp8;
mod gemm;
mod indexer;
mod merge;
mod outputs;
mod prefill;
mod rotary;
mod rows;
mod transpose;
mod view;

use std::sync::Arc;

pub use buffer::Buffer;
pub use decode::{CpuDecode, DecodeState};
pub use prefill::{CpuPrefill, PrefillState};
pub use rows::ReadRow;

use mla_runtime::device::{Device, Fp8Blocks, GatherRows};
use mla_runtime::spec::{Cause, Platform, Problem, Target};
use mla_runtime::tensor::{
    ArrayRef, CacheMut, CacheRef, LseConvention, LseMut, LseRef, Memory, Rotary, TensorMut,
    TensorRef,
};
use mla_runtime::{Error, Result};

/// The host's processor, with a thread pool for the work. Every operation is finished when its call
/// returns.
#[derive(Clone, Debug, Default)]
pub struct Cpu {
    // The pool; `None` means rayon's global one.
    pool: Option<Arc<rayon::ThreadPool>>,
    instructions: Instructions,
}

// Instruction sets for attention, in ascending order. Each includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
enum Instructions {
    // Any processor, through the `gemm` crate.
    Portable,
    // AVX-512, with products of pairs for bf16.
    Vectors,
    // The matrix unit.
    #[default]
    Tiles,
}

impl Cpu {
    /// Makes a device with rayon's global thread pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a device with the caller's thread pool.
    pub fn with_pool(pool: Arc<rayon::ThreadPool>) -> Self {
        Self {
            pool: Some(pool),
            instructions: Instructions::default(),
        }
    }

    /// Returns the same device without the processor's matrix unit (AMX). bf16 is then multiplied
    /// by AVX-512's products of pairs, or in f32 if the processor lacks these.
    #[must_use]
    pub fn without_matrix_unit(mut self) -> Self {
        self.instructions = Instructions::Vectors;
        self
    }

    /// Returns the same device restricted to instructions that every processor has. Attention and
    /// GEMMs are then computed in f32 for every dtype, and the softmax's weights are not rounded to
    /// bf16.
    #[must_use]
    pub fn portable(mut self) -> Self {
        self.instructions = Instructions::Portable;
        self
    }

    #[cfg(target_arch = "x86_64")]
    fn takes(&self, instructions: Instructions) -> bool {
        self.instructions >= instructions
    }

    /// Returns the number of threads that do the work.
    pub fn threads(&self) -> usize {
        match &self.pool {
            Some(pool) => pool.current_num_threads(),
            None => rayon::current_num_threads(),
        }
    }

    // Runs `work` on the calling thread, and the tasks that it spawns on the pool.
    fn in_place_scope<'s>(&self, work: impl FnOnce(&rayon::Scope<'s>)) {
        match &self.pool {
            Some(pool) => pool.in_place_scope(work),
            None => rayon::in_place_scope(work),
        }
    }

    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }
}

impl Memory for Cpu {
    type Buffer = Buffer;

    mla_runtime::host_bytes!();

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Buffer::zeroed(bytes)
    }

    fn bytes(buffer: &Buffer) -> Self::Bytes<'_> {
        buffer.as_bytes()
    }

    fn bytes_mut(buffer: &mut Buffer) -> Self::BytesMut<'_> {
        buffer.as_bytes_mut()
    }

    fn upload(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        transfer(from, to)
    }

    fn download(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        transfer(from, to)
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}

impl Device for Cpu {
    const PLATFORM: Platform = Platform::Cpu;

    fn availability() -> Result<(), Cause> {
        Ok(())
    }

    fn target(&self) -> Target {
        Target::CPU
    }

    /// Every row is computed by itself. The order of its sums depends only on widths and on the
    /// row's own length.
    fn batch_invariant(&self, _: &Problem) -> Result<Self> {
        Ok(self.clone())
    }

    fn gemm(
        &self,
        a: TensorRef<'_, Self>,
        b: TensorRef<'_, Self>,
        c: TensorMut<'_, Self>,
    ) -> Result<()> {
        gemm::gemm(self, a, b, c)
    }

    fn copy(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        copy::copy(self, from, to)
    }

    fn scatter_rows(
        &self,
        from: TensorRef<'_, Self>,
        places: ArrayRef<'_, Self, i64>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        copy::scatter_rows(from, places, to)
    }

    fn dequantize_blocks(&self, from: Fp8Blocks<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        copy::dequantize_blocks(self, from, to)
    }

    fn clear(&self, to: TensorMut<'_, Self>) -> Result<()> {
        copy::clear(self, to)
    }

    fn write_cache(
        &self,
        latent: TensorRef<'_, Self>,
        rope: TensorRef<'_, Self>,
        slots: ArrayRef<'_, Self, i64>,
        cache: CacheMut<'_, Self>,
    ) -> Result<()> {
        cache::write(self, latent, rope, slots, cache)
    }

    fn write_cache_rotated(
        &self,
        latent: TensorRef<'_, Self>,
        rope: TensorRef<'_, Self>,
        rotary: &Rotary<'_, Self>,
        query: Option<(TensorRef<'_, Self>, TensorMut<'_, Self>)>,
        slots: ArrayRef<'_, Self, i64>,
        cache: CacheMut<'_, Self>,
    ) -> Result<()> {
        rotary::write_cache(self, latent, rope, rotary, query, slots, cache)
    }

    fn rotate(&self, rotary: &Rotary<'_, Self>, vectors: TensorMut<'_, Self>) -> Result<()> {
        rotary::rotate(rotary, vectors)
    }

    fn gather_cache(
        &self,
        cache: CacheRef<'_, Self>,
        rows: GatherRows<'_, Self>,
        latent: TensorMut<'_, Self>,
        rope: TensorMut<'_, Self>,
    ) -> Result<()> {
        cache::gather(self, cache, rows, latent, rope)
    }

    fn merge(
        &self,
        out: TensorMut<'_, Self>,
        lse: LseMut<'_, Self>,
        other: TensorRef<'_, Self>,
        other_lse: LseRef<'_, Self>,
    ) -> Result<()> {
        merge::merge(self, out, lse, other, other_lse)
    }

    fn scales_outputs(&self) -> bool {
        true
    }

    fn scale_outputs(
        &self,
        out: TensorMut<'_, Self>,
        sinks: Option<(ArrayRef<'_, Self, f32>, LseRef<'_, Self>)>,
        gate: Option<TensorRef<'_, Self>>,
    ) -> Result<()> {
        outputs::scale(self, out, sinks, gate)
    }

    fn convert_lse<C: LseConvention>(
        &self,
        from: LseRef<'_, Self, C>,
        to: LseMut<'_, Self>,
    ) -> Result<()> {
        merge::convert_lse(from, to)
    }
}

fn transfer(from: &[u8], to: &mut [u8]) -> Result<()> {
    if from.len() != to.len() {
        return Err(Error::argument(
            "destination",
            format!("{} bytes", to.len()),
            format!("{} bytes, as many as the source has", from.len()),
        ));
    }
    to.copy_from_slice(from);
    Ok(())
}
