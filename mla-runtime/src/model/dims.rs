//! The dimensions of an MLA model.
//!
//! Four widths determine every shape: that of the latent (L), and those of one head's part without
//! rotary embedding (P), of its rotary part (R), and of its value (V). The cache holds L + R values
//! per token, whatever the number of heads.

use std::fmt;

use crate::setters::setters;
use crate::text::{self, Text};

/// The largest accepted dimension or count. It is far beyond any model's, and products of a few
/// such numbers do not overflow 64 bits.
pub const MAX_DIM: u32 = 65536;

/// The per-head dimensions (P, R, V) of the expanded form. Backends list the dimensions that they
/// support.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub struct HeadDims {
    /// P: the part of a query or key head without rotary embedding (`qk_nope_head_dim`).
    pub nope: u32,
    /// R: the rotary part of a query or key head (`qk_rope_head_dim`).
    pub rope: u32,
    /// V: the width of a value head (`v_head_dim`).
    pub v: u32,
}

impl HeadDims {
    /// The dimensions of DeepSeek-V2, V3 and R1: (128, 64, 128).
    pub const R1: Self = Self::new(128, 64, 128);

    /// Dimensions (P, R, V), in this order.
    pub const fn new(nope: u32, rope: u32, v: u32) -> Self {
        Self { nope, rope, v }
    }

    setters! {
        with_rope(rope: u32);
    }

    /// P + R: the width of an expanded query or key head.
    pub const fn qk(self) -> u32 {
        self.nope.saturating_add(self.rope)
    }

    /// P + V: the number of columns of `W_kv_b` that belong to one head.
    pub const fn kv_b(self) -> u32 {
        self.nope.saturating_add(self.v)
    }

    /// Returns true if both are equal. Usable in constants.
    pub const fn same(self, other: Self) -> bool {
        self.nope == other.nope && self.rope == other.rope && self.v == other.v
    }

    /// Returns true if a problem can have these dimensions.
    pub(crate) const fn are_possible(self) -> bool {
        let Self { nope, rope, v } = self;
        0 < nope && nope <= MAX_DIM && rope <= MAX_DIM && 0 < v && v <= MAX_DIM
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        text.push("(");
        text.number(self.nope);
        text.push(",");
        text.number(self.rope);
        text.push(",");
        text.number(self.v);
        text.push(")");
    }
}

text::display!(HeadDims);

/// All dimensions of a model: the latent width L and the per-head (P, R, V).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct MlaDims {
    /// L: the width of the cached latent (`kv_lora_rank`).
    pub latent: u32,
    /// (P, R, V) of one head.
    pub head: HeadDims,
}

impl MlaDims {
    /// The dimensions of DeepSeek-V2, V3 and R1: L = 512 and (128, 64, 128).
    pub const R1: Self = Self::new(512, HeadDims::R1);

    /// Dimensions with this latent width L and these per-head dimensions (P, R, V).
    pub const fn new(latent: u32, head: HeadDims) -> Self {
        Self { latent, head }
    }

    /// L + R: the number of values in a cache row, and the width of an absorbed query head.
    pub const fn row(self) -> u32 {
        self.latent.saturating_add(self.head.rope)
    }
}

impl fmt::Display for MlaDims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "L={} (P,R,V)={}", self.latent, self.head)
    }
}
