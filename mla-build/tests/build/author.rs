//! Mistakes of kernels' authors: each one is refused, reported, or tolerated.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
    time::{Duration, Instant},
};

use crate::stub::{ALL, Says, World, driver, succeeded};
use mla_build::{Kernels, report::Report};

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

/// Runs the build as a build script of Cargo's, with these variables. The only toolkits are those
/// that they name and the one on `PATH`.
fn script(world: &World, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
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
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn error_of(output: &Output) -> String {
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    let error = stderr.split_once("Error: ");
    error.map_or_else(|| stderr.to_string(), |(_, error)| error.to_owned())
}

fn warnings(output: &Output) -> Vec<String> {
    succeeded(output);
    warnings_of_any(output)
}

fn warnings_of_any(output: &Output) -> Vec<String> {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let lines = stdout.lines();
    let warnings = lines.filter_map(|line| line.strip_prefix("cargo::warning="));
    warnings.map(str::to_owned).collect()
}

fn host(world: &World) -> String {
    format!("--host-compiler={}", world.at("host").display())
}

#[test]
fn empty_cache_bound_is_refused() {
    let world = World::new();
    world.compiled();
    let host = host(&world);
    for size in ["0", "10"] {
        let output = script(&world, &[&host], &[("MLA_BUILD_CACHE_SIZE", size)]);
        let error = error_of(&output);
        let start = format!("MLA_BUILD_CACHE_SIZE: given {size:?}, accepted 64 MiB and up");
        assert!(error.starts_with(&start), "{error}");
    }
    assert_eq!(world.compiled(), [""; 0]);
}

#[test]
fn passed_over_toolkit_warns() {
    let world = World::new();
    let (host, bin) = (host(&world), world.at("toolkit/bin"));
    fs::create_dir(world.at("empty")).unwrap();
    let empty = world.at("empty");
    for (variable, value) in [
        ("CUDA_HOME", "~/cuda"),
        ("CUDA_HOME", "nope/cuda"),
        ("CUDA_HOME", "/nonexistent"),
        ("CUDA_HOME", bin.to_str().unwrap()),
        ("CUDA_PATH", empty.to_str().unwrap()),
    ] {
        let output = script(&world, &[&host], &[(variable, value)]);
        let warnings = warnings(&output);
        let start = format!("{variable}: given {value:?}, accepted the folder of a toolkit");
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(
            warnings[0].starts_with(&start) && warnings[0].ends_with("(PATH) compiles"),
            "{warnings:?}"
        );
        let report = Report::load(&world.at("script-out/kernels.report.json")).unwrap();
        assert_eq!(report.notes, warnings);
    }
}

#[test]
fn flags_add_no_unknown_code() {
    let world = World::new();
    let host = host(&world);
    let options = world.at("more.opt").display().to_string();
    world.write("more.opt", "-G\n");
    let in_file = format!("--options-file {options}");
    for (value, given) in [
        ("-gencode arch=compute_80,code=sm_80", "-gencode"),
        (
            "-lineinfo --generate-code=arch=compute_80,code=sm_80",
            "--generate-code=arch",
        ),
        ("-arch=sm_80", "-arch=sm_80"),
        ("-G", "-G"),
        ("-t 4", "-t"),
        ("--threads=2", "--threads=2"),
        (&in_file, "-G"),
    ] {
        let output = script(&world, &[&host], &[("NVCC_APPEND_FLAGS", value)]);
        let error = error_of(&output);
        error.says(&format!(": given \"{given}"));
        assert_eq!(world.calls(), [""; 0]);
        let flag = given.split(' ').next().unwrap();
        let kernels = world.kernels().flag(flag);
        let error = kernels.compile("kernels").unwrap_err().to_string();
        assert!(error.starts_with("flag: given "), "{error}");
    }
    let lines = [("NVCC_APPEND_FLAGS", "-lineinfo")];
    assert_eq!(warnings(&script(&world, &[&host], &lines)), [""; 0]);
    assert_eq!(world.calls(), ALL);
}

/// Returns the C++ compiler in the arguments of a call.
fn host_of_calls(world: &World) -> String {
    let calls = fs::read_to_string(world.at("calls")).unwrap();
    fs::remove_file(world.at("calls")).unwrap();
    let last = calls.lines().next().unwrap().split("-ccbin ").nth(1);
    last.unwrap().split(' ').next().unwrap().to_owned()
}

#[test]
fn host_compiler_sources() {
    let world = World::new();
    let host = world.at("host").display().to_string();
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
        let cache = world.at(&format!("cache-{number}")).display().to_string();
        let variables = [(variable, value.as_str()), ("MLA_BUILD_CACHE", &cache)];
        assert_eq!(warnings(&script(&world, &[], &variables)), [""; 0]);
        assert_eq!(host_of_calls(&world), host, "{variable}");
    }
    let both = [
        ("NVCC_CCBIN", "/usr/bin/c++"),
        ("NVCC_PREPEND_FLAGS", &flag),
    ];
    let error = error_of(&script(&world, &[], &both));
    let expected = format!(
        "NVCC_PREPEND_FLAGS: given \"-ccbin {host}\", accepted no other C++ compiler than that of \
         NVCC_CCBIN, /usr/bin/c++"
    );
    assert!(error.starts_with(&expected), "{error}");
}

#[test]
fn no_compiler_has_a_remedy() {
    let world = World::new();
    for program in ["false", "true"] {
        let error = error_of(&script(&world, &[], &[("CXX", program)]));
        error.says("or name one in NVCC_CCBIN; this one is named by CXX");
    }
    let host = host(&world);
    for (value, way) in [
        (
            "nvcc",
            "accepted the absolute path of bin/nvcc of a whole toolkit",
        ),
        (
            "/cuda/bin/nvcc --threads 2",
            "/cuda/bin/nvcc; flags go into NVCC_APPEND_FLAGS",
        ),
    ] {
        let error = error_of(&script(&world, &[&host], &[("NVCC", value)]));
        assert!(error.starts_with("NVCC: given"), "{error}");
        error.says(way);
    }
    let error = error_of(&script(&world, &[&host, "--family=sm120"], &[]));
    error.says("Kernels::family(Family::new(\"sm120\", [\"sm_120\"]))");
    let none = Kernels::new().enable("sm90").root(world.at("package"));
    let none = none.out_dir(world.at("out")).cache(world.at("cache"));
    let error = none.compile("kernels").unwrap_err().to_string();
    assert!(
        error.starts_with("sources: given \"no glob\", accepted at least one, as in Kernels::"),
        "{error}"
    );
}

#[test]
fn absolute_glob() {
    let world = World::new();
    let glob = |folder: &Path| format!("{}/cuda/**/*.cu", folder.display());
    let kernels = |glob: String| {
        let of = Kernels::new().sources(glob).include("cuda").enable("sm90");
        of.root(world.at("package"))
            .out_dir(world.at("out"))
            .cache(world.at("cache"))
            .cuda_home(world.at("toolkit"))
            .host_compiler(world.at("host"))
    };
    let inside = glob(&world.at("package"));
    let flagged = kernels(inside.clone()).flag_for(inside, "-lineinfo");
    assert_eq!(world.compiled_by(flagged), ALL);
    assert_eq!(world.compiled_by(kernels("./cuda/**/*.cu".into())).len(), 3);
    let elsewhere = kernels(glob(&world.at("elsewhere")));
    let error = elsewhere.compile("kernels").unwrap_err().to_string();
    error.says("accepted a glob relative to the package, ");
}

#[test]
fn unread_variables_are_named() {
    let world = World::new();
    let host = host(&world);
    for (variable, meant) in [
        ("MLA_BUILD_TARGETS_SM9O", "MLA_BUILD_TARGETS_SM90"),
        ("MLA_BUILD_CACHE_SIZ", "MLA_BUILD_CACHE_SIZE"),
        ("NVCC_APEND_FLAGS", "NVCC_APPEND_FLAGS"),
    ] {
        let warnings = warnings(&script(&world, &[&host], &[(variable, "x")]));
        let expected =
            format!("the environment variable {variable} is not read here; accepted {meant}");
        assert_eq!(warnings, [expected]);
    }
    for variable in [
        "MLA_BUILD_CACHE",
        "MLA_BUILD_EXPORT",
        "MLA_BUILD_PREBUILT",
        "MLA_TOOLKIT",
    ] {
        let error = error_of(&script(&world, &[&host], &[(variable, "relative/folder")]));
        let start = format!("{variable}: given \"relative/folder\", accepted an absolute path");
        assert!(error.starts_with(&start), "{error}");
    }
    assert!(!world.at("package/relative").exists());
    // These two settings contradict each other.
    let folder = world.at("objects").display().to_string();
    let both = [
        ("MLA_BUILD_EXPORT", &*folder),
        ("MLA_BUILD_PREBUILT", &*folder),
    ];
    let error = error_of(&script(&world, &[&host], &both));
    error.says("accepted nothing beside MLA_BUILD_PREBUILT");
    let both = [
        ("MLA_BUILD_EXPORT", &*folder),
        ("MLA_BUILD_ONLY", "bindings"),
    ];
    let error = error_of(&script(&world, &[&host], &both));
    error.says("accepted nothing beside MLA_BUILD_ONLY");
}

#[test]
fn unknown_folder_in_the_report() {
    let world = World::new();
    world.write("package/cuda/hopper/x.cu", "body-x\n");
    let notes = world.build().unwrap().report.notes;
    assert_eq!(
        notes,
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
    let output = script(&world, &[&host(&world), "--jobs=2"], &[]);
    assert!(started.elapsed() < Duration::from_secs(30));
    let error = error_of(&output);
    let first = "cuda/sm90/a.cu(2): error: wrong\n";
    assert!(
        error.starts_with(first) && error.ends_with(first),
        "{error}"
    );
    error.says("1 of 4 units failed, and 3 were stopped; what was compiled is kept");
    assert_eq!(warnings_of_any(&output), [first.trim_end()]);
}

#[test]
#[ignore = "needs libclang, which `cargo xtask toolkit` installs: \
            cargo test -p mla-build -- --ignored declared"]
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
    let build = |header: &str| {
        let output = script(&world, &[&host(&world), header], &[]);
        assert!(!output.status.success());
        error_of(&output)
    };
    let error = build("--header=cuda/api.h");
    assert!(
        error.starts_with("symbol gone: declared in cuda/api.h, accepted a definition in a source"),
        "{error}"
    );
    assert!(!world.at("script-out/kernels.rs").exists());
    // The likeliest cause is a C++ function of that name.
    world.write("package/cuda/sm90/b.cu", "// symbol: _ZN3own4goneEv\n");
    let error = build("--header=cuda/api.h");
    error.says("extern \"C\" (in cuda/sm90/b.cu is the C++ function own::gone())");
    // If a family is off, the missing function may be in its sources.
    world.write("package/cuda/sm90/b.cu", "body\n");
    world.write("package/cuda/sm100/d.cu", "// symbol: gone\n");
    let output = script(&world, &[&host(&world), "--header=cuda/api.h"], &[]);
    assert_eq!(warnings(&output), [""; 0]);
    let report = Report::load(&world.at("script-out/kernels.report.json")).unwrap();
    assert_eq!(report.notes.len(), 1);
    assert!(
        report.notes[0].contains("(off: sm100): gone"),
        "{:?}",
        report.notes
    );
    fs::remove_dir_all(world.at("package/cuda/sm100")).unwrap();
    world.write("package/cuda/sm90/b.cu", "// symbol: gone\n");
    warnings(&script(
        &world,
        &[&host(&world), "--header=cuda/api.h"],
        &[],
    ));
    let bindings = fs::read_to_string(world.at("script-out/kernels.rs")).unwrap();
    bindings.says("fn gone");
}

#[test]
fn renamed_library_leaves_no_files() {
    let world = World::new();
    let host = host(&world);
    let build = |libraries: &[&str]| {
        let mut arguments = vec![host.as_str()];
        arguments.extend(libraries);
        warnings(&script(&world, &arguments, &[]));
        // This stands for the bindings, which need libclang.
        for library in libraries {
            let name = library.split('=').nth(1).unwrap();
            world.write(&format!("script-out/{name}.rs"), "");
        }
    };
    let exist = |names: [&str; 4]| {
        let out = world.at("script-out");
        names.map(|name| out.join(name).exists())
    };
    let names = ["old.rs", "old_compiled.rs", "new.rs", "new_compiled.rs"];
    build(&["--library=old=cuda/**/*.cu"]);
    assert_eq!(exist(names), [true, true, false, false]);
    build(&["--library=new=cuda/**/*.cu", "--library=old=cuda/**/*.cu"]);
    assert_eq!(exist(names), [true; 4]);
    build(&["--library=new=cuda/**/*.cu"]);
    assert_eq!(exist(names), [false, false, true, true]);
}

#[test]
fn optional_library_is_empty() {
    let world = World::new();
    world.write("package/cuda/api.h", "int decode(int);\n");
    let arguments = ["--family=none", "--optional", "--header=cuda/api.h"];
    let only = [("MLA_BUILD_ONLY", "bindings")];
    for variables in [&[][..], &only] {
        let mut all = vec![("MLA_CUDA_HOME", "/nonexistent")];
        all.extend(variables);
        let output = script(&world, &arguments, &all);
        assert_eq!(warnings(&output), [""; 0]);
        let read = |name: &str| fs::read_to_string(world.at(name)).unwrap();
        assert_eq!(read("script-out/kernels.rs"), "");
        let constants = read("script-out/kernels_compiled.rs");
        constants.says("SM90: &[&str] = &[]");
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(!stdout.contains("rustc-link-lib"), "{stdout}");
        stdout.says("=sm90:off:sm_90a");
    }
    assert_eq!(world.calls(), [""; 0]);
    let refused = error_of(&script(&world, &["--family=none"], &[]));
    refused.says("calls Kernels::optional");
    // With a family on, it is a library like any other.
    let host = host(&world);
    let on = [&host, "--optional"];
    warnings(&script(&world, &on, &[]));
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
        let output = script(&world, &[&host(&world)], &[]);
        let warnings = warnings(&output);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        let start = format!(
            "every user may write to {} (mode {mode:04o})",
            folder.display()
        );
        assert!(
            warnings[0].starts_with(&start) && warnings[0].ends_with("; the cache is not used"),
            "{warnings:?}"
        );
        assert_eq!(world.calls(), ALL);
        set_mode(&folder, 0o700);
    }
    assert_eq!(world.compiled(), [""; 0]);
}

#[test]
fn exposed_prebuilt_objects_are_refused() {
    let world = World::new();
    let host = host(&world);
    let objects = world.at("objects");
    let named = objects.display().to_string();
    // The owner of a package may compile a release with any toolkit.
    let toolkit = world.at("toolkit").display().to_string();
    let export = [
        ("MLA_BUILD_EXPORT", &*named),
        ("MLA_CUDA_HOME", &*toolkit),
        ("CXX", "c++"),
    ];
    let exported = script(&world, &[], &export);
    warnings(&exported);
    world.calls();
    set_mode(&objects, 0o777);
    let error = error_of(&script(&world, &[], &[("MLA_BUILD_PREBUILT", &named)]));
    error.says("owner: given every user may write to ");
    error.says("(mode 0777)");
    let file = objects.join("kernels.prebuilt.json");
    set_mode(&objects, 0o755);
    set_mode(&file, 0o666);
    // Objects of the package are compiled instead.
    let prebuilt = format!("--prebuilt={named}");
    let warnings_of_file = warnings(&script(&world, &[&prebuilt, &host], &[]));
    assert_eq!(
        warnings_of_file, [""; 0],
        "a setter asks for another compiler"
    );
    let output = script(&world, &[&prebuilt], &[("CXX", "c++")]);
    let refused = warnings(&output);
    assert!(
        refused.len() == 1 && refused[0].starts_with("prebuilt kernels are not taken: "),
        "{refused:?}"
    );
    set_mode(&file, 0o644);
    world.calls();
    warnings(&script(&world, &[], &[("MLA_BUILD_PREBUILT", &named)]));
    assert_eq!(world.calls(), [""; 0]);
}
