//! Failures, and the state that they leave.

use std::{
    fs,
    io::Read,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::stub::{ALL, NONE, Says, World, driver, fails, refusal, succeeds, version};
use mla_build::{Error, progress::Event};

/// Writes units that take a moment.
fn write_units(world: &World, count: usize) {
    for number in 0..count {
        let text = format!("unit-{number}\n// sleep: 0.2\n");
        world.write(&format!("package/cuda/sm90/unit{number}.cu"), &text);
    }
}

/// Makes a build that compiles all units even after one has failed.
fn keeping_going(world: &World) -> Command {
    let mut build = world.command("out");
    build.env("MLA_BUILD_KEEP_GOING", "1");
    build
}

#[test]
fn bad_unit_leaves_the_others() {
    let world = World::new();
    write_units(&world, 4);
    world.write(
        "package/cuda/sm90/a.cu",
        "// error: identifier \"x\" is undefined\n",
    );
    let message = fails(&mut keeping_going(&world));
    let error = "cuda/sm90/a.cu(2): error: identifier \"x\" is undefined\n";
    message.says(&format!("Error: {error}"));
    assert!(message.ends_with(error), "{message}");
    message.says("1 of 7 units failed; the others are kept");
    assert_eq!(world.calls().len(), 7);

    world.write("package/cuda/sm90/a.cu", "repaired\n");
    succeeds(&mut world.command("out"));
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
    let message = fails(&mut keeping_going(&world));
    let (_, message) = message.split_once("\nError: ").unwrap();
    let at = |text| message.find(text).unwrap();
    assert!(at("error: first") < at("error: second"), "{message}");
    message.says("also failed:");
}

#[test]
fn killed_compiler() {
    let world = World::new();
    world.program(
        "toolkit/bin/nvcc",
        "#!/bin/sh\n[ \"$1\" = --version ] && exec cat \"$(dirname \
         \"$0\")/../version\"\nkill -9 $$\n",
    );
    let message = refusal(world.kernels());
    message.says("signal: 9");
    message.says("ran out of memory");
}

#[test]
fn toolkit_too_old() {
    let world = World::new();
    let of = |release, family| {
        world.write("toolkit/version", &version(release));
        refusal(world.kernels().enable(family))
    };
    let one = of("12.4", "sm100");
    one.begins("target sm_100f needs CUDA 12.9 or newer; given CUDA 12.4");
    one.says("toolkit/bin/nvcc");
    of("11.8", "sm90").says("target sm_90a needs CUDA 12.0");
    // A release that is new enough for one target is not enough for both.
    of("11.8", "sm100")
        .begins("targets sm_90a and sm_100f together need CUDA 12.9 or newer; given CUDA 11.8");
    assert_eq!(world.calls(), NONE);
}

#[test]
fn cutlass_too_old() {
    let world = World::new();
    world.write("cutlass/include/cutlass/cutlass.h", "");
    let build = |minor: u32| {
        let defines = format!(
            "#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH 1\n"
        );
        world.write("cutlass/include/cutlass/version.h", &defines);
        let mut build = world.command("out");
        build.args(["--cutlass", "--family=sm90", "--family=sm100"]);
        build.env("MLA_CUTLASS", world.at("cutlass"));
        build
    };
    let message = fails(&mut build(5));
    message.says("target sm_100f needs CUTLASS 3.8 or newer; given CUTLASS 3.5");
    message.says("cutlass/include");
    assert_eq!(world.calls(), NONE);
    succeeds(&mut build(8));
}

#[test]
fn wrong_settings_are_named() {
    let world = World::new();
    world.write("toolkit/lib/libcublas.so", "");
    world.write("package/other/sm91/x.cu", "");
    world.write("package/other/common/x.cu", "");
    let kernels = || world.kernels();
    let none = world.bare("package", "out").enable("sm90");
    let only = |glob: &str| none.clone().sources(glob).host_compiler(world.at("host"));
    for (kernels, expected) in [
        (
            kernels().flag("-arch=sm_80"),
            "flag: given \"-arch=sm_80\", accepted Kernels::family",
        ),
        (
            kernels().flag_for("cuda/**", "-arch=sm_80"),
            "flag: given \"-arch=sm_80\"",
        ),
        (
            kernels().flag_for("cuda/sm90/gone.cu", "-lineinfo"),
            "flag_for: given \"cuda/sm90/gone.cu\", accepted a glob that matches a source",
        ),
        (kernels().include("no/such"), "include: given \"no/such\""),
        (kernels().cuda_home(world.at("cache")), "cuda_home: given"),
        (
            kernels().host_compiler(world.at("no/g++")),
            "No such file or directory (os error 2). nvcc works with a C++ compiler of this \
             machine: install GCC's",
        ),
        (
            none.clone(),
            "sources: given \"no glob\", accepted at least one, as in Kernels::sources(",
        ),
        (only("cuda/["), "sources: given \"cuda/[\", accepted a glob"),
        (
            only("src/*.cu"),
            "sources: no source for sm90 among src/*.cu, in ",
        ),
        (
            kernels().sources("other/sm91/*.cu"),
            "other/sm91/x.cu: given the family's folder \"sm91\", accepted sm80, sm90, sm100, all",
        ),
        (
            kernels().sources("other/common/*.cu"),
            "other/common/x.cu: given a source in common/, accepted headers there; a source of \
             every family goes into all/",
        ),
        (
            kernels().sources(world.named("elsewhere/*.cu")),
            "accepted a glob relative to the package, ",
        ),
        (
            kernels().ptx_for("cuda/sm90/a.cu", "compute_90a"),
            "ptx_for: given \"compute_90a\", accepted PTX",
        ),
        (
            kernels().ptx_for("cuda/sm90/a.cu", "sm_80"),
            "ptx_for: given \"sm_80\", accepted PTX",
        ),
        (
            kernels().ptx_for("cuda/sm90/a.cu", "ptx"),
            "ptx_for: given \"ptx\", accepted PTX",
        ),
    ] {
        refusal(kernels).says(expected);
    }
    for library in ["cudart_static", "cublas", "cuda", "pthread", "lib/x"] {
        let message = kernels().compile(library).unwrap_err().to_string();
        message.says(&format!("library: given {library:?}"));
    }
}

#[test]
fn cross_compiling_is_refused() {
    let world = World::new();
    let (here, musl) = ("x86_64-unknown-linux-gnu", "x86_64-unknown-linux-musl");
    for (target, host) in [
        ("aarch64-unknown-linux-gnu", here),
        (musl, here),
        (musl, musl),
        ("x86_64-pc-windows-msvc", here),
        ("riscv64gc-unknown-linux-gnu", here),
    ] {
        let mut build = world.command("out");
        let stderr = fails(build.env("TARGET", target).env("HOST", host));
        stderr.says(&format!("TARGET: given {target:?}, accepted {here} or"));
        stderr.says("GCC and glibc");
        stderr.says("MLA_BUILD_ONLY=bindings");
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
    let finished = seen.lines().filter(|line| line.starts_with("compiled"));
    assert_eq!(finished.count(), 2, "{seen}");
    let group = format!("-{}", build.id());
    succeeds(Command::new("kill").args(["-9", "--", &group]));
    build.wait().unwrap();
    world.calls();

    world.write("package/cuda/sm90/b.cu", "body-b\n");
    let started = Instant::now();
    assert_eq!(world.compiled(), ["cuda/sm90/b.cu"]);
    let waited = started.elapsed();
    assert!(waited < Duration::from_secs(10), "it waits for the dead");
    world.library("out").says("body-a");
}

/// Returns the number of processes that work for a build. Their folder for temporary files is below
/// its output.
fn compilers(out: &Path) -> usize {
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
fn kill_alone(pid: u32, out: &Path) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let wait_until = |what: &str, done: &dyn Fn() -> bool| {
        while !done() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    wait_until("a compiler runs", &|| compilers(out) > 1);
    succeeds(Command::new("kill").args(["-9", &pid.to_string()]));
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
        .args(["--include=cuda", &world.host_argument()])
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
    write_units(&world, 6);
    std::thread::scope(|scope| {
        for number in 0..3 {
            let mut build = world.command(&format!("out-{number}"));
            scope.spawn(move || succeeds(&mut build));
        }
    });
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
        write_units(&world, 4);
        let jobserver = jobserver::Client::new(tokens).unwrap();
        let mut build = world.command("out");
        build.env("MLA_BUILD_PROGRESS", world.at("events"));
        // Cargo passes it to a build script in this way.
        jobserver.configure(&mut build);
        succeeds(&mut build);
        let (mut now, mut max) = (0, 0);
        for line in world.read("events").lines() {
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
fn objects(world: &World) -> Vec<PathBuf> {
    world.files("cache/objects")
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
        let [note] = &built.report.notes[..] else {
            panic!("{:?}", built.report.notes)
        };
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
    for path in world.files("cache/manifests") {
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
    let [note] = &built.report.notes[..] else {
        panic!("it is noted once: {:?}", built.report.notes)
    };
    note.says("cannot be written");
    note.says("MLA_BUILD_CACHE");
    world.library("out").says("body-a");
}

/// Runs the build in its own mount namespace, after `setup` has changed the cache's folder there.
/// Returns its messages.
fn in_namespace(world: &World, setup: &str) -> String {
    let cache = world.at("cache");
    fs::create_dir_all(&cache).unwrap();
    let build = world.command("out");
    let script = format!("{setup} && exec \"$@\"");
    let mut shell = Command::new("unshare");
    shell
        .args(["--user", "--map-root-user", "--mount"])
        .args(["sh", "-c", &script, "sh"])
        .arg(build.get_program())
        .args(build.get_args())
        .env("CACHE", &cache)
        .envs(build.get_envs().filter_map(|(k, v)| Some((k, v?))));
    succeeds(&mut shell).stderr
}

#[test]
#[ignore = "needs unprivileged mount namespaces: cargo test -p mla-build -- --ignored cache"]
fn read_only_cache() {
    let world = World::new();
    world.compiled();
    world.write("package/cuda/sm90/a.cu", "body-a2\n");
    let read_only = "mount --bind \"$CACHE\" \"$CACHE\" && mount -o remount,ro,bind \"$CACHE\"";
    let stderr = in_namespace(&world, read_only);
    assert_eq!(world.calls(), ["cuda/sm90/a.cu"], "what is there is used");
    stderr.says("cannot be written (Read-only file system");
    world.library("out").says("body-a2");
}

#[test]
#[ignore = "needs unprivileged mount namespaces: cargo test -p mla-build -- --ignored full_disk"]
fn full_disk() {
    let world = World::new();
    let big = format!("body-a\n{}\n", "x".repeat(400_000));
    world.write("package/cuda/sm90/a.cu", &big);
    let stderr = in_namespace(
        &world,
        "mount -t tmpfs -o size=128k,mode=700 none \"$CACHE\"",
    );
    assert_eq!(world.calls(), ALL);
    stderr.says("cannot be written (No space left on device");
    world.library("out").says("body-a");
}
