//! The shape and the numerics of one layer's indexer.

use std::fmt;

use crate::model::{MAX_DIM, RotaryStyle};
use crate::setters::setters;
use crate::{Error, Result};

/// The extents of an indexer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct IndexDims {
    /// The index heads (`index_n_heads`), all of them on every rank of tensor parallelism.
    pub heads: u32,
    /// D: the values of an index key (`index_head_dim`), a multiple of 4.
    pub width: u32,
    /// R: how many of them, from the first on, are rotary; even.
    pub rope: u32,
    /// The max number of tokens of a list (`index_topk`); beside them stand those of the last pool,
    /// if keys are pooled: [`list_width`](Self::list_width).
    pub topk: u32,
    /// K: the tokens that share an index key (`index_kpool`); 1: each has its own.
    pub pool: u32,
    /// The last tokens of each page whose keys are kept unpooled, a multiple of K; 0 without pools.
    /// A pool is made when its last token comes, of keys that are there, also if drafts behind them
    /// were turned down: `tail - K` drafts at most.
    pub tail: u32,
}

impl IndexDims {
    /// DeepSeek-V3.2: 64 heads of 128 values, lists of 2048.
    pub const DEEPSEEK_V3_2: Self = Self {
        heads: 64,
        width: 128,
        rope: 64,
        topk: 2048,
        pool: 1,
        tail: 0,
    };

    /// GLM-5: 32 heads of 128 values, lists of 2048.
    pub const GLM_5: Self = Self {
        heads: 32,
        ..Self::DEEPSEEK_V3_2
    };

    /// The extents of `heads` heads of `width` values, `rope` of them rotary, with lists of `topk`
    /// tokens.
    pub const fn new(heads: u32, width: u32, rope: u32, topk: u32) -> Self {
        Self {
            heads,
            width,
            rope,
            topk,
            pool: 1,
            tail: 0,
        }
    }

    setters! {
        with_heads(heads: u32);
        with_width(width: u32);
        with_rope(rope: u32);
        with_topk(topk: u32);
        with_pool(pool: u32);
        with_tail(tail: u32);
    }

    /// Bytes that the index cache has per token, but for the [`tail`](Self::tail) of a page: the
    /// values and a scale, of a pool's tokens together.
    pub const fn token_bytes(self) -> usize {
        (self.width as usize + 4).div_ceil(self.tokens_per_key())
    }

    /// Bytes of a page of the index cache for `tokens` tokens: keys, scales, and the tail's keys
    /// and gates in bf16.
    pub const fn page_bytes(self, tokens: usize) -> usize {
        let keys = (tokens / self.tokens_per_key()).saturating_mul(self.width as usize + 4);
        keys.saturating_add((self.tail as usize * 4).saturating_mul(self.width as usize))
    }

    /// K, also of extents that [`IndexerConfig::check`] refuses.
    pub(crate) const fn tokens_per_key(self) -> usize {
        if self.pool == 0 {
            1
        } else {
            self.pool as usize
        }
    }

    /// Entries of a list: `topk`, and the tokens of a pool that is not complete.
    pub const fn list_width(self) -> u32 {
        self.topk.saturating_add(self.pool).saturating_sub(1)
    }
}

impl fmt::Display for IndexDims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} index heads of {} values, {} of them rotary, lists of {}",
            self.heads, self.width, self.rope, self.topk
        )?;
        match self.pool {
            1 => Ok(()),
            pool => write!(f, ", pools of {pool} beside tails of {}", self.tail),
        }
    }
}

/// The configuration of an indexer: its extents, and the points in which implementations differ.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct IndexerConfig {
    /// Heads, widths, and the length of lists.
    pub dims: IndexDims,
    /// Pairing of rotary elements: [halves](RotaryStyle::Halves) in DeepSeek-V3.2, although the
    /// layer's own are interleaved; interleaved in GLM-5 (`indexer_rope_interleave`).
    pub rotary: RotaryStyle,
    /// True if keys and queries go through a Hadamard transform before they are quantised.
    pub hadamard: bool,
    /// The epsilon that the LayerNorm of keys adds to the variance.
    pub epsilon: f32,
}

impl IndexerConfig {
    /// DeepSeek-V3.2, without the Hadamard transform, as most engines run it.
    pub const DEEPSEEK_V3_2: Self = Self {
        dims: IndexDims::DEEPSEEK_V3_2,
        rotary: RotaryStyle::Halves,
        hadamard: false,
        epsilon: 1e-6,
    };

    /// GLM-5, without the Hadamard transform.
    pub const GLM_5: Self = Self {
        dims: IndexDims::GLM_5,
        rotary: RotaryStyle::Interleaved,
        ..Self::DEEPSEEK_V3_2
    };

    /// These extents and pairs of rotary elements, no Hadamard transform, and an epsilon of 10⁻⁶.
    pub const fn new(dims: IndexDims, rotary: RotaryStyle) -> Self {
        Self {
            dims,
            rotary,
            ..Self::DEEPSEEK_V3_2
        }
    }

    setters! {
        with_dims(dims: IndexDims);
        with_rotary(rotary: RotaryStyle);
        with_hadamard(hadamard: bool);
        with_epsilon(epsilon: f32);
    }

    /// Returns the factor of head weights before the scale of their query: heads^-½ · D^-½.
    pub fn weight_scale(&self) -> f32 {
        let product = f64::from(self.dims.heads) * f64::from(self.dims.width);
        (1.0 / product.sqrt()) as f32
    }

    /// Refuses what no indexer can be.
    ///
    /// # Errors
    ///
    /// If a field is out of its range; the error names it.
    pub fn check(&self) -> Result<()> {
        let IndexDims {
            heads,
            width,
            rope,
            topk,
            pool,
            tail,
        } = self.dims;
        for (field, value) in [
            ("index_n_heads", heads),
            ("index_head_dim", width),
            ("index_topk", topk),
            ("index_kpool", pool),
        ] {
            if !(1..=MAX_DIM).contains(&value) {
                return Err(Error::argument(field, value, format!("1 to {MAX_DIM}")));
            }
        }
        // Devices count the values of a token's queries in 32 bits.
        if u64::from(heads) * u64::from(width) > i32::MAX as u64 {
            let accepted = format!(
                "at most {} beside {heads} index heads",
                i32::MAX as u32 / heads
            );
            return Err(Error::argument("index_head_dim", width, accepted));
        }
        if !width.is_multiple_of(4) {
            return Err(Error::argument("index_head_dim", width, "a multiple of 4"));
        }
        if rope > width || !rope.is_multiple_of(2) {
            let accepted = format!("an even number up to index_head_dim, {width}");
            return Err(Error::argument("index rope", rope, accepted));
        }
        if !topk.is_multiple_of(pool) {
            let accepted = format!("a multiple of index_kpool, {pool}");
            return Err(Error::argument("index_topk", topk, accepted));
        }
        if pool > 1 && rope > 0 {
            let accepted = "0: keys that are pooled have no rotary part";
            return Err(Error::argument("index rope", rope, accepted));
        }
        let is_tail = match pool {
            1 => tail == 0,
            _ => tail >= pool && tail <= MAX_DIM && tail.is_multiple_of(pool),
        };
        if !is_tail {
            let accepted = match pool {
                1 => "0 without pools".to_owned(),
                pool => format!("a multiple of index_kpool, {pool}, up to {MAX_DIM}"),
            };
            return Err(Error::argument("index tail", tail, accepted));
        }
        if self.hadamard && !width.is_power_of_two() {
            let accepted = "a power of two, as the Hadamard transform needs";
            return Err(Error::argument("index_head_dim", width, accepted));
        }
        if !(self.epsilon.is_finite() && self.epsilon >= 0.0) {
            let accepted = "a finite number, 0 or above";
            return Err(Error::argument("index epsilon", self.epsilon, accepted));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals() {
        let base = IndexerConfig::DEEPSEEK_V3_2;
        base.check().unwrap();
        IndexerConfig::GLM_5.check().unwrap();
        let dims = base.dims;
        let refused = |config: IndexerConfig| config.check().unwrap_err().to_string();
        let with = |dims| refused(IndexerConfig { dims, ..base });
        assert_eq!(
            with(IndexDims { heads: 0, ..dims }),
            "index_n_heads: given 0, accepted 1 to 65536"
        );
        assert_eq!(
            with(IndexDims {
                topk: 65537,
                ..dims
            }),
            "index_topk: given 65537, accepted 1 to 65536"
        );
        assert_eq!(
            with(IndexDims { width: 130, ..dims }),
            "index_head_dim: given 130, accepted a multiple of 4"
        );
        let wide = IndexDims::new(32768, 65536, 64, 2048);
        assert_eq!(
            with(wide),
            "index_head_dim: given 65536, accepted at most 65535 beside 32768 index heads"
        );
        for rope in [63, 130] {
            assert_eq!(
                with(IndexDims { rope, ..dims }),
                format!(
                    "index rope: given {rope}, accepted an even number up to index_head_dim, 128"
                )
            );
        }
        assert_eq!(
            refused(IndexerConfig {
                hadamard: true,
                dims: IndexDims { width: 96, ..dims },
                ..base
            }),
            "index_head_dim: given 96, accepted a power of two, as the Hadamard transform needs"
        );
        assert_eq!(
            refused(IndexerConfig {
                epsilon: f32::NAN,
                ..base
            }),
            "index epsilon: given NaN, accepted a finite number, 0 or above"
        );
    }
}
