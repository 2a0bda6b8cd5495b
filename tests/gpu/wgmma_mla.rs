//! Compares WGMMA_MLA on a Hopper GPU with the f64 reference, on more problems than the conformance
//! tests, and as a raw call.

use mla_conformance::{DecodeCase, GroupScales, Trial};
use mla_kernels::backends::sm90::{WgmmaMla, WgmmaMlaNarrow, WgmmaMlaPerToken};
use mla_kernels::raw;
use mla_runtime::backend::{DecodeBackend, LayerConfig, StepLimits};
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::spec::{Problem, QueryLen};
use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::calls::dims_of;
use crate::common::{gpu, rng};
use crate::refusals::each_is_refused;
use crate::stress::cases::Draw;
use crate::stress::machine::{Machine, Memory};
use crate::tensors::pick;

fn problem(heads: usize, dtype: DType, kv: KvFormat) -> Problem {
    Problem::new(MlaDims::R1, heads as u32, dtype)
        .with_kv_format(kv)
        .with_page_size(64)
        .with_query_len(QueryLen::Ragged)
}

/// Makes a case from the query and cache tokens of each request, in bf16.
fn case(heads: usize, requests: &[(usize, usize)]) -> DecodeCase {
    let (query_lens, seq_lens): (_, Vec<_>) = requests.iter().copied().unzip();
    DecodeCase {
        query_lens,
        trial: Trial::Repeated,
        ..DecodeCase::new(problem(heads, DType::BF16, KvFormat::BF16), &seq_lens)
    }
}

/// The other rows that these kernels take.
const NARROW: [[u32; 2]; 3] = [[512, 0], [256, 64], [256, 32]];

fn check(name: &str, case: &DecodeCase) {
    let checked = match (case.problem.dims, case.problem.kv_format) {
        (_, KvFormat::Fp8PerToken) => case.check::<WgmmaMlaPerToken>(&gpu()),
        (MlaDims::R1, _) => case.check::<WgmmaMla>(&gpu()),
        _ => case.check::<WgmmaMlaNarrow>(&gpu()),
    };
    if let Err(failure) = checked {
        panic!("{name}: {failure}");
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn every_number_of_heads_and_query_tokens_agrees_with_the_reference() {
    // With more than 64 rows, requests with room for up to 512 tokens use a separate kernel. The
    // table has two pages more than needed.
    let long = [0, 1, 63, 64, 65, 127, 128, 129, 191, 1000];
    let short = [0, 1, 63, 64, 65, 127, 128, 129, 191, 320, 384];
    for heads in [1, 3, 8, 9, 16, 20, 40, 48, 63, 64, 96, 126, 128] {
        for query in [1, 2, 3, 4, 8, 9, 16] {
            for (name, lens) in [("long", &long[..]), ("short", &short[..])] {
                let name = format!("{heads} heads, {query} query tokens, {name}");
                let seed = (heads * 10 + query) as u64;
                let mut requests: Vec<_> = lens.iter().map(|&len| (query, len)).collect();
                // For many rows of the longest context, the f64 reference would take seconds.
                if name == "long" && query <= 2 {
                    requests.push((query, 4641));
                }
                let case = case(heads, &requests);
                check(&name, &DecodeCase { seed, ..case });
            }
        }
    }
}

/// Draws the dtype, the page size, gaps between queries, and the distance of a cache's rows.
fn drawn(rng: &mut StdRng, kv: Option<KvFormat>, mut case: DecodeCase) -> DecodeCase {
    case.problem.dtype = pick(rng, &[DType::F16, DType::BF16]);
    case.problem.kv_format = kv.unwrap_or(KvFormat::of(case.problem.dtype));
    case.problem.page_size = pick(rng, &[16, 32, 48, 64, 128, 256]);
    case.gap = 8 * rng.random_range(0..4);
    // In some cases, the rows of the cache are further apart.
    case.trial = pick(rng, &[Trial::Repeated, Trial::ExactlyAligned]);
    case.seed = rng.random();
    case
}

/// Draws requests with up to 16 query tokens.
fn ragged(rng: &mut StdRng, requests: usize, longest: usize) -> Vec<(usize, usize)> {
    (0..rng.random_range(1..=requests))
        .map(|_| (rng.random_range(0..=16), rng.random_range(0..=longest)))
        .collect()
}

/// Draws many decodes of short contexts.
fn many(rng: &mut StdRng, requests: usize) -> Vec<(usize, usize)> {
    (0..requests)
        .map(|_| (1, rng.random_range(0..300)))
        .collect()
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn random_ragged_batches_agree_with_the_reference() {
    let rng = &mut rng(7);
    for round in 0..40 {
        let requests = ragged(rng, 40, [6000, 700, 200, 700][round % 4]);
        let case = case(rng.random_range(1..=128), &requests);
        check(&format!("round {round}"), &drawn(rng, None, case));
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn narrow_rows_agree_with_the_reference() {
    let rng = &mut rng(11);
    let short = [0, 1, 63, 64, 65, 127, 128, 129, 191, 320, 384];
    for [latent, rope] in NARROW {
        let narrow = |rng: &mut _, mut case: DecodeCase| {
            case.problem.dims = dims_of(latent, rope);
            drawn(rng, None, case)
        };
        // Rows for 8, 16, 32 and 64 heads, and for groups of two, three and five CTAs.
        for (heads, query) in [
            (1, 1),
            (8, 1),
            (16, 1),
            (20, 1),
            (32, 1),
            (40, 1),
            (64, 1),
            (32, 3),
            (40, 2),
            (96, 2),
            (40, 8),
            (128, 1),
        ] {
            for long in [false, true] {
                let mut requests: Vec<_> = short.iter().map(|&len| (query, len)).collect();
                if long {
                    requests.extend([(query, 1000), (query, 4641)]);
                }
                let case = narrow(rng, case(heads, &requests));
                check(&format!("({latent}, {rope}), long {long}"), &case);
            }
        }
        // The reference takes most of the time.
        for round in 0..3 {
            let requests = ragged(rng, 12, 2000);
            let case = case(rng.random_range(1..=128), &requests);
            let case = narrow(rng, case);
            check(&format!("({latent}, {rope}), round {round}"), &case);
        }
        for requests in [many(rng, 500), vec![(1, 131_072)]] {
            let case = narrow(rng, case(16, &requests));
            check(&format!("({latent}, {rope}), large"), &case);
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn e4m3_caches_agree_with_the_reference() {
    let rng = &mut rng(9);
    let lens = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 1000, 4641];
    for heads in [1, 3, 8, 9, 16, 20, 40, 63, 64, 96, 126, 128] {
        let query = rng.random_range(1..=16);
        let case = case(heads, &lens.map(|len| (query, len)));
        let name = format!("e4m3, {heads} heads, {query} query tokens");
        check(&name, &drawn(rng, Some(KvFormat::Fp8), case));
    }
    for requests in [many(rng, 500), vec![(1, 131_072)]] {
        let case = drawn(rng, Some(KvFormat::Fp8), case(16, &requests));
        check(&format!("e4m3, {} requests", requests.len()), &case);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn caches_with_a_scale_for_each_token_agree_with_the_reference() {
    let rng = &mut rng(12);
    let lens = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 1000];
    for heads in [1, 8, 9, 16, 20, 32, 40, 63, 64, 96, 128] {
        let query = rng.random_range(1..=16);
        let plain = |rng: &mut _, lens: &[usize]| {
            let requests: Vec<_> = lens.iter().map(|&len| (query, len)).collect();
            drawn(rng, Some(KvFormat::Fp8PerToken), case(heads, &requests))
        };
        let name = format!("fp8_per_token, {heads} heads, {query} query tokens");
        check(&name, &plain(rng, &lens));
        // Scales far apart, and all of the weight with the tokens of either scale. Each request has
        // several KV tiles.
        for far in [-10, -30, -60] {
            for (low, high, lead) in [(far, 0, 0.0), (far, 0, 2.0), (0, far, 2.0)] {
                let mut case = plain(rng, &[400, 90, 17]);
                case.group_scales = Some(GroupScales {
                    exponents: [[low; 4], [high; 4]],
                    factor: 1.5,
                    queries: 0,
                    lead,
                });
                let name = format!("{name}, scales 2^{low} and 2^{high}, {lead}");
                check(&name, &case);
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn large_batches_and_long_contexts_agree_with_the_reference() {
    for (name, heads, requests) in [
        ("1024 requests", 16, &many(&mut rng(8), 1024)[..]),
        ("131072 tokens", 16, &[(1, 131_072), (2, 5)]),
        ("131072 tokens, 128 heads", 128, &[(1, 131_072)]),
        (
            "very different lengths",
            16,
            &[(4, 4641), (4, 45_118), (4, 1730), (4, 1696)],
        ),
    ] {
        check(name, &case(heads, requests));
    }
    // The offsets exceed 2^31 elements.
    let unused_pages = (1usize << 31) / (64 * 576) + 1;
    let case = case(16, &[(1, 700), (2, 333)]);
    check(
        "a cache of more than 4 GiB",
        &DecodeCase {
            unused_pages,
            ..case
        },
    );
}

// If CTAs never wait for the other splits of their query tile, all of them fall back, unless all
// have already arrived. After falling back, one CTA combines the whole tile.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn falling_back_gives_the_same_bits() {
    let gpu = &*gpu();
    let (machine, mut random) = (Machine::new(gpu.stream().clone()), rng(31));
    let mut lens = |requests| -> Vec<i32> {
        (0..requests)
            .map(|_| random.random_range(1..=4000))
            .collect()
    };
    const R1: [u32; 2] = [512, 64];
    let (bf16, fp8) = (KvFormat::BF16, KvFormat::Fp8);
    // There are few splits, many splits, and tiles in line, in which a CTA has other work after its
    // split.
    let cases = [
        (R1, bf16, [16, 1], vec![1000]),
        (R1, bf16, [16, 1], vec![20_000]),
        (R1, bf16, [64, 1], vec![20_000]),
        (R1, bf16, [128, 1], vec![9000, 3000]),
        // The query tiles have five CTAs, or thirteen.
        (R1, bf16, [48, 6], vec![9000, 3000]),
        (R1, bf16, [52, 16], vec![5000]),
        (R1, fp8, [40, 8], vec![6000]),
        (R1, bf16, [16, 1], lens(40)),
        (R1, bf16, [128, 1], lens(150)),
        (R1, fp8, [16, 1], lens(40)),
        (R1, fp8, [64, 1], lens(150)),
        (NARROW[0], bf16, [16, 1], vec![20_000]),
        (NARROW[0], bf16, [128, 1], vec![9000, 3000]),
        (NARROW[1], bf16, [32, 1], vec![1000]),
        (NARROW[1], bf16, [32, 3], vec![9000, 3000]),
        (NARROW[1], bf16, [32, 1], lens(150)),
        (NARROW[2], bf16, [8, 1], vec![20_000]),
        (NARROW[2], bf16, [40, 1], vec![20_000]),
    ];
    let (mut rng, mut memory) = (rng(23), Memory::default());
    let mut draw = Draw::new(&machine, &mut rng, &mut memory);
    for ([latent, rope], kv, shape, lens) in cases {
        let draw = draw.of_row(latent, rope);
        let mut call = draw.decode_of(DType::BF16, kv, shape, &lens);
        let mut expected = None;
        for patience in [0, -1, 2000] {
            call.params.split_patience = patience;
            for launch in 0..50 {
                // SAFETY: the parameters describe memory that lives as long as the call.
                let got = call.launched(&machine, &call.params, |params| unsafe {
                    raw::mla_decode_sm90(params, gpu.raw_stream())
                });
                let expected = expected.get_or_insert_with(|| got.clone());
                assert!(
                    got == *expected,
                    "{shape:?}, patience {patience}: launch {launch} differs"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn queries_have_the_same_bits_with_and_without_gaps() {
    let gpu = &*gpu();
    let machine = Machine::new(gpu.stream().clone());
    let (mut rng, mut memory) = (rng(24), Memory::default());
    let mut draw = Draw::new(&machine, &mut rng, &mut memory);
    for (kv, shape) in [
        (KvFormat::BF16, [16, 2]),
        (KvFormat::BF16, [128, 1]),
        (KvFormat::Fp8, [40, 3]),
    ] {
        let call = draw.decode_of(DType::BF16, kv, shape, &[700, 333]);
        let mut close = call.params;
        let heads = i64::from(close.heads);
        [close.q_latent, close.q_rope] = machine.without_gaps(
            &mut memory,
            [close.q_latent, close.q_rope],
            close.tokens * close.heads,
        );
        (close.q_latent_token_stride, close.q_latent_head_stride) = (heads * 512, 512);
        (close.q_rope_token_stride, close.q_rope_head_stride) = (heads * 64, 64);
        let [gaps, close] = [call.params, close].map(|params| {
            // SAFETY: the parameters describe memory that lives as long as the call.
            call.launched(&machine, &params, |params| unsafe {
                raw::mla_decode_sm90(params, gpu.raw_stream())
            })
        });
        assert!(gaps == close, "{kv}, {shape:?}");
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla"]
fn a_raw_call_takes_the_workspace_that_is_said_and_no_less() {
    let gpu = &*gpu();
    let config = LayerConfig::new(problem(16, DType::BF16, KvFormat::BF16), 0.07);
    let backend = WgmmaMla::new(gpu, &config).unwrap();
    let bytes = backend.workspace_bytes(gpu, &StepLimits::new(2, 2, 3).with_decode_query_len(1));
    let machine = Machine::new(gpu.stream().clone());
    let (mut rng, mut memory) = (rng(1), Memory::default());
    let mut draw = Draw::new(&machine, &mut rng, &mut memory);
    let mut good = draw.decode_of(DType::BF16, KvFormat::BF16, [16, 1], &[100, 3]);
    good.params.workspace_bytes = bytes.unwrap() as usize;
    // SAFETY: a refused call is not launched, and all other parameters are valid.
    let launch =
        |params: &raw::MlaDecodeParams| unsafe { raw::mla_decode_sm90(params, gpu.raw_stream()) };
    each_is_refused(
        &good.params,
        &[("workspace_bytes", |p| p.workspace_bytes -= 1)],
        launch,
    );
    good.launched(&machine, &good.params, launch);
}
