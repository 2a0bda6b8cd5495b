//! Reads the indexer of sparse attention from a configuration.

use std::fmt::Display;

use serde_json::Value;

use super::fields::{Fields, absent, invalid, shown};
use super::layers::{Kind, Layers};
use super::missing;
use crate::model::{IndexLayers, IndexerConfig, LayerLists, MAX_LAYERS, RotaryStyle};
use crate::{Error, Result};

/// Returns the reason why [`IndexerConfig`] cannot express the described indexer, if there is one.
/// The engine then makes the lists itself.
pub(super) fn foreign(fields: &Fields<'_>, rope: u32) -> Result<Option<&'static str>> {
    let norm = match fields.get("index_k_norm_type") {
        None => None,
        Some((_, value)) if value == "layer_norm" || value == "layernorm" => None,
        Some((_, value)) if value == "rms" => Some("its keys have an RMS norm"),
        Some((field, value)) => return Err(invalid(field, value, "rms or layernorm")),
    };
    let mut always = false;
    for field in ["index_init_tokens", "index_local_tokens"] {
        always |= fields.optional(field, 0)?.unwrap_or(0) > 0;
    }
    let always = always.then_some("its lists always have the first or the last tokens");
    let last = fields.is_of(&["hy_v4"]);
    let last = last.then_some("the last values of its queries and keys are rotated");
    // If each token has its own key, there are no pools, whatever the other fields say.
    let is_pooled = pool(fields)? > 1;
    let mut pools = (is_pooled && rope > 0).then_some("its pools are of rotated keys");
    for field in ["index_kpool_always_select_tail", "index_kpool_compress"] {
        if fields.switch(field)? == Some(false) && is_pooled {
            pools = Some("its pools are of another kind");
        }
    }
    Ok(last.or(always).or(norm).or(pools))
}

/// The number of tokens that share an index key.
fn pool(fields: &Fields<'_>) -> Result<u32> {
    Ok(fields.optional("index_kpool", 1)?.unwrap_or(1))
}

/// The indexer, if the configuration gives its heads and widths.
pub(super) fn indexer(
    fields: &Fields<'_>,
    rope: u32,
    topk: Option<u32>,
) -> Result<Option<IndexerConfig>> {
    let [heads, width] = ["index_n_heads", "index_head_dim"];
    let style = match fields.flag("indexer_rope_interleave")? {
        true => RotaryStyle::Interleaved,
        false => RotaryStyle::Halves,
    };
    let is_off = topk.is_none() && fields.has_key("index_topk");
    let is_described = fields.get(heads).is_some() || fields.get(width).is_some();
    if !is_described || is_off {
        return Ok(None);
    }
    // This crate has no pools of rotated keys.
    let pool = if rope == 0 { pool(fields)? } else { 1 };
    if pool > 1 && !64u32.is_multiple_of(pool) {
        let accepted = "a divisor of 64, so that pages have whole pools";
        return Err(Error::argument("index_kpool", pool, accepted));
    }
    let list = fields.required("index_topk", 1)?;
    if !list.is_multiple_of(pool) {
        return Err(Error::argument(
            "index_topk",
            list,
            format!("a multiple of index_kpool, {pool}"),
        ));
    }
    let config = IndexerConfig {
        heads: fields.required(heads, 1)?,
        width: fields.required(width, 1)?,
        rope,
        topk: list,
        pool,
        // The tail has room for a pool and up to K draft tokens.
        tail: if pool > 1 { 2 * pool } else { 0 },
        rotary: style,
        hadamard: pool > 1,
        ..IndexerConfig::DEEPSEEK_V3_2
    };
    let is_rotary = rope.is_multiple_of(2) && rope <= config.width;
    match config.check() {
        Ok(()) => Ok(Some(config)),
        Err(error) if is_rotary && config.width.is_multiple_of(4) => Err(error),
        Err(_) => Err(Error::argument(
            width,
            config.width,
            format!("a multiple of 4, at least qk_rope_head_dim, {rope}, which has to be even"),
        )),
    }
}

/// Refuses a sparse model without the length of its lists. A length of null or 0 makes it dense.
pub(super) fn check_topk(fields: &Fields<'_>) -> Result<()> {
    let uses_dsa = fields.has_key("use_dsa") && fields.flag("use_dsa")?;
    let method = fields.get("attention_method");
    let is_lsa = method.is_some_and(|(_, method)| missing::is_one_of(method, &["LSA"]));
    let field = "index_topk";
    if (uses_dsa || is_lsa) && !fields.has_key(field) {
        let by = if is_lsa {
            "attention_method"
        } else {
            "use_dsa"
        };
        let accepted = format!("an integer, as {by} asks for lists");
        return Err(absent(field, &fields.looked_for(field), accepted));
    }
    Ok(())
}

/// The layers with an indexer, from the first of four spellings that is present. The spellings
/// count all layers of a model, but layers with linear attention have no number among the layers
/// with a cache.
pub(super) fn layers(fields: &Fields<'_>, layers: &Layers) -> Result<IndexLayers> {
    for read in [by_types, by_pattern, by_frequency, by_runs] {
        if let Some(found) = read(fields, layers)? {
            return Ok(found);
        }
    }
    match (layers.all, fields.is_of(&["hy_v4"])) {
        // The class of this family has indexers in the layers 0, 1, 5, 9 and so on.
        (_, true) => every(layers, ("model_type", "hy_v4"), 4, 2),
        (Some(all), false) => {
            let found = lists(layers, &vec![false; all as usize]);
            found.ok_or_else(|| too_many(all))
        }
        (None, false) => Ok(IndexLayers::ALL),
    }
}

fn too_many(layers: u32) -> Error {
    let accepted = format!("at most {MAX_LAYERS}, if not all have an indexer");
    Error::argument("num_hidden_layers", layers, accepted)
}

/// The lists of the layers with a cache. A layer that is marked in `shared` uses the list of an
/// earlier layer.
fn lists(layers: &Layers, shared: &[bool]) -> Option<IndexLayers> {
    let lists = shared.iter().enumerate();
    IndexLayers::from_lists(lists.filter_map(|(layer, shares)| {
        match (layers.kind(layer), shares) {
            (Kind::Linear, _) => None,
            (Kind::Full, _) => Some(LayerLists::None),
            (Kind::Sparse, true) => Some(LayerLists::Shared),
            (Kind::Sparse, false) => Some(LayerLists::Own),
        }
    }))
}

/// `indexer_types`: `["full", "shared", …]`.
fn by_types(fields: &Fields<'_>, layers: &Layers) -> Result<Option<IndexLayers>> {
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
    let what = "a list of \"full\" and \"shared\"";
    listed(field, value, shared, layers, what).map(Some)
}

/// `index_topk_pattern`: `"FSSS…"`, or a list of such letters. C means the same as F: the layer has
/// an indexer.
fn by_pattern(fields: &Fields<'_>, layers: &Layers) -> Result<Option<IndexLayers>> {
    let Some((field, value)) = fields.get("index_topk_pattern") else {
        return Ok(None);
    };
    let shares = |letter: &str| match letter {
        "F" | "C" => Some(false),
        "S" => Some(true),
        _ => None,
    };
    let shared: Option<Vec<bool>> = match value {
        Value::String(letters) => letters
            .split("")
            .filter(|it| !it.is_empty())
            .map(shares)
            .collect(),
        Value::Array(letters) => letters
            .iter()
            .map(|it| it.as_str().and_then(shares))
            .collect(),
        _ => None,
    };
    listed(field, value, shared, layers, "a string of F and S").map(Some)
}

fn listed(
    field: String,
    value: &Value,
    shared: Option<Vec<bool>>,
    layers: &Layers,
    what: &str,
) -> Result<IndexLayers> {
    let found = shared
        .filter(|shared| layers.all.is_none_or(|all| shared.len() == all as usize))
        .and_then(|shared| lists(layers, &shared));
    if let Some(found) = found {
        return Ok(found);
    }
    let count = match layers.all {
        Some(layers) => format!("num_hidden_layers = {layers}"),
        None => format!("at most {MAX_LAYERS}"),
    };
    Err(Error::argument(
        field,
        match value {
            Value::Array(items) => format!("an array of {}", items.len()),
            Value::String(letters) => format!("a string of {}", letters.chars().count()),
            other => shown(other),
        },
        format!("{what}, one for each layer ({count}), of which the first has an indexer"),
    ))
}

/// An indexer in every `freq`-th layer from `offset` on. A layer after the last described one has
/// its own indexer. `named` is the field that says so, and its value.
fn every(
    layers: &Layers,
    named: (&'static str, impl Display),
    freq: u32,
    offset: u32,
) -> Result<IndexLayers> {
    let count = layers.all.unwrap_or(MAX_LAYERS);
    let shares = |layer: u32| !(layer + 1).saturating_sub(offset).is_multiple_of(freq);
    let shared: Vec<bool> = (0..count).map(shares).collect();
    let found = lists(layers, &shared);
    found.ok_or_else(|| {
        let sparse = |layer: &u32| layers.kind(*layer as usize) == Kind::Sparse;
        match (0..count).find(sparse) {
            Some(first) if shares(first) => {
                let (field, value) = named;
                let accepted = format!("an indexer in layer {first}, the first that is sparse");
                Error::argument(field, value.to_string(), accepted)
            }
            _ => too_many(count),
        }
    })
}

/// `index_topk_freq` with `index_skip_topk_offset`, whose default is 2.
fn by_frequency(fields: &Fields<'_>, layers: &Layers) -> Result<Option<IndexLayers>> {
    let name = "index_topk_freq";
    let offset = fields.optional("index_skip_topk_offset", 0)?.unwrap_or(2);
    let freq = fields.optional(name, 1)?;
    let found = freq.map(|freq| every(layers, (name, freq), freq, offset));
    found.transpose()
}

/// `cli_factor`: a run of this number of attentions uses the list of the first one.
fn by_runs(fields: &Fields<'_>, layers: &Layers) -> Result<Option<IndexLayers>> {
    let name = "cli_factor";
    let run = fields.optional(name, 1)?;
    run.map(|run| every(layers, (name, run), run, 1))
        .transpose()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::ModelConfig;

    fn read(changes: Value) -> Result<ModelConfig, String> {
        let mut config = json!({
            "num_attention_heads": 64, "num_hidden_layers": 78, "kv_lora_rank": 512,
            "num_nextn_predict_layers": 1,
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
        let dense = read(json!({"index_topk": null})).unwrap();
        assert_eq!((dense.indexer, dense.index_topk), (None, None));
        let one = read(json!({"index_kpool": 1, "index_kpool_compress": false,
            "index_kpool_always_select_tail": false}));
        assert_eq!(one, read(json!({})));
        let pooled = json!({"index_kpool": 4, "qk_rope_head_dim": 0});
        let pooled = read(pooled).unwrap().indexer.unwrap();
        let expected = IndexerConfig::GLM_5.with_rope(0).with_pool(4).with_tail(8);
        assert_eq!(pooled, expected.with_hadamard(true));
        assert_eq!((pooled.list_width(), pooled.token_bytes()), (2051, 33));
        for (changes, reason) in [
            (json!({"index_kpool": 4}), "its pools are of rotated keys"),
            (
                json!({"index_kpool": 4, "qk_rope_head_dim": 0, "index_kpool_compress": false}),
                "its pools are of another kind",
            ),
        ] {
            let foreign = read(changes).unwrap();
            assert_eq!(
                (foreign.indexer, foreign.foreign_indexer),
                (None, Some(reason))
            );
        }
    }

    #[test]
    fn reads_all_three_spellings_of_sharing() {
        // This file has GLM-5.2's layers and GLM-5's rotation.
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
                json!({"index_kpool": 4, "index_topk": 2046, "qk_rope_head_dim": 0}),
                "index_topk: given 2046, accepted a multiple of index_kpool, 4".to_owned(),
            ),
            (
                json!({"index_kpool": 3, "index_topk": 1536, "qk_rope_head_dim": 0}),
                "index_kpool: given 3, accepted a divisor of 64, so that pages have whole pools"
                    .to_owned(),
            ),
            (
                json!({"index_kpool": 4, "qk_rope_head_dim": 0, "index_head_dim": 96}),
                "index_head_dim: given 96, accepted a power of two, as the Hadamard transform needs"
                    .to_owned(),
            ),
            (
                json!({"index_topk_freq": 4, "index_skip_topk_offset": 0}),
                "index_topk_freq: given 4, accepted an indexer in layer 0, the first that is sparse"
                    .into(),
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
        ] {
            assert_eq!(read(changes), Err(message));
        }
    }
}
