//! An exact memory plan of the layer, and the largest plan for a number of bytes.
//!
//! [`plan`] lists every buffer of device memory that an engine sets aside. The cache has one part
//! for each layer. All other buffers are shared by all layers, because layers run one after
//! another. H is the number of heads, W the row budget, and N the number of ranks. T_a and T_e are
//! the maximum numbers of query tokens of a step on the absorbed and on the expanded path. New
//! tokens are expanded into the same buffers as chunks, so these buffers have E = max(W, T_e) rows.
//! T is the maximum number of query tokens of a step whose rows are out of order.
//!
//! | region | shape | contents | present if |
//! |---|---|---|---|
//! | `kv_cache` | `[layers, pages, page, row bytes]` | the cache rows; only latents in a split cache | |
//! | `rope_cache` | `[layers, pages, page, rope bytes]` | rotary keys | a split cache |
//! | `index_cache` | `[index layers, pages, page, D+4]`, less with pools | index keys | an indexer |
//! | `absorbed_queries` | `[T_a, H, L+R]` | `q_nope · W_UK`, followed by the rotary part | |
//! | `absorbed_outputs` | `[T_a, H, L]` | the result of the absorbed attention | |
//! | `absorbed_lse` | `[H, T_a]` f32 | the log-sum-exp by which results of ranks are merged | N > 1 |
//! | `context_latent` | [W, L] | a chunk's gathered latents | |
//! | `context_rope` | [W, R] | a chunk's gathered rotary keys | |
//! | `expanded_kv` | [E, H, P+V] | rows · `W_kv_b` | keys are not packed |
//! | `expanded_keys` | [E, H, P+R] | each head's key, with its rotary part | keys are packed |
//! | `expanded_values` | [E, H, V] | values | keys are packed |
//! | `partial_outputs` | [T_e, H, V] | the latest partial result | W > 0 |
//! | `partial_lse` | [H, T_e] f32 | the log-sum-exp of that result | W > 0 |
//! | `expanded_lse` | [H, T_e] f32 | the log-sum-exp of the results so far, which are in the output itself | |
//! | `packed_query` | `[T, H, P+R]` | the queries of a call, in the order of the step | rows out of order |
//! | `packed_latent` | [T, L] | the new tokens' latents | rows out of order |
//! | `packed_rope` | [T, R] | the new tokens' rotary keys | rows out of order |
//! | `packed_outputs` | [T, H, V] | the outputs, before they are copied back | rows out of order |
//! | `packed_lse` | [H, T] f32 | the log-sum-exp, before it is copied back | rows out of order |
//! | `index_projection` | [rows, index heads, D] | projected index queries | an indexer |
//! | `index_queries` | [rows, index heads, D] e4m3 | quantised index queries | an indexer |
//! | `index_head_weights` | [rows, index heads] f32 | weights of index heads, times the scales of the queries | an indexer |
//! | `index_logits` | [rows, columns] f32 | the scores of `rows` query tokens at a time | an indexer |
//! | `slot_lists` | [tokens, width of lists] i32 | the slots that each query token attends to | an indexer |
//! | `step_arrays` | `[bytes]` | a step's lengths, slots and block table | |
//! | `decode_workspace` | `[bytes]` | memory of the decode backend | |
//! | `prefill_workspace` | `[bytes]` | memory of the prefill backend | |
//!
//! A region with a factor of zero is left out. The plan does not contain the weights, which the
//! layer never copies, or the engine's own tensors (queries, new rows, outputs).
//!
//! [`max_rows`] and [`max_pages`] answer the reverse question: the largest number that fits into a
//! number of bytes.
//!
//! ```
//! use mla_runtime::model::ModelConfig;
//! use mla_runtime::plan::memory::{self, MemoryNeeds};
//! use mla_runtime::spec::Problem;
//!
//! let model = ModelConfig::preset("deepseek-r1")?;
//! let dtype = model.dtype.expect("the preset names one");
//! let problem = Problem::new(model.dims, model.heads_per_rank(8)?, dtype);
//! let needs = MemoryNeeds::of(&problem)?
//!     .with_layers(61)
//!     .with_pages(4096)
//!     .with_absorbed_tokens(256)
//!     .with_expanded_tokens(8192);
//! // How many rows may a chunk have on a card with 24 GiB to spare?
//! let rows = memory::max_rows(&needs, 24 << 30)?;
//! let plan = memory::plan(&needs.with_rows(rows))?;
//! assert!(plan.total_bytes <= 24 << 30);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::ops::Range;

use serde::Serialize;

use super::index::IndexNeeds;
use super::limits::{ArrayLayout, StepLimits};
use super::parallel::ContextParallel;
use crate::model::{IndexerConfig, MlaDims};
use crate::setters::setters;
use crate::spec::Problem;
use crate::{Error, Result};

/// Bytes of an f32, in which every log-sum-exp is kept.
const LSE_BYTES: u32 = 4;

/// The maximum number of pages in a cache: block tables hold signed 32-bit integers.
pub const MAX_PAGES: u64 = i32::MAX as u64;

/// The needs that a memory plan is made for.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct MemoryNeeds {
    /// L and (P, R, V).
    pub dims: MlaDims,
    /// H: the number of heads that this device computes. It is the model's number, divided by the
    /// number of tensor-parallel ranks. Under context parallelism each rank attends for all heads,
    /// so the result is multiplied by the number of these ranks.
    pub heads: u32,
    /// Bytes of an element of queries, keys, values and outputs.
    pub element_bytes: u32,
    /// Bytes of a cache row. In a split cache, bytes of a latent.
    pub row_bytes: u32,
    /// Bytes of a rotary key in a split cache; 0 if it is part of the row.
    pub rope_bytes: u32,
    /// Tokens of a cache page.
    pub page_size: u32,
    /// The number of cache pages on this device, for each layer.
    pub pages: u64,
    /// The number of layers that have a cache.
    pub layers: u32,
    /// T_a: the maximum number of query tokens of a step on the absorbed path.
    pub absorbed_tokens: u32,
    /// T_e: the maximum number of query tokens of a step on the expanded path.
    pub expanded_tokens: u32,
    /// W: the row budget of context chunks; 0 if context is never expanded.
    pub rows: u32,
    /// T of the packed regions: the maximum number of query tokens of a step whose rows are out of
    /// order.
    pub packed_tokens: u32,
    /// The distribution of the cache over ranks.
    pub parallel: ContextParallel,
    /// True if the prefill backend takes each head's key packed, with the rotary part beside the
    /// other part.
    pub packed_keys: bool,
    /// Bytes of a step's lengths, slots and block table.
    pub step_bytes: u64,
    /// Bytes of the decode backend's workspace, as the backend's workspace query returns them.
    pub decode_workspace: u64,
    /// Bytes of the prefill backend's workspace, as the backend's workspace query returns them.
    pub prefill_workspace: u64,
    /// The needs of the indexers of sparse attention, if the engine uses them.
    pub(crate) indexer: Option<IndexNeeds>,
    /// The alignment of regions, a power of two. Each region starts at a multiple of it.
    pub alignment: u64,
}

impl MemoryNeeds {
    setters! {
        with_heads(heads: u32);
        with_pages(pages: u64);
        with_layers(layers: u32);
        with_absorbed_tokens(absorbed_tokens: u32);
        with_expanded_tokens(expanded_tokens: u32);
        with_rows(rows: u32);
        with_packed_tokens(packed_tokens: u32);
        with_parallel(parallel: ContextParallel);
        with_packed_keys(packed_keys: bool);
        with_step_bytes(step_bytes: u64);
        with_decode_workspace(decode_workspace: u64);
        with_prefill_workspace(prefill_workspace: u64);
        with_alignment(alignment: u64);
    }

    /// The same needs, plus `layers` indexers of these extents on the layers' pages, for steps
    /// within `limits`. See [`ModelConfig::indexers`](crate::model::ModelConfig::indexers).
    ///
    /// # Errors
    ///
    /// If a limit is out of range, or a page does not hold whole pools.
    pub fn with_indexer(
        self,
        config: &IndexerConfig,
        limits: &StepLimits,
        layers: u32,
    ) -> Result<Self> {
        if !(self.page_size as usize).is_multiple_of(config.tokens_per_key()) {
            let accepted = format!("a multiple of index_kpool, {}", config.pool);
            return Err(Error::argument("page_size", self.page_size, accepted));
        }
        let needs = IndexNeeds::of(config, limits, self.page_size)?;
        Ok(Self {
            indexer: Some(IndexNeeds { layers, ..needs }),
            ..self
        })
    }

    /// The needs of one layer of a problem, with an empty cache and steps without tokens. Regions
    /// start at multiples of 256 bytes, as CUDA allocates. The methods `with_…` complete these
    /// needs.
    ///
    /// # Errors
    ///
    /// If the cache format cannot hold rows of these dimensions.
    pub fn of(problem: &Problem) -> Result<Self> {
        let Problem {
            dims,
            heads,
            dtype,
            kv_format,
            page_size,
            ..
        } = *problem;
        if !kv_format.holds(dims) {
            return Err(Error::argument(
                "kv_lora_rank",
                dims.latent,
                format!(
                    "a multiple of {} for rows of {kv_format}",
                    kv_format.latent_multiple()
                ),
            ));
        }
        let (row_bytes, rope_bytes) = match problem.has_split_cache() {
            true => (kv_format.latent_bytes(dims), kv_format.rope_bytes(dims)),
            false => (kv_format.pitch(dims), 0),
        };
        let counted = |bytes: usize| {
            u32::try_from(bytes).map_err(|_| Error::Overflow {
                quantity: "the bytes of a cache row",
                limit: u32::MAX.into(),
            })
        };
        Ok(Self {
            dims,
            heads,
            // At most a dozen bytes, so it fits.
            element_bytes: dtype.bytes() as u32,
            row_bytes: counted(row_bytes)?,
            rope_bytes: counted(rope_bytes)?,
            page_size,
            pages: 0,
            layers: 1,
            absorbed_tokens: 0,
            expanded_tokens: 0,
            rows: 0,
            packed_tokens: 0,
            parallel: ContextParallel::SINGLE,
            packed_keys: false,
            step_bytes: 0,
            decode_workspace: 0,
            prefill_workspace: 0,
            indexer: None,
            alignment: 256,
        })
    }

    /// The needs of one layer of a problem with an empty cache, for steps within `limits`. The
    /// methods `with_…` add facts about the backends (packed keys and workspaces) and, for a sparse
    /// problem, the needs of the indexers.
    ///
    /// # Errors
    ///
    /// If the problem has a [fault](Problem::fault), if a limit is out of range, or for the reasons
    /// of [`of`](Self::of).
    pub fn of_steps(problem: &Problem, limits: &StepLimits) -> Result<Self> {
        if let Some(fault) = problem.fault() {
            return Err(fault.into());
        }
        let arrays = ArrayLayout::new(limits, problem)?;
        let absorbed = match problem.sparse {
            true => limits.tokens,
            false => limits
                .tokens
                .min(limits.requests.saturating_mul(limits.decode_query_len)),
        };
        // In a sparse problem only dense requests have an expanded form, and only if there are rows
        // for context.
        let none = problem.sparse && limits.context_rows == 0;
        let expanded = |count: usize| if none { 0 } else { count };
        // The array layout has refused limits of more than 31 bits.
        let count = |count: usize| count as u32;
        Ok(Self {
            absorbed_tokens: count(absorbed),
            expanded_tokens: count(expanded(limits.tokens)),
            rows: count(expanded(limits.context_rows)),
            packed_tokens: match limits.call_rows {
                0 => 0,
                _ => count(limits.tokens),
            },
            step_bytes: arrays.bytes() as u64,
            ..Self::of(problem)?
        })
    }
}

/// The allocation that contains a region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Allocation {
    /// The cache, which lives as long as the engine's requests.
    Cache,
    /// The workspace, whose contents last for one layer of one step.
    Workspace,
    /// Copies of a call's tensors in the order of the step, if the call's own rows are out of
    /// order.
    Packed,
    /// The indexers' workspace, and the slot lists of a step.
    Indexer,
    /// Arrays that are prepared for a step and read by every layer.
    Step,
    /// Memory that the backends allocate for themselves.
    Backends,
}

/// Declares the regions: the name of each, its allocation, its shape, and the bytes of an element.
/// The first block computes the extents.
macro_rules! regions {
    (
        |$needs:ident| { $($extents:tt)* }
        $($name:ident $text:literal in $allocation:ident: $shape:expr, $bytes:expr;)*
    ) => {
        /// The name of a region, as in the [module's](self) table.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
        pub(crate) enum RegionName {
            $(
                #[serde(rename = $text)]
                $name,
            )*
        }

        impl RegionName {
            /// The name in the table and in JSON.
            const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            const fn allocation(self) -> Allocation {
                match self {
                    $(Self::$name => Allocation::$allocation,)*
                }
            }

            /// Every region with its shape and the bytes of an element.
            fn all($needs: &MemoryNeeds) -> Vec<(Self, Vec<u64>, u32)> {
                $($extents)*
                vec![$((Self::$name, $shape.to_vec(), $bytes)),*]
            }
        }
    };
}

regions! {
    |needs| {
        let MlaDims { latent, head } = needs.dims;
        // Sums of 32-bit widths do not overflow 64 bits.
        let [latent, nope, rope, v, heads] =
            [latent, head.nope, head.rope, head.v, needs.heads].map(u64::from);
        let [layers, page, row, rope_row] =
            [needs.layers, needs.page_size, needs.row_bytes, needs.rope_bytes].map(u64::from);
        let [absorbed, new, rows, packed] =
            [needs.absorbed_tokens, needs.expanded_tokens, needs.rows, needs.packed_tokens]
                .map(u64::from);
        let (pages, bytes, expanded) = (needs.pages, needs.element_bytes, rows.max(new));
        // A region with an extent of 0 is left out.
        let if_needed = |needed: bool, extent: u64| if needed { extent } else { 0 };
        let ranked = if_needed(needs.parallel.world() > 1, absorbed);
        let partial = if_needed(rows > 0, new);
        let (apart, together) =
            (if_needed(needs.packed_keys, expanded), if_needed(!needs.packed_keys, expanded));
        let (index, [scored, columns, listed, index_heads, width, list]) = match &needs.indexer {
            Some(index) => (index_cache(needs, index), index.extents().map(u64::from)),
            None => (vec![0], [0; 6]),
        };
    }
    KvCache "kv_cache" in Cache: [layers, pages, page, row], 1;
    RopeCache "rope_cache" in Cache: [layers, pages, page, rope_row], 1;
    IndexCache "index_cache" in Cache: index, 1;
    // The rows always have room for the rotary part, because a cache write with rotation puts it
    // there, whatever the backend takes.
    AbsorbedQueries "absorbed_queries" in Workspace: [absorbed, heads, latent + rope], bytes;
    AbsorbedOutputs "absorbed_outputs" in Workspace: [absorbed, heads, latent], bytes;
    AbsorbedLse "absorbed_lse" in Workspace: [heads, ranked], LSE_BYTES;
    ContextLatent "context_latent" in Workspace: [rows, latent], bytes;
    ContextRope "context_rope" in Workspace: [rows, rope], bytes;
    ExpandedKv "expanded_kv" in Workspace: [together, heads, nope + v], bytes;
    ExpandedKeys "expanded_keys" in Workspace: [apart, heads, nope + rope], bytes;
    ExpandedValues "expanded_values" in Workspace: [apart, heads, v], bytes;
    PartialOutputs "partial_outputs" in Workspace: [partial, heads, v], bytes;
    PartialLse "partial_lse" in Workspace: [heads, partial], LSE_BYTES;
    // Without context there is nothing to merge. A call may still have sinks, which need the
    // log-sum-exp.
    ExpandedLse "expanded_lse" in Workspace: [heads, new], LSE_BYTES;
    PackedQuery "packed_query" in Packed: [packed, heads, nope + rope], bytes;
    PackedLatent "packed_latent" in Packed: [packed, latent], bytes;
    PackedRope "packed_rope" in Packed: [packed, rope], bytes;
    PackedOutputs "packed_outputs" in Packed: [packed, heads, v], bytes;
    PackedLse "packed_lse" in Packed: [heads, packed], LSE_BYTES;
    IndexProjection "index_projection" in Indexer: [scored, index_heads, width], bytes;
    IndexQueries "index_queries" in Indexer: [scored, index_heads, width], 1;
    IndexHeadWeights "index_head_weights" in Indexer: [scored, index_heads], 4;
    IndexLogits "index_logits" in Indexer: [scored, columns], 4;
    SlotLists "slot_lists" in Indexer: [listed, list], 4;
    StepArrays "step_arrays" in Step: [needs.step_bytes], 1;
    DecodeWorkspace "decode_workspace" in Backends: [needs.decode_workspace], 1;
    PrefillWorkspace "prefill_workspace" in Backends: [needs.prefill_workspace], 1;
}

/// The shape of the indexers' cache.
fn index_cache(needs: &MemoryNeeds, index: &IndexNeeds) -> Vec<u64> {
    let (layers, config) = (u64::from(index.layers), &index.config);
    match config.pool {
        1 => {
            let page = u64::from(needs.page_size);
            vec![layers, needs.pages, page, config.token_bytes() as u64]
        }
        _ => {
            let bytes = config.page_bytes(needs.page_size as usize);
            vec![layers, needs.pages, bytes as u64]
        }
    }
}

/// One buffer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct Region {
    /// The name. JSON has it.
    name: RegionName,
    /// The allocation that contains the region. JSON names it.
    allocation: Allocation,
    /// The shape, outermost first.
    pub shape: Vec<u64>,
    /// Bytes of an element.
    pub element_bytes: u32,
    /// The start in its allocation; a multiple of the plan's alignment.
    pub offset: u64,
    /// The size: the number of elements times their bytes, without padding.
    pub bytes: u64,
}

/// Every buffer of the layer, and their sums.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// The alignment of region offsets. The sizes below are multiples of it as well.
    pub alignment: u64,
    /// The regions, ordered by allocation and offset.
    pub regions: Vec<Region>,
    /// The size of the cache.
    pub cache_bytes: u64,
    /// The size of the workspace.
    pub workspace_bytes: u64,
    /// The size of the copies of tensors in the order of the step.
    pub packed_bytes: u64,
    /// The size of the indexers' workspace.
    pub indexer_bytes: u64,
    /// The size of the arrays that are prepared for a step.
    pub step_bytes: u64,
    /// The size of the memory that the backends allocate.
    pub backend_bytes: u64,
    /// The sum of all sizes.
    pub total_bytes: u64,
}

impl Region {
    /// The name, as in the [module's](self) table.
    pub const fn name(&self) -> &'static str {
        self.name.as_str()
    }
}

impl MemoryPlan {
    /// The region of this name, if the plan has it.
    fn region(&self, name: RegionName) -> Option<&Region> {
        self.regions.iter().find(|region| region.name == name)
    }

    /// The byte range of a region in its allocation; empty if the plan has no such region. The
    /// range is known to fit the address space.
    pub(crate) fn range(&self, name: RegionName) -> Range<usize> {
        self.region(name).map_or(0..0, |region| {
            region.offset as usize..(region.offset + region.bytes) as usize
        })
    }
}

/// The exact memory that these needs take.
///
/// # Errors
///
/// If a dimension or size that must be positive is zero, if the alignment is no power of two, if
/// there are more than [`MAX_PAGES`] pages, or if a size exceeds 64 bits.
pub fn plan(needs: &MemoryNeeds) -> Result<MemoryPlan> {
    check(needs)?;
    let alignment = needs.alignment;
    let (mut regions, mut ends) = (Vec::new(), [0u64; 6]);
    for (name, shape, element_bytes) in RegionName::all(needs) {
        // A zero factor makes the product zero, however large the other factors are.
        if shape.contains(&0) {
            continue;
        }
        let allocation = name.allocation();
        let end = &mut ends[allocation as usize];
        let first = u64::from(element_bytes);
        let (bytes, offset, behind) = shape
            .iter()
            .try_fold(first, |bytes, &len| bytes.checked_mul(len))
            .and_then(|bytes| {
                let offset = end.checked_next_multiple_of(alignment)?;
                Some((bytes, offset, offset.checked_add(bytes)?))
            })
            .ok_or(Error::overflow(name.as_str()))?;
        *end = behind;
        regions.push(Region {
            name,
            allocation,
            shape,
            element_bytes,
            offset,
            bytes,
        });
    }
    let mut total_bytes = 0u64;
    for end in &mut ends {
        let size = end.checked_next_multiple_of(alignment);
        *end = size.ok_or(Error::overflow("the size of an allocation"))?;
        let total = total_bytes.checked_add(*end);
        total_bytes = total.ok_or(Error::overflow("the size of all allocations"))?;
    }
    let [
        cache_bytes,
        workspace_bytes,
        packed_bytes,
        indexer_bytes,
        step_bytes,
        backend_bytes,
    ] = ends;
    Ok(MemoryPlan {
        alignment,
        regions,
        cache_bytes,
        workspace_bytes,
        packed_bytes,
        indexer_bytes,
        step_bytes,
        backend_bytes,
        total_bytes,
    })
}

fn check(needs: &MemoryNeeds) -> Result<()> {
    let MlaDims { latent, head } = needs.dims;
    for (field, value) in [
        ("kv_lora_rank", latent),
        ("qk_nope_head_dim", head.nope),
        ("v_head_dim", head.v),
        ("heads", needs.heads),
        ("element_bytes", needs.element_bytes),
        ("row_bytes", needs.row_bytes),
        ("page_size", needs.page_size),
        ("layers", needs.layers),
    ] {
        if value == 0 {
            return Err(Error::argument(field, 0, "at least 1"));
        }
    }
    if !needs.alignment.is_power_of_two() {
        return Err(Error::argument(
            "alignment",
            needs.alignment,
            "a power of two",
        ));
    }
    if needs.pages > MAX_PAGES {
        let accepted = format!("at most {MAX_PAGES}");
        return Err(Error::argument("pages", needs.pages, accepted));
    }
    Ok(())
}

/// The largest row budget W with which the plan fits into `bytes`. It is a multiple of the page
/// size. The function ignores `needs.rows`.
///
/// # Errors
///
/// If not even the smallest budget fits, or for the reasons of [`plan`].
pub fn max_rows(needs: &MemoryNeeds, bytes: u64) -> Result<u32> {
    check(needs)?;
    let align = needs.page_size;
    let count = largest(
        u64::from(u32::MAX / align),
        bytes,
        format!("a context workspace of {align} rows"),
        |count| {
            // At most u32::MAX, by the limit above.
            let rows = count as u32 * align;
            plan(&MemoryNeeds { rows, ..*needs })
        },
    )?;
    Ok(count as u32 * align)
}

/// The maximum number of cache pages per layer with which the plan fits into `bytes`. Times the
/// page size, this is the maximum number of tokens. The function ignores `needs.pages`.
///
/// # Errors
///
/// If not even one page fits, or for the reasons of [`plan`].
pub fn max_pages(needs: &MemoryNeeds, bytes: u64) -> Result<u64> {
    largest(
        MAX_PAGES,
        bytes,
        "a cache of 1 page per layer".into(),
        |pages| plan(&MemoryNeeds { pages, ..*needs }),
    )
}

/// The largest number from 1 to `limit` whose plan fits into `bytes`. Plans grow with the number,
/// so bisection finds it.
fn largest(
    limit: u64,
    bytes: u64,
    smallest: String,
    plan: impl Fn(u64) -> Result<MemoryPlan>,
) -> Result<u64> {
    let needed = plan(1)?.total_bytes;
    if needed > bytes {
        return Err(Error::DoesNotFit {
            given: bytes,
            needed,
            smallest,
        });
    }
    // A plan that exceeds 64 bits exceeds `bytes` too. After the first plan, no other error is
    // possible.
    let fits = |number| plan(number).is_ok_and(|plan| plan.total_bytes <= bytes);
    let (mut low, mut high) = (1, limit);
    while low < high {
        let middle = high - (high - low) / 2;
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    Ok(low)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::{DType, HeadDims, KvFormat};
    use crate::spec::{Feature, FeatureSet};

    /// DeepSeek-V3 on one of eight devices, bf16.
    fn needs() -> MemoryNeeds {
        MemoryNeeds {
            pages: 1000,
            layers: 61,
            absorbed_tokens: 256,
            expanded_tokens: 2048,
            rows: 65536,
            ..MemoryNeeds::of(&Problem::new(MlaDims::R1, 16, DType::BF16)).unwrap()
        }
    }

    fn table(plan: &MemoryPlan) -> Vec<(&'static str, Vec<u64>, u64)> {
        plan.regions
            .iter()
            .map(|region| (region.name(), region.shape.clone(), region.bytes))
            .collect()
    }

    #[test]
    fn indexers_add_their_caches_and_their_scratch() {
        // GLM-5.2: 21 of 78 layers have an index cache. 2048 pages of 64 are 131072 tokens.
        let limits = StepLimits::new(64, 4096, 2048).with_decode_query_len(4096);
        let index = IndexNeeds::of(&IndexerConfig::GLM_5, &limits, 64).unwrap();
        // A row has 512 KiB, so 512 rows take 256 MiB.
        assert_eq!((index.rows, index.columns), (512, 131_072));
        let layers = needs().with_layers(78).with_rows(0).with_expanded_tokens(0);
        let needs = layers
            .with_indexer(&IndexerConfig::GLM_5, &limits, 21)
            .unwrap();
        let plan = plan(&needs).unwrap();
        let cache = plan.cache_bytes;
        assert_eq!(cache, 78 * 1000 * 64 * 1152 + 21 * 1000 * 8448);
        let scratch: Vec<_> = table(&plan).split_off(4);
        assert_eq!(
            scratch,
            [
                ("index_projection", vec![512, 32, 128], 4_194_304),
                ("index_queries", vec![512, 32, 128], 2_097_152),
                ("index_head_weights", vec![512, 32], 65_536),
                ("index_logits", vec![512, 131_072], 268_435_456),
                ("slot_lists", vec![4096, 2048], 33_554_432),
            ]
        );
        assert_eq!(plan.indexer_bytes, 308_346_880);
    }

    #[test]
    fn a_layer_of_one_device_needs_these_regions() {
        let plan = plan(&needs()).unwrap();
        assert_eq!(
            table(&plan),
            [
                ("kv_cache", vec![61, 1000, 64, 1152], 4_497_408_000),
                ("absorbed_queries", vec![256, 16, 576], 4_718_592),
                ("absorbed_outputs", vec![256, 16, 512], 4_194_304),
                ("context_latent", vec![65536, 512], 67_108_864),
                ("context_rope", vec![65536, 64], 8_388_608),
                ("expanded_kv", vec![65536, 16, 256], 536_870_912),
                ("partial_outputs", vec![2048, 16, 128], 8_388_608),
                ("partial_lse", vec![16, 2048], 131_072),
                ("expanded_lse", vec![16, 2048], 131_072),
            ]
        );
        assert_eq!(plan.cache_bytes, 4_497_408_000);
        assert_eq!(plan.workspace_bytes, 629_932_032);
        assert_eq!(plan.total_bytes, 5_127_340_032);
        assert_eq!(
            plan.region(RegionName::ExpandedLse).unwrap().offset,
            629_800_960
        );
        assert!(plan.region(RegionName::ExpandedKeys).is_none());
    }

    #[test]
    fn everything_a_layer_can_need() {
        let plan = plan(&MemoryNeeds {
            heads: 128,
            rows: 1000,
            parallel: ContextParallel::new(2, 64).unwrap(),
            packed_keys: true,
            step_bytes: 5000,
            decode_workspace: 100,
            prefill_workspace: 7,
            ..needs()
        })
        .unwrap();
        assert_eq!(
            table(&plan)[1..],
            [
                ("absorbed_queries", vec![256, 128, 576], 37_748_736),
                ("absorbed_outputs", vec![256, 128, 512], 33_554_432),
                ("absorbed_lse", vec![128, 256], 131_072),
                ("context_latent", vec![1000, 512], 1_024_000),
                ("context_rope", vec![1000, 64], 128_000),
                // There are more new tokens than rows of a chunk.
                ("expanded_keys", vec![2048, 128, 192], 100_663_296),
                ("expanded_values", vec![2048, 128, 128], 67_108_864),
                ("partial_outputs", vec![2048, 128, 128], 67_108_864),
                ("partial_lse", vec![128, 2048], 1_048_576),
                ("expanded_lse", vec![128, 2048], 1_048_576),
                ("step_arrays", vec![5000], 5000),
                ("decode_workspace", vec![100], 100),
                ("prefill_workspace", vec![7], 7),
            ]
        );
        assert_eq!((plan.step_bytes, plan.backend_bytes), (5120, 512));
    }

    #[test]
    fn a_problem_says_how_wide_rows_are() {
        let of = |dims, kv_format| {
            MemoryNeeds::of(&Problem {
                kv_format,
                ..Problem::new(dims, 16, DType::F32)
            })
        };
        let needs = of(MlaDims::R1, KvFormat::Fp8DsMla).unwrap();
        assert_eq!((needs.element_bytes, needs.row_bytes), (4, 656));
        // Rows of 644 bytes are padded to the pitch that kernels need.
        let needs = of(MlaDims::R1, KvFormat::Fp8PerToken).unwrap();
        assert_eq!(needs.row_bytes, 656);
        let narrow = MlaDims::new(200, HeadDims::R1);
        assert_eq!(of(narrow, KvFormat::Fp8).unwrap().row_bytes, 264);
        assert_eq!(
            of(narrow, KvFormat::Fp8DsMla).unwrap_err().to_string(),
            "kv_lora_rank: given 200, accepted a multiple of 128 for rows of fp8_ds_mla"
        );
    }

    #[test]
    fn serialises_its_regions() {
        let plan = plan(&MemoryNeeds {
            layers: 1,
            pages: 1,
            absorbed_tokens: 1,
            heads: 1,
            expanded_tokens: 0,
            rows: 0,
            ..needs()
        })
        .unwrap();
        assert_eq!(
            serde_json::to_string(&plan).unwrap(),
            concat!(
                r#"{"alignment":256,"regions":["#,
                r#"{"name":"kv_cache","allocation":"cache","shape":[1,1,64,1152],"#,
                r#""element_bytes":1,"offset":0,"bytes":73728},"#,
                r#"{"name":"absorbed_queries","allocation":"workspace","shape":[1,1,576],"#,
                r#""element_bytes":2,"offset":0,"bytes":1152},"#,
                r#"{"name":"absorbed_outputs","allocation":"workspace","shape":[1,1,512],"#,
                r#""element_bytes":2,"offset":1280,"bytes":1024}],"#,
                r#""cache_bytes":73728,"workspace_bytes":2304,"#,
                r#""packed_bytes":0,"indexer_bytes":0,"step_bytes":0,"backend_bytes":0,"#,
                r#""total_bytes":76032}"#
            )
        );
    }

    #[test]
    fn what_fits_is_known() {
        // The bytes of the plan above, and one byte less.
        assert_eq!(max_rows(&needs(), 5_127_340_032), Ok(65536));
        assert_eq!(max_rows(&needs(), 5_127_340_031), Ok(65536 - 64));
        assert_eq!(max_pages(&needs(), 5_127_340_032), Ok(1000));
        assert_eq!(max_pages(&needs(), 5_127_340_031), Ok(999));
        assert_eq!(max_pages(&needs(), u64::MAX), Ok(MAX_PAGES));
        assert_eq!(max_rows(&needs(), u64::MAX), Ok(u32::MAX - 63));
        // Below the number of new tokens, a chunk's row costs only the buffers for its gather.
        assert_eq!(
            max_rows(&needs(), 1000).unwrap_err().to_string(),
            "bytes: given 1000, accepted at least 4531822592, for a context workspace of 64 \
             rows"
        );
        assert_eq!(
            max_pages(&needs(), 1000).unwrap_err().to_string(),
            "bytes: given 1000, accepted at least 634429440, for a cache of 1 page per \
             layer"
        );
    }

    #[test]
    fn refusals() {
        let message = |needs: MemoryNeeds| plan(&needs).unwrap_err().to_string();
        let base = needs();
        assert_eq!(
            message(MemoryNeeds { heads: 0, ..base }),
            "heads: given 0, accepted at least 1"
        );
        assert_eq!(
            message(MemoryNeeds {
                alignment: 48,
                ..base
            }),
            "alignment: given 48, accepted a power of two"
        );
        assert_eq!(
            message(MemoryNeeds {
                pages: 1 << 31,
                ..base
            }),
            "pages: given 2147483648, accepted at most 2147483647"
        );
        let huge = MemoryNeeds {
            heads: u32::MAX,
            rows: u32::MAX,
            ..base
        };
        assert_eq!(
            message(huge),
            "expanded_kv: given more than fits, accepted at most 18446744073709551615"
        );
    }

    #[test]
    fn a_split_cache_has_a_region_for_each_tensor() {
        let one_row = Problem::new(MlaDims::R1, 16, DType::BF16);
        let split = one_row.with_features(FeatureSet::of(&[Feature::SplitCache]));
        let of = |problem| {
            let needs = MemoryNeeds::of(&problem)
                .unwrap()
                .with_pages(3)
                .with_layers(2);
            let plan = plan(&needs).unwrap();
            let regions = plan
                .regions
                .iter()
                .map(|region| (region.name(), region.bytes));
            (regions.take(2).collect::<Vec<_>>(), plan.cache_bytes)
        };
        let rows = 2 * 3 * 64;
        assert_eq!(of(one_row), (vec![("kv_cache", rows * 1152)], rows * 1152));
        let parts = vec![("kv_cache", rows * 1024), ("rope_cache", rows * 128)];
        assert_eq!(of(split), (parts, rows * 1152));
    }

    fn any_needs() -> impl Strategy<Value = MemoryNeeds> {
        let dims = (1u32..600, 1u32..300, 0u32..100, 1u32..300)
            .prop_map(|(l, p, r, v)| MlaDims::new(l, HeadDims::new(p, r, v)));
        let step = (0u32..300, 0u32..3000, 0u32..5000, 0u64..100_000);
        let parallel = (1u32..5, 1u32..70).prop_map(|(n, i)| ContextParallel::new(n, i).unwrap());
        let cache = (1u32..2000, 1u32..130, 0u64..5000, 1u32..62);
        let flags: (_, _) = (any::<bool>(), any::<bool>());
        let backends = (0u64..100_000, 0u64..100_000, 0u32..13);
        (dims, 1u32..130, step, parallel, cache, flags, backends).prop_map(
            |(dims, heads, step, parallel, cache, flags, backends)| MemoryNeeds {
                dims,
                heads,
                element_bytes: 2,
                row_bytes: cache.0,
                rope_bytes: u32::from(flags.0) * (step.0 % 130),
                page_size: cache.1,
                pages: cache.2,
                layers: cache.3,
                absorbed_tokens: step.0,
                expanded_tokens: step.1,
                rows: step.2,
                packed_tokens: step.0 * backends.2,
                parallel,
                packed_keys: flags.0,
                step_bytes: step.3,
                decode_workspace: backends.0,
                prefill_workspace: backends.1,
                indexer: flags.1.then_some(IndexNeeds {
                    config: IndexerConfig::GLM_5,
                    layers: cache.3,
                    tokens: step.0,
                    rows: step.0 / 2,
                    columns: step.1,
                }),
                alignment: 1 << backends.2,
            },
        )
    }

    proptest! {
        /// Regions have the sizes of their shapes, are aligned, and do not overlap.
        #[test]
        fn regions_lie_apart(needs in any_needs()) {
            let plan = plan(&needs).unwrap();
            for (allocation, total) in [
                (Allocation::Cache, plan.cache_bytes),
                (Allocation::Workspace, plan.workspace_bytes),
                (Allocation::Packed, plan.packed_bytes),
                (Allocation::Indexer, plan.indexer_bytes),
                (Allocation::Step, plan.step_bytes),
                (Allocation::Backends, plan.backend_bytes),
            ] {
                let mut end = 0;
                for region in plan.regions.iter().filter(|r| r.allocation == allocation) {
                    let elements: u64 = region.shape.iter().product();
                    prop_assert_eq!(region.bytes, elements * u64::from(region.element_bytes));
                    prop_assert!(region.bytes > 0);
                    prop_assert_eq!(region.offset % needs.alignment, 0);
                    prop_assert!(region.offset >= end);
                    prop_assert!(region.offset - end < needs.alignment);
                    end = region.offset + region.bytes;
                }
                prop_assert_eq!(total, end.next_multiple_of(needs.alignment));
            }
            prop_assert_eq!(
                plan.total_bytes,
                plan.cache_bytes
                    + plan.workspace_bytes
                    + plan.packed_bytes
                    + plan.indexer_bytes
                    + plan.step_bytes
                    + plan.backend_bytes
            );
        }

        /// The result fits, and the next larger number does not.
        #[test]
        fn the_inverse_is_maximal(needs in any_needs(), spare in 0u64..1 << 34) {
            let align = needs.page_size;
            let total = |needs: &MemoryNeeds| plan(needs).unwrap().total_bytes;

            let with_rows = |rows| MemoryNeeds { rows, ..needs };
            let bytes = total(&with_rows(align)) + spare;
            let rows = max_rows(&needs, bytes).unwrap();
            prop_assert_eq!(rows % align, 0);
            prop_assert!(total(&with_rows(rows)) <= bytes);
            prop_assert!(total(&with_rows(rows + align)) > bytes);

            let with_pages = |pages| MemoryNeeds { pages, ..needs };
            let bytes = total(&with_pages(1)) + spare;
            let pages = max_pages(&needs, bytes).unwrap();
            prop_assert!(total(&with_pages(pages)) <= bytes);
            if pages < MAX_PAGES {
                prop_assert!(total(&with_pages(pages + 1)) > bytes);
            }
        }
    }
}
