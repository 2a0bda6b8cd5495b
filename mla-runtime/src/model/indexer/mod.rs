//! The facts of a model's indexer for sparse attention.

mod config;
mod layers;

pub use config::IndexerConfig;
pub(super) use layers::{IndexLayers, LayerLists, MAX_LAYERS};
