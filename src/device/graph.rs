//! CUDA graphs: work that is captured once, and then enqueued again at the cost of one launch.

use std::ptr;
use std::sync::atomic::Ordering;

use cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as THREAD_LOCAL;
use cudarc::driver::sys::{self, CUgraph, CUgraphExec};
use cudarc::driver::{DriverError, result};
use mla_runtime::{Error, Result};

use super::stream::{self, StreamId, this_thread};
use super::{Cuda, failed};

/// Work that was captured from a device's stream.
pub struct Graph {
    graph: CUgraph,
    executable: CUgraphExec,
    /// Keeps alive the kernels and the cuBLAS workspace that the captured launches use.
    device: Cuda,
}

// SAFETY: the driver asks that calls on one graph do not overlap, from any thread. `Graph` is not
// `Sync`, and every method that makes a call takes it by reference from the thread that has it.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues the captured work on the stream that it was captured from.
    ///
    /// # Safety
    ///
    /// All memory that the captured launches use is still allocated and stays so until the stream
    /// has passed this replay. No other stream accesses it in conflict meanwhile. The compiler
    /// cannot check this, since the borrows of the capture have ended. The memory includes slices
    /// that were [lent](Cuda::lending) during the capture, since no event orders a replay with
    /// other streams. If another thread enqueued work on the stream during the capture, it also
    /// includes the memory of that work.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub unsafe fn replay(&self) -> Result<()> {
        stream::bind(self.device.stream().context()).map_err(failed("bind context"))?;
        // SAFETY: graph and stream live. The caller answers for the memory that the graph accesses.
        unsafe { result::graph::launch(self.executable, self.device.stream().cu_stream()) }
            .map_err(failed("replay graph"))
    }

    pub(super) fn raw(&self) -> CUgraph {
        self.graph
    }

    /// Returns the stream that the graph was captured from. Replays are enqueued on it.
    pub(super) fn stream_id(&self) -> StreamId {
        StreamId::of(self.device.stream())
    }

    /// Uploads the graph to the device, so that the first replay is as fast as any other.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn upload(&self) -> Result<()> {
        stream::bind(self.device.stream().context()).map_err(failed("bind context"))?;
        // SAFETY: graph and stream live.
        unsafe { sys::cuGraphUpload(self.executable, self.device.stream().cu_stream()) }
            .result()
            .map_err(failed("upload graph"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let destroy = || {
            stream::bind(self.device.stream().context())?;
            if !self.executable.is_null() {
                // SAFETY: it was instantiated once and is destroyed once. The driver lets a replay
                // that is enqueued run to its end.
                unsafe { result::graph::exec_destroy(self.executable) }?;
            }
            // SAFETY: the capture returned the graph, and it is destroyed once.
            unsafe { result::graph::destroy(self.graph) }
        };
        if let Err(error) = destroy() {
            stream::log("destroy graph", &error);
        }
    }
}

impl Cuda {
    /// Captures what `record` enqueues on this device instead of running it.
    ///
    /// Other threads and other streams go on as before: nothing of the context's state changes.
    /// Another thread's operations on this handle or its clones are refused meanwhile, since they
    /// would be captured, too. Slices that `record` [lends](Cuda::lending) are captured by their
    /// addresses, without cudarc's events. `record` must not enqueue cudarc's own operations on
    /// slices that cudarc tracks, since their events lie outside of the graph.
    ///
    /// # Errors
    ///
    /// The error of `record`, or the driver's if something was called that cannot be captured, such
    /// as an allocation, a copy to the host or a wait.
    pub fn capture(&self, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        let capture = Capture::begin(self)?;
        record(self)?;
        let graph = capture.end()?;
        graph.ok_or_else(|| Error::Device {
            device: "cuda",
            operation: "end capture",
            message: "the capture was invalidated".to_owned(),
        })
    }
}

/// A capture that has begun. Dropping it ends the capture, since the stream would be useless
/// otherwise.
struct Capture<'a> {
    device: &'a Cuda,
    is_open: bool,
}

impl<'a> Capture<'a> {
    fn begin(device: &'a Cuda) -> Result<Self> {
        device.make_current()?;
        // This stream is made before the capture, since none should be made during it.
        device.aside()?;
        let capturing = &device.inner.capturing;
        capturing
            .compare_exchange(0, this_thread(), Ordering::AcqRel, Ordering::Relaxed)
            .map_err(|_| {
                let accepted = "one that captures no graph yet";
                Error::argument("stream", "one that captures a graph", accepted)
            })?;
        // SAFETY: the stream lives, and its context is current.
        let begun =
            unsafe { result::stream::begin_capture(device.stream().cu_stream(), THREAD_LOCAL) };
        if let Err(error) = begun {
            capturing.store(0, Ordering::Release);
            return Err(failed("begin capture")(error));
        }
        Ok(Self {
            device,
            is_open: true,
        })
    }

    /// Ends the capture. Returns `None` if the capture was invalidated without an error of the
    /// driver.
    fn end(mut self) -> Result<Option<Graph>> {
        self.close().map_err(failed("end capture"))
    }

    fn close(&mut self) -> std::result::Result<Option<Graph>, DriverError> {
        self.is_open = false;
        let stream = self.device.stream();
        let ended = stream::bind(stream.context())
            // SAFETY: the stream lives, and the capture began on this thread.
            .and_then(|()| unsafe { result::stream::end_capture(stream.cu_stream()) });
        self.device.inner.capturing.store(0, Ordering::Release);
        let graph = ended?;
        if graph.is_null() {
            return Ok(None);
        }
        let mut graph = Graph {
            graph,
            executable: ptr::null_mut(),
            device: self.device.clone(),
        };
        // SAFETY: the driver just returned the graph. It writes to one place that lives.
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut graph.executable, graph.graph, 0) }
            .result()?;
        Ok(Some(graph))
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.is_open {
            return;
        }
        // The caller gets the error that ended the capture early, so this one is only logged.
        if let Err(error) = self.close() {
            tracing::debug!(%error, "a capture that was given up");
        }
    }
}
