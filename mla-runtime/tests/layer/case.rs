//! The description of a batch, and its places in a cache. The layer's tests on every device use it.

use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims, QueryScaling};
use mla_runtime::plan::slots::SKIPPED;
use mla_runtime::spec::{Feature, FeatureSet, Problem, QueryLen};

/// The description of a batch.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) dims: MlaDims,
    pub(crate) heads: u32,
    pub(crate) dtype: DType,
    pub(crate) kv_format: KvFormat,
    pub(crate) page_size: u32,
    pub(crate) query_len: QueryLen,
    /// The numbers of new and of cached tokens of each request. Without cached tokens it is
    /// padding.
    pub(crate) requests: Vec<(u32, u32)>,
    pub(crate) threshold: u32,
    pub(crate) context_rows: usize,
    /// True if tokens attend to lists of slots. Only the absorbed path supports them.
    pub(crate) sparse: bool,
    /// True if the layer gets the cache as two tensors.
    pub(crate) split_cache: bool,
    /// The maximum number of tokens of a request that is dense in a sparse case.
    pub(crate) dense_within: u32,
    /// True if a new token sees only the tokens of its request up to itself.
    pub(crate) causal: bool,
    /// True if a request's bits must not depend on the other requests.
    pub(crate) batch_invariant: bool,
    /// True if W_kv_b has the layout of published checkpoints, `[H·(P+V), L]`.
    pub(crate) transposed_weights: bool,
    pub(crate) query_scaling: Option<QueryScaling>,
    pub(crate) seed: u64,
}

impl Case {
    /// DeepSeek's dimensions in bf16.
    pub(crate) fn new(heads: u32, requests: &[(u32, u32)]) -> Self {
        Self {
            dims: MlaDims::R1,
            heads,
            dtype: DType::BF16,
            kv_format: KvFormat::BF16,
            page_size: 64,
            query_len: QueryLen::Ragged,
            requests: requests.to_vec(),
            threshold: 4,
            context_rows: 4096,
            sparse: false,
            split_cache: false,
            dense_within: 0,
            causal: true,
            batch_invariant: false,
            transposed_weights: true,
            query_scaling: None,
            seed: 1,
        }
    }

    /// A small case like DeepSeek's. It is in f32 throughout, so that rounding errors are small.
    pub(crate) fn small(requests: &[(u32, u32)]) -> Self {
        Self {
            dims: MlaDims::new(32, HeadDims::new(16, 8, 16)),
            dtype: DType::F32,
            kv_format: KvFormat::F32,
            page_size: 4,
            context_rows: 64,
            ..Self::new(4, requests)
        }
    }

    pub(crate) fn config(&self) -> LayerConfig {
        let asked = [
            (self.split_cache, Feature::SplitCache),
            (self.batch_invariant, Feature::BatchInvariant),
            (self.query_scaling.is_some(), Feature::QueryScales),
        ];
        let asked = asked.into_iter().filter(|(is_asked, _)| *is_asked);
        let features = asked.fold(FeatureSet::NONE, |set, (_, feature)| set.with(feature));
        LayerConfig::new(
            Problem::new(self.dims, self.heads, self.dtype)
                .with_kv_format(self.kv_format)
                .with_page_size(self.page_size)
                .with_query_len(self.query_len)
                .with_sparse(self.sparse)
                .with_features(features),
            1.0 / (self.dims.head.qk() as f32).sqrt(),
        )
        .with_query_scaling(self.query_scaling)
    }

    pub(crate) fn limits(&self) -> StepLimits {
        let max = |of: fn(&(u32, u32)) -> u32| self.requests.iter().map(of).max().unwrap_or(0);
        StepLimits::new(
            self.requests.len(),
            self.requests.iter().map(|(q, _)| *q as usize).sum(),
            (max(|(_, kv)| *kv).div_ceil(self.page_size) as usize).max(1),
        )
        .with_decode_query_len(match self.dense_within {
            0 => self.threshold as usize,
            _ => max(|(q, _)| *q) as usize,
        })
        .with_context_rows(match self.sparse && self.dense_within == 0 {
            true => 0,
            false => self.context_rows,
        })
    }
}

/// The pages of a batch's requests, shuffled over a cache with a few more pages, and the slots of
/// tokens.
pub(crate) struct Places {
    /// Rows of `max_pages` entries. Entries that no token needs are garbage.
    pub(crate) tables: Vec<i32>,
    pub(crate) max_pages: usize,
    /// The number of pages of the cache.
    pub(crate) pages: usize,
    /// The slots of new tokens.
    pub(crate) slots: Vec<i64>,
    /// The slots of the contexts.
    pub(crate) context: Vec<i64>,
}

impl Places {
    pub(crate) fn new(requests: &[Request], page: u32, shuffle: impl FnOnce(&mut [i32])) -> Self {
        let needed = |request: &Request| request.kv.div_ceil(page) as usize;
        let pages = requests.iter().map(needed).sum::<usize>() + 3;
        let max_pages = requests.iter().map(needed).max().unwrap_or(0) + 1;
        let mut free: Vec<i32> = (0..pages as i32).collect();
        shuffle(&mut free);
        let mut tables = Vec::new();
        for request in requests {
            tables.extend(free.drain(..needed(request)));
            let unused = [i32::MIN, -1, i32::MAX, pages as i32];
            tables.extend((needed(request)..max_pages).map(|at| unused[at % 4]));
        }
        let (mut slots, mut context) = (Vec::new(), Vec::new());
        for (request, row) in requests.iter().zip(tables.chunks(max_pages)) {
            let slot = |position: u32| {
                i64::from(row[(position / page) as usize]) * i64::from(page)
                    + i64::from(position % page)
            };
            let cached = request.kv.saturating_sub(request.q);
            context.extend((0..cached).map(slot));
            slots.extend((0..request.q).map(|token| match request.kv {
                0 => SKIPPED,
                _ => slot(cached + token),
            }));
        }
        Self {
            tables,
            max_pages,
            pages,
            slots,
            context,
        }
    }
}
