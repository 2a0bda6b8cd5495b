//! The layout of structures, from bindings or, if no header declares them, from CUDA sources. The
//! fields of a structure lie one behind the other, each at a multiple of its alignment. In
//! bindings, bindgen writes the size of each structure, and the compiler checks it against its own.

use std::collections::BTreeMap;

use super::Field;

/// The size, the alignment and the fields of a type. A number and a pointer have no fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) bytes: u32,
    pub(crate) alignment: u32,
    pub(crate) fields: Vec<Field>,
}

impl Layout {
    fn of_scalar(bytes: u32) -> Self {
        Self {
            bytes,
            alignment: bytes,
            fields: Vec::new(),
        }
    }

    /// Adds a field behind the others.
    fn add(&mut self, field: Declared<'_>, of_kind: &Self) {
        self.alignment = self.alignment.max(of_kind.alignment);
        self.bytes = self.bytes.next_multiple_of(of_kind.alignment);
        self.fields.extend(placed(field, of_kind, self.bytes));
        self.bytes += of_kind.bytes * field.2.unwrap_or(1);
    }

    /// The layout of a structure that has all of its fields, or `None` if it has none.
    fn closed(mut self) -> Option<Self> {
        self.bytes = self.bytes.next_multiple_of(self.alignment.max(1));
        (self.bytes > 0).then_some(self)
    }
}

/// The structures of a package's bindings, or of a source.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layouts(BTreeMap<String, Layout>);

impl Layouts {
    /// Adds the structures of bindings. A structure may have fields of those before it.
    pub(crate) fn add_bindings(&mut self, text: &str) {
        for (at, start) in text.match_indices("pub struct ") {
            let rest = &text[at + start.len()..];
            let Some((name, rest)) = rest.split_once(" {") else {
                continue;
            };
            let Some((body, _)) = rest.split_once('}') else {
                continue;
            };
            if let Some(layout) = self.of_binding(text, name.trim(), body) {
                self.0.insert(name.trim().to_owned(), layout);
            }
        }
    }

    fn of_binding(&self, text: &str, name: &str, body: &str) -> Option<Layout> {
        let lines = body
            .lines()
            .filter_map(|line| line.trim().strip_prefix("pub "));
        let mut layout = Layout::default();
        for line in lines {
            let (field, kind) = line.trim_end_matches(',').split_once(": ")?;
            let array = kind.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
            let (kind, count) = match array.map(|it| it.split_once("; ")) {
                Some(array) => {
                    let (kind, count) = array?;
                    (kind, Some(count.trim_end_matches("usize").parse().ok()?))
                }
                None => (kind, None),
            };
            let kind = if kind.starts_with('*') { POINTER } else { kind };
            layout.add((field, kind, count), &self.of(kind)?);
        }
        let size = value(text, &format!("\"Size of {name}\""))?;
        layout.closed().filter(|layout| layout.bytes == size)
    }

    /// Adds the structures of a CUDA source whose fields are numbers, pointers, structures that are
    /// there, and arrays of these. The names of the fields of inner structures and arrays say where
    /// they are: `sources[0].lists`.
    pub(crate) fn add_source(&mut self, text: &str) {
        let text = plain(text);
        for (at, start) in text.match_indices("struct ") {
            let Some((name, rest)) = text[at + start.len()..].split_once(" {") else {
                continue;
            };
            if name.contains(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
                continue;
            }
            self.0.remove(name);
            if let Some(layout) = self.of_body(&text, &body(rest)) {
                self.0.insert(name.to_owned(), layout);
            }
        }
    }

    fn of_body(&self, text: &str, body: &str) -> Option<Layout> {
        let mut layout = Layout::default();
        for statement in body.split(';').map(str::trim) {
            if ["alignas", "__align__", "(*", ": "]
                .iter()
                .any(|it| statement.contains(it))
            {
                return None;
            }
            // The rest of a function, whose body is left out.
            if statement.is_empty() || statement.contains('(') || statement.starts_with("static ") {
                continue;
            }
            for field in declared(text, statement)? {
                layout.add(field, &self.of(field.1)?);
            }
        }
        layout.closed()
    }

    /// Returns the layout of a number, a pointer or a structure.
    pub(crate) fn of(&self, kind: &str) -> Option<Layout> {
        match kind {
            "i8" | "u8" | "bool" => Some(Layout::of_scalar(1)),
            "i16" | "u16" => Some(Layout::of_scalar(2)),
            "i32" | "u32" | "f32" => Some(Layout::of_scalar(4)),
            "i64" | "u64" | "f64" | "usize" | POINTER => Some(Layout::of_scalar(8)),
            // CUDA 13 aligns it to its size. Older versions align it to 64; code of theirs is
            // refused if that changes the size of a structure.
            "CUtensorMap" => Some(Layout::of_scalar(128)),
            // A divisor of CUTLASS, with the numbers by which it multiplies and shifts instead.
            "cutlass::FastDivmod" => {
                let mut layout = Layout::default();
                for (name, kind) in [
                    ("divisor", "i32"),
                    ("multiplier", "u32"),
                    ("shift_right", "u32"),
                ] {
                    layout.add((name, kind, None), &Layout::of_scalar(4));
                }
                Some(layout)
            }
            kind => self.0.get(kind).cloned(),
        }
    }
}

/// Returns the number that bindgen compares behind a text.
fn value(text: &str, label: &str) -> Option<u32> {
    let behind = &text[text.find(label)? + label.len()..];
    let statement = behind.split_once(';')?.0;
    let number = statement.rsplit_once("- ")?.1;
    number.trim_end_matches("usize]").parse().ok()
}

/// The description of a pointer's type.
const POINTER: &str = "pointer";

/// The name and the type of a field, and the number of elements if it is an array.
type Declared<'a> = (&'a str, &'a str, Option<u32>);

/// The fields of a statement: `const int *a, *b`, `float x, y[2]`.
fn declared<'a>(text: &str, statement: &'a str) -> Option<Vec<Declared<'a>>> {
    let first = statement.split(',').next()?.trim_end();
    let (kind, names) = statement.split_at(first.find('*').or_else(|| first.rfind(' '))?);
    let names = names.split(',').map(|name| {
        let name = name.trim();
        let (kind, name) = match name.strip_prefix('*') {
            Some(name) => (POINTER, name.trim()),
            None => (number_of(kind), name),
        };
        let name = name.split('=').next()?.trim();
        let (name, count) = match name.split_once('[') {
            Some((name, count)) => (name, Some(constant(text, count.strip_suffix(']')?)?)),
            None => (name, None),
        };
        Some((name, kind, count))
    });
    let mut fields: Vec<_> = names.collect::<Option<_>>()?;
    fields.retain(|(name, ..)| !name.is_empty());
    Some(fields)
}

/// The fields of a field at an offset: itself, its elements, or those of its structure.
fn placed((name, kind, count): Declared<'_>, layout: &Layout, offset: u32) -> Vec<Field> {
    let field = |name, kind: &str, offset, bytes| Field {
        name,
        kind: kind.to_owned(),
        offset,
        bytes,
        value: None,
    };
    let of_element = |index| {
        let name = match count {
            Some(_) => format!("{name}[{index}]"),
            None => name.to_owned(),
        };
        let offset = offset + index * layout.bytes;
        if layout.fields.is_empty() {
            return vec![field(name, kind, offset, layout.bytes)];
        }
        let inner = layout.fields.iter();
        let inner = inner.map(|it| {
            let name = format!("{name}.{}", it.name);
            field(name, &it.kind, offset + it.offset, it.bytes)
        });
        inner.collect()
    };
    (0..count.unwrap_or(1)).flat_map(of_element).collect()
}

/// Rust's name of a number's type in C, without its qualifiers; any other name without namespaces.
fn number_of(kind: &str) -> &str {
    match kind.trim().trim_start_matches("const ").trim() {
        "int" | "int32_t" => "i32",
        "uint32_t" | "unsigned" => "u32",
        "int64_t" => "i64",
        "uint64_t" | "size_t" => "u64",
        "int16_t" => "i16",
        "uint16_t" => "u16",
        "int8_t" => "i8",
        "uint8_t" => "u8",
        "float" => "f32",
        "double" => "f64",
        divisor @ "cutlass::FastDivmod" => divisor,
        other => other.rsplit("::").next().unwrap_or(other),
    }
}

/// A number, or the value of a constant of the source.
fn constant(text: &str, name: &str) -> Option<u32> {
    if let Ok(number) = name.parse() {
        return Some(number);
    }
    let (_, behind) = text.split_once(&format!("constexpr int {name} = "))?;
    behind.split_once(';')?.0.trim().parse().ok()
}

/// A source without comments and lines of the preprocessor.
fn plain(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let lines = lines.map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    lines.collect::<Vec<_>>().join("\n")
}

/// The text up to the brace that closes, without the bodies of functions, in whose place stands a
/// semicolon.
fn body(text: &str) -> String {
    let (mut depth, mut body) = (0u32, String::new());
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => {
                depth -= 1;
                body.push(';');
            }
            c if depth == 0 => body.push(c),
            _ => {}
        }
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_structure_of_a_source_lies_as_the_compiler_lays_it() {
        let source = "
            constexpr int kSources = 2;
            struct Source {
                const int* lists;  // [tokens, width]
                int width;
                bool adjoin;
            };
            struct Params {
                int first, items = 0;
                Source sources[kSources];
                float scale;
                int64_t strides[2];
                bool last;
                __device__ __forceinline__ int at(int token) const { return token * 2; }
                template <typename T>
                void put(T x) const;
                static constexpr int kRows = 4;
            };
            struct Aligned { alignas(16) int x; };
            struct Of : Params { int y; };
            struct Unknown { cudaStream_t stream; };";
        let mut layouts = Layouts::default();
        layouts.add_source(source);
        let Layout { bytes, fields, .. } = layouts.of("Params").unwrap();
        let fields: Vec<_> = fields
            .iter()
            .map(|f| (&*f.name, &*f.kind, f.offset))
            .collect();
        assert_eq!(
            fields,
            [
                ("first", "i32", 0),
                ("items", "i32", 4),
                ("sources[0].lists", "pointer", 8),
                ("sources[0].width", "i32", 16),
                ("sources[0].adjoin", "bool", 20),
                ("sources[1].lists", "pointer", 24),
                ("sources[1].width", "i32", 32),
                ("sources[1].adjoin", "bool", 36),
                ("scale", "f32", 40),
                ("strides[0]", "i64", 48),
                ("strides[1]", "i64", 56),
                ("last", "bool", 64),
            ]
        );
        assert_eq!(bytes, 72);
        for name in ["Aligned", "Of", "Unknown", "int"] {
            assert_eq!(layouts.of(name), None, "{name}");
        }
    }

    // An array has more bytes than its alignment.
    #[test]
    fn a_structure_is_aligned_as_its_elements_are() {
        let bindings = "
            pub struct Inner {
                pub strides: [i64; 3usize],
                pub codes: [u8; 4usize],
            }
            const _: () = {
                [\"Size of Inner\"][::core::mem::size_of::<Inner>() - 32usize];
            };
            pub struct Outer {
                pub from: *const ::core::ffi::c_void,
                pub inner: Inner,
            }
            const _: () = {
                [\"Size of Outer\"][::core::mem::size_of::<Outer>() - 40usize];
            };";
        let source = "
            struct Plan {
                int first;
                Outer outer;
                int last;
            #ifdef __CUDACC__
                __device__ int at(int token) const { return token; }
            #endif
            };
            struct Maps {
                CUtensorMap keys;
                int count;
                cutlass::FastDivmod by[2];
                CUtensorMap queries;
            };";
        let mut layouts = Layouts::default();
        layouts.add_bindings(bindings);
        layouts.add_source(&source.replace("            ", ""));
        let offsets = |name| {
            let layout = layouts.of(name).unwrap();
            let fields = layout.fields.into_iter().map(|it| (it.name, it.offset));
            (layout.bytes, fields.collect::<Vec<_>>())
        };
        let named = |fields: &[(&str, u32)]| -> Vec<_> {
            let fields = fields.iter();
            fields.map(|&(name, at)| (name.to_owned(), at)).collect()
        };
        let strides = |start: &str, at: u32| {
            let strides = (0..3u32).map(|i| (format!("{start}strides[{i}]"), at + 8 * i));
            let codes = (0..4u32).map(|i| (format!("{start}codes[{i}]"), at + 24 + i));
            strides.chain(codes).collect::<Vec<_>>()
        };
        assert_eq!(offsets("Inner"), (32, strides("", 0)));
        let plan = [
            named(&[("first", 0), ("outer.from", 8)]),
            strides("outer.inner.", 16),
            named(&[("last", 48)]),
        ];
        assert_eq!(offsets("Plan"), (56, plan.concat()));
        let maps = [
            ("keys", 0),
            ("count", 128),
            ("by[0].divisor", 132),
            ("by[0].multiplier", 136),
            ("by[0].shift_right", 140),
            ("by[1].divisor", 144),
            ("by[1].multiplier", 148),
            ("by[1].shift_right", 152),
            ("queries", 256),
        ];
        assert_eq!(offsets("Maps"), (384, named(&maps)));
    }
}
