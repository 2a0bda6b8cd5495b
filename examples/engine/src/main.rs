//! Serves some requests and prints the results.
//!
//! ```console
//! $ cargo run --release -p engine
//! $ cargo run --release -p engine --features sm90
//! ```

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use engine::Chosen;
use engine::config::{Config, SMALL};
use engine::engine::Engine;
use engine::error::{Error, Result};
use engine::operations::Operations as _;
use engine::runner::Size;
use engine::status::Status;

/// A small engine for a model of random weights, with continuous batching, shared prefixes and
/// drafts.
#[derive(Parser)]
#[command(allow_negative_numbers = true)]
struct Arguments {
    /// A model's config.json [default: a small model with the attention of DeepSeek-V3].
    #[arg(long)]
    config: Option<PathBuf>,
    /// Number of requests that arrive, one every two steps.
    #[arg(long, default_value_t = 24)]
    requests: usize,
    /// Maximum number of tokens of a prompt, including the beginning that all prompts share.
    #[arg(long, default_value_t = 160)]
    prompt: usize,
    /// Number of tokens that each request generates.
    #[arg(long, default_value_t = 48)]
    tokens: usize,
    /// Maximum number of drafts that a step verifies for each request.
    #[arg(long, default_value_t = 3)]
    drafts: usize,
    /// Compute bits of each request that do not depend on the others. A backend that does not
    /// promise this is refused by name.
    #[arg(long)]
    batch_invariant: bool,
    /// Pages of the cache.
    #[arg(long, default_value_t = 64)]
    pages: usize,
    /// Maximum number of tokens of a step.
    #[arg(long, default_value_t = 256)]
    step: usize,
    /// Seed of the weights and prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// The maximum number of requests of a step.
const REQUESTS: usize = 16;
/// The maximum number of tokens of a prompt, of its generated tokens, and of a step.
const MAX_TOKENS: usize = 1 << 30;
/// The maximum number of tokens that all prompts share at their beginning.
const SHARED: usize = 70;
const PAGE: usize = 64;

fn main() -> ExitCode {
    match serve(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output may have stopped reading.
        Err(Error::Output(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "engine: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Refuses arguments under their own names that the engine would refuse under other names.
fn check(arguments: &Arguments) -> Result<()> {
    for (name, given, accepted) in [
        ("--prompt", arguments.prompt, 1..=MAX_TOKENS),
        ("--tokens", arguments.tokens, 1..=MAX_TOKENS),
        ("--step", arguments.step, REQUESTS..=MAX_TOKENS),
    ] {
        if !accepted.contains(&given) {
            let accepted = format!("{} to {}", accepted.start(), accepted.end());
            return Err(Error::refused(name, given, accepted));
        }
    }
    Ok(())
}

/// Reads the text of a configuration. The maximum size also refuses a file without an end, such as
/// a device.
fn read(path: &Path) -> std::io::Result<String> {
    const MAX: u64 = 1 << 20;
    let mut text = String::new();
    File::open(path)?.take(MAX + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MAX {
        true => Err(std::io::Error::other(format!("more than {MAX} bytes"))),
        false => Ok(text),
    }
}

fn serve(arguments: &Arguments) -> Result<()> {
    check(arguments)?;
    let mut status = Status::new("making the model");
    let json = match &arguments.config {
        None => SMALL.to_owned(),
        Some(path) => read(path).map_err(|error| {
            let given = format!("{} ({error})", path.display());
            Error::refused("--config", given, "a file that can be read")
        })?,
    };
    let config = Config::new(&json)?;
    let size = Size {
        pages: arguments.pages,
        page_size: PAGE,
        requests: REQUESTS,
        tokens: arguments.step,
        max_len: arguments.prompt.saturating_add(arguments.tokens),
        drafts: arguments.drafts,
        batch_invariant: arguments.batch_invariant,
    };
    let device = Chosen::open()?;
    let mut engine = Engine::new(&device, &config, &size, arguments.seed)?;
    let [prefill, decode] = engine.backends();
    status.line(&format!(
        "{} layers on {}: {prefill} and {decode}, {} pages of {PAGE} tokens",
        config.layers(),
        engine.platform(),
        size.pages
    ))?;
    let mut random = fastrand::Rng::with_seed(arguments.seed);
    let mut token = || random.u32(0..config.widths.vocab_size as u32);
    let beginning: Vec<u32> = (0..SHARED.min(arguments.prompt)).map(|_| token()).collect();
    let (mut arrived, mut steps) = (0, 0usize);
    while arrived < arguments.requests || !engine.is_idle() {
        if arrived < arguments.requests && steps.is_multiple_of(2) {
            let own = arguments.prompt - beginning.len();
            let own = own.min(1 + arrived * 37 % own.max(1));
            let prompt: Vec<u32> = beginning
                .iter()
                .copied()
                .chain((0..own).map(|_| token()))
                .collect();
            engine.submit(&prompt, arguments.tokens)?;
            arrived += 1;
        }
        let events = engine.step()?;
        status.show(&engine, &events)?;
        steps += 1;
    }
    status.finish();
    status.line(&engine.metrics().to_string())?;
    Ok(())
}
