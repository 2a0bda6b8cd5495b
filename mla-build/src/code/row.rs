//! The rows of a package's file of launches.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use globset::Glob;
use serde::Deserialize;
use serde_json::Value;

use super::{Field, Kernel, Launch, Layouts, Parameter};
use crate::{Error, bounded, target::Target};

/// A row, for one kernel after the substitutions of `each`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    /// A glob for the kernel's name in C++.
    kernel: String,
    source: String,
    /// Its parameters, such as `p: MlaLseParams` and `tiles: u32 = p.tokens / 32`.
    parameters: Vec<String>,
    /// The files of structures that the package's bindings lack: CUDA sources, or bindings, whose
    /// names end in `.rs`. A file may use the structures of those before it.
    #[serde(default)]
    structures: Vec<PathBuf>,
    /// The tensor maps that this kernel does not read.
    #[serde(default)]
    unused: BTreeSet<String>,
    /// Expressions of fields by their names, `p.units`. The others are the caller's own.
    #[serde(default)]
    fields: BTreeMap<String, String>,
    launch: Launch,
}

/// The launches that a package describes.
#[derive(Debug, Default)]
pub(crate) struct Launches {
    rows: Vec<Row>,
    /// The text of each file that rows name.
    structures: BTreeMap<PathBuf, String>,
}

impl Launches {
    /// Reads the rows, and the files that they name, below `root`.
    pub(crate) fn load(root: &Path, file: &Path) -> Result<Self, Error> {
        let path = root.join(file);
        let bytes = bounded::read(&path).map_err(Error::file("read", &path))?;
        let rows: Vec<Value> =
            serde_json::from_slice(&bytes).map_err(Error::file("understand", &path))?;
        let rows = rows.into_iter().flat_map(each).map(serde_json::from_value);
        let rows: Vec<Row> = rows
            .collect::<Result<_, _>>()
            .map_err(Error::file("understand", &path))?;
        for Row { kernel, .. } in &rows {
            Glob::new(kernel)
                .map_err(|error| refused(kernel, "the glob", kernel, &error.to_string()))?;
        }
        let files: BTreeSet<_> = rows.iter().flat_map(|row| &row.structures).collect();
        let structures = files.into_iter().map(|file| {
            let path = root.join(file);
            let text = bounded::read_to_string(&path).map_err(Error::file("read", &path))?;
            Ok((file.clone(), text))
        });
        Ok(Self {
            structures: structures.collect::<Result<_, Error>>()?,
            rows,
        })
    }

    /// Gives a kernel the parameters of its row and its launch, if a row describes it. If its
    /// machine code is `known`, its parameters must have the same sizes there.
    pub(crate) fn describe(
        &self,
        kernel: &mut Kernel,
        [source, target]: [&str; 2],
        bindings: &Layouts,
        known: Option<Vec<Parameter>>,
    ) -> Result<(), Error> {
        let Some(row) = self.row_of(source, &kernel.name) else {
            return Ok(());
        };
        row.describe(kernel, &self.layouts_of(row, bindings), known)?;
        if let Some(launch) = &mut kernel.launch {
            launch.dependent_launch &= target.parse().is_ok_and(|it: Target| it.number >= 90);
        }
        Ok(())
    }

    fn row_of(&self, source: &str, kernel: &str) -> Option<&Row> {
        let mut of_source = self.rows.iter().filter(|row| row.source == source);
        of_source.find(|row| row.is_of(kernel))
    }

    fn layouts_of(&self, row: &Row, bindings: &Layouts) -> Layouts {
        let mut layouts = bindings.clone();
        for file in &row.structures {
            let text = &self.structures[file];
            match file.extension() {
                Some(it) if it == "rs" => layouts.add_bindings(text),
                _ => layouts.add_source(text),
            }
        }
        layouts
    }

    /// The row of a source that is compiled whose kernel is none.
    pub(crate) fn unused(&self, code: &super::Code) -> Option<&str> {
        let row = self.rows.iter().find(|row| {
            let files = code.files.iter().filter(|file| file.source == row.source);
            let mut kernels = files.clone().flat_map(|file| &file.kernels);
            files.count() > 0 && !kernels.any(|kernel| row.is_of(&kernel.name))
        });
        row.map(|row| row.kernel.as_str())
    }
}

/// The rows that a row with `each` stands for. `each` is a list of axes, and an axis a list of
/// substitutions, by the names that stand in braces. There is a row for each choice of one from
/// each axis.
fn each(mut row: Value) -> Vec<Value> {
    let axes = row.as_object_mut().and_then(|it| it.remove("each"));
    let mut rows = vec![row];
    for axis in axes.iter().flat_map(|it| it.as_array()).flatten() {
        let choices = || axis.as_array().into_iter().flatten();
        rows = rows
            .iter()
            .flat_map(|row| choices().map(|choice| substituted(row, choice)))
            .collect();
    }
    rows
}

fn substituted(value: &Value, choice: &Value) -> Value {
    match value {
        Value::String(text) => {
            let mut text = text.clone();
            for (name, by) in choice.as_object().into_iter().flatten() {
                let name = format!("{{{name}}}");
                // A number that stands alone stays a number.
                match by {
                    Value::Number(_) if text == name => return by.clone(),
                    Value::String(by) => text = text.replace(&name, by),
                    by => text = text.replace(&name, &by.to_string()),
                }
            }
            Value::String(text)
        }
        Value::Array(all) => all.iter().map(|it| substituted(it, choice)).collect(),
        Value::Object(all) => {
            let all = all.iter();
            let all = all.map(|(name, it)| (name.clone(), substituted(it, choice)));
            Value::Object(all.collect())
        }
        other => other.clone(),
    }
}

impl Row {
    fn is_of(&self, kernel: &str) -> bool {
        let glob = Glob::new(&self.kernel);
        glob.is_ok_and(|glob| glob.compile_matcher().is_match(kernel))
    }

    fn describe(
        &self,
        kernel: &mut Kernel,
        layouts: &Layouts,
        known: Option<Vec<Parameter>>,
    ) -> Result<(), Error> {
        let name = kernel.name.clone();
        let refuse = |field: &str, given: &dyn ToString, accepted: String| {
            let field = format!("{field} of {name}");
            refused(&self.kernel, &field, &given.to_string(), &accepted)
        };
        let mut end = 0u32;
        let mut parameters = Vec::new();
        for text in &self.parameters {
            let (own, kind, value) = parts(text);
            let layout = layouts.of(kind).ok_or_else(|| {
                let accepted = "a number's type, or a structure of the bindings or of `structures`";
                refuse(own, &kind, accepted.to_owned())
            })?;
            let offset = end.next_multiple_of(layout.alignment);
            end = offset + layout.bytes;
            let fields = layout.fields.into_iter().map(|field| Field {
                value: self.fields.get(&format!("{own}.{}", field.name)).cloned(),
                ..field
            });
            parameters.push(Parameter {
                offset,
                bytes: layout.bytes,
                name: Some(own.to_owned()),
                kind: Some(kind.to_owned()),
                value: value.map(str::to_owned),
                fields: fields.collect(),
            });
        }
        if let Some(known) = known {
            if known.len() != parameters.len() {
                let accepted = known.len().to_string();
                return Err(refuse("parameters", &parameters.len(), accepted));
            }
            for (own, known) in parameters.iter_mut().zip(known) {
                if own.bytes != known.bytes {
                    let field = format!("bytes of {}", own.name.as_deref().unwrap_or_default());
                    let accepted = format!("{}, as the machine code has them", known.bytes);
                    return Err(refuse(&field, &own.bytes, accepted));
                }
                own.offset = known.offset;
            }
        }
        kernel.parameters = parameters;
        let fields = kernel.parameters.iter().flat_map(|it| &it.fields);
        let given = fields.filter(|field| field.value.is_some()).count();
        if given != self.fields.len() {
            let accepted = format!("those of its parameters, which has {given} of them");
            return Err(refuse("fields", &self.fields.len(), accepted));
        }
        let own = self.launch.tensor_maps.iter().map(|map| map.field.clone());
        let own = own.chain(self.unused.iter().cloned());
        let all = kernel.parameters.iter().flat_map(tensor_maps);
        let [own, all]: [BTreeSet<String>; 2] = [own.collect(), all.collect()];
        if own != all {
            let [own, all] = [own, all].map(|names| Vec::from_iter(names).join(", "));
            return Err(refuse("tensor_maps", &own, all));
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

/// The name, the type and the expression of a parameter: `tiles: u32 = p.tokens / 32`.
fn parts(text: &str) -> (&str, &str, Option<&str>) {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let (kind, value) = match rest.split_once('=') {
        Some((kind, value)) => (kind, Some(value.trim())),
        None => (rest, None),
    };
    (name.trim(), kind.trim(), value)
}

/// The names of the fields that are tensor maps.
fn tensor_maps(parameter: &Parameter) -> impl Iterator<Item = String> {
    let fields = parameter.fields.iter();
    let maps = fields.filter(|field| field.kind == "CUtensorMap");
    let name = parameter.name.as_deref().unwrap_or_default();
    maps.map(move |map| format!("{name}.{}", map.name))
}

/// An error of the package's file of launches.
fn refused(row: &str, field: &str, given: &str, accepted: &str) -> Error {
    Error::setting(format!("launches: {row}: {field}"), given, accepted)
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
        };";

    #[test]
    fn an_endless_file_of_launches_is_refused_by_the_bound() {
        let refused = Launches::load(Path::new("/"), Path::new("dev/zero"))
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

    /// Describes the kernel, whose second parameter has these bytes, by a row with these entries.
    fn described(entries: Value, bytes: u32, target: &str) -> Result<Kernel, String> {
        let mut row = serde_json::json!({
            "kernel": "*k<{of}>*", "source": "a.cu", "structures": ["a.cu"],
            "each": [[{ "of": "true" }]],
            "launch": { "when": "always", "grid": ["1", "1", "1"], "block": [32, 8, 1],
                        "dependent_launch": true },
        });
        for (name, entry) in entries.as_object().unwrap() {
            match name.strip_prefix("launch.") {
                Some(name) => row["launch"][name] = entry.clone(),
                None => row[name] = entry.clone(),
            }
        }
        let source = "struct Plan { int64_t units; int rows, width; };
            struct Maps { CUtensorMap rows, weights; };";
        let rows = each(row).into_iter().map(serde_json::from_value);
        let launches = Launches {
            rows: rows.collect::<Result<_, _>>().unwrap(),
            structures: [("a.cu".into(), source.into())].into(),
        };
        let mut kernel = kernel();
        kernel.parameters[1].bytes = bytes;
        let mut bindings = Layouts::default();
        bindings.add_bindings(BINDINGS);
        let known = Some(kernel.parameters.clone());
        let described = launches.describe(&mut kernel, ["a.cu", target], &bindings, known);
        described
            .map(|()| kernel)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_launch_names_the_parameters_and_has_their_layout() {
        let parameters = ["p: Params", "tiles: u32 = p.tokens / 32"];
        let row = serde_json::json!({ "parameters": parameters });
        let kernel = described(row, 4, "sm_90a").unwrap();
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
        assert_eq!(launch.cluster, ["1"; 3]);
        assert!(launch.dynamic_shared == "0" && launch.dependent_launch);
    }

    #[test]
    fn a_row_stands_for_a_kernel_of_each_choice() {
        let row = serde_json::json!({
            "kernel": "*{name}<{of}>*", "each": [
                [{ "name": "j" }, { "name": "k" }],
                [{ "of": "true", "rows": 4 }, { "of": "false", "rows": 8 }],
            ],
            "grid": ["p.tokens / {rows}", "{rows}"],
        });
        let expected = [
            ("j", "true", 4),
            ("j", "false", 8),
            ("k", "true", 4),
            ("k", "false", 8),
        ];
        let expected = expected.map(|(name, of, rows)| {
            let tiles = format!("p.tokens / {rows}");
            serde_json::json!({ "kernel": format!("*{name}<{of}>*"), "grid": [tiles, rows] })
        });
        assert_eq!(each(row), expected);
    }

    #[test]
    fn each_tensor_map_of_a_kernel_is_described() {
        let map = |field: &str| {
            serde_json::json!({
                "field": field, "type": "bf16", "address": "p.cache", "extents": ["64", "n"],
                "strides": ["128"], "box": ["64", "8"], "swizzle": 128, "l2_promotion": 128,
                "fill": "nan",
            })
        };
        let describe = |maps: &[Value], unused: &[&str]| {
            let row = serde_json::json!({
                "parameters": ["p: Plan", "maps: Maps"], "unused": unused,
                "launch.tensor_maps": maps,
            });
            described(row, 256, "sm_90a").map(drop)
        };
        let both = [map("maps.rows"), map("maps.weights")];
        assert_eq!(describe(&both, &[]), Ok(()));
        assert_eq!(describe(&both[..1], &["maps.weights"]), Ok(()));
        let error = describe(&both[..1], &[]).unwrap_err();
        assert!(
            error.contains("given \"maps.rows\", accepted maps.rows, maps.weights"),
            "{error}"
        );
    }

    #[test]
    fn a_structure_of_a_source_has_expressions_of_its_fields() {
        let describe = |fields: Value| {
            let row = serde_json::json!({ "parameters": ["p: Plan", "n: i32"], "fields": fields });
            described(row, 4, "sm_80")
        };
        let fields = serde_json::json!({ "p.units": "p.rows * p.width" });
        let kernel = describe(fields).unwrap();
        let fields = kernel.parameters[0].fields.iter();
        let fields: Vec<_> = fields
            .map(|f| (&*f.name, f.offset, f.value.as_deref()))
            .collect();
        let units = ("units", 0, Some("p.rows * p.width"));
        assert_eq!(fields, [units, ("rows", 8, None), ("width", 12, None)]);
        assert!(
            !kernel.launch.unwrap().dependent_launch,
            "before 9.0 there is none"
        );
        let error = describe(serde_json::json!({ "p.unit": "1" })).unwrap_err();
        assert!(error.contains("fields of void a::k<true>"), "{error}");
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
            let row = serde_json::json!({ "parameters": parameters, "launch.block": block });
            let error = described(row, 4, "sm_90a").unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
