//! The problems that a spec accepts.

use mla_runtime::model::{HeadDims, KvFormat, MlaDims};
use mla_runtime::spec::{
    BackendSpec, Feature, HeadCounts, PageSizes, Phase, Problem, QueryLen, SparseSupport, Target,
};

use crate::Failure;

/// The problems of this suite that a spec accepts on a target.
pub(super) struct Accepted {
    pub(super) spec: BackendSpec,
    target: Target,
    pub(super) plainest: Problem,
}

impl Accepted {
    pub(super) fn new(spec: BackendSpec, target: Target) -> Result<Self, Failure> {
        let mut problem = Problem::new(MlaDims::R1, 16, spec.dtypes[0]);
        problem.sparse = spec.sparse == SparseSupport::Required;
        let mut all = Self {
            spec,
            target,
            plainest: problem,
        };
        all.plainest.dims = all.dims()[0];
        all.plainest.heads = *all.heads().last().unwrap_or(&1).min(&16);
        if !spec.heads.accepts(all.plainest.heads) {
            all.plainest.heads = all.heads()[0];
        }
        if spec.phase == Phase::Decode {
            let own = KvFormat::of(problem.dtype);
            let first = spec.kv_formats.first().copied().unwrap_or(own);
            all.plainest.kv_format = match spec.kv_formats.contains(&own) {
                true => own,
                false => first,
            };
            all.plainest.page_size = all.page_sizes()[0];
        }
        let reasons = spec.validate(target, &all.plainest);
        if reasons.is_empty() {
            return Ok(all);
        }
        Err(Failure::NothingAccepted {
            name: spec.name,
            target,
            reasons: Box::new(reasons),
        })
    }

    /// Returns the same problems over a cache of two tensors, if the spec accepts these.
    pub(super) fn split(&self) -> Option<Self> {
        let formats = [self.plainest.kv_format].into_iter();
        let mut formats = formats.chain(self.spec.kv_formats.iter().copied());
        let format = formats.find(|format| format.splits())?;
        let mut plainest = self.plainest.with_kv_format(format);
        plainest.features = plainest.features.with(Feature::SplitCache);
        self.accepts(&plainest)
            .then_some(Self { plainest, ..*self })
    }

    /// Returns a problem with a feature, if the spec accepts it.
    pub(super) fn having(&self, mut problem: Problem, feature: Feature) -> Option<Problem> {
        problem.features = problem.features.with(feature);
        self.accepts(&problem).then_some(problem)
    }

    fn accepts(&self, problem: &Problem) -> bool {
        problem.fault().is_none() && self.spec.validate(self.target, problem).is_empty()
    }

    // Applies `change` with each value to the plainest problem, and returns the problems that are
    // accepted.
    pub(super) fn with<T>(&self, values: Vec<T>, change: impl Fn(&mut Problem, T)) -> Vec<Problem> {
        let changed = values.into_iter().map(|value| {
            let mut problem = self.plainest;
            change(&mut problem, value);
            problem
        });
        changed.filter(|problem| self.accepts(problem)).collect()
    }

    // Returns sparse problems of every cache format, with one and several query tokens, and with
    // few and many heads. There are none without this feature.
    pub(super) fn sparse(&self, feature: Feature) -> Vec<Problem> {
        if !self.spec.features.contains(feature) {
            return Vec::new();
        }
        let levels = [QueryLen::Single, QueryLen::Ragged];
        let heads = [self.plainest.heads, 100];
        let changes = self.spec.kv_formats.iter().flat_map(|format| {
            let levels = levels.iter();
            levels.flat_map(move |level| heads.map(|heads| (*format, *level, heads)))
        });
        self.with(changes.collect(), |p, (format, level, heads)| {
            (p.sparse, p.kv_format, p.query_len, p.heads) = (true, format, level, heads);
        })
    }

    pub(super) fn dims(&self) -> Vec<MlaDims> {
        let (odd, unrotated) = (HeadDims::new(48, 32, 80), HeadDims::new(256, 0, 256));
        let heads = self
            .spec
            .dims
            .map_or(vec![HeadDims::R1, odd, unrotated], <[_]>::to_vec);
        match (self.spec.phase, self.spec.cache_dims) {
            (Phase::Prefill, _) => heads.iter().map(|head| MlaDims::new(512, *head)).collect(),
            (Phase::Decode, None) => heads
                .iter()
                .zip([512, 256].into_iter().cycle())
                .map(|(head, latent)| MlaDims::new(latent, *head))
                .collect(),
            (Phase::Decode, Some(rows)) => rows
                .iter()
                .map(|row| {
                    let head = heads.iter().find(|head| head.rope == row.rope);
                    let head = head.copied().unwrap_or(HeadDims::R1.with_rope(row.rope));
                    MlaDims::new(row.latent, head)
                })
                .collect(),
        }
    }

    pub(super) fn heads(&self) -> Vec<u32> {
        let mut some = match self.spec.heads {
            HeadCounts::List(counts) => counts.to_vec(),
            HeadCounts::Any => vec![1, 3, 16, 40, 128],
            HeadCounts::Range(min, max) => {
                let mut counts = vec![min, 3, 16, 40, 128, max.min(256)];
                counts.retain(|count| self.spec.heads.accepts(*count));
                counts
            }
        };
        some.sort_unstable();
        some.dedup();
        some
    }

    pub(super) fn page_sizes(&self) -> Vec<u32> {
        match self.spec.page_sizes {
            PageSizes::Any => vec![64, 1, 7, 16, 128],
            PageSizes::MultipleOf(unit) => vec![unit * 64u32.div_ceil(unit), unit, 3 * unit],
            PageSizes::List(sizes) => sizes.to_vec(),
        }
    }
}
