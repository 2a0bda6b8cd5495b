//! CUDA graphs: what was enqueued once, enqueued again at the cost of one launch.

use std::sync::Arc;

use cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as THREAD_LOCAL;
use cudarc::driver::sys::{CUgraph, CUgraphInstantiate_flags};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream};
use mla_runtime::error::{Error, Result};

use super::{Cuda, failed};

/// Work that was captured from a device's stream.
pub struct Graph {
    graph: CudaGraph,
}

// SAFETY: the driver asks that calls on one graph do not overlap, from whatever thread. `Graph` is
// not `Sync`, and every method that makes a call takes it by reference from the thread that has it.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues the captured work on the stream that it was captured from.
    ///
    /// # Safety
    ///
    /// All memory that the captured launches were given is still allocated and stays so until the
    /// stream has passed this, and no other stream accesses it in conflict meanwhile. The borrows
    /// that the capture was made with have ended, so the compiler cannot check it.
    ///
    /// # Errors
    ///
    /// Where the driver refuses.
    pub unsafe fn replay(&self) -> Result<()> {
        self.graph.launch().map_err(failed("replay graph"))
    }

    pub(super) fn raw(&self) -> CUgraph {
        self.graph.cu_graph()
    }

    /// Moves what the graph needs to the device, so that the first replay is as fast as any other.
    ///
    /// # Errors
    ///
    /// Where the driver refuses.
    pub fn upload(&self) -> Result<()> {
        self.graph.upload().map_err(failed("upload graph"))
    }
}

impl Cuda {
    /// Captures what `record` enqueues on this device instead of running it.
    ///
    /// cudarc's event tracking is off meanwhile for the whole context, since its events would tie
    /// the graph to work outside of it.
    ///
    /// # Errors
    ///
    /// That of `record`, or the driver's: where something was called that cannot be captured, such
    /// as an allocation, a copy to the host or a wait.
    pub fn capture(&self, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        let tracking = Untracked::new(self.stream().context());
        self.stream()
            .begin_capture(THREAD_LOCAL)
            .map_err(failed("begin capture"))?;
        let capture = Capture {
            stream: Some(self.stream()),
        };
        let recorded = record(self);
        let graph = capture.end();
        drop(tracking);
        recorded?;
        match graph? {
            Some(graph) => Ok(Graph { graph }),
            None => Err(Error::Device {
                device: "cuda",
                operation: "end capture",
                message: "the capture was invalidated".to_owned(),
            }),
        }
    }
}

// Ends the capture also where `record` unwinds: the stream would be useless otherwise.
struct Capture<'a> {
    stream: Option<&'a Arc<CudaStream>>,
}

impl Capture<'_> {
    fn end(mut self) -> Result<Option<CudaGraph>> {
        match self.stream.take() {
            Some(stream) => stream
                .end_capture(CUgraphInstantiate_flags(0))
                .map_err(failed("end capture")),
            None => Ok(None),
        }
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            drop(stream.end_capture(CUgraphInstantiate_flags(0)));
        }
    }
}

struct Untracked<'a> {
    context: &'a Arc<CudaContext>,
    was_tracking: bool,
}

impl<'a> Untracked<'a> {
    fn new(context: &'a Arc<CudaContext>) -> Self {
        let was_tracking = context.is_event_tracking();
        // SAFETY: slices that are made meanwhile have no events, which is what not tracking means
        // to their maker; those made before keep theirs. Captured work does not run yet, so nothing
        // of it can conflict with other streams; `Graph::replay` states what its caller must
        // ensure.
        unsafe { context.disable_event_tracking() };
        Self {
            context,
            was_tracking,
        }
    }
}

impl Drop for Untracked<'_> {
    fn drop(&mut self) {
        if self.was_tracking {
            // SAFETY: as above: this restores what was.
            unsafe { self.context.enable_event_tracking() };
        }
    }
}
