//! The steps that add a cache format or a family: exactly those of CONTRIBUTING.md, tried in a copy
//! of this tree.

mod cache_format;
mod family;
mod tree;
