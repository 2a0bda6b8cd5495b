//! A copy of the workspace to change and to check.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{Mutex, MutexGuard, PoisonError},
};

use cargo_metadata::{
    CompilerMessage, Message,
    diagnostic::{Diagnostic, DiagnosticLevel},
};

/// A copy of everything in the repository, below the target folder.
pub(crate) struct Tree {
    pub(crate) root: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

impl Tree {
    /// Makes a tree for Cargo. Only one test runs at a time, since Cargo takes two copies that
    /// build in one folder for the same packages. They share that folder, since checking their
    /// dependencies takes a minute.
    pub(crate) fn for_cargo() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        Self::copied("tree", &ALONE)
    }

    /// Makes a tree only for nvcc, so that its test can run at the same time as those of Cargo.
    pub(crate) fn for_nvcc() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        Self::copied("nvcc-tree", &ALONE)
    }

    /// Copies files that differ, so that a second run compiles little.
    fn copied(name: &str, alone: &'static Mutex<()>) -> Self {
        let workspace = workspace();
        let program = std::env::current_exe().unwrap();
        let target = program.ancestors().nth(3).unwrap();
        let tree = Self {
            root: target.join("additions").join(name),
            _alone: alone.lock().unwrap_or_else(PoisonError::into_inner),
        };
        let listed = Command::new("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(workspace)
            .output()
            .unwrap();
        assert!(listed.status.success(), "git ls-files: {}", listed.status);
        let listed = String::from_utf8(listed.stdout).unwrap();
        let files: BTreeSet<_> = listed.split_terminator('\0').collect();
        let here = files.iter().filter(|file| workspace.join(file).is_file());
        for file in here {
            let bytes = fs::read(workspace.join(file)).unwrap();
            tree.write_bytes(file, &bytes);
        }
        // Files that an earlier run added are removed.
        for entry in walk(&tree.root) {
            let relative = entry.strip_prefix(&tree.root).unwrap();
            if !files.contains(relative.to_str().unwrap()) {
                fs::remove_file(&entry).unwrap();
            }
        }
        tree
    }

    pub(crate) fn read(&self, file: &str) -> String {
        fs::read_to_string(self.root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
    }

    pub(crate) fn write(&self, file: &str, text: &str) {
        self.write_bytes(file, text.as_bytes());
    }

    // If the content is the same, the file keeps its time.
    fn write_bytes(&self, file: &str, bytes: &[u8]) {
        let path = self.root.join(file);
        if fs::read(&path).is_ok_and(|known| known == bytes) {
            return;
        }
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Replaces `from`, which has to occur exactly once.
    pub(crate) fn edit(&self, file: &str, from: &str, to: &str) {
        let text = self.read(file);
        assert_eq!(text.matches(from).count(), 1, "{file} has {from:?} once");
        self.write(file, &text.replace(from, to));
    }

    /// Returns the changes since the copy: new files and edited files.
    pub(crate) fn changes(&self) -> [BTreeSet<String>; 2] {
        let [mut new, mut edited] = [BTreeSet::new(), BTreeSet::new()];
        for entry in walk(&self.root) {
            let file = entry.strip_prefix(&self.root).unwrap();
            let name = file.to_str().unwrap().to_owned();
            match fs::read(workspace().join(file)) {
                Err(_) => drop(new.insert(name)),
                Ok(before) if before != fs::read(&entry).unwrap() => drop(edited.insert(name)),
                Ok(_) => {}
            }
        }
        [new, edited]
    }

    /// Checks the Rust code without kernels. Returns the compilers' errors, each with the folder of
    /// its package.
    pub(crate) fn check(&self, arguments: &[&str]) -> Vec<Diagnostic> {
        let output = Command::new(env!("CARGO"))
            .args(["check", "--quiet", "--keep-going", "--message-format=json"])
            .args(arguments)
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", self.root.with_file_name("target"))
            .env("MLA_BUILD_ONLY", "bindings")
            .env_remove("RUSTFLAGS")
            .output()
            .unwrap();
        let messages = Message::parse_stream(output.stdout.as_slice());
        let errors: Vec<_> = messages
            .filter_map(|message| match message.unwrap() {
                Message::CompilerMessage(CompilerMessage { message, .. }) => Some(message),
                _ => None,
            })
            // The compiler's total number of errors is a further error without a place.
            .filter(|message| message.level == DiagnosticLevel::Error && !message.spans.is_empty())
            .collect();
        assert!(
            output.status.success() || !errors.is_empty(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        errors
    }
}

impl Tree {
    /// Compiles a source of the kernels as `build.rs` does, without code for a GPU.
    pub(crate) fn compile(&self, unit: &str) -> Output {
        let toolkit = mla_build::toolkit::Pins::current().folder().unwrap();
        let nvcc = toolkit.join("nvidia/cu13/bin/nvcc");
        assert!(
            nvcc.exists(),
            "no {}: run `cargo xtask toolkit`",
            nvcc.display()
        );
        Command::new(nvcc)
            // GCC's quotes depend on the locale.
            .env("LC_ALL", "C")
            .args([
                "-std=c++17",
                "--expt-relaxed-constexpr",
                "-fdevice-syntax-only",
            ])
            .args([
                "-gencode=arch=compute_90a,code=sm_90a",
                "-Xcompiler=-Werror=switch",
            ])
            .args(["-Icuda/include", "-Icuda", "-I"])
            .arg(toolkit.join("cutlass_library/source/include"))
            .args(["-c", unit, "-o"])
            .arg(self.object())
            .current_dir(&self.root)
            .output()
            .unwrap()
    }

    /// The file that [`compile`](Self::compile) writes.
    pub(crate) fn object(&self) -> PathBuf {
        self.root.with_extension("o")
    }
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            // The target folder of a build in the copy is skipped.
            true if path.ends_with("target") => {}
            true => files.extend(walk(&path)),
            false => files.push(path),
        }
    }
    files
}

/// Returns the files in the table of a section of CONTRIBUTING.md, with `name` for `<format>` and
/// `<family>`.
pub(crate) fn contributing(section: &str, name: &str) -> BTreeSet<String> {
    let text = include_str!("../../../CONTRIBUTING.md");
    let text = text.split("\n## ").find(|it| it.starts_with(section));
    let text = text.unwrap_or_else(|| panic!("CONTRIBUTING.md has a section {section}"));
    let rows = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(file, _)| file.replace("<format>", name).replace("<family>", name))
        .collect()
}
