//! Launches of prefill.

use std::ptr::null_mut;

use mla_kernels::raw::MlaPrefillParams;
use mla_runtime::model::DType;

use super::calls::{PREFILL_DIMS, prefill};
use super::runtime::MULTIPROCESSORS;
use super::{Held, Recorded, address};

/// A batch of requests of different lengths.
fn params(dims: [i32; 3], dtype: DType) -> MlaPrefillParams {
    MlaPrefillParams {
        query: address(1),
        key_nope: address(2),
        key_rope: address(3),
        value: address(4),
        out: address(5),
        lse: address(6),
        cu_query_lens: address(7),
        cu_key_lens: address(8),
        workspace: address(9),
        workspace_bytes: 1 << 32,
        key_rope_token_stride: 64,
        ..prefill(dims, dtype, [16, 4], [5000, 9000], [3000, 5000])
    }
}

/// Batches of many and of few query tiles, of short requests, and with a rotary key for each head.
fn batches(usual: MlaPrefillParams) -> [MlaPrefillParams; 5] {
    let few = MlaPrefillParams {
        query_tokens: 100,
        key_tokens: 30_000,
        requests: 2,
        max_query_len: 70,
        max_key_len: 20_000,
        causal: 0,
        ..usual
    };
    [
        usual,
        few,
        MlaPrefillParams {
            max_query_len: 60,
            ..few
        },
        MlaPrefillParams {
            query_tokens: 900,
            requests: 300,
            max_query_len: 5,
            max_key_len: 100,
            ..usual
        },
        MlaPrefillParams {
            key_rope_token_stride: i64::from(usual.heads) * 64,
            key_rope_head_stride: 64,
            max_key_len: 400,
            ..usual
        },
    ]
}

/// These batches of every row and dtype.
fn all() -> impl Iterator<Item = MlaPrefillParams> {
    let usual = PREFILL_DIMS
        .into_iter()
        .flat_map(|dims| [DType::BF16, DType::F16].map(|dtype| params(dims, dtype)));
    usual.flat_map(batches)
}

#[cfg(feature = "sm90")]
#[test]
fn hoppers_prefill() {
    Held::all_of("cuda/sm90/prefill/", |held| {
        for p in all() {
            let choices = |_: &Recorded| {
                [
                    ("multiprocessors", MULTIPROCESSORS.into()),
                    ("query_tokens", p.query_tokens.into()),
                    ("key_tokens", p.key_tokens.into()),
                ]
            };
            // SAFETY: launches are recorded and not made, here and below, so nothing is read.
            let call = || unsafe { mla_kernels::raw::mla_prefill_sm90(&p, null_mut()) };
            held.holds(call, choices);
        }
    });
}

/// Checks that a batch-invariant batch is cut into launches only if requests are divided. With 128
/// heads, the SMs do not suffice for two splits of a query tile.
#[cfg(feature = "sm90")]
#[test]
fn requests_that_are_not_divided_take_one_launch() {
    for (heads, many) in [
        (16, true),
        (66, true),
        (67, false),
        (128, false),
        (132, false),
    ] {
        let requests = 64;
        let p = MlaPrefillParams {
            heads,
            requests,
            query_tokens: 3 * requests,
            key_tokens: 2500 * requests,
            max_query_len: 3,
            max_key_len: 2500,
            batch_invariant: 1,
            ..params([128, 64, 128], DType::F16)
        };
        // SAFETY: launches are recorded and not made, so nothing is read.
        let status = unsafe { mla_kernels::raw::mla_prefill_sm90(&p, null_mut()) };
        // SAFETY: the texts of a status of the library are null, or constants.
        unsafe { mla_kernels::raw::check("prefill", status) }.unwrap();
        let (launches, _) = super::runtime::taken();
        assert_eq!(
            launches.len() > 1,
            many,
            "{heads} heads: {} launches",
            launches.len()
        );
    }
}

#[cfg(feature = "sm80")]
#[test]
fn portable_prefill() {
    Held::all_of("cuda/sm80/prefill/", |held| {
        for batch in all() {
            for workspace in [null_mut(), batch.workspace] {
                let p = MlaPrefillParams {
                    workspace,
                    query_tokens: batch.query_tokens.min(batch.max_query_len * batch.requests),
                    ..batch
                };
                let choices = |_: &Recorded| {
                    [
                        ("multiprocessors", MULTIPROCESSORS.into()),
                        ("shared_of_sm", super::runtime::SHARED_OF_SM.into()),
                        ("query_tokens", p.query_tokens.into()),
                        ("max_query_len", p.max_query_len.into()),
                        ("max_key_len", p.max_key_len.into()),
                    ]
                };
                let call = || {
                    // SAFETY: as above.
                    unsafe { mla_kernels::raw::mla_prefill_sm80(&p, std::ptr::null(), null_mut()) }
                };
                held.holds(call, choices);
            }
        }
    });
}
