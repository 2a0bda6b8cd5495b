//! FLASH_ATTN: expanded prefill on Hopper GPUs, one launch per attention.
//!
//! `docs/kernels/prefill.md` tells how the kernel works. It makes its schedule from the lengths on the
//! device, so [`prepare`](mla_runtime::backend::PrefillBackend::prepare) has nothing to do.

use mla_runtime::backend::LayerConfig;
use mla_runtime::mla_backend;

#[cfg(feature = "sm90")]
use {
    crate::device::argument::{dtype_code, narrow, unit_columns, wide},
    crate::device::{Buffer, Cuda},
    crate::raw,
    mla_runtime::backend::{
        Chunk, KeyLayout, Keys, Output, PrefillBackend, PrefillBatch, PrefillCall, StepLimits,
    },
    mla_runtime::device::Device,
    mla_runtime::error::{Error, Result},
};

/// Expanded attention on sm_90a, for new tokens and for context chunks.
///
/// Keys come as two sources, the head's part and the shared rotary part, so that nobody packs them;
/// packed keys are taken as well, a little slower. Every request's end is exact: what lies behind
/// it in memory is never used. Pointers, and strides in bytes, are multiples of 16.
#[derive(Debug)]
pub struct FlashAttn {
    config: LayerConfig,
}

/// The counters by which CTAs share out their work, and the partial results of query tiles whose keys
/// they divide.
#[cfg(feature = "sm90")]
pub struct FlashAttnState {
    workspace: Buffer,
}

#[mla_backend(
    name = "FLASH_ATTN",
    provider = "native",
    feature = "sm90",
    sm = "90",
    compiled = raw::compiled::SM90,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    dims = "(128,64,128)|(192,64,256)|(64,32,64)",
    graphs = "always",
    features = "deterministic",
    priority = "100"
)]
impl PrefillBackend for FlashAttn {
    type Device = Cuda;
    type State = FlashAttnState;
    type Metadata = ();

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        if !(config.softmax_scale.is_finite() && config.softmax_scale > 0.0) {
            return Err(Error::argument(
                "softmax scale",
                config.softmax_scale,
                "a finite number above 0",
            ));
        }
        device.bind()?;
        // SAFETY: the function takes nothing; the context it loads into is current.
        raw::check("load prefill kernels", unsafe {
            raw::mla_load_prefill_sm90()
        })?;
        Ok(Self { config: *config })
    }

    fn workspace_bytes(&self, device: &Cuda, _: &StepLimits) -> u64 {
        // What keeps the size from being known keeps `state` from allocating it, and says so there.
        self.workspace(device).map_or(0, |bytes| bytes as u64)
    }

    fn state(&self, device: &Cuda, _: &StepLimits) -> Result<FlashAttnState> {
        // Zeros are how the kernel's counters have to begin.
        Ok(FlashAttnState {
            workspace: device.allocate(self.workspace(device)?)?,
        })
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        _: &Cuda,
        _: &PrefillBatch<'_>,
        _: &mut FlashAttnState,
        (): &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn new_tokens(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        state: &mut FlashAttnState,
        (): &(),
    ) -> Result<()> {
        self.attend(device, call, state, true)
    }

    fn context_chunk(
        &self,
        device: &Cuda,
        _: Chunk<'_>,
        call: PrefillCall<'_, Cuda>,
        state: &mut FlashAttnState,
        (): &(),
    ) -> Result<()> {
        self.attend(device, call, state, false)
    }

    fn key_layout(&self) -> KeyLayout {
        KeyLayout::Split
    }
}

#[cfg(feature = "sm90")]
impl FlashAttn {
    /// Bytes of the workspace, which depend on the width of a value and on the device.
    fn workspace(&self, device: &Cuda) -> Result<usize> {
        let params = raw::MlaPrefillParams {
            value_dim: narrow("v", self.config.problem.dims.head.v as usize)?,
            // SAFETY: the struct is plain data, for which zero is a value.
            ..unsafe { std::mem::zeroed() }
        };
        let mut bytes = 0;
        device.bind()?;
        // SAFETY: both addresses are those of values on this stack.
        let status = unsafe { raw::mla_prefill_sm90_workspace(&params, &mut bytes) };
        raw::check("prefill workspace", status)?;
        Ok(bytes)
    }

    fn attend(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        state: &mut FlashAttnState,
        causal: bool,
    ) -> Result<()> {
        let problem = &self.config.problem;
        let (dims, dtype, heads) = (problem.dims.head, problem.dtype, problem.heads as usize);
        let (nope, rope, v) = (dims.nope as usize, dims.rope as usize, dims.v as usize);
        let (query_tokens, key_tokens) = (call.query.shape()[0], call.values.shape()[0]);

        let query = *call.query.layout();
        query.expect("query", dtype, [query_tokens, heads, nope + rope])?;
        unit_columns("query", &query)?;
        let value = *call.values.layout();
        value.expect("values", dtype, [key_tokens, heads, v])?;
        unit_columns("values", &value)?;
        let (key_nope, key_nope_layout, key_rope, key_rope_layout) = match &call.keys {
            Keys::Packed(keys) => {
                let layout = *keys.layout();
                layout.expect("keys", dtype, [key_tokens, heads, nope + rope])?;
                unit_columns("keys", &layout)?;
                let address = keys.bytes().address();
                let rotary = address + (nope * dtype.bytes()) as u64;
                (address, layout, rotary, layout)
            }
            Keys::Split {
                nope: head,
                rope: shared,
            } => {
                let (layout, mut shared_layout) = (*head.layout(), *shared.layout());
                layout.expect("keys (nope)", dtype, [key_tokens, heads, nope])?;
                shared_layout.expect("keys (rope)", dtype, [key_tokens, 1, rope])?;
                unit_columns("keys (nope)", &layout)?;
                unit_columns("keys (rope)", &shared_layout)?;
                // One head that every head reads.
                shared_layout.strides[1] = 0;
                let addresses = (head.bytes().address(), shared.bytes().address());
                (addresses.0, layout, addresses.1, shared_layout)
            }
        };
        let Output::Plain(out) = call.out else {
            return Err(Error::argument("output", "e4m3", dtype));
        };
        let out_layout = *out.layout();
        out_layout.expect("output", dtype, [query_tokens, heads, v])?;
        unit_columns("output", &out_layout)?;
        let (lse, lse_head_stride) = match call.lse {
            None => (0, query_tokens),
            Some(lse) => {
                let layout = lse.layout();
                layout.expect("lse", heads, query_tokens)?;
                (lse.into_bytes().address(), layout.row_stride)
            }
        };
        let requests = call.query_starts.len().saturating_sub(1);
        if call.key_starts.len() != call.query_starts.len() {
            return Err(Error::argument(
                "key starts",
                call.key_starts.len(),
                format!("{}, as many as query starts", call.query_starts.len()),
            ));
        }
        // Nothing to write, and the kernel's tensors must not be empty.
        if requests == 0 || query_tokens == 0 {
            return Ok(());
        }

        let params = raw::MlaPrefillParams {
            query: call.query.bytes().address() as *const _,
            key_nope: key_nope as *const _,
            key_rope: key_rope as *const _,
            value: call.values.bytes().address() as *const _,
            out: out.into_bytes().address() as *mut _,
            lse: lse as *mut _,
            cu_query_lens: call.query_starts.bytes().address() as *const _,
            cu_key_lens: call.key_starts.bytes().address() as *const _,
            workspace: state.workspace.address() as *mut _,
            workspace_bytes: state.workspace.len(),
            query_token_stride: wide("query stride", query.strides[0])?,
            query_head_stride: wide("query stride", query.strides[1])?,
            key_nope_token_stride: wide("keys stride", key_nope_layout.strides[0])?,
            key_nope_head_stride: wide("keys stride", key_nope_layout.strides[1])?,
            key_rope_token_stride: wide("keys stride", key_rope_layout.strides[0])?,
            key_rope_head_stride: wide("keys stride", key_rope_layout.strides[1])?,
            value_token_stride: wide("values stride", value.strides[0])?,
            value_head_stride: wide("values stride", value.strides[1])?,
            out_token_stride: wide("output stride", out_layout.strides[0])?,
            out_head_stride: wide("output stride", out_layout.strides[1])?,
            lse_head_stride: wide("lse stride", lse_head_stride)?,
            query_tokens: narrow("query tokens", query_tokens)?,
            key_tokens: narrow("key tokens", key_tokens)?,
            requests: narrow("requests", requests)?,
            heads: narrow("heads", heads)?,
            max_query_len: narrow("longest query", call.max_query_len)?,
            max_key_len: narrow("most keys", call.max_key_len)?,
            nope_dim: narrow("nope", nope)?,
            rope_dim: narrow("rope", rope)?,
            value_dim: narrow("v", v)?,
            dtype: dtype_code(dtype),
            causal: i32::from(causal),
            softmax_scale: self.config.softmax_scale,
        };
        device.bind()?;
        // SAFETY: every tensor was checked to hold what its layout says and the layouts to agree, the
        // output and the workspace are borrowed mutably, and the call states the bounds of the lengths,
        // which the kernel relies on.
        raw::check("prefill", unsafe {
            raw::mla_prefill_sm90(&params, device.raw_stream())
        })
    }
}
