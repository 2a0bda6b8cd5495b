//! The GPU as a [`Device`](mla_runtime::device::Device).
//!
//! cudarc gives memory, streams and graphs. The helper operations are kernels of this crate. GEMMs
//! go through cuBLAS, except those of few tokens with a matrix per head, for which this crate has a
//! kernel. A handle for batch-invariant problems
//! ([`batch_invariant`](mla_runtime::device::Device::batch_invariant)) uses this crate's kernels
//! for any number of rows, and refuses GEMMs that they do not take.
//!
//! There are two tiers. The typed one is [`Cuda`] with the runtime's tensors over [`Bytes`]: the
//! bytes of a [`Buffer`], or of a cudarc slice through [`Cuda::lending`]. The raw one, for engines
//! with memory pools of their own, is [`Bytes::from_raw`] over any address. Below it is
//! `mla_kernels::raw` (feature `raw`), the C interface itself.
//!
//! A handle is a context and a stream. Its memory belongs to that stream: buffers, loans, and what
//! is made from them (views, workspaces, graphs). Nothing orders two streams, so every operation
//! and every layer refuses memory of another stream, with an error that names the field. Two
//! handles of the same stream count as one. Memory that two streams share is lent to each by
//! [`Bytes::from_raw`], whose caller orders the streams.
//!
//! Operations are enqueued on the device's own stream and return at once, with four exceptions that
//! wait for the stream. These are [`download`](mla_runtime::tensor::Memory::download),
//! [`synchronize`](mla_runtime::tensor::Memory::synchronize), freeing a [`Buffer`], and an
//! [`upload`](mla_runtime::tensor::Memory::upload) from pinned memory (memory that is registered
//! with the driver). Only [`allocate`](mla_runtime::tensor::Memory::allocate) allocates. Everything
//! else can be captured into a [`Graph`], except an upload: a capture refuses it, since a replay
//! would read the host's memory again.

pub(crate) mod argument;
mod blas;
mod cache_expand;
#[cfg(feature = "faults")]
pub mod faults;
mod graph;
mod head_gemm;
mod lend;
mod loaded;
mod machine;
mod memory;
mod module;
mod operations;
mod probe;
mod rotary;
mod stream;

use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The version of cudarc whose contexts, streams and slices this crate accepts.
pub use cudarc;
use cudarc::driver::{CudaContext, CudaStream};
pub use graph::Graph;
pub use lend::{Lend, LendMut, Loans};
pub use memory::{Buffer, Bytes, BytesMut};
use mla_runtime::spec::{Capability, Target};
use mla_runtime::{Error, Result};
#[cfg(feature = "sm90")]
pub(crate) use operations::rows_params;
use rotary::Rotary;
use stream::StreamId;

use crate::gpu::{self, Gpu};
use crate::raw;
use blas::Blas;
pub(crate) use memory::Allocated;
use module::Module;

/// The fence that builds without kernels use.
const FENCE: &CStr = module::text(concat!(include_str!("fence.ptx"), "\0"));

/// The lowest compute capability of GPUs on which a kernel may begin before the preceding one has
/// ended.
const DEPENDENT_LAUNCH: Capability = Capability::new(9, 0);

/// A GPU and one stream of it. Cloning gives another handle to the same stream.
#[derive(Clone)]
pub struct Cuda {
    inner: Arc<Inner>,
    /// True if a row's bits must not depend on the other rows of an operation.
    batch_invariant: bool,
}

struct Inner {
    stream: Arc<CudaStream>,
    gpu: Gpu,
    blas: Blas,
    account: Allocated,
    /// The fence of a build without kernels, on a GPU whose kernels may overlap.
    fence: Option<Module>,
    /// A stream on which only waits are enqueued, see [`Cuda::aside`].
    aside: OnceLock<Arc<CudaStream>>,
    /// The thread that captures a graph from the stream through this handle, or 0 if none does.
    capturing: AtomicU64,
}

impl Cuda {
    /// Opens the GPU with this number, in its primary context, with a new stream.
    ///
    /// This loads every helper kernel and allocates the workspace of cuBLAS, so that no later
    /// operation has to.
    ///
    /// # Errors
    ///
    /// If there is no driver or no such GPU, if the driver is too old for the kernels, or if a call
    /// of the driver fails.
    pub fn new(ordinal: usize) -> Result<Self> {
        // The presence of the driver is checked first, since cudarc panics without one.
        gpu::gpu(ordinal).map_err(|cause| unavailable(ordinal, cause))?;
        let context = CudaContext::new(ordinal).map_err(failed("retain context"))?;
        let stream = context.new_stream().map_err(failed("create stream"))?;
        Self::on_stream(stream)
    }

    /// Makes a handle of a stream of cudarc's and the GPU that it belongs to.
    ///
    /// Another library's stream has to be adopted first, with cudarc's `wrap_borrowed_stream`. The
    /// per-thread default stream is refused: its handle is a different stream on each thread, and
    /// nothing orders these streams.
    ///
    /// # Errors
    ///
    /// If the stream is the per-thread default one, if the driver is too old for the kernels, or if
    /// a call of the driver fails.
    pub fn on_stream(stream: Arc<CudaStream>) -> Result<Self> {
        stream::check_shared("stream", &stream)?;
        let ordinal = stream.context().ordinal();
        let gpu = gpu::gpu(ordinal).map_err(|cause| unavailable(ordinal, cause))?;
        stream::bind(stream.context()).map_err(failed("bind context"))?;
        // SAFETY: the function has no parameters, and the context it loads into is current.
        let loaded = unsafe { raw::mla_load_helpers() };
        // A build without kernels has no helpers, and each operation that needs one fails with that
        // reason. But it needs a fence, since kernels from elsewhere may overlap.
        let fence = match loaded.code {
            raw::LEFT_OUT if gpu.capability >= DEPENDENT_LAUNCH => {
                Some(Module::load(&stream, FENCE, c"fence")?)
            }
            raw::LEFT_OUT => None,
            // SAFETY: the status is that of a function of `raw`.
            _ => unsafe { raw::check("load kernels", loaded) }.map(|()| None)?,
        };
        let blas = Blas::new(&stream)?;
        Ok(Self {
            inner: Arc::new(Inner {
                stream,
                gpu,
                blas,
                account: Allocated::default(),
                fence,
                aside: OnceLock::new(),
                capturing: AtomicU64::new(0),
            }),
            batch_invariant: false,
        })
    }

    /// Returns the stream on which everything is enqueued. cudarc makes events and waits between
    /// streams from it.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.inner.stream
    }

    /// Returns the identity of the stream. All memory of this handle has this identity.
    pub fn stream_id(&self) -> impl fmt::Display + fmt::Debug + Copy + Eq + use<> {
        StreamId::of(self.stream())
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.inner.gpu
    }

    /// Returns the size in bytes of all live buffers that this device and its clones allocated,
    /// without the workspace of cuBLAS.
    pub fn allocated_bytes(&self) -> u64 {
        self.inner.account.bytes()
    }

    /// Returns the stream's handle for the raw tier.
    pub fn raw_stream(&self) -> *mut c_void {
        self.inner.stream.cu_stream().cast()
    }

    /// True if the stream is capturing a graph. Meanwhile a backend must not prepare anything on
    /// the host or copy from the host, since the graph would not repeat it.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn is_capturing(&self) -> Result<bool> {
        stream::is_capturing(self.stream()).map_err(failed("ask for a capture"))
    }

    fn target(&self) -> Target {
        self.inner.gpu.target()
    }

    fn account(&self) -> &Allocated {
        &self.inner.account
    }

    fn blas(&self) -> &Blas {
        &self.inner.blas
    }

    /// Makes the stream's context current for this thread.
    ///
    /// Call this before each launch through the raw tier or through a C function of your own, since
    /// such a launch goes to the current context.
    ///
    /// # Errors
    ///
    /// If the driver refuses, or if another thread [captures](Self::capture) the stream.
    pub fn bind(&self) -> Result<()> {
        #[cfg(feature = "faults")]
        self.account().faults().reach(faults::Operation::Launch)?;
        self.make_current()
    }

    /// Enqueues a launch through the C interface.
    ///
    /// # Safety
    ///
    /// `function` is one of [`raw`], and every address in `params` is as its header says.
    pub(crate) unsafe fn launch<Params>(
        &self,
        operation: &'static str,
        function: unsafe extern "C" fn(*const Params, *mut c_void) -> raw::MlaStatus,
        params: &Params,
    ) -> Result<()> {
        self.bind()?;
        // SAFETY: this function's own contract covers the addresses in `params`. The context is
        // current, and the status is the launch's own.
        unsafe { raw::check(operation, function(params, self.raw_stream())) }
    }

    /// Makes the stream's context current for work other than launches.
    fn make_current(&self) -> Result<()> {
        let inner = &self.inner;
        stream::bind(inner.stream.context()).map_err(failed("bind context"))?;
        let capturing = inner.capturing.load(Ordering::Acquire);
        if capturing != 0 && capturing != stream::this_thread() {
            return Err(Error::argument(
                "stream",
                "one that another thread captures a graph from",
                "one that no other thread captures",
            ));
        }
        Ok(())
    }

    /// Makes another stream of the same context.
    pub(crate) fn new_stream(&self) -> Result<Arc<CudaStream>> {
        let context = self.stream().context();
        stream::apart(context, || context.new_stream()).map_err(failed("create stream"))
    }

    /// Returns a stream on which a slice's address can be taken.
    ///
    /// Taking the address makes that stream wait for the slice's events. The device's own stream
    /// must not do so: no event from outside may enter a capture. If cudarc has no events to wait
    /// for, this is the device's own stream.
    fn aside(&self) -> Result<&Arc<CudaStream>> {
        let context = self.stream().context();
        if !context.is_managing_stream_synchronization() {
            return Ok(self.stream());
        }
        if let Some(aside) = self.inner.aside.get() {
            return Ok(aside);
        }
        let made = self.new_stream()?;
        Ok(self.inner.aside.get_or_init(|| made))
    }

    /// Refuses memory that belongs to another stream.
    fn check_stream(&self, field: &'static str, given: StreamId) -> Result<()> {
        let own = StreamId::of(self.stream());
        if given == own {
            return Ok(());
        }
        let accepted = format!("that of {own}, which the device enqueues on");
        Err(Error::argument(
            field,
            format!("memory of {given}"),
            accepted,
        ))
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gpu {
            ordinal,
            name,
            capability,
            ..
        } = &self.inner.gpu;
        write!(f, "Cuda({ordinal}: {name}, sm {capability})")
    }
}

fn unavailable(ordinal: usize, cause: mla_runtime::spec::Cause) -> Error {
    Error::Device {
        device: "cuda",
        operation: "open device",
        message: format!("GPU {ordinal}: {cause}; {}", cause.remedy()),
    }
}

pub(crate) fn failed<E: fmt::Display>(operation: &'static str) -> impl FnOnce(E) -> Error {
    move |error| Error::Device {
        device: "cuda",
        operation,
        message: error.to_string(),
    }
}
