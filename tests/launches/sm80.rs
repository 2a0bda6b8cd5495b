//! Launches of the portable decodes, dense and sparse.

use std::ptr::null_mut;

use mla_kernels::raw::{
    MlaDecodeParams, MlaDeviceLimits, MlaSparseParams, mla_decode_sm80, mla_sparse_sm80,
};

use mla_runtime::model::{DType, KvFormat, MlaDims};

use super::runtime::{MULTIPROCESSORS, SHARED_OF_CTA, SHARED_OF_SM};
use super::{Held, ROWS, Recorded, address, decode, sparse};

/// Shared memory of a CTA on GPUs with 99 KB, with 163 KB, and with all that a Hopper has.
const SHARED: [i32; 3] = [99 << 10, 163 << 10, SHARED_OF_CTA];

/// The numbers of a launch that depend on the device.
fn choices(shared: i32, made: &Recorded) -> [(&'static str, i64); 4] {
    [
        ("multiprocessors", MULTIPROCESSORS.into()),
        ("shared_of_cta", shared.into()),
        ("shared_of_sm", SHARED_OF_SM.min(shared + 1024).into()),
        (
            "ctas_of_sm",
            made.grid[0].div_ceil(MULTIPROCESSORS as u32).into(),
        ),
    ]
}

fn limits(shared: i32) -> MlaDeviceLimits {
    MlaDeviceLimits {
        shared_memory_bytes: shared,
        multiprocessors: 0,
    }
}

fn hold_dense(held: &mut Held, p: &MlaDecodeParams) {
    for shared in SHARED {
        // SAFETY: launches are recorded and not made, here and below, so nothing is read.
        let call = || unsafe { mla_decode_sm80(p, &limits(shared), null_mut()) };
        held.holds(call, |made| choices(shared, made));
    }
}

fn hold_sparse(held: &mut Held, p: &MlaSparseParams) {
    for shared in SHARED {
        let workspace = address(10);
        let call = || {
            // SAFETY: as above.
            unsafe { mla_sparse_sm80(p, &limits(shared), workspace, 1 << 32, null_mut()) }
        };
        held.holds(call, |made| choices(shared, made));
    }
}

#[test]
fn portable_decode() {
    Held::all_of("cuda/sm80/decode/", |held| {
        for dtype in [DType::BF16, DType::F16] {
            let plain = KvFormat::of(dtype);
            for dims in ROWS {
                let scaled = [KvFormat::Fp8DsMla, KvFormat::Fp8PerToken];
                let scaled = scaled.into_iter().filter(|_| dims == MlaDims::R1);
                for format in [plain, KvFormat::Fp8].into_iter().chain(scaled) {
                    for rows in [[8, 1], [16, 1], [20, 1], [16, 4], [100, 5]] {
                        hold_dense(held, &decode(dims, dtype, format, rows, [5, 32]));
                        // Batches that are not short.
                        let long = decode(dims, dtype, format, rows, [60, 40]);
                        hold_dense(held, &long);
                        hold_dense(
                            held,
                            &MlaDecodeParams {
                                page_size: 48,
                                ..long
                            },
                        );
                        if format.splits() && dims.head.rope > 0 {
                            hold_dense(
                                held,
                                &MlaDecodeParams {
                                    cache_rope: address(9),
                                    cache_rope_page_stride: 64 * 64,
                                    cache_rope_slot_stride: 64,
                                    ..long
                                },
                            );
                        }
                    }
                }
            }
            for (format, rope) in [
                (plain, 64),
                (plain, 0),
                (KvFormat::Fp8, 64),
                (KvFormat::Fp8, 0),
                (KvFormat::Fp8DsMla, 64),
                (KvFormat::Fp8PerToken, 64),
            ] {
                for heads in [8, 32, 128] {
                    for tokens in [4, 200] {
                        let extents = [tokens, 2048, 500];
                        hold_sparse(held, &sparse(rope, dtype, format, heads, extents));
                    }
                }
            }
        }
    });
}
