//! GPU code as separate files, with a description of each kernel. A program can load it through the
//! driver and links nothing.
//!
//! With the environment variable `MLA_BUILD_CODE=folder`, a build compiles each source once more
//! for each of its targets, into a cubin or a file of PTX. It writes [`FILE`] beside them. The
//! parameters of a kernel come from its cubin. The package's file of
//! [launches](crate::Kernels::launches) adds the grid and the names of parameters. The layouts of
//! structures come from the package's bindings, or are read from the sources that a row names. Each
//! launch is checked against the cubin: a parameter of another size is an error.

mod cubin;
mod layout;
mod row;

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

pub(crate) use cubin::kernels;
pub(crate) use layout::Layouts;
pub(crate) use row::Launches;

use crate::{Error, bounded, ptxas};

/// The file of descriptions beside the code.
pub const FILE: &str = "code.json";

/// The code of a library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code {
    /// The package, with its version.
    pub package: String,
    /// The library.
    pub library: String,
    /// A file for each source and target.
    pub files: Vec<CodeFile>,
}

/// A cubin, or PTX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeFile {
    /// The file's name in the folder.
    pub file: String,
    /// The hash of the file's bytes.
    pub blake3: String,
    /// The source, relative to the package.
    pub source: String,
    /// nvcc's name of the target: `sm_90a`, `compute_80`.
    pub target: String,
    /// The file's kernels. PTX does not list them: it has those of the source's cubins, under the
    /// same names.
    pub kernels: Vec<Kernel>,
}

/// A kernel of a cubin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// The name by which the driver finds the kernel.
    pub entry: String,
    /// The same name in C++.
    pub name: String,
    /// Bytes of static shared memory.
    pub static_shared: u64,
    /// The maximum number of threads of a CTA.
    pub max_threads: u32,
    /// The parameters in order. Without a launch they have no names.
    pub parameters: Vec<Parameter>,
    /// Everything else that a launch needs, or `None` if the package does not describe it.
    pub launch: Option<Launch>,
}

/// A parameter of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameter {
    /// The offset of the first byte within all parameters.
    pub offset: u32,
    /// The size in bytes.
    pub bytes: u32,
    /// The name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The type of a number, or the name of a structure.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// The expression that computes the value from the parameters before it, or `None` if the
    /// caller gives it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The fields of a structure, with offsets within it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<Field>,
}

/// A field of a structure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Field {
    /// The field's name.
    pub name: String,
    /// `pointer`, or Rust's name of a number's type.
    #[serde(rename = "type")]
    pub kind: String,
    /// The offset of the first byte within the structure.
    pub offset: u32,
    /// The size in bytes.
    pub bytes: u32,
    /// The expression that computes the value, or `None` if the caller gives it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

/// The launch of a kernel.
///
/// Expressions compute with whole numbers, parameters (`token_tiles`), fields (`p.tokens`) and
/// choices. They have `+`, `-`, `*`, `/` rounding up, `//` rounding down, `%`, parentheses,
/// `min(a, b)`, `max(a, b)`, `exp2(a)`, and `log2(a)`, which rounds up and is 0 for 0. Quotients
/// and remainders by 0 are 0. The comparisons `<`, `<=` and `==` are 1 or 0 and bind least. `if(a,
/// b, c)` is `b` unless `a` is 0, and `inverse(a)` the bits of the f32 1 / a, or 0 for 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The calls for which this launch is made.
    pub when: String,
    /// Numbers that are no parameters, by their names, with their meaning. The caller chooses them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub choices: BTreeMap<String, String>,
    /// CTAs on each axis, as expressions.
    pub grid: [String; 3],
    /// Threads on each axis.
    pub block: [u32; 3],
    /// CTAs of a cluster on each axis, as expressions.
    #[serde(default = "one")]
    pub cluster: [String; 3],
    /// Bytes of dynamic shared memory, as an expression.
    #[serde(default = "nothing")]
    pub dynamic_shared: String,
    /// True if the kernel may be launched as a programmatic dependent. It waits for the previous
    /// kernel itself.
    #[serde(default)]
    pub dependent_launch: bool,
    /// The fields that are tensor maps, which the host encodes. The kernel does not read a map that
    /// is not here.
    #[serde(default)]
    pub tensor_maps: Vec<TensorMap>,
}

/// A tensor map, as `cuTensorMapEncodeTiled` takes it. Expressions are those of [`Launch`]; axes
/// begin with the innermost one. Elements are neither interleaved nor strided within a box.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMap {
    /// The field that holds it, of type `CUtensorMap`.
    pub field: String,
    /// An expression that is 0 if the kernel does not read the map, which is then all zeros.
    #[serde(default = "always")]
    pub read: String,
    /// The type of an element: `bf16`, `f16`, `f32`, `u8`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The address of the tensor, as an expression.
    pub address: String,
    /// Elements on each axis, as expressions.
    pub extents: Vec<String>,
    /// Bytes between neighbours on each axis but the first, as expressions.
    pub strides: Vec<String>,
    /// Elements of a box on each axis, as expressions.
    #[serde(rename = "box")]
    pub box_extents: Vec<String>,
    /// Bytes of the swizzle, or 0.
    pub swizzle: u32,
    /// Bytes of the promotion in L2.
    pub l2_promotion: u32,
    /// The value of elements outside: `zero`, or `nan`, which FMAs take for 0.
    pub fill: String,
}

fn one() -> [String; 3] {
    ["1"; 3].map(str::to_owned)
}

fn nothing() -> String {
    "0".to_owned()
}

fn always() -> String {
    "1".to_owned()
}

/// Describes kernels by the package's file of launches alone, without cubins: their parameters have
/// the sizes that the file says. A kernel that the file does not describe has no launch.
///
/// `declarations` is the file of the package's bindings. It and the sources of kernels are relative
/// to `root`. A kernel is named by its source, its target and its mangled name.
///
/// # Errors
///
/// If a file cannot be read, or if the description of a kernel is wrong.
pub fn describe(
    root: &Path,
    [launches, declarations]: [&Path; 2],
    kernels: &[[&str; 3]],
) -> Result<Vec<Kernel>, Error> {
    let launches = Launches::load(root, launches)?;
    let path = root.join(declarations);
    let mut layouts = Layouts::default();
    layouts.add_bindings(&bounded::read_to_string(&path).map_err(Error::file("read", &path))?);
    let described = kernels.iter().map(|&[source, target, entry]| {
        let mut kernel = Kernel {
            entry: entry.to_owned(),
            name: ptxas::demangled(entry),
            static_shared: 0,
            max_threads: u32::MAX,
            parameters: Vec::new(),
            launch: None,
        };
        launches.describe(&mut kernel, [source, target], &layouts, None)?;
        Ok(kernel)
    });
    described.collect()
}
