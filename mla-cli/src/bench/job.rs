//! One row of a benchmark: what is timed, and what it is called.

use std::collections::BTreeMap;

use mla_runtime::backend::LayerConfig;
use mla_runtime::batch::Request;

use super::attention::{Attention, Kind};
use super::layer::Layer;
use crate::cost::Cost;
use crate::error::CliError;

/// One row to be measured.
#[derive(Clone, Debug)]
pub struct Job {
    /// The description of the case. Rows of the same case compete with each other.
    pub case: String,
    /// The name of the contender: its backends, and the path if it is chosen.
    pub contender: String,
    /// The batch in words.
    pub label: String,
    /// The value of each axis.
    pub parameters: BTreeMap<&'static str, String>,
    pub subject: Subject,
}

/// The attention or the layer to time.
#[derive(Clone, Debug)]
pub enum Subject {
    Attention(Attention),
    Layer(Layer),
}

impl Subject {
    pub const fn config(&self) -> &LayerConfig {
        match self {
            Self::Attention(attention) => &attention.config,
            Self::Layer(layer) => &layer.config,
        }
    }

    pub const fn layers(&self) -> usize {
        match self {
            Self::Attention(attention) => attention.layers,
            Self::Layer(layer) => layer.layers,
        }
    }

    pub fn requests(&self) -> &[Request] {
        match self {
            Self::Attention(attention) => &attention.requests,
            Self::Layer(layer) => layer.spec.requests(),
        }
    }

    /// The cost of one layer.
    pub fn cost(&self) -> Result<Cost, CliError> {
        match self {
            Self::Attention(attention) => Ok(attention.cost()),
            Self::Layer(layer) => layer.cost(),
        }
    }

    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Attention(attention) => match attention.kind {
                Kind::Decode if attention.lists.is_some() => "sparse",
                Kind::Decode => "decode",
                Kind::Prefill { .. } => "prefill",
            },
            Self::Layer(_) => "layer",
        }
    }
}
