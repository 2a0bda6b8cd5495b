//! The guide's overlay for launchers that end the process, as the host's compiler compiles it.

use std::{fs, path::Path, process::Command};

use crate::stub::{World, succeeds};

/// A third party's header with a macro that ends the process.
const THEIRS: &str = r#"
#pragma once
#include <cstdlib>
typedef int cudaError_t;
enum { cudaSuccess = 0 };
#define CHECK_CUDA(call) do { if ((call) != cudaSuccess) std::exit(1); } while (0)
"#;

/// The third party's launcher, and the C function around it.
const LAUNCHER: &str = r#"
#include <utils.h>
cudaError_t fails() { return 98; }
void launch() { CHECK_CUDA(cudaSuccess); CHECK_CUDA(fails()); }
extern "C" int status() {
    try { launch(); } catch (cudaError_t error) { return error; }
    return cudaSuccess;
}
int main() { return status() == 98 ? 7 : 8; }
"#;

/// Returns the guide's code block for this file, which its first line names.
fn overlay() -> String {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/kernel-build.md");
    let guide = fs::read_to_string(guide).unwrap();
    let blocks = guide.split("```cpp\n").skip(1);
    let mut blocks = blocks.filter_map(|rest| rest.split("```").next());
    let block = blocks.find(|block| block.contains("#include_next"));
    block.expect("the guide shows an overlay").to_owned()
}

/// Returns the exit status of the launcher with these include roots, in order.
fn exit_status(world: &World, includes: &[&str]) -> Option<i32> {
    let mut compiler = Command::new("c++");
    compiler.current_dir(world.at("")).arg("launcher.cpp");
    for include in includes {
        compiler.args(["-I", include]);
    }
    succeeds(compiler.args(["-o", "program"]));
    let status = Command::new(world.at("program")).status();
    status.unwrap().code()
}

#[test]
fn guide_overlay() {
    let world = World::empty();
    let overlay = overlay();
    assert!(
        overlay.starts_with("// overlay/utils.h, with .include(\"overlay\").include(\"csrc\")")
    );
    world.write("overlay/utils.h", &overlay);
    world.write("csrc/utils.h", THEIRS);
    world.write("launcher.cpp", LAUNCHER);
    assert_eq!(exit_status(&world, &["csrc"]), Some(1));
    assert_eq!(exit_status(&world, &["overlay", "csrc"]), Some(7));
}
