//! A decode call and its comparison with the reference.

use std::borrow::Cow;

use super::Failure;
use super::data::{
    Bits, Buffers, OnDevice, POISON, Random, Sequences, Tensor, Tolerances, Written, array, config,
    factor, floats, longest, owners, query_scales, starts, upload,
};
use super::failure::refused;
use super::trial::{Placement, Trial};
use super::trials::{Call, Case, On, checks, own_seeds, stage_items};
use crate::reference::{self, Array, Attended};
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, DecodeStage, Query, SlotLists, StepLimits,
};
use mla_runtime::device::Device;
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::spec::{BackendSpec, Problem, QueryFormat, QueryLen};
use mla_runtime::tensor::{BlockTable, CacheLayout, CacheRef, CacheStrides, Layout, Memory};

/// A decode step of random numbers over a shuffled, poisoned cache.
#[derive(Clone, Debug)]
pub struct DecodeCase {
    /// The problem for which the backend is made.
    pub problem: Problem,
    /// The query tokens of each request.
    pub query_lens: Vec<usize>,
    /// The tokens of each request in the cache, including its query tokens.
    pub seq_lens: Vec<usize>,
    /// Extra columns of the block table, beyond those that the longest request needs. If there are
    /// any, the batch allows requests as long as the table has room for.
    pub spare_pages: usize,
    /// Pages of the cache in front of all others that belong to no request.
    pub unused_pages: usize,
    /// The slots per query token, if the problem is sparse.
    pub list_width: usize,
    /// Maximum length of a dense request. Such a request uses the block table and attends to all
    /// that it sees.
    pub dense_within: usize,
    /// The slots per query token of a second cache, or 0 if there is none.
    pub second_width: usize,
    /// True if query tokens see their request only up to themselves.
    pub causal: bool,
    /// True if each head has a sink. If there are enough heads, some sinks are infinite.
    pub with_sinks: bool,
    /// True if an array of counts says how many entries of each list count.
    pub with_counts: bool,
    /// Elements between one token's rows and the next, in queries, and in outputs if the spec has
    /// [`StridedOutputs`](mla_runtime::spec::Feature::StridedOutputs).
    pub gap: usize,
    /// True if the log-sum-exp is asked for.
    pub lse: bool,
    /// Elements of the queries that are NaN: `[token, head, column]`.
    pub nan_queries: Vec<[usize; 3]>,
    /// Elements of cached rows that are NaN: `[request, position, column]`.
    pub nan_rows: Vec<[usize; 3]>,
    /// New scales for a cache whose rows, or groups of values, have their own scales.
    pub group_scales: Option<GroupScales>,
    /// Format of the queries, or `None` for the one that the backend asks for.
    pub query_format: Option<QueryFormat>,
    /// The way in which the case is run.
    pub trial: Trial,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Seeds for each request's own numbers. If empty, all numbers follow `seed`. Pages and sinks
    /// always do.
    pub own_seeds: Vec<u64>,
}

/// Scales that are far apart.
#[derive(Clone, Copy, Debug)]
pub struct GroupScales {
    /// Exponents of the powers of two by which the scales of the four groups are multiplied. The
    /// two sets alternate after every 40 rows of a request. A row with a single scale uses the
    /// first exponent.
    pub exponents: [[i32; 4]; 2],
    /// Factor of all scales. It is 1 if the scales have to be powers of two.
    pub factor: f64,
    /// The exponent of the power of two that multiplies the latent part of queries.
    pub queries: i32,
    /// Rotary value in every second block of 40 rows. The other blocks have its negative. Rotary
    /// values of queries are then 1. If `lead` is 0, all rotary values are random.
    pub lead: f64,
}

impl GroupScales {
    fn half(token: usize) -> usize {
        token / 40 % 2
    }

    // Encodes a row of random latent values.
    fn encode(self, random: &mut Random, token: usize, layout: &CacheLayout) -> Vec<u8> {
        let latent = layout.dims.latent as usize;
        let half = Self::half(token);
        let mut row: Vec<f64> = (0..layout.dims.row()).map(|_| random.next()).collect();
        if self.lead != 0.0 {
            row[latent..].fill(if half == 1 { self.lead } else { -self.lead });
        }
        let scale = f64::from(layout.scale);
        let mut bytes = reference::encode_row(layout.format, latent, &row, scale);
        let scales = match layout.format {
            KvFormat::Fp8PerToken => layout.row_bytes() - 4..layout.row_bytes(),
            _ => latent..latent + latent / 128 * 4,
        };
        let scales = bytes[scales].chunks_exact_mut(4);
        for (group, scale) in scales.enumerate() {
            let by = 2f64.powi(self.exponents[half][group % 4]) * self.factor;
            let old = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
            scale.copy_from_slice(&((f64::from(old) * by) as f32).to_le_bytes());
        }
        bytes
    }
}

/// A cache in a device's memory.
struct Stored<D: Device> {
    rows: OnBytes<D>,
    /// Rotary keys, if they are in a separate tensor.
    rope: Option<OnBytes<D>>,
    layout: CacheLayout,
}

/// A buffer, and the range of the bytes in use.
type OnBytes<D> = (<D as Memory>::Buffer, std::ops::Range<usize>);

impl<D: Device> Stored<D> {
    /// Uploads the rows of a layout, in one tensor or two, with `start` bytes in front of each.
    fn upload(
        rows: &[u8],
        layout: &CacheLayout,
        (placement, start, split): (Placement, usize, bool),
        device: &D,
    ) -> Result<Self> {
        let upload = |bytes: &[u8]| -> Result<OnBytes<D>> {
            // Large caches have no bytes in front, so they need no copy on the host.
            let bytes = match start {
                0 => Cow::Borrowed(bytes),
                _ => Cow::Owned([&vec![POISON; start], bytes].concat()),
            };
            Ok((upload(device, &bytes)?, start..bytes.len()))
        };
        if !split {
            return Ok(Self {
                rows: upload(rows)?,
                rope: None,
                layout: *layout,
            });
        }
        let (latents, rope, layout) = in_two_tensors(rows, layout, placement);
        Ok(Self {
            rows: upload(&latents)?,
            rope: Some(upload(&rope)?),
            layout,
        })
    }

    fn view(&self) -> Result<CacheRef<'_, D>> {
        fn bytes<D: Device>((buffer, range): &OnBytes<D>) -> D::Bytes<'_> {
            D::byte_range(D::bytes(buffer), range.clone())
        }
        let rows = bytes::<D>(&self.rows);
        match &self.rope {
            Some(rope) => CacheRef::split(rows, bytes::<D>(rope), self.layout),
            None => CacheRef::new(rows, self.layout),
        }
    }

    fn buffers(&mut self) -> impl Iterator<Item = &mut D::Buffer> {
        [Some(&mut self.rows), self.rope.as_mut()]
            .into_iter()
            .flatten()
            .map(|bytes| &mut bytes.0)
    }
}

// Splits rows into latents and rotary keys. Each part gets a tensor with its own strides, with
// poison between rows.
fn in_two_tensors(
    rows: &[u8],
    layout: &CacheLayout,
    placement: Placement,
) -> (Vec<u8>, Vec<u8>, CacheLayout) {
    let (format, dims) = (layout.format, layout.dims);
    let [latent, rope] = [format.latent_bytes(dims), format.rope_bytes(dims)];
    // Pages of rotary keys have a larger gap behind them than pages of latents.
    let strides = |row, spare| {
        let row_stride = placement.row_bytes(bytes_of_element(format), row);
        CacheStrides {
            page_stride: (layout.page_size + spare) * row_stride,
            row_stride,
        }
    };
    let [to, to_rope] = [strides(latent, 0), strides(rope, 1)];
    let [mut latents, mut keys] =
        [to, to_rope].map(|strides| vec![POISON; layout.pages * strides.page_stride]);
    for slot in 0..layout.slots() {
        let [from, at, at_rope] =
            [layout.strides(), to, to_rope].map(|strides| strides.offset(slot, layout.page_size));
        latents[at..at + latent].copy_from_slice(&rows[from..][..latent]);
        keys[at_rope..at_rope + rope].copy_from_slice(&rows[from + latent..][..rope]);
    }
    let split = layout
        .with_page_stride(to.page_stride)
        .with_row_stride(to.row_stride)
        .with_split_rope(Some(to_rope));
    (latents, keys, split)
}

// Returns the size of an element. The elements of a quantised row are its bytes.
fn bytes_of_element(format: KvFormat) -> usize {
    format.dtype().map_or(1, DType::bytes)
}

/// A case's inputs in a device's memory.
pub(super) struct Inputs<D: Device> {
    /// Latent and rotary parts in two tensors, or both in one.
    queries: Vec<OnDevice<D>>,
    table: D::Buffer,
    lens: D::Buffer,
    starts: D::Buffer,
    cache: Stored<D>,
    lists: Option<D::Buffer>,
    counts: Option<D::Buffer>,
    sinks: Option<D::Buffer>,
    query_scales: Option<D::Buffer>,
    /// A second cache, and its lists.
    second: Option<(Stored<D>, D::Buffer)>,
}

impl<D: Device> Inputs<D> {
    fn upload(data: &Step, case: &DecodeCase, format: QueryFormat, device: &D) -> Result<Self> {
        let queries = data.queries(format);
        let queries = queries.iter().map(|query| query.upload(device));
        let ints = |ints: &[i32]| upload(device, bytemuck::cast_slice(ints));
        let seq_lens: Vec<i32> = case.seq_lens.iter().map(|len| *len as i32).collect();
        let floats = |floats: &[f32]| upload(device, bytemuck::cast_slice(floats));
        let split = case.problem.has_split_cache();
        let stored = |rows: &[u8], layout: &CacheLayout, start| {
            Stored::upload(rows, layout, (data.placement, start, split), device)
        };
        let second = data.second.as_ref();
        let second =
            second.map(|s| Result::<_>::Ok((stored(&s.cache, &s.layout, 0)?, ints(&s.lists)?)));
        Ok(Self {
            queries: queries.collect::<Result<_>>()?,
            table: ints(&data.table)?,
            lens: ints(&seq_lens)?,
            starts: ints(&data.starts)?,
            cache: stored(&data.cache, &data.layout, data.start)?,
            lists: data.lists.as_deref().map(ints).transpose()?,
            counts: data.counts.as_deref().map(ints).transpose()?,
            sinks: data.sinks.as_deref().map(floats).transpose()?,
            query_scales: data.query_scales.as_deref().map(floats).transpose()?,
            second: second.transpose()?,
        })
    }

    /// Returns the batch. It has lengths on the host only if the spec asks for them, since other
    /// backends must not rely on them.
    fn batch<'a>(
        &'a self,
        data: &'a Step,
        case: &DecodeCase,
        on_host: bool,
    ) -> Result<DecodeBatch<'a, D>> {
        let requests = case.seq_lens.len();
        let table = array(&self.table, data.table.len())?;
        let batch = DecodeBatch::new(
            BlockTable::new(table, requests, data.max_pages)?,
            (array(&self.lens, requests)?, data.max_seq_len),
            (
                array(&self.starts, requests + 1)?,
                longest(&case.query_lens),
            ),
        )
        .with_causal(case.causal);
        let [query_lens, seq_lens] = &data.host_lens;
        Ok(match on_host {
            true => batch.with_host(query_lens, seq_lens),
            false => batch,
        })
    }

    fn query(&self) -> Result<Query<'_, D>> {
        Ok(match &self.queries[..] {
            [latent, rope] => Query::Split {
                latent: latent.view()?,
                rope: rope.view()?,
            },
            queries => Query::Concatenated(queries[0].view()?),
        })
    }

    fn slot_lists(&self, case: &DecodeCase, tokens: usize) -> Result<Option<SlotLists<'_, D>>> {
        let Some(lists) = &self.lists else {
            return Ok(None);
        };
        let slots = SlotLists::new(array(lists, tokens * case.list_width)?, case.list_width);
        let counts = self.counts.as_ref().map(|counts| array(counts, tokens));
        let second = self.second.as_ref().map(|(cache, lists)| {
            let lists = array(lists, tokens * case.second_width)?;
            Result::<_>::Ok((cache.view()?, lists, case.second_width))
        });
        let slots = slots
            .with_counts(counts.transpose()?)
            .with_dense_within(case.dense_within)
            .with_second(second.transpose()?);
        Ok(Some(slots))
    }
}

/// Maximum number of unused columns of a random batch's block table.
const MAX_SPARE: usize = 300;

/// Unused entry of a block table, far outside any cache.
const GARBAGE: i32 = 2_147_480_000;

impl DecodeCase {
    /// Makes a case with one query token per request, without gaps, and with a log-sum-exp.
    pub fn new(problem: Problem, seq_lens: &[usize]) -> Self {
        Self {
            problem,
            query_lens: vec![1; seq_lens.len()],
            seq_lens: seq_lens.to_vec(),
            spare_pages: 0,
            unused_pages: 0,
            list_width: 37,
            dense_within: 0,
            second_width: 0,
            causal: true,
            with_sinks: false,
            with_counts: false,
            gap: 0,
            lse: true,
            nan_queries: Vec::new(),
            nan_rows: Vec::new(),
            group_scales: None,
            query_format: None,
            trial: Trial::Once,
            seed: 1,
            own_seeds: Vec::new(),
        }
    }

    checks!(DecodeBackend, DecodeStage);

    /// Returns the number of columns of the block table.
    fn max_pages(&self) -> usize {
        let page_size = self.problem.page_size as usize;
        longest(&self.seq_lens).div_ceil(page_size) + 2.max(self.spare_pages)
    }
}

impl<S: DecodeStage> Case<S> for DecodeCase {
    type Numbers = Step;
    type Inputs = Inputs<S::Device>;

    const CALL: &'static str = "decode";
    const SMALLEST: StepLimits = StepLimits::new(1, 1, 1);
    const REPLAYS_LENGTHS: bool = true;

    stage_items!();

    fn limits(&self) -> StepLimits {
        let tokens = self.query_lens.iter().sum();
        StepLimits::new(self.seq_lens.len(), tokens, self.max_pages())
            .with_decode_query_len(longest(&self.query_lens))
    }

    /// Returns the same requests in another order and with other numbers.
    fn changed(&self) -> Self {
        let mut turned = Self {
            seed: self.seed + 1,
            ..self.clone()
        };
        turned.query_lens.rotate_right(1);
        turned.seq_lens.rotate_right(1);
        if !turned.own_seeds.is_empty() {
            turned.own_seeds.rotate_right(1);
        }
        turned
    }

    fn of_requests(&self, requests: &[Option<usize>], random: &mut Random, wide: bool) -> Self {
        let padding = longest(&self.query_lens).min(1);
        let padding = match self.problem.query_len {
            QueryLen::Uniform => self.query_lens.first().copied().unwrap_or(padding),
            _ => padding,
        };
        let lens = |of: &[usize], padding: usize| {
            let requests = requests.iter();
            requests
                .map(|request| request.map_or(padding, |at| of[at]))
                .collect()
        };
        Self {
            query_lens: lens(&self.query_lens, padding),
            seq_lens: lens(&self.seq_lens, 0),
            own_seeds: own_seeds(requests),
            spare_pages: if wide {
                MAX_SPARE
            } else {
                random.below(2) * random.below(MAX_SPARE)
            },
            unused_pages: random.below(3),
            seed: random.below(1 << 20) as u64,
            ..self.clone()
        }
    }

    fn query_lens(&self) -> &[usize] {
        &self.query_lens
    }

    fn own_seeds(&self) -> &[u64] {
        &self.own_seeds
    }

    fn numbers(&self, placement: Placement) -> Step {
        Step::new(self, placement)
    }

    fn upload(
        &self,
        step: &Step,
        spec: &BackendSpec,
        device: &S::Device,
    ) -> Result<Inputs<S::Device>> {
        let format = self.query_format.unwrap_or(spec.query_format);
        Inputs::upload(step, self, format, device)
    }

    fn output(&self, step: &Step) -> ([usize; 3], bool) {
        let [tokens, heads, _] = step.query.layout.shape;
        let latent = self.problem.dims.latent as usize;
        ([tokens, heads, latent], self.lse)
    }

    fn compare(
        &self,
        step: &Step,
        spec: &BackendSpec,
        written: &Written,
    ) -> std::result::Result<(), Failure> {
        step.compare(self, spec, written)
    }

    fn buffers(inputs: &mut Inputs<S::Device>) -> Buffers<'_, S::Device> {
        let second = inputs.second.iter_mut();
        let second = second.flat_map(|(cache, lists)| cache.buffers().chain([lists]));
        let queries = inputs.queries.iter_mut().map(|query| &mut query.buffer);
        let optional = [
            &mut inputs.lists,
            &mut inputs.counts,
            &mut inputs.sinks,
            &mut inputs.query_scales,
        ];
        [&mut inputs.table, &mut inputs.lens, &mut inputs.starts]
            .into_iter()
            .chain(inputs.cache.buffers())
            .chain(optional.into_iter().flatten())
            .chain(second)
            .chain(queries)
            .collect()
    }

    fn late<'a>(&self, inputs: &'a mut Inputs<S::Device>) -> Buffers<'a, S::Device> {
        match self.trial {
            Trial::LateRows => inputs.cache.buffers().collect(),
            _ => {
                let queries = inputs.queries.iter_mut();
                queries.map(|query| &mut query.buffer).rev().collect()
            }
        }
    }

    fn prepare(call: &mut Call<'_, Self, S>) -> Result<()> {
        let on_host = call.stage.spec().plans_on_host;
        let batch = call.inputs.batch(&call.numbers, &call.case, on_host)?;
        call.stage
            .prepare(call.device, &batch, &mut call.state, &mut call.metadata)
    }

    fn enqueue(call: &mut Call<'_, Self, S>) -> Result<()> {
        let (step, case, inputs) = (&call.numbers, &call.case, &call.inputs);
        let tokens = step.query.layout.shape[0];
        let (out, lse) = call.outputs.views()?;
        let batch = inputs.batch(step, case, call.stage.spec().plans_on_host)?;
        let of_case = DecodeCall::new(inputs.query()?, inputs.cache.view()?, batch, out)
            .with_lse(lse)
            .with_slots(inputs.slot_lists(case, tokens)?)
            .with_sinks(floats::<S::Device>(
                &inputs.sinks,
                case.problem.heads as usize,
            )?)
            .with_query_scales(floats::<S::Device>(&inputs.query_scales, tokens)?);
        // SAFETY: starts, lengths and pages are those of the case. The tensors, the cache and the
        // block table were made for them. Poison is only in places where the contract allows
        // anything, or is overwritten before the call reads it. State and metadata belong to this
        // stage, are made for requests as long as these, and are prepared for the batch.
        unsafe {
            call.stage
                .decode(call.device, of_case, &mut call.state, &call.metadata)
        }
    }
}

// The inputs of a case in host memory.
pub(super) struct Step {
    /// The query lengths and the sequence lengths, on the host.
    host_lens: [Vec<u32>; 2],
    table: Vec<i32>,
    max_pages: usize,
    // The maximum number of tokens of a request that the batch states.
    max_seq_len: usize,
    cache: Vec<u8>,
    layout: CacheLayout,
    // The bytes in front of the cache.
    start: usize,
    placement: Placement,
    // Slots of the tokens of each request.
    slots: Vec<Vec<usize>>,
    // Queries, `[tokens, heads, L+R]` without gaps.
    query: Tensor,
    lists: Option<Vec<i32>>,
    second: Option<Second>,
    counts: Option<Vec<i32>>,
    sinks: Option<Vec<f32>>,
    query_scales: Option<Vec<f32>>,
    starts: Vec<i32>,
}

// A second cache, and the lists of its slots.
struct Second {
    cache: Vec<u8>,
    layout: CacheLayout,
    lists: Vec<i32>,
}

impl Second {
    // Makes a second cache with another page size than the first one.
    fn new(case: &DecodeCase, random: &mut Random, first: &CacheLayout, tokens: usize) -> Self {
        let page_size = first.page_size % 5 + 2;
        let mut layout = CacheLayout::contiguous(first.dims, first.format, 40, page_size);
        layout.scale = first.scale;
        let mut cache = vec![POISON; layout.pages * layout.page_stride];
        // Every second row is poison, and is in no list.
        for slot in (0..layout.slots()).step_by(2) {
            let bytes = random_row(random, &layout, &[]);
            let at = slot / page_size * layout.page_stride + slot % page_size * layout.row_stride;
            cache[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let entries = (0..tokens * case.second_width).map(|_| match random.below(5) {
            0 => -1,
            1 => no_slot(random, layout.slots()),
            _ => (random.below(layout.slots().div_ceil(2)) * 2) as i32,
        });
        let mut lists: Vec<i32> = entries.collect();
        end_some(random, &mut lists, case.second_width);
        Self {
            lists,
            cache,
            layout,
        }
    }
}

// Returns a row of random numbers, with NaN in some columns.
fn random_row(random: &mut Random, layout: &CacheLayout, nan: &[usize]) -> Vec<u8> {
    let (latent, width) = (layout.dims.latent as usize, layout.dims.row() as usize);
    let dtype = layout.format.dtype();
    let shape = [1, 1, width];
    let placement = Placement::default();
    let mut row = Tensor::poison(dtype.unwrap_or(DType::F32), shape, placement);
    row.fill(|_, _, _| random.next());
    for column in nan {
        row.set([0, 0, *column], f64::NAN);
    }
    if dtype.is_some() {
        return row.bytes;
    }
    let row: Vec<f64> = (0..width).map(|k| row.at(0, 0, k)).collect();
    reference::encode_row(layout.format, latent, &row, f64::from(layout.scale))
}

// Writes the rows of every request into the cache, and its pages into the table. All rows of the
// table have the same number of columns. `pages` are used in their order. Returns the slots of each
// request's tokens.
fn write_rows(
    random: &mut Sequences,
    case: &DecodeCase,
    pages: Vec<i32>,
    layout: &CacheLayout,
    cache: &mut [u8],
    table: &mut [i32],
) -> Vec<Vec<usize>> {
    let page_size = case.problem.page_size as usize;
    let max_pages = table.len() / case.seq_lens.len().max(1);
    let mut free = pages.into_iter();
    let mut slots = Vec::new();
    for (request, len) in case.seq_lens.iter().enumerate() {
        let random = random.of(request);
        let mut of_request = Vec::new();
        for token in 0..*len {
            let entry = &mut table[request * max_pages + token / page_size];
            if token % page_size == 0 {
                *entry = free.next().unwrap_or(0);
            }
            let slot = *entry as usize * page_size + token % page_size;
            let nans = case.nan_rows.iter();
            let own = nans.filter(|nan| nan[..2] == [request, token]);
            let nan: Vec<usize> = own.map(|nan| nan[2]).collect();
            let bytes = match case.group_scales {
                Some(scales) => scales.encode(random, token, layout),
                None => random_row(random, layout, &nan),
            };
            cache[slot * layout.row_stride..][..bytes.len()].copy_from_slice(&bytes);
            of_request.push(slot);
        }
        slots.push(of_request);
    }
    slots
}

// Returns a number that is not a slot of a cache of `slots` slots. It is often the first one past
// the end, or far away.
fn no_slot(random: &mut Random, slots: usize) -> i32 {
    match random.below(4) {
        0 => slots as i32,
        1 => i32::MIN,
        2 => i32::MAX,
        _ => (slots + random.below(1000)) as i32,
    }
}

// Returns a list for each token. It has slots with rows, and numbers that are not slots. The rows
// are those of all requests. If each request has its own seed, the rows are only those of the
// token's own request.
fn random_lists(
    random: &mut Sequences,
    case: &DecodeCase,
    layout: &CacheLayout,
    slots: &[Vec<usize>],
) -> Vec<i32> {
    let all: Vec<usize> = slots.iter().flatten().copied().collect();
    let mut entries = Vec::new();
    for request in owners(&case.query_lens) {
        let random = random.of(request);
        let rows = match case.own_seeds.is_empty() {
            true => &all,
            false => &slots[request],
        };
        let mut entry = || match random.below(5) {
            0 => -1,
            1 => no_slot(random, layout.slots()),
            _ if rows.is_empty() => -7,
            _ => rows[random.below(rows.len())] as i32,
        };
        let mut list: Vec<i32> = (0..case.list_width).map(|_| entry()).collect();
        end_some(random, &mut list, case.list_width);
        entries.extend(list);
    }
    entries
}

// Ends every other list, chosen at random, at a random entry. Later entries are not slots.
fn end_some(random: &mut Random, entries: &mut [i32], width: usize) {
    for list in entries.chunks_mut(width.max(1)) {
        if random.below(2) == 0 {
            list[random.below(width + 1)..].fill(-1);
        }
    }
}

// Returns the number of entries that count in each token's list. Some counts are below 0, and some
// exceed the list.
fn random_counts(random: &mut Sequences, case: &DecodeCase) -> Vec<i32> {
    let mut count = |request: usize| match random.of(request).below(6) {
        0 => -3,
        1 => case.list_width as i32 + 5,
        _ => random.of(request).below(case.list_width + 1) as i32,
    };
    owners(&case.query_lens)
        .into_iter()
        .map(&mut count)
        .collect()
}

// Returns a score for each head, some of them infinite.
fn random_sinks(random: &mut Random, heads: u32) -> Vec<f32> {
    let mut sink = |head| match head {
        1 => f32::INFINITY,
        2 => f32::NEG_INFINITY,
        _ => 3.0 + 5.0 * random.next() as f32,
    };
    (0..heads).map(&mut sink).collect()
}

impl Step {
    fn new(case: &DecodeCase, placement: Placement) -> Self {
        let problem = &case.problem;
        let (dims, format) = (problem.dims, problem.kv_format);
        let page_size = problem.page_size as usize;
        let mut random = Sequences::new(case.seed, &case.own_seeds);
        let needs = |len: &usize| len.div_ceil(page_size);
        let max_pages = case.max_pages();
        let max_seq_len = match case.spare_pages {
            0 => longest(&case.seq_lens),
            _ => max_pages * page_size,
        };
        let pages = case.unused_pages + case.seq_lens.iter().map(needs).sum::<usize>() + 3;
        let mut order: Vec<i32> = (case.unused_pages as i32..pages as i32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, random.shared.below(i + 1));
        }
        let mut layout = CacheLayout::contiguous(dims, format, pages, page_size);
        let element = bytes_of_element(format);
        layout.row_stride = placement.cache_row_bytes(element, format.row_bytes(dims));
        layout.page_stride = page_size * layout.row_stride;
        if format.has_tensor_scale() {
            layout.scale = 0.037;
        }
        let mut cache = vec![POISON; pages * layout.page_stride];
        let mut table = vec![GARBAGE; case.seq_lens.len() * max_pages];
        let slots = write_rows(&mut random, case, order, &layout, &mut cache, &mut table);
        let tokens: usize = case.query_lens.iter().sum();
        let shape = [tokens, problem.heads as usize, dims.row() as usize];
        let owners = owners(&case.query_lens);
        let sequences = (&mut random, &owners[..]);
        let mut query = Tensor::random(sequences, 1.0, problem.dtype, shape, Placement::default());
        if let Some(scales) = case.group_scales {
            let (by, latent) = (2f64.powi(scales.queries), dims.latent as usize);
            query.fill(|t, _, k| match k < latent {
                true => random.of(owners[t]).next() * by,
                false if scales.lead != 0.0 => 1.0,
                false => random.of(owners[t]).next(),
            });
        }
        for nan in &case.nan_queries {
            query.set(*nan, f64::NAN);
        }
        let lists = problem
            .sparse
            .then(|| random_lists(&mut random, case, &layout, &slots));
        let second =
            (case.second_width > 0).then(|| Second::new(case, &mut random.shared, &layout, tokens));
        let counts = (problem.sparse && case.with_counts).then(|| random_counts(&mut random, case));
        let sinks = case
            .with_sinks
            .then(|| random_sinks(&mut random.shared, problem.heads));
        let query_scales = query_scales(&mut random, &owners, problem);
        Self {
            host_lens: [&case.query_lens, &case.seq_lens]
                .map(|lens| lens.iter().map(|len| *len as u32).collect()),
            counts,
            sinks,
            query_scales,
            table,
            max_pages,
            max_seq_len,
            cache,
            layout,
            start: placement.start(element),
            placement,
            slots,
            query,
            lists,
            second,
            starts: starts(&case.query_lens),
        }
    }

    // Returns the queries in the format of a backend, in one tensor or two.
    fn queries(&self, format: QueryFormat) -> Vec<Tensor> {
        let dims = self.layout.dims;
        let (latent, row) = (dims.latent as usize, dims.row() as usize);
        match format {
            QueryFormat::Concatenated => vec![self.columns(0, row)],
            QueryFormat::Split => vec![self.columns(0, latent), self.columns(latent, row)],
        }
    }

    // Returns columns `from..to` of the queries, with gaps.
    fn columns(&self, from: usize, to: usize) -> Tensor {
        let Layout { dtype, shape, .. } = self.query.layout;
        let shape = [shape[0], shape[1], to - from];
        let mut columns = Tensor::poison(dtype, shape, self.placement);
        columns.fill(|t, h, k| self.query.at(t, h, from + k));
        columns
    }

    fn stored(&self, slot: usize) -> Vec<f64> {
        stored(&self.cache, &self.layout, slot)
    }

    // Returns the rows to which token `t` of a request attends in a sparse call.
    fn listed(&self, case: &DecodeCase, lists: &[i32], request: usize, t: usize) -> Vec<Vec<f64>> {
        let token = self.starts[request] as usize + t;
        let of_token = |lists: &[i32], width: usize, slots: usize, count: usize| -> Vec<usize> {
            let list = lists[token * width..][..count.min(width)].iter();
            let valid = list.filter(|slot| (0..slots as i32).contains(*slot));
            valid.map(|slot| *slot as usize).collect()
        };
        let len = case.seq_lens[request];
        let first = if case.dense_within > 0 && len <= case.dense_within {
            let seen = (len + t + 1).saturating_sub(case.query_lens[request]);
            self.slots[request][..seen].to_vec()
        } else {
            let count = self.counts.as_ref().map_or(case.list_width, |counts| {
                usize::try_from(counts[token]).unwrap_or(0)
            });
            of_token(lists, case.list_width, self.layout.slots(), count)
        };
        let mut rows: Vec<_> = first.into_iter().map(|slot| self.stored(slot)).collect();
        if let Some(second) = &self.second {
            let width = case.second_width;
            let slots = of_token(&second.lists, width, second.layout.slots(), width);
            let stored = |slot| stored(&second.cache, &second.layout, slot);
            rows.extend(slots.into_iter().map(stored));
        }
        rows
    }

    fn compare(
        &self,
        case: &DecodeCase,
        spec: &BackendSpec,
        written: &Written,
    ) -> std::result::Result<(), Failure> {
        let much = case.query_lens.iter().zip(&case.seq_lens);
        let much = much.map(|(tokens, keys)| tokens * keys).sum::<usize>() > 1024;
        let compare = |request| self.compare_request(case, spec, written, request);
        let requests = reference::each(case.query_lens.len(), much, compare);
        requests.into_iter().collect()
    }

    fn compare_request(
        &self,
        case: &DecodeCase,
        spec: &BackendSpec,
        written: &Written,
        request: usize,
    ) -> std::result::Result<(), Failure> {
        let [_, heads, width] = self.query.layout.shape;
        let (tokens, first) = (case.query_lens[request], self.starts[request] as usize);
        let slots = self.slots[request].iter();
        let rows: Vec<Vec<f64>> = slots.map(|slot| self.stored(*slot)).collect();
        let queries = Array::from_fn([tokens, heads, width], |t, h, k| {
            factor(&self.query_scales, first + t) * self.query.at(first + t, h, k)
        });
        let without_lists = self.lists.is_none();
        let dense = without_lists.then(|| self.attend(case, &queries, &rows));
        let group = match case.group_scales {
            Some(scales) if scales.factor != 1.0 => Tolerances::Group(128, 1.2e-4),
            Some(_) => Tolerances::Group(128, 0.0),
            None => Tolerances::Plain,
        };
        for t in 0..tokens {
            let listed = self.lists.as_ref().map(|lists| {
                let rows = self.listed(case, lists, request, t);
                let query = Array::from_fn([1, heads, width], |_, h, k| queries.row(t, h)[k]);
                self.attend(case, &query, &rows)
            });
            let listed = listed.as_ref().map(|attended| (attended, 0));
            let of_token = listed.or(dense.as_ref().map(|attended| (attended, t)));
            let Some((attended, row)) = of_token else {
                continue;
            };
            for h in 0..heads {
                let (want, want_lse) = (attended.out.row(row, h), attended.lse[row][h]);
                let left = self.sinks.as_ref().map_or(1.0, |sinks| {
                    reference::left_by_sink(f64::from(sinks[h]), want_lse)
                });
                let want: Vec<f64> = want.iter().map(|value| value * left).collect();
                written.check_row(spec, [first + t, h], &want, want_lse, group)?;
            }
        }
        Ok(())
    }

    fn attend(&self, case: &DecodeCase, queries: &Array, rows: &[Vec<f64>]) -> Attended {
        let scale = f64::from(config(case.problem).softmax_scale);
        let latent = self.layout.dims.latent as usize;
        match case.causal {
            true => reference::absorbed(queries, rows, latent, scale),
            false => reference::absorbed_non_causal(queries, rows, latent, scale),
        }
    }
}

fn stored(cache: &[u8], layout: &CacheLayout, slot: usize) -> Vec<f64> {
    let (latent, rope) = (layout.dims.latent as usize, layout.dims.head.rope as usize);
    let (page, place) = (slot / layout.page_size, slot % layout.page_size);
    let bytes = &cache[page * layout.page_stride + place * layout.row_stride..];
    reference::decode_row(layout.format, latent, rope, bytes, f64::from(layout.scale))
}
