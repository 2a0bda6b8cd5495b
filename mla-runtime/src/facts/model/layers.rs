//! Counts the layers of a model that have this attention: some models have linear attention in the
//! others, which has no cache of rows.

use serde_json::Value;

use super::{Fields, MAX_DIM, ModelError, missing, shown};

/// The layers of a model, by their attention.
pub(super) struct Layers {
    /// The number with multi-head latent attention, if the configuration says.
    pub(super) own: Option<u32>,
    /// The number with another attention.
    pub(super) other: u32,
}

/// Reads the first of three spellings that is there; without one, `all` have this attention.
pub(super) fn read(fields: &Fields<'_>, all: Option<u32>) -> Result<Layers, ModelError> {
    let split = |own: u32, all: u32| Layers {
        own: Some(own),
        other: all - own,
    };
    if let Some((field, types)) = fields.get("layer_types") {
        let (own, all) = by_types(field, types, all)?;
        return Ok(split(own, all));
    }
    let all_of_a_hybrid = || fields.required("num_hidden_layers", 1);
    if let Some((field, linear)) = fields.get("linear_attn_config") {
        let (field, all) = (format!("{field}.full_attn_layers"), all_of_a_hybrid()?);
        let own = by_numbers(field, linear.get("full_attn_layers"), all)?;
        return Ok(split(own, all));
    }
    let Some(size) = fields.optional("layer_group_size", 1)? else {
        return Ok(Layers { own: all, other: 0 });
    };
    let all = all_of_a_hybrid()?;
    if !all.is_multiple_of(size) {
        // Implementations differ in what the layers behind the last whole group have.
        return Err(ModelError::Invalid {
            field: "layer_group_size".into(),
            given: size.to_string(),
            accepted: format!("a divisor of num_hidden_layers, {all}, unless layer_types is there"),
        });
    }
    Ok(split(all / size, all))
}

/// `layer_types`: `["full_attention", "linear_attention", …]`. The layers with this attention, and
/// all.
fn by_types(field: String, types: &Value, all: Option<u32>) -> Result<(u32, u32), ModelError> {
    let has_len = |len: u32| len <= MAX_DIM && all.is_none_or(|all| len == all);
    let listed = types.as_array().and_then(|types| {
        let len = u32::try_from(types.len()).ok().filter(|len| has_len(*len));
        let names: Option<Vec<&str>> = types.iter().map(Value::as_str).collect();
        names.zip(len)
    });
    let Some((names, len)) = listed else {
        let layers = all.map_or_else(|| "the layers".into(), layers_of);
        return Err(invalid(field, types, "a list of strings", &layers));
    };
    let mut own = 0;
    for name in names {
        match name {
            "full_attention" | "deepseek_sparse_attention" => own += 1,
            "linear_attention" => {}
            other => return Err(missing::layer(field, other)),
        }
    }
    Ok((own, len))
}

/// `full_attn_layers`: the layers by number, of which the first is 1.
fn by_numbers(field: String, listed: Option<&Value>, all: u32) -> Result<u32, ModelError> {
    let Some(listed) = listed else {
        return Err(ModelError::Missing {
            field: "full_attn_layers",
            looked_for: field,
            accepted: "a list of the layers with full attention".into(),
        });
    };
    let numbers: Option<Vec<u64>> = listed.as_array().and_then(|numbers| {
        let accepted = 1..=u64::from(all);
        let number = |number: &Value| number.as_u64().filter(|number| accepted.contains(number));
        numbers.iter().map(number).collect()
    });
    match numbers.filter(|numbers| numbers.is_sorted_by(|a, b| a < b)) {
        // Different numbers of at most `all`.
        Some(numbers) => Ok(numbers.len() as u32),
        None => Err(invalid(
            field,
            listed,
            "ascending numbers from 1 on",
            &layers_of(all),
        )),
    }
}

fn layers_of(all: u32) -> String {
    format!("num_hidden_layers = {all}")
}

fn invalid(field: String, given: &Value, what: &str, layers: &str) -> ModelError {
    ModelError::Invalid {
        field,
        given: match given {
            Value::Array(items) => format!("an array of {}", items.len()),
            other => shown(other),
        },
        accepted: format!("{what}, of {layers}"),
    }
}
