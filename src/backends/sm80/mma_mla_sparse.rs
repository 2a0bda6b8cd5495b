//! MMA_MLA_SPARSE, and its sibling for rows without a rotary part: sparse absorbed attention on
//! every GPU since Ampere, one launch per step.
//!
//! It is the kernel of dense decode with another loader, described in `docs/kernels/portable.md`.
//! Nothing is prepared, so a captured step can be replayed with other lists in the same arrays.

use mla_runtime::mla_backend;

use crate::backends::template::backend_type;
#[cfg(feature = "sm80")]
use {
    super::kernel::Portable,
    crate::backends::{sparse, workspace},
    crate::device::{Buffer, Cuda},
    crate::raw,
    mla_runtime::Result,
    mla_runtime::backend::{DecodeBackend, DecodeCall, LayerConfig, StepLimits},
    mla_runtime::spec::BackendSpec,
    mla_runtime::tensor::Memory as _,
};

// A backend of this kernel: the caches and rows that it takes together.
macro_rules! sparse_backend {
    (
        $(#[$about:meta])*
        $backend:ident, name = $name:tt, kv = $kv:tt, cache_dims = $rows:tt
    ) => {
        backend_type! { $(#[$about])* $backend: super::kernel::Portable, "sm80" }

        #[mla_backend(
            name = $name,
            provider = "native",
            feature = "sm80",
            sm = "80+",
            compiled = raw::compiled::SM80,
            run_on = super::RUN_ON,
            dtypes = "f16,bf16",
            kv = $kv,
            cache_dims = $rows,
            heads = "1..=128",
            query_len = "ragged",
            alignment = 16,
            graphs = "always",
            dependent_launch = true,
            sparse = "required",
            // The maximum of the C interface: `width` in mla.h.
            max_list_width = 8192,
            features = "sinks,deterministic,nan_propagation,strided_outputs,split_cache",
            priority = "50"
        )]
        impl DecodeBackend for $backend {
            type Device = Cuda;
            type State = Buffer;
            type Metadata = ();

            fn new(_: &Cuda, config: &LayerConfig) -> Result<Self> {
                Ok(Self {
                    config: *config,
                    kernel: Portable::default(),
                })
            }

            fn workspace_bytes(&self, device: &Cuda, _: &StepLimits) -> Result<u64> {
                Ok(workspace_of(self.kernel, &self.config, device)? as u64)
            }

            fn state(&self, device: &Cuda, _: &StepLimits) -> Result<Buffer> {
                // The kernels' counters in the workspace have to begin at zero.
                device.allocate(workspace_of(self.kernel, &self.config, device)?)
            }

            fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
                Ok(())
            }

            unsafe fn decode(
                &self,
                device: &Cuda,
                call: DecodeCall<'_, Cuda>,
                workspace: &mut Buffer,
                (): &(),
            ) -> Result<()> {
                // SAFETY: the caller keeps to the same contract.
                unsafe { decode(self.kernel, &self.config, &Self::SPEC, device, call, workspace) }
            }
        }
    };
}

sparse_backend! {
    /// Sparse absorbed attention on every GPU since Ampere.
    ///
    /// Each query token attends to the cache rows in its list of slots. There may be 1 to 128
    /// heads. Lists have up to 8192 slots, any of which may be invalid. Pages have any size. Caches
    /// have the queries' dtype, e4m3 with one scale, or `fp8_ds_mla` or `fp8_per_token` with any
    /// scales. A sink per head takes part in the softmax.
    MmaMlaSparse,
    name = "MMA_MLA_SPARSE",
    kv = "f16,bf16,fp8,fp8_ds_mla,fp8_per_token",
    cache_dims = "(512,64)"
}

sparse_backend! {
    /// Sparse absorbed attention like `MmaMlaSparse`, for rows without a rotary part: those of
    /// GLM-5.3-Flash. Caches have the queries' dtype, or e4m3 with one scale.
    MmaMlaSparseNarrow,
    name = "MMA_MLA_SPARSE_NARROW",
    kv = "f16,bf16,fp8",
    cache_dims = "(512,0)"
}

#[cfg(feature = "sm80")]
fn workspace_of(kernel: Portable, config: &LayerConfig, device: &Cuda) -> Result<usize> {
    let params = sparse::shape(config)?;
    // SAFETY: the context is current, and the addresses are those of values that outlive the call.
    workspace::size(device, |bytes| unsafe {
        raw::mla_sparse_sm80_workspace(&params, &kernel.0, bytes)
    })
}

/// # Safety
///
/// The contract of [`DecodeBackend::decode`].
#[cfg(feature = "sm80")]
unsafe fn decode(
    kernel: Portable,
    config: &LayerConfig,
    spec: &BackendSpec,
    device: &Cuda,
    call: DecodeCall<'_, Cuda>,
    workspace: &mut Buffer,
) -> Result<()> {
    let Some(params) = sparse::params(config, spec, call)? else {
        return Ok(());
    };
    device.bind()?;
    // SAFETY: `params` checked every tensor and array to hold what its layout says, and the layouts
    // agree. The kernel itself skips slots that the cache does not have. The contents of the
    // batch's arrays keep to the contract of a call, by the caller's promise. The workspace was
    // allocated zeroed and is borrowed mutably, so no other launch of this stream uses it at the
    // same time.
    unsafe {
        raw::check(
            "sparse attention",
            raw::mla_sparse_sm80(
                &params,
                &kernel.0,
                workspace.address() as *mut _,
                workspace.len(),
                device.raw_stream(),
            ),
        )
    }
}
