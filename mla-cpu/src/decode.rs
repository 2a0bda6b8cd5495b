//! The decode backend.

use std::ops::Range;

use super::Cpu;
use super::attention::{
    Engine, Engines, KEYS, LANES, OutPlaces, Partial, Running, Source, Widths, Workspace, attend,
    for_each_unit, with_workspaces,
};
use super::buffer::Scratch;
use super::cache::{Pages, Rows, check_starts};
use super::outputs::left_by_sink;
use super::prefill::{check_scale, factors};
use super::view::{Elements, Lane, Parts, Places, lse_places, scalars, with_element};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Query, SlotLists, StepLimits,
};
use mla_runtime::mla_backend;
use mla_runtime::model::{DType, Element, KvFormat};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::ArrayRef;
use mla_runtime::{Error, Result};

// The maximum number of rows in a unit. Rows are the heads of a query token, then those of the next
// token. They share the conversion of each cache row.
const ROWS: usize = 64;

// A request's keys are divided into splits. Threads share these if there are fewer units than
// threads. The splits depend only on the length and are merged in order, so a result depends
// neither on the number of threads nor on the rest of the batch.
const SPLIT_KEYS: usize = 2 * KEYS;
const MAX_SPLITS: usize = 16;

// Divides keys into one split or more. A tail of less than half a tile joins the split before it.
fn splits(keys: usize) -> impl Iterator<Item = Range<usize>> {
    let even = keys.div_ceil(MAX_SPLITS).next_multiple_of(KEYS);
    let len = even.max(SPLIT_KEYS);
    let count = match keys / len {
        0 => 1,
        whole => whole + usize::from(keys % len >= KEYS / 2),
    };
    (0..count).map(move |split| match split + 1 == count {
        true => split * len..keys,
        false => split * len..(split + 1) * len,
    })
}

/// Absorbed attention on the CPU, with every cache format, any dimensions, page size and number of
/// heads, ragged queries, and lists of slots.
#[derive(Debug)]
pub struct CpuDecode {
    config: LayerConfig,
}

/// Workspaces of [`CpuDecode`].
pub struct DecodeState {
    made_for: Problem,
    engines: Engines,
    limits: StepLimits,
    units: Vec<Unit>,
    splits: Vec<Split>,
    // The partial results of splits, if threads share units.
    running: Vec<Running>,
    out: Scratch<f32>,
    // The slots of each unit of a sparse call, one unit after another.
    slots: Vec<usize>,
}

// A block of rows: of a request, or in a sparse call of a token.
struct Unit {
    request: usize,
    // The number of row 0 within the request: query token · heads + head.
    first_row: usize,
    rows: usize,
    // The number of keys that the last row sees: the last row of the request, or in a sparse call
    // of the token.
    keys: usize,
    // The index in `slots` of the first slot of a sparse unit.
    first_slot: usize,
}

// A range of a unit's keys to which one thread attends.
struct Split {
    unit: usize,
    keys: Range<usize>,
}

#[mla_backend(
    name = "CPU",
    provider = "native",
    sm = "any",
    dtypes = "f32,f16,bf16",
    kv = "f32,f16,bf16,fp8,fp8_ds_mla,fp8_per_token",
    query_len = "ragged",
    sparse = "optional",
    quant_output = true,
    features = "sinks,deterministic,batch_invariant,nan_propagation,strided_outputs,\
                dense_requests,second_cache,split_cache,non_causal,query_scales"
)]
impl DecodeBackend for CpuDecode {
    type Device = Cpu;
    type State = DecodeState;
    type Metadata = ();

    fn new(_: &Cpu, config: &LayerConfig) -> Result<Self> {
        check_scale(config.softmax_scale)?;
        Ok(Self { config: *config })
    }

    fn state(&self, device: &Cpu, limits: &StepLimits) -> Result<DecodeState> {
        let dims = self.config.problem.dims;
        let widths = Widths {
            key: dims.row() as usize,
            value: dims.latent as usize,
            shared: true,
            // The rows of a unit are then always the heads of one token.
            fixed_rows: self.config.problem.sparse || limits.decode_query_len <= 1,
        };
        let threads = device.threads();
        let heads = self.config.problem.heads as usize;
        let rows = heads.saturating_mul(limits.decode_query_len.max(1));
        let rows = rows.min(ROWS).next_multiple_of(LANES);
        // The scale of a token may be any f32. In bf16 the scaled values would be rounded.
        let dtype = match self.config.problem.kv_format == KvFormat::Fp8PerToken {
            true => DType::F32,
            false => self.config.problem.dtype,
        };
        let engines = Engines::new(device, dtype, rows, widths, true)?;
        let out_pitch = engines.value_pitch();
        let shared_rows = threads * MAX_SPLITS * rows;
        Ok(DecodeState {
            made_for: self.config.problem,
            engines,
            limits: *limits,
            units: Vec::new(),
            splits: Vec::new(),
            running: vec![Running::EMPTY; shared_rows / LANES],
            out: Scratch::new(shared_rows * out_pitch)?,
            slots: Vec::new(),
        })
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    unsafe fn decode(
        &self,
        device: &Cpu,
        call: DecodeCall<'_, Cpu>,
        state: &mut DecodeState,
        (): &(),
    ) -> Result<()> {
        state.made_for.check_same("state", &self.config.problem)?;
        with_element!(self.config.problem.dtype, T => {
            let DecodeState { engines, units, splits, running, out, slots, limits, .. } = state;
            let (call, lists) = self.check::<T>(call, limits)?;
            call.schedule(lists, units, slots)?;
            let shared = Shared { units, splits, running, out, slots };
            with_workspaces!(engines, workspaces => call.run(device, workspaces, shared));
        });
        Ok(())
    }
}

// The arguments of a call, checked and typed.
struct Call<'a, T> {
    query: Parts<'a, T>,
    heads: usize,
    cache: Rows<'a>,
    // The second cache of a sparse call. Its slots are numbered after those of the first cache.
    second: Option<Rows<'a>>,
    pages: Pages<'a>,
    seq_lens: &'a [i32],
    query_starts: &'a [i32],
    out: OutPlaces<'a, T>,
    lse: Option<Places<'a, f32>>,
    sparse: bool,
    causal: bool,
    // The sinks: a score for each head, without a value.
    sinks: Option<&'a [f32]>,
    // The softmax scale in units of log2, multiplied by the cache's scale, and the factor of each
    // query token on it.
    scale: f32,
    query_scales: Option<&'a [f32]>,
}

// The slots to which each query token of a sparse call attends.
struct Lists<'a> {
    first: Slots<'a>,
    dense_within: usize,
    second: Option<Slots<'a>>,
}

// The slots of each query token in one cache.
struct Slots<'a> {
    slots: &'a [i32],
    counts: Option<&'a [i32]>,
    width: usize,
    // The number of slots of the cache.
    end: usize,
}

impl<'a> Slots<'a> {
    fn of(slots: &ArrayRef<'a, Cpu, i32>, width: usize, tokens: usize, end: usize) -> Result<Self> {
        let slots = scalars("slots", slots)?;
        match tokens.checked_mul(width) {
            Some(needed) if needed <= slots.len() => Ok(Self {
                slots,
                counts: None,
                width,
                end,
            }),
            _ => Err(Error::argument(
                "slots",
                slots.len(),
                format!("{tokens} tokens of {width} slots"),
            )),
        }
    }

    fn with_counts(mut self, counts: Option<&ArrayRef<'a, Cpu, i32>>) -> Result<Self> {
        self.counts = counts.map(|counts| scalars("counts", counts)).transpose()?;
        Ok(self)
    }

    // Returns the slots of a token's list that lie within the cache.
    fn valid(&self, token: usize) -> impl Iterator<Item = usize> {
        let count = self.counts.map_or(self.width, |counts| {
            usize::try_from(counts[token]).map_or(0, |count| count.min(self.width))
        });
        let list = self.slots[token * self.width..][..count].iter();
        list.filter_map(|slot| usize::try_from(*slot).ok().filter(|slot| *slot < self.end))
    }
}

struct Shared<'s> {
    units: &'s [Unit],
    splits: &'s mut Vec<Split>,
    running: &'s mut [Running],
    out: &'s mut [f32],
    slots: &'s [usize],
}

impl CpuDecode {
    fn check<'a, T: Element>(
        &self,
        call: DecodeCall<'a, Cpu>,
        limits: &StepLimits,
    ) -> Result<(Call<'a, T>, Option<Lists<'a>>)> {
        call.check(&self.config, &Self::SPEC)?;
        let problem = &self.config.problem;
        let (l, heads) = (problem.dims.latent as usize, problem.heads as usize);
        let tokens = call.query.tokens();
        let layout = *call.cache.layout();
        let (seq_lens, query_starts) = check_lens(&call.batch, tokens, limits)?;
        let lists = call.slots.as_ref();
        let lists = lists.map(|lists| Lists::of(lists, tokens, layout.slots()));
        let lists = lists.transpose()?;
        let pages = Pages::of(&call.batch.block_table, layout.page_size)?;
        // Requests that have lists use no pages.
        for (request, (len, queries)) in seq_lens.iter().zip(query_starts.windows(2)).enumerate() {
            let len = *len as usize;
            let uses_pages = lists.as_ref().is_none_or(|lists| lists.is_dense(len));
            if uses_pages && queries[0] < queries[1] {
                pages.check(request, 0, len, layout.pages)?;
            }
        }
        let second = call.slots.as_ref().and_then(|lists| lists.second.as_ref());
        let sinks = call.sinks.as_ref();
        let query = match &call.query {
            Query::Concatenated(query) => Parts {
                first: Elements::of("query", query)?,
                second: None,
            },
            Query::Split { latent, rope } => Parts {
                first: Elements::of("query (latent)", latent)?,
                second: Some(Elements::of("query (rope)", rope)?),
            },
        };
        let call = Call {
            query,
            heads,
            cache: Rows::of(&call.cache),
            second: second.map(|(cache, ..)| Rows::of(cache)),
            pages,
            seq_lens,
            query_starts,
            out: OutPlaces::of(call.out, [tokens, heads, l])?,
            lse: call.lse.map(lse_places).transpose()?,
            sparse: lists.is_some(),
            causal: call.batch.causal,
            sinks: sinks.map(|sinks| scalars("sinks", sinks)).transpose()?,
            scale: self.config.softmax_scale * std::f32::consts::LOG2_E * layout.scale,
            query_scales: factors(call.query_scales.as_ref())?,
        };
        Ok((call, lists))
    }
}

// Returns the lengths and query starts of a batch, checked against the batch's other fields and the
// step's limits.
fn check_lens<'a>(
    batch: &DecodeBatch<'a, Cpu>,
    tokens: usize,
    limits: &StepLimits,
) -> Result<(&'a [i32], &'a [i32])> {
    let seq_lens = scalars("sequence lengths", &batch.seq_lens)?;
    let query_starts = scalars("query starts", &batch.query_starts)?;
    let requests = batch.block_table.requests();
    check_starts("query starts", query_starts, requests, tokens, false)?;
    let max = batch.max_query_len.min(limits.decode_query_len);
    for (request, pair) in query_starts.windows(2).enumerate() {
        let (queries, len) = ((pair[1] - pair[0]) as usize, seq_lens[request]);
        if queries > max {
            return Err(Error::argument(
                "query length",
                format!("{queries} of request {request}"),
                format!("at most {max}, as the batch and the step's limits say"),
            ));
        }
        if len < 0 || len as usize > batch.max_seq_len {
            return Err(Error::argument(
                "sequence length",
                format!("{len} of request {request}"),
                format!("0 to {}, as the batch says", batch.max_seq_len),
            ));
        }
    }
    Ok((seq_lens, query_starts))
}

impl<'a> Lists<'a> {
    // Checks the lists. `end` is the number of slots of the first cache.
    fn of(lists: &SlotLists<'a, Cpu>, tokens: usize, end: usize) -> Result<Self> {
        let first = Slots::of(&lists.slots, lists.width, tokens, end)?;
        let second = lists
            .second
            .as_ref()
            .map(|(cache, slots, width)| Slots::of(slots, *width, tokens, cache.layout().slots()));
        Ok(Self {
            first: first.with_counts(lists.counts.as_ref())?,
            dense_within: lists.dense_within,
            second: second.transpose()?,
        })
    }

    // Returns true if a request of `len` tokens attends to all of them.
    fn is_dense(&self, len: usize) -> bool {
        self.dense_within > 0 && len <= self.dense_within
    }
}

impl<T: Element> Call<'_, T> {
    fn schedule(
        &self,
        lists: Option<Lists<'_>>,
        units: &mut Vec<Unit>,
        slots: &mut Vec<usize>,
    ) -> Result<()> {
        units.clear();
        slots.clear();
        for (request, pair) in self.query_starts.windows(2).enumerate() {
            let tokens = (pair[1] - pair[0]) as usize;
            match &lists {
                None => {
                    let keys = self.seq_lens[request] as usize;
                    self.push(units, request, 0..tokens * self.heads, keys, 0);
                }
                Some(lists) => {
                    let len = self.seq_lens[request] as usize;
                    for token in 0..tokens {
                        let row = pair[0] as usize + token;
                        let first_slot = slots.len();
                        if lists.is_dense(len) {
                            let seen = 0..(len + token + 1).saturating_sub(tokens);
                            slots.extend(seen.map(|position| self.pages.slot(request, position)));
                        } else {
                            slots.extend(lists.first.valid(row));
                        }
                        if let Some(second) = &lists.second {
                            let end = self.cache.layout().slots();
                            slots.extend(second.valid(row).map(|slot| end + slot));
                        }
                        let keys = slots.len() - first_slot;
                        let rows = token * self.heads..(token + 1) * self.heads;
                        self.push(units, request, rows, keys, first_slot);
                    }
                }
            }
        }
        // The longest units come first. Otherwise a single thread might still work on a long unit
        // at the end.
        units.sort_unstable_by_key(|unit| {
            (
                std::cmp::Reverse(unit.keys * unit.rows),
                unit.request,
                unit.first_row,
            )
        });
        Ok(())
    }

    fn push(
        &self,
        units: &mut Vec<Unit>,
        request: usize,
        rows: Range<usize>,
        keys: usize,
        first_slot: usize,
    ) {
        let end = rows.end;
        units.extend(rows.step_by(ROWS).map(|first_row| Unit {
            request,
            first_row,
            rows: ROWS.min(end - first_row),
            keys,
            first_slot,
        }));
    }

    fn run<E: Engine>(&self, device: &Cpu, workspaces: &mut [Workspace<E>], shared: Shared<'_>) {
        match shared.units.len() >= workspaces.len() {
            true => self.run_units(device, workspaces, shared),
            false => self.run_splits(device, workspaces, shared),
        }
    }

    // Runs each unit on one thread.
    fn run_units<E: Engine>(
        &self,
        device: &Cpu,
        workspaces: &mut [Workspace<E>],
        Shared { units, slots, .. }: Shared<'_>,
    ) {
        for_each_unit(device, workspaces, units.len(), |workspace, index| {
            let unit = &units[index];
            let source = self.source(unit, slots);
            let keys = splits(unit.keys);
            let total = workspace.attend_splits(&source, unit.rows, keys);
            self.finish(unit, total);
        });
    }

    // Runs each split on one thread, and then merges the partial results of each unit.
    fn run_splits<E: Engine>(
        &self,
        device: &Cpu,
        workspaces: &mut [Workspace<E>],
        shared: Shared<'_>,
    ) {
        let Some(first) = workspaces.first() else {
            return;
        };
        let Shared {
            units,
            splits: all,
            running: all_running,
            out: all_out,
            slots,
        } = shared;
        // The size of a split's partial result: its number of rows, and the distance between rows
        // of its output.
        let rows = all_running.len() * LANES / (workspaces.len() * MAX_SPLITS);
        let pitch = first.engine.value_pitch();
        all.clear();
        for (unit, Unit { keys, .. }) in units.iter().enumerate() {
            all.extend(splits(*keys).map(|keys| Split { unit, keys }));
        }
        let running = Places::new(&mut *all_running, [0; 3], [0; 3]);
        let out = Places::new(&mut *all_out, [0; 3], [0; 3]);
        for_each_unit(device, workspaces, all.len(), |workspace, index| {
            let Split { unit, keys } = &all[index];
            let unit = &units[*unit];
            let padded = unit.rows.next_multiple_of(LANES);
            debug_assert!(padded <= rows);
            // SAFETY: each split is handed out once, and the partial results of two splits do not
            // overlap. No unit has more than `rows` rows: the state was made for this problem, and
            // the check has limited each request's query tokens.
            let mut partial = unsafe {
                Partial {
                    running: running.slice(index * rows / LANES, padded / LANES),
                    out: out.slice(index * rows * pitch, padded * pitch),
                    pitch,
                }
            };
            let (engine, source) = (&mut workspace.engine, self.source(unit, slots));
            attend(engine, &source, unit.rows, keys.clone(), &mut partial);
        });
        let mut first = 0;
        for of_unit in all.chunk_by(|a, b| a.unit == b.unit) {
            let unit = &units[of_unit[0].unit];
            let running = &mut all_running[first * rows / LANES..];
            let out = &mut all_out[first * rows * pitch..];
            self.finish(
                unit,
                merged(unit, of_unit.len(), [rows, pitch], running, out),
            );
            first += of_unit.len();
        }
    }

    fn finish(&self, unit: &Unit, mut total: Partial<'_>) {
        let first_token = self.query_starts[unit.request] as usize;
        for row in 0..unit.rows {
            let index = unit.first_row + row;
            let (token, head) = (first_token + index / self.heads, index % self.heads);
            let (lse, values) = total.finish(row, self.cache.layout().scale);
            if let Some(sinks) = self.sinks {
                let left = left_by_sink(sinks[head], lse);
                values.iter_mut().for_each(|value| *value *= left);
            }
            // SAFETY: each (token, head) belongs to one unit, a unit is finished once, and the
            // elements of the outputs are distinct.
            unsafe {
                self.out.write(token, head, values);
                if let Some(places) = &self.lse {
                    places.write(places.at(head, token, 0), lse);
                }
            }
        }
    }

    fn source<'c>(&'c self, unit: &'c Unit, slots: &'c [usize]) -> UnitSource<'c, T> {
        let pair = &self.query_starts[unit.request..unit.request + 2];
        let slots = || &slots[unit.first_slot..unit.first_slot + unit.keys];
        UnitSource {
            call: self,
            slots: self.sparse.then(slots),
            unit,
            first_token: pair[0] as usize,
            tokens: (pair[1] - pair[0]) as usize,
        }
    }
}

// Merges the partial results of a unit's `count` splits in order into the first of them. They lie
// one after another, and each has room for `rows` rows of `pitch` outputs.
fn merged<'s>(
    unit: &Unit,
    count: usize,
    [rows, pitch]: [usize; 2],
    running: &'s mut [Running],
    out: &'s mut [f32],
) -> Partial<'s> {
    let used = unit.rows.next_multiple_of(LANES);
    let (running, others) = running.split_at_mut(rows / LANES);
    let (out, outs_of_others) = out.split_at_mut(rows * pitch);
    let mut total = Partial {
        running: &mut running[..used / LANES],
        out: &mut out[..used * pitch],
        pitch,
    };
    let others = others.chunks_mut(rows / LANES);
    let others = others.zip(outs_of_others.chunks_mut(rows * pitch));
    for (running, out) in others.take(count - 1) {
        total.merge(&Partial {
            running: &mut running[..used / LANES],
            out: &mut out[..used * pitch],
            pitch,
        });
    }
    total
}

struct UnitSource<'c, T> {
    call: &'c Call<'c, T>,
    slots: Option<&'c [usize]>,
    unit: &'c Unit,
    first_token: usize,
    tokens: usize,
}

impl<T> UnitSource<'_, T> {
    // Returns the cache of a key, and the key's slot there.
    fn place(&self, position: usize) -> (&Rows<'_>, usize) {
        let slot = match self.slots {
            Some(slots) => slots[position],
            None => self.call.pages.slot(self.unit.request, position),
        };
        let Call { cache, second, .. } = self.call;
        match (second, slot.checked_sub(cache.layout().slots())) {
            (Some(second), Some(slot)) => (second, slot),
            _ => (cache, slot),
        }
    }
}

impl<T: Element, S: Lane> Source<S> for UnitSource<'_, T> {
    fn query(&self, row: usize, to: &mut [S]) {
        let index = self.unit.first_row + row;
        let (token, head) = (index / self.call.heads, index % self.call.heads);
        self.call.query.read_row(self.first_token + token, head, to);
    }

    fn scale(&self, row: usize) -> f32 {
        let token = self.first_token + (self.unit.first_row + row) / self.call.heads;
        let scales = self.call.query_scales;
        self.call.scale * scales.map_or(1.0, |scales| scales[token])
    }

    fn limit(&self, row: usize) -> usize {
        if self.slots.is_some() || !self.call.causal {
            return self.unit.keys;
        }
        let token = (self.unit.first_row + row) / self.call.heads;
        // The last query token sees every key. Each token before it sees one key less.
        (self.unit.keys + token + 1).saturating_sub(self.tokens)
    }

    fn key(&self, position: usize, to: &mut [S]) {
        let (cache, slot) = self.place(position);
        cache.decode(slot, to);
    }

    fn key_in_place(&self, position: usize) -> Option<&[S]> {
        if self.call.cache.layout().format != KvFormat::of(S::DTYPE) {
            return None;
        }
        let (cache, slot) = self.place(position);
        bytemuck::try_cast_slice(cache.whole(slot)?).ok()
    }

    fn value(&self, _: usize, _: &mut [S]) {}
}
