//! Sources in C++, which nvcc does not compile, and flags of single sources.

use crate::stub::{NONE, Says, World, compiled, refusal, version};
use mla_build::Kernels;

fn kernels(world: &World) -> Kernels {
    let bare = world.bare("package", "out").host_compiler("c++");
    bare.sources("shim/*.cc").include("shim")
}

#[test]
fn cpp_sources_are_cached() {
    let world = World::new();
    let build = || compiled(&kernels(&world).compile("shim").unwrap().report);
    world.write("package/shim/part.h", "#define PART 1\n");
    world.write(
        "package/shim/open.cc",
        "#include <part.h>\n#include <cuda_runtime.h>\n\
         extern \"C\" int open_part() { return PART; }\n",
    );
    world.write(
        "package/shim/close.cc",
        "extern \"C\" int close_part() { return 0; }\n",
    );
    assert_eq!(build(), ["shim/close.cc", "shim/open.cc"]);
    assert_eq!(build(), NONE);
    world.write("package/shim/part.h", "#define PART 2\n");
    assert_eq!(build(), ["shim/open.cc"]);
    // Another nvcc does not affect it, but another CUDA header does.
    world.write("toolkit/version", &version("13.1"));
    assert_eq!(build(), NONE);
    world.write("toolkit/include/cuda_runtime.h", "#define NEW\n");
    assert_eq!(build(), ["shim/open.cc"]);
    assert!(world.calls().is_empty(), "nvcc compiled nothing");

    world.write("package/shim/open.cc", "int broken( { }\n");
    let message = refusal(kernels(&world));
    message.says("shim/open.cc:1:");
    message.says("error:");
    world.write("package/shim/kernel.cu", "");
    refusal(kernels(&world).sources("shim/*.cu")).says("family: none is turned on");
}

#[test]
fn flags_stay_with_their_source() {
    let world = World::new();
    world.compiled();
    let narrow = || {
        let kernels = world.kernels();
        kernels.flag_for("cuda/sm90/a.cu", "-maxrregcount=64")
    };
    assert_eq!(world.compiled_by(narrow()), ["cuda/sm90/a.cu"]);
    let defined = narrow().define_for("cuda/sm90/*.cu", "TILE=32");
    defined.compile("kernels").unwrap();
    let calls = world.arguments();
    let of = |source: &str| {
        let line = calls.lines().find(|line| line.starts_with(source));
        line.unwrap_or_else(|| panic!("{source}: {calls}"))
    };
    assert_eq!(calls.lines().count(), 2, "{calls}");
    of("cuda/sm90/a.cu").says("-maxrregcount=64");
    of("cuda/sm90/a.cu").says("-DTILE=32");
    assert!(!of("cuda/sm90/b.cu").contains("-maxrregcount"));
    // Without them, everything is as it was.
    assert_eq!(world.compiled(), NONE);
    // A family that is off may have flags, too.
    world.write("package/cuda/sm100/d.cu", "body-d\n");
    let off = world.kernels().flag_for("cuda/sm100/**", "-lineinfo");
    off.compile("kernels").unwrap();
}

#[test]
fn only_asked_sources_compile() {
    let world = World::new();
    world.write("package/cuda/sm100/d.cu", "body-d\n");
    let all = world.kernels().flag_for("cuda/all/**", "-lineinfo");
    let one = all.clone().only_sources("cuda/sm90/a.cu");
    assert_eq!(
        compiled(&one.compile("kernels").unwrap().report),
        ["cuda/sm90/a.cu"]
    );
    // A source of a family that is off is compiled by no build.
    assert_eq!(
        refusal(all.only_sources("cuda/sm100/d.cu")),
        "only_sources: given \"cuda/sm100/d.cu\", accepted a glob that matches a source of a \
         family that is on"
    );
}
