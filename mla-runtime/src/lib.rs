//! Selection, planning, the layer and the CPU device of Multi-head Latent Attention (MLA).

pub mod dims;
pub mod plan;
