//! The same promises with the real nvcc, which the search must find. `cargo xtask toolkit` installs
//! one.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::Duration,
};

use mla_build::{
    Built, Error, Kernels,
    report::{Outcome, Report},
};

use crate::stub::{Says, processor_time, succeeded};

struct Package(tempfile::TempDir);

const KERNEL: &str = "#include \"tile.cuh\"\n\
                      __global__ void NAME(float *x) { x[threadIdx.x] *= TILE; }\n\
                      extern \"C\" int launch_NAME(float *x) { NAME<<<1, 32>>>(x); return \
                      (int)cudaGetLastError(); }\n";

impl Package {
    /// Makes a package. `a` and `b` include `tile.cuh`, `c` includes nothing, and `d` includes a
    /// header that only the GPU's pass reads.
    fn new() -> Self {
        let package = Self(tempfile::tempdir().unwrap());
        package.write("package/cuda/common/tile.cuh", "#define TILE 64\n");
        for name in ["a", "b"] {
            package.write(
                &format!("package/cuda/sm90/{name}.cu"),
                &KERNEL.replace("NAME", name),
            );
        }
        package.write(
            "package/cuda/all/c.cu",
            &KERNEL
                .replace("NAME", "c")
                .replace("#include \"tile.cuh\"", "#define TILE 2"),
        );
        package.write("package/cuda/common/device_only.cuh", "#define FACTOR 3\n");
        package.write(
            "package/cuda/sm90/d.cu",
            "#ifdef __CUDA_ARCH__\n#include \"device_only.cuh\"\n#else\n#define FACTOR 1\n#endif\n\
             __global__ void d(float *x) { *x *= FACTOR; }\n",
        );
        package
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn kernels(&self, package: &str, out: &str) -> Kernels {
        Kernels::new()
            .sources("cuda/**/*.cu")
            .include("cuda/common")
            .enable("sm90")
            .root(self.at(package))
            .out_dir(self.at(out))
            .cache(self.at("cache"))
            .install_command("cargo xtask toolkit")
            .jobs(2)
    }

    fn build(&self) -> Result<Built, Error> {
        self.kernels("package", "out").compile("kernels")
    }

    fn compiled(&self) -> Vec<String> {
        compiled(&self.build().unwrap().report)
    }
}

fn compiled(report: &Report) -> Vec<String> {
    let units = report
        .units
        .iter()
        .filter(|unit| unit.outcome == Outcome::Compiled);
    units.map(|unit| unit.source.clone()).collect()
}

const NONE: [&str; 0] = [];

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn exact_rebuilds() {
    let package = Package::new();
    assert_eq!(
        package.compiled(),
        [
            "cuda/all/c.cu",
            "cuda/sm90/a.cu",
            "cuda/sm90/b.cu",
            "cuda/sm90/d.cu"
        ]
    );
    let report = package.build().unwrap().report;
    assert_eq!(compiled(&report), NONE);
    let kernel = &report.units[1].kernels[0];
    assert_eq!(
        (
            kernel.name.as_str(),
            kernel.target.as_str(),
            kernel.spill_stores
        ),
        ("a(float*)", "sm_90a", 0)
    );
    assert!(kernel.registers > 0 && report.units[1].device_bytes["sm_90a"] > 0);

    let copied = Command::new("cp")
        .arg("-r")
        .arg(package.at("package"))
        .arg(package.at("second"))
        .status()
        .unwrap();
    assert!(copied.success());
    assert_eq!(
        compiled(
            &package
                .kernels("second", "out-2")
                .compile("kernels")
                .unwrap()
                .report
        ),
        NONE
    );
    let toolkit = report.toolkit[0].path.clone();
    std::os::unix::fs::symlink(toolkit, package.at("link")).unwrap();
    let linked = package
        .kernels("package", "out")
        .cuda_home(package.at("link"));
    assert_eq!(compiled(&linked.compile("kernels").unwrap().report), NONE);
    fs::remove_dir_all(package.at("out")).unwrap();
    assert_eq!(package.compiled(), NONE);

    package.write("package/cuda/common/tile.cuh", "#define TILE 128\n");
    assert_eq!(package.compiled(), ["cuda/sm90/a.cu", "cuda/sm90/b.cu"]);
    package.write("package/cuda/common/device_only.cuh", "#define FACTOR 4\n");
    assert_eq!(
        package.compiled(),
        ["cuda/sm90/d.cu"],
        "a header of the GPU's pass alone"
    );
    let flagged = package.kernels("package", "out").flag("--use_fast_math");
    assert_eq!(
        compiled(&flagged.compile("kernels").unwrap().report).len(),
        4
    );
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn family_header_is_wrapped_once() {
    let package = Package::new();
    package.write(
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
        package.write(&format!("package/cuda/{family}/api.h"), &own(family));
    }
    package.write(
        "package/cuda/all/shared.cu",
        "struct Shape { int rows; };\n\
         extern \"C\" int shared(Shape shape) { return shape.rows; }\n",
    );
    for family in ["sm80", "sm90"] {
        package.write(
            &format!("package/cuda/{family}/launch.cu"),
            &format!("extern \"C\" int launch_{family}(const void*) {{ return 0; }}\n"),
        );
    }
    let bindings = |families: &[&str]| {
        let mut kernels = package.kernels("package", "out").header("include/api.h");
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
    let package = Package::new();
    package.write(
        "package/cuda/sm90/a.cu",
        "#include <stdint.h>\n#define FLAG \"flag.opt.h\"\n#include FLAG\n\
         #if __has_include(<extra.h>)\n#include <extra.h>\n\
         #else\n#define EXTRA 1\n#endif\n__global__ void a(float *x) { *x = EXTRA; }\n",
    );
    package.write("package/cuda/common/flag.opt.h", "#pragma once\n");
    package.write("package/nvcc.opt", "-lineinfo\n");
    let build = || {
        let kernels = package
            .kernels("package", "out")
            .flag("--options-file=nvcc.opt");
        compiled(&kernels.compile("kernels").unwrap().report)
    };
    assert_eq!(build().len(), 4);
    assert_eq!(build(), NONE);
    package.write("package/cuda/common/extra.h", "#define EXTRA 2\n");
    assert_eq!(build(), ["cuda/sm90/a.cu"], "asked for");
    package.write("package/cuda/common/stdint.h", "#include_next <stdint.h>\n");
    assert_eq!(
        build(),
        ["cuda/sm90/a.cu"],
        "an own header hides a system header"
    );
    package.write("package/cuda/sm90/flag.opt.h", "#pragma once\n");
    assert_eq!(
        build(),
        ["cuda/sm90/a.cu"],
        "hides what a macro names, and is its equal"
    );
    package.write("package/nvcc.opt", "-lineinfo -maxrregcount=64\n");
    assert_eq!(build().len(), 4);
    assert_eq!(build(), NONE);
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn bad_unit_says_the_error() {
    let package = Package::new();
    package.write(
        "package/cuda/sm90/a.cu",
        "__global__ void a(float *x) { *x = missing; }\n",
    );
    // The units are compiled one after another, in the order of the sources.
    let one_by_one = package.kernels("package", "out").jobs(1);
    let message = one_by_one.compile("kernels").unwrap_err().to_string();
    assert!(
        message.starts_with("cuda/sm90/a.cu(1): error: identifier \"missing\" is undefined"),
        "{message}"
    );
    message.says("1 of 4 units failed, and 2 were stopped");
    package.write("package/cuda/sm90/a.cu", &KERNEL.replace("NAME", "a"));
    assert_eq!(
        package.compiled(),
        ["cuda/sm90/a.cu", "cuda/sm90/b.cu", "cuda/sm90/d.cu"]
    );

    package.write("package/cuda/sm90/a.cu", "#include <cutlass/cutlass.h>\n");
    let message = package.build().unwrap_err().to_string();
    message.says("fatal error: cutlass/cutlass.h: No such file or directory");
    message.says("hint: cutlass/cutlass.h belongs to CUTLASS");
    assert_eq!(
        compiled(
            &package
                .kernels("package", "out")
                .cutlass()
                .compile("kernels")
                .unwrap()
                .report
        )
        .len(),
        4,
        "an include root is a flag"
    );
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn families_share_an_object() {
    let package = Package::new();
    let built = package
        .kernels("package", "out")
        .enable("sm100")
        .compile("kernels")
        .unwrap();
    let targets: Vec<_> = built.report.units[0]
        .kernels
        .iter()
        .map(|kernel| kernel.target.as_str())
        .collect();
    assert_eq!(built.report.units[0].source, "cuda/all/c.cu");
    assert_eq!(targets, ["sm_90a", "sm_100f"]);
    assert_eq!(built.report.units[1].kernels.len(), 1);
    let code = built.report.device_bytes();
    assert_eq!(code.keys().collect::<Vec<_>>(), ["sm_100f", "sm_90a"]);
    assert!(code.values().all(|&bytes| bytes > 1000), "{code:?}");
}

/// A third party's crate, with one line in its build script, built by Cargo and run.
#[test]
#[ignore = "needs nvcc and builds a crate with bindgen: \
            cargo xtask toolkit && cargo test -p mla-build -- --ignored real"]
fn foreign_crate_builds() {
    let package = Package(tempfile::tempdir().unwrap());
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
    fs::create_dir_all(package.at(&inside("src"))).unwrap();
    fs::copy(
        this.join("../Cargo.lock"),
        package.at(&inside("Cargo.lock")),
    )
    .unwrap();
    package.write(&inside("Cargo.toml"), &manifest);
    package.write(
        &inside("build.rs"),
        "fn main() -> Result<(), mla_build::Error> {\n    \
         mla_build::Kernels::new().sources(\"kernels/*.cu\").header(\"kernels/scale.h\")\n        \
         .compile(\"scale\").map(drop)\n}\n",
    );
    package.write(
        &inside("kernels/scale.h"),
        "#include <stddef.h>\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n\
         typedef struct Scale { float *x; size_t length; } Scale;\n\
         int scale_runtime_version(const Scale *scale);\n#ifdef __cplusplus\n}\n#endif\n",
    );
    package.write(
        &inside("kernels/scale.cu"),
        "#include \"scale.h\"\n__global__ void scale(Scale s) { s.x[threadIdx.x] *= 2; }\n\
         int scale_runtime_version(const Scale *s) {\n  int version = 0;\n  \
         cudaRuntimeGetVersion(&version);\n  return version + (int)s->length;\n}\n",
    );
    package.write(
        &inside("src/main.rs"),
        "mod ffi {\n    #![allow(warnings)]\n    \
         include!(concat!(env!(\"OUT_DIR\"), \"/scale.rs\"));\n}\n\
         fn main() {\n    let scale = ffi::Scale { x: std::ptr::null_mut(), length: 1 };\n    \
         println!(\"{}\", unsafe { ffi::scale_runtime_version(&scale) });\n}\n",
    );
    // The target folder is kept between runs, or each run would compile bindgen. The cache is new
    // each time.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("foreign");
    let command = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO"));
        command
            .current_dir(package.at(home))
            .args(arguments)
            .env("CARGO_TARGET_DIR", &target)
            .env("MLA_BUILD_CACHE", package.at("cache"));
        command
    };
    let cargo = |arguments: &[&str]| command(arguments).output().unwrap();
    let succeeded = |output: &Output| {
        succeeded(output);
    };
    let report = || Report::load(&target.join("mla-build/foreign-scale.json")).unwrap();

    // It links, and starts on a machine without a driver.
    let ran = cargo(&["run", "--quiet"]);
    succeeded(&ran);
    let version: u32 = String::from_utf8_lossy(&ran.stdout).trim().parse().unwrap();
    assert!(version > 12_000 && version % 10 == 1, "{version}");
    assert_eq!(compiled(&report()), ["kernels/scale.cu"]);
    let ran = package.at(&inside("ran"));
    assert!(!ran.exists() && !Path::new("ran").exists());

    // Nothing changed, so Cargo does not even start the build script.
    let before = report();
    succeeded(&cargo(&["build"]));
    assert_eq!(report(), before);
    // A touched file starts the build script, which finds everything in the cache.
    thread::sleep(Duration::from_millis(20));
    package.write(
        &inside("kernels/scale.h"),
        &fs::read_to_string(package.at(&inside("kernels/scale.h"))).unwrap(),
    );
    let spent = processor_time(&mut command(&["build"]));
    let after = report();
    assert!(after.finished > before.finished);
    assert_eq!(compiled(&after), NONE);
    assert!(spent < Duration::from_secs(1), "{spent:?} for nothing");

    let mistyped = cargo(&["build", "--features", "sm91"]);
    assert!(!mistyped.status.success());
    let stderr = String::from_utf8_lossy(&mistyped.stderr);
    stderr.says("family: given \"sm91\", accepted sm80, sm90, sm100");
    let none = cargo(&["build", "--no-default-features"]);
    let stderr = String::from_utf8_lossy(&none.stderr);
    assert!(!none.status.success(), "{stderr}");
    stderr.says("family: none is turned on");
}
