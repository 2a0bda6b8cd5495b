//! A package with kernels of two families, of which the default features compile one: see `tests`.
