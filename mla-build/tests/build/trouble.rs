//! Failures, and the state that they leave.

use std::{
    fs,
    io::Read,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::stub::{ALL, Says, World, driver, succeeded, version};
use mla_build::{Error, Kernels, progress::Event};

const NONE: [&str; 0] = [];

#[test]
fn bad_unit_leaves_the_others() {
    let world = World::new();
    for number in 1..=4 {
        world.write(
            &format!("package/cuda/sm90/good{number}.cu"),
            &format!("good-{number}\n"),
        );
    }
    world.write(
        "package/cuda/sm90/a.cu",
        "// error: identifier \"x\" is undefined\n",
    );
    let mut build = world.command("out");
    let built = build.env("MLA_BUILD_KEEP_GOING", "1").output().unwrap();
    let message = String::from_utf8_lossy(&built.stderr);
    let error = "cuda/sm90/a.cu(2): error: identifier \"x\" is undefined\n";
    message.says(&format!("Error: {error}"));
    assert!(message.ends_with(error), "{message}");
    message.says("1 of 7 units failed; the others are kept");
    assert_eq!(world.calls().len(), 7);

    world.write("package/cuda/sm90/a.cu", "repaired\n");
    let repaired = world.command("out").output().unwrap();
    assert!(repaired.status.success(), "{repaired:?}");
    assert_eq!(world.calls(), ["cuda/sm90/a.cu"]);
}

#[test]
fn failure_output_is_kept() {
    let world = World::new();
    world.write("package/cuda/sm90/a.cu", "// error: first\n");
    world.write(
        "package/cuda/sm90/b.cu",
        "// sleep: 0.5\n// error: second\n",
    );
    let Err(Error::Compile(failures)) = world.build() else {
        panic!("must fail")
    };
    assert_eq!(failures.units.len(), 1);
    let log = fs::read_to_string(&failures.units[0].log).unwrap();
    log.says("warning #177-D");
    log.says("error: first");
    let mut build = world.command("out");
    let built = build.env("MLA_BUILD_KEEP_GOING", "1").output().unwrap();
    let message = String::from_utf8_lossy(&built.stderr);
    let message = message.split_once("\nError: ").unwrap().1;
    let (first, second) = (
        message.find("error: first").unwrap(),
        message.find("error: second").unwrap(),
    );
    assert!(first < second, "{message}");
    message.says("also failed:");
}

#[test]
fn missing_header_hint() {
    let world = World::new();
    world.write("package/cuda/sm90/a.cu", "#include <cute/tensor.hpp>\n");
    let message = world.build().unwrap_err().to_string();
    message.says("fatal error: cute/tensor.hpp: No such file");
    message.says("hint: cute/tensor.hpp belongs to CUTLASS");
}

#[test]
fn killed_compiler() {
    let world = World::new();
    world.program(
        "toolkit/bin/nvcc",
        "#!/bin/sh\n[ \"$1\" = --version ] && exec cat \"$(dirname \
         \"$0\")/../version\"\nkill -9 $$\n",
    );
    let message = world.build().unwrap_err().to_string();
    message.says("signal: 9");
    message.says("ran out of memory");
}

#[test]
fn toolkit_too_old() {
    let world = World::new();
    world.write("toolkit/version", &version("12.4"));
    let message = world
        .kernels()
        .enable("sm100")
        .compile("kernels")
        .unwrap_err()
        .to_string();
    for part in [
        "target sm_100f needs CUDA 12.9",
        "given CUDA 12.4",
        "toolkit/bin/nvcc",
    ] {
        message.says(part);
    }
    assert_eq!(world.calls(), NONE);
    world.write("toolkit/version", &version("11.8"));
    let message = world.build().unwrap_err().to_string();
    message.says("target sm_90a needs CUDA 12.0");
}

#[test]
fn conflicting_targets() {
    let world = World::new();
    let message = |release| {
        world.write("toolkit/version", &version(release));
        let kernels = world.kernels().enable("sm100");
        kernels.compile("kernels").unwrap_err().to_string()
    };
    // A release that is new enough for one target is not enough for both.
    let both = message("11.8");
    assert!(
        both.starts_with(
            "targets sm_90a and sm_100f together need CUDA 12.9 or newer; given CUDA 11.8"
        ),
        "{both}"
    );
    let one = message("12.0");
    assert!(
        one.starts_with("target sm_100f needs CUDA 12.9 or newer; given CUDA 12.0"),
        "{one}"
    );
    assert_eq!(world.calls(), NONE);
}

#[test]
fn cutlass_too_old() {
    let world = World::new();
    world.write("cutlass/include/cutlass/cutlass.h", "");
    let build = |minor: u32| {
        let defines = [
            "MAJOR 3".to_owned(),
            format!("MINOR {minor}"),
            "PATCH 1".to_owned(),
        ]
        .map(|line| format!("#define CUTLASS_{line}\n"))
        .concat();
        world.write("cutlass/include/cutlass/version.h", &defines);
        let output = world
            .command("out")
            .args(["--cutlass", "--family=sm90", "--family=sm100"])
            .env("MLA_CUTLASS", world.at("cutlass"))
            .output()
            .unwrap();
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (built, message) = build(5);
    assert!(!built, "{message}");
    for part in [
        "target sm_100f needs CUTLASS 3.8 or newer; given CUTLASS 3.5",
        "cutlass/include",
    ] {
        message.says(part);
    }
    assert_eq!(world.calls(), NONE);
    let (built, message) = build(8);
    assert!(built, "{message}");
}

#[test]
fn wrong_settings_are_named() {
    let world = World::new();
    let says = |kernels: Kernels, expected: &str| {
        let message = kernels.compile("kernels").unwrap_err().to_string();
        message.says(expected);
    };
    says(
        world.kernels().flag("-arch=sm_80"),
        "flag: given \"-arch=sm_80\", accepted Kernels::family",
    );
    says(
        world.kernels().include("no/such"),
        "include: given \"no/such\"",
    );
    says(
        world.kernels().cuda_home(world.at("cache")),
        "cuda_home: given",
    );
    for flag in ["--ptx", "-fatbin", "-rdc=true", "-keep"] {
        says(
            world.kernels().flag(flag),
            &format!("flag: given {flag:?}, accepted "),
        );
    }
    world.write("toolkit/lib/libcublas.so", "");
    for library in ["cudart_static", "cublas", "cuda", "pthread"] {
        let message = world.kernels().compile(library).unwrap_err().to_string();
        message.says(&format!("library: given {library:?}"));
    }
    says(
        world.kernels().host_compiler(world.at("no/g++")),
        "No such file or directory (os error 2). nvcc works with a C++ compiler of this machine: \
         install GCC's",
    );
    let message = world.kernels().compile("lib/x").unwrap_err().to_string();
    message.says("library: given \"lib/x\"");
    world.write("package/cuda/sm91/x.cu", "");
    says(
        world.kernels(),
        "given the family's folder \"sm91\", accepted sm80, sm90, sm100, all",
    );
}

#[test]
fn cross_compiling_is_refused() {
    let world = World::new();
    for target in [
        "x86_64-unknown-linux-musl",
        "x86_64-pc-windows-msvc",
        "riscv64gc-unknown-linux-gnu",
    ] {
        let mut build = world.command("out");
        build
            .env("TARGET", target)
            .env("HOST", "x86_64-unknown-linux-gnu");
        let output = build.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let expected = format!("TARGET: given {target:?}, accepted x86_64-unknown-linux-gnu or");
        assert!(!output.status.success(), "{stderr}");
        stderr.says(&expected);
    }
    assert_eq!(world.calls(), NONE);
}

#[test]
fn killed_build_keeps_finished_units() {
    let world = World::new();
    world.write("package/cuda/sm90/b.cu", "body-b\n// sleep: 30\n");
    let mut build = world
        .command("out")
        .args(["--jobs=1"])
        .process_group(0)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Units of unknown duration are compiled in order, so the others are stored by then.
    let mut seen = String::new();
    let mut stderr = build.stderr.take().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut buffer = [0; 4096];
    while !seen.contains("compiling cuda/sm90/b.cu") {
        assert!(Instant::now() < deadline, "{seen}");
        let length = stderr.read(&mut buffer).unwrap();
        assert!(length > 0, "{seen}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    let finished: Vec<_> = seen
        .lines()
        .filter(|line| line.starts_with("compiled"))
        .map(str::to_owned)
        .collect();
    let group = format!("-{}", build.id());
    assert!(
        Command::new("kill")
            .args(["-9", "--", &group])
            .status()
            .unwrap()
            .success()
    );
    build.wait().unwrap();
    world.calls();

    world.write("package/cuda/sm90/b.cu", "body-b\n");
    let started = Instant::now();
    let compiled = world.compiled();
    assert!(
        started.elapsed() < Duration::from_secs(10),
        "nothing waits for the dead"
    );
    assert_eq!(finished.len(), 2, "{seen}");
    assert_eq!(compiled, ["cuda/sm90/b.cu"]);
    assert!(world.library("out").contains("body-a"));
}

/// Returns the number of processes that work for a build. Their folder for temporary files is below
/// its output.
fn compilers(out: &std::path::Path) -> usize {
    let mark = format!("TMPDIR={}/", out.display());
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| fs::read(entry.unwrap().path().join("environ")).ok())
        .filter(|environ| {
            environ
                .split(|&b| b == 0)
                .any(|one| one.starts_with(mark.as_bytes()))
        })
        .count()
}

/// Kills a process with SIGKILL, and returns when its subprocesses and its folder are gone.
fn kill_alone(pid: u32, out: &std::path::Path) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let wait_until = |what: &str, done: &dyn Fn() -> bool| {
        while !done() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    wait_until("a compiler runs", &|| compilers(out) > 1);
    let killed = Command::new("kill")
        .args(["-9", &pid.to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
    wait_until("no compiler runs on", &|| compilers(out) == 0);
    wait_until("no folder stays", &|| {
        let entries = fs::read_dir(out).unwrap();
        !entries
            .flatten()
            .any(|e| e.file_name().to_string_lossy().starts_with("nvcc-"))
    });
}

#[test]
fn killed_build_ends_its_compilers() {
    let world = World::new();
    world.write("package/cuda/sm90/b.cu", "body-b\n// sleep: 30\n");
    let mut build = world.command("out").stderr(Stdio::null()).spawn().unwrap();
    kill_alone(build.id(), &world.at("out"));
    build.wait().unwrap();
}

#[test]
fn script_ends_with_cargo() {
    let world = World::new();
    world.write("package/cuda/sm90/b.cu", "body-b\n// sleep: 30\n");
    fs::create_dir(world.at("out")).unwrap();
    // A shell stands in for Cargo. The word after the command keeps the shell from being replaced
    // by the command.
    let mut cargo = Command::new("sh")
        .args(["-c", "\"$@\"; true", "sh"])
        .arg(driver())
        .args(["--include=cuda", "--host-compiler"])
        .arg(world.at("host"))
        .env("CARGO_MANIFEST_DIR", world.at("package"))
        .env("OUT_DIR", world.at("out"))
        .env("MLA_CUDA_HOME", world.at("toolkit"))
        .env("MLA_BUILD_CACHE", world.at("cache"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    kill_alone(cargo.id(), &world.at("out"));
    cargo.wait().unwrap();
}

#[test]
fn concurrent_builds() {
    let world = World::new();
    for number in 0..6 {
        world.write(
            &format!("package/cuda/sm90/unit{number}.cu"),
            &format!("unit-{number}\n// sleep: 0.2\n"),
        );
    }
    let builds: Vec<_> = (0..3)
        .map(|number| {
            world
                .command(&format!("out-{number}"))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for build in builds {
        let output = build.wait_with_output().unwrap();
        succeeded(&output);
    }
    let calls = world.calls();
    let mut once = calls.clone();
    once.dedup();
    assert_eq!(calls, once);
    assert_eq!(calls.len(), 9);
    for number in 0..3 {
        let library = world.library(&format!("out-{number}"));
        assert!((0..6).all(|unit| library.contains(&format!("unit-{unit}"))));
    }
}

#[test]
fn jobserver_tokens() {
    for (tokens, allowed) in [(0, 1), (1, 2)] {
        let world = World::new();
        for number in 0..4 {
            world.write(
                &format!("package/cuda/sm90/unit{number}.cu"),
                &format!("unit-{number}\n// sleep: 0.2\n"),
            );
        }
        let jobserver = jobserver::Client::new(tokens).unwrap();
        let mut build = world.command("out");
        build.env("MLA_BUILD_PROGRESS", world.at("events"));
        // Cargo passes it to a build script in this way.
        jobserver.configure(&mut build);
        let output = build.output().unwrap();
        succeeded(&output);
        let (mut now, mut max) = (0, 0);
        for line in fs::read_to_string(world.at("events")).unwrap().lines() {
            match serde_json::from_str(line).unwrap() {
                Event::Started { .. } => now += 1,
                Event::Finished { .. } => now -= 1,
                _ => {}
            }
            max = max.max(now);
        }
        assert_eq!(max, allowed, "of a jobserver with {tokens} tokens");
        assert_eq!(jobserver.available().unwrap(), tokens);
    }
}

/// Returns every object in the cache.
fn objects(world: &World) -> Vec<std::path::PathBuf> {
    files(world, "objects")
}

fn files(world: &World, kind: &str) -> Vec<std::path::PathBuf> {
    walkdir::WalkDir::new(world.at("cache").join(kind))
        .into_iter()
        .map(Result::unwrap)
        .filter(|entry| entry.file_type().is_file())
        .map(walkdir::DirEntry::into_path)
        .collect()
}

#[test]
fn corrupted_object() {
    for damage in [
        |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1,
        |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2),
        |bytes: &mut Vec<u8>| bytes.clear(),
    ] {
        let world = World::new();
        world.compiled();
        let good = world.library("out");
        let victim = objects(&world).remove(0);
        let mut bytes = fs::read(&victim).unwrap();
        damage(&mut bytes);
        fs::write(&victim, bytes).unwrap();

        let built = world.build().unwrap();
        assert_eq!(world.calls().len(), 1);
        assert_eq!(built.report.notes.len(), 1);
        let note = &built.report.notes[0];
        note.says(&victim.display().to_string());
        note.says("corrupted");
        assert_eq!(world.library("out"), good);
        assert_eq!(world.compiled(), NONE, "and it is stored again");
    }
}

#[test]
fn corrupted_manifest() {
    let world = World::new();
    world.compiled();
    for path in files(&world, "manifests") {
        fs::write(path, "{\"sets\": [{").unwrap();
    }
    assert_eq!(world.compiled(), ALL);
    assert_eq!(world.compiled(), NONE);
}

#[test]
fn objects_exchanged_on_disk_do_not_pass_for_each_other_when_mixed() {
    let world = World::new();
    world.compiled();
    // A file of the right name has its beginning from one object and its end from another.
    let all = objects(&world);
    let (first, second) = (fs::read(&all[0]).unwrap(), fs::read(&all[1]).unwrap());
    let mixed: Vec<_> = first[..40].iter().chain(&second[40..]).copied().collect();
    fs::write(&all[0], mixed).unwrap();
    assert_eq!(world.compiled().len(), 1);
}

#[test]
fn cache_that_is_no_folder() {
    let world = World::new();
    world.write("cache", "a file in its place");
    let built = world.build().unwrap();
    assert_eq!(world.calls(), ALL);
    assert!(
        built.report.notes[0].contains("cannot be written"),
        "{:?}",
        built.report.notes
    );
    assert!(world.library("out").contains("body-a"));
}

/// Runs the build in its own mount namespace, after `setup` has changed the cache's folder there.
fn in_namespace(world: &World, setup: &str, out: &str) -> std::process::Output {
    let cache = world.at("cache");
    fs::create_dir_all(&cache).unwrap();
    let build = world.command(out);
    let script = format!("{setup} && exec \"$@\"");
    Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            &script,
            "sh",
        ])
        .arg(build.get_program())
        .args(build.get_args())
        .env("CACHE", &cache)
        .envs(build.get_envs().filter_map(|(k, v)| Some((k, v?))))
        .output()
        .unwrap()
}

#[test]
#[ignore = "needs unprivileged mount namespaces: cargo test -p mla-build -- --ignored cache"]
fn read_only_cache() {
    let world = World::new();
    world.compiled();
    world.write("package/cuda/sm90/a.cu", "body-a2\n");
    let read_only = "mount --bind \"$CACHE\" \"$CACHE\" && mount -o remount,ro,bind \"$CACHE\"";
    let output = in_namespace(&world, read_only, "out");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(world.calls(), ["cuda/sm90/a.cu"], "what is there is used");
    stderr.says("cannot be written (Read-only file system");
    assert!(world.library("out").contains("body-a2"));
}

#[test]
#[ignore = "needs unprivileged mount namespaces: cargo test -p mla-build -- --ignored cache"]
fn full_disk() {
    let world = World::new();
    let big = format!("body-a\n{}\n", "x".repeat(400_000));
    world.write("package/cuda/sm90/a.cu", &big);
    let output = in_namespace(&world, "mount -t tmpfs -o size=128k none \"$CACHE\"", "out");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(world.calls(), ALL);
    stderr.says("cannot be written (No space left on device");
    assert!(world.library("out").contains("body-a"));
}
