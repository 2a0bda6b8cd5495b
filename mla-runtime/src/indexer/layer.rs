//! A sparse layer with its own indexer, from new rows of both caches to the output.

use super::device::IndexDevice;
use super::select::{IndexCall, Indexer};
use super::workspace::IndexerWorkspace;
use crate::Result;
use crate::backend::{DecodeStage, PrefillStage};
use crate::device::Device as _;
use crate::layer::{Absorbing, LayerCall, MlaLayer, Workspace};
use crate::tensor::TensorRef;

impl<P, D> MlaLayer<P, D>
where
    P: PrefillStage,
    P::Device: IndexDevice,
    D: DecodeStage<Device = P::Device>,
{
    /// Runs a layer with its own indexer for the prepared step. It writes the rows of both caches,
    /// in one launch if the device can, makes the lists, and attends to their slots. It only
    /// enqueues. The call's `slot_lists` are ignored.
    ///
    /// The result is that of [`Indexer::select`], [`IndexerWorkspace::lists`] and
    /// [`forward`](Self::forward). Layers that share the lists then need only the latter two.
    ///
    /// # Errors
    ///
    /// The errors of [`Indexer::select`] and [`forward`](Self::forward). If tensors of `call` do
    /// not fit the prepared step, nothing is enqueued. Some errors occur after part of the work is
    /// enqueued, and both caches may then be written. These are a LayerNorm of another width, and
    /// lists or a `dense_within` that the decode backend does not support.
    pub fn forward_selecting(
        &self,
        workspace: &mut Workspace<P, D>,
        lists: &mut IndexerWorkspace<P::Device>,
        indexer: &Indexer<P::Device>,
        mut index: IndexCall<'_, P::Device>,
        mut call: LayerCall<'_, P::Device>,
    ) -> Result<()> {
        lists.forget();
        self.check_order(workspace)?;
        self.check_tensors(workspace, &call)?;
        let step = workspace.prepared_for(indexer.device(), &indexer.problem)?;
        indexer.check(&step, lists, &index)?;
        // The projection comes first, because it takes longest of the work before the logits. The
        // queries can then be quantised together with the writes.
        let (queries, first) = (index.queries(), indexer.first_scored(&step, lists));
        if !first.is_empty() {
            self.device()
                .profile_range(c"mla: project index queries", || {
                    indexer.project(lists, &queries, first.clone())
                })?;
        }
        if workspace.tokens() > 0 {
            self.device().profile_range(c"mla: write caches", || {
                self.with_rows(workspace, &mut call, |rows, query, positions| {
                    let slots = rows.slots.shorten();
                    let keys = indexer.keys(&mut index, slots, positions.shorten())?;
                    let (device, config) = (self.device(), indexer.config());
                    if first.is_empty() {
                        return device.write_cache_and_index_keys(config, rows, query, keys, None);
                    }
                    let tokens = first.clone();
                    indexer.with_queries(lists, &queries, positions, tokens, |queries| {
                        let queries = Some(queries);
                        device.write_cache_and_index_keys(config, rows, query, keys, queries)
                    })
                })
            })?;
        }
        self.device().profile_range(c"mla: select slots", || {
            let step = workspace.prepared_for(indexer.device(), &indexer.problem)?;
            indexer.select_written(&step, lists, &index, first)
        })?;
        // This runs concurrently with the selection, which keeps only few SMs busy.
        self.device().profile_range(c"mla: absorb queries", || {
            self.enqueue_absorbed_queries(workspace, &mut call, Absorbing::Ready)
        })?;
        let lists = lists.lists(workspace)?;
        let mut call = call.reading(TensorRef::shorten).with_slot_lists(lists);
        self.check_lists(workspace, call.slot_lists.as_ref(), call.cache.layout())?;
        self.device().profile_range(c"mla: attend absorbed", || {
            self.enqueue_absorbed_attention(workspace, &mut call)
        })?;
        // There may be dense requests.
        self.device().profile_range(c"mla: attend expanded", || {
            self.enqueue_expanded(workspace, &mut call)
        })
    }
}
