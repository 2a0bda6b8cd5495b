//! The parts of a step, one after the other, against the whole step, which writes the cache and multiplies by W_UK at once.

use mla_runtime::dims::{HeadDims, MlaDims};
use mla_runtime::dtype::DType;
use mla_runtime::kv_format::KvFormat;

use super::MIXED;
use super::batch::{Batch, Case, Engine, gpu_layer};
use crate::common::gpu;

#[test]
#[ignore = "needs a Hopper GPU: cargo test --release --features sm90 --test gpu -- --include-ignored layer"]
fn the_parts_give_the_bits_of_the_whole() {
    let gpu = &*gpu();
    let decodes = |count: u32| (0..count).map(|at| (1, 7 * at)).collect::<Vec<_>>();
    let wide = Case {
        dims: MlaDims::new(512, HeadDims::new(192, 64, 256)),
        ..Case::new(16, &decodes(20))
    };
    for case in [
        Case::new(16, &decodes(1)),
        Case::new(16, &decodes(17)),
        Case::new(128, &decodes(16)),
        // One more than the kernel takes with 128 heads, and as many as it takes with 16, alone and with a cache write.
        Case::new(128, &decodes(33)),
        Case::new(16, &decodes(64)),
        Case::new(16, &decodes(128)),
        Case::new(2, &decodes(64)),
        Case::new(40, MIXED),
        wide,
    ] {
        for dtype in [DType::BF16, DType::F16] {
            for kv_format in [KvFormat::of(dtype), KvFormat::Fp8] {
                let case = Case {
                    dtype,
                    kv_format,
                    ..case.clone()
                };
                let batch = Batch::new(&case);
                let layer = gpu_layer(gpu, &case);
                let whole = batch.run(&layer).unwrap();
                let mut workspace = layer.workspace(&case.limits()).unwrap();
                workspace.prepare(&layer, &batch.step()).unwrap();
                let mut engine = Engine::new(gpu, &batch).unwrap();
                let mut call = engine.call(batch.tokens()).unwrap();
                layer.write_cache(&mut workspace, &mut call).unwrap();
                layer.attend_absorbed(&mut workspace, &mut call).unwrap();
                layer.attend_expanded(&mut workspace, &mut call).unwrap();
                let parts = engine.outcome(gpu).unwrap();
                assert!(
                    whole.out == parts.out && whole.lse == parts.lse && whole.cache == parts.cache,
                    "{case:?}"
                );
            }
        }
    }
}
