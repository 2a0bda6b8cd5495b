//! Compares the parts of a step, one after the other, with the whole step, which writes the cache
//! and multiplies by W_UK in one launch.

use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims};

use super::batch::Case;
use super::{MIXED, check, prepared};
use crate::common::gpu;

/// Makes requests of one new token each, with an increasing number of cached tokens.
fn decodes(count: u32) -> Vec<(u32, u32)> {
    (0..count).map(|at| (1, 7 * at)).collect()
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn the_parts_give_the_bits_of_the_whole() {
    let gpu = &*gpu();
    let wide = Case {
        dims: MlaDims::new(512, HeadDims::new(192, 64, 256)),
        ..Case::new(16, &decodes(20))
    };
    for case in [
        Case::new(16, &decodes(1)),
        Case::new(16, &decodes(17)),
        Case::new(128, &decodes(16)),
        // There is one token more than the kernel takes with 128 heads, and the maximum that it
        // takes alone with 16.
        Case::new(128, &decodes(33)),
        Case::new(16, &decodes(64)),
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
                let (batch, layer, mut workspace, mut engine) = prepared(gpu, &case);
                let whole = batch.run(&layer).unwrap();
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

/// Tries more tokens than the GEMM kernel takes without a cache write. W_UK alone is then computed
/// by cuBLAS, which sums in another order.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn more_tokens_than_a_product_alone_agree_with_the_cpu() {
    let gpu = &*gpu();
    for (heads, tokens) in [(16, 65), (16, 128), (32, 100), (16, 129)] {
        for dtype in [DType::BF16, DType::F16] {
            for kv_format in [KvFormat::of(dtype), KvFormat::Fp8] {
                let case = Case {
                    dtype,
                    kv_format,
                    ..Case::new(heads, &decodes(tokens))
                };
                check(gpu, &case);
            }
        }
    }
}
