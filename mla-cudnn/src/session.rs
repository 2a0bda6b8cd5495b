//! A handle of cuDNN's and the plans that were built with it.

use std::ffi::{CStr, c_void};

use mla_kernels::Cuda;
use mla_kernels::device::Buffer;
use mla_runtime::device::Memory as _;
use mla_runtime::error::{Error, Result};

use crate::ffi;

/// The error of a call that cuDNN or its frontend refused.
fn check(operation: &'static str, status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function takes nothing, and its text lives until this thread's next call.
    let text = unsafe { CStr::from_ptr(ffi::mc_last_error()) };
    Err(Error::Device {
        device: "cuda",
        operation,
        message: text.to_string_lossy().into_owned(),
    })
}

/// Plans are built when their key first occurs, and kept: a build takes far longer than a launch.
pub(crate) struct Session {
    handle: *mut c_void,
    plans: Vec<Plan>,
    /// Keys of equal requests that cuDNN has no plan for, as some versions have none with a
    /// log-sum-exp of any stride: their plans are those of ragged requests.
    ragged: Vec<ffi::McKey>,
    /// As large as the plan with the largest needs.
    workspace: Option<Buffer>,
}

struct Plan {
    key: ffi::McKey,
    plan: *mut c_void,
}

// SAFETY: cuDNN allows a handle and its plans to be used by any thread, if by one at a time; a
// session is used through `&mut`.
unsafe impl Send for Session {}

impl Session {
    pub(crate) fn new(device: &Cuda) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        device.bind()?;
        // SAFETY: the address is that of a value on this stack, and the device's context is
        // current.
        check("handle of CUDNN", unsafe {
            ffi::mc_handle_new(&raw mut handle)
        })?;
        Ok(Self {
            handle,
            plans: Vec::new(),
            ragged: Vec::new(),
            workspace: None,
        })
    }

    /// Builds the plan for `key` if it is the first of its kind, and returns the plan's own key: that
    /// of ragged requests if cuDNN refuses one for equal ones.
    pub(crate) fn built(&mut self, device: &Cuda, key: ffi::McKey) -> Result<ffi::McKey> {
        device.bind()?;
        let ragged = ffi::McKey { equal: 0, ..key };
        if self.ragged.iter().any(|known| same(known, &key)) {
            return Ok(ragged);
        }
        if self.plan(device, &key).is_err() && key.equal != 0 {
            self.ragged.push(key);
            return Ok(ragged);
        }
        Ok(key)
    }

    /// Runs the plan for `key`, which is built if it is the first of its kind.
    ///
    /// # Safety
    ///
    /// Every address in `run` is of memory of the device that holds what `key` says.
    pub(crate) unsafe fn run(
        &mut self,
        device: &Cuda,
        key: &ffi::McKey,
        mut run: ffi::McRun,
    ) -> Result<()> {
        device.bind()?;
        let plan = self.plan(device, key)?;
        let workspace = self.workspace.as_ref().map_or(0, Buffer::address);
        run.workspace = workspace as *mut _;
        // SAFETY: the plan was built with this handle, the workspace is as large as it asked for,
        // and the caller vouches for the rest.
        let status = unsafe { ffi::mc_run(self.handle, plan, &raw const run, device.raw_stream()) };
        check("CUDNN", status)
    }

    fn plan(&mut self, device: &Cuda, key: &ffi::McKey) -> Result<*mut c_void> {
        if let Some(known) = self.plans.iter().find(|plan| same(&plan.key, key)) {
            return Ok(known.plan);
        }
        let (mut plan, mut bytes) = (std::ptr::null_mut(), 0);
        // SAFETY: the handle is alive, and the addresses are those of values on this stack.
        check("plan of CUDNN", unsafe {
            ffi::mc_plan_new(self.handle, key, &raw mut plan, &raw mut bytes)
        })?;
        self.plans.push(Plan { key: *key, plan });
        let bytes = usize::try_from(bytes).unwrap_or(0);
        if bytes > self.workspace.as_ref().map_or(0, Buffer::len) {
            // What is enqueued may still use the smaller one.
            device.synchronize()?;
            self.workspace = Some(device.allocate(bytes)?);
        }
        Ok(plan)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: each was made by this session and is freed once, the plans before their handle.
        unsafe {
            for plan in &self.plans {
                ffi::mc_plan_free(plan.plan);
            }
            ffi::mc_handle_free(self.handle);
        }
    }
}

/// Whether two keys ask for one plan.
fn same(a: &ffi::McKey, b: &ffi::McKey) -> bool {
    let numbers = |key: &ffi::McKey| {
        let strides = [
            key.query_token_stride,
            key.query_head_stride,
            key.key_token_stride,
            key.key_head_stride,
            key.value_token_stride,
            key.value_head_stride,
            key.out_token_stride,
            key.out_head_stride,
            key.lse_head_stride,
        ];
        let extents = [
            key.requests,
            key.max_query_len,
            key.max_key_len,
            key.heads,
            key.key_dim,
            key.value_dim,
            key.dtype,
            key.causal,
            key.equal,
        ];
        (strides, extents, key.softmax_scale.to_bits())
    };
    numbers(a) == numbers(b)
}
