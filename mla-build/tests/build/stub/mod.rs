//! A package with kernels and a toolkit whose nvcc is a script, in a temporary folder.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use mla_build::{Built, Error, Kernels, report::Outcome};
use wait4::Wait4;

pub(crate) struct World {
    folder: tempfile::TempDir,
}

impl World {
    /// Makes a package of three units. `a` and `b` include `shared.h`. `b` and `c` include
    /// `cute/layout.hpp` of the toolkit.
    pub(crate) fn new() -> Self {
        let world = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        world.write("toolkit/version", &version("13.0"));
        world.program("toolkit/bin/nvcc", include_str!("nvcc.sh"));
        world.write("toolkit/include/cuda_runtime.h", "");
        world.write("toolkit/include/cute/layout.hpp", "layout-1\n");
        world.write("toolkit/lib/libcudart_static.a", "!<arch>\n");
        world.write("host-version", "(Stub) 12.2.0\n");
        world.host("(Stub) 12.2.0");
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

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn program(&self, path: &str, text: &str) {
        self.write(path, text);
        fs::set_permissions(self.at(path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Makes the host compiler print this version.
    pub(crate) fn host(&self, version: &str) {
        self.host_with_folders(version, &[]);
    }

    /// Makes the host compiler print this version, and the folders in which it searches for
    /// headers.
    pub(crate) fn host_with_folders(&self, version: &str, folders: &[PathBuf]) {
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
        Kernels::new()
            .sources("cuda/**/*.cu")
            .include("cuda")
            .enable("sm90")
            .root(self.at(package))
            .out_dir(self.at(out))
            .cache(self.at("cache"))
            .cuda_home(self.at("toolkit"))
            .host_compiler(self.at("host"))
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
        assert_eq!(
            built.report.count(Outcome::Compiled),
            calls.len(),
            "the report tells what was compiled"
        );
        assert_eq!(
            built.report.count(Outcome::Cached),
            built.report.units.len() - calls.len()
        );
        calls
    }

    /// Returns the sources of the calls since the last question, sorted.
    pub(crate) fn calls(&self) -> Vec<String> {
        let path = self.at("calls");
        let text = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        let mut sources: Vec<_> = text
            .lines()
            .map(|line| line.split(' ').next().unwrap_or_default().to_owned())
            .collect();
        sources.sort();
        sources
    }

    /// Returns everything that the library was made of.
    pub(crate) fn library(&self, out: &str) -> String {
        let archive = fs::read_dir(self.at(out))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| path.extension().is_some_and(|extension| extension == "a"));
        String::from_utf8_lossy(&fs::read(archive.unwrap()).unwrap()).into_owned()
    }

    /// Makes the command for the same build in a separate process.
    pub(crate) fn command(&self, out: &str) -> Command {
        let mut command = Command::new(driver());
        command
            .arg(self.at("package"))
            .arg(self.at(out))
            .arg("--include=cuda")
            .arg("--host-compiler")
            .arg(self.at("host"))
            .env("MLA_CUDA_HOME", self.at("toolkit"))
            .env("MLA_BUILD_CACHE", self.at("cache"));
        command
    }
}

/// Text that is checked for parts.
pub(crate) trait Says {
    fn says(&self, part: &str);
}

impl Says for str {
    #[track_caller]
    fn says(&self, part: &str) {
        assert!(self.contains(part), "{part:?} is not in {self}");
    }
}

#[track_caller]
pub(crate) fn succeeded(output: &Output) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
}

pub(crate) const ALL: [&str; 3] = ["cuda/all/c.cu", "cuda/sm90/a.cu", "cuda/sm90/b.cu"];

pub(crate) fn version(release: &str) -> String {
    format!("nvcc: stub\nCuda compilation tools, release {release}, V{release}.88\n")
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
