//! The hardware of this machine.

use mla_runtime::capability::Target;

/// What a selection is made for where no other hardware is named.
pub(crate) const fn present_target() -> Target {
    Target::CPU
}
