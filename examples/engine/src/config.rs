//! The configuration of a model.

use mla_runtime::model::ModelConfig;
use serde::Deserialize;

use crate::error::{Error, Result};

/// A model's configuration: the part that the library reads, and the rest.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The configuration of the attention.
    pub attention: ModelConfig,
    /// The widths of the other parts.
    pub widths: Widths,
    /// The routing of tokens to experts, if there are any.
    pub routing: Option<Routing>,
}

/// A mixture of experts, with the routing of DeepSeek-V3. The fields of a `config.json` have other
/// names.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
pub struct Routing {
    /// The number of experts that tokens are routed to.
    #[serde(rename = "n_routed_experts")]
    pub experts: usize,
    /// The number of experts of a token.
    #[serde(rename = "num_experts_per_tok", default)]
    pub per_token: usize,
    /// The number of groups of experts, which have equal sizes.
    #[serde(rename = "n_group", default = "one")]
    pub groups: usize,
    /// The number of groups from which a token's experts are chosen.
    #[serde(rename = "topk_group", default = "one")]
    pub groups_per_token: usize,
    /// True if the weights of a token's experts are scaled to a sum of `scale`.
    #[serde(rename = "norm_topk_prob", default)]
    pub normalise: bool,
    /// The factor of the weights.
    #[serde(rename = "routed_scaling_factor", default = "unscaled")]
    pub scale: f32,
    /// The width within an expert.
    #[serde(rename = "moe_intermediate_size", default)]
    pub inner: usize,
    /// The number of experts that every token is routed to. Side by side, they are computed as one.
    #[serde(rename = "n_shared_experts", default)]
    pub shared: usize,
    /// The first decoder layer that has experts.
    #[serde(rename = "first_k_dense_replace", default)]
    pub first_layer: usize,
}

fn one() -> usize {
    1
}

fn unscaled() -> f32 {
    1.0
}

impl Routing {
    /// Reads the text of a `config.json`. Returns `None` if the model has no experts.
    fn new(json: &str) -> Result<Option<Self>> {
        let fields: serde_json::Value = serde_json::from_str(json)?;
        if fields["n_routed_experts"].is_null() {
            return Ok(None);
        }
        for (field, accepted) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
            let given = fields[field].as_str().unwrap_or("none");
            if given != accepted {
                return Err(Error::refused(field, given, accepted));
            }
        }
        let routing = Self::deserialize(fields)?;
        let Self {
            experts, groups, ..
        } = routing;
        if !(1..=MAX_EXPERTS).contains(&experts) {
            let accepted = format!("1 to {MAX_EXPERTS}");
            return Err(Error::refused("n_routed_experts", experts, accepted));
        }
        if groups == 0 || !experts.is_multiple_of(groups) {
            let accepted = format!("a divisor of {experts} experts");
            return Err(Error::refused("n_group", groups, accepted));
        }
        let chosen = routing.groups_per_token * (experts / groups);
        for (field, given, max) in [
            ("topk_group", routing.groups_per_token, groups),
            ("num_experts_per_tok", routing.per_token, chosen),
            ("n_shared_experts", routing.shared, usize::MAX),
            ("moe_intermediate_size", routing.inner, usize::MAX),
        ] {
            if !(1..=max).contains(&given) {
                let accepted = match max {
                    usize::MAX => "1 and up".to_owned(),
                    max => format!("1 to {max}"),
                };
                return Err(Error::refused(field, given, accepted));
            }
        }
        Ok(Some(routing))
    }

    /// Returns the width within all shared experts together.
    pub fn shared_inner(&self) -> usize {
        self.shared * self.inner
    }

    /// Computes the weight of each expert for one token, which is 0 for experts that the token is
    /// not routed to. `scores` are sigmoids of the router's logits. Of equal scores the first is
    /// chosen.
    pub fn weigh(&self, scores: &[f32], bias: &[f32], weights: &mut [f32]) {
        let biased: Vec<f32> = scores.iter().zip(bias).map(|(x, bias)| x + bias).collect();
        let of_group = self.experts / self.groups;
        // The rank of a group is given by its two best experts.
        let good = biased.chunks(of_group).map(|group| {
            let best = largest(group, 2, |_| true);
            best.iter().map(|at| group[*at]).sum::<f32>()
        });
        let good: Vec<f32> = good.collect();
        let groups = largest(&good, self.groups_per_token, |_| true);
        let chosen = largest(&biased, self.per_token, |at| {
            groups.contains(&(at / of_group))
        });
        let sum: f32 = chosen.iter().map(|at| scores[*at]).sum();
        let factor = match self.normalise {
            true => self.scale / (sum + 1e-20),
            false => self.scale,
        };
        weights.fill(0.0);
        for at in chosen {
            weights[at] = scores[at] * factor;
        }
    }
}

/// The maximum number of experts that the GPU kernel routes to.
pub const MAX_EXPERTS: usize = 256;

/// Returns the positions of the `count` largest values among the `eligible` ones. Equal values keep
/// their order.
fn largest(values: &[f32], count: usize, eligible: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).filter(|at| eligible(*at)).collect();
    places.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    places.truncate(count);
    places
}

/// The fields of a configuration that do not belong to its attention.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Widths {
    /// The number of different tokens.
    pub vocab_size: usize,
    /// The width of a hidden state.
    pub hidden_size: usize,
    /// The width within the MLP.
    pub intermediate_size: usize,
    /// The epsilon of the norms.
    pub rms_norm_eps: f32,
}

impl Config {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    ///
    /// If a field is missing or not accepted.
    pub fn new(json: &str) -> Result<Self> {
        let config = Self {
            attention: ModelConfig::from_hf_config(json)?,
            widths: serde_json::from_str(json)?,
            routing: Routing::new(json)?,
        };
        let attention = &config.attention;
        let dense = attention.dense_layers(attention.layers.unwrap_or(0));
        for (field, given) in [
            ("output gate", attention.output_gate.is_some()),
            ("sinks", attention.sinks),
            ("query scaling", attention.query_factor(0).is_some()),
            (
                "latent scaling",
                attention.scaled_query_latents || attention.scaled_latents,
            ),
            ("norm of rotary keys", attention.rotary_key_norm),
            (
                "indexer of the model's own",
                attention.foreign_indexer.is_some(),
            ),
            ("dense layers among sparse ones", dense > 0),
            ("linear attention", attention.other_layers > 0),
        ] {
            if given {
                return Err(Error::refused(field, "true", "false: this engine has none"));
            }
        }
        for (field, given) in [
            ("num_hidden_layers", config.attention.layers.unwrap_or(0)),
            ("q_lora_rank", config.attention.q_lora_rank.unwrap_or(0)),
            ("vocab_size", config.widths.vocab_size as u32),
            ("hidden_size", config.widths.hidden_size as u32),
            ("intermediate_size", config.widths.intermediate_size as u32),
        ] {
            if given == 0 {
                return Err(Error::refused(field, "none", "1 and up"));
            }
        }
        Ok(config)
    }

    /// Returns the maximum number of elements within MLPs for a token, either in one layer's MLP or
    /// in all experts.
    pub fn inner(&self) -> usize {
        let of_experts =
            |routing: Routing| (routing.experts * routing.inner).max(routing.shared_inner());
        let dense = self.widths.intermediate_size;
        self.routing
            .map_or(dense, |routing| dense.max(of_experts(routing)))
    }

    /// Returns the number of experts of a layer, or 0 without experts.
    pub fn experts(&self) -> usize {
        self.routing.map_or(0, |routing| routing.experts)
    }

    /// Returns the number of decoder layers.
    pub fn layers(&self) -> usize {
        self.attention.layers.unwrap_or(0) as usize
    }
}

/// A model small enough for a CPU, with the attention of DeepSeek-V3.
pub const SMALL: &str = include_str!("../model.json");

/// Returns the widths: hidden, H, the rank of queries, L, R, P + R, V, P + V.
pub fn widths(config: &Config) -> [usize; 8] {
    let (attention, dims) = (&config.attention, config.attention.dims);
    [
        config.widths.hidden_size as u32,
        attention.heads,
        attention.q_lora_rank.unwrap_or(0),
        dims.latent,
        dims.head.rope,
        dims.head.qk(),
        dims.head.v,
        dims.head.kv_b(),
    ]
    .map(|width| width as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTING: Routing = Routing {
        experts: 6,
        per_token: 2,
        groups: 3,
        groups_per_token: 2,
        normalise: true,
        scale: 2.5,
        inner: 8,
        shared: 1,
        first_layer: 0,
    };

    fn weigh(routing: Routing, scores: [f32; 6], bias: [f32; 6]) -> [f32; 6] {
        let mut weights = [f32::NAN; 6];
        routing.weigh(&scores, &bias, &mut weights);
        weights
    }

    #[test]
    fn the_best_experts_of_the_best_groups_are_weighed_by_their_scores() {
        // The best expert is in the worst group: 0.9 + 0.0, compared with 0.5 + 0.6 and 0.7 + 0.4.
        let scores = [0.9, 0.0, 0.5, 0.6, 0.7, 0.4];
        let none = [0.0; 6];
        let near = |got: [f32; 6], want: [f32; 6]| {
            let apart = got.iter().zip(want).map(|(a, b)| (a - b).abs());
            assert!(apart.fold(0.0, f32::max) < 1e-6, "{got:?} for {want:?}");
        };
        let sum = 2.5 / 1.3;
        near(
            weigh(ROUTING, scores, none),
            [0.0, 0.0, 0.0, 0.6 * sum, 0.7 * sum, 0.0],
        );
        // With a bias another expert is chosen, but its weight does not include the bias.
        let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.5];
        let sum = 2.5 / 1.1;
        near(
            weigh(ROUTING, scores, bias),
            [0.0, 0.0, 0.0, 0.0, 0.7 * sum, 0.4 * sum],
        );
        let plain = Routing {
            normalise: false,
            ..ROUTING
        };
        near(weigh(plain, scores, none), [0.0, 0.0, 0.0, 1.5, 1.75, 0.0]);
        // The first of equal scores are chosen.
        near(
            weigh(plain, [0.5; 6], none),
            [1.25, 1.25, 0.0, 0.0, 0.0, 0.0],
        );
    }

    #[test]
    fn experts_that_cannot_be_routed_to_are_refused_by_name() {
        let refused = |from: &str, to: &str| {
            let json = SMALL.replace(from, to);
            assert_ne!(json, SMALL, "{from} is not there");
            Config::new(&json).unwrap_err().to_string()
        };
        assert_eq!(
            refused("\"n_group\": 4", "\"n_group\": 3"),
            "n_group: given 3, accepted a divisor of 16 experts"
        );
        assert_eq!(
            refused("\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 9"),
            "num_experts_per_tok: given 9, accepted 1 to 8"
        );
        assert_eq!(
            refused("\"sigmoid\"", "\"softmax\""),
            "scoring_func: given softmax, accepted sigmoid"
        );
        assert_eq!(
            refused("\"n_routed_experts\": 16", "\"n_routed_experts\": 512"),
            "n_routed_experts: given 512, accepted 1 to 256"
        );
    }
}
