//! The element types of queries, keys, values and weights.

use std::fmt;

use half::{bf16, f16};

use crate::text::names;

names! {
    /// The element type of queries, outputs and weights. Sums are always accumulated in f32.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
    pub enum DType {
        /// IEEE binary32.
        F32 = "f32",
        /// IEEE binary16.
        F16 = "f16",
        /// bfloat16.
        BF16 = "bf16",
    }
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Returns true if both are equal. Usable in constants.
    pub const fn same(self, other: Self) -> bool {
        self as u8 == other as u8
    }
}

/// A Rust type of the elements of a [`DType`].
pub trait Element: bytemuck::Pod + Send + Sync + fmt::Debug + 'static {
    /// The dtype of this type.
    const DTYPE: DType;

    /// Converts to f32 exactly.
    fn to_f32(self) -> f32;

    /// Converts from f32, rounded to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;

    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;

    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}
