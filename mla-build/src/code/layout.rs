//! The layout of structures, read from bindings. bindgen writes the size of each structure and the
//! offset of each field, and the compiler checks them against its own layout.

use std::collections::BTreeMap;

use super::Field;

/// The structures of a package's bindings.
#[derive(Debug, Default)]
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
    let fields = lines.map(|line| {
        let (field, kind) = line.trim_end_matches(',').split_once(": ")?;
        let offset = value(text, &format!("\"Offset of field: {name}::{field}\""))?;
        let (kind, bytes) = sized(kind)?;
        Some(Field {
            name: field.to_owned(),
            kind,
            offset,
            bytes,
        })
    });
    Some((size, fields.collect::<Option<_>>()?))
}

/// Returns the number that bindgen compares behind a text.
fn value(text: &str, label: &str) -> Option<u32> {
    let behind = &text[text.find(label)? + label.len()..];
    let statement = behind.split_once(';')?.0;
    let number = statement.rsplit_once("- ")?.1;
    number.trim_end_matches("usize]").parse().ok()
}

/// Returns a field's type as descriptions name it, and its size in bytes.
fn sized(kind: &str) -> Option<(String, u32)> {
    if kind.starts_with('*') {
        return Some(("pointer".to_owned(), 8));
    }
    if let Some(array) = kind.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
        let (element, count) = array.split_once("; ")?;
        let (_, bytes) = sized(element)?;
        let count: u32 = count.trim_end_matches("usize").parse().ok()?;
        return Some((kind.to_owned(), bytes * count));
    }
    Some((kind.to_owned(), number(kind)?))
}

fn number(kind: &str) -> Option<u32> {
    match kind {
        "i8" | "u8" => Some(1),
        "i16" | "u16" => Some(2),
        "i32" | "u32" | "f32" => Some(4),
        "i64" | "u64" | "f64" => Some(8),
        _ => None,
    }
}
