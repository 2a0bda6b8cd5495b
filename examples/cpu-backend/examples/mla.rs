//! The `mla` command with this crate's backend.

// A crate that is not named is not linked.
use cpu_backend as _;

fn main() -> std::process::ExitCode {
    mla_cli::main()
}
