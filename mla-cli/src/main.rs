//! The `mla` command with the built-in backends.

use std::process::ExitCode;

fn main() -> ExitCode {
    mla_cli::main()
}
