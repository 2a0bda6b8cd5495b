//! Mistakes of engines between steps: workspaces of other layers, outdated plans, pages that two
//! requests share, and requests that have ended.

use std::sync::Arc;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Result;
use mla_runtime::backend::{LayerConfig, SlotLists, StepLimits};
use mla_runtime::device::Device;
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims};
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{
    ArrayRef, CacheLayout, CacheMut, CacheRef, Memory, TensorMut, TensorRef,
};

use crate::refusals::{Refused, refused};
use crate::setup::{DIMS, HEADS, PAGE, PAGES, number};

type Layer = MlaLayer<CpuPrefill, CpuDecode>;

/// The outputs of a case, and the expected ones.
type Outputs = [Vec<f32>; 2];

/// A name, and the calls of the case.
type Case = (&'static str, fn() -> Result<Outputs>);

/// Lists right cases. Each row has a name, the outputs of the case, and the expected outputs.
macro_rules! right {
    ($($name:literal, $given:expr, $wanted:expr;)*) => {
        pub(crate) const RIGHT: &[Case] = &[$(($name, || Ok([$given, $wanted]))),*];
    };
}

pub(crate) fn refused() -> Refused {
    refused! {
        // Workspaces.
        "steps: a workspace for more heads", foreign_workspace(|problem| problem.heads = 4);
        "steps: a workspace for another dtype", foreign_workspace(|problem| {
            problem.dtype = DType::F16;
            problem.kv_format = KvFormat::F16;
        });
        "steps: a workspace for another latent",
            foreign_workspace(|problem| problem.dims.latent = 64);
        "steps: a workspace for heads that split otherwise",
            foreign_workspace(|problem| problem.dims.head = HeadDims::new(8, 16, 16));
        "steps: a workspace for sparse attention",
            foreign_workspace(|problem| problem.sparse = true);
        "steps: prepared by a layer of another problem", {
            let mut lab = Lab::new();
            let step = lab.plan(&TWO)?;
            let problem = config().problem.with_page_size(8);
            let other = Lab::of(config().with_problem(problem), LIMITS)?;
            lab.workspace.prepare(&other.layer, &step)
        };
        // Weights.
        "steps: weights for twice the heads, half as wide",
            weights_of(MlaDims::new(32, HeadDims::new(8, 8, 8)), 4);
        "steps: weights for keys as wide as values should be",
            weights_of(MlaDims::new(32, HeadDims::new(24, 8, 8)), HEADS as u32);
        // Plans.
        "steps: planned for more requests than there is room for",
            planned_within(&LIMITS.with_requests(9), &[StepRequest::new(0, 0, &[]); 5]);
        "steps: planned for more tokens than there is room for",
            planned_within(&LIMITS.with_tokens(30), &[StepRequest::new(9, 9, &[0, 1, 2])]);
        "steps: planned for longer requests than there is room for", planned_within(
            &LIMITS.with_pages_per_request(5),
            &[StepRequest::new(1, 17, &[0, 1, 2, 3, 4])],
        );
        "steps: planned for other pages", {
            let problem = config().problem.with_page_size(8);
            let step = StepPlan::within(&problem, &LIMITS, 1, &[StepRequest::new(1, 6, &[0])])?;
            Lab::new().prepare(&step)
        };
        "steps: a request cancelled between plan and call", Lab::prepared(&TWO)?.call(1);
        "steps: a request that came between plan and call", Lab::prepared(&TWO[..1])?.call(6);
        "steps: padded beyond the limit", Lab::new().plan(&TWO)?.padded_to(5);
        "steps: padded to all that a host counts", Lab::new().plan(&TWO)?.padded_to(usize::MAX);
        "steps: padded to fewer than it has", Lab::new().plan(&TWO)?.padded_to(1);
        "steps: padding for prompts alone", Lab::new().plan(&TWO[1..])?.padded_to(3);
        "steps: padding without requests", Lab::new().plan(&[])?.padded_to(2);
        // Requests and their pages.
        "steps: one request twice", Lab::new().run(&[TWO[0], TWO[0]], 2);
        "steps: a fork without a copy",
            Lab::new().run(&[StepRequest::new(1, 6, &[3, 1]), StepRequest::new(1, 7, &[3, 1])], 2);
        "steps: new tokens over the request's own beginning",
            Lab::new().run(&[StepRequest::new(1, 6, &[3, 3])], 1);
        "steps: new tokens over the middle of another",
            Lab::new().run(&[TWO[0], StepRequest::new(1, 11, &[1, 4, 2])], 2);
        "steps: cached tokens in no pages", Lab::new().run(&[StepRequest::new(0, 5, &[])], 0);
        "steps: more new tokens than tokens",
            Lab::new().run(&[StepRequest::new(u32::MAX, 1, &[0])], 1);
        // Two decodes with the same slot, planned without reordering. `prepare` refuses them,
        // before any call.
        "steps: two requests in one slot", {
            let two = [StepRequest::new(1, 6, &[3, 1]), StepRequest::new(1, 6, &[4, 1])];
            let step = StepPlan::in_order(&config().problem, &LIMITS, 1, 0, &two)?;
            Lab::new().prepare(&step)
        };
        // Limits and memory.
        "steps: limits of all that a host counts", {
            let max = usize::MAX;
            let limits = StepLimits::new(max, max, max).with_context_rows(max);
            Lab::of(config(), limits.with_decode_query_len(max))
        };
        // The limit on new tokens refuses this step, although the limit on query lengths allows it.
        "steps: decodes longer than all that a host counts",
            Lab::of(config(), LIMITS.with_decode_query_len(usize::MAX))?
                .run(&[StepRequest::new(9, 9, &[0, 1, 2])], 9);
        "steps: memory of all that a host counts", Cpu::new().allocate(usize::MAX);
        "steps: memory of half of that", Cpu::new().allocate(isize::MAX as usize - 63);
        "steps: a cache of all pages that a host counts", {
            let layout = CacheLayout::contiguous(DIMS, KvFormat::F32, usize::MAX, PAGE);
            CacheMut::<Cpu>::new(&mut [0; 640], layout).map(drop)
        };
        // Copies of pages.
        "steps: a copy of a page past the cache", Lab::new().copy(PAGES, 0);
        "steps: a copy to a page past the cache", Lab::new().copy(0, PAGES);
        "steps: a copy of the last page that a host counts", Lab::new().copy(usize::MAX, 1);
        "steps: a copy of rows of an odd number of bytes", {
            let dims = MlaDims::new(33, HeadDims::new(16, 8, 16));
            let layout = CacheLayout::contiguous(dims, KvFormat::Fp8, 2, 4);
            let mut bytes = vec![0; 2 * layout.page_stride];
            Cpu::new().copy_page(CacheMut::new(&mut bytes[..], layout)?, 0, 1)
        };
        // Sinks and second caches.
        "steps: a sink too few", sinks(&TWO[..1], 1, &[0.5]);
        "steps: a sink too many", sinks(&TWO[..1], 1, &[0.5; 3]);
        "steps: a sink too many of a prompt", sinks(&TWO, 6, &[0.5; 3]);
        "steps: a second cache of other rows",
            second(MlaDims::new(24, HeadDims::new(16, 8, 16)), 4);
        "steps: a second cache with too few entries", second(DIMS, 3);
        "steps: a second cache with lists of more tokens", second(DIMS, 8);
        // Parts of a call.
        "steps: a part of a call without a step", Lab::new().parts(6, [0, 1, 2]);
    }
}

right! {
    "steps: a workspace of another layer of the problem",
        Lab::new().with_workspace(Lab::new().workspace).run(&TWO, 6)?, two()?;
    "steps: a workspace of a layer with another scale", {
        let other = Lab::of(LayerConfig::new(config().problem, 3.0), LIMITS)?;
        Lab::new().with_workspace(other.workspace).run(&TWO, 6)?
    }, two()?;
    "steps: a workspace of another handle of the device", {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let device = Cpu::with_pool(Arc::new(pool.expect("a thread")));
        let workspace = Layer::of(&device, &config())?.workspace(&LIMITS)?;
        Lab::new().with_workspace(workspace).run(&TWO, 6)?
    }, two()?;
    "steps: weights made with another scale", {
        let mut lab = Lab::new();
        lab.weights = LayerConfig::new(config().problem, 7.0);
        lab.run(&TWO, 6)?
    }, two()?;
    "steps: planned with more room for drafts", {
        let limits = LIMITS.with_decode_query_len(4);
        let step = StepPlan::within(&config().problem, &limits, 4, &TWO)?;
        let mut lab = Lab::new();
        lab.prepare(&step)?;
        lab.call(6)?
    }, two()?;
    "steps: planned before another was prepared", {
        let mut lab = Lab::new();
        let (first, second) = (lab.plan(&TWO)?, lab.plan(&TWO[..1])?);
        lab.prepare(&second)?;
        lab.prepare(&first)?;
        lab.call(6)?
    }, two()?;
    "steps: one step, called twice", {
        let mut lab = Lab::prepared(&TWO)?;
        lab.call(6)?;
        lab.call(6)?
    }, two()?;
    "steps: a plan that was refused behind a step", {
        let mut lab = Lab::prepared(&TWO)?;
        assert!(lab.plan(&[TWO[0], TWO[0]]).is_err());
        lab.call(6)?
    }, two()?;
    // The two rows of padding come after the decode.
    "steps: padded", {
        let mut lab = Lab::new();
        let step = lab.plan(&TWO)?.padded_to(4)?;
        lab.prepare(&step)?;
        let (given, row) = (lab.call(8)?, HEADS * 16);
        [&given[..row], &given[3 * row..]].concat()
    }, Lab::new().with_rows(&[0, 3, 4, 5, 6, 7]).run(&TWO, 6)?;
    "steps: no request", Lab::new().run(&[], 0)?, Vec::new();
    "steps: no request with new tokens",
        Lab::new().run(&[StepRequest::new(0, 5, &[3, 1]), StepRequest::new(0, 0, &[])], 0)?,
        Vec::new();
    "steps: a cancelled request that is still listed",
        Lab::new().run(&[TWO[0], StepRequest::new(0, 0, &[]), TWO[1]], 6)?, two()?;
    "steps: more pages than a request needs", {
        let pages = [3, 1, i32::MIN, i32::MAX, 0, 0, 0, 0, 0];
        Lab::new().run(&[StepRequest::new(1, 6, &pages), TWO[1]], 6)?
    }, two()?;
    // The decode comes before the prompt.
    "steps: a prefix that another writes in this step",
        Lab::new().run(&[StepRequest::new(4, 4, &[2]), StepRequest::new(1, 6, &[2, 1])], 5)?,
        {
            let mut lab = Lab::new().with_rows(&[1, 2, 3, 4]);
            let alone = lab.run(&[StepRequest::new(4, 4, &[2])], 4)?;
            let first = lab.with_rows(&[0]).run(&[StepRequest::new(1, 6, &[2, 1])], 1)?;
            [first, alone].concat()
        };
    "steps: room for nothing", {
        Lab::of(config(), StepLimits::new(0, 0, 0))?.run(&[], 0)?
    }, Vec::new();
    "steps: memory of no bytes", vec![Cpu::new().allocate(0)?.len() as f32], vec![0.0];
    "steps: parts of a call in another order", Lab::prepared(&TWO)?.parts(6, [0, 2, 1])?, two()?;
    "steps: a page copied onto itself", {
        let mut lab = Lab::new();
        lab.copy(3, 3)?;
        lab.run(&TWO, 6)?
    }, two()?;
    "steps: a fork with a copy", {
        let mut lab = Lab::new();
        lab.copy(1, 5)?;
        lab.copy(5, 0)?;
        lab.run(&[StepRequest::new(1, 6, &[3, 0])], 1)?
    }, Lab::new().run(&TWO[..1], 1)?;
    "steps: counts of lists beyond every width", listed(Some(&[i32::MAX]))?, listed(None)?;
    "steps: negative counts of lists", listed(Some(&[i32::MIN]))?, vec![0.0; HEADS * 16];
}

/// A decode after five tokens, and five new tokens after four.
const TWO: [StepRequest<'static>; 2] = [
    StepRequest::new(1, 6, &[3, 1]),
    StepRequest::new(5, 9, &[0, 4, 2]),
];

const LIMITS: StepLimits = StepLimits::new(4, 8, 3)
    .with_decode_query_len(2)
    .with_context_rows(8);

fn config() -> LayerConfig {
    let problem = Problem::new(DIMS, HEADS as u32, DType::F32)
        .with_page_size(PAGE as u32)
        .with_query_len(QueryLen::Ragged);
    LayerConfig::new(problem, 0.2)
}

fn two() -> Result<Vec<f32>> {
    Lab::new().run(&TWO, 6)
}

/// Optional inputs that few calls have.
#[derive(Default)]
struct Extras<'a> {
    sinks: Option<&'a [f32]>,
    lists: Option<SlotLists<'a, Cpu>>,
}

/// A layer, its workspace, and a cache.
struct Lab {
    layer: Layer,
    workspace: Workspace<CpuPrefill, CpuDecode>,
    cache: Vec<f32>,
    /// The configuration for which the weights are made.
    weights: LayerConfig,
    /// The row numbers from which the tensors' values are made.
    rows: Vec<usize>,
}

impl Lab {
    fn new() -> Self {
        Self::of(config(), LIMITS).expect("the limits are right")
    }

    fn of(config: LayerConfig, limits: StepLimits) -> Result<Self> {
        let layer = Layer::of(&Cpu::new(), &config)?;
        let width = config.problem.dims.row() as usize;
        Ok(Self {
            workspace: layer.workspace(&limits)?,
            layer,
            cache: numbers(9, [PAGES * PAGE, 1, width]),
            weights: config,
            rows: (0..16).collect(),
        })
    }

    /// Returns the same lab with tensors made from these row numbers.
    fn with_rows(mut self, rows: &[usize]) -> Self {
        self.rows = rows.to_vec();
        self
    }

    fn with_workspace(mut self, workspace: Workspace<CpuPrefill, CpuDecode>) -> Self {
        self.workspace = workspace;
        self
    }

    /// Returns a lab with a step prepared for these requests.
    fn prepared(requests: &[StepRequest<'_>]) -> Result<Self> {
        let mut lab = Self::new();
        let step = lab.plan(requests)?;
        lab.prepare(&step)?;
        Ok(lab)
    }

    fn plan(&self, requests: &[StepRequest<'_>]) -> Result<StepPlan> {
        StepPlan::new(&self.workspace, requests)
    }

    fn prepare(&mut self, step: &StepPlan) -> Result<()> {
        self.workspace.prepare(&self.layer, step)
    }

    fn run(&mut self, requests: &[StepRequest<'_>], tokens: usize) -> Result<Vec<f32>> {
        let step = self.plan(requests)?;
        self.prepare(&step)?;
        self.call(tokens)
    }

    fn call(&mut self, tokens: usize) -> Result<Vec<f32>> {
        self.call_with(tokens, Extras::default())
    }

    fn call_with(&mut self, tokens: usize, extras: Extras<'_>) -> Result<Vec<f32>> {
        self.with_call(tokens, extras, |layer, workspace, call| {
            layer.forward(workspace, call)
        })
    }

    /// Runs the parts of a call in this order. The parts are the cache write, the absorbed path and
    /// the expanded path.
    fn parts(&mut self, tokens: usize, order: [usize; 3]) -> Result<Vec<f32>> {
        self.with_call(tokens, Extras::default(), |layer, workspace, mut call| {
            order.into_iter().try_for_each(|part| match part {
                0 => layer.write_cache(workspace, &mut call),
                1 => layer.attend_absorbed(workspace, &mut call),
                _ => layer.attend_expanded(workspace, &mut call),
            })
        })
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<()> {
        let bytes = bytemuck::cast_slice_mut(&mut self.cache);
        let cache = CacheMut::new(bytes, layout())?;
        self.layer.device().copy_page(cache, from, to)
    }

    fn rows_of(&self, tensor: u32, [tokens, heads, width]: [usize; 3]) -> Vec<f32> {
        let all = numbers(tensor, [16, heads, width]);
        let rows = self.rows.iter().take(tokens);
        rows.flat_map(|row| &all[row * heads * width..][..heads * width])
            .copied()
            .collect()
    }

    /// Calls `run` with a call of `tokens` tokens. A refused call must not change the cache or the
    /// output.
    fn with_call(
        &mut self,
        tokens: usize,
        extras: Extras<'_>,
        run: impl FnOnce(
            &Layer,
            &mut Workspace<CpuPrefill, CpuDecode>,
            LayerCall<'_, Cpu>,
        ) -> Result<()>,
    ) -> Result<Vec<f32>> {
        let [query, latent, rope] =
            [(0, HEADS, 24), (1, 1, 32), (2, 1, 8)].map(|(tensor, heads, width)| {
                (
                    self.rows_of(tensor, [tokens, heads, width]),
                    [tokens, heads, width],
                )
            });
        let problem = self.weights.problem;
        let kv_b = [1, 32, (problem.heads * problem.dims.head.kv_b()) as usize];
        let weights = numbers(3, kv_b);
        let before = self.cache.clone();
        let mut out = vec![f32::NAN; tokens * HEADS * 16];
        let result = (|| {
            let call = LayerCall::new(
                Weights::from_transposed(TensorRef::from_slice(&weights, kv_b)?, &self.weights)?,
                TensorRef::from_slice(&query.0, query.1)?,
                [
                    TensorRef::from_slice(&latent.0, latent.1)?,
                    TensorRef::from_slice(&rope.0, rope.1)?,
                ],
                CacheMut::new(bytemuck::cast_slice_mut(&mut self.cache), layout())?,
                TensorMut::from_slice(&mut out, [tokens, HEADS, 16])?,
            );
            let call = call
                .with_sinks(extras.sinks.map(ArrayRef::from_slice))
                .with_slot_lists(extras.lists.as_ref().map(SlotLists::shorten));
            run(&self.layer, &mut self.workspace, call)
        })();
        if result.is_err() {
            let is_untouched = self.cache == before && out.iter().all(|value| value.is_nan());
            assert!(is_untouched, "refused after something was written");
        }
        result.map(|()| out)
    }
}

fn layout() -> CacheLayout {
    CacheLayout::contiguous(DIMS, KvFormat::F32, PAGES, PAGE)
}

fn numbers(tensor: u32, [rows, heads, width]: [usize; 3]) -> Vec<f32> {
    let places = (0..rows).flat_map(|i| (0..heads).map(move |j| (i, j)));
    let places = places.flat_map(|(i, j)| (0..width).map(move |k| (i, j, k)));
    places.map(|(i, j, k)| number(tensor, i, j, k)).collect()
}

fn foreign_workspace(change: fn(&mut Problem)) -> Result<Vec<f32>> {
    let mut problem = config().problem;
    change(&mut problem);
    let lab = Lab::prepared(&TWO[..1])?;
    let mut other = Lab::of(config().with_problem(problem), LIMITS).expect("a layer of its own");
    // The step is planned and prepared for a layer of another problem.
    let step = other.plan(&TWO[..1])?;
    other.prepare(&step)?;
    lab.with_workspace(other.workspace).call(1)
}

fn weights_of(dims: MlaDims, heads: u32) -> Result<Vec<f32>> {
    let mut lab = Lab::new();
    lab.weights = config().with_problem(config().problem.with_dims(dims).with_heads(heads));
    lab.run(&TWO, 6)
}

/// Prepares a step that was planned within other limits than those of the workspace.
fn planned_within(limits: &StepLimits, requests: &[StepRequest<'_>]) -> Result<()> {
    let step =
        StepPlan::within(&config().problem, limits, 1, requests).expect("it fits those limits");
    Lab::new().prepare(&step)
}

fn sinks(requests: &[StepRequest<'_>], tokens: usize, sinks: &[f32]) -> Result<Vec<f32>> {
    let sinks = Some(sinks);
    Lab::prepared(requests)?.call_with(tokens, Extras { sinks, lists: None })
}

/// Runs a sparse decode with lists of two caches. The rows of the second one have the widths of
/// `dims`, and its lists have `entries` entries.
fn second(dims: MlaDims, entries: usize) -> Result<Vec<f32>> {
    let other = CacheLayout::contiguous(dims, KvFormat::F32, PAGES, PAGE);
    let (bytes, list) = (vec![0; PAGES * other.page_stride], vec![0; entries]);
    let second = (
        CacheRef::new(&bytes[..], other)?,
        ArrayRef::from_slice(&list),
        4,
    );
    sparse(|lists| lists.with_second(second))
}

/// Runs a sparse decode with these counts.
fn listed(counts: Option<&[i32]>) -> Result<Vec<f32>> {
    sparse(|lists| lists.with_counts(counts.map(ArrayRef::from_slice)))
}

fn sparse<'a>(change: impl FnOnce(SlotLists<'a, Cpu>) -> SlotLists<'a, Cpu>) -> Result<Vec<f32>> {
    const SLOTS: &[i32] = &[12, 4, 5, 13];
    let mut lab = Lab::of(
        config().with_problem(config().problem.with_sparse(true)),
        LIMITS,
    )?;
    let step = lab.plan(&TWO[..1])?;
    lab.prepare(&step)?;
    let lists = Some(change(SlotLists::new(ArrayRef::from_slice(SLOTS), 4)));
    lab.call_with(1, Extras { sinks: None, lists })
}
