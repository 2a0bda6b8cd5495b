//! Facts of a model's lightning indexer.

mod config;
mod layers;

pub use config::{IndexDims, IndexerConfig};
pub(super) use layers::{IndexLayers, LayerLists, MAX_LAYERS};
