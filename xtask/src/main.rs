//! Developer chores of this workspace.

fn main() {}
