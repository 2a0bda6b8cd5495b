//! A step as plain data, so that a test can make any part of it wrong.

use std::ops::Range;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{DecodeBackend, LayerConfig, PrefillBackend, SlotLists, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims, Rope};
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{
    ArrayRef, CacheLayout, CacheMut, Layout, LseLayout, LseMut, RotaryTables, TensorMut, TensorRef,
};
use mla_runtime::{Result, named};

use crate::aligned::Aligned;

pub(crate) const DIMS: MlaDims = MlaDims::new(32, HeadDims::new(16, 8, 16));
pub(crate) const HEADS: usize = 2;
pub(crate) const TOKENS: usize = 6;
pub(crate) const PAGE: usize = 4;
pub(crate) const PAGES: usize = 6;

/// A view of a tensor: its layout, its offset in its memory, and the size of that memory.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) layout: Layout,
    pub(crate) offset: usize,
    /// The number of bytes; `None` means the span of the layout.
    pub(crate) bytes: Option<usize>,
}

impl View {
    fn new(shape: [usize; 3]) -> Self {
        Self {
            layout: Layout::contiguous(DType::F32, shape),
            offset: 0,
            bytes: None,
        }
    }

    /// Gives the view another shape, without gaps.
    pub(crate) fn shape(&mut self, shape: [usize; 3]) {
        self.layout = Layout::contiguous(self.layout.dtype, shape);
    }

    fn len(&self) -> usize {
        self.bytes
            .unwrap_or_else(|| self.layout.span_bytes().unwrap_or(1 << 20))
    }

    /// Returns the index of an element in the memory.
    pub(crate) fn place(&self, i: usize, j: usize, k: usize) -> usize {
        let strides = self.layout.strides;
        self.offset / 4 + i * strides[0] + j * strides[1] + k * strides[2]
    }

    /// Makes memory in which each element of the view has a value that depends on its index. The
    /// gaps are NaN.
    pub(crate) fn memory(&self, tensor: u32) -> Vec<f32> {
        // Larger views only occur in cases that must be refused.
        let span = self.layout.span_bytes().unwrap_or(1 << 20).min(1 << 20);
        let mut memory = vec![f32::NAN; (self.offset + self.len().max(span)).div_ceil(4) + 1];
        let [a, b, c] = self.layout.shape;
        if self.layout.dtype != DType::F32 || span == 1 << 20 || !self.offset.is_multiple_of(4) {
            return memory;
        }
        for (i, j, k) in
            (0..a).flat_map(|i| (0..b).flat_map(move |j| (0..c).map(move |k| (i, j, k))))
        {
            memory[self.place(i, j, k)] = number(tensor, i, j, k);
        }
        memory
    }
}

/// Returns a pseudorandom number from −1 to 1.
pub(crate) fn number(tensor: u32, i: usize, j: usize, k: usize) -> f32 {
    let mut x = (tensor as u64) << 48 ^ (i as u64) << 32 ^ (j as u64) << 16 ^ k as u64;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32 / (1u64 << 23) as f32) - 1.0
}

/// The preparation of the workspace before the layer runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Prepared {
    /// This step is prepared.
    Step,
    /// Nothing was ever prepared.
    Nothing,
    /// This step was prepared, and then a step that was refused.
    Refused,
    /// A step of fewer tokens is prepared.
    Another,
    /// This step is prepared, but the workspace belongs to a layer for another problem.
    OtherProblem,
}

/// A rotation that the call must do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotation {
    pub(crate) width: u32,
    pub(crate) positions: usize,
    /// True if the rotation is in [`LayerCall::rotary`]; false if `forward_unrotated` does it.
    pub(crate) fused: bool,
}

/// A decode after five tokens, and five new tokens after four.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) config: LayerConfig,
    pub(crate) limits: StepLimits,
    pub(crate) requests: Vec<Request>,
    pub(crate) tables: Vec<i32>,
    pub(crate) max_pages: usize,
    pub(crate) table_page: u32,
    pub(crate) slots: Option<Vec<i64>>,
    pub(crate) threshold: Option<u32>,
    pub(crate) query: View,
    pub(crate) latent: View,
    pub(crate) rope: View,
    pub(crate) out: View,
    pub(crate) weights: View,
    pub(crate) lse: Option<LseLayout>,
    pub(crate) lse_bytes: usize,
    pub(crate) cache: CacheLayout,
    pub(crate) cache_bytes: usize,
    pub(crate) max_len: Option<u32>,
    pub(crate) dense_within: u32,
    /// The width of the lists, and the number of their entries.
    pub(crate) slot_lists: Option<(usize, usize)>,
    /// The entries. If there are too few, they repeat from the first.
    pub(crate) list_entries: Vec<i32>,
    pub(crate) slot_counts: Option<usize>,
    pub(crate) rotation: Option<Rotation>,
    /// Positions that the caller gives; `None` means those of the step.
    pub(crate) given_positions: Option<Vec<i64>>,
    pub(crate) prepared: Prepared,
    /// True if the backends read 16 bytes at a time.
    pub(crate) aligned: bool,
    /// The offset of the cache in its memory, in bytes.
    pub(crate) cache_offset: usize,
    /// The ranges of the cache's memory that are not NaN; `None` means all of it.
    pub(crate) cache_numbers: Option<Vec<Range<usize>>>,
}

/// The run of a setup: its result, and the memory before and after it.
pub(crate) struct Ran {
    pub(crate) result: Result<Done>,
    /// The memory of the cache and of the output, before and after the run.
    pub(crate) cache: [Vec<f32>; 2],
    pub(crate) out: [Vec<f32>; 2],
}

/// The results of a step that was not refused, except its outputs.
pub(crate) struct Done {
    /// `[heads][row_stride]`, if the log-sum-exp was asked for.
    pub(crate) lse: Option<Vec<f32>>,
    pub(crate) absorbed_tokens: usize,
}

impl Ran {
    /// Returns true if the cache or the output was changed.
    pub(crate) fn touched(&self) -> bool {
        [&self.cache, &self.out]
            .iter()
            .any(|[before, after]| bytes(before) != bytes(after))
    }
}

impl Default for Setup {
    fn default() -> Self {
        let problem = Problem::new(DIMS, HEADS as u32, DType::F32)
            .with_page_size(PAGE as u32)
            .with_query_len(QueryLen::Ragged);
        let cache = CacheLayout::contiguous(DIMS, KvFormat::F32, PAGES, PAGE);
        Self {
            config: LayerConfig::new(problem, 0.2),
            limits: StepLimits::new(4, 8, 3)
                .with_decode_query_len(2)
                .with_context_rows(8),
            requests: vec![Request::new(1, 6), Request::new(5, 9)],
            tables: vec![3, 1, -7, 0, 4, 2],
            max_pages: 3,
            table_page: PAGE as u32,
            slots: None,
            threshold: None,
            query: View::new([TOKENS, HEADS, 24]),
            latent: View::new([TOKENS, 1, 32]),
            rope: View::new([TOKENS, 1, 8]),
            out: View::new([TOKENS, HEADS, 16]),
            weights: View::new([1, 32, HEADS * 32]),
            lse: Some(LseLayout::heads_first(HEADS, TOKENS)),
            lse_bytes: 4 * HEADS * TOKENS,
            cache,
            cache_bytes: PAGES * cache.page_stride,
            max_len: None,
            dense_within: 0,
            slot_lists: None,
            list_entries: vec![-1],
            slot_counts: None,
            rotation: None,
            given_positions: None,
            prepared: Prepared::Step,
            aligned: false,
            cache_offset: 0,
            cache_numbers: None,
        }
    }
}

/// The bytes of numbers.
fn bytes(numbers: &[f32]) -> &[u8] {
    bytemuck::cast_slice(numbers)
}

impl Setup {
    /// Returns the outputs or the error. Also returns true if anything was written.
    pub(crate) fn run(&self) -> (Result<Vec<f32>>, bool) {
        let ran = self.run_whole();
        let touched = ran.touched();
        let out = &ran.out[1];
        let outputs = ran
            .result
            .map(|_| self.outputs().map(|at| out[at]).collect());
        (outputs, touched)
    }

    /// Returns the index of each output in the output's memory, row by row.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = usize> + use<> {
        let out = self.out.clone();
        let [tokens, heads, width] = out.layout.shape;
        let rows = (0..tokens).flat_map(move |i| (0..heads).map(move |j| (i, j)));
        let all = rows.flat_map(move |(i, j)| (0..width).map(move |k| (i, j, k)));
        all.map(move |(i, j, k)| out.place(i, j, k))
    }

    /// Runs the setup and returns all of its results.
    pub(crate) fn run_whole(&self) -> Ran {
        let mut cache = vec![0.0f32; (self.cache_offset + self.cache_bytes).div_ceil(4)];
        for (at, value) in cache.iter_mut().enumerate() {
            *value = match &self.cache_numbers {
                Some(ranges) if !ranges.iter().any(|range| range.contains(&at)) => f32::NAN,
                _ => number(9, at, 0, 0),
            };
        }
        let mut out = self.out.memory(8);
        let before = (cache.clone(), out.clone());
        let result = match self.aligned {
            false => self.forward::<CpuPrefill, CpuDecode>(&mut cache, &mut out),
            true => self.forward::<Aligned<CpuPrefill>, Aligned<CpuDecode>>(&mut cache, &mut out),
        };
        Ran {
            result,
            cache: [before.0, cache],
            out: [before.1, out],
        }
    }

    /// Returns each request with its row of the block tables, if there is one.
    fn step_requests(&self) -> Vec<StepRequest<'_>> {
        let rows = (0..self.requests.len()).map(|at| {
            let start = (at * self.max_pages).min(self.tables.len());
            &self.tables[start..(start + self.max_pages).min(self.tables.len())]
        });
        let requests = self.requests.iter().zip(rows);
        let requests = requests.map(|(lens, pages)| StepRequest::new(lens.q, lens.kv, pages));
        requests.collect()
    }

    fn forward<P, D>(&self, cache: &mut [f32], out: &mut [f32]) -> Result<Done>
    where
        P: PrefillBackend<Device = Cpu>,
        D: DecodeBackend<Device = Cpu>,
    {
        let device = Cpu::new();
        let layer = MlaLayer::<P, D>::of(&device, &self.config)?;
        let other = self
            .config
            .with_problem(self.config.problem.with_page_size(8));
        let other = MlaLayer::<P, D>::of(&device, &other)?;
        let maker = match self.prepared {
            Prepared::OtherProblem => &other,
            _ => &layer,
        };
        let mut workspace = maker.workspace(&self.limits)?;
        let limits = *workspace.limits();
        let problem = self.config.problem.with_page_size(self.table_page);
        let threshold = workspace.threshold();
        let requests = self.step_requests();
        match self.prepared {
            Prepared::Nothing => {}
            Prepared::Another => {
                let fewer = &requests[..requests.len().min(1)];
                let fewer = StepPlan::in_order(&problem, &limits, threshold, 0, fewer)?;
                workspace.prepare(&layer, &fewer)?;
            }
            _ => {
                let threshold = self.threshold.unwrap_or(threshold);
                let dense = self.dense_within;
                let step = StepPlan::in_order(&problem, &limits, threshold, dense, &requests)?;
                let step = step.with_max_len(self.max_len);
                let step = match &self.slots {
                    Some(slots) => step.with_slots(slots)?,
                    None => step,
                };
                workspace.prepare(&layer, &step)?;
            }
        }
        if self.prepared == Prepared::Refused {
            let more = vec![StepRequest::<i32>::new(0, 0, &[]); limits.requests + 1];
            let limits = limits.with_requests(more.len());
            let wrong = StepPlan::within(&problem, &limits, 1, &more)?;
            assert!(workspace.prepare(&layer, &wrong).is_err());
        }

        let memories = [&self.query, &self.latent, &self.rope, &self.weights];
        let [mut query, latent, mut rope, weights] =
            [0, 1, 2, 3].map(|at| memories[at].memory(at as u32));
        let part = |view: &View| view.offset..view.offset + view.len();
        let read = |name, memory, view: &View| -> Result<TensorRef<'_, Cpu>> {
            named(
                name,
                TensorRef::new(&bytes(memory)[part(view)], view.layout),
            )
        };
        let mut lse_memory = vec![0.0f32; self.lse_bytes.div_ceil(4)];
        let lse = match self.lse {
            Some(layout) => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut lse_memory);
                Some(named(
                    "lse",
                    LseMut::new(&mut bytes[..self.lse_bytes], layout),
                )?)
            }
            None => None,
        };
        let entries = self.slot_lists.map_or(0, |(_, entries)| entries);
        let lists: Vec<i32> = self
            .list_entries
            .iter()
            .copied()
            .cycle()
            .take(entries)
            .collect();
        let counts = self.slot_counts.map(|count| vec![1i32; count]);
        let slot_lists = self.slot_lists.map(|(width, _)| {
            let counts = counts.as_deref().map(ArrayRef::from_slice);
            SlotLists::new(ArrayRef::from_slice(&lists), width).with_counts(counts)
        });
        let tables = match self.rotation {
            Some(Rotation {
                width, positions, ..
            }) => Some(RotaryTables::new(
                &device,
                &Rope::plain(1e4),
                width,
                positions,
            )?),
            None => None,
        };
        let given = self.given_positions.as_deref().map(ArrayRef::from_slice);
        let rotary = match (&tables, given) {
            (Some(tables), Some(given)) => Some(tables.rotation()?.with_positions(given)),
            (Some(tables), None) => Some(tables.rotation()?),
            (None, _) => None,
        };
        let cache: &mut [u8] = bytemuck::cast_slice_mut(cache);
        let cache = CacheMut::new(
            &mut cache[self.cache_offset..][..self.cache_bytes],
            self.cache,
        );
        let cache = named("cache", cache)?;
        let out: &mut [u8] = bytemuck::cast_slice_mut(out);
        let out = TensorMut::new(&mut out[part(&self.out)], self.out.layout);
        let out = named("out", out)?;
        let weights =
            Weights::from_transposed(read("W_kv_b", &weights, &self.weights)?, &self.config)?;
        let latent = read("latent", &latent, &self.latent)?;
        match (self.rotation, rotary) {
            (Some(Rotation { fused: false, .. }), Some(rotary)) => {
                let before = [query.clone(), rope.clone()];
                let [query_bytes, rope_bytes] = [&mut query, &mut rope]
                    .map(|memory| bytemuck::cast_slice_mut::<f32, u8>(memory));
                let to = TensorMut::new(&mut query_bytes[part(&self.query)], self.query.layout);
                let query_to = named("query", to)?;
                let to = TensorMut::new(&mut rope_bytes[part(&self.rope)], self.rope.layout);
                let rope_to = named("rope", to)?;
                let result = layer.forward_unrotated(
                    &mut workspace,
                    LayerCall::unrotated(weights, query_to, latent, rope_to, rotary, cache, out)
                        .with_lse(lse)
                        .with_slot_lists(slot_lists),
                );
                let turned = [&query, &rope].map(|memory| bytes(memory))
                    != before.each_ref().map(|memory| bytes(memory));
                assert!(
                    result.is_ok() || !turned,
                    "refused after something was rotated"
                );
                result?;
            }
            (_, rotary) => layer.forward(
                &mut workspace,
                LayerCall::new(
                    weights,
                    read("query", &query, &self.query)?,
                    [latent, read("rope", &rope, &self.rope)?],
                    cache,
                    out,
                )
                .with_lse(lse)
                .with_slot_lists(slot_lists)
                .with_rotary(rotary),
            )?,
        }
        Ok(Done {
            lse: self.lse.is_some().then_some(lse_memory),
            absorbed_tokens: workspace.absorbed_tokens(),
        })
    }
}
