//! `cargo lab`: measures the kernels beside other libraries' and the limits of a machine, by the
//! protocol of `mla bench`.

mod ceilings;
mod helpers;
mod indexer;
mod peers;
mod timing;

use std::process::ExitCode;

use clap::Parser;
use mla_cli::{arguments, finish};

/// Measure beside other libraries, on the machine that is to be known.
#[derive(Parser)]
#[command(name = "lab", bin_name = "cargo lab", version, max_term_width = 100)]
enum Lab {
    /// Time the built-in backends beside other libraries, in the same run on the same GPU.
    Peers(Box<peers::Args>),
    /// Time a sparse layer's parts: the caches' rows, the indexer's queries, logits and lists, and
    /// the layer. --model or --config has to name a model with an indexer, such as deepseek-v3.2.
    Indexer(indexer::Args),
    /// Time the helper operations of a device, and the products per head of the layer.
    Helpers(helpers::Args),
    /// Measure the maximal throughput of this machine.
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
