//! The kinds of attention in a model's layers. Some models have layers with linear attention, which
//! have no cache of rows. Some layers of a sparse model attend to all tokens.

use serde_json::Value;

use super::fields::{Fields, absent, contradiction, integer, shown};
use super::{MAX_DIM, missing};
use crate::{Error, Result};

/// The families whose lists of layers begin with 0.
const FROM_ZERO: &[&str] = &["glm5_next", "glm53_flash"];

/// The families whose layers are of two kinds, with the key that says which layers are of which.
const OF_TWO_KINDS: &[(&str, &str)] = &[
    ("glm5_next", "linear_attn_config"),
    ("glm53_flash", "linear_attn_config"),
    ("bailing_hybrid", "layer_group_size"),
    ("bailing_moe_v2_5", "layer_group_size"),
    ("bailing_moe_v3", "layer_group_size"),
    ("dots3", "layer_types"),
];

/// The attention of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Multi-head latent attention to all tokens.
    Full,
    /// Multi-head latent attention to the tokens of a list.
    Sparse,
    /// Linear attention.
    Linear,
}

/// The layers of a model.
pub(super) struct Layers {
    /// The number of all attentions, if the configuration gives it. Some models have two for each
    /// layer.
    pub(super) all: Option<u32>,
    /// The kind of each attention, if the configuration gives it.
    kinds: Option<Vec<Kind>>,
    /// True if the kinds come from names that distinguish sparse layers from others.
    named: bool,
    /// True if some layers are named sparse, so that the others are not sparse.
    mixed: bool,
}

impl Layers {
    /// The number of layers with a cache, if the configuration gives it.
    pub(super) fn own(&self) -> Option<u32> {
        self.all.map(|all| all - self.other())
    }

    /// The number of layers with linear attention.
    pub(super) fn other(&self) -> u32 {
        let linear = |kind: &&Kind| **kind == Kind::Linear;
        let kinds = self.kinds.iter().flatten();
        // At most `MAX_DIM`.
        kinds.filter(linear).count() as u32
    }

    /// The kind of a layer. A layer that has a cache but no named kind is sparse.
    pub(super) fn kind(&self, layer: usize) -> Kind {
        let kinds = self.kinds.as_ref();
        kinds.map_or(Kind::Sparse, |kinds| match kinds[layer] {
            Kind::Full if !self.mixed => Kind::Sparse,
            kind => kind,
        })
    }

    /// Refuses names of layers that contradict the presence or absence of a sparse model's list
    /// length.
    pub(super) fn check_topk(&self, topk: Option<u32>) -> Result<()> {
        if !self.named {
            return Ok(());
        }
        match (topk, self.mixed) {
            (None, true) => Err(absent(
                "index_topk",
                "index_topk",
                format!("an integer from 1 to {MAX_DIM} beside sparse layer_types"),
            )),
            (Some(topk), false) => Err(contradiction(
                "layer_types",
                "no sparse layer",
                "index_topk",
                topk,
            )),
            _ => Ok(()),
        }
    }
}

/// A spelling's field, and the kinds that it gives.
type Spelling = Option<(String, Vec<Kind>)>;

/// Reads the kinds from any of four spellings. If several are present, they must agree. Without
/// any, all layers have latent attention.
pub(super) fn read(fields: &Fields<'_>) -> Result<Layers> {
    let types = by_types(fields, count(fields)?)?;
    let counted = match &types {
        Some((_, kinds)) => Some(kinds.len() as u32),
        None => count(fields)?,
    };
    let named = types.is_some();
    let spellings = [
        types,
        by_linear_config(fields, counted)?,
        by_list(fields, counted)?,
        by_groups(fields, counted)?,
    ];
    let mut given = spellings.into_iter().flatten();
    let Some((first, kinds)) = given.next() else {
        check_family(fields)?;
        return Ok(Layers {
            all: counted,
            kinds: None,
            named,
            mixed: false,
        });
    };
    let linear = |kinds: &[Kind]| {
        let linear = kinds.iter().map(|kind| *kind == Kind::Linear);
        linear.collect::<Vec<bool>>()
    };
    if kinds.iter().all(|kind| *kind == Kind::Linear) {
        let accepted = "at least one layer with latent attention";
        return Err(Error::argument(first, "no such layer", accepted));
    }
    match given.find(|(_, other)| linear(other) != linear(&kinds)) {
        None => Ok(Layers {
            all: counted,
            mixed: kinds.contains(&Kind::Sparse),
            kinds: Some(kinds),
            named,
        }),
        Some((second, other)) => Err(contradiction(
            first,
            numbers(&kinds),
            second,
            numbers(&other),
        )),
    }
}

/// Refuses a model without a list of its layers, if the layers of its family are of two kinds.
/// Public implementations have different defaults.
fn check_family(fields: &Fields<'_>) -> Result<()> {
    let has_no_window = fields.switch("use_sliding_window")? == Some(false);
    let own = OF_TWO_KINDS
        .iter()
        .find(|(family, _)| fields.is_of(&[family]));
    match own {
        Some(("dots3", _)) if has_no_window => Ok(()),
        Some((_, key)) => Err(absent(
            key,
            &fields.looked_for(key),
            "which layers have latent attention, as this family also has others",
        )),
        None => Ok(()),
    }
}

/// Shows the numbers of the layers with latent attention, counted from 0.
fn numbers(kinds: &[Kind]) -> String {
    let own = kinds.iter().enumerate();
    let own = own.filter(|(_, kind)| **kind != Kind::Linear);
    let own: Vec<usize> = own.map(|(layer, _)| layer).collect();
    format!("layers {own:?}")
}

/// The number of attentions of a model. LongCat's models give `num_layers`, and each of these
/// layers has two attentions.
fn count(fields: &Fields<'_>) -> Result<Option<u32>> {
    let [hidden, field] = ["num_hidden_layers", "num_layers"];
    let (layers, pairs) = (fields.optional(hidden, 1)?, fields.optional(field, 1)?);
    let two = 1 + u32::from(has_two_attentions(fields));
    match (layers, pairs) {
        (Some(layers), Some(pairs)) if layers != pairs && layers != two * pairs => {
            Err(contradiction(hidden.to_owned(), layers, field, pairs))
        }
        // In this field some programs count attentions, and some count pairs of them.
        (Some(_), None) if two == 2 => fields.required(field, 1).map(Some),
        (None, Some(_)) if two == 1 && fields.get("layer_group_size").is_none() => Err(absent(
            hidden,
            &fields.looked_for(hidden),
            format!("an integer from 1 to {MAX_DIM}: {field} is read in LongCat's models alone"),
        )),
        (_, Some(pairs)) => Ok(Some(two * pairs)),
        (layers, None) => Ok(layers),
    }
}

/// Returns true for LongCat's models. Its hybrids are an exception: they alternate with linear
/// attention.
fn has_two_attentions(fields: &Fields<'_>) -> bool {
    fields.is_of(&["longcat"]) && fields.get("layer_group_size").is_none()
}

/// `layer_types`: `["full_attention", "linear_attention", …]`.
fn by_types(fields: &Fields<'_>, all: Option<u32>) -> Result<Spelling> {
    let Some((field, types)) = fields.get("layer_types") else {
        return Ok(None);
    };
    let has_len = |len: u32| len <= MAX_DIM && all.is_none_or(|all| len == all);
    let listed = types.as_array().and_then(|types| {
        let len = u32::try_from(types.len()).ok();
        let names: Option<Vec<&str>> = types.iter().map(Value::as_str).collect();
        names.filter(|_| len.is_some_and(has_len))
    });
    let Some(names) = listed else {
        let layers = all.map_or_else(|| "the layers".into(), layers_of);
        return Err(invalid(field, types, "a list of strings", &layers));
    };
    // A list length of 0 or null means that no layer is sparse, whatever the family's default is.
    let is_dense = fields.has_key("index_topk") && fields.optional_or_none("index_topk")?.is_none();
    let full = match fields.flag("use_dsa")? && !is_dense {
        true => Kind::Sparse,
        false => Kind::Full,
    };
    let kind = |name: &str| match name {
        "full_attention" | "attention" => Ok(full),
        "deepseek_sparse_attention" | "sparse_attention" | "sparse" | "indexed_attention" => {
            Ok(Kind::Sparse)
        }
        "linear_attention" => Ok(Kind::Linear),
        other => Err(missing::layer(field.clone(), other)),
    };
    let kinds: Result<Vec<Kind>> = names.into_iter().map(kind).collect();
    Ok(Some((field.clone(), kinds?)))
}

fn required(all: Option<u32>, fields: &Fields<'_>) -> Result<u32> {
    match all {
        Some(all) => Ok(all),
        None => fields.required("num_hidden_layers", 1),
    }
}

/// Gives the layers in `listed` full attention and all others linear attention. The list ascends.
fn of_listed(listed: &[u32], all: u32) -> Vec<Kind> {
    let kind = |layer| match listed.binary_search(&layer) {
        Ok(_) => Kind::Full,
        Err(_) => Kind::Linear,
    };
    (0..all).map(kind).collect()
}

/// `linear_attn_config`, with lists of layers by number. The first layer is 1, or 0 in `glm5_next`.
fn by_linear_config(fields: &Fields<'_>, all: Option<u32>) -> Result<Spelling> {
    let Some((place, linear)) = fields.get("linear_attn_config") else {
        return Ok(None);
    };
    if !linear.is_object() {
        return Err(super::fields::invalid(place, linear, "an object or null"));
    }
    let (first, all) = (u32::from(!fields.is_of(FROM_ZERO)), required(all, fields)?);
    let given = |name| linear.get(name).filter(|value: &&Value| !value.is_null());
    let list = |name: &str, value| layer_list(format!("{place}.{name}"), value, first, all);
    let others = match given("kda_layers") {
        Some(others) => Some(list("kda_layers", others)?),
        None => None,
    };
    let rest = |layers: &[u32]| -> Vec<u32> {
        let rest = (0..all).filter(|layer| layers.binary_search(layer).is_err());
        rest.collect()
    };
    let full = match (given("full_attn_layers"), &others) {
        (Some(full), _) => list("full_attn_layers", full)?,
        (None, _) if fields.get("layer_types").is_some() => return Ok(None),
        (None, Some(others)) => rest(others),
        (None, None) => {
            return Err(absent(
                "full_attn_layers",
                &format!("{place}.full_attn_layers"),
                "a list of the layers with full attention",
            ));
        }
    };
    if let Some(others) = others.filter(|others| *others != rest(&full)) {
        return Err(contradiction(
            format!("{place}.kda_layers"),
            format!("{} layers", others.len()),
            format!("{place}.full_attn_layers"),
            format!("the rest of {all}, without {}", full.len()),
        ));
    }
    Ok(Some((
        format!("{place}.full_attn_layers"),
        of_listed(&full, all),
    )))
}

/// `full_attention_layers`, counted from 0. The other layers have the attention that
/// `linear_attention_type` names. If that is null, all layers have full attention.
fn by_list(fields: &Fields<'_>, all: Option<u32>) -> Result<Spelling> {
    let field = "full_attention_layers";
    let Some((path, listed)) = fields.get(field) else {
        return match fields.get("linear_attention_type") {
            None => Ok(None),
            Some(_) if fields.get("layer_types").is_some() => Ok(None),
            Some((kind, _)) => Err(absent(
                field,
                &fields.looked_for(field),
                format!("a list of the layers without {kind}"),
            )),
        };
    };
    let all = required(all, fields)?;
    let full = layer_list(path.clone(), listed, 0, all)?;
    let linear = "linear_attention_type";
    let kinds = match fields.get(linear).is_none() && fields.has_key(linear) {
        false => of_listed(&full, all),
        true => vec![Kind::Full; all as usize],
    };
    Ok(Some((path, kinds)))
}

/// Reads numbers of layers. In the file they count from `first`; the result ascends and counts from
/// 0.
fn layer_list(field: String, listed: &Value, first: u32, all: u32) -> Result<Vec<u32>> {
    let numbers: Option<Vec<u32>> = listed.as_array().and_then(|numbers| {
        let accepted = first..all + first;
        let number = |number: &Value| integer(number).filter(|it| accepted.contains(it));
        numbers.iter().map(number).collect()
    });
    let numbers = numbers.map(|mut numbers| {
        numbers.sort_unstable();
        numbers
    });
    match numbers.filter(|numbers| numbers.is_sorted_by(|a, b| a < b)) {
        Some(numbers) => Ok(numbers.into_iter().map(|number| number - first).collect()),
        None => Err(invalid(
            field,
            listed,
            &format!("numbers from {first} on, each once"),
            &layers_of(all),
        )),
    }
}

/// `layer_group_size`: the last layer of each group has full attention. So has every layer after
/// the last whole group.
fn by_groups(fields: &Fields<'_>, all: Option<u32>) -> Result<Spelling> {
    let field = "layer_group_size";
    let (Some((path, _)), Some(size)) = (fields.get(field), fields.optional(field, 1)?) else {
        return Ok(None);
    };
    let all = required(all, fields)?;
    let grouped = all / size * size;
    let kind = |layer: u32| match (layer + 1).is_multiple_of(size) || layer >= grouped {
        true => Kind::Full,
        false => Kind::Linear,
    };
    Ok(Some((path, (0..all).map(kind).collect())))
}

fn layers_of(all: u32) -> String {
    format!("num_hidden_layers = {all}")
}

fn invalid(field: String, given: &Value, what: &str, layers: &str) -> Error {
    Error::argument(
        field,
        match given {
            Value::Array(items) => format!("an array of {}", items.len()),
            other => shown(other),
        },
        format!("{what}, of {layers}"),
    )
}
