//! `mla plan`: what a step would do and take, without running it.

mod chunks;
mod memory;

use mla_runtime::plan::parallel::ContextParallel;

use crate::args::positive;
use crate::error::CliError;

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Cut cached context into chunks that fit a workspace.
    Chunks(chunks::Args),
    /// List every buffer of device memory, or find what fits in a given amount.
    Memory(memory::Args),
}

pub(crate) fn output(command: &Command) -> Result<String, CliError> {
    match command {
        Command::Chunks(args) => chunks::output(args),
        Command::Memory(args) => memory::output(args),
    }
}

/// The distribution of the cache over ranks.
#[derive(clap::Args)]
struct ParallelArgs {
    /// Number of ranks that the cache is spread over (decode context parallelism).
    #[arg(long, value_name = "N", value_parser = positive)]
    world: Option<u32>,
    /// Number of consecutive tokens that go to one rank.
    #[arg(long, value_name = "I", default_value = "1", value_parser = positive, requires = "world")]
    interleave: u32,
}

impl ParallelArgs {
    fn read(&self) -> mla_runtime::Result<Option<ContextParallel>> {
        self.world
            .map(|world| ContextParallel::new(world, self.interleave))
            .transpose()
    }
}
