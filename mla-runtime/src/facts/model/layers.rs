//! How many layers of a model have this attention: some models have linear attention in the others,
//! which has no cache of rows.

use serde_json::Value;

use super::{Fields, ModelError, missing, shown};

/// The layers with this attention, of `all` layers, by the first of three spellings that is there.
pub(super) fn with_this_attention(
    fields: &Fields<'_>,
    all: Option<u32>,
) -> Result<Option<u32>, ModelError> {
    if let Some((field, types)) = fields.get("layer_types") {
        return by_types(field, types, all).map(Some);
    }
    if let Some((field, linear)) = fields.get("linear_attn_config") {
        let listed = linear.get("full_attn_layers");
        return by_numbers(format!("{field}.full_attn_layers"), listed, all).map(Some);
    }
    match (fields.optional("layer_group_size", 1)?, all) {
        (Some(size), Some(all)) if all.is_multiple_of(size) => Ok(Some(all / size)),
        // Implementations differ in what the layers behind the last whole group have.
        (Some(size), Some(all)) => Err(ModelError::Invalid {
            field: "layer_group_size".into(),
            given: size.to_string(),
            accepted: format!("a divisor of num_hidden_layers, {all}, unless layer_types is there"),
        }),
        (_, all) => Ok(all),
    }
}

/// `layer_types`: `["full_attention", "linear_attention", …]`.
fn by_types(field: String, types: &Value, all: Option<u32>) -> Result<u32, ModelError> {
    let listed = types.as_array().filter(|types| has_len(types, all));
    let names: Option<Vec<&str>> =
        listed.and_then(|types| types.iter().map(Value::as_str).collect());
    let Some(names) = names else {
        return Err(invalid(field, types, "a list of strings", all));
    };
    let mut count = 0;
    for name in names {
        match name {
            "full_attention" | "deepseek_sparse_attention" => count += 1,
            "linear_attention" => {}
            other => return Err(missing::layer(field, other)),
        }
    }
    Ok(count)
}

/// `full_attn_layers`: the layers by number, of which the first is 1.
fn by_numbers(field: String, listed: Option<&Value>, all: Option<u32>) -> Result<u32, ModelError> {
    let Some(listed) = listed else {
        return Err(ModelError::Missing {
            field: "full_attn_layers",
            looked_for: field,
            accepted: "a list of the layers with full attention".into(),
        });
    };
    let last = u64::from(all.unwrap_or(super::MAX_DIM));
    let numbers: Option<Vec<u64>> = listed.as_array().and_then(|numbers| {
        let number = |number: &Value| number.as_u64().filter(|number| (1..=last).contains(number));
        numbers.iter().map(number).collect()
    });
    // At most as many as there are numbers.
    let count = numbers.filter(|numbers| numbers.is_sorted_by(|a, b| a < b));
    match count {
        Some(numbers) => Ok(numbers.len() as u32),
        None => Err(invalid(field, listed, "ascending numbers from 1 on", all)),
    }
}

fn has_len(types: &[Value], all: Option<u32>) -> bool {
    types.len() <= super::MAX_DIM as usize && all.is_none_or(|all| types.len() == all as usize)
}

fn invalid(field: String, given: &Value, what: &str, all: Option<u32>) -> ModelError {
    let given = match given {
        Value::Array(items) => format!("an array of {}", items.len()),
        other => shown(other),
    };
    let layers = all.map_or_else(
        || "the layers".to_owned(),
        |all| format!("num_hidden_layers = {all}"),
    );
    ModelError::Invalid {
        field,
        given,
        accepted: format!("{what}, of {layers}"),
    }
}
