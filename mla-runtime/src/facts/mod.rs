//! Facts of models and GPUs, one concept to a file. Their names on the command line, in JSON and in
//! the attribute are one function.

pub mod capability;
pub mod dims;
pub mod dtype;
pub mod feature;
pub(crate) mod indexer;
pub mod kv_format;
pub mod model;
pub(crate) mod rotary_style;
