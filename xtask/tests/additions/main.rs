//! Tries the steps of CONTRIBUTING.md that add a cache format or a family. They must be complete,
//! and are applied to a copy of this tree.

mod cache_format;
mod family;
mod tree;
