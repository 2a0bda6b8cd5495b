//! Unique names for the symbols of a library.
//!
//! All static libraries of a program share one space of names. If two packages both have a function
//! `decode`, they link, and one calls the other's. Each name that a library defines is therefore
//! made unique in all of its objects, in definitions and in uses:
//!
//! - A C name gets a prefix of package, version and library, which the bindings hide.
//! - A C++ name gets the same as a suffix, which demanglers take for that of a clone. It also
//!   becomes hidden, so that a shared library does not export it.
//!
//! Only the table of names is rewritten. A linker keeps one copy of each COMDAT group (inline
//! functions, templates). Groups are identified by a name, too, so they are merged within a
//! library, but never with those of another. The names of kernels in the GPU's code are not
//! changed: profilers show the author's names.

use std::collections::{HashMap, HashSet};

use object::{
    Endian as _, Endianness, elf,
    read::elf::{FileHeader as _, SectionHeader as _, Sym as _},
};

use crate::{
    Error,
    ptxas::{self, Kernel},
};

/// The tag that is added to a library's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tag(String);

impl Tag {
    /// Makes the tag of a library of a package. The version is left out if the package has none.
    pub(crate) fn new(package: &str, version: Option<&str>, library: &str) -> Self {
        let parts = [Some(package), version, Some(library)];
        let parts: Vec<_> = parts.into_iter().flatten().map(identifier).collect();
        let tag = parts.join("_");
        // A name in C must not begin with a digit.
        let mark = if tag.starts_with(|c: char| c.is_ascii_digit()) {
            "_"
        } else {
            ""
        };
        Self(format!("{mark}{tag}"))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name under which a C function or variable is linked.
    pub(crate) fn of_c(&self, name: &str) -> String {
        format!("{}__{name}", self.0)
    }

    /// Returns the line by which Cargo passes the prefix of the names to the package's code.
    pub(crate) fn prefix_variable(&self, library: &str) -> String {
        let library = library.to_uppercase().replace('-', "_");
        format!("rustc-env=MLA_BUILD_PREFIX_{library}={}", self.of_c(""))
    }

    fn of(&self, name: &[u8]) -> Vec<u8> {
        let tag = self.0.as_bytes();
        match is_cpp(name) {
            true => [name, b".", tag].concat(),
            false => [tag, b"__", name].concat(),
        }
    }
}

fn identifier(text: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    text.chars().map(letter).collect()
}

fn is_cpp(name: &[u8]) -> bool {
    name.starts_with(b"_Z")
}

/// An object of a library, with its source.
pub(crate) struct Object<'a> {
    pub(crate) source: &'a str,
    pub(crate) bytes: &'a [u8],
}

/// Returns the objects of a library with unique names, in the same order.
pub(crate) fn make_own(objects: &[Object<'_>], tag: &Tag) -> Result<Vec<Vec<u8>>, Error> {
    let tables = objects
        .iter()
        .map(|object| Table::read(object.bytes).map_err(|error| unreadable(object, &error)))
        .collect::<Result<Vec<_>, _>>()?;
    refuse_duplicates(objects, &tables)?;
    let symbols = tables.iter().flat_map(|table| &table.symbols);
    let defined = symbols
        .filter(|symbol| symbol.is_defined)
        .map(|symbol| symbol.name);
    let defined: HashSet<&[u8]> = defined.collect();
    let own = objects.iter().zip(&tables).map(|(object, table)| {
        let renamed = table.renamed(object.bytes, &defined, tag);
        renamed.ok_or_else(|| unreadable(object, "it has more than 4 GiB of names"))
    });
    own.collect()
}

fn unreadable(object: &Object<'_>, problem: &(impl ToString + ?Sized)) -> Error {
    Error::tool(
        object.source,
        format!(
            "what the compiler made of it is no ELF object for 64 bits ({})",
            problem.to_string()
        ),
    )
}

/// Refuses two definitions of one name between which no linker would choose.
fn refuse_duplicates(objects: &[Object<'_>], tables: &[Table<'_>]) -> Result<(), Error> {
    let mut first: HashMap<&[u8], &str> = HashMap::new();
    for (object, table) in objects.iter().zip(tables) {
        for symbol in table.symbols.iter().filter(|symbol| symbol.is_only) {
            if let Some(other) = first.insert(symbol.name, object.source) {
                let name = ptxas::demangled(&String::from_utf8_lossy(symbol.name));
                return Err(Error::refused(
                    format!("symbol {name}"),
                    format!("definitions in {other} and {}", object.source),
                    "one in a library; make one static, or give it a namespace or a name of its \
                     own",
                ));
            }
        }
    }
    Ok(())
}

/// The difference between declarations and objects.
#[derive(Debug, Default)]
pub(crate) struct Undefined {
    /// The declared names that no object defines.
    pub(crate) names: Vec<String>,
    /// A C++ function with one of these names, and its source.
    pub(crate) mangled: Option<(String, String)>,
}

/// True if a demangled C++ function has this name, in any namespace.
pub(crate) fn is_function(function: &str, name: &str) -> bool {
    let path = function.split('(').next().unwrap_or_default();
    path.rsplit("::").next() == Some(name)
}

/// Returns the declared C names that no object of the library defines.
pub(crate) fn undefined<'b>(
    objects: &[Object<'_>],
    declared: impl Iterator<Item = &'b str>,
) -> Result<Undefined, Error> {
    let mut missing: Vec<&str> = declared.collect();
    if missing.is_empty() {
        return Ok(Undefined::default());
    }
    let mut of_cpp = Vec::new();
    for object in objects {
        let table = Table::read(object.bytes).map_err(|error| unreadable(object, &error))?;
        for symbol in table.symbols.iter().filter(|symbol| symbol.is_defined) {
            missing.retain(|name| name.as_bytes() != symbol.name);
            if is_cpp(symbol.name) {
                of_cpp.push((symbol.name, object.source));
            }
        }
    }
    let functions = of_cpp.iter().map(|(name, source)| {
        let function = ptxas::demangled(&String::from_utf8_lossy(name));
        (function, (*source).to_owned())
    });
    let is_of = |function: &str| missing.iter().any(|missing| is_function(function, missing));
    // If nothing is missing, nothing is demangled.
    let mut functions = functions.take_while(|_| !missing.is_empty());
    let mangled = functions.find(|(function, _)| is_of(function));
    Ok(Undefined {
        names: missing.iter().map(|&name| name.to_owned()).collect(),
        mangled,
    })
}

/// Refuses two different kernels of the same name. If they are templates, a linker keeps one for
/// all sources.
///
/// Kernels count as different if their resources differ, as ptxas reports them. This is so in
/// nearly all cases.
pub(crate) fn refuse_different_kernels<'a>(
    units: impl Iterator<Item = (&'a str, Vec<Kernel>)>,
) -> Result<(), Error> {
    let mut first: HashMap<(String, String), (&str, Kernel)> = HashMap::new();
    for (source, kernels) in units {
        for mut kernel in kernels {
            kernel.warnings.clear();
            let name = (kernel.symbol.clone(), kernel.target.clone());
            let (other, known) = first
                .entry(name)
                .or_insert_with(|| (source, kernel.clone()));
            if *known != kernel {
                return Err(Error::refused(
                    format!("kernel {}", kernel.name),
                    format!("different code in {other} and {source}"),
                    "the same; of templates of one name a linker keeps one, so give them \
                     namespaces or names of their own",
                ));
            }
        }
    }
    Ok(())
}

/// The names of an object that a linker sees.
struct Table<'a> {
    endian: Endianness,
    symbols: Vec<Symbol<'a>>,
    strings: &'a [u8],
    /// The offset in the file of the header of the name section.
    strings_header: usize,
}

struct Symbol<'a> {
    name: &'a [u8],
    /// The symbol's offset in the file.
    at: usize,
    is_defined: bool,
    /// True if no other object may define it.
    is_only: bool,
    /// True if it names a group of sections.
    is_signature: bool,
}

/// Offsets within an ELF symbol and an ELF section header.
mod place {
    pub(super) const SYMBOL_NAME: usize = 0;
    pub(super) const SYMBOL_OTHER: usize = 5;
    pub(super) const SECTION_OFFSET: usize = 24;
    pub(super) const SECTION_SIZE: usize = 32;
}

impl<'a> Table<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, object::Error> {
        let header = elf::FileHeader64::<Endianness>::parse(bytes)?;
        let endian = header.endian()?;
        let sections = header.sections(endian, bytes)?;
        let table = sections.symbols(endian, bytes, elf::SHT_SYMTAB)?;
        if table.is_empty() {
            return Ok(Self {
                endian,
                symbols: Vec::new(),
                strings: &[],
                strings_header: 0,
            });
        }
        let start = sections.section(table.section())?.sh_offset(endian) as usize;
        let size = size_of::<elf::Sym64<Endianness>>();

        let groups = sections
            .iter()
            .filter(|it| it.sh_type(endian) == elf::SHT_GROUP);
        let signatures: HashSet<_> = groups.map(|it| it.sh_info(endian) as usize).collect();
        let mut symbols = Vec::new();
        for (index, symbol) in table.iter().enumerate() {
            let binding = symbol.st_bind();
            let is_signature = signatures.contains(&index);
            if (binding == elf::STB_LOCAL && !is_signature) || symbol.st_name(endian) == 0 {
                continue;
            }
            let section = symbol.st_shndx(endian);
            let is_defined = section != elf::SHN_UNDEF;
            symbols.push(Symbol {
                name: table.symbol_name(endian, symbol)?,
                at: start + index * size,
                is_defined: is_defined && binding != elf::STB_LOCAL,
                is_only: is_defined && section != elf::SHN_COMMON && binding == elf::STB_GLOBAL,
                is_signature,
            });
        }
        let strings = sections.section(table.string_section())?;
        let strings_header = header.e_shoff(endian) as usize
            + table.string_section().0 * usize::from(header.e_shentsize(endian));
        Ok(Self {
            endian,
            symbols,
            strings: strings.data(endian, bytes)?,
            strings_header,
        })
    }

    /// Returns the object with a new table of names at its end, or `None` if that would be too
    /// long.
    fn renamed(&self, bytes: &[u8], defined: &HashSet<&[u8]>, tag: &Tag) -> Option<Vec<u8>> {
        let mut renamed = bytes.to_vec();
        if self.symbols.is_empty() {
            return Some(renamed);
        }
        let mut strings = self.strings.to_vec();
        for symbol in &self.symbols {
            if !symbol.is_signature && !defined.contains(symbol.name) {
                continue;
            }
            let name = u32::try_from(strings.len()).ok()?;
            strings.extend(tag.of(symbol.name));
            strings.push(0);
            let at = symbol.at + place::SYMBOL_NAME;
            renamed[at..at + 4].copy_from_slice(&self.endian.write_u32(name));
            if symbol.is_defined && is_cpp(symbol.name) {
                let other = &mut renamed[symbol.at + place::SYMBOL_OTHER];
                *other = (*other & !3) | elf::STV_HIDDEN.0;
            }
        }
        renamed.resize(renamed.len().next_multiple_of(8), 0);
        for (at, value) in [
            (place::SECTION_OFFSET, renamed.len() as u64),
            (place::SECTION_SIZE, strings.len() as u64),
        ] {
            let at = self.strings_header + at;
            renamed[at..at + 8].copy_from_slice(&self.endian.write_u64(value));
        }
        renamed.extend(strings);
        Some(renamed)
    }
}
