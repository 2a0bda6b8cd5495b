//! The same promises with the real nvcc, which the search must find. `cargo xtask toolkit` installs
//! one.

use std::{fs, os::unix::fs::symlink, path::Path, thread, time::Duration};

use mla_build::{Kernels, report::Report};

use crate::stub::{NONE, Says, World, compiled, fails, processor_time, refusal, succeeds};

const KERNEL: &str = "#include \"tile.cuh\"\n\
                      __global__ void NAME(float *x) { x[threadIdx.x] *= TILE; }\n\
                      extern \"C\" int launch_NAME(float *x) { NAME<<<1, 32>>>(x); return \
                      (int)cudaGetLastError(); }\n";

/// Makes a package. `a` and `b` include `tile.cuh`, `c` includes nothing, and `d` includes a header
/// that only the GPU's pass reads.
fn package() -> World {
    let world = World::empty();
    world.write("package/cuda/common/tile.cuh", "#define TILE 64\n");
    for name in ["a", "b"] {
        let text = KERNEL.replace("NAME", name);
        world.write(&format!("package/cuda/sm90/{name}.cu"), &text);
    }
    let alone = KERNEL.replace("#include \"tile.cuh\"", "#define TILE 2");
    world.write("package/cuda/all/c.cu", &alone.replace("NAME", "c"));
    world.write("package/cuda/common/device_only.cuh", "#define FACTOR 3\n");
    world.write(
        "package/cuda/sm90/d.cu",
        "#ifdef __CUDA_ARCH__\n#include \"device_only.cuh\"\n#else\n#define FACTOR 1\n#endif\n\
         __global__ void d(float *x) { *x *= FACTOR; }\n",
    );
    world
}

fn kernels_of(world: &World, package: &str, out: &str) -> Kernels {
    Kernels::new()
        .sources("cuda/**/*.cu")
        .include("cuda/common")
        .enable("sm90")
        .root(world.at(package))
        .out_dir(world.at(out))
        .cache(world.at("cache"))
        .install_command("cargo xtask toolkit")
        .jobs(2)
}

fn kernels(world: &World) -> Kernels {
    kernels_of(world, "package", "out")
}

fn report(kernels: Kernels) -> Report {
    kernels.compile("kernels").unwrap().report
}

fn build(kernels: Kernels) -> Vec<String> {
    compiled(&report(kernels))
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn exact_rebuilds() {
    let world = package();
    let all = [
        "cuda/all/c.cu",
        "cuda/sm90/a.cu",
        "cuda/sm90/b.cu",
        "cuda/sm90/d.cu",
    ];
    assert_eq!(build(kernels(&world)), all);
    let again = report(kernels(&world));
    assert_eq!(compiled(&again), NONE);
    let kernel = &again.units[1].kernels[0];
    assert_eq!((&*kernel.name, &*kernel.target), ("a(float*)", "sm_90a"));
    assert!(kernel.registers > 0 && kernel.spill_stores == 0);
    assert!(again.units[1].device_bytes["sm_90a"] > 0);

    world.copy("package", "second");
    assert_eq!(build(kernels_of(&world, "second", "out-2")), NONE);
    symlink(&again.toolkit[0].path, world.at("link")).unwrap();
    let linked = kernels(&world).cuda_home(world.at("link"));
    assert_eq!(build(linked), NONE);
    fs::remove_dir_all(world.at("out")).unwrap();
    assert_eq!(build(kernels(&world)), NONE);

    world.write("package/cuda/common/tile.cuh", "#define TILE 128\n");
    assert_eq!(build(kernels(&world)), all[1..3]);
    // This is a header of the GPU's pass alone.
    world.write("package/cuda/common/device_only.cuh", "#define FACTOR 4\n");
    assert_eq!(build(kernels(&world)), ["cuda/sm90/d.cu"]);
    let flagged = kernels(&world).flag("--use_fast_math");
    assert_eq!(build(flagged), all);
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn family_header_is_wrapped_once() {
    let world = package();
    world.write(
        "package/include/api.h",
        "#ifndef API_H\n#define API_H\ntypedef struct Shape { int rows; } Shape;\n\
         enum { LEAST = 1 };\n\
         int shared(Shape shape);\n#endif\n",
    );
    let own = |family: &str| {
        format!(
            "#include \"../../include/api.h\"\n#include <stddef.h>\nenum {{ MOST_{family} = 9 }};\n\
             typedef struct Tile_{family} {{ Shape shape; size_t bytes; }} Tile_{family};\n\
             int launch_{family}(const Tile_{family}* tile);\n"
        )
    };
    for family in ["sm80", "sm90", "sm100"] {
        world.write(&format!("package/cuda/{family}/api.h"), &own(family));
    }
    world.write(
        "package/cuda/all/shared.cu",
        "struct Shape { int rows; };\n\
         extern \"C\" int shared(Shape shape) { return shape.rows; }\n",
    );
    for family in ["sm80", "sm90"] {
        world.write(
            &format!("package/cuda/{family}/launch.cu"),
            &format!("extern \"C\" int launch_{family}(const void*) {{ return 0; }}\n"),
        );
    }
    let bindings = |families: &[&str]| {
        let mut kernels = kernels(&world).header("include/api.h");
        for family in families {
            kernels = kernels.family_header(*family, format!("cuda/{family}/api.h"));
        }
        let built = kernels.enable("sm80").compile("kernels").unwrap();
        fs::read_to_string(built.bindings.unwrap()).unwrap()
    };
    let shared = bindings(&[]);
    assert!(shared.starts_with("// include/api.h\n"), "{shared}");
    let both = bindings(&["sm80", "sm90", "sm100"]);
    assert!(both.starts_with(&shared), "{both}");
    assert_eq!(both, bindings(&["sm80", "sm90"]), "sm100 is off");
    for family in ["sm80", "sm90"] {
        let alone = bindings(&[family]);
        let own = alone.strip_prefix(&shared).unwrap();
        assert!(
            own.starts_with(&format!("// cuda/{family}/api.h\n")),
            "{own}"
        );
        assert!(both.contains(own), "each is the same beside others: {both}");
        for item in [
            format!("pub const MOST_{family}: _bindgen_ty_{family}_"),
            format!("pub struct Tile_{family} {{"),
            format!("pub fn launch_{family}("),
        ] {
            assert_eq!(own.matches(&item).count(), 1, "{item} in {own}");
        }
    }
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn hiding_headers_and_option_files() {
    let world = package();
    world.write(
        "package/cuda/sm90/a.cu",
        "#include <stdint.h>\n#define FLAG \"flag.opt.h\"\n#include FLAG\n\
         #if __has_include(<extra.h>)\n#include <extra.h>\n\
         #else\n#define EXTRA 1\n#endif\n__global__ void a(float *x) { *x = EXTRA; }\n",
    );
    world.write("package/cuda/common/flag.opt.h", "#pragma once\n");
    world.write("package/nvcc.opt", "-lineinfo\n");
    let build = || build(kernels(&world).flag("--options-file=nvcc.opt"));
    assert_eq!(build().len(), 4);
    assert_eq!(build(), NONE);
    world.write("package/cuda/common/extra.h", "#define EXTRA 2\n");
    assert_eq!(build(), ["cuda/sm90/a.cu"], "asked for");
    world.write("package/cuda/common/stdint.h", "#include_next <stdint.h>\n");
    assert_eq!(build(), ["cuda/sm90/a.cu"], "hides a system header");
    world.write("package/cuda/sm90/flag.opt.h", "#pragma once\n");
    // It hides the file that a macro names, and is its equal.
    assert_eq!(build(), ["cuda/sm90/a.cu"]);
    world.write("package/nvcc.opt", "-lineinfo -maxrregcount=64\n");
    assert_eq!(build().len(), 4);
    assert_eq!(build(), NONE);
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn bad_unit_says_the_error() {
    let world = package();
    world.write(
        "package/cuda/sm90/a.cu",
        "__global__ void a(float *x) { *x = missing; }\n",
    );
    // The units are compiled one after another, in the order of the sources.
    let message = refusal(kernels(&world).jobs(1));
    message.begins("cuda/sm90/a.cu(1): error: identifier \"missing\" is undefined");
    message.says("1 of 4 units failed, and 2 were stopped");
    world.write("package/cuda/sm90/a.cu", &KERNEL.replace("NAME", "a"));
    assert_eq!(
        build(kernels(&world)),
        ["cuda/sm90/a.cu", "cuda/sm90/b.cu", "cuda/sm90/d.cu"]
    );

    world.write("package/cuda/sm90/a.cu", "#include <cutlass/cutlass.h>\n");
    let message = refusal(kernels(&world));
    message.says("fatal error: cutlass/cutlass.h: No such file or directory");
    message.says("hint: cutlass/cutlass.h belongs to CUTLASS");
    // An include root is a flag.
    assert_eq!(build(kernels(&world).cutlass()).len(), 4);
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn families_share_an_object() {
    let world = package();
    let report = report(kernels(&world).enable("sm100"));
    assert_eq!(report.units[0].source, "cuda/all/c.cu");
    let targets = report.units[0].kernels.iter().map(|it| &*it.target);
    let targets: Vec<_> = targets.collect();
    assert_eq!(targets, ["sm_90a", "sm_100f"]);
    assert_eq!(report.units[1].kernels.len(), 1);
    let code = report.device_bytes();
    assert_eq!(code.keys().collect::<Vec<_>>(), ["sm_100f", "sm_90a"]);
    assert!(code.values().all(|&bytes| bytes > 1000), "{code:?}");
}

/// A third party's crate, with one line in its build script, built by Cargo and run.
#[test]
#[ignore = "needs nvcc and builds a crate with bindgen: \
            cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn foreign_crate_builds() {
    let world = World::empty();
    // Nothing in a path may run as a command.
    let home = "foreign $(touch ran) `touch ran` \"it's\" & (mine), a=b";
    let inside = |path: &str| format!("{home}/{path}");
    let this = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = format!(
        "[package]\nname = \"foreign\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [features]\ndefault = [\"sm90\"]\nsm90 = []\nsm91 = []\n\n\
         [build-dependencies]\nmla-build = {{ path = {this:?} }}\n"
    );
    // The workspace's lock file asks for versions that have already been downloaded.
    let lock = fs::read_to_string(this.join("../Cargo.lock")).unwrap();
    world.write(&inside("Cargo.lock"), &lock);
    world.write(&inside("Cargo.toml"), &manifest);
    world.write(
        &inside("build.rs"),
        "fn main() -> Result<(), mla_build::Error> {\n    \
         mla_build::Kernels::new().sources(\"kernels/*.cu\").header(\"kernels/scale.h\")\n        \
         .compile(\"scale\").map(drop)\n}\n",
    );
    world.write(
        &inside("kernels/scale.h"),
        "#include <stddef.h>\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n\
         typedef struct Scale { float *x; size_t length; } Scale;\n\
         int scale_runtime_version(const Scale *scale);\n#ifdef __cplusplus\n}\n#endif\n",
    );
    world.write(
        &inside("kernels/scale.cu"),
        "#include \"scale.h\"\n__global__ void scale(Scale s) { s.x[threadIdx.x] *= 2; }\n\
         int scale_runtime_version(const Scale *s) {\n  int version = 0;\n  \
         cudaRuntimeGetVersion(&version);\n  return version + (int)s->length;\n}\n",
    );
    world.write(
        &inside("src/main.rs"),
        "mod ffi {\n    #![allow(warnings)]\n    \
         include!(concat!(env!(\"OUT_DIR\"), \"/scale.rs\"));\n}\n\
         fn main() {\n    let scale = ffi::Scale { x: std::ptr::null_mut(), length: 1 };\n    \
         println!(\"{}\", unsafe { ffi::scale_runtime_version(&scale) });\n}\n",
    );
    // The target folder is kept between runs, or each run would compile bindgen. The cache is new
    // each time.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("foreign");
    let cargo = |command: &str, arguments: &[&str]| {
        let mut cargo = world.cargo(home, command);
        cargo.args(arguments).env("CARGO_TARGET_DIR", &target);
        cargo
    };
    let report = || Report::load(&target.join("mla-build/foreign-scale.json")).unwrap();

    // It links, and starts on a machine without a driver.
    let ran = succeeds(&mut cargo("run", &[]));
    let version: u32 = ran.stdout.trim().parse().unwrap();
    assert!(version > 12_000 && version % 10 == 1, "{version}");
    assert_eq!(compiled(&report()), ["kernels/scale.cu"]);
    let ran = world.at(&inside("ran"));
    assert!(!ran.exists() && !Path::new("ran").exists());

    // Nothing changed, so Cargo does not even start the build script.
    let before = report();
    succeeds(&mut cargo("build", &[]));
    assert_eq!(report(), before);
    // A touched file starts the build script, which finds everything in the cache.
    thread::sleep(Duration::from_millis(20));
    let header = inside("kernels/scale.h");
    world.write(&header, &world.read(&header));
    let spent = processor_time(&mut cargo("build", &[]));
    let after = report();
    assert!(after.finished > before.finished);
    assert_eq!(compiled(&after), NONE);
    assert!(spent < Duration::from_secs(1), "{spent:?} for nothing");

    fails(&mut cargo("build", &["--features", "sm91"]))
        .says("family: given \"sm91\", accepted sm80, sm90, sm100");
    fails(&mut cargo("build", &["--no-default-features"])).says("family: none is turned on");
}
