//! Tests of tensors with addresses or strides that no kernel takes. Each is refused by its name
//! before anything is enqueued.

use std::ops::Range;

use mla_kernels::Cuda;
use mla_runtime::layer::LayerCall;
use mla_runtime::tensor::{CacheMut, Layout, Memory as _, TensorMut, TensorRef};

use super::batch::Case;
use super::{MIXED, gpu, prepared};
use crate::common::download;

/// Replaces a tensor of a call by a view of a buffer, which is large enough for all views here.
type Change = for<'a> fn(&mut LayerCall<'a, Cuda>, &'a mla_kernels::device::Buffer, Layout);

fn view(room: &mla_kernels::device::Buffer, off: usize, layout: Layout) -> TensorRef<'_, Cuda> {
    let all: Range<usize> = off..room.len();
    TensorRef::new(Cuda::byte_range(Cuda::bytes(room), all), layout).unwrap()
}

/// Returns the layout with rows that are `by` elements further apart.
fn apart(layout: Layout, by: usize) -> Layout {
    let [tokens, heads, columns] = layout.strides;
    let strides: [usize; 3] = [tokens + by, heads, columns];
    Layout { strides, ..layout }
}

/// Returns the layout with columns that are two elements apart.
fn scattered(layout: Layout) -> Layout {
    let strides = layout.strides.map(|stride| 2 * stride);
    Layout { strides, ..layout }
}

const CHANGES: &[(&str, Change)] = &[
    ("query", |call, room, layout| {
        call.query = view(room, 2, layout)
    }),
    ("query", |call, room, layout| {
        call.query = view(room, 0, apart(layout, 4))
    }),
    ("query", |call, room, layout| {
        call.query = view(room, 0, scattered(layout))
    }),
    ("rope", |call, room, _| {
        call.rope = view(room, 2, *call.rope.layout())
    }),
    ("rope", |call, room, _| {
        call.rope = view(room, 0, apart(*call.rope.layout(), 4))
    }),
    ("latent", |call, room, _| {
        call.latent = view(room, 0, scattered(*call.latent.layout()))
    }),
];

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn what_no_kernel_takes_is_refused_before_the_cache_is_written() {
    let gpu = &*gpu();
    let case = Case::new(16, MIXED);
    let (batch, layer, mut workspace, mut engine) = prepared(gpu, &case);
    let before = engine.outcome(gpu).unwrap();
    let room = gpu.allocate(4 * batch.query.len() + 4096).unwrap();
    let mut out_room = gpu.allocate(2 * before.out.len()).unwrap();
    let mut cache_room = gpu.allocate(before.cache.len() + 16).unwrap();

    for (number, (field, change)) in CHANGES.iter().enumerate() {
        let mut call = engine.call(batch.tokens()).unwrap();
        let layout = *call.query.layout();
        change(&mut call, &room, layout);
        let refused = layer.forward(&mut workspace, call).unwrap_err().to_string();
        let of_field = refused.starts_with(&format!("{field}: given "));
        assert!(
            of_field && refused.contains(", accepted "),
            "{number}: {refused}"
        );
        assert_eq!(engine.outcome(gpu).unwrap(), before, "{number}: {refused}");
    }

    // A refused call writes neither outputs nor the cache. Their memory holds zeros, and must stay
    // as it is.
    for field in ["out", "cache"] {
        let mut call = engine.call(batch.tokens()).unwrap();
        let [out, cache] = [&mut out_room, &mut cache_room]
            .map(|room| Cuda::split_mut(Cuda::bytes_mut(room), 2).1);
        match field {
            "out" => call.out = TensorMut::new(out, *call.out.layout()).unwrap(),
            _ => call.cache = CacheMut::new(cache, *call.cache.layout()).unwrap(),
        }
        let refused = layer.forward(&mut workspace, call).unwrap_err().to_string();
        let expected = format!("{field}: given address 2 bytes past");
        assert!(refused.starts_with(&expected), "{refused}");
    }

    gpu.synchronize().unwrap();
    let zeros = |buffer| download(gpu, buffer).unwrap().iter().all(|byte| *byte == 0);
    assert!(zeros(&out_room) && zeros(&cache_room));
    // The same workspace then runs a valid call.
    engine
        .forward(&layer, &mut workspace, batch.tokens())
        .unwrap();
    assert_ne!(engine.outcome(gpu).unwrap(), before);
}
