//! Blackwell for data centres (`sm_100f`): machine code of the device's helpers, and no backend of
//! its own. Attention takes the portable family's backends there.

use mla_runtime::backends;

/// The prefill backends of this family, followed by those of a list.
pub(super) type Prefill<Rest> = backends![..Rest];

/// The decode backends of this family, followed by those of a list.
pub(super) type Decode<Rest> = backends![..Rest];
