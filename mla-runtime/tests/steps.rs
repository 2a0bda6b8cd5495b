//! Compares random steps of an engine with a model of a step. The comparison covers order, rows,
//! slots, padding, the path of each request, the chunks of context, and a workspace that exactly
//! fits the step.

use std::collections::{BTreeMap, HashSet};

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::{DType, HeadDims, MlaDims};
use mla_runtime::plan::slots::SKIPPED;
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{CacheLayout, CacheMut, TensorMut, TensorRef};
use proptest::prelude::*;

const DIMS: MlaDims = MlaDims::new(4, HeadDims::new(2, 2, 3));
const HEADS: usize = 2;

type Layer = MlaLayer<CpuPrefill, CpuDecode>;

/// A step from the engine's point of view.
#[derive(Clone, Debug)]
struct Case {
    page_size: u32,
    query_len: QueryLen,
    decode_query_len: usize,
    threshold: u32,
    /// The number of rows in a context chunk. At least a page is used.
    context_rows: usize,
    /// The numbers of new and of cached tokens of each request.
    lens: Vec<(u32, u32)>,
    /// For each request, true if it shares whole pages of context with the request before it.
    shares: Vec<bool>,
    padding: usize,
}

impl Case {
    fn problem(&self) -> Problem {
        Problem::new(DIMS, HEADS as u32, DType::F32)
            .with_page_size(self.page_size)
            .with_query_len(self.query_len)
    }

    /// The smallest limits that allow the step.
    fn limits(&self) -> StepLimits {
        let tokens: u32 = self.lens.iter().map(|(new, _)| new).sum();
        let padding = self.padding * self.decode_query_len;
        let totals = self.lens.iter().map(|(new, cached)| new + cached);
        let longest = totals.max().unwrap_or(0).div_ceil(self.page_size);
        let requests = self.lens.len() + self.padding;
        StepLimits::new(requests, tokens as usize + padding, longest.max(1) as usize)
            .with_decode_query_len(self.decode_query_len)
            .with_context_rows(self.context_rows.max(self.page_size as usize))
    }

    /// The pages of each request. They are distinct, except for shared context, which is never
    /// written.
    fn pages(&self) -> Vec<Vec<i32>> {
        let mut all: Vec<Vec<i32>> = Vec::new();
        let mut next = 0;
        for (index, (new, cached)) in self.lens.iter().enumerate() {
            let count = (new + cached).div_ceil(self.page_size) as usize;
            let whole = |cached: u32| (cached / self.page_size) as usize;
            let shared = match index.checked_sub(1) {
                Some(before) if self.shares[index] => {
                    whole(*cached).min(whole(self.lens[before].1))
                }
                _ => 0,
            };
            let before = index.saturating_sub(1);
            let mut pages = all
                .get(before)
                .map_or(Vec::new(), |pages| pages[..shared].to_vec());
            for _ in shared..count {
                // The pages are not in ascending order.
                pages.push(next ^ 5);
                next += 1;
            }
            all.push(pages);
        }
        all
    }

    /// For each request, true if it takes the absorbed path. A request without new tokens counts as
    /// absorbed.
    fn absorbed(&self) -> Vec<bool> {
        let max = self.threshold.min(self.decode_query_len as u32);
        let max = match self.query_len {
            QueryLen::Single => max.min(1),
            _ => max,
        };
        let mut counts = BTreeMap::new();
        for (new, _) in &self.lens {
            if (1..=max).contains(new) {
                *counts.entry(*new).or_insert(0) += 1;
            }
        }
        // The most frequent length. If several are equally frequent, it is the shortest.
        let most_frequent = counts.values().max().copied();
        let uniform = counts
            .into_iter()
            .find(|(_, count)| Some(*count) == most_frequent);
        self.lens
            .iter()
            .map(|(new, _)| match self.query_len {
                _ if *new == 0 => true,
                QueryLen::Ragged => *new <= max,
                _ => uniform.is_some_and(|(len, _)| *new == len),
            })
            .collect()
    }

    /// The requests in the order of the layer: decodes, short extensions, requests without new
    /// tokens, long extensions, prompts.
    fn order(&self) -> Vec<usize> {
        let absorbed = self.absorbed();
        let mut order: Vec<usize> = (0..self.lens.len()).collect();
        order.sort_by_key(|&index| match (absorbed[index], self.lens[index]) {
            (_, (0, _)) => 2,
            (true, (1, _)) => 0,
            (true, _) => 1,
            (false, (_, 0)) => 4,
            (false, _) => 3,
        });
        order
    }
}

prop_compose! {
    fn cases()(
        page_size in prop_oneof![Just(1u32), Just(3), Just(16)],
        query_len in prop::sample::select(QueryLen::ALL),
        decode_query_len in 1usize..6,
        threshold in 0u32..8,
        context_rows in 1usize..40,
        requests in proptest::collection::vec(((0u32..12, 0u32..40), any::<bool>()), 0..7),
        padding in 0usize..3,
    ) -> Case {
        let (lens, shares) = requests.into_iter().unzip();
        Case {
            page_size,
            query_len,
            decode_query_len,
            threshold,
            context_rows,
            lens,
            shares,
            padding,
        }
    }
}

/// Plans the step, with padding if that is possible.
fn planned(case: &Case, pages: &[Vec<i32>]) -> (StepPlan, usize) {
    let requests: Vec<StepRequest<'_>> = case
        .lens
        .iter()
        .zip(pages)
        .map(|((new, cached), pages)| StepRequest::new(*new, new + cached, pages))
        .collect();
    let step =
        StepPlan::within(&case.problem(), &case.limits(), case.threshold, &requests).unwrap();
    match step.clone().padded_to(case.lens.len() + case.padding) {
        Ok(padded) => (padded, case.padding),
        // If requests have different lengths, or if there are none, the length of padding is not
        // defined.
        Err(error) => {
            assert!(
                error.to_string().contains("on the absorbed path"),
                "{error}"
            );
            (step, 0)
        }
    }
}

/// Checks the rows, the order and the slots of a planned step.
fn check_places(case: &Case, pages: &[Vec<i32>], step: &StepPlan, padding: usize) {
    assert_eq!(step.order(), case.order());
    let absorbed = case.absorbed();
    let is_padding = |request: &&Request| request.kv == 0 && request.q > 0;
    let padding_len = match step.requests().iter().find(is_padding) {
        Some(request) if padding > 0 => request.q as usize,
        _ => 0,
    };
    let slots: Vec<i64> = step.slots().collect();
    let page = case.page_size as usize;
    let (mut at, mut padded) = (0, false);
    let mut seen = HashSet::new();
    for &index in step.order() {
        let (new, cached) = case.lens[index];
        if (new == 0 || !absorbed[index]) && !std::mem::replace(&mut padded, true) {
            at += padding * padding_len;
        }
        let rows = step.rows(index);
        assert_eq!(rows, at..at + new as usize, "request {index}");
        for (token, row) in rows.clone().enumerate() {
            let position = cached as usize + token;
            let slot = i64::from(pages[index][position / page]) * page as i64;
            assert_eq!(slots[row], slot + (position % page) as i64);
            assert!(
                seen.insert(slots[row]),
                "slot {} is written twice",
                slots[row]
            );
        }
        at = rows.end;
    }
    let skipped = slots.iter().filter(|slot| **slot == SKIPPED).count();
    assert_eq!(skipped, padding * padding_len);
    assert_eq!(slots.len(), seen.len() + skipped);
    assert_eq!(step.tokens(), slots.len());
    let last = case.lens.iter().enumerate().map(|(index, (new, _))| {
        let rows = step.rows(index);
        (*new > 0).then(|| rows.end - 1)
    });
    assert!(step.last_rows().eq(last));
}

fn absorbed_rows(case: &Case) -> usize {
    let absorbed = case.absorbed();
    let own = absorbed.iter().zip(&case.lens).filter(|(own, _)| **own);
    own.map(|(_, (new, _))| *new as usize).sum()
}

/// Checks the step that the workspace prepared. It has two paths, and chunks that contain each
/// cached row once.
fn check_prepared(
    case: &Case,
    step: &StepPlan,
    padding: usize,
    workspace: &Workspace<CpuPrefill, CpuDecode>,
) {
    let of_padding: usize = step
        .requests()
        .iter()
        .filter(|request| request.kv == 0 && padding > 0)
        .map(|request| request.q as usize)
        .sum();
    assert_eq!(workspace.tokens(), step.tokens());
    assert_eq!(
        workspace.absorbed_tokens(),
        absorbed_rows(case) + of_padding
    );
    // A request without new tokens attends to nothing on either path.
    let attending = |request: &Request| match request.q {
        0 => Request::new(0, 0),
        _ => *request,
    };
    let expanded = &step.requests()[workspace.absorbed_requests()..];
    let expanded: Vec<Request> = expanded.iter().map(attending).collect();
    let rows = workspace.limits().context_rows as u64;
    let chunks = workspace.context();
    if chunks.is_empty() {
        let keys: u64 = expanded.iter().map(|request| u64::from(request.kv)).sum();
        let context: u32 = expanded.iter().map(|request| request.context_len()).sum();
        assert!(
            context == 0 || keys <= rows,
            "{context} rows are in no chunk"
        );
        return;
    }
    let mut covered = vec![0; expanded.len()];
    for chunk in chunks {
        assert!(chunk.rows() <= rows);
        for (request, start, len) in chunk.segments() {
            assert_eq!(start, covered[request]);
            covered[request] += len;
        }
    }
    let context: Vec<u32> = expanded
        .iter()
        .map(|request| request.context_len())
        .collect();
    assert_eq!(covered, context);
}

/// Runs the layer on meaningless numbers. This checks that everything made for the step is large
/// enough.
fn forward(
    case: &Case,
    pages: &[Vec<i32>],
    layer: &Layer,
    workspace: &mut Workspace<CpuPrefill, CpuDecode>,
) {
    let tokens = workspace.tokens();
    let [qk, row, v] = [DIMS.head.qk(), DIMS.row(), DIMS.head.v].map(|width| width as usize);
    let columns = HEADS * DIMS.head.kv_b() as usize;
    let latent = DIMS.latent as usize;
    let rope = row - latent;
    let last = pages
        .iter()
        .flatten()
        .max()
        .map_or(0, |page| *page as usize + 1);
    let problem = &layer.config().problem;
    let layout = CacheLayout::contiguous(DIMS, problem.kv_format, last, case.page_size as usize);
    let mut cache = vec![0f32; layout.slots() * row];
    let weights = vec![0.5f32; latent * columns];
    let ones = vec![1f32; tokens * HEADS * qk.max(latent)];
    let mut out = vec![f32::NAN; tokens * HEADS * v];
    let view = |shape: [usize; 3]| {
        let len = shape.iter().product::<usize>();
        TensorRef::<Cpu>::from_slice::<f32>(&ones[..len], shape).unwrap()
    };
    let weights = TensorRef::from_slice::<f32>(&weights, [1, latent, columns]).unwrap();
    let call = LayerCall::new(
        Weights::from_transposed(weights, layer.config()).unwrap(),
        view([tokens, HEADS, qk]),
        [view([tokens, 1, latent]), view([tokens, 1, rope])],
        CacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout).unwrap(),
        TensorMut::from_slice(&mut out, [tokens, HEADS, v]).unwrap(),
    );
    layer.forward(workspace, call).unwrap();
    assert!(out.iter().all(|value| value.is_finite()));
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(3000)
    })]

    #[test]
    fn steps_are_what_the_model_says(case in cases()) {
        let pages = case.pages();
        let (step, padding) = planned(&case, &pages);
        check_places(&case, &pages, &step, padding);

        let config = LayerConfig::new(case.problem(), 0.5);
        let layer = Layer::of(&Cpu::new(), &config).unwrap();
        let mut workspace = layer.workspace(&case.limits()).unwrap();
        workspace.prepare(&layer, &step).unwrap();
        check_prepared(&case, &step, padding, &workspace);
        forward(&case, &pages, &layer, &mut workspace);
    }
}
