//! A package with kernels and a toolkit whose nvcc is a script, in a temporary folder.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use mla_build::{
    Built, Error, Kernels,
    report::{Outcome, Report},
};
use wait4::Wait4;

pub(crate) struct World {
    folder: tempfile::TempDir,
}

impl World {
    /// Makes an empty folder.
    pub(crate) fn empty() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    /// Makes a package of three units. `a` and `b` include `shared.h`. `b` and `c` include
    /// `cute/layout.hpp` of the toolkit.
    pub(crate) fn new() -> Self {
        let world = Self::empty();
        world.write("toolkit/version", &version("13.0"));
        world.program("toolkit/bin/nvcc", include_str!("nvcc.sh"));
        world.write("toolkit/include/cuda_runtime.h", "");
        world.write("toolkit/include/cute/layout.hpp", "layout-1\n");
        world.write("toolkit/lib/libcudart_static.a", "!<arch>\n");
        world.host("(Stub) 12.2.0", &[]);
        world.write("package/cuda/common/shared.h", "shared-1\n");
        world.write(
            "package/cuda/sm90/a.cu",
            "#include \"../common/shared.h\"\nbody-a\n",
        );
        world.write(
            "package/cuda/sm90/b.cu",
            "#include <common/shared.h>\n#include <cute/layout.hpp>\nbody-b\n\
             // kernel: b_kernel 40 0\n",
        );
        world.write(
            "package/cuda/all/c.cu",
            "#include <cute/layout.hpp>\nbody-c\n",
        );
        world
    }

    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// Returns a path in the folder as text.
    pub(crate) fn named(&self, path: &str) -> String {
        self.at(path).display().to_string()
    }

    pub(crate) fn read(&self, path: &str) -> String {
        fs::read_to_string(self.at(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn program(&self, path: &str, text: &str) {
        self.write(path, text);
        fs::set_permissions(self.at(path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Copies a folder with the times of its files.
    pub(crate) fn copy(&self, from: &str, to: &str) {
        let mut copy = Command::new("cp");
        succeeds(copy.arg("-a").arg(self.at(from)).arg(self.at(to)));
    }

    /// Returns the files below a folder.
    pub(crate) fn files(&self, folder: &str) -> Vec<PathBuf> {
        let entries = walkdir::WalkDir::new(self.at(folder)).into_iter();
        let files = entries.map(Result::unwrap);
        files
            .filter(|entry| entry.file_type().is_file())
            .map(walkdir::DirEntry::into_path)
            .collect()
    }

    /// Gives all files and folders below a folder this modification time.
    pub(crate) fn set_times(&self, folder: &str, time: SystemTime) {
        for entry in walkdir::WalkDir::new(self.at(folder)).contents_first(true) {
            let file = File::open(entry.unwrap().path()).unwrap();
            file.set_modified(time).unwrap();
        }
    }

    /// Makes the host compiler print this version, and the folders in which it searches for
    /// headers.
    pub(crate) fn host(&self, version: &str, folders: &[PathBuf]) {
        let folders: String = folders
            .iter()
            .map(|folder| format!(" {}\n", folder.display()))
            .collect();
        self.program(
            "host",
            &format!(
                "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'c++ {version}'; exit; fi\n\
                 cat >&2 <<'END'\n#include <...> search starts here:\n\
                 {folders}End of search list.\nEND\n"
            ),
        );
    }

    pub(crate) fn kernels(&self) -> Kernels {
        self.kernels_of("package", "out")
    }

    pub(crate) fn kernels_of(&self, package: &str, out: &str) -> Kernels {
        let bare = self.bare(package, out).host_compiler(self.at("host"));
        bare.sources("cuda/**/*.cu").include("cuda").enable("sm90")
    }

    /// Makes a description with the places of a package, without sources.
    pub(crate) fn bare(&self, package: &str, out: &str) -> Kernels {
        Kernels::new()
            .root(self.at(package))
            .out_dir(self.at(out))
            .cache(self.at("cache"))
            .cuda_home(self.at("toolkit"))
            .jobs(2)
    }

    pub(crate) fn build(&self) -> Result<Built, Error> {
        self.kernels().compile("kernels")
    }

    /// Builds, and returns the sources for which the compiler was called, sorted.
    pub(crate) fn compiled(&self) -> Vec<String> {
        self.compiled_by(self.kernels())
    }

    pub(crate) fn compiled_by(&self, kernels: Kernels) -> Vec<String> {
        self.calls();
        let built = kernels.compile("kernels").unwrap();
        let calls = self.calls();
        let count = |outcome| built.report.count(outcome);
        assert_eq!(count(Outcome::Compiled), calls.len(), "by the report");
        assert_eq!(
            count(Outcome::Cached),
            built.report.units.len() - calls.len()
        );
        calls
    }

    /// Returns the sources of the calls since the last question, sorted.
    pub(crate) fn calls(&self) -> Vec<String> {
        let text = self.arguments();
        let source = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        let mut sources: Vec<_> = text.lines().map(source).collect();
        sources.sort();
        sources
    }

    /// Returns a line for each call since the last question: the source, and the arguments.
    pub(crate) fn arguments(&self) -> String {
        let path = self.at("calls");
        let text = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        text
    }

    /// Returns everything that the library was made of.
    pub(crate) fn library(&self, out: &str) -> String {
        let entries = fs::read_dir(self.at(out)).unwrap();
        let mut paths = entries.map(|entry| entry.unwrap().path());
        let archive = paths.find(|path| path.extension().is_some_and(|it| it == "a"));
        String::from_utf8_lossy(&fs::read(archive.unwrap()).unwrap()).into_owned()
    }

    /// Makes the command for the same build in a separate process.
    pub(crate) fn command(&self, out: &str) -> Command {
        let mut command = Command::new(driver());
        command
            .arg(self.at("package"))
            .arg(self.at(out))
            .arg("--include=cuda")
            .arg(self.host_argument())
            .env("MLA_CUDA_HOME", self.at("toolkit"))
            .env("MLA_BUILD_CACHE", self.at("cache"));
        command
    }

    /// Returns the argument of [`driver`] for the host compiler.
    pub(crate) fn host_argument(&self) -> String {
        format!("--host-compiler={}", self.named("host"))
    }

    /// Writes the files of Cargo's for a package whose build script runs `before` and then
    /// [`driver`].
    pub(crate) fn package(&self, folder: &str, needs: &str, before: &str, arguments: &[String]) {
        let name = folder.rsplit('/').next().unwrap();
        self.write(
            &format!("{folder}/Cargo.toml"),
            &format!(
                "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\
                 [workspace]\n[dependencies]\n{needs}"
            ),
        );
        self.write(
            &format!("{folder}/build.rs"),
            &format!(
                "fn main() {{\n    {before}\n    let mut driver = \
                 std::process::Command::new({:?});\n    let status = \
                 driver.args({arguments:?}).status();\n    \
                 std::process::exit(status.unwrap().code().unwrap_or(1));\n}}\n",
                driver()
            ),
        );
    }

    /// Makes a call of Cargo in a folder.
    pub(crate) fn cargo(&self, folder: &str, command: &str) -> Command {
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args([command, "--offline", "--quiet"])
            .current_dir(self.at(folder))
            .env_remove("CARGO_TARGET_DIR")
            .env("MLA_BUILD_CACHE", self.at("cache"));
        cargo
    }
}

/// Text that is checked for parts.
pub(crate) trait Says {
    fn says(&self, part: &str);
    fn begins(&self, start: &str);
}

impl Says for str {
    #[track_caller]
    fn says(&self, part: &str) {
        assert!(self.contains(part), "{part:?} is not in {self}");
    }

    #[track_caller]
    fn begins(&self, start: &str) {
        assert!(self.starts_with(start), "{start:?} does not begin {self}");
    }
}

/// Returns the message of a build that must be refused.
#[track_caller]
pub(crate) fn refusal(kernels: Kernels) -> String {
    kernels.compile("kernels").unwrap_err().to_string()
}

/// The text that a command printed.
pub(crate) struct Ran {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs a command that must succeed.
#[track_caller]
pub(crate) fn succeeds(command: &mut Command) -> Ran {
    ran(command, true)
}

/// Runs a command that must fail, and returns its errors.
#[track_caller]
pub(crate) fn fails(command: &mut Command) -> String {
    ran(command, false).stderr
}

#[track_caller]
fn ran(command: &mut Command, succeeds: bool) -> Ran {
    let output = command.output().unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert_eq!(output.status.success(), succeeds, "{command:?}: {stderr}");
    Ran { stdout, stderr }
}

pub(crate) const ALL: [&str; 3] = ["cuda/all/c.cu", "cuda/sm90/a.cu", "cuda/sm90/b.cu"];

pub(crate) const NONE: [&str; 0] = [];

pub(crate) fn version(release: &str) -> String {
    format!("nvcc: stub\nCuda compilation tools, release {release}, V{release}.88\n")
}

/// Returns the sources that a build compiled.
pub(crate) fn compiled(report: &Report) -> Vec<String> {
    let units = report.units.iter();
    let compiled = units.filter(|unit| unit.outcome == Outcome::Compiled);
    compiled.map(|unit| unit.source.clone()).collect()
}

/// Returns the processor time of a command and its subprocesses. The command must succeed.
pub(crate) fn processor_time(command: &mut Command) -> Duration {
    let finished = command.spawn().unwrap().wait4().unwrap();
    assert!(
        finished.status.success(),
        "{command:?}: {}",
        finished.status
    );
    finished.rusage.utime + finished.rusage.stime
}

/// Returns the path of the example `compile`, which Cargo builds with the tests.
pub(crate) fn driver() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let profile = tests.parent().and_then(Path::parent).unwrap();
    let driver = profile.join("examples/compile");
    assert!(
        driver.exists(),
        "run all tests of mla-build, or `cargo build -p mla-build --examples` before"
    );
    driver
}
