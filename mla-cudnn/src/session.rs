//! A handle of cuDNN and the plans that were built with it.

use std::ffi::{CStr, c_void};

use mla_kernels::Cuda;
use mla_kernels::device::Buffer;
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, Result};

use crate::ffi;
use crate::plans::Plans;

/// Returns the error of a call that cuDNN or its frontend refused.
fn check(operation: &'static str, status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function has no parameters, and its text lives until this thread's next call.
    let text = unsafe { CStr::from_ptr(ffi::mc_last_error()) };
    Err(Error::Device {
        device: "cuda",
        operation,
        message: text.to_string_lossy().into_owned(),
    })
}

/// Maximum number of plans that are kept besides those of graphs. It exceeds the number of shapes
/// that an engine serves again and again, so evicted plans are no longer needed.
const MAX_PLANS: usize = 512;

/// Plans are built when their key first occurs, and kept while they are used, since a build takes
/// far longer than a launch.
pub(crate) struct Session {
    device: Cuda,
    handle: *mut c_void,
    /// The plans. Equal requests for which cuDNN has no plan use the plan for ragged ones.
    plans: Plans<Numbers, *mut c_void>,
    /// Workspaces. The last one has the size of the largest plan. The others are kept, since a
    /// graph may have been captured with them.
    workspaces: Vec<Buffer>,
}

// SAFETY: cuDNN allows any thread to use a handle and its plans, but only one at a time. A session
// is used through `&mut`.
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
            device: device.clone(),
            handle,
            plans: Plans::new(MAX_PLANS),
            workspaces: Vec::new(),
        })
    }

    /// Builds the plan for `key` when the key first occurs, and returns the plan's own key. If
    /// cuDNN refuses a plan for equal requests, this returns the key for ragged ones.
    pub(crate) fn built(&mut self, key: ffi::McKey) -> Result<ffi::McKey> {
        if self.plans.get(&numbers(&key)) != Some(None) {
            match self.build(&key)? {
                Err(_) if key.equal != 0 => {
                    self.make_room()?;
                    self.plans.add(numbers(&key), None);
                }
                done => return done.map(|()| key),
            }
        }
        let ragged = ffi::McKey { equal: 0, ..key };
        self.build(&ragged)??;
        Ok(ragged)
    }

    /// Runs the plan that was built for `key`.
    ///
    /// # Safety
    ///
    /// Every address in `run` is that of device memory that holds what `key` says.
    pub(crate) unsafe fn run(&mut self, key: &ffi::McKey, mut run: ffi::McRun) -> Result<()> {
        let is_capturing = self.device.is_capturing()?;
        let Some(plan) = self.plans.launch(&numbers(key), is_capturing) else {
            return Err(Error::argument(
                "plan of CUDNN",
                "none",
                "one that was built",
            ));
        };
        self.device.bind()?;
        let workspace = self.workspaces.last().map_or(0, Buffer::address);
        run.workspace = workspace as *mut _;
        let stream = self.device.raw_stream();
        // SAFETY: the plan was built with this handle, and the workspace has the size that the plan
        // needs. The caller vouches for the rest.
        let status = unsafe { ffi::mc_run(self.handle, plan, &raw const run, stream) };
        check("CUDNN", status)
    }

    /// Builds a plan. The inner result is cuDNN's refusal, if it has and will have no plan for the
    /// key.
    fn build(&mut self, key: &ffi::McKey) -> Result<Result<()>> {
        let numbers = numbers(key);
        if self.plans.get(&numbers).is_some() {
            return Ok(Ok(()));
        }
        if self.device.is_capturing()? {
            let given = "one that is built within a capture";
            let accepted = "one that is there: run a step of these lengths before it is captured";
            return Err(Error::argument("plan of CUDNN", given, accepted));
        }
        self.make_room()?;
        self.device.bind()?;
        let (mut plan, mut bytes) = (std::ptr::null_mut(), 0);
        // SAFETY: the handle is alive, and the addresses are those of values on this stack.
        let status = unsafe { ffi::mc_plan_new(self.handle, key, &raw mut plan, &raw mut bytes) };
        if let Err(refused) = check("plan of CUDNN", status) {
            return Ok(Err(refused));
        }
        // If there is no memory for its workspace, a plan is not kept.
        let bytes = usize::try_from(bytes).unwrap_or(0);
        if bytes > self.workspaces.last().map_or(0, Buffer::len) {
            match self.device.allocate(bytes) {
                Ok(larger) => self.workspaces.push(larger),
                Err(error) => {
                    // SAFETY: the plan was made above, and nothing else has it.
                    unsafe { ffi::mc_plan_free(plan) };
                    return Err(error);
                }
            }
        }
        self.plans.add(numbers, Some(plan));
        Ok(Ok(()))
    }

    /// Frees the least recently used plans until there is room for one more.
    fn make_room(&mut self) -> Result<()> {
        let gone = self.plans.make_room();
        if gone.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        let waited = self.device.synchronize();
        for plan in gone {
            // SAFETY: this session made the plan and has removed it from its list. Every launch of
            // it was on the device's stream, which was waited for. None was in a capture, so no
            // graph has it. If waiting failed, the context is lost, and nothing runs in it.
            unsafe { ffi::mc_plan_free(plan) };
        }
        waited
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // cuDNN frees in the current context of the calling thread. An error means that the context
        // is already lost.
        let _ = self.device.bind();
        let _ = self.device.synchronize();
        // SAFETY: this session made the plans and the handle, and nothing uses them any more. The
        // plans are freed before the handle with which they were built.
        unsafe {
            for plan in self.plans.all() {
                ffi::mc_plan_free(plan);
            }
            ffi::mc_handle_free(self.handle);
        }
    }
}

/// The bytes of a key, which identify it.
type Numbers = [u8; 9 * size_of::<i64>() + 10 * size_of::<i32>()];

fn numbers(key: &ffi::McKey) -> Numbers {
    // SAFETY: the key consists of nine numbers of 64 bits and ten of 32 bits. The compiler checks
    // that both types have one size, so no byte is padding.
    unsafe { std::mem::transmute(*key) }
}
