//! Up to how many query tokens the absorbed path is the cheaper one.
//!
//! Both paths let T query tokens of a request attend to its C cached tokens. With d = P + V, and
//! counting multiply-adds per head:
//!
//! | | absorbed | expanded |
//! |---|---|---|
//! | once per query token | L·d (into the latent and back) | |
//! | once per cached token | | L·d (expansion by `W_kv_b`) |
//! | per pair of them | 2L + R (scores L + R, values L) | d + R (scores P + R, values V) |
//!
//! The absorbed form is the cheaper one while T·(L·d + C·(2L + R)) ≤ C·(L·d + T·(d + R)), that is
//! while
//!
//! ```text
//!          L·d + x
//! T ≤ ────────────────        with x = 0
//!     L·d/C + 2L − d
//! ```
//!
//! For DeepSeek-V3 and a long context that is 131072/768, about 171. Where d ≥ 2L + L·d/C the
//! absorbed form is always cheaper.
//!
//! But the expansion also writes what it computes. Counting each byte as the multiply-adds that
//! the machine does in the time of moving it, x is the bytes written per cached token and head
//! times that balance. What is written is the product with `W_kv_b`, P + V values, and, for
//! backends that need each head's key in one piece, the packed keys, P + R values. For DeepSeek-V3
//! in 2-byte elements that is (256 + 192)·2 = 896 bytes; with an [H200](Machine::H200)'s balance
//! of about 103 the crossover is at 291 query tokens.
//!
//! Not counted, on either side: reading the cache, which both do once and which H heads share;
//! the new tokens among themselves; and the traffic of the attention kernels, which they hide
//! behind their arithmetic at these lengths.

use super::PlanError;
use crate::dims::MlaDims;

/// What one form of the attention costs, over all heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cost {
    /// Multiply-adds; twice as many FLOP.
    pub multiply_adds: u128,
    /// Bytes that only this form moves.
    pub bytes: u128,
}

impl Cost {
    /// Both in one number: the multiply-adds that the machine could have done meanwhile.
    pub fn on(self, machine: Machine) -> f64 {
        self.multiply_adds as f64 + self.bytes as f64 * machine.multiply_adds_per_byte
    }
}

/// The balance of a machine between arithmetic and memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Machine {
    multiply_adds_per_byte: f64,
}

impl Machine {
    /// An NVIDIA H200 by its data sheet, in bf16: 989 TFLOP/s and 4.8 TB/s.
    pub const H200: Self = Self {
        multiply_adds_per_byte: 989e12 / 2.0 / 4.8e12,
    };

    /// A machine whose memory costs nothing, for counting multiply-adds alone.
    pub const ARITHMETIC_ONLY: Self = Self {
        multiply_adds_per_byte: 0.0,
    };

    /// From floating-point operations per second (two per multiply-add) and bytes per second, as
    /// data sheets state them or as measured.
    ///
    /// # Errors
    ///
    /// If one of them is not a positive, finite number.
    pub fn new(flop_per_second: f64, bytes_per_second: f64) -> Result<Self, PlanError> {
        for (field, given) in [
            ("flop_per_second", flop_per_second),
            ("bytes_per_second", bytes_per_second),
        ] {
            if !(given.is_finite() && given > 0.0) {
                let accepted = "a finite number above 0";
                return Err(PlanError::invalid(field, given, accepted));
            }
        }
        Ok(Self {
            multiply_adds_per_byte: flop_per_second / 2.0 / bytes_per_second,
        })
    }

    /// How many multiply-adds take as long as moving one byte.
    pub const fn multiply_adds_per_byte(self) -> f64 {
        self.multiply_adds_per_byte
    }
}

/// What the expansion writes for each cached token and head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpansionTraffic {
    /// Bytes of an element of the expanded keys and values.
    pub element_bytes: u32,
    /// Whether the backend needs each head's key, P + R values, in one piece.
    pub packed_keys: bool,
}

impl ExpansionTraffic {
    /// Bytes per cached token and head.
    pub const fn bytes(self, dims: MlaDims) -> u64 {
        let packed = if self.packed_keys { qk(dims) } else { 0 };
        (kv_b(dims) + packed).saturating_mul(self.element_bytes as u64)
    }
}

/// d = P + V, in 64 bits.
const fn kv_b(dims: MlaDims) -> u64 {
    dims.head.nope as u64 + dims.head.v as u64
}

/// P + R, in 64 bits.
const fn qk(dims: MlaDims) -> u64 {
    dims.head.nope as u64 + dims.head.rope as u64
}

/// What the absorbed form costs one request: H·T·(L·d + C·(2L + R)) multiply-adds.
pub const fn absorbed_cost(dims: MlaDims, heads: u32, query_len: u32, context_len: u32) -> Cost {
    let latent = dims.latent as u128;
    let (queries, context) = (query_len as u128, context_len as u128);
    let pair = 2 * latent + dims.head.rope as u128;
    // Numbers of any model are far from the end of the type; others stop there.
    let per_query = (latent * kv_b(dims) as u128).saturating_add(context * pair);
    Cost {
        multiply_adds: (heads as u128 * queries).saturating_mul(per_query),
        bytes: 0,
    }
}

/// What the expanded form costs one request: H·C·(L·d + T·(d + R)) multiply-adds, and H·C times
/// the [bytes](ExpansionTraffic::bytes) that the expansion writes.
pub const fn expanded_cost(
    dims: MlaDims,
    heads: u32,
    query_len: u32,
    context_len: u32,
    traffic: ExpansionTraffic,
) -> Cost {
    let (queries, context) = (query_len as u128, context_len as u128);
    let width = kv_b(dims) as u128;
    let pair = width + dims.head.rope as u128;
    let per_row = (dims.latent as u128 * width).saturating_add(queries * pair);
    let rows = heads as u128 * context;
    Cost {
        multiply_adds: rows.saturating_mul(per_row),
        bytes: rows.saturating_mul(traffic.bytes(dims) as u128),
    }
}

/// The number of query tokens per request up to which the absorbed form is the cheaper one, from
/// the [module's](self) formula; infinite where it always is.
///
/// `context_len` is C; `None` is the limit of a long context. The number of heads plays no part:
/// both forms cost it as a factor.
pub fn crossover(
    dims: MlaDims,
    context_len: Option<u32>,
    traffic: ExpansionTraffic,
    machine: Machine,
) -> f64 {
    let latent = f64::from(dims.latent);
    let width = kv_b(dims) as f64;
    let written = traffic.bytes(dims) as f64 * machine.multiply_adds_per_byte;
    // Without any context there is nothing to expand, and the division gives infinity.
    let per_query = context_len.map_or(0.0, |len| latent * width / f64::from(len));
    let excess = per_query + 2.0 * latent - width;
    if excess > 0.0 {
        (latent * width + written) / excess
    } else {
        f64::INFINITY
    }
}

/// [`crossover`] as a threshold for [`super::split`]: the most query tokens of a request on the
/// absorbed path. At least 1, since the absorbed form is the one that decodes.
pub fn threshold(
    dims: MlaDims,
    context_len: Option<u32>,
    traffic: ExpansionTraffic,
    machine: Machine,
) -> u32 {
    // The conversion rounds down, and takes infinity to the largest number.
    (crossover(dims, context_len, traffic, machine) as u32).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dims::HeadDims;

    const BF16_PACKED: ExpansionTraffic = ExpansionTraffic {
        element_bytes: 2,
        packed_keys: true,
    };
    const GLM_5: MlaDims = MlaDims::new(512, HeadDims::new(192, 64, 256));
    const MINICPM3: MlaDims = MlaDims::new(256, HeadDims::new(64, 32, 64));

    fn arithmetic(dims: MlaDims, context_len: Option<u32>) -> f64 {
        crossover(dims, context_len, BF16_PACKED, Machine::ARITHMETIC_ONLY)
    }

    #[test]
    fn crossovers_of_known_models() {
        for (dims, expected) in [
            (MlaDims::R1, 131_072.0 / 768.0),
            (GLM_5, 229_376.0 / 576.0),
            (MINICPM3, 32_768.0 / 384.0),
        ] {
            assert_eq!(arithmetic(dims, None), expected);
        }
        assert_eq!(arithmetic(MlaDims::R1, None).round(), 171.0);
        // 131072/1024 more in the denominator.
        assert_eq!(arithmetic(MlaDims::R1, Some(1024)), 131_072.0 / 896.0);
        assert_eq!(arithmetic(MlaDims::R1, Some(0)), 0.0);
    }

    #[test]
    fn traffic_moves_the_crossover_to_about_290() {
        let with_traffic = crossover(MlaDims::R1, None, BF16_PACKED, Machine::H200);
        assert!((with_traffic - 290.9).abs() < 0.1, "{with_traffic}");
        assert_eq!(
            threshold(MlaDims::R1, None, BF16_PACKED, Machine::H200),
            290
        );
        let unpacked = ExpansionTraffic {
            packed_keys: false,
            ..BF16_PACKED
        };
        assert_eq!(unpacked.bytes(MlaDims::R1), 512);
        assert!(crossover(MlaDims::R1, None, unpacked, Machine::H200) < with_traffic);
    }

    #[test]
    fn wide_heads_are_always_absorbed() {
        // d = 2L, where the pairs cost the same and the expansion comes on top.
        let wide = MlaDims::new(64, HeadDims::new(64, 64, 64));
        assert_eq!(arithmetic(wide, None), f64::INFINITY);
        assert!(arithmetic(wide, Some(1000)).is_finite());
        assert_eq!(threshold(wide, None, BF16_PACKED, Machine::H200), u32::MAX);
        assert_eq!(
            threshold(MlaDims::R1, Some(1), BF16_PACKED, Machine::ARITHMETIC_ONLY),
            1
        );
    }

    #[test]
    fn machines_are_positive() {
        let h200 = Machine::new(989e12, 4.8e12).unwrap();
        assert_eq!(h200, Machine::H200);
        assert!((h200.multiply_adds_per_byte() - 103.02).abs() < 0.01);
        for (flop, bytes) in [
            (0.0, 1.0),
            (1.0, -1.0),
            (f64::NAN, 1.0),
            (1.0, f64::INFINITY),
        ] {
            assert!(Machine::new(flop, bytes).is_err(), "{flop} {bytes}");
        }
        assert_eq!(
            Machine::new(1e12, 0.0).unwrap_err().to_string(),
            "bytes_per_second: 0 is not accepted; accepted: a finite number above 0"
        );
    }

    #[test]
    fn known_costs() {
        // 16 heads, 2 query tokens, 100 cached ones.
        let absorbed = absorbed_cost(MlaDims::R1, 16, 2, 100);
        assert_eq!(absorbed.multiply_adds, 16 * 2 * (131_072 + 100 * 1088));
        let expanded = expanded_cost(MlaDims::R1, 16, 2, 100, BF16_PACKED);
        assert_eq!(expanded.multiply_adds, 16 * 100 * (131_072 + 2 * 320));
        assert_eq!((absorbed.bytes, expanded.bytes), (0, 16 * 100 * 896));
        // Nonsense as large as the types allow is no overflow.
        let huge = MlaDims::new(u32::MAX, HeadDims::new(u32::MAX, u32::MAX, u32::MAX));
        let most = absorbed_cost(huge, u32::MAX, u32::MAX, u32::MAX).multiply_adds;
        assert_eq!(most, u128::MAX);
        let traffic = ExpansionTraffic {
            element_bytes: u32::MAX,
            packed_keys: true,
        };
        assert_eq!(traffic.bytes(huge), u64::MAX);
    }

    proptest! {
        /// The formula says which of the two costs is the smaller.
        #[test]
        fn the_crossover_is_where_the_costs_cross(
            (latent, nope, rope, v) in (1u32..1024, 1u32..512, 0u32..128, 1u32..512),
            (heads, queries, context) in (1u32..200, 1u32..2000, 1u32..100_000),
            balance in prop_oneof![Just(0.0), 1.0f64..400.0],
            packed_keys: bool,
        ) {
            let dims = MlaDims::new(latent, HeadDims::new(nope, rope, v));
            let traffic = ExpansionTraffic { element_bytes: 2, packed_keys };
            let machine = Machine { multiply_adds_per_byte: balance };
            let crossover = crossover(dims, Some(context), traffic, machine);
            let absorbed = absorbed_cost(dims, heads, queries, context).on(machine);
            let expanded = expanded_cost(dims, heads, queries, context, traffic).on(machine);
            // Where they are equal but for rounding, either answer is right.
            prop_assume!((absorbed - expanded).abs() > 1e-9 * expanded);
            prop_assert_eq!(f64::from(queries) < crossover, absorbed < expanded);
        }
    }
}
