//! A package with kernels of two families. The default features compile only one of them: see
//! `tests`.
