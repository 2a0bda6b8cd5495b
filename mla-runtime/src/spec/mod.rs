//! Support of backends, problems of engines, and the reasons why a backend cannot serve one.

mod availability;
mod backend;
pub(crate) mod build;
mod capability;
mod family;
mod feature;
mod kernels;
mod problem;
mod reason;
mod support;

pub use availability::{Availability, Cause};
pub use backend::BackendSpec;
pub use capability::{Capability, CapabilityMatch, Platform, Target};
pub use family::CompiledFamily;
pub use feature::{Feature, FeatureSet};
pub use kernels::{KernelFacts, Run};
#[doc(hidden)]
pub use kernels::{capabilities, count};
pub use problem::Problem;
pub(crate) use reason::Accepted;
pub use reason::{Field, Given, Reason, Reasons};
pub use support::{
    CacheDims, GraphSupport, HeadCounts, KeyLayout, LseOutput, LsePrecision, PageSizes, Phase,
    Priority, QueryFormat, QueryLen, SparseSupport,
};
