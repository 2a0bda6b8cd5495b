//! The work around attention that a model leaves to the engine: gates, factors of latents, and
//! norms.

use serde_json::Value;

use super::ModelConfig;
use super::fields::{Fields, absent, contradiction, invalid};
use crate::Result;

/// The number of values per token of a gate on the layer's output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GateGranularity {
    /// One value for each element of each head: H·V.
    HeadAndValue,
    /// One value for each head: H.
    Head,
}

/// The granularity of the output's gate, if there is one.
pub(super) fn gate(fields: &Fields<'_>) -> Result<Option<GateGranularity>> {
    let mut switches = Vec::new();
    for name in [
        "gated_mla",
        "mla_use_output_gate",
        "gated_attention",
        "attn_elementwise_gate",
    ] {
        switches.push(fields.switch(name)?);
    }
    let granularity = |name| match fields.get(name) {
        Some((field, value)) => granularity(field, value).map(Some),
        None => Ok(None),
    };
    let kind = granularity("gating_type")?;
    if let (Some((field, _)), None) = (&kind, switches[0]) {
        return Err(absent(
            "gated_mla",
            "gated_mla",
            format!("true or false beside {field}"),
        ));
    }
    let others = [
        granularity("attention_gate_type")?,
        granularity("gated_attention_proj_granularity_type")?,
    ];
    let mut words = [kind].into_iter().chain(others).flatten();
    let first = words.next();
    if let (Some((first, a)), Some((second, b))) = (
        &first,
        words.find(|(_, word)| first.as_ref().is_some_and(|(_, a)| a != word)),
    ) {
        return Err(contradiction(first.clone(), shown(*a), second, shown(b)));
    }
    match (switches.contains(&Some(true)), first) {
        (true, None) => Ok(Some(GateGranularity::HeadAndValue)),
        (false, None) => Ok(None),
        // Some model classes write their default granularity although the gate is off.
        (false, Some(_)) if switches.contains(&Some(false)) => Ok(None),
        (_, Some((_, granularity))) => Ok(granularity),
    }
}

fn shown(granularity: Option<GateGranularity>) -> &'static str {
    match granularity {
        None => "none",
        Some(GateGranularity::Head) => "headwise",
        Some(GateGranularity::HeadAndValue) => "elementwise",
    }
}

/// Reads the name of a gate's granularity. `None` means that there is no gate.
fn granularity(field: String, value: &Value) -> Result<(String, Option<GateGranularity>)> {
    match value.as_str() {
        Some("elementwise" | "element_wise") => Ok((field, Some(GateGranularity::HeadAndValue))),
        Some("headwise" | "head_wise") => Ok((field, Some(GateGranularity::Head))),
        Some("none") => Ok((field, None)),
        _ => Err(invalid(
            field,
            value,
            "elementwise, element_wise, headwise, head_wise or none",
        )),
    }
}

/// Returns true if rotary keys pass through a norm of their own before they are rotated.
pub(super) fn rotary_key_norm(fields: &Fields<'_>) -> Result<bool> {
    fields.flag("k_rope_only_layernorm")
}

impl ModelConfig {
    /// The scale factor of latents with `rank` values, √(hidden size / rank); `None` if the
    /// configuration lacks the width of the hidden state. If a model scales the latents of keys and
    /// values, the cache holds them scaled. Rotary keys are not scaled.
    pub fn latent_factor(&self, rank: u32) -> Option<f64> {
        let hidden = f64::from(self.hidden_size?);
        Some((hidden / f64::from(rank)).sqrt())
    }

    /// The scale factor of a query at `position`; `None` if the model has none. A layer whose
    /// configuration has the [scaling](Self::query_scaling) applies the factor. Otherwise the
    /// engine multiplies all P+R values of a query by it, after the rotation and before it passes
    /// the query. Cached keys are not scaled.
    pub fn query_factor(&self, position: u32) -> Option<f64> {
        self.query_scaling.map(|scaling| scaling.factor(position))
    }

    /// Returns true if a layer has an indexer of its own, with weights and an index cache.
    pub const fn has_indexer(&self, layer: u32) -> bool {
        self.index_layers.has_indexer(layer)
    }

    /// The layer whose list of slots a layer uses. It is the layer itself if that has an indexer or
    /// uses no list.
    pub const fn list_source(&self, layer: u32) -> u32 {
        self.index_layers.source(layer)
    }

    /// Counts the layers with an indexer among the first `layers`.
    pub fn indexers(&self, layers: u32) -> u32 {
        self.index_layers.indexers(layers)
    }

    /// Counts the layers of a sparse model among the first `layers` that attend to all tokens.
    pub fn dense_layers(&self, layers: u32) -> u32 {
        self.index_layers.dense(layers)
    }

    /// Describes the work around attention that the engine must do itself, and the points on which
    /// implementations disagree.
    pub fn engine_work(&self) -> Vec<String> {
        let mut work = Vec::new();
        if let Some(values) = self.output_gate {
            let of = match values {
                1 => "one for each head",
                _ => "one for each head and value",
            };
            work.push(format!(
                "outputs have a gate, {of}, by whose sigmoid the engine multiplies them, or the \
                 layer"
            ));
        }
        if self.sinks {
            work.push("each head has a learnt sink, which the engine passes".to_owned());
        }
        if let Some(scaling) = self.query_scaling {
            work.push(format!(
                "queries are multiplied by 1 + {} · ln(1 + ⌊position / {}⌋): by the engine, or by \
                 the layer, if its backends have query_scales (`mla explain --feature \
                 query_scales`)",
                scaling.beta, scaling.original_max_positions
            ));
        }
        if let Some(kind) = self.rope.without_tables() {
            work.push(format!(
                "the engine makes the tables of the rotation, whose scaling is {kind}"
            ));
        }
        work.extend(self.latent_work());
        if self.rotary_key_norm {
            work.push("the engine normalises rotary keys before it rotates them".to_owned());
        }
        if let Some(indexer) = self.indexer.filter(|it| it.pool > 1) {
            work.push(format!(
                "index keys are pooled by {}: the engine passes their gates and the table of a \
                 pool's places, and has pages of a multiple of that",
                indexer.pool
            ));
        }
        if let Some(reason) = self.foreign_indexer {
            work.push(format!("the engine has the indexer itself: {reason}"));
        }
        work.extend(self.layer_work());
        work.extend(self.disputed());
        work
    }

    fn latent_work(&self) -> impl Iterator<Item = String> {
        let query = self.q_lora_rank.filter(|_| self.scaled_query_latents);
        let latent = Some(self.dims.latent).filter(|_| self.scaled_latents);
        let of = [("query latents", query), ("latents", latent)];
        of.into_iter().filter_map(|(name, rank)| {
            let by = match self.latent_factor(rank?) {
                Some(factor) => format!("{factor:.6}"),
                None => format!("√(hidden size / {})", rank?),
            };
            Some(format!(
                "the engine multiplies {name} by {by} behind their norm"
            ))
        })
    }

    fn layer_work(&self) -> Vec<String> {
        let mut work = Vec::new();
        if self.other_layers > 0 {
            work.push(format!(
                "{} layers have a linear attention, which is the engine's",
                self.other_layers
            ));
        }
        let dense = self.index_layers.dense(self.layers.unwrap_or(0));
        if dense > 0 {
            work.push(format!(
                "{dense} of the layers attend to all tokens, without lists"
            ));
        }
        if self.draft_layers > 0 {
            work.push(format!(
                "layers of drafts, each with a cache of its own beside those counted: {}",
                self.draft_layers
            ));
        }
        work
    }

    /// Describes the numbers that public implementations disagree about, and those that are used
    /// here.
    fn disputed(&self) -> Vec<String> {
        let mut disputed = Vec::new();
        let plain = 1.0 / f64::from(self.dims.head.qk()).sqrt();
        let has_factor = self.rope.softmax_mscale() != 1.0;
        if self.query_scaling.is_some() && has_factor {
            disputed.push(format!(
                "implementations disagree about the softmax scale: {:.6} with yarn's factor is \
                 taken, {plain:.6} without it (apply_scale: false)",
                self.softmax_scale()
            ));
        }
        if self.rotary_style_is_disputed {
            disputed.push(format!(
                "implementations disagree about the pairs of rotary elements: {:?} is taken",
                self.rope.style
            ));
        }
        disputed
    }
}
