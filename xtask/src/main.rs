//! Developer chores of this workspace: `cargo xtask NAME`.

mod toolkit;

use clap::{Parser, Subcommand};

/// Developer chores of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Install the pinned CUDA toolkit, CUTLASS and libclang into the user's data folder, once.
    Toolkit(toolkit::Arguments),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().chore {
        Chore::Toolkit(arguments) => toolkit::run(&arguments),
    }
}
