//! GPU code as separate files, with a description of each kernel. A program can load it through the
//! driver and links nothing.
//!
//! With the environment variable `MLA_BUILD_CODE=folder`, a build compiles each source once more
//! for each of its targets, into a cubin or a file of PTX. It writes [`FILE`] beside them. The
//! parameters of a kernel come from its cubin. The package's file of
//! [launches](crate::Kernels::launches) adds the grid and the names of parameters. The layouts of
//! structures come from the package's bindings. Each launch is checked against the cubin: a
//! parameter of another size is an error.

mod cubin;
mod layout;

use std::path::Path;

use globset::Glob;
use serde::{Deserialize, Serialize};

pub(crate) use cubin::entries;
pub(crate) use layout::Layouts;

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
}

/// The launch of a kernel.
///
/// Expressions compute with whole numbers, parameters (`token_tiles`) and fields (`p.tokens`). They
/// have `+`, `-`, `*`, `/` rounding up, and parentheses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The calls for which this launch is made.
    pub when: String,
    /// CTAs on each axis, as expressions.
    pub grid: [String; 3],
    /// Threads on each axis.
    pub block: [u32; 3],
    /// CTAs of a cluster on each axis.
    #[serde(default = "one")]
    pub cluster: [u32; 3],
    /// Bytes of dynamic shared memory, as an expression.
    #[serde(default = "nothing")]
    pub dynamic_shared: String,
    /// True if the kernel is launched as a programmatic dependent.
    #[serde(default)]
    pub dependent_launch: bool,
    /// The parameters that are tensor maps.
    #[serde(default)]
    pub tensor_maps: Vec<String>,
}

fn one() -> [u32; 3] {
    [1; 3]
}

fn nothing() -> String {
    "0".to_owned()
}

/// A row of a package's file of launches.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    /// A glob for the kernel's name in C++.
    kernel: String,
    source: String,
    /// Its parameters, such as `p: MlaLseParams` and `tiles: u32 = p.tokens / 32`.
    parameters: Vec<String>,
    launch: Launch,
}

/// The launches that a package describes.
#[derive(Debug, Default)]
pub(crate) struct Launches(Vec<Row>);

impl Launches {
    pub(crate) fn load(path: &Path) -> Result<Self, Error> {
        let bytes = bounded::read(path).map_err(Error::file("read", path))?;
        let rows: Vec<Row> =
            serde_json::from_slice(&bytes).map_err(Error::file("understand", path))?;
        for Row { kernel, .. } in &rows {
            Glob::new(kernel)
                .map_err(|error| refused(kernel, "the glob", kernel, &error.to_string()))?;
        }
        Ok(Self(rows))
    }

    /// Names the parameters of a kernel and adds its launch, if a row describes it.
    pub(crate) fn describe(
        &self,
        kernel: &mut Kernel,
        source: &str,
        layouts: &Layouts,
    ) -> Result<(), Error> {
        let mut of_source = self.0.iter().filter(|row| row.source == source);
        match of_source.find(|row| row.is_of(kernel)) {
            Some(row) => row.describe(kernel, layouts),
            None => Ok(()),
        }
    }

    /// Returns a row whose source is compiled, but whose kernel does not exist.
    pub(crate) fn unused(&self, code: &Code) -> Option<&str> {
        let row = self.0.iter().find(|row| {
            let files = code.files.iter().filter(|file| file.source == row.source);
            let mut kernels = files.clone().flat_map(|file| &file.kernels);
            files.count() > 0 && !kernels.any(|kernel| row.is_of(kernel))
        });
        row.map(|row| row.kernel.as_str())
    }
}

impl Row {
    fn is_of(&self, kernel: &Kernel) -> bool {
        let glob = Glob::new(&self.kernel);
        glob.is_ok_and(|glob| glob.compile_matcher().is_match(&kernel.name))
    }

    fn describe(&self, kernel: &mut Kernel, layouts: &Layouts) -> Result<(), Error> {
        let name = kernel.name.clone();
        let refuse = |field: &str, given: &dyn ToString, accepted: String| {
            refused(
                &self.kernel,
                &format!("{field} of {name}"),
                &given.to_string(),
                &accepted,
            )
        };
        let (given, accepted) = (self.parameters.len(), kernel.parameters.len());
        if given != accepted {
            return Err(refuse("parameters", &given, accepted.to_string()));
        }
        for (text, parameter) in self.parameters.iter().zip(&mut kernel.parameters) {
            let (name, rest) = text.split_once(':').unwrap_or((text, ""));
            let (kind, value) = match rest.split_once('=') {
                Some((kind, value)) => (kind.trim(), Some(value.trim().to_owned())),
                None => (rest.trim(), None),
            };
            let accepted = "a number's type, or a structure of the bindings";
            let layout = layouts.of(kind);
            let (bytes, fields) = layout.ok_or_else(|| refuse(name, &kind, accepted.to_owned()))?;
            if bytes != parameter.bytes {
                let accepted = format!("{}, as the machine code has them", parameter.bytes);
                return Err(refuse(&format!("bytes of {name}"), &bytes, accepted));
            }
            *parameter = Parameter {
                name: Some(name.trim().to_owned()),
                kind: Some(kind.to_owned()),
                value,
                fields,
                ..*parameter
            };
        }
        let threads: u32 = self.launch.block.iter().product();
        if threads > kernel.max_threads {
            let accepted = format!("at most {}", kernel.max_threads);
            return Err(refuse("threads", &threads, accepted));
        }
        kernel.launch = Some(self.launch.clone());
        Ok(())
    }
}

/// Makes an error about the package's file of launches.
fn refused(row: &str, field: &str, given: &str, accepted: &str) -> Error {
    Error::setting(format!("launches: {row}: {field}"), given, accepted)
}

/// Returns the kernels of a cubin, without launches.
pub(crate) fn kernels(bytes: &[u8]) -> Option<Vec<Kernel>> {
    let kernels = entries(bytes)?.into_iter().map(|entry| {
        let parameters = entry.parameters.values().map(|&(offset, bytes)| Parameter {
            offset,
            bytes,
            ..Parameter::default()
        });
        Kernel {
            name: ptxas::demangled(&entry.name),
            static_shared: entry.shared,
            max_threads: entry.max_threads,
            parameters: parameters.collect(),
            entry: entry.name,
            launch: None,
        }
    });
    Some(kernels.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BINDINGS: &str = "
        pub struct Params {
            pub from: *const f32,
            pub tokens: i32,
        }
        const _: () = {
            [\"Size of Params\"][::core::mem::size_of::<Params>() - 16usize];
            [\"Offset of field: Params::from\"][::core::mem::offset_of!(Params, from) - 0usize];
            [
                \"Offset of field: Params::tokens\",
            ][::core::mem::offset_of!(Params, tokens) - 8usize];
        };";

    #[test]
    fn an_endless_file_of_launches_is_refused_by_the_bound() {
        let refused = Launches::load(Path::new("/dev/zero"))
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("/dev/zero") && refused.contains("67108864"),
            "{refused}"
        );
    }

    fn kernel() -> Kernel {
        let parameter = |offset, bytes| Parameter {
            offset,
            bytes,
            ..Parameter::default()
        };
        Kernel {
            entry: "_Zk".into(),
            name: "void a::k<true>(Params, unsigned int)".into(),
            static_shared: 0,
            max_threads: 256,
            parameters: vec![parameter(0, 16), parameter(16, 4)],
            launch: None,
        }
    }

    fn describe(parameters: &[&str], block: [u32; 3]) -> Result<Kernel, String> {
        let rows = serde_json::json!([{
            "kernel": "*k<true>*", "source": "a.cu", "parameters": parameters,
            "launch": { "when": "always", "grid": ["tiles", "1", "1"], "block": block },
        }]);
        let launches = Launches(serde_json::from_value(rows).unwrap());
        let mut kernel = kernel();
        let described = launches.describe(&mut kernel, "a.cu", &Layouts::of_bindings(BINDINGS));
        described
            .map(|()| kernel)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_launch_names_the_parameters_and_has_their_layout() {
        let kernel = describe(&["p: Params", "tiles: u32 = p.tokens / 32"], [32, 8, 1]).unwrap();
        let [p, tiles] = &kernel.parameters[..] else {
            panic!("{kernel:?}")
        };
        let fields: Vec<_> = p
            .fields
            .iter()
            .map(|f| (&*f.name, &*f.kind, f.offset, f.bytes))
            .collect();
        assert_eq!(fields, [("from", "pointer", 0, 8), ("tokens", "i32", 8, 4)]);
        assert_eq!(tiles.value.as_deref(), Some("p.tokens / 32"));
        assert_eq!((tiles.offset, tiles.bytes), (16, 4));
        let launch = kernel.launch.unwrap();
        assert_eq!(
            (launch.cluster, launch.dynamic_shared.as_str()),
            ([1; 3], "0")
        );
    }

    #[test]
    fn a_launch_that_the_machine_code_contradicts_is_refused() {
        let block = [32, 8, 1];
        for (parameters, block, expected) in [
            (&["p: Params"][..], block, "given \"1\", accepted 2"),
            (
                &["p: Params", "tiles: u64"],
                block,
                "bytes of tiles of void a::k<true>(Params, unsigned int): given \"8\", accepted 4, \
                 as the machine code has them",
            ),
            (
                &["p: Other", "tiles: u32"],
                block,
                "given \"Other\", accepted a number's type",
            ),
            (
                &["p: Params", "tiles: u32"],
                [32, 9, 1],
                "given \"288\", accepted at most 256",
            ),
        ] {
            let error = describe(parameters, block).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
