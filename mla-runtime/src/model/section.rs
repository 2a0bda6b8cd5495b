//! Reads the rotary embedding from a configuration. It has one section, or one for each kind of
//! layer.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::fields::{Fields, absent, contradiction, integer, invalid, shown, unknown_key};
use super::names;
use super::rope::{OTHER_SCALINGS, QueryScaling, Rope, RopeScaling, Yarn};
use crate::model::RotaryStyle;
use crate::{Error, Result};

const ABOVE_ONE: &str = "a number above 1";
const POSITIVE: &str = "a number above 0";
const NOT_NEGATIVE: &str = "a number, at least 0";
const ORIGINAL: &str = "original_max_position_embeddings";

/// Keys that any section may have, whatever its kind.
const COMMON: &[&str] = &[
    "type",
    "rope_type",
    "rope_theta",
    "max_position_embeddings",
    ORIGINAL,
    "llama_4_scaling_beta",
    // This key never shrinks R, which `qk_rope_head_dim` gives.
    "partial_rotary_factor",
];

/// The additional keys of yarn.
const OF_YARN: &[&str] = &[
    "factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "attn_factor",
    "extrapolation_factor",
    "truncate",
    "apply_yarn_scaling",
    "apply_scale",
];

/// The additional keys of kinds for which the engine makes the tables.
const OF_OTHERS: &[&str] = &[
    "factor",
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "low_freq_factor",
    "high_freq_factor",
    "alpha",
    "attention_factor",
    "mrope_section",
    "mrope_interleaved",
];

/// Keys in Mistral's own files, with their names in a section.
const OF_PARAMS: &[(&str, &str)] = &[
    ("factor", "factor"),
    ("beta", "beta_fast"),
    ("alpha", "beta_slow"),
    ("apply_scale", "apply_scale"),
    (ORIGINAL, ORIGINAL),
];

/// Kinds of layers for which a section may contain a section of its own.
const KINDS: &[&str] = &[
    "full_attention",
    "attention",
    "deepseek_sparse_attention",
    "sparse_attention",
    "sparse",
    "indexed_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
];

/// Kinds of layers without latent attention.
const OTHER_KINDS: &[&str] = &["sliding_attention", "chunked_attention", "linear_attention"];

/// Reads the rotary embedding of a configuration, and its scale factor of queries.
pub(super) fn read(fields: &Fields<'_>) -> Result<(Rope, Option<QueryScaling>)> {
    let section = section(fields)?;
    let section = section.as_ref();
    let max_positions = fields.count("max_position_embeddings")?;
    let inside = match section {
        Some(section) if !section.is_around_base(fields) => {
            section.number("rope_theta", ABOVE_ONE, |theta| theta > 1.0)?
        }
        _ => None,
    };
    let theta = match inside {
        None => fields.number("rope_theta", ABOVE_ONE, |theta| theta > 1.0)?,
        inside => inside,
    };
    let scaling = match section {
        Some(section) => section.scaling(max_positions)?,
        None => RopeScaling::Plain,
    };
    let rope = Rope::plain(theta.unwrap_or(10000.0))
        .with_style(style(fields)?)
        .with_scaling(scaling)
        .with_rotates(!fields.flag("mla_use_nope")?);
    let rope = Rope {
        max_positions,
        ..rope
    };
    Ok((rope, query_scaling(fields, section)?))
}

fn style(fields: &Fields<'_>) -> Result<RotaryStyle> {
    Ok(match fields.switch("rope_interleave")? {
        Some(false) => RotaryStyle::Halves,
        _ => RotaryStyle::Interleaved,
    })
}

/// `rope_scaling`, or an equivalent of it.
struct Section<'a> {
    path: String,
    values: Cow<'a, Map<String, Value>>,
    /// The context before the extension, if the configuration gives it outside the section.
    outer_original: Option<u32>,
}

/// The section of the innermost object that has one.
fn section<'a>(fields: &Fields<'a>) -> Result<Option<Section<'a>>> {
    let mut found = None;
    for (level, object) in fields.levels() {
        for name in ["rope_scaling", "rope_parameters"] {
            let (path, values) = match object.get(name) {
                None | Some(Value::Null) => continue,
                Some(Value::Object(values)) if values.values().all(Value::is_null) => continue,
                Some(Value::Object(values)) => (format!("{level}{name}"), values),
                Some(value) => {
                    let field = format!("{level}{name}");
                    return Err(invalid(field, value, "an object or null"));
                }
            };
            match &found {
                None => found = Some((path, values)),
                Some((winner, wins)) => check_base(fields, (winner, wins), (&path, values))?,
            }
        }
    }
    let params = match of_params(fields)? {
        None => of_inference(fields),
        params => params,
    };
    match (found, params) {
        (Some((path, _)), Some(params)) => {
            Err(contradiction(params.path, "a section", path, "another"))
        }
        (None, params) => Ok(params),
        (Some((path, values)), None) => of_layers(fields, path, values).map(Some),
    }
}

/// Refuses a base that would be lost, because the section that replaces it has none.
fn check_base(
    fields: &Fields<'_>,
    (winner, wins): (&str, &Map<String, Value>),
    (path, values): (&str, &Map<String, Value>),
) -> Result<()> {
    let key = "rope_theta";
    let given = |section: &'_ Map<String, Value>| section.get(key).is_some_and(|it| !it.is_null());
    if !given(values) || given(wins) || fields.get(key).is_some() {
        return Ok(());
    }
    Err(contradiction(
        format!("{path}.{key}"),
        shown(&values[key]),
        winner,
        "nothing",
    ))
}

/// The section itself. If it contains sections by kind of layer, it is the one of this model's
/// kinds.
fn of_layers<'a>(
    fields: &Fields<'a>,
    path: String,
    values: &'a Map<String, Value>,
) -> Result<Section<'a>> {
    if !values.keys().all(|key| KINDS.contains(&key.as_str())) {
        return Ok(Section {
            path,
            values: Cow::Borrowed(values),
            outer_original: fields.count(ORIGINAL)?,
        });
    }
    let mut chosen: Option<Section<'a>> = None;
    let given = values.keys().map(String::as_str);
    let own = given.filter(|word| !OTHER_KINDS.contains(word));
    for word in fields.own_layer_types().unwrap_or_else(|| own.collect()) {
        let path = format!("{path}.{word}");
        let inner = match values.get(word) {
            Some(Value::Object(inner)) => inner,
            Some(value) => return Err(invalid(path, value, "an object")),
            None => {
                return Err(Error::argument(
                    path,
                    "nothing",
                    "an object: there are layers of this kind",
                ));
            }
        };
        match &chosen {
            Some(first) if *first.values != *inner => {
                return Err(Error::Unsupported {
                    field: path,
                    given: "another section than layers of another kind".to_owned(),
                    missing: "rotations that differ by layer",
                });
            }
            _ => {
                chosen = Some(Section {
                    path,
                    values: Cow::Borrowed(inner),
                    outer_original: None,
                });
            }
        }
    }
    chosen.ok_or_else(|| {
        Error::argument(
            path,
            "a section for each kind of layer",
            "a model with layers of one of them",
        )
    })
}

/// Mistral's own `yarn`, under the names of a section. Its scale corresponds to an `mscale_all_dim`
/// of 1.
fn of_params<'a>(fields: &Fields<'_>) -> Result<Option<Section<'a>>> {
    let Some((path, value)) = fields.get("yarn") else {
        return Ok(None);
    };
    let Some(object) = value.as_object() else {
        return Err(invalid(path, value, "an object or null"));
    };
    let mut values = Map::from_iter([
        ("type".to_owned(), json!("yarn")),
        ("mscale".to_owned(), json!(1)),
        ("mscale_all_dim".to_owned(), json!(1)),
    ]);
    for (key, value) in object {
        match OF_PARAMS.iter().find(|(name, _)| name == key) {
            Some((_, name)) => values.insert((*name).to_owned(), value.clone()),
            None => {
                return Err(unknown_key(format!("{path}.{key}"), shown(value)));
            }
        };
    }
    Ok(Some(Section {
        path,
        values: Cow::Owned(values),
        outer_original: None,
    }))
}

/// The section equivalent to a file of DeepSeek's own inference program. Its rotation always has
/// yarn, even if the file does not mention it.
fn of_inference<'a>(fields: &Fields<'_>) -> Option<Section<'a>> {
    let mut values = Map::from_iter([("type".to_owned(), json!("yarn"))]);
    for (name, own, default) in names::OF_INFERENCE {
        let given = fields.get(name).map(|(_, value)| value.clone());
        values.insert((*own).to_owned(), given.unwrap_or_else(|| json!(default)));
    }
    fields.is_of_inference().then_some(Section {
        path: "ModelArgs".to_owned(),
        values: Cow::Owned(values),
        outer_original: None,
    })
}

impl Section<'_> {
    fn get(&self, field: &str) -> Option<&Value> {
        self.values.get(field).filter(|value| !value.is_null())
    }

    fn invalid(&self, field: &str, value: &Value, accepted: &str) -> Error {
        invalid(format!("{}.{field}", self.path), value, accepted)
    }

    fn number(&self, field: &str, accepted: &str, accepts: fn(f64) -> bool) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        let number = value.as_f64().filter(|n| n.is_finite() && accepts(*n));
        let number = number.ok_or_else(|| self.invalid(field, value, accepted))?;
        Ok(Some(number))
    }

    fn positive(&self, field: &str, default: f64) -> Result<f64> {
        let number = self.number(field, POSITIVE, |number| number > 0.0)?;
        Ok(number.unwrap_or(default))
    }

    fn not_negative(&self, field: &str, default: f64) -> Result<f64> {
        let number = self.number(field, NOT_NEGATIVE, |number| number >= 0.0)?;
        Ok(number.unwrap_or(default))
    }

    fn required(&self, field: &'static str) -> Result<f64> {
        let number = self.number(field, POSITIVE, |factor| factor > 0.0)?;
        number.ok_or_else(|| absent(field, &format!("{}.{field}", self.path), POSITIVE))
    }

    /// The kind of scaling, from either of two names. They must agree.
    fn kind(&self) -> Result<&str> {
        let mut kinds = Vec::new();
        for field in ["rope_type", "type"] {
            match self.get(field) {
                None => {}
                Some(Value::String(kind)) => kinds.push((field, kind.as_str())),
                Some(other) => {
                    return Err(self.invalid(field, other, "a string, such as \"yarn\""));
                }
            }
        }
        match kinds[..] {
            [(first, a), (second, b)] if canonical(a) != canonical(b) => Err(contradiction(
                format!("{}.{second}", self.path),
                b,
                format!("{}.{first}", self.path),
                a,
            )),
            [(_, kind), ..] => Ok(kind),
            // Without a kind, the meaning of the factor would be a guess.
            [] if self.get("mscale_all_dim").is_some() || self.get("factor").is_some() => {
                Err(absent(
                    "type",
                    &format!("{path}.type or {path}.rope_type", path = self.path),
                    "a string; \"yarn\" if mscale_all_dim is to apply",
                ))
            }
            [] => Ok("default"),
        }
    }

    /// Refuses keys that a kind of scaling does not have.
    fn check_keys(&self, own: &[&str]) -> Result<()> {
        let known = |key: &str| COMMON.contains(&key) || own.contains(&key);
        let mut given = self.values.iter().filter(|(_, value)| !value.is_null());
        match given.find(|(key, _)| !known(key)) {
            None => Ok(()),
            Some((key, value)) => Err(unknown_key(format!("{}.{key}", self.path), shown(value))),
        }
    }

    fn scaling(&self, max_positions: Option<u32>) -> Result<RopeScaling> {
        let kind = self.kind()?;
        let positions = self.count("max_position_embeddings")?;
        if let (Some(inside), Some(outside)) = (positions, max_positions)
            && inside != outside
        {
            return Err(contradiction(
                format!("{}.max_position_embeddings", self.path),
                inside,
                "max_position_embeddings",
                outside,
            ));
        }
        match canonical(kind) {
            "default" if self.get("mrope_section").is_some() => {
                self.check_keys(OF_OTHERS)?;
                Ok(RopeScaling::Other { kind: "mrope" })
            }
            "default" => {
                self.check_keys(&[])?;
                Ok(RopeScaling::Plain)
            }
            "linear" => {
                self.check_keys(&["factor"])?;
                let factor = self.required("factor")?;
                Ok(RopeScaling::Linear { factor })
            }
            "yarn" => self.yarn(max_positions),
            _ => {
                self.check_keys(OF_OTHERS)?;
                // The error about missing tables quotes this name.
                match OTHER_SCALINGS.iter().find(|known| **known == kind) {
                    Some(kind) => Ok(RopeScaling::Other { kind }),
                    None => {
                        let others = OTHER_SCALINGS.join(", ");
                        Err(Error::argument(
                            format!("{}.type", self.path),
                            format!("{kind:?}"),
                            format!("default, linear, yarn, deepseek_yarn, {others} or none"),
                        ))
                    }
                }
            }
        }
    }

    /// True if an object within that of the section has a base of its own.
    fn is_around_base(&self, fields: &Fields<'_>) -> bool {
        let levels = fields.levels().iter();
        let mut inner = levels.take_while(|(level, _)| !self.path.starts_with(level));
        inner.any(|(_, object)| object.get("rope_theta").is_some_and(|it| !it.is_null()))
    }

    fn flag(&self, field: &str, default: bool) -> Result<bool> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.invalid(field, other, "true or false")),
        }
    }

    fn count(&self, field: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        let count = integer(value).filter(|count| *count > 0);
        let count = count.ok_or_else(|| self.invalid(field, value, "an integer above 0"))?;
        Ok(Some(count))
    }

    /// The context before the extension. A value outside the section wins over one inside.
    fn original_positions(&self) -> Result<Option<u32>> {
        let inside = self.count(ORIGINAL)?;
        Ok(self.outer_original.or(inside))
    }

    fn yarn(&self, max_positions: Option<u32>) -> Result<RopeScaling> {
        self.check_keys(OF_YARN)?;
        let original = self.original_positions()?.or(max_positions);
        let plain = Yarn::new(self.required("factor")?, original);
        let applies_scale = self.flag("apply_yarn_scaling", plain.applies_scale)?
            && self.flag("apply_scale", plain.applies_scale)?;
        Ok(RopeScaling::Yarn(Yarn {
            beta_fast: self.positive("beta_fast", plain.beta_fast)?,
            beta_slow: self.positive("beta_slow", plain.beta_slow)?,
            mscale: self.not_negative("mscale", plain.mscale)?,
            mscale_all_dim: self.not_negative("mscale_all_dim", plain.mscale_all_dim)?,
            given_attention_factor: self
                .number("attention_factor", POSITIVE, |number| number > 0.0)?,
            attn_factor: self.positive("attn_factor", plain.attn_factor)?,
            extrapolation_factor: self
                .not_negative("extrapolation_factor", plain.extrapolation_factor)?,
            truncate: self.flag("truncate", plain.truncate)?,
            applies_scale,
            ..plain
        }))
    }

    /// A section's scale factor of queries.
    fn query_scaling(&self, key: &'static str) -> Result<Option<QueryScaling>> {
        let beta = self.not_negative(key, 0.0)?;
        if beta == 0.0 {
            return Ok(None);
        }
        let original = self.original_positions()?;
        let original = original.ok_or_else(|| {
            absent(
                ORIGINAL,
                &format!("{}.{ORIGINAL}", self.path),
                format!("an integer above 0, from which {key} counts"),
            )
        })?;
        Ok(Some(QueryScaling::new(beta, original)))
    }
}

/// The usual name of a kind of scaling.
fn canonical(kind: &str) -> &str {
    match kind {
        "none" => "default",
        "deepseek_yarn" => "yarn",
        "su" => "longrope",
        kind => kind,
    }
}

/// The scale factor of queries by their position, from the section or from Mistral's own
/// `llama_4_scaling`.
fn query_scaling(
    fields: &Fields<'_>,
    section: Option<&Section<'_>>,
) -> Result<Option<QueryScaling>> {
    let inside = match section {
        Some(section) => section.query_scaling("llama_4_scaling_beta")?,
        None => None,
    };
    let own = match fields.get("llama_4_scaling") {
        None => return Ok(inside),
        Some((path, Value::Object(values))) => Section {
            path,
            values: Cow::Borrowed(values),
            outer_original: None,
        },
        Some((field, value)) => return Err(invalid(field, value, "an object or null")),
    };
    own.check_keys(&["beta"])?;
    let given = own.query_scaling("beta")?;
    match (inside, given) {
        (Some(a), Some(b)) if a != b => Err(contradiction(
            own.path,
            shown_scaling(b),
            "llama_4_scaling_beta",
            shown_scaling(a),
        )),
        (inside, given) => Ok(inside.or(given)),
    }
}

fn shown_scaling(scaling: QueryScaling) -> String {
    let QueryScaling {
        beta,
        original_max_positions,
    } = scaling;
    format!("a beta of {beta} beyond {original_max_positions} positions")
}
