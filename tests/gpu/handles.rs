//! Tests of handles, streams and slices: their order, their refusals, and their state after an
//! error.

use std::sync::Arc;
use std::thread;

use cudarc::driver::{CudaSlice, CudaStream, DriverError, sys};
use mla_kernels::Cuda;
use mla_kernels::device::Buffer;
use mla_runtime::device::Device as _;
use mla_runtime::model::DType;
use mla_runtime::tensor::{Layout, LseLayout, LseMut, LseRef, Memory as _, TensorMut, TensorRef};
use mla_runtime::{Error, Result};

use crate::common::{download, gpu, message, on_new_stream, upload};

const SQUARE: Layout = Layout::contiguous(DType::F32, [1, 4, 4]);

fn read(buffer: &Buffer) -> TensorRef<'_, Cuda> {
    TensorRef::new(Cuda::bytes(buffer), SQUARE).unwrap()
}

fn write(buffer: &mut Buffer) -> TensorMut<'_, Cuda> {
    TensorMut::new(Cuda::bytes_mut(buffer), SQUARE).unwrap()
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn memory_of_another_stream_is_refused_by_its_field() {
    let gpu = &*gpu();
    let second = on_new_stream(gpu);
    let own = upload(gpu, &[1; 64]).unwrap();
    let mut own_too = upload(gpu, &[2; 64]).unwrap();
    let mut theirs = second.allocate(64).unwrap();
    let refused = |field: &str, message: &str| {
        let given = format!("{field}: given memory of {}, accepted", second.stream_id());
        assert!(message.starts_with(&given), "{message}");
    };

    let given = message(gpu.copy(read(&theirs), write(&mut own_too)));
    refused("copy source", &given);
    let given = message(gpu.copy(read(&own), write(&mut theirs)));
    refused("copy target", &given);
    refused("copy target", &message(gpu.clear(write(&mut theirs))));
    let given = message(gpu.gemm(read(&own), read(&theirs), write(&mut own_too)));
    refused("gemm b", &given);
    let given = message(gpu.gemm(read(&own), read(&own), write(&mut theirs)));
    refused("gemm c", &given);
    let given = message(gpu.upload(&[0; 64], theirs.bytes_mut()));
    refused("device bytes", &given);
    let given = message(gpu.download(theirs.bytes(), &mut [0; 64]));
    refused("device bytes", &given);
    let heads = LseLayout::heads_first(4, 1);
    let given = message(gpu.merge(
        write(&mut own_too),
        LseMut::new(theirs.bytes_mut(), heads).unwrap(),
        read(&own),
        LseRef::new(own.bytes(), heads).unwrap(),
    ));
    refused("lse", &given);
    assert_eq!(download(gpu, &own_too).unwrap(), [2; 64]);

    // Two handles of the same stream count as one, as clones do.
    let same = Cuda::on_stream(gpu.stream().clone()).unwrap();
    assert_eq!(same.stream_id(), gpu.stream_id());
    same.copy(read(&own), write(&mut own_too)).unwrap();
    assert_eq!(download(&gpu.clone(), &own_too).unwrap(), [1; 64]);
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn a_graph_of_another_stream_is_refused() {
    let gpu = &*gpu();
    let second = on_new_stream(gpu);
    let mut buffer = gpu.allocate(64).unwrap();
    let graph = gpu.capture(|gpu| gpu.clear(write(&mut buffer))).unwrap();
    assert_eq!(gpu.loaded_kernels(&graph).unwrap().len(), 1);
    let refused = message(second.loaded_kernels(&graph));
    assert!(
        refused.starts_with("graph: given memory of stream"),
        "{refused}"
    );
}

const BYTES: usize = 64 << 20;

/// Makes a slice whose last write still runs when this returns. It writes ones, after many writes
/// of zeros.
fn written_late(stream: &Arc<CudaStream>) -> CudaSlice<u8> {
    let ones = stream.clone_htod(&vec![1u8; BYTES]).unwrap();
    let zeros = stream.alloc_zeros::<u8>(BYTES).unwrap();
    let mut slice = stream.alloc_zeros::<u8>(BYTES).unwrap();
    for _ in 0..200 {
        stream.memcpy_dtod(&zeros, &mut slice).unwrap();
    }
    stream.memcpy_dtod(&ones, &mut slice).unwrap();
    slice
}

fn are_ones(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 1)
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn a_capture_leaves_the_order_of_other_threads() {
    let gpu = &*gpu();
    let context = gpu.stream().context();
    let [first, second] = [(); 2].map(|()| context.new_stream().unwrap());
    let mut buffer = gpu.allocate(64).unwrap();
    let graph = gpu.capture(|gpu| {
        assert!(context.is_event_tracking());
        // A thread without a capture writes a slice on one stream and reads it on another.
        let ordered = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let written = written_late(&first);
                let mut read = second.alloc_zeros::<u8>(BYTES).unwrap();
                second.memcpy_dtod(&written, &mut read).unwrap();
                are_ones(&second.clone_dtoh(&read).unwrap())
            });
            reader.join().unwrap()
        });
        assert!(ordered, "read before it was written");
        gpu.clear(write(&mut buffer))
    });
    graph.unwrap();
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn another_threads_work_does_not_enter_a_capture() {
    let gpu = &*gpu();
    let [mut own, mut theirs] = [(); 2].map(|()| upload(gpu, &[7; 64]).unwrap());
    let graph = gpu.capture(|gpu| {
        let refused = thread::scope(|scope| {
            let thread = scope.spawn(|| {
                [
                    message(gpu.clear(write(&mut theirs))),
                    message(gpu.synchronize()),
                    message(gpu.capture(|_| Ok(()))),
                ]
            });
            thread.join().unwrap()
        });
        for refused in refused {
            let expected = "stream: given one that another thread captures a graph from";
            assert!(refused.starts_with(expected), "{refused}");
        }
        gpu.clear(write(&mut own))
    });
    // SAFETY: the buffers live, and only this stream uses them.
    unsafe { graph.unwrap().replay() }.unwrap();
    assert_eq!(download(gpu, &own).unwrap(), [0; 64]);
    assert_eq!(download(gpu, &theirs).unwrap(), [7; 64]);
    // All threads may use the handle again.
    thread::scope(|scope| scope.spawn(|| gpu.synchronize()).join().unwrap()).unwrap();
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn slices_are_lent_in_order_whether_or_not_cudarc_tracks_them() {
    let gpu = &*gpu();
    let context = gpu.stream().context();
    let layout = Layout::contiguous(DType::F32, [1, 1, BYTES / 4]);
    for tracked in [true, false] {
        let stream = context.new_stream().unwrap();
        if !tracked {
            // SAFETY: the slices below are used on one stream, and lent to another.
            unsafe { context.disable_event_tracking() };
        }
        let (from, mut to) = (
            written_late(&stream),
            stream.alloc_zeros::<u8>(BYTES).unwrap(),
        );
        let zeros = vec![0u8; BYTES];
        let lent = gpu.lending(|loans| {
            let (from, mut to) = (loans.lend(&from)?, loans.lend_mut(&mut to)?);
            for _ in 0..200 {
                let to = TensorMut::new(Cuda::reborrow(&mut to), layout)?;
                gpu.copy(TensorRef::new(from, layout)?, to)?;
            }
            Ok(())
        });
        // If nothing waited for the copies, the memory would be freed and written again while they
        // still run.
        drop(from);
        let again = stream.clone_htod(&zeros).unwrap();
        let copied = stream.clone_dtoh(&to).unwrap();
        if !tracked {
            // SAFETY: this restores the previous state.
            unsafe { context.enable_event_tracking() };
        }
        lent.unwrap();
        assert!(are_ones(&copied), "tracked: {tracked}");
        drop(again);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn loans_end_with_a_closure_that_fails_or_unwinds() {
    let gpu = &*gpu();
    let stream = gpu.stream().context().new_stream().unwrap();
    let mut slice = stream.alloc_zeros::<u8>(64).unwrap();
    let layout = Layout::contiguous(DType::F32, [1, 1, 16]);
    let failed = gpu.lending(|loans| {
        gpu.clear(TensorMut::new(loans.lend_mut(&mut slice)?, layout)?)?;
        Err::<(), _>(Error::argument("closure", 1, 2))
    });
    assert_eq!(message(failed), "closure: given 1, accepted 2");
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        gpu.lending(|loans| -> Result<()> {
            loans.lend_mut(&mut slice)?;
            panic!("in a loan")
        })
    }));
    assert!(unwound.is_err());
    stream.memset_zeros(&mut slice).unwrap();
    stream.synchronize().unwrap();
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn slices_with_events_are_lent_in_a_capture() {
    let gpu = &*gpu();
    let stream = gpu.stream().context().new_stream().unwrap();
    let from = stream.clone_htod(&[1f32; 64]).unwrap();
    let mut to = stream.alloc_zeros::<f32>(64).unwrap();
    let layout = Layout::contiguous(DType::F32, [1, 1, 64]);
    let graph = gpu.capture(|gpu| {
        gpu.lending(|loans| {
            let (from, to) = (loans.lend(&from)?, loans.lend_mut(&mut to)?);
            gpu.copy(TensorRef::new(from, layout)?, TensorMut::new(to, layout)?)
        })
    });
    let graph = graph.unwrap();
    assert_eq!(
        stream.clone_dtoh(&to).unwrap(),
        [0.0; 64],
        "a capture ran something"
    );
    stream.synchronize().unwrap();
    // SAFETY: the slices live, and no other stream uses them at the same time.
    unsafe { graph.replay() }.unwrap();
    gpu.synchronize().unwrap();
    assert_eq!(stream.clone_dtoh(&to).unwrap(), [1.0; 64]);
}

/// Checks that an error that cudarc keeps from a drop does not make an operation fail here.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn an_earlier_drops_error_fails_no_operation_and_no_free() {
    let gpu = &*gpu();
    let context = gpu.stream().context();
    let keep = || {
        let error = DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE);
        context.record_err(Err::<(), _>(error));
    };
    let layout = Layout::contiguous(DType::F32, [1, 1, BYTES / 4]);
    let before = gpu.allocated_bytes();

    keep();
    let mut buffer = gpu.allocate(BYTES).unwrap();
    gpu.upload(&vec![3; BYTES], buffer.bytes_mut()).unwrap();
    gpu.clear(TensorMut::new(buffer.bytes_mut(), layout).unwrap())
        .unwrap();
    assert!(
        download(gpu, &buffer)
            .unwrap()
            .iter()
            .all(|byte| *byte == 0)
    );
    let kept = context.check_err();
    assert!(kept.is_err(), "the error is still there for whose it is");

    keep();
    let slice = {
        let made = gpu.stream().clone_htod(&[1f32; 16]);
        // cudarc's own call gets the error that cudarc kept.
        made.or_else(|_| gpu.stream().clone_htod(&[1f32; 16]))
            .unwrap()
    };
    keep();
    let graph = gpu
        .capture(|gpu| gpu.clear(TensorMut::new(buffer.bytes_mut(), layout)?))
        .unwrap();
    graph.upload().unwrap();
    gpu.lending(|loans| loans.lend(&slice).map(|_| ())).unwrap();
    Cuda::on_stream(gpu.stream().clone()).map(drop).unwrap();
    for _ in 0..500 {
        gpu.clear(TensorMut::new(buffer.bytes_mut(), layout).unwrap())
            .unwrap();
    }
    assert!(context.check_err().is_err());
    let enqueued = gpu.stream().record_event(None).unwrap();
    keep();
    drop(buffer);
    assert!(enqueued.is_complete(), "freed before the stream had passed");
    assert_eq!(gpu.allocated_bytes(), before);
    context.check_err().unwrap_err();
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn memory_that_cannot_be_waited_for_stays() {
    let gpu = &*gpu();
    let (mut buffer, other) = (gpu.allocate(64).unwrap(), gpu.allocate(64).unwrap());
    let before = gpu.allocated_bytes();
    let graph = gpu.capture(|gpu| {
        drop(other);
        gpu.clear(write(&mut buffer))
    });
    // The drop has not invalidated the capture.
    let graph = graph.unwrap();
    assert_eq!(gpu.allocated_bytes(), before);
    // SAFETY: the buffer lives, and only this stream uses it.
    unsafe { graph.replay() }.unwrap();
    gpu.synchronize().unwrap();
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn more_memory_than_there_is_is_an_error() {
    let gpu = &*gpu();
    for bytes in [1 << 44, usize::MAX] {
        match gpu.allocate(bytes).map(drop) {
            Err(Error::OutOfMemory {
                device: "cuda",
                bytes: given,
                free: Some(_),
            }) => {
                assert_eq!(given, bytes as u64);
            }
            other => panic!("{bytes} bytes: {other:?}"),
        }
    }
    gpu.allocate(64).unwrap();
    gpu.synchronize().unwrap();
}

/// Checks a refusal: the per-thread default stream has the same handle on all threads.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored handles"]
fn the_default_stream_of_each_thread_is_refused() {
    let stream = gpu().stream().context().per_thread_stream();
    assert_eq!(
        message(Cuda::on_stream(stream)),
        "stream: given the default stream of each thread, accepted one stream on all threads, such \
         as that of `CudaContext::new_stream`"
    );
}
