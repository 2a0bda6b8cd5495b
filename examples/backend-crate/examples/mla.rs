//! The `mla` command with this crate's backend beside the built-in ones.

use backend_crate as _;

fn main() -> std::process::ExitCode {
    mla_cli::main()
}
