//! Rust declarations of C headers, by bindgen.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::bounded;
use crate::{Error, compiler::Host, headers::Headers, symbols::Tag, toolkit::Found};

/// The result of wrapping the headers.
pub(crate) struct Written {
    /// The files that bindgen read.
    pub(crate) read: Vec<PathBuf>,
    /// The declared functions and variables under their own names, each with its header.
    pub(crate) declared: Vec<(String, PathBuf)>,
}

/// Wraps the declarations of all headers, and of the headers beside the shared one.
pub(crate) fn write(
    headers: &Headers,
    output: &Path,
    includes: &[PathBuf],
    libclang: &Found,
    host: Option<&Host>,
    tag: &Tag,
) -> Result<Written, Error> {
    if env::var_os("LIBCLANG_PATH").is_none() {
        // bindgen takes the path of libclang only from the environment.
        //
        // SAFETY: this crate has started no thread at this point of a build. The documentation of
        // `Kernels::compile` asks the same of its caller.
        unsafe { env::set_var("LIBCLANG_PATH", &libclang.path) };
    }
    let mut wrap = Wrap {
        output,
        arguments: arguments(includes, host),
        tag,
        read: Vec::new(),
    };
    let mut shared = Vec::new();
    let mut text = String::new();
    let mut declared = Vec::new();
    if let Some(header) = &headers.shared {
        shared = wrap.items(header, None)?;
        let names = shared.iter().flat_map(|item| linked(item, tag));
        declared.extend(names.map(|name| (name, header.clone())));
        text += &headers.heading(header);
        text.extend(shared.iter().map(String::as_str));
    }
    for (family, header) in &headers.of_families {
        text += &headers.heading(header);
        let own = wrap.items(header, headers.shared.as_deref())?;
        // bindgen numbers types of unnamed enums anew in each header.
        let named = format!("_bindgen_ty_{}_", family.replace('-', "_"));
        let own: Vec<_> = own.iter().filter(|item| !shared.contains(item)).collect();
        let names = own.iter().flat_map(|item| linked(item, tag));
        declared.extend(names.map(|name| (name, header.clone())));
        text.extend(own.iter().map(|item| item.replace("_bindgen_ty_", &named)));
    }
    fs::write(output, text).map_err(Error::file("write", output))?;
    Ok(Written {
        read: wrap.read,
        declared,
    })
}

/// Returns the symbols that an item of the bindings links, without the prefix of each.
fn linked<'a>(item: &'a str, tag: &Tag) -> impl Iterator<Item = String> + use<'a> {
    const ATTRIBUTE: &str = "#[link_name = \"\\u{1}";
    let prefix = tag.of_c("");
    let attributes = item.split(ATTRIBUTE).skip(1);
    let names = attributes.filter_map(|rest| rest.split('"').next());
    names.filter_map(move |name| name.strip_prefix(&prefix).map(str::to_owned))
}

/// The settings with which the headers of one build are wrapped.
struct Wrap<'a> {
    output: &'a Path,
    /// The arguments for libclang.
    arguments: Vec<String>,
    tag: &'a Tag,
    /// The files that bindgen read.
    read: Vec<PathBuf>,
}

impl Wrap<'_> {
    /// Returns the declarations of a header and of the headers in its folder. With `after`, which
    /// is the shared header, they are the declarations of both headers and of all headers in the
    /// shared one's folder.
    fn items(&mut self, header: &Path, after: Option<&Path>) -> Result<Vec<String>, Error> {
        let failed =
            |message: &str| Error::tool(format!("bindings of {}", header.display()), message);
        if !header.is_file() {
            return Err(failed("no such file"));
        }
        let beside = after.unwrap_or(header).parent().unwrap_or(Path::new("."));
        let depfile = self.output.with_extension("d");
        let mut builder = bindgen::Builder::default()
            .allowlist_file(format!("{}/.*", escaped(&beside.to_string_lossy())))
            .allowlist_file(escaped(&header.to_string_lossy()))
            .depfile("bindings", &depfile)
            .use_core()
            .parse_callbacks(Box::new(Linked(self.tag.clone())))
            .derive_default(true)
            .prepend_enum_name(false)
            // The header is its own documentation. Its comments are not written for rustdoc.
            .generate_comments(false)
            // A build must give the same result with and without rustfmt.
            .formatter(bindgen::Formatter::None)
            .clang_args(&self.arguments);
        for header in after.into_iter().chain([header]) {
            builder = builder.header(header.to_string_lossy());
        }
        // bindgen panics if libclang cannot be loaded. The panic holds the message.
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| builder.generate()));
        let bindings = made.map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            failed(
                text.or_else(|| panic.downcast_ref::<&str>().copied())
                    .unwrap_or_default(),
            )
        })?;
        let bindings = bindings.map_err(|error| failed(&error.to_string()))?;
        let rule = bounded::read_to_string(&depfile).map_err(Error::file("read", &depfile))?;
        self.read
            .extend(crate::depfile::files(&rule, Path::new("")));
        let file = syn::parse_file(&bindings.to_string());
        let mut file = file.map_err(|error| failed(&error.to_string()))?;
        let items = std::mem::take(&mut file.items).into_iter().map(|mut item| {
            drop_offsets(&mut item);
            file.items = vec![item];
            prettyplease::unparse(&file)
        });
        Ok(items.collect())
    }
}

/// Removes the checks of fields' offsets from the checks of a structure's layout. Its size, its
/// alignment and the order of its fields stay, and offsets follow from these.
fn drop_offsets(item: &mut syn::Item) {
    use syn::{Expr, Item, Stmt};
    let is_macro = |it: &Expr| matches!(it, Expr::Macro(_));
    // An offset is checked by `["Offset of …"][offset_of!(…) - 8]`, a size by a function.
    let is_offset = |index: &Expr| matches!(index, Expr::Binary(it) if is_macro(&it.left));
    if let Item::Const(checks) = item
        && let Expr::Block(checks) = &mut *checks.expr
    {
        let statements = &mut checks.block.stmts;
        statements
            .retain(|it| !matches!(it, Stmt::Expr(Expr::Index(it), _) if is_offset(&it.index)));
    }
}

/// Returns the arguments by which libclang gets the include roots.
fn arguments(includes: &[PathBuf], host: Option<&Host>) -> Vec<String> {
    let mut arguments = Vec::new();
    // The wheel of libclang has no headers of its own, so the `stddef.h` of the host compiler is
    // used.
    if let Some(builtin) = host.and_then(builtin_headers) {
        arguments.push(format!("-isystem{}", builtin.display()));
    }
    let roots = includes
        .iter()
        .map(|folder| format!("-I{}", folder.display()));
    arguments.extend(roots);
    arguments
}

/// Maps each declared name to its symbol in the library.
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

/// Returns the folder of the host compiler's `stddef.h`.
fn builtin_headers(host: &Host) -> Option<PathBuf> {
    let output = bounded::output(Command::new(&host.path).arg("-print-file-name=include")).ok()?;
    let folder = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    (folder.is_absolute() && folder.is_dir()).then_some(folder)
}

/// Escapes every character that may have a meaning in a regular expression.
fn escaped(text: &str) -> String {
    let is_plain = |c: char| !c.is_ascii_punctuation() || matches!(c, '/' | '_' | '<' | '>');
    let each = text.chars().map(|c| match is_plain(c) {
        true => c.to_string(),
        false => format!("\\{c}"),
    });
    each.collect()
}
