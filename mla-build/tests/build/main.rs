//! Whole builds, with a script in place of nvcc where the real one would take too long.

mod family;
mod real;
mod report;
mod reuse;
mod stub;
mod trouble;
