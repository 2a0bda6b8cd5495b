//! A batch with its cache, weights and queries. It is made from a seed, run through a layer, and
//! compared with the oracle.

use mla_cpu::Cpu;
use mla_runtime::Result;
use mla_runtime::backend::{DecodeStage, PrefillStage, SlotLists, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::device::Device;
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims, QueryScaling};
use mla_runtime::plan::split;
use mla_runtime::spec::QueryLen;
use mla_runtime::tensor::{
    ArrayRef, CacheLayout, CacheMut, CacheRef, Layout, LseLayout, LseMut, RotaryTables, TensorMut,
    TensorRef,
};

pub(crate) use crate::case::Case;
use crate::case::Places;
use crate::oracle;

/// The byte of memory that nothing has written. In every format a value of such bytes is NaN.
pub(crate) const UNTOUCHED: u8 = 0xff;

fn is_dense(case: &Case, request: &Request) -> bool {
    !case.sparse || (case.dense_within > 0 && request.kv <= case.dense_within)
}

/// A cache as the layer gets it.
struct Tensors {
    layout: CacheLayout,
    rows: Vec<u8>,
    /// Rotary keys, if they are in a separate tensor.
    rope: Option<Vec<u8>>,
}

impl Tensors {
    /// Rows without gaps, in one tensor or in two.
    fn new(rows: &[u8], layout: CacheLayout, split: bool) -> Self {
        if !split {
            return Self {
                layout,
                rows: rows.to_vec(),
                rope: None,
            };
        }
        let two = CacheLayout::split(layout.dims, layout.format, layout.pages, layout.page_size);
        let (mut latents, mut keys) = (Vec::new(), Vec::new());
        for row in rows.chunks_exact(layout.row_stride) {
            let (latent, key) = row.split_at(two.row_stride);
            latents.extend(latent);
            keys.extend(key);
        }
        Self {
            layout: two.with_scale(layout.scale),
            rows: latents,
            rope: Some(keys),
        }
    }

    fn view(&self) -> CacheRef<'_, Cpu> {
        match &self.rope {
            Some(rope) => CacheRef::split(&self.rows[..], &rope[..], self.layout).unwrap(),
            None => CacheRef::new(&self.rows[..], self.layout).unwrap(),
        }
    }

    fn view_mut(&mut self) -> CacheMut<'_, Cpu> {
        match &mut self.rope {
            Some(rope) => CacheMut::split(&mut self.rows[..], &mut rope[..], self.layout).unwrap(),
            None => CacheMut::new(&mut self.rows[..], self.layout).unwrap(),
        }
    }

    /// Returns the rows in one tensor with the layout `layout`.
    fn rows(self, layout: CacheLayout) -> Vec<u8> {
        let Some(keys) = self.rope else {
            return self.rows;
        };
        let latents = self.rows.chunks_exact(self.layout.row_stride);
        let keys = keys.chunks_exact(layout.row_stride - self.layout.row_stride);
        latents
            .zip(keys)
            .flat_map(|(latent, key)| [latent, key].concat())
            .collect()
    }
}

/// Pseudorandom numbers from a seed.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    // SplitMix64.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number with uniform distribution from −`max` to `max`.
    fn uniform(&mut self, max: f64) -> f64 {
        ((self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0) * max
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// All indices of a shape, row by row.
pub(crate) fn indices([a, b, c]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    (0..a * b * c).map(move |at| [at / (b * c), at / c % b, at % c])
}

/// Moves rows of `bytes` bytes each to their places in a tensor of `rows` rows.
pub(crate) fn spread(packed: &[u8], bytes: usize, places: &[usize], rows: usize) -> Vec<u8> {
    let mut spread = vec![UNTOUCHED; rows * bytes];
    for (from, &place) in packed.chunks(bytes.max(1)).zip(places) {
        spread[place * bytes..][..bytes].copy_from_slice(from);
    }
    spread
}

/// A tensor, and its values after rounding.
pub(crate) struct Owned {
    bytes: Vec<u8>,
    layout: Layout,
    pub(crate) values: Vec<f64>,
}

impl Owned {
    pub(crate) fn new(
        dtype: DType,
        shape: [usize; 3],
        mut value: impl FnMut([usize; 3]) -> f64,
    ) -> Self {
        let layout = Layout::contiguous(dtype, shape);
        let mut bytes = vec![0; layout.elements() * dtype.bytes()];
        let mut view = TensorMut::<Cpu>::new(&mut bytes[..], layout).unwrap();
        indices(shape).for_each(|index| view.set(index, value(index) as f32));
        Self {
            values: floats(dtype, &bytes),
            bytes,
            layout,
        }
    }

    pub(crate) fn set(&mut self, index: [usize; 3], value: f64) {
        let at = |axis: usize| index[axis] * self.layout.strides[axis];
        self.values[at(0) + at(1) + at(2)] = value;
        TensorMut::<Cpu>::new(&mut self.bytes[..], self.layout)
            .unwrap()
            .set(index, value as f32);
    }

    pub(crate) fn view(&self) -> TensorRef<'_, Cpu> {
        TensorRef::new(&self.bytes[..], self.layout).unwrap()
    }
}

pub(crate) fn floats(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    // The values form a single row.
    let width = (bytes.len() / dtype.bytes()) as u32;
    let dims = MlaDims::new(width, HeadDims::new(1, 0, 1));
    oracle::row(KvFormat::of(dtype), dims, 1.0, bytes)
}

/// The results of a run.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Outcome {
    /// The bytes of the output, `[T, H, V]`.
    pub(crate) out: Vec<u8>,
    /// The bytes of the log-sum-exp, `[H, T]`.
    pub(crate) lse: Vec<u8>,
    /// The bytes of the cache.
    pub(crate) cache: Vec<u8>,
    pub(crate) absorbed_tokens: usize,
    pub(crate) chunks: usize,
}

pub(crate) struct World {
    pub(crate) case: Case,
    /// The requests in the order of the batch.
    pub(crate) requests: Vec<Request>,
    pub(crate) tables: Vec<i32>,
    pub(crate) max_pages: usize,
    pub(crate) slots: Vec<i64>,
    pub(crate) query: Owned,
    pub(crate) latent: Owned,
    pub(crate) rope: Owned,
    pub(crate) weights: Owned,
    pub(crate) cache_layout: CacheLayout,
    pub(crate) cache: Vec<u8>,
    /// A sink for each head.
    pub(crate) sinks: Option<Vec<f32>>,
    /// A gate of outputs, with a value for each head or for each element.
    pub(crate) gate: Option<Owned>,
    /// True if every other listed row of the context is read from a second cache with the same
    /// contents.
    pub(crate) two_caches: bool,
}

impl World {
    /// A batch of the case. The planner has ordered its requests, and its pages are shuffled over a
    /// cache with more pages than needed. Slots that hold no context are NaN, and entries of the
    /// block tables that no token needs are garbage.
    pub(crate) fn new(case: &Case) -> Self {
        let mut numbers = Numbers::new(case.seed);
        let dims = case.dims;
        let uniform = case.query_len != QueryLen::Ragged;
        let threshold = match case.query_len {
            QueryLen::Single => case.threshold.min(1),
            _ => case.threshold,
        };
        let threshold = |request: &Request| match is_dense(case, request) || case.dense_within == 0
        {
            true => threshold,
            false => u32::MAX,
        };
        let given: Vec<Request> = case
            .requests
            .iter()
            .map(|&(q, kv)| Request::new(q, kv))
            .collect();
        let order = split::order(&given, threshold, uniform).unwrap();
        let requests: Vec<Request> = order.iter().map(|&at| given[at]).collect();

        let page = case.page_size;
        let Places {
            tables,
            max_pages,
            pages,
            slots,
            context: context_slots,
        } = Places::new(&requests, page, |pages| numbers.shuffle(pages));
        let tokens = slots.len();
        let (heads, latent, rope) = (
            case.heads as usize,
            dims.latent as usize,
            dims.head.rope as usize,
        );
        let columns = heads * dims.head.kv_b() as usize;
        let dtype = case.dtype;
        let mut random = |shape, max| Owned::new(dtype, shape, |_| numbers.uniform(max));
        let query = random([tokens, heads, dims.head.qk() as usize], 2.0);
        let new_latent = random([tokens, 1, latent], 1.7);
        let new_rope = random([tokens, 1, rope], 1.7);
        // Keys and values then have about the magnitude of the latents they are made from.
        let spread = (3.0 / latent as f64).sqrt();
        let weights = match case.transposed_weights {
            true => random([1, columns, latent], spread),
            false => random([1, latent, columns], spread),
        };
        let context = context_slots.len();
        let context_latent = random([context, 1, latent], 1.7);
        let context_rope = random([context, 1, rope], 1.7);

        let cache_layout = CacheLayout::contiguous(dims, case.kv_format, pages, page as usize)
            .with_scale(if case.kv_format == KvFormat::Fp8 {
                0.01
            } else {
                1.0
            });
        let mut cache = vec![UNTOUCHED; cache_layout.slots() * cache_layout.row_stride];
        if context > 0 {
            Cpu::new()
                .write_cache(
                    context_latent.view(),
                    context_rope.view(),
                    ArrayRef::from_slice(&context_slots),
                    CacheMut::new(&mut cache[..], cache_layout).unwrap(),
                )
                .unwrap();
        }
        Self {
            case: case.clone(),
            requests,
            tables,
            max_pages,
            slots,
            query,
            latent: new_latent,
            rope: new_rope,
            weights,
            cache_layout,
            cache,
            sinks: None,
            gate: None,
            two_caches: false,
        }
    }

    /// Adds a gate of outputs, with `width` values for each token and head.
    pub(crate) fn set_gate(&mut self, width: usize) {
        let shape = [self.slots.len(), self.case.heads as usize, width];
        let mut numbers = Numbers::new(self.case.seed + 100);
        self.gate = Some(Owned::new(self.case.dtype, shape, |_| numbers.uniform(3.0)));
    }

    pub(crate) fn list_width(&self) -> usize {
        let longest = self.requests.iter().map(|r| r.kv).max().unwrap_or(0);
        longest as usize + 2
    }

    /// For each token the positions that its list names. In a sparse case these are every other
    /// position, counted back from the token's own.
    fn attended(&self, request: &Request, own: u32) -> Vec<u32> {
        let visible = match request.kv {
            kv if kv == 0 || !self.case.causal => kv,
            kv => kv - request.q + own + 1,
        };
        let every = if is_dense(&self.case, request) { 1 } else { 2 };
        let mut positions: Vec<u32> = (0..visible).rev().step_by(every).collect();
        positions.reverse();
        positions
    }

    /// The slots of these positions, out of order, with entries in between that must be skipped.
    pub(crate) fn lists(&self) -> Vec<i32> {
        let mut numbers = Numbers::new(self.case.seed);
        let (page, width) = (self.case.page_size, self.list_width());
        let mut lists = Vec::new();
        let tables = self.tables.chunks(self.max_pages.max(1));
        for (request, table) in self.requests.iter().zip(tables) {
            for own in 0..request.q {
                let slot = |position: u32| {
                    table[(position / page) as usize] * page as i32 + (position % page) as i32
                };
                let mut list: Vec<i32> = match is_dense(&self.case, request) {
                    // This list is not read.
                    true => Vec::new(),
                    false => self.attended(request, own).into_iter().map(slot).collect(),
                };
                list.resize_with(width, || match numbers.next() % 2 {
                    0 => -1,
                    _ => i32::MAX,
                });
                numbers.shuffle(&mut list);
                lists.extend(list);
            }
        }
        lists
    }

    /// Makes this batch a step in which each request of `whole` adds its token number `step`. The
    /// cache holds the earlier tokens. All requests have equal length.
    pub(crate) fn step_of(&mut self, whole: &World, step: u32) {
        let count = whole.requests.len();
        let len = whole.requests[0].q as usize;
        let pick = |owned: &Owned| {
            let [_, heads, width] = owned.layout.shape;
            Owned::new(
                owned.layout.dtype,
                [count, heads, width],
                |[request, head, column]| {
                    let token = request * len + step as usize;
                    owned.values[(token * heads + head) * width + column]
                },
            )
        };
        self.query = pick(&whole.query);
        self.latent = pick(&whole.latent);
        self.rope = pick(&whole.rope);
        self.requests = vec![Request::new(1, step + 1); count];
        self.slots = (0..count)
            .map(|request| whole.slots[request * len + step as usize])
            .collect();
    }

    /// Plans the batch as a step within `limits`. The slots are those of its pages.
    pub(crate) fn plan(&self, limits: &StepLimits) -> Result<StepPlan> {
        self.plan_pages(limits, &self.tables)
    }

    /// The same plan, with pages in another integer type.
    pub(crate) fn plan_pages<T: Copy + std::fmt::Display + TryInto<i64>>(
        &self,
        limits: &StepLimits,
        tables: &[T],
    ) -> Result<StepPlan> {
        let tables = tables.chunks(self.max_pages);
        let requests: Vec<StepRequest<'_, T>> = self
            .requests
            .iter()
            .zip(tables)
            .map(|(request, pages)| StepRequest::new(request.q, request.kv, pages))
            .collect();
        let (problem, case) = (self.case.config().problem, &self.case);
        let plan = StepPlan::in_order(
            &problem,
            limits,
            case.threshold,
            case.dense_within,
            &requests,
        )?;
        Ok(plan.with_causal(case.causal))
    }

    pub(crate) fn prepare<P: PrefillStage<Device = Cpu>, D: DecodeStage<Device = Cpu>>(
        &self,
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
    ) -> Result<()> {
        let plan = self.plan(workspace.limits())?.with_slots(&self.slots)?;
        workspace.prepare(layer, &plan)
    }

    /// A workspace in which the batch is prepared.
    pub(crate) fn prepared<P: PrefillStage<Device = Cpu>, D: DecodeStage<Device = Cpu>>(
        &self,
        layer: &MlaLayer<P, D>,
    ) -> Workspace<P, D> {
        let mut workspace = layer.workspace(&self.case.limits()).unwrap();
        self.prepare(layer, &mut workspace).unwrap();
        workspace
    }

    /// `W_kv_b` in the orientation of the case.
    pub(crate) fn weights(&self) -> Result<Weights<'_, Cpu>> {
        let config = self.case.config();
        match self.case.transposed_weights {
            true => Weights::from_checkpoint(self.weights.view(), &config),
            false => Weights::from_transposed(self.weights.view(), &config),
        }
    }

    pub(crate) fn run<P: PrefillStage<Device = Cpu>, D: DecodeStage<Device = Cpu>>(
        &self,
        layer: &MlaLayer<P, D>,
    ) -> Outcome {
        let mut workspace = self.prepared(layer);
        self.forward(layer, &mut workspace, true).unwrap()
    }

    /// Runs a prepared step on packed tensors, and on a copy of the cache.
    pub(crate) fn forward<P: PrefillStage<Device = Cpu>, D: DecodeStage<Device = Cpu>>(
        &self,
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
        with_lse: bool,
    ) -> Result<Outcome> {
        let places: Vec<usize> = (0..self.slots.len()).collect();
        let rows = (&places[..], places.len());
        self.call(layer, workspace, rows, with_lse, self.weights()?, None)
    }

    /// Runs a prepared step with the row of each token, among this number of rows. All other rows
    /// are NaN. With tables, the tensors are not rotated yet.
    pub(crate) fn call<P: PrefillStage<Device = Cpu>, D: DecodeStage<Device = Cpu>>(
        &self,
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
        (places, rows): (&[usize], usize),
        with_lse: bool,
        weights: Weights<'_, Cpu>,
        tables: Option<&RotaryTables<Cpu>>,
    ) -> Result<Outcome> {
        let own = |owned: &Owned| {
            let Layout { dtype, shape, .. } = owned.layout;
            let [_, heads, width] = shape;
            let bytes = spread(&owned.bytes, heads * width * dtype.bytes(), places, rows);
            (bytes, Layout::contiguous(dtype, [rows, heads, width]))
        };
        let [
            (mut query, of_query),
            (latent, of_latent),
            (mut rope, of_rope),
        ] = [&self.query, &self.latent, &self.rope].map(own);
        let (heads, v) = (self.case.heads as usize, self.case.dims.head.v as usize);
        let layout = Layout::contiguous(self.case.dtype, [rows, heads, v]);
        let mut out = vec![UNTOUCHED; layout.elements() * layout.dtype.bytes()];
        let mut lse = vec![UNTOUCHED; 4 * heads * rows];
        let mut cache = Tensors::new(&self.cache, self.cache_layout, self.case.split_cache);
        let second_cache = Tensors::new(&self.cache, self.cache_layout, self.case.split_cache);
        // The lists are in the order of the step.
        let (mut lists, width) = (self.lists(), self.list_width());
        let mut others = vec![-1; lists.len()];
        let second = self.two_caches.then(|| {
            for (own, other) in lists.iter_mut().zip(&mut others).step_by(2) {
                // The row of a new token is only in the first cache.
                if !self.slots.contains(&i64::from(*own)) {
                    std::mem::swap(own, other);
                }
            }
            (second_cache.view(), ArrayRef::from_slice(&others), width)
        });
        let lists = SlotLists::new(ArrayRef::from_slice(&lists), width).with_second(second);
        let lists = self.case.sparse.then_some(lists);
        let wanted = match with_lse {
            true => Some(LseMut::new(
                &mut lse[..],
                LseLayout::heads_first(heads, rows),
            )?),
            false => None,
        };
        let sinks = self.sinks.as_deref().map(ArrayRef::from_slice);
        let gate = self.gate.as_ref().map(Owned::view);
        let (weights, to) = (weights.shorten(), TensorMut::new(&mut out[..], layout)?);
        let latent = TensorRef::new(&latent[..], of_latent)?;
        match tables {
            None => {
                let query = TensorRef::new(&query[..], of_query)?;
                let rows = [latent, TensorRef::new(&rope[..], of_rope)?];
                let call = LayerCall::new(weights, query, rows, cache.view_mut(), to);
                let call = call.with_lse(wanted).with_slot_lists(lists);
                layer.forward(workspace, call.with_sinks(sinks).with_gate(gate))?;
            }
            Some(tables) => {
                let query = TensorMut::new(&mut query[..], of_query)?;
                let (rope, angles) = (TensorMut::new(&mut rope[..], of_rope)?, tables.rotation()?);
                let cache = cache.view_mut();
                let call = LayerCall::unrotated(weights, query, latent, rope, angles, cache, to);
                let call = call.with_lse(wanted).with_slot_lists(lists);
                layer.forward_unrotated(workspace, call.with_sinks(sinks).with_gate(gate))?;
            }
        }
        Ok(Outcome {
            out,
            lse,
            cache: cache.rows(self.cache_layout),
            absorbed_tokens: workspace.absorbed_tokens(),
            chunks: workspace.context().len(),
        })
    }

    /// The oracle's output `[T, H, V]` and log-sum-exp `[H, T]`, for the cache of a run.
    pub(crate) fn expected(&self, outcome: &Outcome) -> (Vec<f64>, Vec<f64>) {
        let (dims, layout) = (self.case.dims, self.cache_layout);
        let (heads, tokens) = (self.case.heads as usize, self.slots.len());
        let (latent, qk) = (dims.latent as usize, dims.head.qk() as usize);
        let (rope, width) = (dims.head.rope as usize, dims.head.kv_b() as usize);
        let scale = f64::from(self.case.config().softmax_scale);
        let stored = |slot: usize| {
            let start = slot * layout.row_stride;
            let bytes = &outcome.cache[start..start + layout.row_stride];
            oracle::row(layout.format, dims, layout.scale, bytes)
        };
        let kv_b: Vec<Vec<f64>> = (0..heads)
            .map(|head| {
                let columns = head * width..(head + 1) * width;
                (0..latent)
                    .flat_map(|l| columns.clone().map(move |column| (l, column)))
                    .map(|(l, column)| match self.case.transposed_weights {
                        true => self.weights.values[column * latent + l],
                        false => self.weights.values[l * heads * width + column],
                    })
                    .collect()
            })
            .collect();
        let mut out = Vec::new();
        let mut lse = vec![f64::NAN; heads * tokens];
        let mut token = 0;
        for (request, table) in self.requests.iter().zip(self.tables.chunks(self.max_pages)) {
            let context = request.kv.saturating_sub(request.q) as usize;
            // The rows in the cache. On the expanded path, new rows come from the tensors of the
            // call.
            let rows: Vec<Vec<f64>> = (0..request.kv as usize)
                .map(|position| {
                    if position >= context && token >= outcome.absorbed_tokens {
                        let at = token + position - context;
                        let mut row = self.latent.values[at * latent..][..latent].to_vec();
                        row.extend(&self.rope.values[at * rope..][..rope]);
                        return row;
                    }
                    let page = table[position / layout.page_size] as usize;
                    stored(page * layout.page_size + position % layout.page_size)
                })
                .collect();
            let rows: Vec<&[f64]> = rows.iter().map(Vec::as_slice).collect();
            for own in 0..request.q as usize {
                let scaling = self.case.query_scaling;
                let factor = |scaling: QueryScaling| scaling.factor((context + own) as u32);
                let scale = scale * scaling.map_or(1.0, factor);
                for (head, kv_b) in kv_b.iter().enumerate() {
                    let query = &self.query.values[(token * heads + head) * qk..][..qk];
                    let rows: Vec<&[f64]> = self
                        .attended(request, own as u32)
                        .into_iter()
                        .map(|position| rows[position as usize])
                        .collect();
                    let (row, sum) = oracle::attend(dims, scale, query, kv_b, &rows);
                    let sinks = self.sinks.as_ref().filter(|_| sum > f64::NEG_INFINITY);
                    let left = sinks.map_or(1.0, |sinks| sigmoid(sum - f64::from(sinks[head])));
                    out.extend(row.iter().enumerate().map(|(column, value)| {
                        let gate = self.gate.as_ref().map_or(1.0, |gate| {
                            let width = gate.layout.shape[2];
                            let at = (token * heads + head) * width + column.min(width - 1);
                            sigmoid(gate.values[at])
                        });
                        value * left * gate
                    }));
                    lse[head * tokens + token] = sum;
                }
                token += 1;
            }
        }
        (out, lse)
    }

    /// Compares a run with the oracle. `Err` names the first difference.
    pub(crate) fn check(&self, outcome: &Outcome) -> std::result::Result<(), String> {
        let (out, lse) = self.expected(outcome);
        // Results are at most about 3. Queries and keys are sums of some hundred rounded products.
        // Outputs are rounded once by each of three operations and by each merge. The tolerances
        // are several times the sum of such errors.
        let (rounding, merges) = match self.case.dtype {
            DType::F32 => (2e-5, 0.0),
            DType::F16 => (4e-3, 1e-3),
            DType::BF16 => (3e-2, 8e-3),
        };
        let tolerance = rounding + merges * (outcome.chunks as f64).sqrt();
        let close = |what: &str, given: &[f64], expected: &[f64]| {
            assert_eq!(given.len(), expected.len());
            for (at, (given, expected)) in given.iter().zip(expected).enumerate() {
                let same = given == expected || (given - expected).abs() <= tolerance;
                if !same {
                    return Err(format!("{what}[{at}]: {given}, expected {expected}"));
                }
            }
            Ok(())
        };
        close("out", &floats(self.case.dtype, &outcome.out), &out)?;
        close("lse", &floats(DType::F32, &outcome.lse), &lse)
    }
}
