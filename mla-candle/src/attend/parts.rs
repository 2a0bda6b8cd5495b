//! A layer and its workspace on one device.

use candle_core::{DType, Error, Result, Tensor};
use mla_runtime::backend::StepLimits;
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, IndexCall, IndexerWorkspace};
use mla_runtime::layer::{
    LayerCall, SelectedLayer, SelectedWorkspace, StepPlan, StepRequest, Weights,
};
use mla_runtime::model::IndexerConfig;
use mla_runtime::select::Selection;
use mla_runtime::tensor::{ArrayRef, Rotary};

use super::cache::Cache;
use super::device::{Lists as _, Selecting};
use super::{IndexInputs, Layer};
use crate::lend::{LentMut, next};

/// The backends on a device.
pub(super) struct Parts<D: Selecting> {
    device: D,
    pub(super) layer: SelectedLayer<D>,
    indexer: Option<D::Lists>,
}

/// The memory of steps on a device.
pub(super) struct Work<D: Selecting> {
    workspace: SelectedWorkspace<D>,
    lists: Option<IndexerWorkspace<D>>,
    /// Number of entries of a list. Requests with at most this number of tokens attend to all of
    /// them.
    slots: u32,
}

impl<D: Selecting> Parts<D> {
    pub(super) fn new(device: D, selection: &Selection, scale: f32) -> Result<Self> {
        Ok(Self {
            layer: selection.layer(&device, scale).map_err(Error::wrap)?,
            device,
            indexer: None,
        })
    }

    pub(super) fn add_indexer(&mut self, config: &IndexerConfig) -> Result<()> {
        let problem = &self.layer.config().problem;
        let indexer = D::Lists::new(&self.device, config, problem).map_err(Error::wrap)?;
        self.indexer = Some(indexer);
        Ok(())
    }

    pub(super) fn work(&self, limits: &StepLimits) -> Result<Work<D>> {
        let lists = |indexer: &D::Lists| indexer.workspace(limits);
        let lists = self.indexer.as_ref().map(lists).transpose();
        Ok(Work {
            workspace: self.layer.workspace(limits).map_err(Error::wrap)?,
            lists: lists.map_err(Error::wrap)?,
            slots: match (&self.indexer, self.takes_dense_requests()) {
                (Some(indexer), true) => indexer.config().topk,
                _ => 0,
            },
        })
    }

    /// True if, in a sparse step, the decode backend attends to all tokens of a short request.
    fn takes_dense_requests(&self) -> bool {
        use mla_runtime::backend::DecodeStage as _;
        let feature = mla_runtime::spec::Feature::DenseRequests;
        self.layer.decode().spec().features.contains(feature)
    }
}

impl<D: Selecting> Work<D> {
    pub(super) fn plan<T: Copy + std::fmt::Display + TryInto<i64>>(
        &self,
        requests: &[StepRequest<'_, T>],
    ) -> mla_runtime::Result<StepPlan> {
        StepPlan::sparse(&self.workspace, requests, self.slots)
    }

    pub(super) fn prepare(&mut self, parts: &Parts<D>, step: &StepPlan) -> mla_runtime::Result<()> {
        self.workspace.prepare(&parts.layer, step)
    }

    pub(super) fn attend(
        &mut self,
        parts: &Parts<D>,
        layer: &Layer,
        [query, latent, rope]: [&Tensor; 3],
        cache: &Cache<'_>,
        out: &Tensor,
    ) -> Result<()> {
        let config = *parts.layer.config();
        let mut read = vec![query, latent, rope, &layer.kv_b];
        read.extend(&layer.sinks);
        let mut written = vec![out];
        written.extend(cache.tensors());
        parts.device.lending(&read, &written, |read, written| {
            let mut read = read.into_iter();
            let query = next(&mut read).rows("query", 2)?;
            let latent = next(&mut read).rows("latent", 1)?;
            let rope = next(&mut read).rows("rope", 1)?;
            let kv_b = next(&mut read).rows("kv_b_proj", 2)?;
            let sinks = read.next().map(|sinks| sinks.floats("sinks")).transpose()?;
            let mut written = written.into_iter();
            let mut out = next(&mut written).rows("out", 2)?;
            let mut cache = cache.view(&config.problem, &mut written)?;
            let weights = Weights::from_checkpoint(kv_b, &config)?;
            // The call also borrows the lists. Their lifetime differs from that of the lent
            // tensors.
            let mut call = LayerCall::new(
                weights.shorten(),
                query.shorten(),
                [latent.shorten(), rope.shorten()],
                cache.reborrow(),
                out.reborrow(),
            );
            call.sinks = sinks.as_ref().map(ArrayRef::shorten);
            if let Some(lists) = self.lists.as_ref().filter(|_| config.problem.sparse) {
                call.slot_lists = Some(lists.lists(&self.workspace)?);
            }
            parts.layer.forward(&mut self.workspace, call)
        })
    }

    pub(super) fn select(
        &mut self,
        parts: &Parts<D>,
        layer: &Layer,
        inputs: &IndexInputs<'_>,
        cache: &Tensor,
    ) -> Result<()> {
        let (Some(indexer), Some(lists), Some(weights)) =
            (&parts.indexer, &mut self.lists, &layer.index)
        else {
            return Err(Error::msg(
                "indexer: given none, accepted an attention, a workspace and a layer with one",
            ));
        };
        let page_size = parts.layer.config().problem.page_size as usize;
        let config = indexer.config();
        let pool = match (inputs.gates, &weights.pool) {
            (Some(gates), Some(table)) => Some([gates, table]),
            (None, None) => None,
            (gates, _) => {
                let given = [
                    "none beside a table of pools",
                    "some without a table of pools",
                ];
                let given = given[usize::from(gates.is_some())];
                return Err(Error::msg(format!(
                    "index gates: given {given}, accepted both or neither"
                )));
            }
        };
        let [norm, bias] = &weights.norm;
        let mut read = vec![
            inputs.query_latent,
            inputs.keys,
            inputs.head_weights,
            &weights.query,
            norm,
            bias,
        ];
        read.extend(weights.angles.iter().flatten());
        read.extend(pool.iter().flatten());
        parts.device.lending(&read, &[cache], |read, mut written| {
            let mut read = read.into_iter();
            let query_latent = next(&mut read).rows("query_latent", 1)?;
            let keys = next(&mut read).rows("index keys", 1)?;
            let head_weights = next(&mut read).rows("head_weights", 1)?;
            let query = next(&mut read).rows("wq_b", 2)?.transpose(1, 2);
            let norm = next(&mut read).rows("k_norm", 1)?;
            let norm = [norm, next(&mut read).rows("k_norm bias", 1)?];
            let rotary = match weights.angles {
                None => None,
                Some(_) => {
                    let cos = next(&mut read).rows("cos", 2)?;
                    let tables = [cos, next(&mut read).rows("sin", 2)?];
                    // This style has no effect, since the indexer's configuration says how
                    // elements pair.
                    Some(Rotary::new(None, tables, config.rotary))
                }
            };
            let pool = match pool {
                None => None,
                Some(_) => {
                    let gates = next(&mut read).rows("index gates", 1)?;
                    Some([gates, next(&mut read).rows("index pool table", 2)?])
                }
            };
            let cache = written.pop().expect("as many as were lent");
            let pages = index_pages(&cache, config.page_bytes(page_size))?;
            let layout = IndexCacheLayout::contiguous(config, pages, page_size);
            let cache = IndexCacheMut::new(cache.bytes("index cache")?, layout)?;
            let inputs = [query_latent, query];
            let mut call = IndexCall::new(inputs, keys, norm, head_weights, cache);
            (call.rotary, call.pool) = (rotary, pool);
            indexer.select(&self.workspace, lists, call)
        })
    }
}

/// Returns the number of pages of an index cache, `[pages, …]` of u8, whose pages have `page` bytes
/// each.
fn index_pages<D: Selecting>(cache: &LentMut<'_, D>, page: usize) -> mla_runtime::Result<usize> {
    let form = cache.form();
    match form.dims() {
        [pages, within @ ..]
            if form.dtype() == DType::U8 && within.iter().product::<usize>() == page =>
        {
            Ok(*pages)
        }
        dims => {
            let given = format!("{} {dims:?}", form.dtype().as_str());
            let accepted = format!("u8 [pages, {page}]");
            Err(mla_runtime::Error::argument("index cache", given, accepted))
        }
    }
}
