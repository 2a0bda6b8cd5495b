//! `cargo lab`: compares the kernels with other libraries' and with the limits of a machine, by the
//! protocol of `mla bench`.

mod ceilings;
mod helpers;
mod indexer;
mod peers;
mod timing;

use std::process::ExitCode;

use clap::Parser;
use mla_cli::{arguments, finish};

/// Measure this machine, and compare the kernels with other libraries.
#[derive(Parser)]
#[command(name = "lab", bin_name = "cargo lab", version, max_term_width = 100)]
enum Lab {
    /// Time the built-in backends and other libraries in the same run on the same device.
    Peers(Box<peers::Args>),
    /// Time the parts of a sparse layer: cache rows, the indexer's queries, logits and lists, and
    /// the layer. The model must have an indexer, such as deepseek-v3.2 in --model.
    Indexer(indexer::Args),
    /// Time the helper operations of a device, and the layer's GEMMs per head.
    Helpers(helpers::Args),
    /// Measure the maximum throughput of this machine.
    Ceilings(ceilings::Args),
}

fn main() -> ExitCode {
    finish(match arguments() {
        Lab::Peers(args) => peers::output(&args),
        Lab::Indexer(args) => indexer::output(&args),
        Lab::Helpers(args) => helpers::output(&args),
        Lab::Ceilings(args) => ceilings::output(&args),
    })
}
