//! Compiles CUDA sources with nvcc from a Cargo build script.
