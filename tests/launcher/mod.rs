//! A launch, worked out of a kernel's row of `code.json` and the numbers of a call. This contains
//! no offset of a parameter and nothing of a kernel.

use std::collections::BTreeMap;

use serde_json::Value;

/// The numbers of a call by name, such as `p.tokens`.
pub(crate) type Numbers = BTreeMap<String, i64>;

/// An expression of whole numbers, as `mla_build::code::Launch` says what is in one.
struct Expression<'a> {
    rest: &'a str,
    numbers: &'a Numbers,
}

impl<'a> Expression<'a> {
    fn value(text: &'a str, numbers: &'a Numbers) -> i64 {
        let mut expression = Self {
            rest: text,
            numbers,
        };
        let value = expression.comparison();
        assert_eq!(expression.rest.trim(), "", "{text}");
        value
    }

    /// Takes the first of these marks that comes next. A mark comes before its own beginning.
    fn take(&mut self, marks: &[&'static str]) -> Option<&'static str> {
        let rest = self.rest.trim_start();
        let mark = marks.iter().find(|&&mark| rest.starts_with(mark))?;
        self.rest = &rest[mark.len()..];
        Some(mark)
    }

    fn comparison(&mut self) -> i64 {
        let value = self.sum();
        let holds = match self.take(&["<=", "<", "=="]) {
            Some("<=") => value <= self.sum(),
            Some("<") => value < self.sum(),
            Some(_) => value == self.sum(),
            None => return value,
        };
        holds.into()
    }

    fn sum(&mut self) -> i64 {
        let mut value = self.product();
        while let Some(mark) = self.take(&["+", "-"]) {
            let other = self.product();
            value = if mark == "+" {
                value + other
            } else {
                value - other
            };
        }
        value
    }

    fn product(&mut self) -> i64 {
        let mut value = self.factor();
        while let Some(mark) = self.take(&["*", "//", "/", "%"]) {
            let other = self.factor();
            value = match mark {
                "*" => value * other,
                _ if other == 0 => 0,
                "//" => value.div_euclid(other),
                "/" => -(-value).div_euclid(other),
                _ => value.rem_euclid(other),
            };
        }
        value
    }

    fn factor(&mut self) -> i64 {
        if self.take(&["("]).is_some() {
            let value = self.comparison();
            assert!(self.take(&[")"]).is_some(), "{}", self.rest);
            return value;
        }
        let rest = self.rest.trim_start();
        let is_part = |c: char| c.is_ascii_alphanumeric() || "._[]".contains(c);
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        self.rest = behind;
        if self.take(&["("]).is_some() {
            let mut values = vec![self.comparison()];
            while self.take(&[","]).is_some() {
                values.push(self.comparison());
            }
            assert!(self.take(&[")"]).is_some(), "{}", self.rest);
            return match (name, &values[..]) {
                ("min", &[a, b]) => a.min(b),
                ("max", &[a, b]) => a.max(b),
                ("exp2", &[a]) => 1 << a,
                ("log2", &[a]) => (0..).find(|&n| 1 << n >= a).unwrap(),
                ("if", &[a, b, c]) => [b, c][usize::from(a == 0)],
                ("inverse", &[0]) => 0,
                ("inverse", &[a]) => (1.0 / a as f32).to_bits().into(),
                _ => panic!("no function of {} numbers is called {name:?}", values.len()),
            };
        }
        let number = name
            .parse()
            .ok()
            .or_else(|| self.numbers.get(name).copied());
        number.unwrap_or_else(|| panic!("no number is called {name:?}"))
    }
}

/// A launch that is ready for the driver.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    /// The bytes of each parameter.
    pub(crate) parameters: Vec<Vec<u8>>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) cluster: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) dependent: bool,
    pub(crate) maps: Vec<TensorMap>,
}

/// A tensor map, ready to be encoded into its place in a parameter.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TensorMap {
    pub(crate) parameter: usize,
    pub(crate) offset: usize,
    pub(crate) kind: String,
    pub(crate) address: i64,
    pub(crate) extents: Vec<u64>,
    pub(crate) strides: Vec<u64>,
    pub(crate) boxes: Vec<u32>,
    /// The swizzle, the promotion in L2 and the value outside.
    pub(crate) modes: [Value; 3],
}

pub(crate) fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

/// Writes a number at the row's offset, with the row's size in bytes.
fn put(bytes: &mut [u8], field: &Value, value: i64) {
    let size = number(&field["bytes"]);
    let value = value.to_le_bytes();
    bytes[..size].copy_from_slice(&value[..size]);
}

/// A field of a parameter, or a parameter that is a number.
pub(crate) struct Field<'a> {
    pub(crate) name: String,
    /// The number of its parameter, and its offset there.
    pub(crate) parameter: usize,
    pub(crate) offset: usize,
    pub(crate) row: &'a Value,
}

pub(crate) fn fields(kernel: &Value) -> Vec<Field<'_>> {
    let mut all = Vec::new();
    for (at, parameter) in kernel["parameters"].as_array().unwrap().iter().enumerate() {
        let name = parameter["name"].as_str().unwrap();
        let mut add = |name, offset, row| {
            all.push(Field {
                name,
                parameter: at,
                offset,
                row,
            });
        };
        match parameter["fields"].as_array() {
            Some(fields) => fields.iter().for_each(|row| {
                let name = format!("{name}.{}", row["name"].as_str().unwrap());
                add(name, number(&row["offset"]), row);
            }),
            None => add(name.to_owned(), 0, parameter),
        }
    }
    all
}

pub(crate) fn launch(kernel: &Value, given: &Numbers) -> Launch {
    let row = &kernel["launch"];
    let mut numbers = given.clone();
    let mut names: Vec<String> = match &row["choices"] {
        Value::Object(choices) => choices.keys().cloned().collect(),
        _ => Vec::new(),
    };
    let fields = fields(kernel);
    for field in fields.iter().filter(|it| it.row["value"].is_null()) {
        // A field that the caller does not name is 0: a null pointer, or a part that is absent.
        numbers.entry(field.name.clone()).or_default();
    }
    let all = kernel["parameters"].as_array().unwrap().iter();
    let mut parameters: Vec<_> = all.map(|it| vec![0; number(&it["bytes"])]).collect();
    let mut map_places = BTreeMap::new();
    for field in fields {
        let (name, place) = (field.name, (field.parameter, field.offset));
        if field.row["type"] == "CUtensorMap" {
            map_places.insert(name, place);
            continue;
        }
        if let Some(value) = field.row["value"].as_str() {
            numbers.insert(name.clone(), Expression::value(value, &numbers));
        }
        put(
            &mut parameters[place.0][place.1..],
            field.row,
            numbers[&name],
        );
        names.push(name);
    }
    for name in given.keys() {
        assert!(names.contains(name), "the kernel has no {name}");
    }
    let value = |text: &Value| Expression::value(text.as_str().unwrap(), &numbers);
    let axes = |axis: &dyn Fn(usize) -> i64| [0, 1, 2].map(|at| u32::try_from(axis(at)).unwrap());
    let maps = row["tensor_maps"].as_array().unwrap().iter();
    let maps = maps.filter(|map| value(&map["read"]) != 0).map(|map| {
        let (parameter, offset) = map_places[map["field"].as_str().unwrap()];
        let all = |name: &str| {
            let values = map[name].as_array().unwrap().iter().map(value);
            values
                .map(|it| u64::try_from(it).unwrap())
                .collect::<Vec<_>>()
        };
        TensorMap {
            parameter,
            offset,
            kind: map["type"].as_str().unwrap().to_owned(),
            address: value(&map["address"]),
            extents: all("extents"),
            strides: all("strides"),
            boxes: all("box").into_iter().map(|it| it as u32).collect(),
            modes: ["swizzle", "l2_promotion", "fill"].map(|name| map[name].clone()),
        }
    });
    let maps = maps.collect();
    Launch {
        maps,
        parameters,
        grid: axes(&|at| value(&row["grid"][at])),
        block: axes(&|at| row["block"][at].as_i64().unwrap()),
        cluster: axes(&|at| value(&row["cluster"][at])),
        shared: u32::try_from(value(&row["dynamic_shared"])).unwrap(),
        dependent: row["dependent_launch"].as_bool().unwrap(),
    }
}

pub(crate) fn numbers<const N: usize>(given: [(&str, i64); N]) -> Numbers {
    given.map(|(name, value)| (name.to_owned(), value)).into()
}
