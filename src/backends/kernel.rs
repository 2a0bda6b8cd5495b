//! The kernels of all families behind one trait, and the workspaces of their backends.

use std::ffi::c_void;

use mla_runtime::backend::{DecodeBatch, LayerConfig, StepLimits};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, Result};

use crate::device::{Buffer, Cuda};
use crate::raw::{self, MlaStatus};

/// The functions of a family's kernel for calls that `Params` describes. `mla_<family>.h` declares
/// them.
pub(super) trait Kernel<Params>: Copy {
    /// Loads the kernel, so that no launch has to. By default nothing is done: the workspace's
    /// query or the first launch loads it.
    ///
    /// # Safety
    ///
    /// A context is current, as the header says.
    unsafe fn load(self, _: &Params) -> MlaStatus {
        MlaStatus::default()
    }

    /// Writes the bytes of the workspace to `bytes`.
    ///
    /// # Safety
    ///
    /// A context is current, as the header says.
    unsafe fn workspace(self, params: &Params, bytes: &mut usize) -> MlaStatus;

    /// Enqueues a call. `workspace` is its workspace, which most parameters name, too.
    ///
    /// # Safety
    ///
    /// Every address in `params` is as the header says, and so is `workspace`: its counters are
    /// zero.
    unsafe fn launch(
        self,
        params: &Params,
        workspace: &mut Buffer,
        stream: *mut c_void,
    ) -> MlaStatus;
}

/// A workspace. It limits the query tokens of a request of a dense decode, but not the number of
/// requests.
pub struct State {
    made_for: Problem,
    workspace: Buffer,
    query_len: usize,
}

impl State {
    /// Allocates the kernel's workspace for steps within `limits`, which `largest` describes.
    pub(super) fn new<Params>(
        kernel: impl Kernel<Params>,
        config: &LayerConfig,
        largest: &Params,
        device: &Cuda,
        limits: &StepLimits,
    ) -> Result<Self> {
        // The kernels' counters in it have to begin at zero.
        Ok(Self {
            made_for: config.problem,
            workspace: device.allocate(workspace_bytes(kernel, largest, device)?)?,
            query_len: limits.decode_query_len.max(1),
        })
    }

    /// Returns the workspace for a call of this layer.
    pub(super) fn workspace(&self, config: &LayerConfig) -> Result<&Buffer> {
        self.made_for.check_same("state", &config.problem)?;
        Ok(&self.workspace)
    }

    /// Returns the maximum number of query tokens that a request of a dense decode may have.
    pub(super) fn query_len(&self) -> usize {
        self.query_len
    }

    /// Checks that the batch's requests have no more query tokens than the workspace was made for.
    pub(super) fn check(&self, batch: &DecodeBatch<'_, Cuda>) -> Result<()> {
        if batch.max_query_len <= self.query_len {
            return Ok(());
        }
        let accepted = format!(
            "at most {}, for which the workspace was made",
            self.query_len
        );
        Err(Error::argument(
            "max_query_len",
            batch.max_query_len,
            accepted,
        ))
    }
}

/// Loads the kernel for the layer that `shape` describes, or refuses a layer that no kernel
/// supports.
pub(super) fn load<Params>(
    kernel: impl Kernel<Params>,
    operation: &'static str,
    shape: &Params,
    device: &Cuda,
) -> Result<()> {
    device.bind()?;
    // SAFETY: the context is current. The status is the function's own.
    unsafe { raw::check(operation, kernel.load(shape)) }
}

/// Returns the bytes of the workspace for steps that are no larger than `largest`.
pub(super) fn workspace_bytes<Params>(
    kernel: impl Kernel<Params>,
    largest: &Params,
    device: &Cuda,
) -> Result<usize> {
    let mut bytes = 0;
    device.bind()?;
    // SAFETY: the context is current. The status is the function's own.
    let status = unsafe { raw::check("workspace", kernel.workspace(largest, &mut bytes)) };
    status.map_err(of_limits)?;
    Ok(bytes)
}

/// Names the step's limits in an error about the parameters of the largest step.
fn of_limits(error: Error) -> Error {
    match error {
        Error::Argument {
            field,
            given,
            accepted,
        } if field == "requests" => Error::argument("limits.requests", given, accepted),
        Error::Argument {
            field,
            given,
            accepted,
        } if field == "max_pages" => Error::argument("limits.pages_per_request", given, accepted),
        error => error,
    }
}

/// Enqueues a call.
///
/// # Safety
///
/// `params` are those of a call whose tensors and arrays were checked to hold what their layouts
/// say, and whose layouts agree. The contents of the arrays keep to the contract of a call. The
/// workspace is that of `state`, which was made for this kernel.
pub(super) unsafe fn launch<Params>(
    kernel: impl Kernel<Params>,
    operation: &'static str,
    params: &Params,
    state: &mut State,
    device: &Cuda,
) -> Result<()> {
    device.bind()?;
    // SAFETY: this function's own contract covers the addresses in `params`. The kernel itself
    // skips slots that the cache does not have. The workspace was allocated zeroed by the same
    // kernel's query. It is borrowed mutably, so no other launch of this stream uses it at the same
    // time. The status is the launch's own.
    unsafe {
        let status = kernel.launch(params, &mut state.workspace, device.raw_stream());
        raw::check(operation, status)
    }
}
