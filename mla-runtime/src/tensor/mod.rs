//! Memory of a device, and borrowed, checked views of it.

mod cache;
mod host;
mod lse;
mod memory;
mod rotary;
mod view;

pub use cache::{BlockTable, CacheLayout, CacheMut, CacheRef, CacheStrides};
pub use lse::{Base2TokensFirst, LseConvention, LseLayout, LseMut, LseRef, Natural};
pub use memory::Memory;
pub use rotary::{Rotary, RotaryTables};
pub(crate) use view::check_alignment;
pub use view::{ArrayRef, Layout, TensorMut, TensorRef};
