//! The indexer of sparse attention on the CPU.

mod logits;
mod pool;
mod quantise;
mod rows;
mod topk;

use crate::Cpu;
use mla_runtime::Result;
use mla_runtime::indexer::{IndexCacheMut, IndexDevice, IndexKeys, IndexQueries, IndexRows};
use mla_runtime::model::IndexerConfig;
use mla_runtime::tensor::{TensorMut, TensorRef};

impl IndexDevice for Cpu {
    const POOLS_KEYS: bool = true;

    fn write_index_keys(&self, config: &IndexerConfig, keys: IndexKeys<'_, Self>) -> Result<()> {
        match config.pool {
            1 => quantise::keys(self, config, keys),
            _ => pool::keys(self, config, keys),
        }
    }

    fn quantise_index_queries(
        &self,
        config: &IndexerConfig,
        queries: IndexQueries<'_, Self>,
    ) -> Result<()> {
        quantise::queries(self, config, queries)
    }

    fn index_logits(
        &self,
        config: &IndexerConfig,
        queries: &[u8],
        weights: TensorRef<'_, Self>,
        cache: &IndexCacheMut<'_, Self>,
        rows: &IndexRows<'_, Self>,
        logits: TensorMut<'_, Self>,
    ) -> Result<()> {
        logits::logits(self, config, queries, &weights, cache, rows, logits)
    }

    fn select_slots(
        &self,
        logits: TensorRef<'_, Self>,
        rows: &IndexRows<'_, Self>,
        page_size: usize,
        slots: &mut [u8],
        width: usize,
    ) -> Result<()> {
        topk::select(self, logits, rows, page_size, slots, width)
    }
}
