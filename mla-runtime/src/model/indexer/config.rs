//! The dimensions of one layer's indexer, and the options of its arithmetic.

use std::fmt;

use crate::model::{MAX_DIM, RotaryStyle};
use crate::setters::setters;
use crate::{Error, Result};

/// The configuration of an indexer: its extents, and the options in which models differ.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct IndexerConfig {
    /// The number of index heads (`index_n_heads`). Every tensor-parallel rank computes all of
    /// them.
    pub heads: u32,
    /// D: the number of values in an index key (`index_head_dim`), a multiple of 4.
    pub width: u32,
    /// R: the number of rotary values in an index key; even. They come first.
    pub rope: u32,
    /// The maximum number of chosen tokens (`index_topk`). If keys are pooled, a list also contains
    /// the tokens of the last pool: [`list_width`](Self::list_width).
    pub topk: u32,
    /// K: the number of tokens that share an index key (`index_kpool`); 1 if each token has its
    /// own.
    pub pool: u32,
    /// The number of last tokens of each page whose keys are also kept unpooled. It is a multiple
    /// of K, and 0 without pools. A pool's key is computed when its last token arrives, and the
    /// keys of its tokens must still be there. The tail allows for at most `tail - K` draft tokens
    /// that were rejected.
    pub tail: u32,
    /// The pairing of rotary elements. DeepSeek-V3.2 has [halves](RotaryStyle::Halves) here,
    /// although its layers have interleaved pairs. GLM-5 has interleaved pairs
    /// (`indexer_rope_interleave`).
    pub rotary: RotaryStyle,
    /// True if keys and queries are multiplied by a Hadamard matrix before they are quantised.
    pub hadamard: bool,
    /// The epsilon that the LayerNorm of keys adds to the variance.
    pub epsilon: f32,
}

impl IndexerConfig {
    /// DeepSeek-V3.2, without the Hadamard transform, as most engines run it: 64 heads of 128
    /// values, lists of 2048.
    pub const DEEPSEEK_V3_2: Self = Self::new(64, 128, 64, 2048);

    /// GLM-5, without the Hadamard transform: 32 heads of 128 values, lists of 2048.
    pub const GLM_5: Self = Self::new(32, 128, 64, 2048).with_rotary(RotaryStyle::Interleaved);

    /// An indexer with `heads` heads of `width` values, the first `rope` of them rotary in halves,
    /// and lists of `topk` tokens; without pools and the Hadamard transform, and with an epsilon of
    /// 10⁻⁶.
    pub const fn new(heads: u32, width: u32, rope: u32, topk: u32) -> Self {
        Self {
            heads,
            width,
            rope,
            topk,
            pool: 1,
            tail: 0,
            rotary: RotaryStyle::Halves,
            hadamard: false,
            epsilon: 1e-6,
        }
    }

    setters! {
        with_heads(heads: u32);
        with_width(width: u32);
        with_rope(rope: u32);
        with_topk(topk: u32);
        with_pool(pool: u32);
        with_tail(tail: u32);
        with_rotary(rotary: RotaryStyle);
        with_hadamard(hadamard: bool);
        with_epsilon(epsilon: f32);
    }

    /// Bytes of the index cache per token, without the [`tail`](Self::tail) of a page. A key and
    /// its scale are shared by the tokens of a pool.
    pub const fn token_bytes(&self) -> usize {
        (self.width as usize + 4).div_ceil(self.tokens_per_key())
    }

    /// Bytes of a page of the index cache with `tokens` tokens: keys, scales, and the tail's keys
    /// and gates in bf16.
    pub const fn page_bytes(&self, tokens: usize) -> usize {
        let keys = (tokens / self.tokens_per_key()).saturating_mul(self.width as usize + 4);
        keys.saturating_add((self.tail as usize * 4).saturating_mul(self.width as usize))
    }

    /// K, or 1 if K is an invalid 0, which [`check`](Self::check) refuses.
    pub(crate) const fn tokens_per_key(&self) -> usize {
        if self.pool == 0 {
            1
        } else {
            self.pool as usize
        }
    }

    /// The number of entries in a list: `topk`, plus the tokens of an incomplete pool.
    pub const fn list_width(&self) -> u32 {
        self.topk.saturating_add(self.pool).saturating_sub(1)
    }

    /// Returns the numbers that the memory of an indexer depends on.
    pub(crate) const fn extents(&self) -> [u32; 6] {
        [
            self.heads, self.width, self.rope, self.topk, self.pool, self.tail,
        ]
    }

    /// Returns the factor of head weights, without the scale of their query: heads^-½ · D^-½.
    pub fn weight_scale(&self) -> f32 {
        let product = f64::from(self.heads) * f64::from(self.width);
        (1.0 / product.sqrt()) as f32
    }

    /// Refuses an impossible configuration.
    ///
    /// # Errors
    ///
    /// If a field is out of its range. The error names the field.
    pub fn check(&self) -> Result<()> {
        let [heads, width, rope, topk, pool, tail] = self.extents();
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

impl fmt::Display for IndexerConfig {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals() {
        let base = IndexerConfig::DEEPSEEK_V3_2;
        base.check().unwrap();
        IndexerConfig::GLM_5.check().unwrap();
        let refused = |config: IndexerConfig| config.check().unwrap_err().to_string();
        assert_eq!(
            refused(base.with_heads(0)),
            "index_n_heads: given 0, accepted 1 to 65536"
        );
        assert_eq!(
            refused(base.with_topk(65537)),
            "index_topk: given 65537, accepted 1 to 65536"
        );
        assert_eq!(
            refused(base.with_width(130)),
            "index_head_dim: given 130, accepted a multiple of 4"
        );
        assert_eq!(
            refused(IndexerConfig::new(32768, 65536, 64, 2048)),
            "index_head_dim: given 65536, accepted at most 65535 beside 32768 index heads"
        );
        for rope in [63, 130] {
            assert_eq!(
                refused(base.with_rope(rope)),
                format!(
                    "index rope: given {rope}, accepted an even number up to index_head_dim, 128"
                )
            );
        }
        assert_eq!(
            refused(base.with_width(96).with_hadamard(true)),
            "index_head_dim: given 96, accepted a power of two, as the Hadamard transform needs"
        );
        assert_eq!(
            refused(base.with_epsilon(f32::NAN)),
            "index epsilon: given NaN, accepted a finite number, 0 or above"
        );
    }
}
