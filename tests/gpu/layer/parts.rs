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

/// Returns the case with each dtype, and with a cache of that dtype and of e4m3.
fn in_all_formats(case: &Case) -> [Case; 4] {
    [
        (DType::BF16, KvFormat::BF16),
        (DType::BF16, KvFormat::Fp8),
        (DType::F16, KvFormat::F16),
        (DType::F16, KvFormat::Fp8),
    ]
    .map(|(dtype, kv_format)| Case {
        dtype,
        kv_format,
        ..case.clone()
    })
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
        for case in in_all_formats(&case) {
            let (batch, layer, mut workspace, mut engine) = prepared(gpu, &case);
            let whole = batch.run(&layer).unwrap();
            let mut call = engine.call(batch.tokens()).unwrap();
            layer.write_cache(&mut workspace, &mut call).unwrap();
            layer.attend_absorbed(&mut workspace, &mut call).unwrap();
            layer.attend_expanded(&mut workspace, &mut call).unwrap();
            engine.outcome(gpu).unwrap().is_that_of(&whole, &case);
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
        for case in in_all_formats(&Case::new(heads, &decodes(tokens))) {
            check(gpu, &case);
        }
    }
}
