//! Blackwell for data centres (`sm_100f`). This family has machine code of the device's helper
//! kernels, but no backend. Attention takes the portable family's backends there.

use mla_runtime::backends;

/// Prepends this family's prefill backends to a list.
pub(super) type Prefill<Rest> = backends![..Rest];

/// Prepends this family's decode backends to a list.
pub(super) type Decode<Rest> = backends![..Rest];
