//! Restarts of the build script by Cargo: a package with the stub in place of nvcc, built several
//! times.

use std::{
    fs,
    os::unix::fs::symlink,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, SystemTime},
};

use crate::stub::{Says, World, fails, processor_time, succeeds, version};

/// A package whose build script runs the example `compile` and counts its runs.
struct Package {
    world: World,
    variables: Vec<(String, PathBuf)>,
}

impl Package {
    fn new(arguments: &[&str]) -> Self {
        let world = World::new();
        let count = format!(
            "let mut runs = \
             std::fs::File::options().append(true).create(true).open({:?}).unwrap();\n    \
             std::io::Write::write_all(&mut runs, b\"run\\n\").unwrap();",
            world.at("runs")
        );
        let mut all = vec![world.host_argument()];
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        world.package("package", "", &count, &all);
        world.write("package/src/lib.rs", "");
        Self {
            world,
            variables: Vec::new(),
        }
    }

    fn set(&mut self, variable: &str, value: PathBuf) {
        self.variables.retain(|(name, _)| name != variable);
        self.variables.push((variable.to_owned(), value));
    }

    /// Sets a variable to a path in the world's folder.
    fn set_at(&mut self, variable: &str, path: &str) {
        self.set(variable, self.world.at(path));
    }

    fn cargo(&self, command: &str) -> Command {
        let mut cargo = self.world.cargo("package", command);
        cargo.env("MLA_CUDA_HOME", self.world.at("toolkit"));
        cargo.envs(self.variables.iter().map(|(name, value)| (name, value)));
        cargo
    }

    /// Returns how often the build script ran.
    fn runs(&self) -> usize {
        let runs = fs::read_to_string(self.world.at("runs"));
        runs.unwrap_or_default().lines().count()
    }

    /// Builds, and returns whether the build script ran.
    fn ran(&self) -> bool {
        let before = self.runs();
        succeeds(&mut self.cargo("build"));
        // Cargo compares modification times, and some file systems store them coarsely.
        thread::sleep(Duration::from_millis(20));
        self.runs() != before
    }

    /// Checks that the build script runs again after a change, and not once more after that.
    fn notices(&self, what: &str) {
        assert!(self.ran(), "{what} is noticed");
        assert!(!self.ran(), "{what} is noticed once");
    }
}

#[test]
fn script_reruns_once() {
    let mut package = Package::new(&["--include=cuda", "--include=own"]);
    fs::create_dir(package.world.at("package/own")).unwrap();
    fs::create_dir(package.world.at("mine")).unwrap();
    package.set_at("CPATH", "mine");
    package.notices("the first build");
    let world = &package.world;
    world.write("package/cuda/sm90/new.cu", "new\n");
    package.notices("a new source");
    world.write("package/cuda/common/shared.h", "shared-2\n");
    package.notices("an edited header");
    world.write("toolkit/include/cute/layout.hpp", "layout-2\n");
    package.notices("an edited header of the toolkit");
    world.write("package/own/cute/layout.hpp", "hides\n");
    package.notices("a new header in an include root beside the sources");
    world.write("mine/cute/layout.hpp", "hides\n");
    package.notices("a new header in a folder of CPATH");
    world.program("toolkit/bin/nvcc", include_str!("stub/nvcc.sh"));
    package.notices("another nvcc");
    for variable in [
        "CUTLASS_PATH",
        "CUTLASS_HOME",
        "HOST_CXX",
        "CXX_x86_64-unknown-linux-gnu",
        "CXX_x86_64_unknown_linux_gnu",
        "COMPILER_PATH",
        "BINDGEN_EXTRA_CLANG_ARGS",
        "BINDGEN_EXTRA_CLANG_ARGS_x86_64_unknown_linux_gnu",
    ] {
        package.set_at(variable, "none");
        package.notices(variable);
    }
}

#[test]
fn compiled_constants() {
    let expected = |value: &str| {
        format!(
            "const _: () = assert!(matches!(env!(\"MLA_BUILD_COMPILED\").as_bytes(), \
             b{value:?}));\n"
        )
    };
    let mut package = Package::new(&["--include=cuda"]);
    package.world.write("package/cuda/sm100/x.cu", "body-x\n");
    let told = expected("sm90:on:sm_90a;sm100:off:sm_100f");
    package.world.write("package/src/lib.rs", &told);
    assert!(package.ran());
    // A check of the Rust code gets the same targets.
    package.set("MLA_BUILD_ONLY", "bindings".into());
    package.set_at("MLA_CUDA_HOME", "none");
    let checks = |package: &Package| package.cargo("check").output().unwrap().status.success();
    assert!(checks(&package));
    package.set("MLA_BUILD_TARGETS_SM90", "+sm_90".into());
    assert!(!checks(&package), "other targets are told");
    let told = expected("sm90:on:sm_90a,sm_90;sm100:off:sm_100f");
    package.world.write("package/src/lib.rs", &told);
    assert!(checks(&package));
}

#[test]
fn own_output_does_not_rebuild() {
    // The globs and one include root contain the target folder, the cache and the file for clangd.
    // Another include root lies below OUT_DIR.
    let mut package = Package::new(&["--sources=**/*.cu", "--include=.", "--include=cuda"]);
    let world = &package.world;
    let script = world.read("package/build.rs");
    let generated = "let out = \
                     std::path::PathBuf::from(std::env::var_os(\"OUT_DIR\").unwrap());\n    \
                     std::fs::create_dir_all(out.join(\"generated\")).unwrap();\n    \
                     std::fs::write(out.join(\"generated/made.h\"), \"made\\n\").unwrap();\n    \
                     std::fs::write(out.join(\"generated/copy.cu\"), \"copy\\n\").unwrap();\n    \
                     driver.arg(\"--include\").arg(out.join(\"generated\"));\n    ";
    let script = script.replace("let status", &format!("{generated}let status"));
    world.write("package/build.rs", &script);
    world.write("package/cuda/sm90/d.cu", "#include <made.h>\nbody-d\n");
    package.set_at("MLA_BUILD_CACHE", "package/kept");
    package.set("MLA_BUILD_COMPILE_COMMANDS", "compile_commands.json".into());
    package.notices("the first build");
    assert!(!package.ran(), "nor does the second");
    let calls = package.world.calls();
    // Nothing below the target folder is a source.
    assert_eq!(calls.len(), 4, "{calls:?}");
    package.world.write("package/cuda/sm90/new.cu", "new\n");
    package.notices("a new source");
}

#[test]
fn switched_toolkit_link() {
    let mut package = Package::new(&["--include=cuda"]);
    let world = &package.world;
    world.copy("toolkit", "other");
    // The folders are as old as a toolkit that was installed long ago. Two links lead to them, as
    // with Debian's alternatives.
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    world.set_times("other", long_ago);
    symlink(world.at("toolkit"), world.at("alternative")).unwrap();
    symlink(world.at("alternative"), world.at("cuda")).unwrap();
    package.set_at("MLA_CUDA_HOME", "cuda");
    package.notices("the first build");
    fs::remove_file(package.world.at("alternative")).unwrap();
    symlink(package.world.at("other"), package.world.at("alternative")).unwrap();
    package.notices("the switched link");
}

#[test]
fn newly_found_nvcc() {
    let mut package = Package::new(&["--include=cuda"]);
    // The toolkit is found on the path. CUDA_HOME and a folder of the path without a toolkit come
    // before it.
    let path = std::env::var_os("PATH").unwrap();
    fs::create_dir(package.world.at("first")).unwrap();
    let folders = [package.world.at("first"), package.world.at("toolkit/bin")];
    let folders = folders.into_iter().chain(std::env::split_paths(&path));
    package.set("PATH", std::env::join_paths(folders).unwrap().into());
    package.set("MLA_CUDA_HOME", PathBuf::new());
    package.set_at("CUDA_HOME", "home/cuda");
    package.notices("the first build");
    let world = &package.world;
    symlink(world.at("toolkit/bin/nvcc"), world.at("first/nvcc")).unwrap();
    package.notices("an nvcc in an earlier folder of the path");
    fs::create_dir(world.at("home")).unwrap();
    world.copy("toolkit", "home/cuda");
    world.write("home/cuda/version", &version("13.1"));
    package.notices("a toolkit where CUDA_HOME says");
    let report = world.read("package/target/mla-build/package-kernels.json");
    report.says("13.1.88");
}

#[test]
fn check_without_kernels() {
    let mut package = Package::new(&["--declarations=declared.rs", "--include=cuda"]);
    package.world.write("package/declared.rs", "");
    package.set("MLA_BUILD_ONLY", "bindings".into());
    package.set_at("MLA_CUDA_HOME", "none");
    succeeds(&mut package.cargo("check"));
    fails(&mut package.cargo("build"))
        .says("kernels_is_not_compiled_because_MLA_BUILD_ONLY_is_set");
    // With the switch turned off, everything is compiled.
    package.set("MLA_BUILD_ONLY", PathBuf::new());
    package.set_at("MLA_CUDA_HOME", "toolkit");
    package.notices("the switch");
    assert_eq!(package.world.calls().len(), 3);
}

/// On request, Cargo keeps the output of build scripts outside the target folder.
#[test]
fn separate_build_folder() {
    let mut package = Package::new(&["--sources=**/*.cu", "--include=cuda"]);
    package.set_at("CARGO_BUILD_BUILD_DIR", "package/built");
    package.set_at("CARGO_TARGET_DIR", "package/made");
    // A folder that exists before Cargo's first build does not get Cargo's mark.
    fs::create_dir(package.world.at("package/built")).unwrap();
    package.notices("the first build");
    assert!(!package.ran(), "nor does the second");
    let newest = mla_build::report::newest(&package.world.at("package/built")).unwrap();
    assert_eq!((&*newest.package, newest.units.len()), ("package", 3));
}

/// Measures processor seconds, which do not depend on other work of the machine. The minimum of
/// several runs counts, and the limit is several times the usual value.
#[test]
fn idle_build_is_fast() {
    const LIMIT: Duration = Duration::from_secs(1);
    // A unit of CUTLASS's collective builder includes this number of headers.
    const HEADERS: usize = 842;
    let package = Package::new(&["--include=cuda"]);
    let mut unit = String::new();
    for number in 0..HEADERS {
        unit += &format!("#include <cute/{number}.hpp>\n");
        let header = format!("toolkit/include/cute/{number}.hpp");
        package.world.write(&header, "header\n");
    }
    package.world.write("package/cuda/sm90/many.cu", &unit);
    package.notices("the first build");
    assert_eq!(package.world.calls().len(), 4);
    let bare = Package::new(&[]);
    bare.world.write("package/build.rs", "fn main() {}\n");
    succeeds(&mut bare.cargo("build"));

    let min = |package: &Package, before: &dyn Fn()| {
        let runs = (0..5).map(|_| {
            before();
            processor_time(&mut package.cargo("build"))
        });
        runs.min().unwrap()
    };
    let own = min(&bare, &|| ());
    let untouched = min(&package, &|| ()).saturating_sub(own);
    assert!(untouched < LIMIT, "{untouched:?} for nothing");
    // A header with another time makes the build script run. It finds everything in the cache.
    let before = package.runs();
    let touched = min(&package, &|| {
        thread::sleep(Duration::from_millis(20));
        let header = "package/cuda/common/shared.h";
        package.world.write(header, "shared-1\n");
    });
    assert_eq!(package.runs() - before, 5);
    assert!(package.world.calls().is_empty());
    let touched = touched.saturating_sub(own);
    assert!(touched < LIMIT, "{touched:?} for a touched header");
    println!("untouched {untouched:?}, touched {touched:?}, Cargo's own {own:?}");
}
