//! Resolves and checks the library together with the dependencies that real engines pin, and with
//! the oldest dependencies that its manifests accept.
//!
//! Each engine is a temporary workspace with one package. It depends on mla-kernels and on the
//! engine's pinned cudarc, and passes a stream from one to the other.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, ensure};

use crate::{Workspace, succeed};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Run only the check of this name: an engine's, `two-versions` or `oldest`.
    #[arg(long)]
    only: Option<String>,
}

/// The dependencies of an engine that decide whether the library fits beside them.
struct Engine {
    name: &'static str,
    /// The Rust version that it declares.
    rust: Option<&'static str>,
    /// The lines of its `[dependencies]`.
    dependencies: &'static [&'static str],
    /// The features of mla-kernels.
    features: &'static [&'static str],
    /// True if its dependencies compile without nvcc. Otherwise it is only resolved.
    compiles: bool,
}

/// Dependencies in engines' own manifests that concern CUDA, as read on 2026-11-28.
const ENGINES: &[Engine] = &[
    Engine {
        name: "mistral.rs",
        rust: Some("1.94"),
        dependencies: &[
            r#"candle-core = { version = "=0.11.0", features = ["cuda"] }"#,
            CUDARC_OF_CANDLE,
        ],
        features: &["sm80", "sm90"],
        compiles: false,
    },
    Engine {
        name: "candle",
        rust: None,
        dependencies: &[
            r#"candle-core = { version = "0.11", features = ["cuda"] }"#,
            CUDARC_OF_CANDLE,
        ],
        features: &["sm80", "sm90"],
        compiles: false,
    },
    Engine {
        name: "candle-without-kernels",
        rust: None,
        dependencies: &[CUDARC_OF_CANDLE],
        features: &["sm90"],
        compiles: true,
    },
    Engine {
        name: "atoma-infer",
        rust: Some("1.90"),
        dependencies: &[concat!(
            r#"cudarc = { version = "0.19.8", default-features = false, features = ["#,
            r#""std", "driver", "cublas", "f16", "fallback-dynamic-loading", "#,
            r#""cuda-12000"] }"#,
        )],
        features: &["sm90"],
        compiles: true,
    },
    Engine {
        name: "PegaInfer",
        rust: None,
        dependencies: &[r#"cudarc = { version = "=0.19.3", features = ["cuda-12090", "nccl"] }"#],
        features: &["sm90", "nccl"],
        compiles: true,
    },
    Engine {
        name: "kern",
        rust: None,
        dependencies: &[r#"cudarc = { version = "=0.19.7", features = ["cuda-13000"] }"#],
        features: &["gpu"],
        compiles: true,
    },
    Engine {
        name: "Atlas",
        rust: Some("1.85"),
        dependencies: &[
            r#"cudarc = { version = "=0.19.2", features = ["cuda-version-from-build-system"] }"#,
        ],
        features: &["gpu"],
        compiles: true,
    },
];

/// The dependency of candle-core, which links CUDA's libraries.
const CUDARC_OF_CANDLE: &str = concat!(
    r#"cudarc = { version = "0.19.8", default-features = false, features = ["#,
    r#""std", "cublas", "cublaslt", "curand", "driver", "nvrtc", "f16", "f8", "#,
    r#""cuda-version-from-build-system", "dynamic-linking"] }"#,
);

/// An engine that chooses a version of CUDA's interface, while one of our features chooses another.
const TWO_VERSIONS: Engine = Engine {
    name: "two-versions",
    rust: None,
    dependencies: &[r#"cudarc = { version = "0.19.8", features = ["cuda-12000"] }"#],
    features: &["gpu", "cuda-13000"],
    compiles: true,
};

/// The crates that an engine adds to its own.
const CRATES: &[&str] = &[
    "mla-kernels",
    "mla-runtime",
    "mla-macros",
    "mla-build",
    "mla-cpu",
];

/// The name of the check with the oldest dependencies.
const OLDEST: &str = "oldest";

/// A program that uses a stream of the library as one of its own cudarc.
const PROGRAM: &str = "\
pub fn stream(gpu: &mla_kernels::Cuda) -> &std::sync::Arc<cudarc::driver::CudaStream> {
    gpu.stream()
}
";

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let chore = Chore {
        workspace: Workspace::find()?,
        folder: tempfile::tempdir()?,
    };
    let is_asked = |name: &str| arguments.only.as_deref().is_none_or(|only| only == name);
    let mut ran = 0;
    let mut step = |name: &str, run: &dyn Fn() -> anyhow::Result<&'static str>| {
        if !is_asked(name) {
            return Ok(());
        }
        ran += 1;
        let start = Instant::now();
        let done = run().with_context(|| format!("beside {name}"))?;
        println!("{name}: {done} in {:.0} s", start.elapsed().as_secs_f64());
        anyhow::Ok(())
    };
    for engine in ENGINES {
        step(engine.name, &|| chore.engine(engine))?;
    }
    step(TWO_VERSIONS.name, &|| chore.two_versions())?;
    step(OLDEST, &|| chore.oldest())?;
    ensure!(
        ran > 0,
        "only: given {:?}, accepted {OLDEST}, {}, {}",
        arguments.only,
        TWO_VERSIONS.name,
        ENGINES
            .iter()
            .map(|it| it.name)
            .collect::<Vec<_>>()
            .join(", ")
    );
    Ok(())
}

struct Chore {
    workspace: Workspace,
    folder: tempfile::TempDir,
}

impl Chore {
    fn engine(&self, engine: &Engine) -> anyhow::Result<&'static str> {
        let folder = self.write(engine)?;
        if engine.compiles {
            succeed(self.cargo(&folder).arg("check"))?;
            return Ok("resolved and checked");
        }
        succeed(self.cargo(&folder).arg("generate-lockfile"))?;
        let lock = fs::read_to_string(folder.join("Cargo.lock"))?;
        ensure!(
            lock.contains("name = \"mla-kernels\""),
            "the resolved versions lack mla-kernels"
        );
        Ok("resolved")
    }

    /// Checks that the guide shows the first line of the error, by which users find the remedy.
    fn two_versions(&self) -> anyhow::Result<&'static str> {
        let folder = self.write(&TWO_VERSIONS)?;
        let output = self
            .cargo(&folder)
            .arg("check")
            .stderr(Stdio::piped())
            .output()?;
        ensure!(
            !output.status.success(),
            "two versions of CUDA's interface compile: the guide says that they do not"
        );
        let errors = String::from_utf8_lossy(&output.stderr);
        let first = errors.lines().find(|line| line.starts_with("error"));
        let first = first.with_context(|| format!("cargo failed without an error: {errors}"))?;
        let guide = fs::read_to_string(self.workspace.root.join("docs/engine.md"))?;
        ensure!(
            guide.lines().any(|line| line == first),
            "docs/engine.md does not show the first error of two versions, which is\n{first}"
        );
        Ok("refused as the guide shows")
    }

    /// Checks the crates that an engine adds, with the oldest versions of their direct
    /// dependencies.
    fn oldest(&self) -> anyhow::Result<&'static str> {
        let folder = self.folder.path().join(OLDEST);
        fs::create_dir(&folder)?;
        let root = &self.workspace.root;
        for entry in fs::read_dir(root)? {
            let name = entry?.file_name();
            let own = ["Cargo.toml", "Cargo.lock", "target", ".git"];
            if !own.iter().any(|own| name == *own) {
                std::os::unix::fs::symlink(root.join(&name), folder.join(&name))?;
            }
        }
        let manifest = fs::read_to_string(root.join("Cargo.toml"))?;
        fs::write(folder.join("Cargo.toml"), with_members(&manifest)?)?;
        let mut resolve = self.cargo(&folder);
        // The flag belongs to Cargo itself, and no compiler runs with the variable.
        resolve.args(["update", "-Z", "direct-minimal-versions"]);
        succeed(resolve.env("RUSTC_BOOTSTRAP", "1"))?;
        let mut check = self.cargo(&folder);
        check.args(["check", "--locked", "--features"]);
        check.arg("sm80,sm90,nccl,cpu,conformance,cuda-12000,mla-build/budget,mla-build/table");
        succeed(check.args(CRATES.iter().flat_map(|name| ["--package", name])))?;
        Ok("resolved and checked")
    }

    /// Writes the engine's workspace. It begins with our own lock file. Cargo keeps the entries
    /// that the engine's dependencies allow.
    fn write(&self, engine: &Engine) -> anyhow::Result<std::path::PathBuf> {
        let folder = self.folder.path().join(engine.name);
        fs::create_dir_all(folder.join("src"))?;
        let root = &self.workspace.root;
        let rust = engine
            .rust
            .map(|rust| format!("rust-version = {rust:?}\n"))
            .unwrap_or_default();
        fs::write(
            folder.join("Cargo.toml"),
            format!(
                "[package]\nname = \"engine\"\nversion = \"0.1.0\"\nedition = \"2024\"\n{rust}\n\
                 [workspace]\n\n[dependencies]\n{}\nmla-kernels = {{ path = {root:?}, features = \
                 {:?} }}\n",
                engine.dependencies.join("\n"),
                engine.features,
            ),
        )?;
        fs::write(folder.join("src/lib.rs"), PROGRAM)?;
        fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
        Ok(folder)
    }

    fn cargo(&self, folder: &Path) -> Command {
        let mut cargo = self.workspace.cargo();
        cargo
            .current_dir(folder)
            .env("CARGO_TARGET_DIR", self.workspace.target.join("engines"))
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_PROFILE_DEV_DEBUG", "none")
            .env("CARGO_TERM_QUIET", "true")
            .env("MLA_BUILD_ONLY", "bindings");
        cargo
    }
}

/// Returns the workspace's manifest with only the crates of an engine as members.
fn with_members(manifest: &str) -> anyhow::Result<String> {
    let (before, rest) = manifest
        .split_once("\nmembers = [")
        .context("Cargo.toml has no list of members")?;
    let (_, after) = rest
        .split_once("]\n")
        .context("the list of members in Cargo.toml does not end")?;
    // The root package is a member of itself.
    let members: Vec<_> = CRATES
        .iter()
        .filter(|name| **name != "mla-kernels")
        .collect();
    Ok(format!("{before}\nmembers = {members:?}\n{after}"))
}
