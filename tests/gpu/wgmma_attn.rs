//! Compares WGMMA_ATTN on a Hopper GPU with the f64 reference.
//!
//! The tests have lengths around every tile boundary, mixed in one batch, and random batches. There
//! are fewer and more keys than queries, packed and split keys, graphs captured with loose bounds,
//! and offsets beyond 2^31 elements. The conformance tests cover NaN in other requests.

use mla_conformance::{Failure, PrefillCase, Trial};
use mla_kernels::backends::sm90::WgmmaAttn;
use mla_kernels::raw;
use mla_runtime::backend::{LayerConfig, PrefillBackend, StepLimits};
use mla_runtime::model::{DType, HeadDims, MlaDims};
use mla_runtime::spec::{Feature, KeyLayout, Problem};
use rand::RngExt as _;

use crate::common::{gpu, rng};
use crate::refusals::{WrongField, each_is_refused};
use crate::stress::cases::Draw;
use crate::stress::machine::{Machine, Memory, Region};
use crate::tensors::pick;

const R1: HeadDims = HeadDims::R1;
const WIDE: HeadDims = HeadDims::new(192, 64, 256);
const SMALL: HeadDims = HeadDims::new(64, 32, 64);
const DIMS: [HeadDims; 6] = [
    R1,
    WIDE,
    SMALL,
    HeadDims::new(192, 64, 128),
    HeadDims::new(64, 64, 128),
    HeadDims::new(256, 0, 256),
];
const KEY_LAYOUTS: [Option<KeyLayout>; 2] = [Some(KeyLayout::Packed), Some(KeyLayout::Split)];

/// Makes a case of requests with these numbers of query tokens and keys.
fn case(dims: HeadDims, dtype: DType, heads: u32, lens: &[(usize, usize)]) -> PrefillCase {
    let (query_lens, key_lens): (Vec<_>, _) = lens.iter().copied().unzip();
    let problem = Problem::new(MlaDims::new(512, dims), heads, dtype);
    PrefillCase {
        key_lens,
        ..PrefillCase::new(problem, &query_lens)
    }
}

/// Runs a case twice with the same bits, and as a graph that is replayed with other numbers.
fn check(case: &PrefillCase) {
    let gpu = &*gpu();
    for trial in [Trial::Repeated, Trial::Replayed] {
        let case = PrefillCase {
            trial,
            ..case.clone()
        };
        if let Err(failure) = case.check::<WgmmaAttn>(gpu) {
            panic!("{case:?}: {failure}");
        }
    }
}

fn same(lens: &[usize]) -> Vec<(usize, usize)> {
    lens.iter().map(|&len| (len, len)).collect()
}

const BOUNDARIES: [usize; 12] = [0, 1, 127, 128, 129, 63, 0, 64, 65, 255, 256, 257];

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn lengths_around_every_tile_boundary_mix_in_one_batch() {
    for dims in DIMS {
        for dtype in [DType::BF16, DType::F16] {
            for (key_layout, gap) in KEY_LAYOUTS.into_iter().zip([8, 0]) {
                check(&PrefillCase {
                    key_layout,
                    gap,
                    ..case(dims, dtype, 2, &same(&BOUNDARIES))
                });
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn any_lengths_of_queries_and_keys_agree() {
    let more = [(100, 400), (1, 257), (256, 700), (0, 77), (130, 641)];
    // Some rows see nothing, within a tile and in whole tiles.
    let fewer = [(400, 100), (257, 1), (10, 0), (130, 129), (0, 0), (300, 40)];
    // Keys of a few query tiles are divided among CTAs, evenly or unevenly, and together with whole
    // tiles.
    let batches: [(u32, &[(usize, usize)]); 7] = [
        (2, &more),
        (2, &fewer),
        (1, &[(16, 20_000)]),
        (3, &[(129, 3000), (1, 2999)]),
        (8, &[(64, 2048)]),
        (2, &[(300, 1300), (0, 500), (40, 130), (257, 5000)]),
        (4, &[(1000, 1000)]),
    ];
    for (heads, lens) in batches {
        for dims in DIMS {
            for causal in [true, false] {
                check(&PrefillCase {
                    causal,
                    gap: 16,
                    ..case(dims, DType::BF16, heads, lens)
                });
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn any_number_of_heads_and_of_requests() {
    // The short requests form three groups, and the second group has no tokens.
    let mut sections = vec![0; 40];
    (sections[0], sections[1], sections[38], sections[39]) = (150, 20, 257, 129);
    for (dims, heads, lens) in [
        (R1, 1, &[150, 20][..]),
        (R1, 3, &[150, 20]),
        (R1, 16, &[150, 20]),
        (R1, 128, &[150, 20]),
        (R1, 1, &[5; 300]),
        (R1, 128, &sections),
        // A long request is among short ones, whose queries end before the second half of a tile.
        (SMALL, 1, &[2500, 1, 37, 64, 65]),
    ] {
        check(&case(dims, DType::BF16, heads, &same(lens)));
    }
}

/// Tries requests with divided keys among undivided ones. With 8 heads, their splits need several
/// launches.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn batch_invariant_requests_have_their_bits_in_any_batch() {
    let gpu = &*gpu();
    let lens = [
        (1, 9_000),
        (3, 5_000),
        (0, 700),
        (2, 12_000),
        (1, 4_500),
        (5, 3_000),
        (40, 2_500),
        (129, 300),
        (1, 4_096),
    ];
    let few = DIMS
        .into_iter()
        .flat_map(|dims| [(dims, 1, true, &lens[..]), (dims, 3, false, &lens)]);
    let mut freely = 0;
    // With 128 heads no request is divided, and equal requests are found without their lengths.
    let more = [(R1, 8, false, &lens[..]), (R1, 128, true, &[(3, 2100); 5])];
    for (dims, heads, causal, lens) in few.chain(more) {
        let mut case = PrefillCase {
            causal,
            trial: Trial::AmongOthers(8),
            ..case(dims, DType::BF16, heads, lens)
        };
        // The control experiment.
        let free = case.check::<WgmmaAttn>(gpu);
        freely += usize::from(matches!(free, Err(Failure::Differs { .. })));
        let features = case.problem.features.with(Feature::BatchInvariant);
        case.problem = case.problem.with_features(features);
        if let Err(failure) = case.check::<WgmmaAttn>(gpu) {
            panic!("{case:?}: {failure}");
        }
    }
    assert!(freely > 0);
}

// The bounds of a captured graph have to hold for each batch of a replay.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn a_graph_with_loose_bounds_replays_for_other_lengths() {
    for dims in DIMS {
        for causal in [true, false] {
            let lens = [(300, 700), (0, 77), (1, 257), (130, 641), (257, 64)];
            let case = case(dims, DType::BF16, 2, &lens);
            // A replay has a request of 557 query tokens and 764 keys.
            for bounds in [
                [557, 764],
                [4096, 800],
                [600, 10_000],
                [40_000, 300_000],
                [1_000_000, 1_000_000],
            ] {
                check(&PrefillCase {
                    causal,
                    bounds: Some(bounds),
                    ..case.clone()
                });
            }
        }
    }
}

// The kernel computes weights relative to a reference that it raises afterwards. In these cases
// that is too late, and it has to start over.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn scores_may_rise_beyond_what_weights_can_hold() {
    for amplitude in [5.0, 12.0, 35.0] {
        for dims in DIMS {
            for dtype in [DType::BF16, DType::F16] {
                for causal in [false, true] {
                    check(&PrefillCase {
                        causal,
                        amplitude,
                        ..case(dims, dtype, 2, &[(300, 1100), (70, 640), (130, 129)])
                    });
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn random_ragged_batches_agree() {
    let mut rng = rng(8);
    for round in 0..32 {
        let heads = match round % 4 {
            0 => rng.random_range(1..=128),
            _ => rng.random_range(1..=6),
        };
        // This bounds the number of the reference's multiplications.
        let mut left = 3_000_000 / heads;
        let lens = (0..rng.random_range(1..=60))
            .map(|_| {
                let mut len = || match rng.random_range(0..4) {
                    0 => BOUNDARIES[rng.random_range(0..BOUNDARIES.len())],
                    1 => rng.random_range(0..1500),
                    _ => rng.random_range(0..300),
                };
                let (queries, keys) = (len(), len());
                let keys = if round % 3 == 0 { queries } else { keys };
                if queries * keys > left {
                    return (queries % 3, keys % 3);
                }
                left -= queries * keys;
                (queries, keys)
            })
            .collect::<Vec<_>>();
        let dims = pick(&mut rng, &DIMS);
        let dtype = pick(&mut rng, &[DType::BF16, DType::F16]);
        check(&PrefillCase {
            causal: rng.random_range(0..4) > 0,
            key_layout: pick(&mut rng, &KEY_LAYOUTS),
            gap: 8 * rng.random_range(0..3),
            amplitude: pick(&mut rng, &[0.5, 1.0, 7.0]),
            seed: 100 + round,
            ..case(dims, dtype, heads as u32, &lens)
        });
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn offsets_beyond_two_to_the_31_elements_change_nothing() {
    let gpu = &*gpu();
    let machine = Machine::new(gpu.stream().clone());
    let (mut rng, mut memory) = (rng(10), Memory::default());
    let mut draw = Draw::new(&machine, &mut rng, &mut memory);
    // Heads are far apart, or tokens are.
    for (len, far) in [(300, [0, 1 << 31]), (9, [1 << 28, 0])] {
        let call = draw.prefill_of(DType::BF16, [128, 64, 128], 2, true, [&[len], &[len]]);
        let (mut params, mut memory) = (call.params, Memory::default());
        // Copies a tensor's rows, or copies them back.
        let copy = |at: u64, to: u64, width: usize, strides: [[i64; 2]; 2], back: bool| {
            for (token, head) in (0..len as i64).flat_map(|t| [0, 1].map(|h| (t, h))) {
                let rows =
                    [(at, strides[0]), (to, strides[1])].map(|(address, [tokens, heads])| {
                        let offset = 2 * (token * tokens + head * heads) as u64;
                        Region {
                            address: address + offset,
                            bytes: 2 * width,
                        }
                    });
                let [from, to] = if back { [rows[1], rows[0]] } else { rows };
                machine.copy(from, to);
            }
        };
        let mut spread = |at: u64, width: usize, strides: [&mut i64; 2]| {
            let close = strides.each_ref().map(|stride| **stride);
            let apart = far.map(|far| if far == 0 { width as i64 } else { far });
            let bytes = 2 * ((len as i64 - 1) * apart[0] + apart[1]) as usize + 2 * width;
            let to = machine.zeros(&mut memory, bytes).address;
            copy(at, to, width, [close, apart], false);
            [*strides[0], *strides[1]] = apart;
            (to, [close, apart])
        };
        macro_rules! spread {
            ($($tensor:ident, $width:literal, $tokens:ident, $heads:ident;)*) => {$(
                let strides = [&mut params.$tokens, &mut params.$heads];
                let ($tensor, _) = spread(params.$tensor as u64, $width, strides);
                params.$tensor = $tensor as *mut _;
            )*};
        }
        spread! {
            query, 192, query_token_stride, query_head_stride;
            key_nope, 128, key_nope_token_stride, key_nope_head_stride;
            key_rope, 64, key_rope_token_stride, key_rope_head_stride;
            value, 128, value_token_stride, value_head_stride;
        }
        let out = call.outputs[0].address;
        let strides = [&mut params.out_token_stride, &mut params.out_head_stride];
        let (far_out, strides) = spread(out, 128, strides);
        params.out = far_out as *mut _;
        // SAFETY: the parameters describe memory that lives as long as the call and its copies.
        let launch = |params: &raw::MlaPrefillParams| unsafe {
            raw::mla_prefill_sm90(params, gpu.raw_stream())
        };
        let expected = call.launched(&machine, &call.params, launch);
        machine.fill(call.outputs[0], 0, 0xff);
        call.launched(&machine, &params, launch);
        copy(out, far_out, 128, strides, true);
        assert!(
            call.outputs.map(|output| machine.download(output)) == expected,
            "{far:?}"
        );
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_attn"]
fn a_raw_call_takes_the_workspace_that_is_said_and_dims_that_there_are() {
    let gpu = &*gpu();
    let config = LayerConfig::new(Problem::new(MlaDims::R1, 2, DType::BF16), 0.07);
    let backend = WgmmaAttn::new(gpu, &config).unwrap();
    let limits = StepLimits::new(2, 130, 1).with_context_rows(130);
    let bytes = backend.workspace_bytes(gpu, &limits).unwrap() as usize;
    // The workspace holds partial results of three splits for each SM, of 128 rows in f32.
    assert!((1..=32 << 20).contains(&bytes), "{bytes}");
    let machine = Machine::new(gpu.stream().clone());
    let (mut rng, mut memory) = (rng(11), Memory::default());
    let mut draw = Draw::new(&machine, &mut rng, &mut memory);
    let lens = [100, 30];
    let mut good = draw.prefill_of(DType::BF16, [128, 64, 128], 2, true, [&lens, &lens]);
    good.params.workspace_bytes = bytes;
    (
        good.params.key_rope_token_stride,
        good.params.key_rope_head_stride,
    ) = (384, 0);
    // SAFETY: a refused call is not launched, and all other parameters are valid.
    let launch =
        |params: &raw::MlaPrefillParams| unsafe { raw::mla_prefill_sm90(params, gpu.raw_stream()) };
    let wrong: &[WrongField<raw::MlaPrefillParams>] = &[
        ("nope_dim", |p| p.nope_dim = 256),
        ("workspace_bytes", |p| p.workspace_bytes -= 1),
    ];
    each_is_refused(&good.params, wrong, launch);
    good.launched(&machine, &good.params, launch);
    let counters = Region {
        address: good.params.workspace as u64,
        bytes: raw::MLA_PREFILL_COUNTER_BYTES as usize,
    };
    assert!(
        machine.download(counters).iter().all(|word| *word == 0),
        "a launch leaves its counters as it found them"
    );
    // A key without rotary part is one whose last columns stand for it.
    let mut unrotated = draw.prefill_of(DType::F16, [256, 0, 256], 2, true, [&lens, &lens]);
    let p = &mut unrotated.params;
    let divided = raw::MlaPrefillParams {
        key_rope: p.key_nope.wrapping_byte_add(2 * 192),
        nope_dim: 192,
        rope_dim: 64,
        ..*p
    };
    p.key_rope = std::ptr::null();
    (p.key_rope_token_stride, p.key_rope_head_stride) = (0, 0);
    let expected = unrotated.launched(&machine, &divided, launch);
    machine.fill(unrotated.outputs[0], 0, 0xff);
    let outputs = unrotated.launched(&machine, &unrotated.params, launch);
    assert!(outputs == expected, "a call without rotary part");
}
