//! The model's numbers.

use mla_runtime::model::ModelConfig;
use serde::Deserialize;

use crate::error::{Error, Result};

/// A model's configuration: what the library reads of it, and the rest.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The attention.
    pub attention: ModelConfig,
    /// The widths around it.
    pub widths: Widths,
}

/// What a configuration says beside its attention.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Widths {
    /// The number of tokens.
    pub vocab_size: usize,
    /// The width of a hidden state.
    pub hidden_size: usize,
    /// The width within the MLP.
    pub intermediate_size: usize,
    /// Of the norms.
    pub rms_norm_eps: f32,
}

impl Config {
    /// From the text of a `config.json`.
    ///
    /// # Errors
    ///
    /// If a field is missing or not accepted.
    pub fn new(json: &str) -> Result<Self> {
        let config = Self {
            attention: ModelConfig::from_hf_config(json)?,
            widths: serde_json::from_str(json)?,
        };
        for (field, given) in [
            ("num_hidden_layers", config.attention.layers.unwrap_or(0)),
            ("q_lora_rank", config.attention.q_lora_rank.unwrap_or(0)),
            ("vocab_size", config.widths.vocab_size as u32),
            ("hidden_size", config.widths.hidden_size as u32),
            ("intermediate_size", config.widths.intermediate_size as u32),
        ] {
            if given == 0 {
                return Err(Error::refused(field, "none", "1 and up"));
            }
        }
        Ok(config)
    }

    /// The decoder layers.
    pub fn layers(&self) -> usize {
        self.attention.layers.unwrap_or(0) as usize
    }
}

/// A model small enough for a CPU, with the attention of DeepSeek-V3.
pub const SMALL: &str = include_str!("../model.json");
