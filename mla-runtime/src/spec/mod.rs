//! The support that backends declare, the problems of engines, and the reasons why a backend does
//! not fit.

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

pub use availability::Cause;
pub(crate) use availability::{both, on};
pub use backend::BackendSpec;
#[doc(hidden)]
pub use capability::CapabilityMatch;
pub use capability::{Capability, Platform, Target};
pub use feature::{Feature, FeatureSet};
pub use kernels::Run;
pub use problem::Problem;
pub(crate) use reason::{Accepted, Field, Given};
pub use reason::{Reason, Reasons};
// The attribute's expansion names these types.
#[doc(hidden)]
pub use family::CompiledFamily;
#[doc(hidden)]
pub use kernels::{KernelFacts, capabilities, count};
#[doc(hidden)]
pub use support::{
    CacheDims, HeadCounts, KeyLayout, LseOutput, LsePrecision, PageSizes, Priority, QueryFormat,
    SparseSupport,
};
pub use support::{GraphSupport, Phase, QueryLen};
