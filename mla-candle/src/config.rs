//! The module's view of a model.

use candle_core::{Error, Result};
use mla_runtime::model::ModelConfig;
use serde::Deserialize;

/// The widths and constants of a model's attention.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Heads, dimensions and rotary embedding.
    pub attention: ModelConfig,
    /// The width of hidden states.
    pub hidden_size: usize,
    /// The epsilon of the norms.
    pub rms_norm_eps: f64,
    /// True if the projections from and to hidden states have a bias.
    pub attention_bias: bool,
}

/// The fields of a configuration that do not belong to the attention.
#[derive(Deserialize)]
struct OuterFields {
    hidden_size: usize,
    rms_norm_eps: f64,
    #[serde(default)]
    attention_bias: bool,
}

impl Config {
    /// Reads the text of a model's `config.json`.
    ///
    /// # Errors
    ///
    /// If a field is missing or has a value that is not accepted.
    pub fn from_json(json: &str) -> Result<Self> {
        let outer: OuterFields = serde_json::from_str(json).map_err(Error::wrap)?;
        let attention = ModelConfig::from_hf_config(json).map_err(Error::wrap)?;
        let dense = attention.dense_layers(attention.layers.unwrap_or(0));
        for (field, given) in [
            ("output gate", attention.output_gate.is_some()),
            ("sinks", attention.sinks),
            ("query scaling", attention.query_factor(0).is_some()),
            (
                "latent scaling",
                attention.scaled_query_latents || attention.scaled_latents,
            ),
            ("norm of rotary keys", attention.rotary_key_norm),
            (
                "indexer of the model's own",
                attention.foreign_indexer.is_some(),
            ),
            ("dense layers among sparse ones", dense > 0),
            ("indexer", attention.indexer.is_some()),
        ] {
            if given {
                return Err(Error::msg(format!(
                    "{field}: given true, accepted false: this module has none"
                )));
            }
        }
        Ok(Self {
            attention,
            hidden_size: outer.hidden_size,
            rms_norm_eps: outer.rms_norm_eps,
            attention_bias: outer.attention_bias,
        })
    }
}

/// The limits of a module's cache and workspace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// The maximum number of sequences of a batch.
    pub batch: usize,
    /// The maximum number of tokens of a sequence.
    pub max_len: usize,
}

impl Limits {
    /// Makes limits of `batch` sequences of at most `max_len` tokens each.
    pub const fn new(batch: usize, max_len: usize) -> Self {
        Self { batch, max_len }
    }
}
