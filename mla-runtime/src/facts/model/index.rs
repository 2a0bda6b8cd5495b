//! Reads the indexer of sparse attention from a configuration.

use serde_json::Value;

use super::{Fields, ModelError, shown};
use crate::facts::indexer::{IndexDims, IndexLayers, IndexerConfig, MAX_LAYERS};
use crate::facts::rotary_style::RotaryStyle;

/// The indexer, if the configuration has its heads and widths.
pub(super) fn indexer(fields: &Fields<'_>, rope: u32) -> Result<Option<IndexerConfig>, ModelError> {
    let [heads, width] = ["index_n_heads", "index_head_dim"];
    if fields.get(heads).is_none() && fields.get(width).is_none() {
        return Ok(None);
    }
    let style = match fields.flag("indexer_rope_interleave")? {
        false => RotaryStyle::Halves,
        true => RotaryStyle::Interleaved,
    };
    let config = IndexerConfig {
        dims: IndexDims {
            heads: fields.required(heads, 1)?,
            width: fields.required(width, 1)?,
            rope,
            topk: fields.required("index_topk", 1)?,
        },
        rotary: style,
        ..IndexerConfig::DEEPSEEK_V3_2
    };
    match config.check() {
        Ok(()) => Ok(Some(config)),
        Err(_) => Err(ModelError::Invalid {
            field: width.into(),
            given: config.dims.width.to_string(),
            accepted: format!(
                "a multiple of 4, at least qk_rope_head_dim, {rope}, which has to be even"
            ),
        }),
    }
}

/// Reads which layers have an indexer, in any of three spellings, which have to agree.
pub(super) fn layers(fields: &Fields<'_>, layers: Option<u32>) -> Result<IndexLayers, ModelError> {
    let spellings = [
        by_types(fields, layers)?,
        by_pattern(fields, layers)?,
        by_frequency(fields, layers)?,
    ];
    let mut given = spellings.into_iter().flatten();
    let Some((first, found)) = given.next() else {
        return Ok(IndexLayers::ALL);
    };
    match given.find(|(_, other)| *other != found) {
        None => Ok(found),
        Some((second, other)) => Err(ModelError::Contradiction {
            first,
            first_given: format!("{found:?}"),
            second,
            second_given: format!("{other:?}"),
        }),
    }
}

/// A spelling's field, and what it says.
type Spelling = Option<(String, IndexLayers)>;

/// `indexer_types`: `["full", "shared", …]`.
fn by_types(fields: &Fields<'_>, layers: Option<u32>) -> Result<Spelling, ModelError> {
    let Some((field, value)) = fields.get("indexer_types") else {
        return Ok(None);
    };
    let shares = |value: &Value| match value.as_str() {
        Some("full") => Some(false),
        Some("shared") => Some(true),
        _ => None,
    };
    let shared: Option<Vec<bool>> = value
        .as_array()
        .and_then(|types| types.iter().map(shares).collect());
    listed(
        field,
        value,
        shared,
        layers,
        "a list of \"full\" and \"shared\"",
    )
    .map(Some)
}

/// `index_topk_pattern`: `"FSSS…"`.
fn by_pattern(fields: &Fields<'_>, layers: Option<u32>) -> Result<Spelling, ModelError> {
    let Some((field, value)) = fields.get("index_topk_pattern") else {
        return Ok(None);
    };
    let shares = |letter| match letter {
        'F' => Some(false),
        'S' => Some(true),
        _ => None,
    };
    let shared: Option<Vec<bool>> = value
        .as_str()
        .and_then(|letters| letters.chars().map(shares).collect());
    listed(field, value, shared, layers, "a string of F and S").map(Some)
}

fn listed(
    field: String,
    value: &Value,
    shared: Option<Vec<bool>>,
    layers: Option<u32>,
    what: &str,
) -> Result<(String, IndexLayers), ModelError> {
    let found = shared
        .filter(|shared| layers.is_none_or(|layers| shared.len() == layers as usize))
        .and_then(IndexLayers::from_shared);
    if let Some(found) = found {
        return Ok((field, found));
    }
    let count = match layers {
        Some(layers) => format!("num_hidden_layers = {layers}"),
        None => format!("at most {MAX_LAYERS}"),
    };
    Err(ModelError::Invalid {
        given: match value {
            Value::Array(items) => format!("an array of {}", items.len()),
            Value::String(letters) => format!("a string of {}", letters.chars().count()),
            other => shown(other),
        },
        field,
        accepted: format!(
            "{what}, one for each layer ({count}), of which the first has an indexer"
        ),
    })
}

/// `index_topk_freq` and `index_skip_topk_offset`.
fn by_frequency(fields: &Fields<'_>, layers: Option<u32>) -> Result<Spelling, ModelError> {
    let name = "index_topk_freq";
    let Some(freq) = fields.optional(name, 1)? else {
        return Ok(None);
    };
    if freq == 1 {
        return Ok(Some((name.into(), IndexLayers::ALL)));
    }
    let offset = fields.required("index_skip_topk_offset", 1)?;
    // A layer behind the last that is described has an indexer of its own.
    let count = layers.unwrap_or(MAX_LAYERS);
    match IndexLayers::every(freq, offset, count) {
        Some(found) => Ok(Some((name.into(), found))),
        None => Err(ModelError::Invalid {
            field: "num_hidden_layers".into(),
            given: count.to_string(),
            accepted: format!("at most {MAX_LAYERS}, if layers share lists"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::ModelConfig;

    fn read(changes: Value) -> Result<ModelConfig, String> {
        let mut config = json!({
            "num_attention_heads": 64, "num_hidden_layers": 78, "kv_lora_rank": 512,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "q_lora_rank": 2048, "dtype": "bfloat16", "index_n_heads": 32, "index_head_dim": 128,
            "index_topk": 2048, "indexer_rope_interleave": true, "rope_theta": 1e6,
            "max_position_embeddings": 202_752,
        });
        let all = config.as_object_mut().unwrap();
        all.extend(changes.as_object().unwrap().clone());
        ModelConfig::from_hf_config(&config.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn reads_the_indexer() {
        assert_eq!(read(json!({})), Ok(ModelConfig::preset("glm-5").unwrap()));
        let halves = read(json!({"indexer_rope_interleave": null, "index_n_heads": 64})).unwrap();
        assert_eq!(halves.indexer, Some(IndexerConfig::DEEPSEEK_V3_2));
        let without = read(json!({"index_n_heads": null, "index_head_dim": null})).unwrap();
        assert_eq!((without.indexer, without.index_topk), (None, Some(2048)));
        assert!(read(json!({"index_kpool": 1})).is_ok());
    }

    #[test]
    fn reads_all_three_spellings_of_sharing() {
        // GLM-5.2's layers; this file has GLM-5's rotation.
        let expected = Ok(ModelConfig {
            index_layers: ModelConfig::preset("glm-5.2").unwrap().index_layers,
            ..ModelConfig::preset("glm-5").unwrap()
        });
        let full = |layer: usize| layer < 2 || layer % 4 == 2;
        let types: Vec<&str> = (0..78)
            .map(|i| if full(i) { "full" } else { "shared" })
            .collect();
        let pattern: String = (0..78).map(|i| if full(i) { 'F' } else { 'S' }).collect();
        let by_types = json!({"indexer_types": types});
        let by_pattern = json!({"index_topk_pattern": pattern});
        let by_frequency = json!({"index_topk_freq": 4, "index_skip_topk_offset": 3});
        let mut all = by_types.clone();
        for spelling in [&by_pattern, &by_frequency] {
            let fields = spelling.as_object().unwrap().clone();
            all.as_object_mut().unwrap().extend(fields);
        }
        for spelling in [by_types, by_pattern, by_frequency, all] {
            assert_eq!(read(spelling), expected);
        }
        assert_eq!(
            read(json!({"index_topk_freq": 1})),
            Ok(ModelConfig::preset("glm-5").unwrap())
        );
    }

    #[test]
    fn refusals() {
        let each = "one for each layer (num_hidden_layers = 78), of which the first has an indexer";
        for (changes, message) in [
            (
                json!({"index_kpool": 4}),
                "index_kpool: given 4, accepted a model without pooled index keys, which no \
                 backend here has"
                    .to_owned(),
            ),
            (
                json!({"index_topk": null}),
                "index_topk: given nothing, accepted an integer from 1 to 65536".into(),
            ),
            (
                json!({"index_head_dim": 60}),
                "index_head_dim: given 60, accepted a multiple of 4, at least qk_rope_head_dim, \
                 64, which has to be even"
                    .into(),
            ),
            (
                json!({"indexer_rope_interleave": "yes"}),
                "indexer_rope_interleave: given \"yes\", accepted true or false".into(),
            ),
            (
                json!({"indexer_types": ["full"]}),
                format!(
                    "indexer_types: given an array of 1, accepted a list of \"full\" and \
                     \"shared\", {each}"
                ),
            ),
            (
                json!({"index_topk_pattern": "S".repeat(78)}),
                format!(
                    "index_topk_pattern: given a string of 78, accepted a string of F and S, {each}"
                ),
            ),
            (
                json!({"index_topk_freq": 4}),
                "index_skip_topk_offset: given nothing, accepted an integer from 1 to 65536".into(),
            ),
            (
                json!({"index_topk_pattern": "F".repeat(78), "index_topk_freq": 77,
                    "index_skip_topk_offset": 77}),
                "index_topk_pattern: given IndexLayers { shared: [] }, accepted IndexLayers { \
                 shared: [77] }, as index_topk_freq has it"
                    .into(),
            ),
        ] {
            assert_eq!(read(changes), Err(message));
        }
    }
}
