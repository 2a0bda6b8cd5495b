//! Sources in C++, which nvcc does not compile, and flags of single sources.

use std::fs;

use crate::stub::{Says, World};
use mla_build::{Kernels, report::Outcome};

fn kernels(world: &World) -> Kernels {
    Kernels::new()
        .sources("shim/*.cc")
        .include("shim")
        .root(world.at("package"))
        .out_dir(world.at("out"))
        .cache(world.at("cache"))
        .cuda_home(world.at("toolkit"))
        .host_compiler("c++")
        .jobs(2)
}

fn compiled(kernels: Kernels) -> Vec<String> {
    let report = kernels.compile("shim").unwrap().report;
    let units = report.units.into_iter();
    units
        .filter(|unit| unit.outcome == Outcome::Compiled)
        .map(|unit| unit.source)
        .collect()
}

#[test]
fn cpp_sources_are_cached() {
    let world = World::new();
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
    assert_eq!(compiled(kernels(&world)), ["shim/close.cc", "shim/open.cc"]);
    assert_eq!(compiled(kernels(&world)), [""; 0]);
    world.write("package/shim/part.h", "#define PART 2\n");
    assert_eq!(compiled(kernels(&world)), ["shim/open.cc"]);
    // Another nvcc does not affect it, but another CUDA header does.
    world.write("toolkit/version", &crate::stub::version("13.1"));
    assert_eq!(compiled(kernels(&world)), [""; 0]);
    world.write("toolkit/include/cuda_runtime.h", "#define NEW\n");
    assert_eq!(compiled(kernels(&world)), ["shim/open.cc"]);
    assert!(world.calls().is_empty(), "nvcc compiled nothing");

    world.write("package/shim/open.cc", "int broken( { }\n");
    let message = kernels(&world).compile("shim").unwrap_err().to_string();
    message.says("shim/open.cc:1:");
    message.says("error:");
    world.write("package/shim/kernel.cu", "");
    let message = kernels(&world)
        .sources("shim/*.cu")
        .compile("shim")
        .unwrap_err();
    assert!(
        message.to_string().contains("family: none is turned on"),
        "{message}"
    );
}

#[test]
fn flags_stay_with_their_source() {
    let world = World::new();
    world.compiled();
    let narrow = || {
        world
            .kernels()
            .flag_for("cuda/sm90/a.cu", "-maxrregcount=64")
    };
    assert_eq!(world.compiled_by(narrow()), ["cuda/sm90/a.cu"]);
    let defined = || narrow().define_for("cuda/sm90/*.cu", "TILE=32");
    world.calls();
    defined().compile("kernels").unwrap();
    let calls = fs::read_to_string(world.at("calls")).unwrap();
    let of = |source: &str| {
        let line = calls.lines().find(|line| line.starts_with(source));
        line.unwrap_or_else(|| panic!("{source}: {calls}"))
            .to_owned()
    };
    assert_eq!(calls.lines().count(), 2, "{calls}");
    let both = of("cuda/sm90/a.cu");
    both.says("-maxrregcount=64");
    both.says("-DTILE=32");
    assert!(!of("cuda/sm90/b.cu").contains("-maxrregcount"));
    world.calls();
    assert_eq!(
        world.compiled(),
        [""; 0],
        "without them everything is as it was"
    );

    let message = |kernels: Kernels| kernels.compile("kernels").unwrap_err().to_string();
    let gone = message(world.kernels().flag_for("cuda/sm90/gone.cu", "-lineinfo"));
    assert!(
        gone.starts_with(
            "flag_for: given \"cuda/sm90/gone.cu\", accepted a glob that matches a source"
        ),
        "{gone}"
    );
    // A family that is off may have flags, too.
    world.write("package/cuda/sm100/d.cu", "body-d\n");
    world
        .kernels()
        .flag_for("cuda/sm100/**", "-lineinfo")
        .compile("kernels")
        .unwrap();
    let refused = message(world.kernels().flag_for("cuda/**", "-arch=sm_80"));
    refused.says("flag: given \"-arch=sm_80\"");
}

#[test]
fn only_asked_sources_compile() {
    let world = World::new();
    world.write("package/cuda/sm100/d.cu", "body-d\n");
    let all = world.kernels().flag_for("cuda/all/**", "-lineinfo");
    let built = all
        .clone()
        .only_sources("cuda/sm90/a.cu")
        .compile("kernels")
        .unwrap();
    let units: Vec<_> = built.report.units.iter().map(|it| &*it.source).collect();
    assert_eq!(units, ["cuda/sm90/a.cu"]);

    // A source of a family that is off is compiled by no build.
    let off = all.only_sources("cuda/sm100/d.cu").compile("kernels");
    assert_eq!(
        off.unwrap_err().to_string(),
        "only_sources: given \"cuda/sm100/d.cu\", accepted a glob that matches a source of a \
         family that is on"
    );
}

#[test]
fn useless_ptx_is_refused() {
    let world = World::new();
    for name in ["compute_90a", "sm_80", "ptx"] {
        let kernels = world.kernels().ptx_for("cuda/sm90/a.cu", name);
        let refused = kernels.compile("kernels").unwrap_err().to_string();
        let given = format!("ptx_for: given \"{name}\", accepted PTX");
        assert!(refused.starts_with(&given), "{refused}");
    }
}
