//! The `mla` command.

fn main() {}
