//! The names that an engine uses in every file: `use mla_runtime::prelude::*;`.

pub use crate::backend::{LayerConfig, StepLimits};
pub use crate::cache::{CacheLayout, CacheMut};
pub use crate::device::{Device, Memory};
pub use crate::dims::{HeadDims, MlaDims};
pub use crate::dtype::DType;
pub use crate::error::Named;
pub use crate::kv_format::KvFormat;
pub use crate::layer::{
    LayerCall, MlaLayer, OwnedWeights, SelectedLayer, SelectedWorkspace, Step, StepBatch,
    StepRequest, TokenRows, UnrotatedCall, Weights, Workspace,
};
pub use crate::lse::{LseLayout, LseMut};
pub use crate::model::ModelConfig;
pub use crate::problem::Problem;
pub use crate::registry::Registry;
pub use crate::rotary::RotaryTables;
pub use crate::selection::{Selection, SelectionError, SelectionRequest};
pub use crate::tensor::{ArrayRef, Layout, TensorMut, TensorRef};
