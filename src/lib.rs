//! Multi-head Latent Attention kernels for NVIDIA GPUs, as backends of `mla-runtime`.
