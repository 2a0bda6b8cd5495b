//! Tests that a fence orders kernels that would overlap, in every build. In a build of the device
//! alone, it is PTX.

use mla_kernels::device::Buffer;
use mla_runtime::device::Device as _;
use mla_runtime::tensor::Memory as _;

use crate::common::{download, gpu, upload};

const BYTES: usize = 4096;

#[test]
#[ignore = "needs a GPU since Hopper: cargo test -r --features gpu --test gpu -- --ignored fence"]
fn no_kernel_behind_a_fence_begins_early() {
    let device = gpu();
    let copies = device.probe_dependents().unwrap();
    let copies = copies.expect("a GPU since Hopper");
    let from = upload(&*device, &[7; BYTES]).unwrap();
    // A kernel writes late. It is followed by one that may begin early and waits for nothing.
    let enqueue = |[late, early]: &mut [Buffer; 2], fence: bool| {
        copies.copy_late(from.bytes(), late.bytes_mut())?;
        if fence {
            device.fence()?;
        }
        copies.copy_at_once(late.bytes(), early.bytes_mut())
    };
    let buffers = || [(); 2].map(|()| device.allocate(BYTES).unwrap());
    let [mut captured, mut fenced, mut bare] = [(); 3].map(|()| buffers());
    // The device has not launched a fence before. Loading it here would end the capture.
    let graph = device.capture(|_| enqueue(&mut captured, true)).unwrap();
    // SAFETY: the captured buffers live, and no other stream has them.
    unsafe { graph.replay() }.unwrap();
    enqueue(&mut fenced, true).unwrap();
    enqueue(&mut bare, false).unwrap();
    for ([_, early], expected) in [(&captured, 7), (&fenced, 7), (&bare, 0)] {
        assert_eq!(download(&*device, early).unwrap(), [expected; BYTES]);
    }
}
