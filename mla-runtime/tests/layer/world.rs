//! A batch with its cache, weights and queries. It is made from a seed, run through a layer, and
//! compared with the oracle.

use half::{bf16, f16};
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
    ArrayRef, CacheLayout, CacheMut, CacheRef, Layout, LseLayout, LseMut, Memory, TensorMut,
    TensorRef,
};

pub(crate) use crate::case::Case;
use crate::case::Places;
use crate::oracle;

type Buffer = <Cpu as Memory>::Buffer;

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

/// A tensor in the device's memory, and its values after rounding.
pub(crate) struct Owned {
    buffer: Buffer,
    layout: Layout,
    pub(crate) values: Vec<f64>,
}

impl Owned {
    fn random(
        device: &Cpu,
        numbers: &mut Numbers,
        dtype: DType,
        shape: [usize; 3],
        max: f64,
    ) -> Self {
        let layout = Layout::contiguous(dtype, shape);
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for _ in 0..layout.elements() {
            let value = numbers.uniform(max) as f32;
            values.push(round(dtype, value, &mut bytes));
        }
        let mut buffer = device.allocate(bytes.len()).unwrap();
        device.upload(&bytes, Cpu::bytes_mut(&mut buffer)).unwrap();
        Self {
            buffer,
            layout,
            values,
        }
    }

    pub(crate) fn set(&mut self, index: [usize; 3], value: f64) {
        let at = |axis: usize| index[axis] * self.layout.strides[axis];
        self.values[at(0) + at(1) + at(2)] = value;
        TensorMut::<Cpu>::new(Cpu::bytes_mut(&mut self.buffer), self.layout)
            .unwrap()
            .set(index, value as f32);
    }

    pub(crate) fn view(&self) -> TensorRef<'_, Cpu> {
        TensorRef::new(Cpu::bytes(&self.buffer), self.layout).unwrap()
    }
}

fn round(dtype: DType, value: f32, bytes: &mut Vec<u8>) -> f64 {
    match dtype {
        DType::F32 => {
            bytes.extend(value.to_le_bytes());
            value.into()
        }
        DType::F16 => {
            let value = f16::from_f32(value);
            bytes.extend(value.to_le_bytes());
            value.into()
        }
        DType::BF16 => {
            let value = bf16::from_f32(value);
            bytes.extend(value.to_le_bytes());
            value.into()
        }
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
    pub(crate) device: Cpu,
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
        let device = Cpu::new();
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
        let mut random = |shape, max| Owned::random(&device, &mut numbers, dtype, shape, max);
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
        // A row whose bits are all ones is NaN in every format.
        let bytes = cache_layout.slots() * cache_layout.row_stride;
        let mut buffer = device.allocate(bytes).unwrap();
        device
            .upload(&vec![0xff; bytes], Cpu::bytes_mut(&mut buffer))
            .unwrap();
        if context > 0 {
            device
                .write_cache(
                    context_latent.view(),
                    context_rope.view(),
                    ArrayRef::from_slice(&context_slots),
                    CacheMut::new(Cpu::bytes_mut(&mut buffer), cache_layout).unwrap(),
                )
                .unwrap();
        }
        let mut cache = vec![0; bytes];
        device.download(Cpu::bytes(&buffer), &mut cache).unwrap();
        Self {
            case: case.clone(),
            device,
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
        let numbers = &mut Numbers::new(self.case.seed + 100);
        let gate = Owned::random(&self.device, numbers, self.case.dtype, shape, 3.0);
        self.gate = Some(gate);
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
            let bytes = heads * width * owned.layout.dtype.bytes();
            let all = Cpu::bytes(&owned.buffer);
            let rows = (0..count).map(|request| request * len + step as usize);
            let picked: Vec<u8> = rows
                .flat_map(|row| &all[row * bytes..(row + 1) * bytes])
                .copied()
                .collect();
            let mut buffer = whole.device.allocate(picked.len()).unwrap();
            whole
                .device
                .upload(&picked, Cpu::bytes_mut(&mut buffer))
                .unwrap();
            Owned {
                buffer,
                layout: Layout::contiguous(owned.layout.dtype, [count, heads, width]),
                values: floats(owned.layout.dtype, &picked),
            }
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

    pub(crate) fn prepare<P, D>(
        &self,
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
    ) -> Result<()>
    where
        P: PrefillStage<Device = Cpu>,
        D: DecodeStage<Device = Cpu>,
    {
        let plan = self.plan(workspace.limits())?.with_slots(&self.slots)?;
        workspace.prepare(layer, &plan)
    }

    /// `W_kv_b` in the orientation of the case.
    pub(crate) fn weights(&self) -> Result<Weights<'_, Cpu>> {
        let config = self.case.config();
        match self.case.transposed_weights {
            true => Weights::from_checkpoint(self.weights.view(), &config),
            false => Weights::from_transposed(self.weights.view(), &config),
        }
    }

    pub(crate) fn run<P, D>(&self, layer: &MlaLayer<P, D>) -> Outcome
    where
        P: PrefillStage<Device = Cpu>,
        D: DecodeStage<Device = Cpu>,
    {
        let mut workspace = layer.workspace(&self.case.limits()).unwrap();
        self.prepare(layer, &mut workspace).unwrap();
        self.forward(layer, &mut workspace, true).unwrap()
    }

    /// Runs a prepared step on a copy of the cache.
    pub(crate) fn forward<P, D>(
        &self,
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
        with_lse: bool,
    ) -> Result<Outcome>
    where
        P: PrefillStage<Device = Cpu>,
        D: DecodeStage<Device = Cpu>,
    {
        self.forward_with(layer, workspace, with_lse, self.weights()?)
    }

    /// The same run, with these weights.
    pub(crate) fn forward_with<P, D>(
        &self,
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
        with_lse: bool,
        weights: Weights<'_, Cpu>,
    ) -> Result<Outcome>
    where
        P: PrefillStage<Device = Cpu>,
        D: DecodeStage<Device = Cpu>,
    {
        let (heads, tokens) = (self.case.heads as usize, self.slots.len());
        let v = self.case.dims.head.v as usize;
        let layout = Layout::contiguous(self.case.dtype, [tokens, heads, v]);
        let filled = |bytes: usize| {
            let mut buffer = self.device.allocate(bytes).unwrap();
            let ones = vec![0xff; bytes];
            self.device
                .upload(&ones, Cpu::bytes_mut(&mut buffer))
                .unwrap();
            buffer
        };
        // Elements that are not written stay NaN.
        let mut out = filled(layout.elements() * self.case.dtype.bytes());
        let mut lse = filled(heads * tokens * 4);
        let mut cache = Tensors::new(&self.cache, self.cache_layout, self.case.split_cache);
        let second_cache = Tensors::new(&self.cache, self.cache_layout, self.case.split_cache);
        let mut lists = self.lists();
        let second = self.two_caches.then(|| {
            let mut second = vec![-1; lists.len()];
            for (own, other) in lists.iter_mut().zip(&mut second).step_by(2) {
                // The row of a new token is only in the first cache.
                if !self.slots.contains(&i64::from(*own)) {
                    std::mem::swap(own, other);
                }
            }
            second
        });
        let second = match &second {
            Some(lists) => Some((
                second_cache.view(),
                ArrayRef::from_slice(lists),
                self.list_width(),
            )),
            None => None,
        };
        layer.forward(
            workspace,
            LayerCall::new(
                weights.shorten(),
                self.query.view(),
                [self.latent.view(), self.rope.view()],
                cache.view_mut(),
                TensorMut::new(Cpu::bytes_mut(&mut out), layout)?,
            )
            .with_lse(match with_lse {
                true => Some(LseMut::new(
                    Cpu::bytes_mut(&mut lse),
                    LseLayout::heads_first(heads, tokens),
                )?),
                false => None,
            })
            .with_slot_lists(match self.case.sparse {
                true => Some(
                    SlotLists::new(ArrayRef::from_slice(&lists), self.list_width())
                        .with_second(second),
                ),
                false => None,
            })
            .with_sinks(self.sinks.as_deref().map(ArrayRef::from_slice))
            .with_gate(self.gate.as_ref().map(Owned::view)),
        )?;
        let download = |buffer: &Buffer| {
            let mut bytes = vec![0; Cpu::byte_len(Cpu::bytes(buffer))];
            self.device
                .download(Cpu::bytes(buffer), &mut bytes)
                .unwrap();
            bytes
        };
        Ok(Outcome {
            out: download(&out),
            lse: download(&lse),
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
