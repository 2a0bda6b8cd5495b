//! Makes one site of the front page, the manuals, the benchmarks and rustdoc, with a pinned mkdocs
//! that checks its links and anchors.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Component, Path, PathBuf},
    process::Command,
};

use anyhow::{Context, ensure};

use crate::{Workspace, copy_folder, pip, succeed};

/// Pages in the order of the navigation. Each has a title, and a file or a folder of pages.
const PAGES: &[(&str, &str)] = &[
    ("In an engine", "docs/engine.md"),
    ("Support", "docs/support.md"),
    ("A new backend", "docs/new-backend.md"),
    ("Adapters", "docs/adapters.md"),
    ("How kernels are built", "docs/kernel-build.md"),
    ("Numbers", "docs/numbers.md"),
    ("Benchmarks", "BENCHMARKS.md"),
    ("Kernels", "docs/kernels"),
    ("Architecture", "ARCHITECTURE.md"),
    ("Contributing", "CONTRIBUTING.md"),
    ("Publishing", "docs/publishing.md"),
    ("Glossary", "docs/glossary.md"),
    ("Changes", "CHANGELOG.md"),
    ("Log", "docs/log"),
];

/// The folder of the pictures in pages.
const PICTURES: &str = "docs/benchmarks";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Python that runs the generator. Its pip downloads the generator once.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let book = workspace.target.join("book");
    let (source, site) = (book.join("source"), book.join("site"));
    if source.exists() {
        fs::remove_dir_all(&source)?;
    }
    let pages = pages(&workspace.root)?;
    for page in &pages {
        let text = fs::read_to_string(workspace.root.join(page))?;
        let staged = staged(&workspace.root, &pages, page, &text)?;
        write(&source.join(page), staged.as_bytes())?;
    }
    for picture in files(&workspace.root, PICTURES)? {
        write(
            &source.join(&picture),
            &fs::read(workspace.root.join(&picture))?,
        )?;
    }
    let settings = book.join("mkdocs.yml");
    write(&settings, settings_of(&workspace.root)?.as_bytes())?;
    let tools = installed(&workspace, &arguments.python)?;
    let mut generator = Command::new(&arguments.python);
    generator
        .args(["-m", "mkdocs", "build", "--strict", "--quiet", "--clean"])
        .arg("--config-file")
        .arg(&settings)
        .env("PYTHONPATH", tools);
    succeed(&mut generator)?;
    let mut rustdoc = workspace.cargo();
    rustdoc.args(["doc", "--quiet", "--workspace", "--no-deps"]);
    succeed(&mut rustdoc)?;
    copy_folder(&workspace.target.join("doc"), &site.join("api"))?;
    println!("{}", site.join("index.html").display());
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    fs::create_dir_all(path.parent().context("a file has a folder")?)?;
    Ok(fs::write(path, bytes)?)
}

/// Returns the files of a folder, sorted by name, as paths from the root.
fn files(root: &Path, folder: &str) -> anyhow::Result<BTreeSet<PathBuf>> {
    let entries = fs::read_dir(root.join(folder)).with_context(|| folder.to_owned())?;
    entries
        .map(|entry| Ok(Path::new(folder).join(entry?.file_name())))
        .collect()
}

/// Returns all pages, including the front page.
fn pages(root: &Path) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut pages = BTreeSet::from([PathBuf::from("README.md")]);
    for (_, path) in PAGES {
        if path.ends_with(".md") {
            pages.insert(path.into());
        } else {
            pages.extend(files(root, path)?);
        }
    }
    Ok(pages)
}

/// Returns the generator's settings. A link or anchor without a target is an error.
fn settings_of(root: &Path) -> anyhow::Result<String> {
    let mut settings = String::from(
        "site_name: mla-kernels\n\
         docs_dir: source\n\
         site_dir: site\n\
         theme: {name: mkdocs, color_mode: auto}\n\
         markdown_extensions: [tables, fenced_code, toc]\n\
         plugins: [search]\n\
         validation:\n  \
           nav: {omitted_files: warn, not_found: warn, absolute_links: ignore}\n  \
           links: {not_found: warn, absolute_links: warn, unrecognized_links: warn,\
           \x20 anchors: warn}\n\
         nav:\n- mla-kernels: README.md\n",
    );
    for (title, path) in PAGES {
        if path.ends_with(".md") {
            let _ = writeln!(settings, "- {title}: {path}");
        } else {
            let _ = writeln!(settings, "- {title}:");
            for page in files(root, path)? {
                let _ = writeln!(settings, "  - {}", page.display());
            }
        }
    }
    settings.push_str("- API: /api/mla_kernels/index.html\n");
    Ok(settings)
}

/// Returns the folder of the generator, which pip fills according to the pinned hashes.
fn installed(workspace: &Workspace, python: &Path) -> anyhow::Result<PathBuf> {
    let target = workspace.target.join("book/tools");
    let requirements = workspace.root.join("xtask/book.txt");
    let pinned = target.join("book.txt");
    let text = fs::read(&requirements)?;
    if fs::read(&pinned).is_ok_and(|installed| installed == text) {
        return Ok(target);
    }
    succeed(
        pip(python, &target)
            .args(["--upgrade", "--require-hashes", "--requirement"])
            .arg(requirements),
    )?;
    fs::write(pinned, text)?;
    Ok(target)
}

/// Converts a page for the generator. The first line of a code fence keeps only one word, and a
/// link to a file that is not a page becomes plain text.
fn staged(
    root: &Path,
    pages: &BTreeSet<PathBuf>,
    page: &Path,
    text: &str,
) -> anyhow::Result<String> {
    let mut staged = String::with_capacity(text.len());
    let mut is_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            staged.push_str(line.split(',').next().unwrap_or(line));
        } else if is_code {
            staged.push_str(line);
        } else {
            staged.push_str(&linked(root, pages, page, line)?);
        }
        staged.push('\n');
    }
    Ok(staged)
}

/// Converts a line so that its links lead only to pages, pictures and the web.
fn linked(
    root: &Path,
    pages: &BTreeSet<PathBuf>,
    page: &Path,
    line: &str,
) -> anyhow::Result<String> {
    let mut done = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("](") {
        let (target, behind) = after.split_once(')').unwrap_or((after, ""));
        let path = target.split('#').next().unwrap_or_default();
        let to = resolved(page, path);
        let stays = path.is_empty()
            || path.contains("://")
            || pages.contains(&to)
            || to.starts_with(PICTURES);
        ensure!(
            stays || root.join(&to).exists(),
            "{}: `{target}` leads nowhere",
            page.display()
        );
        match opening(before) {
            Some(open) if !stays => {
                done.push_str(&before[..open]);
                done.push_str(&before[open + 1..]);
            }
            _ => {
                let _ = write!(done, "{before}]({target})");
            }
        }
        rest = behind;
    }
    done.push_str(rest);
    Ok(done)
}

/// Returns the position of the bracket that begins a link's text, if it is in the same line.
fn opening(text: &str) -> Option<usize> {
    let mut depth = 0;
    text.char_indices().rev().find_map(|(at, letter)| {
        match letter {
            ']' => depth += 1,
            '[' if depth == 0 => return Some(at),
            '[' => depth -= 1,
            _ => {}
        }
        None
    })
}

/// Returns the path from the root for a link in this page.
fn resolved(page: &Path, link: &str) -> PathBuf {
    let mut path = page.parent().unwrap_or(Path::new("")).to_owned();
    for component in Path::new(link).components() {
        match component {
            Component::ParentDir => {
                path.pop();
            }
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_what_is_no_page_are_their_text() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let pages = BTreeSet::from([PathBuf::from("README.md")]);
        let page = Path::new("docs/engine.md");
        let linked = |line| linked(root, &pages, page, line);
        for (line, staged) in [
            (
                "see [the map](../README.md#try-it).",
                "see [the map](../README.md#try-it).",
            ),
            (
                "the code of [`Cuda`](../src/device) and [x](#y)",
                "the code of `Cuda` and [x](#y)",
            ),
            (
                "![grid](benchmarks/grid-h200.svg)",
                "![grid](benchmarks/grid-h200.svg)",
            ),
            ("[[a] b](../src) `x[0]`", "[a] b `x[0]`"),
        ] {
            assert_eq!(linked(line).unwrap(), staged);
        }
        let error = linked("[gone](../nothing.md)").unwrap_err().to_string();
        assert_eq!(error, "docs/engine.md: `../nothing.md` leads nowhere");
    }
}
