//! What it takes to add a cache format or a family: exactly what CONTRIBUTING.md says, tried in a
//! copy of this tree.

mod cache_format;
mod family;
mod tree;
