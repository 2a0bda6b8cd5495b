//! Objects of a release: used if nothing is there to compile them, and refused if they do not fit.

use std::{fs, process::Command};

use crate::stub::{Says, World, driver};

/// Makes a build with only these variables, on a machine whose only toolkit is that of `CUDA_HOME`.
fn build(world: &World, out: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Command {
    let mut build = Command::new(driver());
    build
        .arg(world.at("package"))
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

fn succeeds(mut build: Command) -> String {
    let output = build.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn refused(mut build: Command) -> String {
    let output = build.output().unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Makes a package with the objects of two families beside it, from two builds.
fn released() -> World {
    let world = World::new();
    world.write("package/cuda/sm80/e.cu", "body-e\n");
    let toolkit = world.at("toolkit").display().to_string();
    let objects = world.at("objects").display().to_string();
    let variables = [("CUDA_HOME", &*toolkit), ("MLA_BUILD_EXPORT", &*objects)];
    succeeds(build(&world, "out", &[], &variables));
    succeeds(build(&world, "other", &["--family=sm80"], &variables));
    assert_eq!(world.calls().len(), 3 + 2);
    world
}

fn named(world: &World) -> String {
    world.at("objects").display().to_string()
}

#[test]
fn prebuilt_equals_compiled() {
    let world = released();
    // The package moves, as if on another machine.
    fs::rename(world.at("package"), world.at("elsewhere")).unwrap();
    fs::create_dir(world.at("moved")).unwrap();
    fs::rename(world.at("elsewhere"), world.at("moved/package")).unwrap();
    let mut command = Command::new(driver());
    command
        .arg(world.at("moved/package"))
        .arg(world.at("taken"))
        // The paths are relative to the package, wherever the build script runs.
        .args(["--include=cuda", "--prebuilt=../../objects"])
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", world.at("home"))
        .env("MLA_TOOLKIT", world.at("none"));
    let report = succeeds(command);
    report.says("b_kernel");
    report.says("prebuilt");
    assert!(world.calls().is_empty());
    let read = |path: &str| fs::read(world.at(path)).unwrap();
    let library = "libpackage_kernels.a";
    assert_eq!(
        read(&format!("taken/{library}")),
        read(&format!("out/{library}"))
    );
    assert_eq!(
        read("taken/kernels_compiled.rs"),
        read("out/kernels_compiled.rs")
    );
    assert_eq!(
        read("taken/libcudart_static.a"),
        read("toolkit/lib/libcudart_static.a")
    );
}

#[test]
fn stale_prebuilt_is_refused() {
    let world = released();
    let objects = named(&world);
    let with = |world: &World, arguments: &[&str]| {
        refused(build(
            world,
            "taken",
            arguments,
            &[("MLA_BUILD_PREBUILT", &*objects)],
        ))
    };
    // Both families were never compiled together.
    let message = with(&world, &["--family=sm90", "--family=sm80"]);
    message.says("objects: given none, accepted cuda/all/c.cu (sm_80, ");
    let message = with(&world, &["--include=cuda/common"]);
    message.says("kernels.prebuilt.json: sources: given ");
    message.says("MLA_BUILD_PREBUILT=none compiles");
    world.write("package/cuda/common/shared.h", "shared-2\n");
    let message = with(&world, &[]);
    message.says("kernels.prebuilt.json: sources: given ");
    world.write("package/cuda/common/shared.h", "shared-1\n");
    succeeds(build(
        &world,
        "taken",
        &[],
        &[("MLA_BUILD_PREBUILT", &*objects)],
    ));
    // Objects of another package are refused, and so are bytes that differ from the released ones.
    fs::rename(world.at("package"), world.at("other-package")).unwrap();
    let mut other = Command::new(driver());
    other
        .arg(world.at("other-package"))
        .arg(world.at("taken"))
        .arg("--include=cuda");
    other
        .env("MLA_BUILD_PREBUILT", &objects)
        .env_remove("MLA_CUDA_HOME");
    let message = refused(other);
    message.says("library: given package_kernels, accepted other_package_kernels");
    fs::rename(world.at("other-package"), world.at("package")).unwrap();
    let runtime = world.at("objects/libcudart_static.a");
    fs::write(&runtime, "!<arch>\nmore").unwrap();
    let message = with(&world, &[]);
    message.says("libcudart_static.a: content: given ");
    let message = refused(build(
        &world,
        "taken",
        &[],
        &[("MLA_BUILD_PREBUILT", "/nonexistent")],
    ));
    message.says(
        "MLA_BUILD_PREBUILT: given \"/nonexistent\", accepted folders with \
             kernels.prebuilt.json",
    );
}

#[test]
fn other_sources_or_settings_are_compiled() {
    let world = released();
    let toolkit = world.at("toolkit").display().to_string();
    let nvcc = world.at("toolkit/bin/nvcc").display().to_string();
    let objects = named(&world);
    let prebuilt = format!("--prebuilt={objects}");
    let compiled = |variables: &[(&str, &str)]| {
        let mut all = vec![("CUDA_HOME", toolkit.as_str())];
        all.extend(variables);
        // Each has a cache of its own, so that every compilation is seen.
        let mut command = build(&world, "taken", &[&prebuilt], &all);
        let cache = tempfile::tempdir().unwrap();
        succeeds({
            command.env("MLA_BUILD_CACHE", cache.path());
            command
        });
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
    let message = refused(build(&world, "taken", &[], &both));
    message.says("accepted nothing beside NVCC");
}
