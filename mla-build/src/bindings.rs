//! Rust declarations of a C header, by bindgen.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Error, compiler::Host, symbols::Tag, toolkit::Found};

/// Wraps everything that the header and the headers beside it declare, and returns the files that
/// were read.
pub(crate) fn write(
    header: &Path,
    output: &Path,
    includes: &[PathBuf],
    libclang: &Found,
    host: Option<&Host>,
    tag: &Tag,
) -> Result<Vec<PathBuf>, Error> {
    let failed = |message: String| Error::Bindings {
        header: header.to_owned(),
        message,
    };
    if !header.is_file() {
        return Err(failed("no such file".into()));
    }
    if env::var_os("LIBCLANG_PATH").is_none() {
        // bindgen takes the library's place from the environment and from nowhere else.
        //
        // SAFETY: this crate has started no thread at this point of a build; the documentation of
        // `Kernels::compile` asks the same of its caller.
        unsafe { env::set_var("LIBCLANG_PATH", &libclang.path) };
    }
    let beside = header.parent().unwrap_or(Path::new("."));
    let depfile = output.with_extension("d");
    let mut builder = bindgen::Builder::default()
        .header(header.to_string_lossy())
        .allowlist_file(format!("{}/.*", escaped(&beside.to_string_lossy())))
        .depfile("bindings", &depfile)
        .use_core()
        .parse_callbacks(Box::new(Linked(tag.clone())))
        .derive_default(true)
        .prepend_enum_name(false)
        // The header is its own documentation; its comments are not written for rustdoc.
        .generate_comments(false)
        // A build must not depend on whether rustfmt is installed.
        .formatter(bindgen::Formatter::None);
    // The wheel of libclang has no headers of its own, so the host compiler lends its `stddef.h`.
    if let Some(builtin) = host.and_then(builtin_headers) {
        builder = builder.clang_args([
            "-isystem".to_owned(),
            builtin.to_string_lossy().into_owned(),
        ]);
    }
    for folder in includes {
        builder = builder.clang_arg(format!("-I{}", folder.display()));
    }
    // bindgen panics where libclang cannot be loaded; the message is in the panic.
    let bindings = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| builder.generate()))
        .map_err(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            failed(
                text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                    .unwrap_or_default(),
            )
        })?
        .map_err(|error| failed(error.to_string()))?;
    let file = syn::parse_file(&bindings.to_string()).map_err(|error| failed(error.to_string()))?;
    fs::write(output, prettyplease::unparse(&file)).map_err(Error::file("write", output))?;
    let rule = fs::read_to_string(&depfile).map_err(Error::file("read", &depfile))?;
    Ok(crate::depfile::files(&rule, Path::new("")))
}

/// The names under which the library has what the header declares.
#[derive(Debug)]
struct Linked(Tag);

impl bindgen::callbacks::ParseCallbacks for Linked {
    fn generated_link_name_override(
        &self,
        item: bindgen::callbacks::ItemInfo<'_>,
    ) -> Option<String> {
        Some(self.0.of_c(item.name))
    }
}

/// The folder of the host compiler's `stddef.h`.
fn builtin_headers(host: &Host) -> Option<PathBuf> {
    let output = Command::new(&host.path)
        .arg("-print-file-name=include")
        .output()
        .ok()?;
    let folder = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    (folder.is_absolute() && folder.is_dir()).then_some(folder)
}

/// Every character that a regular expression may give a meaning to, escaped.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii_punctuation() && !matches!(c, '/' | '_' | '<' | '>') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
