//! A stream: its identity, and calls of the driver that report only their own errors.
//!
//! If `Drop` of one of cudarc's types fails, cudarc stores the error in the context, and the next
//! call on the same context returns it. That call would then fail although nothing is wrong with
//! it. If it is the wait before a free, memory would be freed while it is in use. This module
//! therefore avoids the calls of cudarc that look at the stored error.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{CUevent_flags, CUevent_wait_flags, CUstreamCaptureStatus};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use mla_runtime::Error;

type Result<T> = std::result::Result<T, DriverError>;

/// The driver's handle of the stream that each thread has by default.
const PER_THREAD: usize = 2;

/// Identity of a stream. Accesses to memory are in order if they are enqueued on equal streams.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct StreamId {
    ordinal: usize,
    context: usize,
    stream: usize,
}

impl StreamId {
    pub(super) fn of(stream: &CudaStream) -> Self {
        Self {
            ordinal: stream.context().ordinal(),
            context: stream.context().cu_ctx().addr(),
            stream: stream.cu_stream().addr(),
        }
    }
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ordinal,
            context,
            stream,
        } = self;
        write!(
            f,
            "stream {stream:#x} of GPU {ordinal}, context {context:#x}"
        )
    }
}

/// Refuses the handle of the per-thread default stream. It stands for another stream on each
/// thread, so nothing orders what threads enqueue through it.
pub(super) fn check_shared(field: &'static str, stream: &CudaStream) -> mla_runtime::Result<()> {
    if stream.cu_stream().addr() != PER_THREAD {
        return Ok(());
    }
    Err(Error::argument(
        field,
        "the default stream of each thread",
        "one stream on all threads, such as that of `CudaContext::new_stream`",
    ))
}

/// Returns a number that no other thread of the process has or had.
pub(super) fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

/// Makes the context current for this thread.
pub(super) fn bind(context: &CudaContext) -> Result<()> {
    let wanted = context.cu_ctx();
    if result::ctx::get_current()? == Some(wanted) {
        return Ok(());
    }
    // SAFETY: the context lives as long as the object that owns it.
    unsafe { result::ctx::set_current(wanted) }
}

/// Waits for everything that is enqueued on the stream.
pub(super) fn synchronize(stream: &CudaStream) -> Result<()> {
    bind(stream.context())?;
    // SAFETY: the stream lives as long as the object that owns it.
    unsafe { result::stream::synchronize(stream.cu_stream()) }
}

/// True if the stream captures a graph.
pub(super) fn is_capturing(stream: &CudaStream) -> Result<bool> {
    bind(stream.context())?;
    // SAFETY: the stream lives as long as the object that owns it.
    let status = unsafe { result::stream::is_capturing(stream.cu_stream()) }?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Makes `waiting` wait for everything that is enqueued on `other`.
pub(super) fn join(waiting: &CudaStream, other: &CudaStream) -> Result<()> {
    bind(other.context())?;
    let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
    // SAFETY: the streams live as long as the objects that own them, and the event was just made.
    let joined = unsafe {
        result::event::record(event, other.cu_stream()).and_then(|()| {
            let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(waiting.cu_stream(), event, flags)
        })
    };
    // SAFETY: the event is destroyed once. The driver keeps the part of it that the wait above
    // needs.
    let destroyed = unsafe { result::event::destroy(event) };
    joined.and(destroyed)
}

/// Makes a call of cudarc's that reads or writes the context's stored error. An earlier error does
/// not affect the call, and the call's own error is returned.
pub(super) fn apart<T>(context: &Arc<CudaContext>, call: impl FnOnce() -> Result<T>) -> Result<T> {
    let earlier = context.check_err();
    let given = call();
    let own = context.check_err();
    context.record_err(earlier);
    let given = given?;
    own.map(|()| given)
}

/// Logs an error that cannot be returned to a caller.
pub(super) fn log(operation: &'static str, error: &dyn fmt::Display) {
    tracing::error!(operation, %error, "a GPU's resource was not given back");
}
