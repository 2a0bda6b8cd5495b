//! Whole builds, with a script in place of nvcc if the real one would take too long.

mod author;
mod cargo;
mod cpp;
mod family;
mod fresh;
mod memory;
mod only;
mod overlay;
mod paths;
mod prebuilt;
mod program;
mod real;
mod report;
mod reuse;
mod stub;
mod symbols;
mod trouble;
mod wheel;
