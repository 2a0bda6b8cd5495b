//! Tests of the division of lists among CTAs in sparse attention, computed on the host by the
//! launch's own code.

use mla_kernels::raw;
use mla_runtime::model::{DType, KvFormat, MlaDims};

use super::calls::sparse;
use super::checked;

/// Numbers of clusters of 1, 2, ... 16 CTAs that an H200 runs at the same time, as the driver
/// reports them.
const H200: [i32; 16] = [132, 66, 39, 30, 22, 17, 15, 15, 0, 0, 0, 0, 0, 0, 0, 7];

/// Returns the numbers of clusters for a GPU with clusters of up to `max` CTAs.
fn up_to(max: usize) -> [i32; 16] {
    std::array::from_fn(|at| if at < max { H200[at] } else { 0 })
}

/// Returns the number of CTAs that share a list, and the heads of a tile.
fn division(tokens: i32, heads: i32, width: i32, clusters: [i32; 16]) -> (i32, i32) {
    let extents = [tokens, width, 1];
    let params = sparse(MlaDims::R1, DType::BF16, KvFormat::Fp8DsMla, heads, extents);
    let (mut splits, mut tile) = (0, 0);
    // SAFETY: all four addresses are those of values on this stack, and `clusters` has sixteen
    // entries.
    let status =
        unsafe { raw::mla_sparse_sm90_splits(&params, clusters.as_ptr(), &mut splits, &mut tile) };
    checked("sparse splits", status).unwrap();
    (splits, tile)
}

#[test]
fn few_tokens_share_the_gpu_and_many_keep_their_lists_whole() {
    for (tokens, heads, expected) in [
        (1, 16, (16, 16)),
        (8, 16, (8, 16)),
        (16, 16, (6, 16)),
        (32, 16, (3, 16)),
        (64, 64, (2, 64)),
        (128, 16, (1, 16)),
        // Each has two tiles of heads.
        (8, 128, (6, 64)),
        (64, 128, (1, 64)),
        (132, 16, (1, 16)),
        (256, 64, (1, 64)),
        // A few tokens with many heads have small tiles.
        (1, 128, (8, 16)),
        (2, 128, (6, 16)),
        (4, 128, (6, 32)),
        (1, 64, (16, 16)),
        (8, 64, (6, 32)),
        (16, 64, (6, 64)),
        // Heads are divided as evenly as possible.
        (1, 40, (16, 14)),
        (1, 100, (16, 15)),
    ] {
        assert_eq!(
            division(tokens, heads, 2048, H200),
            expected,
            "{tokens} tokens, {heads} heads"
        );
    }
}

#[test]
fn what_is_left_of_whole_waves_shares_the_gpu() {
    for (tokens, heads, expected) in [
        // There are 4, 28 and 12 lists after 132 whole ones.
        (136, 64, 16),
        (160, 16, 4),
        (72, 128, 8),
        // There are 4 lists after 31 waves, and 8 after 62.
        (4096, 16, 16),
        (4096, 128, 8),
        // A nearly full second wave is not divided.
        (128, 128, 1),
        (264, 16, 1),
    ] {
        assert_eq!(
            division(tokens, heads, 2048, H200).0,
            expected,
            "{tokens} tokens, {heads} heads"
        );
    }
}

#[test]
fn a_split_has_at_least_a_whole_tile_and_a_cluster_that_the_gpu_takes() {
    for width in [0, 1, 63, 64, 127, 128, 500, 2048, 8192] {
        for tokens in 1..200 {
            for heads in [1, 16, 40, 64, 128] {
                let (splits, tile) = division(tokens, heads, width, H200);
                assert!([1, 2, 3, 4, 5, 6, 7, 8, 16].contains(&splits));
                assert!(splits == 1 || width >= 64 * splits, "{splits} of {width}");
                assert!((1..=heads.min(64)).contains(&tile), "{tile} of {heads}");
            }
        }
    }
    assert_eq!(division(1, 16, 2048, up_to(8)), (8, 16));
    assert_eq!(division(1, 16, 2048, up_to(1)), (1, 16));
}
