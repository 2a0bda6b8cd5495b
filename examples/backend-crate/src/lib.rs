//! A decode backend for NVIDIA GPUs in a separate crate, with its own kernel.
//!
//! The kernel is simple rather than fast. It accepts more than 128 heads, which the built-in
//! WGMMA_MLA refuses, and is chosen for them. Otherwise WGMMA_MLA is chosen.

use mla_kernels::Cuda;
use mla_runtime::backend::{DecodeBackend, DecodeCall, LayerConfig, Output, Query, StepLimits};
use mla_runtime::model::DType::BF16;
use mla_runtime::{mla_backend, Error, Result};

#[allow(missing_docs, non_snake_case, dead_code, unsafe_op_in_unsafe_fn)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod ffi {
    include!(concat!(env!("OUT_DIR"), "/naive.rs"));
}

/// The targets for which this build compiled the kernels.
pub mod compiled {
    include!(concat!(env!("OUT_DIR"), "/naive_compiled.rs"));
}

/// Absorbed attention with one CTA per query token and head.
pub struct Naive(LayerConfig);

#[mla_backend(
    sm = "90|10x",
    compiled = "compiled::SM90|compiled::SM100",
    dtypes = "bf16",
    cache_dims = "(512,64)",
    heads = "1..=65535",
    query_len = "ragged",
    graphs = "always",
    dependent_launch = true,
    features = "deterministic,nan_propagation,strided_outputs",
    priority = 10
)]
impl DecodeBackend for Naive {
    type Device = Cuda;
    type State = ();
    type Metadata = ();

    fn new(_: &Cuda, config: &LayerConfig) -> Result<Self> {
        Ok(Self(*config))
    }

    fn state(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    unsafe fn decode(&self, device: &Cuda, call: DecodeCall<'_, Cuda>, _: &mut (), _: &()) -> Result<()> {
        let (Query::Split { latent, rope }, Output::Plain(out)) = (call.query, call.out) else {
            return Err(Error::argument("call", "another form", "split and plain"));
        };
        let (heads, tokens) = (self.0.problem.heads as usize, latent.shape()[0]);
        let out_layout = *out.layout();
        for (name, layout, width) in [
            ("latent", latent.layout(), 512),
            ("rope", rope.layout(), 64),
            ("out", &out_layout, 512),
        ] {
            layout.require(name, BF16, [tokens, heads, width])?;
            if !layout.has_unit_columns() {
                return Err(Error::argument(name, layout, "a last axis of stride 1"));
            }
        }
        if tokens == 0 {
            return Ok(());
        }
        let (batch, cache) = (call.batch, call.cache.layout());
        let stride = |elements: usize| elements as i64;
        let params = ffi::NaiveParams {
            q_latent: latent.bytes().address() as *const _,
            q_rope: rope.bytes().address() as *const _,
            cache: call.cache.bytes().address() as *const _,
            block_table: batch.block_table.entries().bytes().address() as *const _,
            kv_lens: batch.seq_lens.bytes().address() as *const _,
            query_starts: batch.query_starts.bytes().address() as *const _,
            out: out.into_bytes().address() as *mut _,
            lse_head_stride: call.lse.as_ref().map_or(0, |lse| stride(lse.layout().row_stride)),
            lse: call.lse.map_or(0, |lse| lse.into_bytes().address()) as *mut _,
            q_latent_token_stride: stride(latent.layout().strides[0]),
            q_latent_head_stride: stride(latent.layout().strides[1]),
            q_rope_token_stride: stride(rope.layout().strides[0]),
            q_rope_head_stride: stride(rope.layout().strides[1]),
            page_stride: stride(cache.page_stride / BF16.bytes()),
            row_stride: stride(cache.row_stride / BF16.bytes()),
            out_token_stride: stride(out_layout.strides[0]),
            out_head_stride: stride(out_layout.strides[1]),
            requests: batch.block_table.requests() as i32,
            tokens: tokens as i32,
            heads: heads as i32,
            page_size: cache.page_size as i32,
            max_pages: batch.block_table.max_pages() as i32,
            softmax_scale: self.0.softmax_scale,
        };
        device.bind()?;
        // SAFETY: every tensor was checked to hold what its layout says, and the layouts agree. The
        // output is borrowed mutably. Starts, lengths and pages keep to the contract of a call, by
        // the caller's promise. The launch reads nothing beyond them.
        match unsafe { ffi::naive_decode(&params, device.raw_stream()) } {
            0 => Ok(()),
            status => Err(Error::Device {
                device: "cuda",
                operation: "naive decode",
                message: format!("cudaError {status}"),
            }),
        }
    }
}
