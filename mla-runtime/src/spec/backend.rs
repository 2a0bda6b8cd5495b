//! The spec of a backend, as a constant, and its validation against a problem.

use crate::model::{DType, HeadDims, KvFormat, MAX_DIM};
use crate::setters::setters;
use crate::spec::{
    Accepted, CapabilityMatch, Cause, Feature, FeatureSet, Field, Given, Platform, Problem, Reason,
    Reasons, Target, on,
};
use crate::text::{any, is_equal};

use super::support::{
    CacheDims, GraphSupport, HeadCounts, KeyLayout, LseOutput, LsePrecision, PageSizes, Phase,
    Priority, QueryFormat, QueryLen, SparseSupport,
};

/// The problems that a backend supports. The attribute `#[mla_backend]` writes the spec as a
/// constant of the backend's `impl` block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BackendSpec {
    /// The name by which the backend is chosen, such as `WGMMA_MLA`.
    pub name: &'static str,
    /// The provider of the kernel. By default it is the package that contains the attribute; for
    /// this project's own kernels it is `native`.
    pub provider: &'static str,
    /// The computation that the backend does.
    pub phase: Phase,
    /// The kind of device whose memory the backend reads.
    pub platform: Platform,
    /// The compute capabilities that the backend runs on.
    pub capabilities: &'static [CapabilityMatch],
    /// The dtypes of queries and outputs.
    pub dtypes: &'static [DType],
    /// The per-head dimensions (P, R, V); `None` if all are supported.
    pub dims: Option<&'static [HeadDims]>,
    /// The widths of a cache row; `None` if all are supported. Decode only.
    pub cache_dims: Option<&'static [CacheDims]>,
    /// The numbers of query heads.
    pub heads: HeadCounts,
    /// The cache formats. Decode only; empty for prefill, because prefill never reads the cache.
    pub kv_formats: &'static [KvFormat],
    /// The page sizes. Decode only.
    pub page_sizes: PageSizes,
    /// The supported query lengths. Decode only: prefill is always ragged.
    pub query_len: QueryLen,
    /// The maximum number of new tokens of a request; `None` if there is no maximum. The layer
    /// sends longer requests down the expanded path. Decode only.
    pub max_query_len: Option<u32>,
    /// The format of the queries. Decode only.
    pub query_format: QueryFormat,
    /// The layout of the keys. Prefill only.
    pub key_layout: KeyLayout,
    /// The alignment of tensor addresses and of the distances between rows, in bytes. It is 16 for
    /// a kernel that reads 16 bytes at a time, and 1 if the alignment of an element suffices.
    pub alignment: u32,
    /// The batches that can be captured into a CUDA graph.
    pub graphs: GraphSupport,
    /// True if the backend plans a step on the host. Then
    /// [`prepare`](crate::backend::DecodeBackend::prepare) gets the lengths in
    /// [`DecodeBatch::host`](crate::backend::DecodeBatch::host), and no graph can capture the
    /// backend. Decode only.
    pub plans_on_host: bool,
    /// True if its kernels keep [the contract of dependent
    /// launches](crate::backend#dependent-launches). If it is false, the device lets no kernel
    /// before or after a call overlap the call.
    pub dependent_launch: bool,
    /// The kind of log-sum-exp that the kernel writes.
    pub lse: LseOutput,
    /// The precision of that log-sum-exp.
    pub lse_precision: LsePrecision,
    /// True if the backend can write a quantised output.
    pub quant_output: bool,
    /// The support of lists of slots. Decode only.
    pub sparse: SparseSupport,
    /// The maximum number of entries in a list of slots; `None` if there is no maximum. Decode
    /// only.
    pub max_list_width: Option<u32>,
    /// The features beyond plain causal attention.
    pub features: FeatureSet,
    /// The order in which backends are tried.
    pub priority: Priority,
}

impl BackendSpec {
    /// The minimal spec. Every other field gets the value of most backends of the phase. Prefill
    /// runs ragged and returns a natural log-sum-exp. Decode takes one token per request and any
    /// page size; its spec must still name the cache formats. Queries are split, and keys are
    /// packed. The provider is `unknown`.
    pub const fn new(name: &'static str, phase: Phase, platform: Platform) -> Self {
        Self {
            name,
            provider: "unknown",
            phase,
            platform,
            capabilities: &[CapabilityMatch::Any],
            dtypes: &[DType::F16, DType::BF16],
            dims: None,
            cache_dims: None,
            heads: HeadCounts::Any,
            kv_formats: match phase {
                Phase::Prefill => &[],
                Phase::Decode => &[KvFormat::F16, KvFormat::BF16],
            },
            page_sizes: PageSizes::Any,
            query_len: match phase {
                Phase::Prefill => QueryLen::Ragged,
                Phase::Decode => QueryLen::Single,
            },
            max_query_len: None,
            query_format: QueryFormat::Split,
            key_layout: KeyLayout::Packed,
            alignment: 1,
            graphs: GraphSupport::Never,
            plans_on_host: false,
            dependent_launch: false,
            lse: LseOutput::Ln,
            lse_precision: LsePrecision::F32,
            quant_output: false,
            sparse: SparseSupport::Never,
            max_list_width: None,
            features: FeatureSet::NONE,
            priority: Priority::everywhere(0),
        }
    }

    setters! {
        with_name(name: &'static str);
        with_provider(provider: &'static str);
        with_platform(platform: Platform);
        with_capabilities(capabilities: &'static [CapabilityMatch]);
        with_dtypes(dtypes: &'static [DType]);
        with_dims(dims: Option<&'static [HeadDims]>);
        with_cache_dims(cache_dims: Option<&'static [CacheDims]>);
        with_heads(heads: HeadCounts);
        with_kv_formats(kv_formats: &'static [KvFormat]);
        with_page_sizes(page_sizes: PageSizes);
        with_query_len(query_len: QueryLen);
        with_max_query_len(max_query_len: Option<u32>);
        with_query_format(query_format: QueryFormat);
        with_key_layout(key_layout: KeyLayout);
        with_alignment(alignment: u32);
        with_graphs(graphs: GraphSupport);
        with_plans_on_host(plans_on_host: bool);
        with_dependent_launch(dependent_launch: bool);
        with_lse(lse: LseOutput);
        with_lse_precision(lse_precision: LsePrecision);
        with_quant_output(quant_output: bool);
        with_sparse(sparse: SparseSupport);
        with_max_list_width(max_list_width: Option<u32>);
        with_features(features: FeatureSet);
        with_priority(priority: Priority);
    }

    /// The reasons against this backend for `problem` on `target`, in the order of the spec's
    /// fields. There are none if the backend fits.
    pub const fn validate(&self, target: Target, problem: &Problem) -> Reasons {
        let mut reasons = Reasons::NONE
            .unless(
                self.platform.same(target.platform),
                Field::Platform,
                Given::Text(target.platform.name()),
                Accepted::Text(self.platform.name()),
            )
            .unless(
                matches!(target.platform, Platform::Cpu) || self.accepts_capability(target),
                Field::Capability,
                Given::Capability(target.capability),
                Accepted::Capabilities(self.capabilities),
            )
            .unless(
                self.accepts_dtype(problem.dtype),
                Field::DType,
                Given::Text(problem.dtype.name()),
                Accepted::DTypes(self.dtypes),
            );
        reasons = self.and_shapes(reasons, problem);
        if matches!(self.phase, Phase::Decode) {
            reasons = self.and_cache_and_step(reasons, problem);
        }
        reasons = reasons
            .unless(
                !problem.context_parallel || !matches!(self.lse, LseOutput::None),
                Field::Lse,
                Given::Text("context parallelism, which merges by log-sum-exp"),
                Accepted::Text("a cache on one device: the backend returns no log-sum-exp"),
            )
            .unless(
                !problem.quant_output || self.quant_output,
                Field::QuantOutput,
                Given::Text("quantised output"),
                Accepted::Text("unquantised output"),
            );
        if matches!(self.phase, Phase::Decode) {
            reasons = self.and_sparsity(reasons, problem);
        }
        self.and_features(reasons, problem)
    }

    const fn and_shapes(&self, mut reasons: Reasons, problem: &Problem) -> Reasons {
        if let Some(dims) = self.dims {
            let given = problem.dims.head;
            reasons = reasons.unless(
                any!(dims, |accepted| accepted.same(given)),
                Field::Dims,
                Given::Dims(given),
                Accepted::Dims(dims),
            );
        }
        if let Some(dims) = self.cache_dims {
            let given = CacheDims::new(problem.dims.latent, problem.dims.head.rope);
            reasons = reasons.unless(
                any!(dims, |it| it.latent == given.latent
                    && it.rope == given.rope),
                Field::CacheDims,
                Given::CacheDims(given),
                Accepted::CacheDims(dims),
            );
        }
        reasons.unless(
            self.heads.accepts(problem.heads),
            Field::Heads,
            Given::Count(problem.heads),
            Accepted::Heads(self.heads),
        )
    }

    const fn and_cache_and_step(&self, mut reasons: Reasons, problem: &Problem) -> Reasons {
        if let Some(accepted) = self.refuses_kv_format(problem) {
            let given = Given::Text(problem.kv_format.name());
            reasons = reasons.unless(false, Field::KvFormat, given, accepted);
        }
        reasons
            .unless(
                self.page_sizes.accepts(problem.page_size),
                Field::PageSize,
                Given::Count(problem.page_size),
                Accepted::PageSizes(self.page_sizes),
            )
            .unless(
                self.query_len as u8 >= problem.query_len as u8,
                Field::QueryLen,
                Given::Text(problem.query_len.name()),
                Accepted::Text(self.query_len.name()),
            )
            .unless(
                self.graphs as u8 >= problem.graphs as u8,
                Field::Graphs,
                Given::Text(problem.graphs.name()),
                Accepted::Text(self.graphs.name()),
            )
    }

    const fn and_sparsity(&self, reasons: Reasons, problem: &Problem) -> Reasons {
        let (given, accepted) = match (problem.sparse, self.sparse) {
            (true, SparseSupport::Never) => ("sparse", "dense"),
            (false, SparseSupport::Required) => ("dense", "sparse"),
            _ => return reasons,
        };
        let (given, accepted) = (Given::Text(given), Accepted::Text(accepted));
        reasons.unless(false, Field::Sparse, given, accepted)
    }

    const fn and_features(&self, mut reasons: Reasons, problem: &Problem) -> Reasons {
        let mut i = 0;
        while i < Feature::ALL.len() {
            let feature = Feature::ALL[i];
            // A prefill backend gets keys and values, so the kind of cache does not concern it.
            // Sinks are applied when its results are merged.
            let concerned = matches!(self.phase, Phase::Decode)
                || !matches!(feature, Feature::SplitCache | Feature::Sinks);
            reasons = reasons.unless(
                !concerned
                    || !problem.features.contains(feature)
                    || self.features.contains(feature),
                Field::Features,
                Given::Text(feature.name()),
                Accepted::Features(self.features),
            );
            i += 1;
        }
        reasons
    }

    /// The reasons against this backend for `problem` on `target`. They include the reason why the
    /// backend cannot run there at all. A part that this machine lacks counts only if the backend
    /// has to run here.
    pub const fn reasons(
        &self,
        target: Target,
        problem: &Problem,
        availability: Result<(), Cause>,
    ) -> Reasons {
        let reasons = self.validate(target, problem);
        match on(availability, target) {
            Err(cause) => reasons.with(Reason {
                field: Field::Availability,
                given: Given::Cause(cause),
                accepted: Accepted::Remedy(cause),
            }),
            Ok(()) => reasons,
        }
    }

    /// Checks the rules that every spec must keep. A spec written by hand thus meets the same rules
    /// as one from the attribute.
    ///
    /// # Panics
    ///
    /// If a list is empty, a size is zero or larger than any problem's, a range is reversed, or two
    /// fields contradict each other or the phase. In a constant this is a compile error.
    pub const fn checked(self) -> Self {
        self.check_lists();
        assert!(
            !matches!(self.platform, Platform::Cpu) || self.priority.by_capability.is_empty(),
            "priority: given one per capability, accepted an integer: a processor has no compute \
             capability"
        );
        self.check_heads();
        self.check_memory();
        self.check_dims();
        match self.phase {
            Phase::Prefill => self.check_prefill(),
            Phase::Decode => {
                self.check_decode();
                self.check_caches();
                self.check_step();
            }
        }
        self
    }

    /// Checks that no list is empty.
    const fn check_lists(&self) {
        assert!(
            !self.name.is_empty(),
            "name: given \"\", accepted a non-empty name"
        );
        assert!(
            !any!(RESERVED_NAMES, |word| is_equal(self.name, word)),
            "name: given a word that stands for backends of any name, accepted the name of one"
        );
        assert!(
            !self.capabilities.is_empty(),
            "sm: given an empty list, accepted at least one capability"
        );
        assert!(
            !self.dtypes.is_empty(),
            "dtypes: given an empty list, accepted at least one dtype"
        );
    }

    const fn check_heads(&self) {
        match self.heads {
            HeadCounts::Range(min, max) => {
                assert!(
                    0 < min && min <= max,
                    "heads: given a reversed or zero range, accepted 1 and up"
                );
                assert!(
                    min <= MAX_DIM,
                    "heads: given a range beyond 65536, accepted one that begins at 1 to 65536"
                );
            }
            HeadCounts::List(counts) => {
                assert!(
                    !counts.is_empty(),
                    "heads: given an empty list, accepted at least one count"
                );
                assert!(
                    !any!(counts, |count| count == 0 || count > MAX_DIM),
                    "heads: given 0 or a count beyond 65536, accepted 1 to 65536"
                );
            }
            HeadCounts::Any => {}
        }
    }

    /// Checks the layout of the cache's pages and of the tensors in memory.
    const fn check_memory(&self) {
        match self.page_sizes {
            PageSizes::MultipleOf(unit) => {
                assert!(unit > 0, "page_sizes: given 0, accepted 1 and up")
            }
            PageSizes::List(sizes) => {
                assert!(
                    !sizes.is_empty(),
                    "page_sizes: given an empty list, accepted at least one size"
                );
                assert!(
                    !any!(sizes, |size| size == 0),
                    "page_sizes: given 0, accepted 1 and up"
                );
            }
            PageSizes::Any => {}
        }
        assert!(
            self.alignment.is_power_of_two(),
            "alignment: given no power of two, accepted 1, 2, 4 and so on"
        );
    }

    /// Checks that the lists of dimensions are not empty, and that some problem can have each.
    const fn check_dims(&self) {
        if let Some(dims) = self.dims {
            assert!(
                !dims.is_empty(),
                "dims: given an empty list, accepted at least one (P,R,V)"
            );
            assert!(
                !any!(dims, |dims| !dims.are_possible()),
                "dims: given one that no problem has, accepted P and V of 1 to 65536, and R of 0 \
                 to 65536"
            );
        }
        if let Some(rows) = self.cache_dims {
            assert!(
                !rows.is_empty(),
                "cache_dims: given an empty list, accepted at least one (L,R)"
            );
            assert!(
                !any!(rows, |row| !row.are_possible()),
                "cache_dims: given one that no problem has, accepted L of 1 to 65536, and R of 0 \
                 to 65536"
            );
        }
    }

    /// Checks that a prefill spec says nothing about caches or lists of slots.
    const fn check_prefill(&self) {
        assert!(
            self.kv_formats.is_empty(),
            "kv: given formats, accepted none: prefill never reads the cache"
        );
        assert!(
            self.max_query_len.is_none(),
            "max_query_len: given a number, accepted none: prefill takes any"
        );
        assert!(
            self.max_list_width.is_none(),
            "max_list_width: given a number, accepted none: prefill takes no lists"
        );
        assert!(
            !self.plans_on_host,
            "plans_on_host: given true, accepted false: prefill is always given the host's lengths"
        );
        assert!(
            !matches!(self.lse, LseOutput::None),
            "lse: given none, accepted ln or log2: prefill merges context chunks by log-sum-exp"
        );
        assert!(
            matches!(self.sparse, SparseSupport::Never) && !self.has_features_of_lists(),
            "features: given what only a call with lists of slots has, accepted the others: \
             prefill takes no lists"
        );
        assert!(
            !self.features.contains(Feature::SplitCache),
            "features: given split_cache, accepted the others: only decode reads the cache"
        );
    }

    /// Checks that a decode spec says what a decode backend needs, such as a cache format.
    const fn check_decode(&self) {
        assert!(
            !self.kv_formats.is_empty(),
            "kv: given an empty list, accepted at least one format"
        );
        assert!(
            !matches!(self.max_query_len, Some(0)),
            "max_query_len: given 0, accepted 1 and up"
        );
        assert!(
            !matches!(self.max_list_width, Some(0)),
            "max_list_width: given 0, accepted 1 and up"
        );
        assert!(
            self.max_list_width.is_none() || !matches!(self.sparse, SparseSupport::Never),
            "max_list_width: given a number, accepted none: it takes no lists"
        );
    }

    const fn has_features_of_lists(&self) -> bool {
        self.features.contains(Feature::DenseRequests)
            || self.features.contains(Feature::SecondCache)
    }

    /// Checks that each dtype has a cache format, and that each format has a listed dtype and can
    /// hold the rows.
    const fn check_caches(&self) {
        let formats = self.kv_formats;
        assert!(
            !any!(formats, |format| match format.dtype() {
                Some(dtype) => !self.accepts_dtype(dtype),
                None => false,
            }),
            "kv: given a format whose dtype is not among the dtypes, accepted theirs and quantised \
             formats"
        );
        let rows = match self.cache_dims {
            Some(rows) => rows,
            None => &[],
        };
        assert!(
            !any!(rows, |row| any!(formats, |format| !row.fits(format))),
            "cache_dims: given a row that a format of `kv` cannot hold, accepted latent widths \
             that are multiples of 128 beside fp8_ds_mla, and of 4 beside fp8_per_token"
        );
        assert!(
            any!(formats, |format| format.dtype().is_none())
                || !any!(self.dtypes, |dtype| !self.has_format(KvFormat::of(dtype))),
            "kv: given no format for one of the dtypes, accepted one for each"
        );
    }

    const fn has_format(&self, format: KvFormat) -> bool {
        any!(self.kv_formats, |own| own.same(format))
    }

    /// Checks the fields about the requests of a step against one another.
    const fn check_step(&self) {
        let single = matches!(self.query_len, QueryLen::Single);
        assert!(
            !(single && matches!(self.max_query_len, Some(2..))),
            "max_query_len: given several beside the query_len single, accepted 1 or none"
        );
        assert!(
            self.graphs as u8 <= self.query_len as u8 + 1,
            "graphs: given batches that the query_len refuses, accepted those that it takes"
        );
        assert!(
            !matches!(self.lse, LseOutput::None) || matches!(self.lse_precision, LsePrecision::F32),
            "lse_precision: given dtype beside the lse none, accepted f32, which says nothing"
        );
        assert!(
            !matches!(self.sparse, SparseSupport::Never) || !self.has_features_of_lists(),
            "features: given what only a call with lists of slots has, accepted the others beside \
             the sparse never"
        );
    }

    /// Returns true if the backend runs on the target's capability. An unknown capability never
    /// fits: a reason is better than a guess.
    pub const fn accepts_capability(&self, target: Target) -> bool {
        let Some(capability) = target.capability else {
            return false;
        };
        any!(self.capabilities, |set| set.accepts(capability))
    }

    const fn accepts_dtype(&self, dtype: DType) -> bool {
        any!(self.dtypes, |own| own.same(dtype))
    }

    // An unquantised cache must hold the compute dtype. Converting its rows during attention would
    // be a second format without a name.
    const fn refuses_kv_format(&self, problem: &Problem) -> Option<Accepted> {
        if !self.has_format(problem.kv_format) {
            return Some(Accepted::KvFormats(self.kv_formats));
        }
        match problem.kv_format.dtype() {
            Some(dtype) if !dtype.same(problem.dtype) => {
                Some(Accepted::KvFormat(KvFormat::of(problem.dtype)))
            }
            _ => None,
        }
    }
}

/// Words that stand for backends of any name, as in `--decode all`. No backend may have them as its
/// name.
const RESERVED_NAMES: &[&str] = &["ALL", "AUTO"];
