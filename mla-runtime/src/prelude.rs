//! The names that an engine uses in most files: `use mla_runtime::prelude::*;`.

pub use crate::backend::{LayerConfig, StepLimits};
pub use crate::device::Device;
pub use crate::layer::{
    LayerCall, MlaLayer, OwnedWeights, SelectedLayer, SelectedWorkspace, StepPlan, StepRequest,
    Weights, Workspace,
};
pub use crate::model::{DType, HeadDims, KvFormat, MlaDims, ModelConfig};
pub use crate::named;
pub use crate::select::{Registry, Selection, SelectionError, SelectionRequest};
pub use crate::spec::{Feature, Problem, QueryLen};
pub use crate::tensor::{
    ArrayRef, CacheLayout, CacheMut, Layout, LseLayout, LseMut, Memory, RotaryTables, TensorMut,
    TensorRef,
};
