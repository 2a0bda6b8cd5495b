//! Dimensions in the form of `--dims` and of files of cases.

use mla_runtime::model::{HeadDims, MlaDims};

/// The accepted form of dimensions.
pub(in crate::bench) const DIMS: &str =
    "LxPxRxV of numbers from 1 to 4096, such as 512x128x64x128; R may be 0";

/// Parses `512x128x64x128`, which is L, P, R, V. Returns `None` for another text.
pub(in crate::bench) fn read_dims(text: &str) -> Option<MlaDims> {
    let numbers = text.split('x').map(|part| part.parse().ok());
    let numbers: Option<Vec<u32>> = numbers.collect();
    let &[latent, nope, rope, v] = numbers?.as_slice() else {
        return None;
    };
    let is_right = [latent, nope, rope.max(1), v]
        .iter()
        .all(|number| (1..=4096).contains(number));
    is_right.then(|| MlaDims::new(latent, HeadDims::new(nope, rope, v)))
}
