//! Blackwell for data centres (`sm_100f`): machine code of the device's helpers, and no backend of
//! its own. Attention takes the portable family's backends there.

use mla_runtime::backends;

/// This family's prefill backends, and then those of a list.
pub type Prefill<Rest> = backends![..Rest];

/// This family's decode backends, and then those of a list.
pub type Decode<Rest> = backends![..Rest];
