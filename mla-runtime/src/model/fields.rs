//! The objects of a configuration, and typed access to their fields.

use std::borrow::Cow;
use std::fmt::Display;

use serde_json::{Map, Value};

use super::{MAX_DIM, MAX_POSITIONS, names};
use crate::model::DType;
use crate::{Error, Result};

/// The objects in which fields are looked for, each with its path. The innermost object comes
/// first.
pub(super) struct Fields<'a> {
    levels: Vec<(String, &'a Map<String, Value>)>,
}

fn object<'a>(value: &'a Value, place: &'static str) -> Result<&'a Map<String, Value>> {
    value
        .as_object()
        .ok_or_else(|| Error::argument(place, shown(value), "a JSON object"))
}

/// The fields of an object that are not null and have one of a key's spellings.
fn present<'a>(object: &'a Map<String, Value>, field: &str) -> Option<(String, &'a Value)> {
    names::spellings(field).find_map(|name| {
        let value = object.get(name).filter(|value| !value.is_null())?;
        Some((name.to_owned(), value))
    })
}

/// Returns true if an object, or an object within it, gives the width of latents.
fn holds_dims(object: &Map<String, Value>) -> bool {
    let within = |name: &&str| object.get(*name).and_then(Value::as_object);
    present(object, "kv_lora_rank").is_some()
        || names::NESTED.iter().filter_map(within).any(holds_dims)
}

/// An object within another, with its name.
type Named<'a> = (&'static str, &'a Map<String, Value>);

/// The text model within an object, if there is one: the inner object that has the dimensions.
fn text_model(outer: &Map<String, Value>) -> Result<Option<Named<'_>>> {
    let mut found = Vec::new();
    for name in names::NESTED {
        if let Some(value) = outer.get(*name).filter(|value| !value.is_null()) {
            found.push((*name, object(value, name)?));
        }
    }
    let mut holding = found.iter().filter(|(_, inner)| holds_dims(inner));
    match (holding.next(), holding.next()) {
        (Some((first, _)), Some((second, _))) => Err(Error::argument(
            (*second).to_owned(),
            "an object",
            format!("one text model, as {first} has it"),
        )),
        // An object without dimensions may still have other fields of attention.
        (one, _) => Ok(one.or(found.first()).copied()),
    }
}

impl<'a> Fields<'a> {
    pub(super) fn new(value: &'a Value) -> Result<Self> {
        let mut levels = vec![(String::new(), object(value, "config")?)];
        while let Some((path, outer)) = levels.last()
            && let Some((name, inner)) = text_model(outer)?
        {
            levels.push((format!("{path}{name}."), inner));
        }
        levels.reverse();
        Ok(Self { levels })
    }

    /// The objects, the innermost first. Each has the path that precedes a field's name.
    pub(super) fn levels(&self) -> &[(String, &'a Map<String, Value>)] {
        &self.levels
    }

    /// Refuses a model with another form of attention, which has neither of two fields of latent
    /// attention. A model that lacks only one of them gets an error about the missing field
    /// instead.
    pub(super) fn check_form(&self) -> Result<()> {
        let field = "kv_lora_rank";
        if self.get(field).is_some() || self.get("qk_nope_head_dim").is_some() {
            return Ok(());
        }
        Err(absent(
            field,
            &self.looked_for(field),
            "a model with Multi-head Latent Attention",
        ))
    }

    /// A field that is present and not null, with its path. The innermost object that has the field
    /// wins. The default of the model's family comes last.
    pub(super) fn get(&self, field: &str) -> Option<(String, &'a Value)> {
        let given = self.levels.iter().find_map(|(path, object)| {
            present(object, field).map(|(name, value)| (format!("{path}{name}"), value))
        });
        given.or_else(|| self.default(field))
    }

    /// The default value of a field in the model's family.
    fn default(&self, field: &str) -> Option<(String, &'a Value)> {
        let families = names::DEFAULTS.as_object()?.iter();
        let mut own = families.filter(|(family, _)| self.is_of(&[family.as_str()]));
        own.find_map(|(family, defaults)| {
            let (name, value) = present(defaults.as_object()?, field)?;
            Some((format!("{name} by default in {family}"), value))
        })
    }

    /// Returns true if a field is present, even if it is null.
    pub(super) fn has_key(&self, field: &str) -> bool {
        self.levels
            .iter()
            .any(|(_, object)| object.contains_key(field))
    }

    /// Returns true for a configuration of DeepSeek's own inference program.
    pub(super) fn is_of_inference(&self) -> bool {
        self.has_key("inter_dim")
    }

    /// Returns true if the model, or a model around it, is of one of these families.
    pub(super) fn is_of(&self, families: &[&str]) -> bool {
        self.named(families).is_some()
    }

    /// The field that says that the model, or a model around it, is of one of these families, with
    /// its path. Its `model_type` or one of its `architectures` begins with the family's name.
    /// Names of architectures are written without underscores, in any case.
    pub(super) fn named(&self, families: &[&str]) -> Option<(String, &'a str)> {
        let plain = |name: &str| name.replace('_', "").to_lowercase();
        let is_own = |name: &str| {
            let name = plain(name);
            families.iter().any(|own| name.starts_with(&plain(own)))
        };
        self.levels.iter().find_map(|(path, object)| {
            ["model_type", "architectures"].iter().find_map(|field| {
                let names = match object.get(*field)? {
                    Value::Array(names) => &names[..],
                    name => std::slice::from_ref(name),
                };
                let mut names = names.iter().filter_map(Value::as_str);
                Some((format!("{path}{field}"), names.find(|name| is_own(name))?))
            })
        })
    }

    /// The names in `layer_types` of layers with latent attention, if there is such a list.
    pub(super) fn own_layer_types(&self) -> Option<Vec<&'a str>> {
        let types = self.get("layer_types").and_then(|(_, it)| it.as_array())?;
        let mut words: Vec<&str> = types.iter().filter_map(Value::as_str).collect();
        words.retain(|word| *word != "linear_attention");
        words.sort_unstable();
        words.dedup();
        Some(words)
    }

    /// The places where a field was looked for but not found.
    pub(super) fn looked_for(&self, field: &str) -> String {
        let places = self.levels.iter().map(|(path, _)| format!("{path}{field}"));
        places.collect::<Vec<_>>().join(" or ")
    }

    pub(super) fn optional(&self, field: &str, min: u32) -> Result<Option<u32>> {
        let Some((path, value)) = self.get(field) else {
            return Ok(None);
        };
        integer(value)
            .filter(|number| (min..=MAX_DIM).contains(number))
            .map(Some)
            .ok_or_else(|| invalid(path, value, &accepted(min)))
    }

    /// A positive number. The values 0 and −1 mean that there is none.
    pub(super) fn optional_or_none(&self, field: &str) -> Result<Option<u32>> {
        match self.get(field) {
            Some((_, value)) if matches!(value.as_f64(), Some(0.0 | -1.0)) => Ok(None),
            _ => self.optional(field, 1),
        }
    }

    pub(super) fn required(&self, field: &'static str, min: u32) -> Result<u32> {
        self.optional(field, min)?
            .ok_or_else(|| absent(field, &self.looked_for(field), accepted(min)))
    }

    pub(super) fn v_head_dim(&self, heads: u32) -> Result<u32> {
        let field = "v_head_dim";
        if self.get(field).is_some() || !self.is_of(&["minicpm3"]) {
            return self.required(field, 1);
        }
        let hidden = self.required("hidden_size", 1)?;
        if !hidden.is_multiple_of(heads) {
            return Err(Error::argument(
                "hidden_size",
                hidden,
                format!("a multiple of num_attention_heads, {heads}, where v_head_dim is left out"),
            ));
        }
        Ok(hidden / heads)
    }

    /// Refuses a width that contradicts other fields.
    pub(super) fn check_width(&self, field: &str, expected: u32) -> Result<()> {
        match (self.get(field), self.optional(field, 0)?) {
            (Some((path, value)), Some(given)) if given != expected => Err(invalid(
                path,
                value,
                &format!("{expected}, as other fields have it"),
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn dtype(&self) -> Result<Option<DType>> {
        let parse = |path: String, value: &Value| {
            let name = value.as_str();
            let dtype = match name.map(|name| name.strip_prefix("torch.").unwrap_or(name)) {
                Some("float32") => DType::F32,
                Some("float16") => DType::F16,
                // In DeepSeek's own files fp8 is the type of the weights; activations are bf16.
                Some("bfloat16" | "bf16" | "fp8") => DType::BF16,
                _ => return Err(invalid(path, value, "float32, float16 or bfloat16")),
            };
            Ok((path, dtype))
        };
        for (path, object) in &self.levels {
            let read = |field: &str| {
                let value = object.get(field).filter(|value| !value.is_null());
                let parsed = value.map(|value| parse(format!("{path}{field}"), value));
                parsed.transpose()
            };
            match (read("dtype")?, read("torch_dtype")?) {
                (Some((first, a)), Some((second, b))) if a != b => {
                    return Err(contradiction(first, a, second, b));
                }
                (None, None) => {}
                (new, old) => return Ok(new.or(old).map(|(_, dtype)| dtype)),
            }
        }
        Ok(None)
    }

    /// Returns true if a flag is present and true.
    pub(super) fn flag(&self, field: &str) -> Result<bool> {
        Ok(self.switch(field)?.unwrap_or(false))
    }

    /// The value of a flag, if it is present.
    pub(super) fn switch(&self, field: &str) -> Result<Option<bool>> {
        match self.get(field) {
            None => Ok(None),
            Some((_, Value::Bool(flag))) => Ok(Some(*flag)),
            Some((field, value)) => Err(invalid(field, value, "true or false")),
        }
    }

    /// A positive integer, as large as a position can be.
    pub(super) fn count(&self, field: &str) -> Result<Option<u32>> {
        let Some((path, value)) = self.get(field) else {
            return Ok(None);
        };
        let count = integer(value).filter(|count| (1..=MAX_POSITIONS).contains(count));
        count.map(Some).ok_or_else(|| {
            let accepted = format!("an integer from 1 to {MAX_POSITIONS}");
            invalid(path, value, &accepted)
        })
    }

    pub(super) fn number(
        &self,
        field: &str,
        accepted: &str,
        accepts: fn(f64) -> bool,
    ) -> Result<Option<f64>> {
        let Some((path, value)) = self.get(field) else {
            return Ok(None);
        };
        let number = value.as_f64().filter(|n| n.is_finite() && accepts(*n));
        number
            .map(Some)
            .ok_or_else(|| invalid(path, value, accepted))
    }
}

/// An integer. Some files write it with a decimal point: 4096.0.
pub(super) fn integer(value: &Value) -> Option<u32> {
    let number = value.as_f64()?;
    let is_count = number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number);
    // The conversion is exact, because the number is an integer of 32 bits.
    is_count.then_some(number as u32)
}

pub(super) fn invalid(field: String, given: &Value, accepted: &str) -> Error {
    Error::argument(field, shown(given), accepted)
}

/// The refusal of a field that has no default and is not there.
pub(super) fn absent(field: &'static str, looked_for: &str, accepted: impl Display) -> Error {
    let given = match looked_for == field {
        true => "nothing".to_owned(),
        false => format!("nothing as {looked_for}"),
    };
    Error::argument(field, given, accepted)
}

/// The refusal of a field that says something else than another.
pub(super) fn contradiction(
    field: impl Into<Cow<'static, str>>,
    given: impl Display,
    other: impl Display,
    accepted: impl Display,
) -> Error {
    Error::argument(field, given, format!("{accepted}, as {other} has it"))
}

/// The refusal of a key whose name may be one of attention, and which is not known.
pub(super) fn unknown_key(key: String, given: impl Display) -> Error {
    let accepted = "nothing or null: it is not known if this changes the attention";
    Error::argument(key, given, accepted)
}

fn accepted(min: u32) -> String {
    format!("an integer from {min} to {MAX_DIM}")
}

/// Shows a JSON value in one short line.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".into(),
        Value::Array(_) => "an array".into(),
        other => {
            let text = other.to_string();
            match text.char_indices().nth(60) {
                Some((end, _)) => format!("{}…", &text[..end]),
                None => text,
            }
        }
    }
}

/// Parses JSON as Python writes it. Such a text may begin with a byte order mark, and it may
/// contain numbers that JSON lacks, such as NaN. They become strings, which no numeric field
/// accepts.
pub(super) fn parse(text: &str) -> Result<Value> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    serde_json::from_str(&with_quoted_numbers(text)).map_err(|error| {
        Error::argument(
            "config",
            format!("text that is not JSON ({error})"),
            "a model's config.json",
        )
    })
}

fn with_quoted_numbers(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    let (mut rest, mut in_string) = (text, false);
    while let Some(next) = rest.chars().next() {
        let number = ["NaN", "Infinity", "-Infinity"]
            .into_iter()
            .find(|number| !in_string && rest.starts_with(number));
        if let Some(number) = number {
            quoted.extend(["\"", number, "\""]);
            rest = &rest[number.len()..];
            continue;
        }
        // An escaped quote does not end the string.
        let escaped = rest.chars().nth(1).filter(|_| in_string && next == '\\');
        in_string ^= next == '"';
        quoted.push(next);
        quoted.extend(escaped);
        rest = &rest[next.len_utf8() + escaped.map_or(0, char::len_utf8)..];
    }
    quoted
}
