//! Checks of calls that apply to every backend.

use super::{DecodeBatch, DecodeCall, Keys, LayerConfig, Output, PrefillCall, Query};
use crate::device::Device;
use crate::spec::{BackendSpec, Feature, Problem};
use crate::tensor::{
    ArrayRef, CacheLayout, CacheRef, CacheStrides, Layout, TensorRef, check_alignment,
};
use crate::{Error, Result, check_len, named};

/// The requirements that the tensors of a call have in common.
#[derive(Clone, Copy)]
struct Rule<'a> {
    problem: &'a Problem,
    spec: &'a BackendSpec,
}

impl Rule<'_> {
    fn tensor<D: Device>(
        &self,
        field: &'static str,
        tensor: &TensorRef<'_, D>,
        shape: [usize; 3],
    ) -> Result<()> {
        tensor.layout().require(field, self.problem.dtype, shape)?;
        tensor.require_aligned(field, self.spec.alignment as usize)
    }

    fn output<D: Device>(&self, out: &Output<'_, D>, shape: [usize; 3]) -> Result<()> {
        match out {
            Output::Plain(out) => {
                self.tensor("out", &out.as_ref(), shape)?;
                check_gaps(out.layout(), self.spec)
            }
            Output::Fp8 { .. } if self.spec.quant_output => Ok(()),
            Output::Fp8 { .. } => Err(Error::argument("out", "e4m3", self.problem.dtype)),
        }
    }
}

/// Refuses an output whose rows have gaps, unless the backend supports strided outputs.
pub(crate) fn check_gaps(out: &Layout, spec: &BackendSpec) -> Result<()> {
    let without = Layout::contiguous(out.dtype, out.shape);
    if *out == without || spec.features.contains(Feature::StridedOutputs) {
        return Ok(());
    }
    Err(Error::argument("out", out, without))
}

/// Refuses a cache of another layout than the problem's. Also refuses a split cache for a backend
/// that reads only a cache of one tensor.
pub(crate) fn check_cache(
    layout: &CacheLayout,
    problem: &Problem,
    spec: &BackendSpec,
) -> Result<()> {
    if layout.is_split() && !spec.features.contains(Feature::SplitCache) {
        let accepted = format!("one tensor: {} has no split_cache", spec.name);
        return Err(Error::argument("cache", "two tensors", accepted));
    }
    let row = (layout.dims.latent, layout.dims.head.rope);
    let own = (problem.dims.latent, problem.dims.head.rope);
    if row == own
        && layout.format == problem.kv_format
        && layout.page_size == problem.page_size as usize
        && layout.is_split() == problem.has_split_cache()
    {
        return Ok(());
    }
    let tensors = |split| if split { ", split" } else { "" };
    Err(Error::argument(
        "cache",
        format!(
            "{} rows of {row:?} in pages of {}{}",
            layout.format,
            layout.page_size,
            tensors(layout.is_split())
        ),
        format!(
            "{} rows of {own:?} in pages of {}{}",
            problem.kv_format,
            problem.page_size,
            tensors(problem.has_split_cache())
        ),
    ))
}

/// Refuses a cache whose rows do not begin at multiples of `alignment` bytes. In a split cache this
/// applies to both tensors.
pub(crate) fn check_rows<D: Device>(cache: &CacheRef<'_, D>, alignment: u32) -> Result<()> {
    let alignment = alignment as usize;
    named("cache", check_alignment::<D>(cache.bytes(), alignment))?;
    let layout = cache.layout();
    if layout.is_split() {
        let rope = check_alignment::<D>(cache.rope_bytes(), alignment);
        named("cache (rope)", rope)?;
    }
    let are_aligned = |strides: CacheStrides| {
        let apart = [
            (layout.pages, strides.page_stride),
            (layout.page_size, strides.row_stride),
        ];
        apart
            .iter()
            .all(|(count, stride)| *count < 2 || stride.is_multiple_of(alignment))
    };
    if are_aligned(layout.strides()) && are_aligned(layout.rope_strides()) {
        return Ok(());
    }
    let accepted = format!("strides of multiples of {alignment} bytes");
    Err(Error::argument("cache", layout, accepted))
}

/// Refuses lists of slots if the problem is not sparse, and their absence if it is. Lists must be
/// for `tokens` tokens, or for `all` tokens if some attend to no list. With lists of another width,
/// a backend would read the entries of other tokens.
pub(crate) fn check_lists<D: Device>(
    field: &'static str,
    lists: Option<&super::SlotLists<'_, D>>,
    [tokens, all]: [usize; 2],
    problem: &Problem,
) -> Result<()> {
    let is_of = |entries: usize, width: usize| {
        [tokens, all]
            .map(|tokens| width.checked_mul(tokens))
            .contains(&Some(entries))
    };
    let (given, accepted) = match (lists, problem.sparse) {
        (Some(lists), true) => {
            let second = lists.second.as_ref();
            let second = second.map(|(_, slots, width)| ("second cache", slots, *width));
            for (field, slots, width) in [Some((field, &lists.slots, lists.width)), second]
                .into_iter()
                .flatten()
            {
                if !is_of(slots.len(), width) {
                    let given = format!("{} entries", slots.len());
                    let accepted = format!("{width} for each of {tokens} tokens");
                    return Err(Error::argument(field, given, accepted));
                }
            }
            return match &lists.counts {
                Some(counts) if !is_of(counts.len(), 1) => {
                    let accepted = format!("{tokens}, one for each token");
                    Err(Error::argument("counts", counts.len(), accepted))
                }
                _ => Ok(()),
            };
        }
        (None, false) => return Ok(()),
        (Some(_), false) => ("present", "absent, as the problem is not sparse"),
        (None, true) => ("absent", "present, as the problem is sparse"),
    };
    Err(Error::argument(field, given, accepted))
}

/// Refuses sinks if the backend does not support them, and sinks for another number of heads.
pub(crate) fn check_sinks<D: Device>(
    sinks: Option<&ArrayRef<'_, D, f32>>,
    heads: usize,
    spec: &BackendSpec,
) -> Result<()> {
    let Some(sinks) = sinks else {
        return Ok(());
    };
    if !spec.features.contains(Feature::Sinks) {
        let accepted = format!("absent: {} has no sinks", spec.name);
        return Err(Error::argument("sinks", "present", accepted));
    }
    check_len("sinks", sinks.len(), heads, "one for each head")
}

/// Refuses scale factors of query tokens if the problem has none, and their absence if it has them.
/// Also refuses factors for another number of tokens.
fn check_query_scales<D: Device>(
    scales: Option<&ArrayRef<'_, D, f32>>,
    tokens: usize,
    problem: &Problem,
) -> Result<()> {
    let (given, accepted) = match (scales, problem.features.contains(Feature::QueryScales)) {
        (Some(scales), true) => {
            return check_len(
                "query_scales",
                scales.len(),
                tokens,
                "one for each query token",
            );
        }
        (None, false) => return Ok(()),
        (Some(_), false) => ("present", "absent, as the problem has no query_scales"),
        (None, true) => ("absent", "present, as the problem has query_scales"),
    };
    Err(Error::argument("query_scales", given, accepted))
}

/// Refuses a call that is not causal if the backend supports only causal ones.
pub(crate) fn check_causal(causal: bool, spec: &BackendSpec) -> Result<()> {
    if causal || spec.features.contains(Feature::NonCausal) {
        return Ok(());
    }
    let accepted = format!("true: {} has no non_causal", spec.name);
    Err(Error::argument("causal", false, accepted))
}

impl<'a, D: Device> Query<'a, D> {
    /// The number of query tokens.
    pub fn tokens(&self) -> usize {
        match self {
            Self::Concatenated(query) => query.shape()[0],
            Self::Split { latent, .. } => latent.shape()[0],
        }
    }

    /// The latent part of `latent` columns, and the rotary part. A concatenated query has these
    /// parts side by side.
    ///
    /// # Errors
    ///
    /// If a concatenated query has fewer columns.
    pub fn parts(&self, latent: usize) -> Result<[TensorRef<'a, D>; 2]> {
        match self {
            Self::Split { latent, rope } => Ok([*latent, *rope]),
            Self::Concatenated(query) => {
                let width = query.shape()[2];
                let parts = [0..latent, latent..width].map(|part| query.narrow(2, part));
                let [latent, rope] = parts.map(|part| named("query", part));
                Ok([latent?, rope?])
            }
        }
    }
}

impl<D: Device> DecodeBatch<'_, D> {
    /// Refuses arrays whose lengths do not fit the number of requests in the block table.
    pub(crate) fn check_lens(&self) -> Result<()> {
        let requests = self.block_table.requests();
        let one = "one per request of the block table";
        check_len("seq_lens", self.seq_lens.len(), requests, one)?;
        let ends = "one per request of the block table and an end";
        check_len("query_starts", self.query_starts.len(), requests + 1, ends)
    }
}

impl<D: Device> DecodeCall<'_, D> {
    /// Checks the call against the configuration and the spec of a backend: dtypes, shapes,
    /// alignment, the cache, the lengths of arrays, sinks, and lists of slots. A backend only needs
    /// to check what is particular to it.
    ///
    /// # Errors
    ///
    /// If a field does not fit. The error names the first one, with the given and the accepted
    /// value.
    pub fn check(&self, config: &LayerConfig, spec: &BackendSpec) -> Result<()> {
        let problem = &config.problem;
        let rule = Rule { problem, spec };
        let [heads, latent, _, rope, ..] = problem.extents();
        let tokens = self.query.tokens();
        match &self.query {
            Query::Concatenated(query) => {
                rule.tensor("query", query, [tokens, heads, latent + rope])?;
            }
            Query::Split {
                latent: part,
                rope: rotary,
            } => {
                rule.tensor("query (latent)", part, [tokens, heads, latent])?;
                rule.tensor("query (rope)", rotary, [tokens, heads, rope])?;
            }
        }
        rule.output(&self.out, [tokens, heads, latent])?;
        if let Some(lse) = &self.lse {
            lse.layout().require("lse", heads, tokens)?;
        }
        check_cache(self.cache.layout(), problem, spec)?;
        check_rows(&self.cache, spec.alignment)?;
        self.batch.check_lens()?;
        check_sinks(self.sinks.as_ref(), heads, spec)?;
        check_query_scales(self.query_scales.as_ref(), tokens, problem)?;
        check_causal(self.batch.causal, spec)?;
        check_lists("slots", self.slots.as_ref(), [tokens; 2], problem)?;
        match &self.slots {
            Some(lists) => lists.check(spec, self.cache.layout()),
            None => Ok(()),
        }
    }
}

impl<D: Device> PrefillCall<'_, D> {
    /// Checks the call against the configuration and the spec of a backend: dtypes, shapes,
    /// alignment, and the lengths of arrays. A backend only needs to check what is particular to
    /// it.
    ///
    /// # Errors
    ///
    /// If a field does not fit. The error names the first one, with the given and the accepted
    /// value.
    pub fn check(&self, config: &LayerConfig, spec: &BackendSpec) -> Result<()> {
        let problem = &config.problem;
        let rule = Rule { problem, spec };
        let [heads, _, nope, rope, v] = problem.extents();
        let (tokens, keys) = (self.query.shape()[0], self.values.shape()[0]);
        rule.tensor("query", &self.query, [tokens, heads, nope + rope])?;
        match &self.keys {
            Keys::Packed(packed) => rule.tensor("keys", packed, [keys, heads, nope + rope])?,
            Keys::Split {
                nope: own,
                rope: shared,
            } => {
                rule.tensor("keys (nope)", own, [keys, heads, nope])?;
                let layout = shared.layout();
                layout.require("keys (rope)", problem.dtype, [keys, 1, rope])?;
                // The rotary part has one head, so the distance between heads does not matter.
                rule.tensor("keys (rope)", &shared.broadcast(1, 1)?, [keys, 1, rope])?;
            }
        }
        rule.tensor("values", &self.values, [keys, heads, v])?;
        rule.output(&self.out, [tokens, heads, v])?;
        if let Some(lse) = &self.lse {
            lse.layout().require("lse", heads, tokens)?;
        }
        check_query_scales(self.query_scales.as_ref(), tokens, problem)?;
        check_causal(self.causal || self.chunk.is_some(), spec)?;
        let starts = self.query_starts.len();
        check_len(
            "key_starts",
            self.key_starts.len(),
            starts,
            "as many as query_starts",
        )?;
        match &self.chunk {
            None => Ok(()),
            Some((_, [_, lens])) => {
                let requests = starts.saturating_sub(1);
                check_len("chunk.seq_lens", lens.len(), requests, "one per request")
            }
        }
    }
}
