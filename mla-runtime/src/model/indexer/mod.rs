//! Facts of a model's lightning indexer.

mod config;
mod layers;

pub use config::{IndexDims, IndexerConfig};
pub(crate) use layers::LayerLists;
pub use layers::{IndexLayers, MAX_LAYERS};
