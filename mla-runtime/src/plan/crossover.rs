//! Computes the number of query tokens up to which the absorbed path is cheaper.
//!
//! Both paths let T query tokens of a request attend to its C cached tokens. The table counts
//! multiply-adds per head, with d = P + V:
//!
//! | | absorbed | expanded |
//! |---|---|---|
//! | once per query token | L·d (into the latent and back) | |
//! | once per cached token | | L·d (expansion by `W_kv_b`) |
//! | per pair of a query and a cached token | 2L + R (scores L + R, values L) | d + R (scores P + R, values V) |
//!
//! The absorbed form takes fewer multiply-adds while
//! T·(L·d + C·(2L + R)) ≤ C·(L·d + T·(d + R)). Solved for T, this is
//!
//! ```text
//!           L·d
//! T ≤ ────────────────
//!     L·d/C + 2L − d
//! ```
//!
//! For DeepSeek-V3 and a long context the right side is 131072/768, about 171. If d ≥ 2L + L·d/C,
//! the absorbed form is always cheaper. This model serves processors about which nothing is known
//! ([`Machine::ARITHMETIC`]): a processor keeps what it expands in its caches.
//!
//! # On a processor
//!
//! Multiply-adds do not all take the same time. A [processor](Machine::processor) has three
//! measured times per multiply-add. One is for products with the weights. The others are for pairs
//! of tokens, in the absorbed and in the expanded form. The model also counts the new tokens: they
//! are expanded, too, and they attend to each other.
//!
//! # On a GPU
//!
//! On a [GPU](Machine::gpu) other times count as well. Each form is a sequence of steps:
//!
//! | absorbed | expanded |
//! |---|---|
//! | cache write, queries times `W_UK` | cache write |
//! | attention to the cache | expansion of context and new tokens from their pages |
//! | outputs times `W_UV` | causal attention to them |
//!
//! (The table's expanded form requires that the workspace has room for all of these rows, and that
//! the cache holds them in the queries' format. Other layers have more launches. If keys are
//! packed, the layer first gathers the rows.)
//!
//! The time of a step is the time of its launch, plus the time of its arithmetic or of its bytes,
//! whichever is longer. The model counts the arithmetic of whole tiles on whole multiprocessors,
//! because a few tiles do not fill the GPU:
//!
//! - Absorbed attention divides the H·T query rows into tiles of 64 and the cached tokens into
//!   tiles of 64. These tiles are spread evenly over all multiprocessors.
//! - The expansion has tiles of 128 rows by 256 columns. A pair of multiprocessors takes a run of
//!   row tiles for one column tile. With `r` runs per column tile, the pairs need ⌈`r` · column
//!   tiles / pairs⌉ rounds. A round takes the time of the tiles in a run, plus the time of one more
//!   tile.
//! - Expanded attention has T/128 tiles of queries for each head. The keys of each tile are divided
//!   into at most 64 splits, and the model takes the number that finishes first. With `n` tiles of
//!   128 keys in `s` splits, the time is ⌈H·⌈T/128⌉·s / multiprocessors⌉ · ⌈n/s⌉ times the time of
//!   a tile. It therefore rises in steps.
//!
//! Each step reaches some fraction of the machine's arithmetic. These fractions were fitted on one
//! H200 to the kernels for Hopper, with 8 to 128 heads, 64 to 768 new tokens, and 8k and 32k tokens
//! of context (docs/log/layer.md). The model uses the same fractions for other backends.

use crate::model::MlaDims;
use crate::spec::Problem;
use crate::{Error, Result};

/// The machine whose speed determines the times of the two forms.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Machine(Figures);

#[derive(Clone, Copy, PartialEq, Debug)]
enum Figures {
    Arithmetic,
    /// The time of a multiply-add of each kind, in seconds, if all threads work.
    Processor {
        product_seconds: f64,
        absorbed_pair_seconds: f64,
        expanded_pair_seconds: f64,
    },
    Gpu(Gpu),
}

impl Machine {
    /// A processor about which nothing is known: only multiply-adds count.
    pub const ARITHMETIC: Self = Self(Figures::Arithmetic);

    /// An NVIDIA H200 as measured in bf16: 132 multiprocessors, 795 TFLOP/s and 4.2 TB/s.
    pub const H200: Self = Self(Figures::Gpu(Gpu::H200));

    /// A GPU with this number of multiprocessors and these rates. The rates are those that large
    /// products and large copies reach; a multiply-add counts as two floating-point operations.
    ///
    /// # Errors
    ///
    /// If there are not 1 to 65536 multiprocessors, or a rate is not a positive, finite number.
    pub fn gpu(multiprocessors: u32, flop_per_second: f64, bytes_per_second: f64) -> Result<Self> {
        if !(1..=MAX_MULTIPROCESSORS).contains(&multiprocessors) {
            let accepted = format!("1 to {MAX_MULTIPROCESSORS}");
            return Err(Error::argument(
                "multiprocessors",
                multiprocessors,
                accepted,
            ));
        }
        positive("flop_per_second", flop_per_second)?;
        positive("bytes_per_second", bytes_per_second)?;
        Ok(Self(Figures::Gpu(Gpu {
            multiprocessors,
            flop_per_second,
            bytes_per_second,
            launch_seconds: Gpu::LAUNCH,
        })))
    }

    /// The number of multiprocessors, if it is a GPU.
    pub const fn multiprocessors(&self) -> Option<u32> {
        match self.0 {
            Figures::Gpu(gpu) => Some(gpu.multiprocessors),
            Figures::Arithmetic | Figures::Processor { .. } => None,
        }
    }

    /// A processor with these times per multiply-add, in seconds. The first is for products with
    /// the weights. The others are for pairs of a new and a cached token, absorbed and expanded.
    ///
    /// # Errors
    ///
    /// If one of the times is not a positive, finite number.
    pub fn processor(
        product_seconds: f64,
        absorbed_pair_seconds: f64,
        expanded_pair_seconds: f64,
    ) -> Result<Self> {
        positive("product_seconds", product_seconds)?;
        positive("absorbed_pair_seconds", absorbed_pair_seconds)?;
        positive("expanded_pair_seconds", expanded_pair_seconds)?;
        Ok(Self(Figures::Processor {
            product_seconds,
            absorbed_pair_seconds,
            expanded_pair_seconds,
        }))
    }
}

/// Refuses numbers that are not positive and finite.
fn positive(field: &'static str, given: f64) -> Result<()> {
    if given.is_finite() && given > 0.0 {
        return Ok(());
    }
    Err(Error::argument(field, given, "a finite number above 0"))
}

/// The maximum rates of a GPU, and the time of a launch.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Gpu {
    multiprocessors: u32,
    flop_per_second: f64,
    bytes_per_second: f64,
    launch_seconds: f64,
}

impl Gpu {
    const H200: Self = Self {
        multiprocessors: 132,
        flop_per_second: 795e12,
        bytes_per_second: 4.2e12,
        launch_seconds: Self::LAUNCH,
    };

    /// The time between two consecutive matrix products in a graph on Hopper, without their own
    /// work.
    const LAUNCH: f64 = 5e-6;

    /// Returns the seconds of a matrix product.
    fn product(&self, flop: f64, bytes: f64) -> f64 {
        // Large products reach this fraction of the rate. Products with a short inner dimension
        // reach another fraction.
        const REACHED: f64 = 0.86;
        self.step(1.0, flop / (REACHED * self.flop_per_second), bytes)
    }

    /// Returns the seconds of a step whose beginning and end take as long as `launches` launches.
    fn step(&self, launches: f64, arithmetic_seconds: f64, bytes: f64) -> f64 {
        launches * self.launch_seconds + arithmetic_seconds.max(bytes / self.bytes_per_second)
    }

    /// Returns the seconds that one multiprocessor takes for `flop` floating-point operations.
    fn tile(&self, flop: f64, reached: f64) -> f64 {
        flop * f64::from(self.multiprocessors) / (reached * self.flop_per_second)
    }
}

/// The attention of one request by a layer of `heads` heads.
#[derive(Clone, Copy)]
struct Attention {
    heads: f64,
    latent: f64,
    nope: f64,
    rope: f64,
    v: f64,
    /// C, or `None` for the limit of a long context.
    context_len: Option<f64>,
    /// Bytes of an element. It also applies to the expanded keys and values.
    element_bytes: f64,
    packed_keys: bool,
}

/// The maximum number of multiprocessors. It is larger than any GPU's, and small enough to try
/// every number of splits.
const MAX_MULTIPROCESSORS: u32 = 1 << 16;

/// The length that represents a long context on a GPU. More context does not change the crossover.
const LONG: f64 = (1 << 17) as f64;

/// The maximum number of query tokens that is tried. If the absorbed form is still faster there, it
/// is always faster.
const MAX_QUERIES: u32 = 2048;

/// The number of query rows, and of keys, in a tile of the expanded attention.
const TILE: u32 = 128;

impl Attention {
    fn of(problem: &Problem, packed_keys: bool, context_len: Option<u32>) -> Self {
        let MlaDims { latent, head } = problem.dims;
        let [heads, latent, nope, rope, v] =
            [problem.heads, latent, head.nope, head.rope, head.v].map(f64::from);
        Self {
            heads,
            latent,
            nope,
            rope,
            v,
            context_len: context_len.map(f64::from),
            element_bytes: problem.dtype.bytes() as f64,
            packed_keys,
        }
    }

    /// Bytes that the expansion writes for each token and head.
    fn expansion_bytes(&self) -> f64 {
        let packed = if self.packed_keys {
            self.nope + self.rope
        } else {
            0.0
        };
        (self.nope + self.v + packed) * self.element_bytes
    }

    fn context(&self) -> f64 {
        self.context_len.unwrap_or(LONG)
    }

    /// The number of cached and new tokens.
    fn tokens(&self, query_len: u32) -> f64 {
        self.context() + f64::from(query_len)
    }

    /// The number of pairs of a new token and a token that it attends to. Pairs of two new tokens
    /// count as well.
    fn pairs(&self, query_len: u32) -> f64 {
        let queries = f64::from(query_len);
        queries * (self.context() + (queries + 1.0) / 2.0)
    }

    /// The multiply-adds of the absorbed form. First those of products with the weights: L·d per
    /// head and new token. Then those of pairs of a new token and a token that it attends to: 2L +
    /// R per pair.
    fn absorbed_work(&self, query_len: u32) -> [f64; 2] {
        let products = self.heads * f64::from(query_len) * self.latent * (self.nope + self.v);
        let pairs = self.heads * self.pairs(query_len);
        [products, pairs * (2.0 * self.latent + self.rope)]
    }

    /// The multiply-adds of the expanded form. First those of products with the weights: L·d per
    /// head and row, cached or new. Then those of pairs: d + R per pair.
    fn expanded_work(&self, query_len: u32) -> [f64; 2] {
        let width = self.nope + self.v;
        let products = self.heads * self.tokens(query_len) * self.latent * width;
        let pairs = self.heads * self.pairs(query_len);
        [products, pairs * (width + self.rope)]
    }

    /// Returns the seconds of the absorbed form for `query_len` new tokens.
    fn absorbed_seconds(&self, query_len: u32, gpu: &Gpu) -> f64 {
        let queries = f64::from(query_len);
        // Bytes of the latent queries of all heads, and also of their outputs.
        let latent = queries * self.heads * self.latent * self.element_bytes;
        let product = |width: f64| {
            let pairs = self.heads * width * self.latent;
            let moved = pairs * self.element_bytes
                + queries * self.heads * width * self.element_bytes
                + latent;
            gpu.product(2.0 * queries * pairs, moved)
        };
        let tokens = self.tokens(query_len);
        let tiles = (queries * self.heads / 64.0).ceil() * (tokens / 64.0).ceil();
        let tile = gpu.tile(2.0 * 64.0 * 64.0 * (2.0 * self.latent + self.rope), 0.84);
        let cache = tokens * (self.latent + self.rope) * self.element_bytes;
        let arithmetic = tiles / f64::from(gpu.multiprocessors) * tile;
        product(self.nope) + gpu.step(3.5, arithmetic, cache) + product(self.v)
    }

    /// Returns the seconds of the expanded form for `query_len` new tokens.
    fn expanded_seconds(&self, query_len: u32, gpu: &Gpu) -> f64 {
        let queries = f64::from(query_len);
        let written = self.heads * self.expansion_bytes();
        let query_tiles = self.heads * f64::from(query_len.div_ceil(TILE));
        let waves = |items: f64| (items / f64::from(gpu.multiprocessors)).ceil();
        let rows = self.tokens(query_len);
        let split = |splits: u32| {
            let key_tiles = (rows / f64::from(TILE)).ceil();
            waves(query_tiles * f64::from(splits)) * (key_tiles / f64::from(splits)).ceil()
        };
        let tiles = (1..=64).map(split).fold(f64::INFINITY, f64::min);
        let tile = gpu.tile(
            2.0 * f64::from(TILE * TILE) * (self.nope + self.rope + self.v),
            1.03,
        );
        let read = rows * (written + self.rope * self.element_bytes)
            + queries * self.heads * (self.nope + self.rope + 2.0 * self.v) * self.element_bytes;
        // A cache write takes less time than a product.
        gpu.step(0.5, 0.0, 0.0)
            + self.expansion_seconds(rows, gpu)
            + gpu.step(3.0, tiles * tile, read)
    }

    /// Returns the seconds of the expansion of all rows into keys and values.
    fn expansion_seconds(&self, rows: f64, gpu: &Gpu) -> f64 {
        let width = self.heads * (self.nope + self.v);
        let written = self.heads * self.expansion_bytes();
        let weights = self.latent * width * self.element_bytes;
        let moved = weights + rows * (self.latent * self.element_bytes + written);
        if self.packed_keys {
            // Packed keys take a gather, a product of their own, and a copy of the rotary part.
            let gathered = 2.0 * rows * (self.latent + self.rope) * self.element_bytes;
            let product = gpu.product(2.0 * rows * self.latent * width, moved);
            return gpu.step(0.5, 0.0, gathered) + product + 2.0 * gpu.launch_seconds;
        }
        let row_tiles = (rows / f64::from(TILE)).ceil();
        let columns = (width / f64::from(2 * TILE)).ceil();
        let pairs = f64::from((gpu.multiprocessors / 2).max(1));
        let time = |runs: u32| {
            let runs = f64::from(runs);
            // A run first loads its weights, which takes as long as a tile.
            (columns * runs / pairs).ceil() * ((row_tiles / runs).ceil() + 1.0)
        };
        let max = row_tiles.min(pairs) as u32;
        let tiles = (1..=max.max(1)).map(time).fold(f64::INFINITY, f64::min);
        let tile = gpu.tile(2.0 * f64::from(TILE * TILE) * self.latent, 1.03);
        gpu.step(1.0, tiles * tile, moved)
    }

    fn absorbs(&self, query_len: u32, gpu: &Gpu) -> bool {
        self.absorbed_seconds(query_len, gpu) <= self.expanded_seconds(query_len, gpu)
    }

    /// The maximum number of query tokens for which the absorbed form is not slower.
    fn crossover_by(absorbs: impl Fn(u32) -> bool) -> f64 {
        let last = (1..=MAX_QUERIES).rev().find(|&q| absorbs(q));
        match last {
            Some(MAX_QUERIES) => f64::INFINITY,
            last => last.unwrap_or(0).into(),
        }
    }

    fn crossover(&self, machine: &Machine) -> f64 {
        match machine.0 {
            Figures::Gpu(gpu) => Self::crossover_by(|q| self.absorbs(q, &gpu)),
            Figures::Processor {
                product_seconds,
                absorbed_pair_seconds,
                expanded_pair_seconds,
            } => {
                let seconds = |[products, pairs]: [f64; 2], pair_seconds: f64| {
                    products * product_seconds + pairs * pair_seconds
                };
                Self::crossover_by(|q| {
                    seconds(self.absorbed_work(q), absorbed_pair_seconds)
                        <= seconds(self.expanded_work(q), expanded_pair_seconds)
                })
            }
            Figures::Arithmetic => self.by_arithmetic(),
        }
    }

    fn by_arithmetic(&self) -> f64 {
        let products = self.latent * (self.nope + self.v);
        // Without context there is nothing to expand. The division then gives infinity.
        let per_query = self.context_len.map_or(0.0, |len| products / len);
        let excess = per_query + 2.0 * self.latent - (self.nope + self.v);
        if excess > 0.0 {
            products / excess
        } else {
            f64::INFINITY
        }
    }

    fn threshold(&self, machine: &Machine) -> u32 {
        // The conversion rounds down, and it turns infinity into the largest integer.
        (self.crossover(machine) as u32).max(1)
    }
}

/// The number of query tokens of a request up to which the absorbed form is faster; infinite if it
/// always is. The [module](self) describes the model. If only multiply-adds count, the number of
/// heads does not matter. `packed_keys` is true if the prefill backend needs each head's key of P +
/// R values packed. A `context_len` of `None` means a long context.
pub fn crossover(
    machine: &Machine,
    problem: &Problem,
    packed_keys: bool,
    context_len: Option<u32>,
) -> f64 {
    Attention::of(problem, packed_keys, context_len).crossover(machine)
}

/// The [`crossover`] as a threshold for [`super::split`]: the maximum number of query tokens of a
/// request on the absorbed path. It is at least 1, because decoding uses the absorbed form.
pub fn threshold(
    machine: &Machine,
    problem: &Problem,
    packed_keys: bool,
    context_len: Option<u32>,
) -> u32 {
    Attention::of(problem, packed_keys, context_len).threshold(machine)
}

/// The multiply-adds of the absorbed and of the expanded form for `query_len` new tokens. Each form
/// has two numbers: products with the weights, and pairs of tokens.
pub fn multiply_adds(problem: &Problem, context_len: u32, query_len: u32) -> [[f64; 2]; 2] {
    let attention = Attention::of(problem, false, Some(context_len));
    [
        attention.absorbed_work(query_len),
        attention.expanded_work(query_len),
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::{DType, HeadDims};

    const H200: Machine = Machine::H200;
    const GLM_5: MlaDims = MlaDims::new(512, HeadDims::new(192, 64, 256));
    const MINICPM3: MlaDims = MlaDims::new(256, HeadDims::new(64, 32, 64));

    fn r1(heads: u32, context_len: u32) -> Attention {
        of_dims(MlaDims::R1, heads, Some(context_len))
    }

    fn of_dims(dims: MlaDims, heads: u32, context_len: Option<u32>) -> Attention {
        Attention::of(&Problem::new(dims, heads, DType::BF16), false, context_len)
    }

    /// The multiply-adds of the absorbed form: H·T·(L·d + C·(2L + R)).
    fn absorbed_cost(dims: MlaDims, [heads, queries, context]: [u32; 3]) -> u128 {
        let [latent, rope] = [dims.latent, dims.head.rope].map(u128::from);
        let per_query =
            latent * u128::from(dims.head.kv_b()) + u128::from(context) * (2 * latent + rope);
        u128::from(heads) * u128::from(queries) * per_query
    }

    /// The multiply-adds of the expanded form: H·C·(L·d + T·(d + R)).
    fn expanded_cost(dims: MlaDims, [heads, queries, context]: [u32; 3]) -> u128 {
        let [latent, rope] = [dims.latent, dims.head.rope].map(u128::from);
        let width = u128::from(dims.head.kv_b());
        let per_row = latent * width + u128::from(queries) * (width + rope);
        u128::from(heads) * u128::from(context) * per_row
    }

    fn arithmetic(dims: MlaDims, context_len: Option<u32>) -> f64 {
        of_dims(dims, 16, context_len).crossover(&Machine::ARITHMETIC)
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
        // 1024 tokens of context add 131072/1024 to the denominator.
        assert_eq!(arithmetic(MlaDims::R1, Some(1024)), 131_072.0 / 896.0);
        assert_eq!(arithmetic(MlaDims::R1, Some(0)), 0.0);
    }

    #[test]
    fn times_and_crossovers_are_those_that_were_measured_on_an_h200() {
        // A row has heads, context, and the layer's measured crossover (BENCHMARKS.md; with 32
        // heads it follows from the times). Behind these are the measured times of each form's
        // steps for two numbers of new tokens (docs/log/layer.md): tokens, µs of the absorbed form,
        // µs of the expanded form without its cache write.
        for (heads, context, crossover, times) in [
            (8, 8192, 139.0, [(192, 70.3, 62.4), (256, 83.2, 64.5)]),
            (8, 32768, 157.0, [(128, 137.3, 156.1), (256, 244.1, 172.4)]),
            (16, 8192, 151.0, [(192, 113.3, 98.2), (256, 143.0, 97.9)]),
            (16, 32768, 162.0, [(192, 348.2, 308.6), (256, 455.7, 312.0)]),
            (32, 8192, 156.0, [(128, 144.6, 149.9), (192, 200.4, 168.8)]),
            (128, 8192, 158.0, [(128, 485.7, 505.1), (192, 735.7, 628.1)]),
        ] {
            let attention = r1(heads, context);
            let predicted = attention.crossover(&H200);
            let ratio = predicted / crossover;
            assert!(
                (0.85..1.15).contains(&ratio),
                "{heads} {context}: {predicted}"
            );
            for (queries, absorbed, expanded) in times {
                for (seconds, measured) in [
                    (attention.absorbed_seconds(queries, &Gpu::H200), absorbed),
                    (
                        attention.expanded_seconds(queries, &Gpu::H200),
                        expanded + 2.5,
                    ),
                ] {
                    let ratio = seconds * 1e6 / measured;
                    assert!(
                        (0.9..1.1).contains(&ratio),
                        "{heads} {context} {queries}: {ratio}"
                    );
                }
            }
        }
    }

    #[test]
    fn few_heads_and_short_contexts_are_expanded_sooner() {
        let at = |heads, context| r1(heads, context).crossover(&H200);
        // More heads let more tokens be absorbed: the expanded form has fewer launches.
        assert!(at(8, 8192) < at(16, 8192));
        assert!(at(16, 8192) < at(128, 8192));
        let packed = Attention {
            packed_keys: true,
            ..r1(16, 8192)
        };
        assert!(packed.crossover(&H200) > at(16, 8192));
        // Launches cost both forms time, but the absorbed form has more of them.
        let slow = Gpu {
            launch_seconds: 20e-6,
            ..Gpu::H200
        };
        assert!(r1(16, 8192).crossover(&Machine(Figures::Gpu(slow))) < at(16, 8192));
        // There is no context to expand.
        assert!(r1(16, 0).threshold(&H200) >= 1);
        let long = Attention {
            context_len: None,
            ..r1(16, 0)
        };
        assert_eq!(long.threshold(&H200), r1(16, LONG as u32).threshold(&H200));
    }

    #[test]
    fn wide_heads_are_always_absorbed() {
        // Here d = 2L: pairs cost the same in both forms, and the expansion is an extra cost.
        let wide = MlaDims::new(64, HeadDims::new(64, 64, 64));
        assert_eq!(arithmetic(wide, None), f64::INFINITY);
        assert!(arithmetic(wide, Some(1000)).is_finite());
        let wide = of_dims(wide, 16, None);
        assert_eq!(wide.threshold(&Machine::ARITHMETIC), u32::MAX);
        assert_eq!(r1(16, 1).threshold(&Machine::ARITHMETIC), 1);
    }

    fn on_processor(figures: [f64; 3], heads: u32, context: u32) -> f64 {
        let [product, absorbed, expanded] = figures;
        let machine = Machine::processor(product, absorbed, expanded).unwrap();
        r1(heads, context).crossover(&machine)
    }

    #[test]
    fn a_processor_is_held_to_what_each_kind_of_its_products_takes() {
        // Equal times nearly give the crossover of multiply-adds alone. That model leaves out the
        // new tokens' own rows and pairs.
        let alike = on_processor([1e-11; 3], 16, 8192);
        let ratio = alike / arithmetic(MlaDims::R1, Some(8192));
        assert!((0.97..1.03).contains(&ratio), "{alike}");
        // The absorbed form pays for more tokens if products are slow, because the expansion has
        // most of them, or if pairs of expanded rows are slow.
        assert!(on_processor([2e-11, 1e-11, 1e-11], 16, 8192) > 1.8 * alike);
        assert!(on_processor([1e-11, 1e-11, 2e-11], 16, 8192) > 1.5 * alike);
        assert!(on_processor([1e-11, 2e-11, 1e-11], 16, 8192) < alike / 2.0);
        // The absorbed form is always faster if a pair costs no more in it.
        assert_eq!(on_processor([1e-11, 1e-11, 4e-11], 16, 8192), f64::INFINITY);
        let error = Machine::processor(f64::NAN, 1e-11, 1e-11).unwrap_err();
        assert_eq!(
            error.to_string(),
            "product_seconds: given NaN, accepted a finite number above 0"
        );
    }

    #[test]
    fn the_crossover_of_a_processor_is_predicted_from_short_context() {
        // Measured on one core of an AMD EPYC, in processor time. First come the heads; then
        // GFLOP/s of products, absorbed pairs and expanded pairs, from 16 and 256 new tokens on
        // 1024 cached ones. The last number is that of new tokens at which both forms took the same
        // time with 4096 tokens in all (docs/log/layer.md).
        for (heads, gflop, measured) in [
            (8, [51.2, 219.0, 195.6], 765.0),
            (4, [43.5, 94.9, 100.2], 335.0),
        ] {
            let predicted = on_processor(gflop.map(|rate| 2e-9 / rate), heads, 4096 - 550);
            let ratio = predicted / measured;
            assert!((0.8..1.2).contains(&ratio), "{heads}: {predicted}");
        }
    }

    #[test]
    fn gpus_have_positive_figures() {
        assert_eq!(Machine::gpu(132, 795e12, 4.2e12).unwrap(), H200);
        assert_eq!(H200.multiprocessors(), Some(132));
        for (multiprocessors, flop, bytes) in [
            (0, 1.0, 1.0),
            (1, 0.0, 1.0),
            (1, 1.0, -1.0),
            (1, f64::NAN, 1.0),
            (1, 1.0, f64::INFINITY),
        ] {
            assert!(
                Machine::gpu(multiprocessors, flop, bytes).is_err(),
                "{flop} {bytes}"
            );
        }
        assert_eq!(
            Machine::gpu(1, 1e12, 0.0).unwrap_err().to_string(),
            "bytes_per_second: given 0, accepted a finite number above 0"
        );
    }

    #[test]
    fn known_costs() {
        let bf16 = r1(16, 100);
        let packed = Attention {
            packed_keys: true,
            ..bf16
        };
        assert_eq!(packed.expansion_bytes(), 896.0);
        assert_eq!(bf16.expansion_bytes(), 512.0);
        // Senseless values as large as the types allow cause no overflow.
        let huge = HeadDims::new(u32::MAX, u32::MAX, u32::MAX);
        let huge = of_dims(MlaDims::new(u32::MAX, huge), u32::MAX, Some(u32::MAX));
        assert!(huge.threshold(&H200) >= 1);
    }

    proptest! {
        /// The formula agrees with a comparison of the two costs.
        #[test]
        fn the_crossover_is_where_the_costs_cross(
            (latent, nope, rope, v) in (1u32..1024, 1u32..512, 0u32..128, 1u32..512),
            (heads, queries, context) in (1u32..200, 1u32..2000, 1u32..100_000),
        ) {
            let dims = MlaDims::new(latent, HeadDims::new(nope, rope, v));
            let crossover = arithmetic(dims, Some(context));
            let absorbed = absorbed_cost(dims, [heads, queries, context]);
            let expanded = expanded_cost(dims, [heads, queries, context]);
            // Either answer is right if the costs differ only by rounding.
            prop_assume!(absorbed.abs_diff(expanded) as f64 > 1e-9 * expanded as f64);
            prop_assert_eq!(f64::from(queries) < crossover, absorbed < expanded);
        }

        /// On a GPU, a query of the threshold's length is faster absorbed, and no longer query is.
        #[test]
        fn the_threshold_is_the_last_query_length_that_absorbs(
            heads in 1u32..=128,
            context in 64u32..100_000,
            packed_keys: bool,
        ) {
            let attention = Attention {
                packed_keys,
                ..r1(heads, context)
            };
            let last = attention.threshold(&H200);
            let absorbed = attention.absorbs(last, &Gpu::H200);
            prop_assert!(last == 1 || last == u32::MAX || absorbed);
            let mut later = last.saturating_add(1)..last.saturating_add(300);
            prop_assert!(later.all(|queries| !attention.absorbs(queries, &Gpu::H200)));
        }
    }
}
