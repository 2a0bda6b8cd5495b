//! Mistakes of kernels' authors: each one is refused, reported, or tolerated.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use crate::stub::{ALL, NONE, Says, World, driver, fails, succeeds};
use mla_build::report::Report;

/// Variables that would change what a test looks at.
const OF_MACHINE: [&str; 8] = [
    "NVCC",
    "MLA_CUDA_HOME",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDAHOSTCXX",
    "NVCC_CCBIN",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
];

/// Makes the build as a build script of Cargo's, with these variables. The only toolkits are those
/// that they name and the one on `PATH`.
fn script(world: &World, arguments: &[&str], variables: &[(&str, &str)]) -> Command {
    let out = world.at("script-out");
    fs::create_dir_all(&out).unwrap();
    let path = std::env::var_os("PATH").unwrap();
    let folders = [world.at("toolkit/bin")].into_iter();
    let path = std::env::join_paths(folders.chain(std::env::split_paths(&path))).unwrap();
    let mut command = Command::new(driver());
    command.args(["--include=cuda"]).args(arguments);
    for name in OF_MACHINE {
        command.env_remove(name);
    }
    command
        .env("CARGO_MANIFEST_DIR", world.at("package"))
        .env("CARGO_PKG_NAME", "package")
        .env("OUT_DIR", out)
        .env("PATH", path)
        .env("MLA_BUILD_CACHE", world.at("cache"))
        .envs(variables.iter().copied());
    command
}

/// Makes the same build with the stub of a host compiler.
fn hosted(world: &World, arguments: &[&str], variables: &[(&str, &str)]) -> Command {
    let mut command = script(world, arguments, variables);
    command.arg(world.host_argument());
    command
}

/// Returns the error of a build that must fail.
#[track_caller]
fn error_of(mut command: Command) -> String {
    let stderr = fails(&mut command);
    let error = stderr.split_once("Error: ");
    error.map_or_else(|| stderr.clone(), |(_, error)| error.to_owned())
}

/// Returns the warnings of a build that must succeed.
#[track_caller]
fn warnings(mut command: Command) -> Vec<String> {
    warnings_in(&succeeds(&mut command).stdout)
}

fn warnings_in(stdout: &str) -> Vec<String> {
    let lines = stdout.lines();
    let warnings = lines.filter_map(|line| line.strip_prefix("cargo::warning="));
    warnings.map(str::to_owned).collect()
}

#[test]
fn empty_cache_bound_is_refused() {
    let world = World::new();
    world.compiled();
    for size in ["0", "10", "1 MiB", "much"] {
        let error = error_of(hosted(&world, &[], &[("MLA_BUILD_CACHE_SIZE", size)]));
        error.begins(&format!(
            "MLA_BUILD_CACHE_SIZE: given {size:?}, accepted 64 MiB and up"
        ));
    }
    assert_eq!(world.compiled(), NONE);
    let enough = [("MLA_BUILD_CACHE_SIZE", "64 MiB")];
    assert_eq!(warnings(hosted(&world, &[], &enough)), NONE);
}

/// The search has a test of every way in which a variable does not lead to a toolkit.
#[test]
fn passed_over_toolkit_warns() {
    let world = World::new();
    let warnings = warnings(hosted(&world, &[], &[("CUDA_HOME", "~/cuda")]));
    let [warning] = &warnings[..] else {
        panic!("{warnings:?}")
    };
    warning.begins("CUDA_HOME: given \"~/cuda\", accepted the folder of a toolkit");
    assert!(warning.ends_with("(PATH) compiles"), "{warning}");
    let report = Report::load(&world.at("script-out/kernels.report.json")).unwrap();
    assert_eq!(report.notes, warnings);
}

#[test]
fn flags_add_no_unknown_code() {
    let world = World::new();
    world.write("more.opt", "-G\n");
    let in_file = format!("--options-file {}", world.named("more.opt"));
    for (value, given) in [
        ("-gencode arch=compute_80,code=sm_80", "-gencode"),
        (&in_file, "-G"),
    ] {
        let error = error_of(hosted(&world, &[], &[("NVCC_APPEND_FLAGS", value)]));
        error.says(&format!(": given \"{given}"));
        assert_eq!(world.calls(), NONE);
    }
    let lines = [("NVCC_APPEND_FLAGS", "-lineinfo")];
    assert_eq!(warnings(hosted(&world, &[], &lines)), NONE);
    assert_eq!(world.calls(), ALL);
}

#[test]
fn host_compiler_sources() {
    let world = World::new();
    let host = world.named("host");
    let flag = format!("-ccbin={host}");
    let spaced = format!("-lineinfo -ccbin {host}");
    for (number, (variable, value)) in [
        ("NVCC_CCBIN", &host),
        ("CUDAHOSTCXX", &host),
        ("NVCC_PREPEND_FLAGS", &flag),
        ("NVCC_APPEND_FLAGS", &spaced),
        ("CXX", &host),
    ]
    .into_iter()
    .enumerate()
    {
        let cache = world.named(&format!("cache-{number}"));
        let variables = [(variable, value.as_str()), ("MLA_BUILD_CACHE", &cache)];
        assert_eq!(warnings(script(&world, &[], &variables)), NONE);
        let calls = world.arguments();
        let given = |call: &str| call.contains(&format!("-ccbin {host} "));
        assert!(calls.lines().all(given), "{variable}: {calls}");
        assert_eq!(calls.lines().count(), 3, "{variable}: {calls}");
    }
    let both = [
        ("NVCC_CCBIN", "/usr/bin/c++"),
        ("NVCC_PREPEND_FLAGS", &flag),
    ];
    error_of(script(&world, &[], &both)).begins(&format!(
        "NVCC_PREPEND_FLAGS: given \"-ccbin {host}\", accepted no other C++ compiler than that of \
         NVCC_CCBIN, /usr/bin/c++"
    ));
}

#[test]
fn no_compiler_has_a_remedy() {
    let world = World::new();
    for program in ["false", "true"] {
        let error = error_of(script(&world, &[], &[("CXX", program)]));
        error.says("or name one in NVCC_CCBIN; this one is named by CXX");
    }
    error_of(hosted(&world, &["--family=sm120"], &[]))
        .says("Kernels::family(Family::new(\"sm120\", [\"sm_120\"]))");
}

/// The package's path may have links, and a glob may begin with it or with a dot.
#[test]
fn globs_within_the_package() {
    let world = World::new();
    let kernels = |glob: &str| {
        let bare = world.bare("package", "out").host_compiler(world.at("host"));
        bare.sources(glob).include("cuda").enable("sm90")
    };
    symlink(world.at("package"), world.at("link")).unwrap();
    let inside = world.named("package/cuda/**/*.cu");
    let flagged = kernels(&inside).flag_for(&inside, "-lineinfo");
    assert_eq!(world.compiled_by(flagged), ALL);
    for glob in [
        &*world.named("link/cuda/**/*.cu"),
        "./cuda/**/*.cu",
        "cuda/./**/*.cu",
    ] {
        let units = kernels(glob).compile("kernels").unwrap().report.units;
        let sources = units.iter().map(|unit| &*unit.source);
        assert_eq!(sources.collect::<Vec<_>>(), ALL, "{glob}");
    }
    world.write("shared/s.cu", "body-s\n");
    let beside = kernels("../shared/*.cu").compile("kernels").unwrap();
    assert_eq!(beside.report.units[0].source, "../shared/s.cu");
}

#[test]
fn unread_variables_are_named() {
    let world = World::new();
    assert_eq!(
        warnings(hosted(&world, &[], &[("MLA_BUILD_CACHE_SIZ", "x")])),
        [
            "the environment variable MLA_BUILD_CACHE_SIZ is not read here; accepted \
             MLA_BUILD_CACHE_SIZE"
        ]
    );
    for variable in [
        "MLA_BUILD_CACHE",
        "MLA_BUILD_EXPORT",
        "MLA_BUILD_PREBUILT",
        "MLA_TOOLKIT",
    ] {
        let error = error_of(hosted(&world, &[], &[(variable, "relative/folder")]));
        error.begins(&format!(
            "{variable}: given \"relative/folder\", accepted an absolute path"
        ));
    }
    assert!(!world.at("package/relative").exists());
    // Two settings contradict each other.
    let folder = world.named("objects");
    for (variable, value) in [
        ("MLA_BUILD_PREBUILT", &*folder),
        ("MLA_BUILD_ONLY", "bindings"),
    ] {
        let both = [("MLA_BUILD_EXPORT", &*folder), (variable, value)];
        let error = error_of(hosted(&world, &[], &both));
        error.says(&format!("accepted nothing beside {variable}"));
    }
}

#[test]
fn unknown_folder_in_the_report() {
    let world = World::new();
    for source in ["hopper/x.cu", "plain.cu", "sm90/deep/d.cu"] {
        world.write(&format!("package/cuda/{source}"), "body-x\n");
    }
    assert_eq!(
        world.build().unwrap().report.notes,
        [
            "cuda/hopper has no family's name (sm80, sm90, sm100), so what is in it is compiled \
             for all that are on: sm_90a"
        ]
    );
}

#[test]
fn first_error_ends_the_build() {
    let world = World::new();
    world.write("package/cuda/sm90/a.cu", "// error: wrong\n");
    world.write("package/cuda/all/c.cu", "// sleep: 60\n");
    world.write("package/cuda/sm90/late.cu", "// sleep: 60\n");
    let started = Instant::now();
    let output = hosted(&world, &["--jobs=2"], &[]).output().unwrap();
    assert!(started.elapsed() < Duration::from_secs(30));
    let [stdout, stderr] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    let (_, error) = stderr.split_once("Error: ").unwrap();
    let first = "cuda/sm90/a.cu(2): error: wrong\n";
    error.begins(first);
    assert!(error.ends_with(first), "{error}");
    error.says("1 of 4 units failed, and 3 were stopped; what was compiled is kept");
    assert_eq!(warnings_in(&stdout), [first.trim_end()]);
}

#[test]
#[ignore = "needs libclang, which `cargo xtask toolkit` installs: \
            cargo test -p mla-build -- --ignored undefined"]
fn undefined_function_is_refused() {
    let world = World::new();
    world.write(
        "package/cuda/api.h",
        "int decode(int);\nint gone(void);\nextern int table;\n",
    );
    world.write(
        "package/cuda/sm90/a.cu",
        "// symbol: decode\n// symbol: table\n",
    );
    let build = || hosted(&world, &["--header=cuda/api.h"], &[]);
    error_of(build())
        .begins("symbol gone: declared in cuda/api.h, accepted a definition in a source");
    assert!(!world.at("script-out/kernels.rs").exists());
    // The likeliest cause is a C++ function of that name.
    world.write("package/cuda/sm90/b.cu", "// symbol: _ZN3own4goneEv\n");
    error_of(build()).says("extern \"C\" (in cuda/sm90/b.cu is the C++ function own::gone())");
    // If a family is off, the missing function may be in its sources.
    world.write("package/cuda/sm90/b.cu", "body\n");
    world.write("package/cuda/sm100/d.cu", "// symbol: gone\n");
    assert_eq!(warnings(build()), NONE);
    let report = Report::load(&world.at("script-out/kernels.report.json")).unwrap();
    let [note] = &report.notes[..] else {
        panic!("{:?}", report.notes)
    };
    note.says("(off: sm100): gone");
    fs::remove_dir_all(world.at("package/cuda/sm100")).unwrap();
    world.write("package/cuda/sm90/b.cu", "// symbol: gone\n");
    warnings(build());
    world.read("script-out/kernels.rs").says("fn gone");
}

#[test]
fn renamed_library_leaves_no_files() {
    let world = World::new();
    let build = |libraries: &[&str]| {
        warnings(hosted(&world, libraries, &[]));
        // This stands for the bindings, which need libclang.
        for library in libraries {
            let name = library.split('=').nth(1).unwrap();
            world.write(&format!("script-out/{name}.rs"), "");
        }
        let names = ["old.rs", "old_compiled.rs", "new.rs", "new_compiled.rs"];
        names.map(|name| world.at("script-out").join(name).exists())
    };
    let (old, new) = ("--library=old=cuda/**/*.cu", "--library=new=cuda/**/*.cu");
    assert_eq!(build(&[old]), [true, true, false, false]);
    assert_eq!(build(&[new, old]), [true; 4]);
    assert_eq!(build(&[new]), [false, false, true, true]);
}

#[test]
fn optional_library_is_empty() {
    let world = World::new();
    world.write("package/cuda/api.h", "int decode(int);\n");
    let arguments = ["--family=none", "--optional", "--header=cuda/api.h"];
    let only = [("MLA_BUILD_ONLY", "bindings")];
    for variables in [&[][..], &only] {
        let mut build = script(&world, &arguments, variables);
        let stdout = succeeds(build.env("MLA_CUDA_HOME", "/nonexistent")).stdout;
        assert_eq!(warnings_in(&stdout), NONE);
        assert_eq!(world.read("script-out/kernels.rs"), "");
        let constants = world.read("script-out/kernels_compiled.rs");
        constants.says("SM90: &[&str] = &[]");
        assert!(!stdout.contains("rustc-link-lib"), "{stdout}");
        stdout.says("=sm90:off:sm_90a");
    }
    assert_eq!(world.calls(), NONE);
    error_of(script(&world, &["--family=none"], &[])).says("calls Kernels::optional");
    // With a family on, it is a library like any other.
    warnings(hosted(&world, &["--optional"], &[]));
    assert_eq!(world.calls(), ALL);
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn exposed_cache_is_not_used() {
    let world = World::new();
    assert_eq!(world.compiled(), ALL);
    let cache = world.at("cache");
    let made = fs::metadata(&cache).unwrap().permissions().mode() & 0o777;
    assert_eq!(made, 0o700);
    for (folder, mode) in [(cache.clone(), 0o777), (cache.join("objects"), 0o1777)] {
        set_mode(&folder, mode);
        let place = folder.display();
        assert_eq!(
            warnings(hosted(&world, &[], &[])),
            [format!(
                "every user may write to {place} (mode {mode:04o}): chmod -R go-w {place}; the \
                 cache is not used"
            )]
        );
        assert_eq!(world.calls(), ALL);
        set_mode(&folder, 0o700);
    }
    assert_eq!(world.compiled(), NONE);
}

#[test]
fn exposed_prebuilt_objects_are_refused() {
    let world = World::new();
    let objects = world.at("objects");
    let named = world.named("objects");
    let taken = || script(&world, &[], &[("MLA_BUILD_PREBUILT", &named)]);
    // The owner of a package may compile a release with any toolkit.
    let toolkit = world.named("toolkit");
    let export = [
        ("MLA_BUILD_EXPORT", &*named),
        ("MLA_CUDA_HOME", &*toolkit),
        ("CXX", "c++"),
    ];
    warnings(script(&world, &[], &export));
    world.calls();
    set_mode(&objects, 0o777);
    let error = error_of(taken());
    error.says("owner: given every user may write to ");
    error.says("(mode 0777)");
    let file = objects.join("kernels.prebuilt.json");
    set_mode(&objects, 0o755);
    set_mode(&file, 0o666);
    // Objects of the package are compiled instead. A setter asks for another compiler at first.
    let prebuilt = format!("--prebuilt={named}");
    assert_eq!(warnings(hosted(&world, &[&prebuilt], &[])), NONE);
    let refused = warnings(script(&world, &[&prebuilt], &[("CXX", "c++")]));
    let [refused] = &refused[..] else {
        panic!("{refused:?}")
    };
    refused.begins("prebuilt kernels are not taken: ");
    set_mode(&file, 0o644);
    world.calls();
    warnings(taken());
    assert_eq!(world.calls(), NONE);
}
