//! The format of one token's row in the cache.

use crate::model::{DType, MlaDims};
use crate::text::names;

names! {
    /// The layout of a cache row: the latent (L values), then the rotary key (R values).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
    pub enum KvFormat {
        /// L + R values of f32.
        F32 = "f32",
        /// L + R values of f16.
        F16 = "f16",
        /// L + R values of bf16.
        BF16 = "bf16",
        /// L + R bytes of e4m3 with one scale for the whole tensor: stored = value / scale.
        Fp8 = "fp8",
        /// L bytes of e4m3, then L/128 f32 scales (one per 128 values), then R values of bf16: 656
        /// bytes at L = 512, R = 64. Readers accept any scales; our writers round them up to powers
        /// of two.
        Fp8DsMla = "fp8_ds_mla",
        /// L bytes of e4m3, R values of bf16, then the latent's f32 scale at the next multiple of 4
        /// bytes: 644 bytes at L = 512, R = 64. Readers accept any scale; our writers store the
        /// largest magnitude divided by 448. GPU kernels need a pitch that is a multiple of 16
        /// bytes, here 656.
        Fp8PerToken = "fp8_per_token",
    }
}

impl KvFormat {
    /// The number of latent values that share one scale in [`KvFormat::Fp8DsMla`].
    pub const DS_MLA_GROUP: u32 = 128;

    /// The unquantised format that holds values of `dtype`.
    pub const fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::BF16,
        }
    }

    /// The dtype of the stored values; `None` if they are quantised.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::BF16 => Some(DType::BF16),
            Self::Fp8 | Self::Fp8DsMla | Self::Fp8PerToken => None,
        }
    }

    /// Returns true if the cache has one scale for all values,
    /// [`CacheLayout::scale`](crate::tensor::CacheLayout::scale): value = stored · scale.
    pub const fn has_tensor_scale(self) -> bool {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::Fp8DsMla | Self::Fp8PerToken => false,
            Self::Fp8 => true,
        }
    }

    /// Returns true if the format can hold rows of these dimensions.
    pub const fn holds(self, dims: MlaDims) -> bool {
        dims.latent.is_multiple_of(self.latent_multiple())
    }

    /// A number that must divide the latent's width. `Fp8DsMla` has whole groups of 128. In
    /// `Fp8PerToken` the values after the latent are aligned to 4 bytes.
    pub const fn latent_multiple(self) -> u32 {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::Fp8 => 1,
            Self::Fp8DsMla => Self::DS_MLA_GROUP,
            Self::Fp8PerToken => 4,
        }
    }

    /// Returns true if latents and rotary keys may be in two tensors. In `Fp8DsMla` and
    /// `Fp8PerToken` they form one row.
    pub const fn splits(self) -> bool {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::Fp8 => true,
            Self::Fp8DsMla | Self::Fp8PerToken => false,
        }
    }

    /// Bytes of one row: the latent and the rotary key.
    pub const fn row_bytes(self, dims: MlaDims) -> usize {
        self.latent_bytes(dims) + self.rope_bytes(dims)
    }

    /// Bytes from one row to the next in a cache that the library lays out. In `Fp8PerToken` this
    /// is the next multiple of 16, which GPU kernels need. In every other format it is the size of
    /// a row.
    pub const fn pitch(self, dims: MlaDims) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::Fp8 | Self::Fp8DsMla => self.row_bytes(dims),
            Self::Fp8PerToken => self.row_bytes(dims).next_multiple_of(16),
        }
    }

    /// Bytes of a latent, including its scales in `Fp8DsMla`. In a row, the rotary key begins after
    /// them.
    pub const fn latent_bytes(self, dims: MlaDims) -> usize {
        let latent = dims.latent as usize;
        match self {
            Self::F32 => 4 * latent,
            Self::F16 | Self::BF16 => 2 * latent,
            Self::Fp8 | Self::Fp8PerToken => latent,
            Self::Fp8DsMla => latent + 4 * (latent / Self::DS_MLA_GROUP as usize),
        }
    }

    /// Bytes of a rotary key, including the scale after it in `Fp8PerToken`.
    pub const fn rope_bytes(self, dims: MlaDims) -> usize {
        let rope = dims.head.rope as usize;
        match self {
            Self::F32 => 4 * rope,
            Self::F16 | Self::BF16 | Self::Fp8DsMla => 2 * rope,
            Self::Fp8 => rope,
            Self::Fp8PerToken => (2 * rope).next_multiple_of(4) + 4,
        }
    }

    /// Returns true if both are equal. Usable in constants.
    pub const fn same(self, other: Self) -> bool {
        self as u8 == other as u8
    }
}

const _: () = {
    const KNOWN: &[&str] = mla_macros::kv_formats!();
    let (mut i, mut same) = (0, KNOWN.len() == KvFormat::ALL.len());
    while same && i < KNOWN.len() {
        same = crate::text::is_equal(KNOWN[i], KvFormat::ALL[i].name());
        i += 1;
    }
    assert!(
        same,
        "the attribute knows other cache formats: see mla-macros/src/vocabulary.rs"
    );
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_bytes_are_those_of_the_published_layouts() {
        let bytes = |format: KvFormat| format.row_bytes(MlaDims::R1);
        assert_eq!(
            KvFormat::ALL.iter().map(|f| bytes(*f)).collect::<Vec<_>>(),
            [2304, 1152, 1152, 576, 656, 644]
        );
        assert_eq!(KvFormat::Fp8PerToken.pitch(MlaDims::R1), 656);
    }
}
