//! The cache of compiled kernels: statistics and maintenance.

use std::{path::PathBuf, time::Duration};

use anyhow::Context;
use clap::Subcommand;
use mla_build::{cache, report::size};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The cache's folder [default: MLA_BUILD_CACHE, or `mla-build` in the user's cache folder].
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Action. Without one, statistics are shown.
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Remove everything, or only what was not used for some time.
    Clean {
        /// Keep objects that were used within this many days.
        #[arg(long, value_name = "DAYS")]
        older_than: Option<u64>,
    },
    /// Copy the cache's content to another folder, for another machine.
    Export {
        /// The destination folder, which then is a cache, too.
        to: PathBuf,
    },
    /// Copy another cache's content to this one.
    Import {
        /// The folder of the other cache.
        from: PathBuf,
    },
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let given = arguments.folder.clone();
    let folder = given
        .map_or_else(cache::folder, |folder| Ok(Some(folder)))?
        .context("no cache: set MLA_BUILD_CACHE, XDG_CACHE_HOME or HOME")?;
    match &arguments.command {
        None => show(&folder)?,
        Some(Command::Clean { older_than }) => {
            let seconds = older_than.unwrap_or(0).saturating_mul(24 * 60 * 60);
            let age = Duration::from_secs(seconds);
            let bytes = cache::clean(&folder, age)?;
            println!("{} less in {}", size(bytes), folder.display());
        }
        Some(Command::Export { to }) => {
            let objects = cache::copy(&folder, to)?;
            println!("{objects} objects new in {}", to.display());
        }
        Some(Command::Import { from }) => {
            let objects = cache::copy(from, &folder)?;
            println!("{objects} objects new in {}", folder.display());
        }
    }
    Ok(())
}

fn show(folder: &std::path::Path) -> anyhow::Result<()> {
    let statistics = cache::statistics(folder);
    println!("{}", folder.display());
    println!(
        "{} objects, {} of at most {}",
        statistics.objects,
        size(statistics.bytes),
        size(cache::bound()?)
    );
    if let Some(unused) = statistics.oldest.and_then(|used| used.elapsed().ok()) {
        let days = unused.as_secs_f64() / (24.0 * 60.0 * 60.0);
        println!("the one that was not used for longest: {days:.1} days ago");
    }
    println!(
        "the last {} builds found {} units there and compiled {}",
        statistics.builds, statistics.cached, statistics.compiled
    );
    Ok(())
}
