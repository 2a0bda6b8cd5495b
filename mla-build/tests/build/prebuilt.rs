//! Objects of a release: used if nothing is there to compile them, and refused if they do not fit.

use std::{fs, process::Command};

use crate::stub::{Says, World, driver, fails, succeeds};

/// Makes a build with only these variables, on a machine whose only toolkit is that of `CUDA_HOME`.
fn build(world: &World, out: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Command {
    build_of(world, "package", out, arguments, variables)
}

fn build_of(
    world: &World,
    package: &str,
    out: &str,
    arguments: &[&str],
    variables: &[(&str, &str)],
) -> Command {
    let mut build = Command::new(driver());
    build
        .arg(world.at(package))
        .arg(world.at(out))
        .arg("--include=cuda")
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", world.at("home"))
        .env("MLA_TOOLKIT", world.at("none"))
        .env("MLA_BUILD_CACHE", world.at("cache"))
        .envs(variables.iter().copied());
    build
}

/// Makes a package with the objects of two families beside it, from two builds.
fn released() -> World {
    let world = World::new();
    world.write("package/cuda/sm80/e.cu", "body-e\n");
    let (toolkit, objects) = (world.named("toolkit"), world.named("objects"));
    let variables = [("CUDA_HOME", &*toolkit), ("MLA_BUILD_EXPORT", &*objects)];
    succeeds(&mut build(&world, "out", &[], &variables));
    succeeds(&mut build(&world, "other", &["--family=sm80"], &variables));
    assert_eq!(world.calls().len(), 3 + 2);
    world
}

#[test]
fn prebuilt_equals_compiled() {
    let world = released();
    // The package moves, as if on another machine. The path is relative to the package, wherever
    // the build script runs.
    fs::create_dir(world.at("moved")).unwrap();
    fs::rename(world.at("package"), world.at("moved/package")).unwrap();
    let arguments = ["--prebuilt=../../objects"];
    let mut build = build_of(&world, "moved/package", "taken", &arguments, &[]);
    let report = succeeds(&mut build).stdout;
    report.says("b_kernel");
    report.says("prebuilt");
    assert!(world.calls().is_empty());
    for (taken, made) in [
        ("taken/libpackage_kernels.a", "out/libpackage_kernels.a"),
        ("taken/kernels_compiled.rs", "out/kernels_compiled.rs"),
        ("taken/libcudart_static.a", "toolkit/lib/libcudart_static.a"),
    ] {
        let [taken, made] = [taken, made].map(|path| fs::read(world.at(path)).unwrap());
        assert_eq!(taken, made);
    }
}

#[test]
fn stale_prebuilt_is_refused() {
    let world = released();
    let objects = world.named("objects");
    let taken = [("MLA_BUILD_PREBUILT", &*objects)];
    let refused = |arguments: &[&str]| fails(&mut build(&world, "taken", arguments, &taken));
    // Both families were never compiled together.
    refused(&["--family=sm90", "--family=sm80"])
        .says("objects: given none, accepted cuda/all/c.cu (sm_80, ");
    let message = refused(&["--include=cuda/common"]);
    message.says("kernels.prebuilt.json: sources: given ");
    message.says("MLA_BUILD_PREBUILT=none compiles");
    world.write("package/cuda/common/shared.h", "shared-2\n");
    refused(&[]).says("kernels.prebuilt.json: sources: given ");
    world.write("package/cuda/common/shared.h", "shared-1\n");
    succeeds(&mut build(&world, "taken", &[], &taken));
    // Objects of another package are refused, and so are bytes that differ from the released ones.
    world.copy("package", "other-package");
    fails(&mut build_of(&world, "other-package", "taken", &[], &taken))
        .says("library: given package_kernels, accepted other_package_kernels");
    world.write("objects/libcudart_static.a", "!<arch>\nmore");
    refused(&[]).says("libcudart_static.a: content: given ");
    let nowhere = [("MLA_BUILD_PREBUILT", "/nonexistent")];
    fails(&mut build(&world, "taken", &[], &nowhere)).says(
        "MLA_BUILD_PREBUILT: given \"/nonexistent\", accepted folders with kernels.prebuilt.json",
    );
}

#[test]
fn other_sources_or_settings_are_compiled() {
    let world = released();
    let (toolkit, nvcc) = (world.named("toolkit"), world.named("toolkit/bin/nvcc"));
    let objects = world.named("objects");
    let prebuilt = format!("--prebuilt={objects}");
    let compiled = |variables: &[(&str, &str)]| {
        // Each has a cache of its own, so that every compilation is seen.
        let cache = tempfile::tempdir().unwrap();
        let mut build = build(&world, "taken", &[&prebuilt], variables);
        build.env("MLA_BUILD_CACHE", cache.path());
        succeeds(build.env("CUDA_HOME", &toolkit));
        world.calls().len()
    };
    assert_eq!(compiled(&[]), 0);
    for variable in [
        ("NVCC_APPEND_FLAGS", "--use_fast_math"),
        ("NVCC", nvcc.as_str()),
        ("MLA_BUILD_TARGETS_SM90", "+sm_100"),
        ("MLA_BUILD_PREBUILT", "none"),
        ("MLA_BUILD_LINE_INFO", "1"),
    ] {
        assert_eq!(compiled(&[variable]), 3, "{variable:?}");
    }
    // Objects of other sources are skipped if there is a compiler.
    world.write("package/cuda/common/shared.h", "shared-2\n");
    assert_eq!(compiled(&[]), 3);
    // These two settings contradict each other.
    let both = [("MLA_BUILD_PREBUILT", &*objects), ("NVCC", &*nvcc)];
    fails(&mut build(&world, "taken", &[], &both)).says("accepted nothing beside NVCC");
}
