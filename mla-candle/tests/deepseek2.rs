//! Compares the module with candle-transformers' DeepSeek-V2 on random weights.
//!
//! The attention of candle-transformers is private, so a whole model of one layer is used. Its
//! output shows only the attention: the MLP's last weights are zero, and the head is the identity.
//! The logits are therefore the norm of (embedding + attention), of the last token.
//!
//! The reference is the model in f32. In another dtype the module is compared with that model, too,
//! and may differ from it about as much as candle's own model in that dtype does.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, rms_norm};
use candle_transformers::models::deepseek2::{DeepSeekV2, DeepSeekV2Config};
use mla_candle::{Config, Limits, MlaAttention};
use mla_runtime::model::{HeadDims, MlaDims};

const HIDDEN: usize = 96;
const HEADS: usize = 6;
const EPS: f64 = 1e-6;
const BATCH: usize = 2;
const MAX_LEN: usize = 80;

/// Properties that differ between cases.
#[derive(Clone, Copy)]
struct Case {
    dtype: DType,
    dims: MlaDims,
    q_lora_rank: Option<usize>,
    rope_scaling: &'static str,
    attention_bias: bool,
}

impl Case {
    const fn new(dtype: DType, dims: MlaDims, q_lora_rank: Option<usize>) -> Self {
        Self {
            dtype,
            dims,
            q_lora_rank,
            rope_scaling: "null",
            attention_bias: false,
        }
    }

    /// Returns a `config.json`, which both sides read.
    fn json(&self) -> String {
        let rank = self
            .q_lora_rank
            .map_or("null".to_owned(), |rank| rank.to_string());
        let (latent, rope_scaling, bias) =
            (self.dims.latent, self.rope_scaling, self.attention_bias);
        let HeadDims { nope, rope, v, .. } = self.dims.head;
        format!(
            r#"{{"vocab_size": {HIDDEN}, "hidden_size": {HIDDEN}, "intermediate_size": 8,
            "moe_intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": {HEADS},
            "n_shared_experts": null, "n_routed_experts": null, "num_experts_per_tok": null,
            "max_position_embeddings": {MAX_LEN}, "rms_norm_eps": {EPS}, "rope_theta": 10000.0,
            "rope_scaling": {rope_scaling}, "attention_bias": {bias}, "q_lora_rank": {rank},
            "qk_rope_head_dim": {rope}, "kv_lora_rank": {latent}, "v_head_dim": {v},
            "qk_nope_head_dim": {nope}, "n_group": 1, "topk_group": 1}}"#
        )
    }
}

/// Makes random weights in f32 that `dtype` can represent exactly.
fn random_weights(
    config: &DeepSeekV2Config,
    dtype: DType,
    device: &Device,
) -> Result<HashMap<String, Tensor>> {
    let variables = VarMap::new();
    let weights = VarBuilder::from_varmap(&variables, DType::F32, device);
    DeepSeekV2::new(config, weights)?;
    let names = variables.data().lock().expect("no other thread has it");
    let random = names.iter().map(|(name, variable)| {
        let shape = variable.shape();
        let last = shape.dims().last().copied().unwrap_or(1) as f64;
        let weight = if name == "lm_head.weight" {
            Tensor::eye(HIDDEN, DType::F32, device)?
        } else if name.contains("down_proj") {
            Tensor::zeros(shape, DType::F32, device)?
        } else if name.contains("norm") {
            Tensor::rand(0.5f32, 1.5, shape, device)?
        } else if name.contains("q_") && !name.contains("q_a") {
            // The weights are large enough for scores far from uniform.
            (Tensor::randn(0f32, 1.0, shape, device)? * (3.0 / last.sqrt()))?
        } else {
            (Tensor::randn(0f32, 1.0, shape, device)? * (1.0 / last.sqrt()))?
        };
        Ok((name.clone(), weight.to_dtype(dtype)?.to_dtype(DType::F32)?))
    });
    random.collect()
}

/// Differences between outputs and the reference.
#[derive(Default)]
struct Differences {
    largest: f32,
    squares: f32,
    count: usize,
}

impl Differences {
    fn add(&mut self, given: &Tensor, expected: &Tensor) -> Result<()> {
        let apart = (given - expected)?.abs()?;
        self.largest = self.largest.max(apart.max_all()?.to_scalar()?);
        self.squares += apart.sqr()?.sum_all()?.to_scalar::<f32>()?;
        self.count += apart.elem_count();
        Ok(())
    }

    fn mean(&self) -> f32 {
        (self.squares / self.count as f32).sqrt()
    }
}

fn check(device: &Device, case: Case) -> Result<()> {
    let (dtype, json) = (case.dtype, case.json());
    let config: DeepSeekV2Config = serde_json::from_str(&json).expect("a configuration");
    let exact = random_weights(&config, dtype, device)?;
    let rounded = exact
        .iter()
        .map(|(name, weight)| Ok((name.clone(), weight.to_dtype(dtype)?)))
        .collect::<Result<_>>()?;
    let exact = VarBuilder::from_tensors(exact, DType::F32, device);
    let weights = VarBuilder::from_tensors(rounded, dtype, device);
    let mut exact_peer = DeepSeekV2::new(&config, exact)?;
    let mut peer = DeepSeekV2::new(&config, weights.clone())?;

    let block = weights.pp("model.layers.0");
    let limits = Limits::new(BATCH, MAX_LEN);
    let mut ours = MlaAttention::new(&Config::from_json(&json)?, limits, block.pp("self_attn"))?;
    let embeddings = weights.get((HIDDEN, HIDDEN), "model.embed_tokens.weight")?;
    let before = rms_norm(HIDDEN, EPS, block.pp("input_layernorm"))?;
    let after = rms_norm(HIDDEN, EPS, weights.pp("model.norm"))?;

    // First comes a prompt, then a second chunk with the first as context, then single tokens.
    let mut offset = 0;
    let (mut of_ours, mut of_peer) = (Differences::default(), Differences::default());
    for len in [33, 20, 1, 1, 1, 5, 1] {
        let tokens: Vec<u32> = (0..BATCH * len)
            .map(|at| ((offset * 31 + at * 17 + 5) % HIDDEN) as u32)
            .collect();
        let tokens = Tensor::from_vec(tokens, (BATCH, len), device)?;
        let expected = exact_peer.forward(&tokens, offset)?;

        let embedded = embeddings
            .index_select(&tokens.flatten_all()?, 0)?
            .reshape((BATCH, len, HIDDEN))?;
        let attended = ours.forward(&before.forward(&embedded)?, offset)?;
        let sum = (&attended + &embedded)?.narrow(1, len - 1, 1)?;
        let given = after.forward(&sum.squeeze(1)?.contiguous()?)?;
        of_ours.add(&given.to_dtype(DType::F32)?, &expected)?;
        of_peer.add(&peer.forward(&tokens, offset)?, &expected)?;
        // The attention is a large part of the compared values.
        let attended = attended.to_dtype(DType::F32)?;
        let share = attended.sqr()?.mean_all()?.to_scalar::<f32>()?;
        assert!(share > 0.01, "{share}");
        offset += len;
    }
    println!(
        "{dtype:?} on {:?}: {:.1e} from candle's in f32, {:.1e} at most; candle's own {:.1e}, \
         {:.1e}",
        device.location(),
        of_ours.mean(),
        of_ours.largest,
        of_peer.mean(),
        of_peer.largest
    );
    // Outputs are normalised, to about 1.
    let accepted = match dtype {
        DType::F32 => 2e-6,
        _ => 2.0 * of_peer.mean(),
    };
    assert!(
        of_ours.mean() <= accepted && of_ours.largest <= 10.0 * accepted,
        "accepted {accepted:.1e}, and ten times that at most"
    );
    Ok(())
}

/// The smallest dimensions that show everything.
const SMALL: MlaDims = MlaDims::new(64, HeadDims::new(24, 16, 40));

#[test]
fn queries_of_one_projection() -> Result<()> {
    check(&Device::Cpu, Case::new(DType::F32, SMALL, None))
}

#[test]
fn queries_of_two_projections_with_biases() -> Result<()> {
    let case = Case::new(DType::F32, SMALL, Some(32));
    check(&Device::Cpu, case)?;
    check(
        &Device::Cpu,
        Case {
            attention_bias: true,
            ..case
        },
    )
}

#[test]
fn contexts_that_yarn_extends() -> Result<()> {
    // Some scalings correct only the softmax, some only cosines and sines, and some both.
    for rope_scaling in [
        r#"{"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 10, "beta_fast": 32,
            "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}"#,
        r#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "beta_fast": 4,
            "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.0}"#,
        r#"{"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 1,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5}"#,
    ] {
        check(
            &Device::Cpu,
            Case {
                rope_scaling,
                ..Case::new(DType::F32, SMALL, Some(32))
            },
        )?;
    }
    Ok(())
}

#[test]
fn half_the_width() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        check(&Device::Cpu, Case::new(dtype, SMALL, Some(32)))?;
    }
    Ok(())
}

#[test]
fn the_widths_of_deepseek_v3() -> Result<()> {
    check(&Device::Cpu, Case::new(DType::BF16, MlaDims::R1, Some(32)))
}

#[test]
fn what_does_not_fit_is_refused_by_its_name() -> Result<()> {
    let case = Case::new(DType::F32, SMALL, None);
    let config: DeepSeekV2Config = serde_json::from_str(&case.json()).expect("a configuration");
    let weights = random_weights(&config, DType::F32, &Device::Cpu)?;
    let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let weights = weights.pp("model.layers.0.self_attn");
    let limits = Limits::new(1, 8);
    let mut ours = MlaAttention::new(&Config::from_json(&case.json())?, limits, weights)?;
    let mut refused = |shape: (usize, usize), offset| {
        let hidden = Tensor::ones((shape.0, shape.1, HIDDEN), DType::F32, &Device::Cpu)?;
        match ours.forward(&hidden, offset) {
            Ok(_) => Ok(String::new()),
            Err(error) => Ok::<_, candle_core::Error>(error.to_string()),
        }
    };
    for (shape, offset, message) in [
        ((2, 1), 0, "batch: given 2, accepted at most 1"),
        (
            (1, 1),
            1,
            "offset: given 1, accepted at most the 0 cached tokens",
        ),
        (
            (1, 9),
            0,
            "hidden: given 9 tokens from position 0, accepted 1 and up within 8",
        ),
        ((1, 6), 0, ""),
        (
            (1, 3),
            6,
            "hidden: given 3 tokens from position 6, accepted 1 and up within 8",
        ),
        // A later call overwrites the cache from position 2 on.
        ((1, 3), 2, ""),
        (
            (1, 1),
            6,
            "offset: given 6, accepted at most the 5 cached tokens",
        ),
    ] {
        let given = refused(shape, offset)?;
        assert!(
            given.starts_with(message) && given.is_empty() == message.is_empty(),
            "{given}"
        );
    }
    ours.clear_kv_cache();
    let hidden = Tensor::ones((1, 1, HIDDEN), DType::F32, &Device::Cpu)?;
    assert!(ours.forward(&hidden, 1).is_err() && ours.forward(&hidden, 0).is_ok());
    Ok(())
}

#[cfg(any(feature = "sm80", feature = "sm90"))]
#[test]
#[ignore = "needs a GPU: cargo test -r --features sm90 -- --ignored; sm80 for other GPUs"]
fn on_a_gpu() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for q_lora_rank in [None, Some(32)] {
        for dtype in [DType::BF16, DType::F16] {
            check(&device, Case::new(dtype, MlaDims::R1, q_lora_rank))?;
        }
    }
    Ok(())
}
