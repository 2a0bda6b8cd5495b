//! The cost of a dispatch. There is one program for each way to call a backend. All of them launch
//! the same kernel.
//!
//! The kernel is a function of the C interface, like the launch of a CUDA kernel. It does almost
//! nothing, so the counted instructions are those of the dispatch.

use std::ffi::c_void;
use std::hint::black_box;

use mla_cpu::Cpu;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Output, Query, StepLimits,
};
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::select::{Registry, Selection, SelectionRequest};
use mla_runtime::spec::{Problem, Target};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheRef, LseMut, TensorMut, TensorRef,
};
use mla_runtime::{Error, Result, backends, best_decode, mla_backend};

#[path = "../../../common/allocations.rs"]
mod allocations;

/// The arguments of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// `[tokens, heads, L+R]`.
    pub query: *const u8,
    /// The pages.
    pub cache: *const u8,
    /// The pages of each request.
    pub block_table: *const u8,
    /// `[tokens, heads, L]`.
    pub out: *mut u8,
    /// The kernel's own memory.
    pub workspace: *mut u8,
    /// The number of tokens.
    pub tokens: i32,
    /// The number of heads.
    pub heads: i32,
}

/// The launch of the kernel.
///
/// # Safety
///
/// `params` points to parameters, whose output has at least one byte.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn example_decode(params: *const Params, stream: *mut c_void) -> i32 {
    // SAFETY: this function's own contract: the parameters are valid.
    unsafe {
        let params = &*params;
        params.out.write_volatile(stream as usize as u8);
        i32::from(params.tokens < 0)
    }
}

/// Makes an error from a status other than 0.
#[cold]
#[inline(never)]
pub fn refused(status: i32) -> Error {
    Error::argument("status", status, 0)
}

/// A backend that only launches.
pub struct Launch {
    /// The stream for the launch.
    pub stream: *mut c_void,
}

// SAFETY: the stream is a number that is not dereferenced.
unsafe impl Send for Launch {}
// SAFETY: the stream is a number that is not dereferenced.
unsafe impl Sync for Launch {}

/// The workspace of [`Launch`].
pub struct LaunchState {
    /// The memory.
    pub workspace: Vec<u8>,
}

#[mla_backend(sm = "any", dtypes = "bf16", priority = 1)]
impl DecodeBackend for Launch {
    type Device = Cpu;
    type State = LaunchState;
    type Metadata = ();

    fn new(_: &Cpu, _: &LayerConfig) -> Result<Self> {
        Ok(Self {
            stream: std::ptr::null_mut(),
        })
    }

    fn state(&self, _: &Cpu, _: &StepLimits) -> Result<LaunchState> {
        Ok(LaunchState {
            workspace: vec![0; 64],
        })
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    #[inline]
    unsafe fn decode(
        &self,
        _: &Cpu,
        call: DecodeCall<'_, Cpu>,
        state: &mut LaunchState,
        (): &(),
    ) -> Result<()> {
        let Query::Concatenated(query) = call.query else {
            return Err(refused(-1));
        };
        let Output::Plain(out) = call.out else {
            return Err(refused(-2));
        };
        let params = Params {
            query: query.bytes().as_ptr(),
            cache: call.cache.bytes().as_ptr(),
            block_table: call.batch.block_table.entries().bytes().as_ptr(),
            tokens: query.shape()[0] as i32,
            heads: query.shape()[1] as i32,
            out: out.into_bytes().as_mut_ptr(),
            workspace: state.workspace.as_mut_ptr(),
        };
        // SAFETY: the parameters are on this stack, and the output was checked to have the size of
        // its shape.
        match unsafe { example_decode(&params, self.stream) } {
            0 => Ok(()),
            status => Err(refused(status)),
        }
    }
}

/// Another backend for the same problem with a lower priority, so that there is a choice.
pub struct Other(Launch);

#[mla_backend(sm = "any", dtypes = "bf16")]
impl DecodeBackend for Other {
    type Device = Cpu;
    type State = LaunchState;
    type Metadata = ();

    fn new(device: &Cpu, config: &LayerConfig) -> Result<Self> {
        Launch::new(device, config).map(Self)
    }

    fn state(&self, device: &Cpu, limits: &StepLimits) -> Result<LaunchState> {
        DecodeBackend::state(&self.0, device, limits)
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    unsafe fn decode(
        &self,
        device: &Cpu,
        call: DecodeCall<'_, Cpu>,
        state: &mut LaunchState,
        (): &(),
    ) -> Result<()> {
        black_box(());
        // SAFETY: the caller keeps the same contract.
        unsafe { DecodeBackend::decode(&self.0, device, call, state, &()) }
    }
}

/// The backends to choose from.
pub type Backends = backends![Other, Launch];

/// The problem: one token of two heads.
pub const PROBLEM: Problem = Problem::new(MlaDims::R1, 2, DType::BF16);

/// The type that the compiler chooses.
pub type Chosen = best_decode!(Backends, Target::CPU, PROBLEM);

/// The values that an engine keeps for its calls.
pub struct Engine<B: DecodeBackend<Device = Cpu>> {
    /// The device.
    pub device: Cpu,
    /// The backend of a layer.
    pub backend: B,
    /// The backend's state.
    pub state: B::State,
    /// The backend's metadata.
    pub metadata: B::Metadata,
}

/// The engine's configuration.
pub const CONFIG: LayerConfig = LayerConfig::new(PROBLEM, 0.1);

/// The engine's limits.
pub const LIMITS: StepLimits = StepLimits::new(1, 1, 1).with_context_rows(1);

impl<B: DecodeBackend<Device = Cpu>> Engine<B> {
    /// An engine with a backend of this type.
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    pub fn new() -> Result<Self> {
        let device = Cpu::new();
        let backend = B::new(&device, &CONFIG)?;
        Ok(Self {
            state: backend.state(&device, &LIMITS)?,
            metadata: backend.metadata(&device, &LIMITS)?,
            backend,
            device,
        })
    }
}

/// Selects backends at run time.
///
/// # Errors
///
/// If no backend fits.
pub fn select() -> std::result::Result<Selection, mla_runtime::select::SelectionError> {
    Registry::of::<backends![mla_cpu::CpuPrefill], Backends>()?
        .select(&SelectionRequest::new(Target::CPU, PROBLEM))
}

/// Dispatches the number of times that the program's first argument gives, and prints the number of
/// allocations. Every program must run the same code here, so the function takes a pointer.
///
/// # Errors
///
/// The first error of a dispatch.
pub fn drive(dispatch: &mut dyn FnMut(DecodeCall<'_, Cpu>) -> Result<()>) -> Result<()> {
    let argument = std::env::args().nth(1).unwrap_or_default();
    let count: u64 = argument
        .parse()
        .map_err(|_| Error::argument("count", &argument, "a number of dispatches"))?;
    let row = MlaDims::R1.row() as usize;
    let (latent, heads) = (MlaDims::R1.latent as usize, PROBLEM.heads as usize);
    let layout =
        CacheLayout::contiguous(MlaDims::R1, KvFormat::BF16, 1, PROBLEM.page_size as usize);
    let query = vec![0u8; 2 * heads * row];
    let cache = vec![0u8; layout.page_stride];
    let mut out = vec![0u8; 2 * heads * latent];
    let mut lse = vec![0f32; heads];
    let tensor = |width| mla_runtime::tensor::Layout::contiguous(DType::BF16, [1, heads, width]);
    let mut run = || {
        (0..count).try_for_each(|_| {
            let call = DecodeCall::new(
                Query::Concatenated(TensorRef::new(&query[..], tensor(row))?),
                CacheRef::new(&cache[..], layout)?,
                DecodeBatch::new(
                    BlockTable::new(ArrayRef::from_slice(&[0]), 1, 1)?,
                    (ArrayRef::from_slice(&[1]), 1),
                    (ArrayRef::from_slice(&[0, 1]), 1),
                ),
                Output::Plain(TensorMut::new(&mut out[..], tensor(latent))?),
            );
            dispatch(call.with_lse(LseMut::from_slice(&mut lse, heads, 1)?))
        })
    };
    let mut result = Ok(());
    let allocations = allocations::count(|| result = run());
    println!("{count} dispatches, {allocations} allocations");
    result
}
