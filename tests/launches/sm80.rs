//! Launches of the portable decodes, dense and sparse.

use std::ptr::null_mut;

use mla_kernels::raw::{
    MlaDecodeParams, MlaDeviceLimits, MlaSparseParams, mla_decode_sm80, mla_sparse_sm80,
};

use super::calls::{decode, sparse};
use super::runtime::{MULTIPROCESSORS, SHARED_OF_CTA, SHARED_OF_SM};
use super::{Held, Recorded, address};

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
        for q_dtype in [0, 1] {
            let plain = [2, 1][q_dtype as usize];
            for dims in [(512, 64), (512, 0), (256, 64), (256, 32)] {
                let scaled = if dims == (512, 64) { &[4, 5][..] } else { &[] };
                for format in [plain, 3].into_iter().chain(scaled.iter().copied()) {
                    for (heads, query_len) in [(8, 1), (16, 1), (20, 1), (16, 4), (100, 5)] {
                        let rows = (heads, query_len);
                        let usual = decode(dims, q_dtype, format, rows);
                        // Batches that are not short.
                        let long = MlaDecodeParams {
                            requests: 60,
                            tokens: 60 * query_len,
                            max_pages: 40,
                            ..usual
                        };
                        hold_dense(held, &usual);
                        hold_dense(held, &long);
                        hold_dense(
                            held,
                            &MlaDecodeParams {
                                page_size: 48,
                                ..long
                            },
                        );
                        if format <= 3 && dims.1 > 0 {
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
            for (format, rope) in [(plain, 64), (plain, 0), (3, 64), (3, 0), (4, 64), (5, 64)] {
                for heads in [8, 32, 128] {
                    let usual = sparse(rope, q_dtype, format, heads);
                    hold_sparse(held, &usual);
                    hold_sparse(
                        held,
                        &MlaSparseParams {
                            tokens: 200,
                            ..usual
                        },
                    );
                }
            }
        }
    });
}
