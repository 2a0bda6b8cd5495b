//! The problem that an engine wants a backend for.

use super::support::{CacheDims, GraphSupport, QueryLen};
use crate::model::{DType, HeadDims, KvFormat, MAX_DIM, MlaDims};
use crate::setters::setters;
use crate::spec::{Accepted, Feature, FeatureSet, Field, Given, Reason};
use crate::{Error, Result};

/// Kernels count tokens in signed 32-bit integers.
const MAX_PAGE_SIZE: u32 = i32::MAX as u32;

/// One model on one cache. A [`BackendSpec`](crate::spec::BackendSpec) is validated against a
/// problem and the hardware.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Problem {
    /// The model's dimensions.
    pub dims: MlaDims,
    /// Query heads on this device, after any tensor parallelism.
    pub heads: u32,
    /// The dtype of queries, weights and outputs.
    pub dtype: DType,
    /// The format of the cache.
    pub kv_format: KvFormat,
    /// Tokens in a page of the cache.
    pub page_size: u32,
    /// The kind of query lengths in the batches sent to the decode backend.
    pub query_len: QueryLen,
    /// The batches that must be capturable into CUDA graphs.
    pub graphs: GraphSupport,
    /// True if the cache is split over ranks. Results are then merged by their log-sum-exp, and a
    /// selection takes only backends that return one. [`MlaLayer`](crate::layer::MlaLayer) refuses
    /// `true`: each rank makes its layer for the same problem with `false`.
    pub context_parallel: bool,
    /// True if the output must be quantised. Only backends that are called without the layer can do
    /// that: the layer refuses it.
    pub quant_output: bool,
    /// True if each query attends to a list of slots instead of its whole context.
    pub sparse: bool,
    /// The features that both backends must have, beyond plain causal attention. The prefill
    /// backend needs neither a split cache nor sinks. No prefill backend supports dense requests or
    /// a second cache, so a selection for a problem with one of these finds none. A call that uses
    /// these two is checked against the decode backend's spec alone.
    pub features: FeatureSet,
}

impl Problem {
    /// A plain problem: an unquantised cache with pages of 64 tokens, single-token decode, no
    /// graphs, and only causal attention.
    pub const fn new(dims: MlaDims, heads: u32, dtype: DType) -> Self {
        Self {
            dims,
            heads,
            dtype,
            kv_format: KvFormat::of(dtype),
            page_size: 64,
            query_len: QueryLen::Single,
            graphs: GraphSupport::Never,
            context_parallel: false,
            quant_output: false,
            sparse: false,
            features: FeatureSet::NONE,
        }
    }

    setters! {
        with_dims(dims: MlaDims);
        with_heads(heads: u32);
        with_kv_format(kv_format: KvFormat);
        with_page_size(page_size: u32);
        with_query_len(query_len: QueryLen);
        with_graphs(graphs: GraphSupport);
        with_context_parallel(context_parallel: bool);
        with_quant_output(quant_output: bool);
        with_sparse(sparse: bool);
        with_features(features: FeatureSet);
    }

    /// Returns true if the cache has two tensors.
    pub const fn has_split_cache(&self) -> bool {
        self.features.contains(Feature::SplitCache)
    }

    /// Checks that something made for this problem is used for the same problem, because another
    /// problem needs memory of other sizes. `field` names the thing. A backend whose memory safety
    /// depends on these sizes keeps the problem in its state.
    ///
    /// ```
    /// use mla_runtime::model::{DType, MlaDims};
    /// use mla_runtime::spec::Problem;
    ///
    /// let made_for = Problem::new(MlaDims::R1, 16, DType::BF16);
    /// made_for.check_same("state", &made_for)?;
    /// assert_eq!(
    ///     made_for.check_same("state", &made_for.with_heads(128)).unwrap_err().to_string(),
    ///     "state: given one for heads = 16, accepted one for heads = 128, as the layer has it"
    /// );
    /// # Ok::<(), mla_runtime::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a field differs. The error names the first one.
    pub fn check_same(&self, field: &'static str, theirs: &Self) -> Result<()> {
        match self == theirs {
            true => Ok(()),
            false => Err(self.refused(field, theirs)),
        }
    }

    #[cold]
    fn refused(&self, field: &'static str, theirs: &Self) -> Error {
        let (name, values) = self.difference(theirs).unwrap_or_default();
        let [given, accepted] = values.map(|value| format!("one for {name} = {value}"));
        Error::argument(field, given, accepted + ", as the layer has it")
    }

    /// The first field in which another problem differs: its name and both values.
    pub(crate) fn difference(&self, other: &Self) -> Option<(&'static str, [String; 2])> {
        // This pattern names every field, so a new field cannot be forgotten.
        let Self {
            dims,
            heads,
            dtype,
            kv_format,
            page_size,
            query_len,
            graphs,
            context_parallel,
            quant_output,
            sparse,
            features,
        } = self;
        fn shown(a: &impl ToString, b: &impl ToString) -> [String; 2] {
            [a.to_string(), b.to_string()]
        }
        [
            ("dims", shown(dims, &other.dims)),
            ("heads", shown(heads, &other.heads)),
            ("dtype", shown(dtype, &other.dtype)),
            ("kv_format", shown(kv_format, &other.kv_format)),
            ("page_size", shown(page_size, &other.page_size)),
            ("query_len", shown(query_len, &other.query_len)),
            ("graphs", shown(graphs, &other.graphs)),
            (
                "context_parallel",
                shown(context_parallel, &other.context_parallel),
            ),
            ("quant_output", shown(quant_output, &other.quant_output)),
            ("sparse", shown(sparse, &other.sparse)),
            ("features", shown(features, &other.features)),
        ]
        .into_iter()
        .find(|(_, [own, theirs])| own != theirs)
    }

    /// H, L, P, R and V, as extents of tensors.
    pub(crate) fn extents(&self) -> [usize; 5] {
        let HeadDims { nope, rope, v } = self.dims.head;
        [self.heads, self.dims.latent, nope, rope, v].map(|extent| extent as usize)
    }

    /// Returns a fault that rules out every backend, if there is one.
    pub const fn fault(&self) -> Option<Reason> {
        let (latent, rope) = (self.dims.latent, self.dims.head.rope);
        let row = CacheDims::new(latent, rope);
        let split = self.has_split_cache();
        let (field, given, accepted) = if self.heads == 0 || self.heads > MAX_DIM {
            (Field::Heads, Given::Count(self.heads), "1 to 65536")
        } else if !self.dims.head.are_possible() {
            let accepted = "P and V of 1 to 65536, and R of 0 to 65536";
            (Field::Dims, Given::Dims(self.dims.head), accepted)
        } else if !row.are_possible() {
            let accepted = "L of 1 to 65536, and R of 0 to 65536";
            (Field::CacheDims, Given::CacheDims(row), accepted)
        } else if !self.kv_format.holds(self.dims) {
            let accepted =
                "latents that are multiples of 128 in fp8_ds_mla, and of 4 in fp8_per_token";
            let given = Given::RowFormat(self.kv_format, latent);
            (Field::KvFormat, given, accepted)
        } else if split && !self.kv_format.splits() {
            let accepted = "f32, f16, bf16 or fp8 in a split cache: the others are one row";
            (
                Field::KvFormat,
                Given::Text(self.kv_format.name()),
                accepted,
            )
        } else if split && rope == 0 {
            let given = Given::Text(Feature::SplitCache.name());
            (Field::Features, given, "one row, where R is 0")
        } else if self.context_parallel && self.features.contains(Feature::QueryScales) {
            // A rank's layer counts only the tokens in its own part of the cache, so it does not
            // know their positions.
            let given = Given::Text(Feature::QueryScales.name());
            let accepted = "none beside context_parallel: the engine multiplies queries itself";
            (Field::Features, given, accepted)
        } else if self.page_size == 0 || self.page_size > MAX_PAGE_SIZE {
            let given = Given::Count(self.page_size);
            (Field::PageSize, given, "1 to 2147483647")
        } else {
            return None;
        };
        Some(Reason {
            field,
            given,
            accepted: Accepted::Text(accepted),
        })
    }
}
