//! The layout of structures, from bindings or, if no header declares them, from CUDA sources. The
//! fields of a structure lie one behind the other, each at a multiple of its alignment. In
//! bindings, bindgen writes the size of each structure, and the compiler checks it against its own.

use std::collections::BTreeMap;

use super::Field;

/// The structures of a package's bindings, or of a source.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layouts(BTreeMap<String, (u32, Vec<Field>)>);

impl Layouts {
    pub(crate) fn of_bindings(text: &str) -> Self {
        let mut layouts = BTreeMap::new();
        for (at, start) in text.match_indices("pub struct ") {
            let rest = &text[at + start.len()..];
            let Some((name, rest)) = rest.split_once(" {") else {
                continue;
            };
            let Some((body, _)) = rest.split_once('}') else {
                continue;
            };
            if let Some(layout) = layout(text, name.trim(), body) {
                layouts.insert(name.trim().to_owned(), layout);
            }
        }
        Self(layouts)
    }

    /// Adds the structures of a CUDA source whose fields are numbers, pointers, structures that are
    /// there, and arrays of these. The names of the fields of inner structures and arrays say where
    /// they are: `sources[0].lists`.
    pub(crate) fn add_source(&mut self, text: &str) {
        let text = without_comments(text);
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

    fn of_body(&self, text: &str, body: &str) -> Option<(u32, Vec<Field>)> {
        let (mut fields, mut end, mut alignment) = (Vec::new(), 0u32, 1);
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
            for Declared { kind, name, count } in declared(text, statement)? {
                let (bytes, inner) = match kind {
                    POINTER => (8, Vec::new()),
                    kind => self.of(kind)?,
                };
                let of_field = alignment_of(bytes, &inner);
                alignment = alignment.max(of_field);
                end = end.next_multiple_of(of_field);
                for index in 0..count.unwrap_or(1) {
                    let name = match count {
                        Some(_) => format!("{name}[{index}]"),
                        None => name.to_owned(),
                    };
                    fields.extend(placed(name, (kind, bytes), &inner, end));
                    end += bytes;
                }
            }
        }
        (end > 0).then(|| (end.next_multiple_of(alignment), fields))
    }

    /// Returns the size in bytes of a number or a structure, and the structure's fields.
    pub(crate) fn of(&self, kind: &str) -> Option<(u32, Vec<Field>)> {
        match number(kind) {
            Some(bytes) => Some((bytes, Vec::new())),
            None => self.0.get(kind).cloned(),
        }
    }
}

/// Returns the layout of a structure whose fields are all numbers, pointers or arrays of them.
fn layout(text: &str, name: &str, body: &str) -> Option<(u32, Vec<Field>)> {
    let size = value(text, &format!("\"Size of {name}\""))?;
    let lines = body
        .lines()
        .filter_map(|line| line.trim().strip_prefix("pub "));
    let (mut fields, mut end, mut alignment) = (Vec::new(), 0u32, 1);
    for line in lines {
        let (field, kind) = line.trim_end_matches(',').split_once(": ")?;
        let (kind, bytes, of_element) = sized(kind)?;
        alignment = alignment.max(of_element);
        end = end.next_multiple_of(of_element);
        fields.extend(placed(field.to_owned(), (&kind, bytes), &[], end));
        end += bytes;
    }
    (end.next_multiple_of(alignment) == size).then_some((size, fields))
}

/// Returns the number that bindgen compares behind a text.
fn value(text: &str, label: &str) -> Option<u32> {
    let behind = &text[text.find(label)? + label.len()..];
    let statement = behind.split_once(';')?.0;
    let number = statement.rsplit_once("- ")?.1;
    number.trim_end_matches("usize]").parse().ok()
}

/// Returns a field's type as descriptions name it, its size in bytes, and that of an element of it.
fn sized(kind: &str) -> Option<(String, u32, u32)> {
    if kind.starts_with('*') {
        return Some((POINTER.to_owned(), 8, 8));
    }
    if let Some(array) = kind.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
        let (element, count) = array.split_once("; ")?;
        let (_, bytes, of_element) = sized(element)?;
        let count: u32 = count.trim_end_matches("usize").parse().ok()?;
        return Some((kind.to_owned(), bytes * count, of_element));
    }
    let bytes = number(kind)?;
    Some((kind.to_owned(), bytes, bytes))
}

fn number(kind: &str) -> Option<u32> {
    match kind {
        "i8" | "u8" | "bool" => Some(1),
        "i16" | "u16" => Some(2),
        "i32" | "u32" | "f32" => Some(4),
        "i64" | "u64" | "f64" => Some(8),
        "CUtensorMap" => Some(128),
        _ => None,
    }
}

/// The description of a pointer's type.
const POINTER: &str = "pointer";

/// A field as a source declares it.
struct Declared<'a> {
    kind: &'a str,
    name: &'a str,
    /// The number of elements of an array.
    count: Option<u32>,
}

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
        Some(Declared { kind, name, count })
    });
    let fields: Vec<_> = names.collect::<Option<_>>()?;
    Some(
        fields
            .into_iter()
            .filter(|it| !it.name.is_empty())
            .collect(),
    )
}

/// The fields of one element at an offset: itself, or those of its structure.
fn placed(name: String, (kind, bytes): (&str, u32), inner: &[Field], offset: u32) -> Vec<Field> {
    let field = |name, kind: &str, offset, bytes| Field {
        name,
        kind: kind.to_owned(),
        offset,
        bytes,
        value: None,
    };
    if inner.is_empty() {
        return vec![field(name, kind, offset, bytes)];
    }
    let of_structure = |it: &Field| {
        let name = format!("{name}.{}", it.name);
        field(name, &it.kind, offset + it.offset, it.bytes)
    };
    inner.iter().map(of_structure).collect()
}

/// Rust's name of a number's type in C, without its qualifiers; any other name as it is.
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
        other => other,
    }
}

/// A structure is aligned as its most aligned field.
fn alignment_of(bytes: u32, inner: &[Field]) -> u32 {
    inner.iter().map(|it| it.bytes).max().unwrap_or(bytes)
}

/// A number, or the value of a constant of the source.
fn constant(text: &str, name: &str) -> Option<u32> {
    if let Ok(number) = name.parse() {
        return Some(number);
    }
    let (_, behind) = text.split_once(&format!("constexpr int {name} = "))?;
    behind.split_once(';')?.0.trim().parse().ok()
}

fn without_comments(text: &str) -> String {
    let lines = text.lines();
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
        let (bytes, fields) = layouts.of("Params").unwrap();
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
}
