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
#[doc(hidden)]
pub use capability::CapabilityMatch;
pub use capability::{Capability, Platform, Target};
pub use family::CompiledFamily;
pub use feature::{Feature, FeatureSet};
pub use kernels::{KernelFacts, Run};
#[doc(hidden)]
pub use kernels::{capabilities, count};
pub use problem::Problem;
pub(crate) use reason::Accepted;
pub use reason::{Field, Given, Reason, Reasons};
// The words of a spec, which the attribute writes.
#[doc(hidden)]
pub use support::{
    CacheDims, HeadCounts, KeyLayout, LseOutput, LsePrecision, PageSizes, Priority, QueryFormat,
    SparseSupport,
};
pub use support::{GraphSupport, Phase, QueryLen};
