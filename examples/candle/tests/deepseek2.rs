//! The module against candle-transformers' DeepSeek-V2 on random weights.
//!
//! Its attention is private, so a whole model of one layer stands for it, made such that its output shows
//! the attention and nothing else: the MLP's last weights are zero, and the head is the identity. So the
//! logits are the norm of (embedding + attention), of the last token.

use candle_core::{DType, Device, Result, Tensor};
use candle_mla::{Config, MlaAttention};
use candle_nn::{Module, VarBuilder, VarMap, rms_norm};
use candle_transformers::models::deepseek2::{DeepSeekV2, DeepSeekV2Config};
use mla_runtime::dims::{HeadDims, MlaDims};

const HIDDEN: usize = 96;
const HEADS: usize = 6;
const EPS: f64 = 1e-6;
const BATCH: usize = 2;
const MAX_LEN: usize = 80;

fn peer_config(q_lora_rank: Option<usize>) -> DeepSeekV2Config {
    let rank = q_lora_rank.map_or("null".to_owned(), |rank| rank.to_string());
    serde_json::from_str(&format!(
        r#"{{"vocab_size": {HIDDEN}, "hidden_size": {HIDDEN}, "intermediate_size": 8,
            "moe_intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": {HEADS},
            "n_shared_experts": null, "n_routed_experts": null, "num_experts_per_tok": null,
            "max_position_embeddings": {MAX_LEN}, "rms_norm_eps": {EPS}, "rope_theta": 10000.0,
            "rope_scaling": null, "attention_bias": false, "q_lora_rank": {rank},
            "qk_rope_head_dim": 16, "kv_lora_rank": 64, "v_head_dim": 40, "qk_nope_head_dim": 24,
            "n_group": 1, "topk_group": 1}}"#
    ))
    .expect("a configuration")
}

fn check(q_lora_rank: Option<usize>) -> Result<()> {
    let device = Device::Cpu;
    let variables = VarMap::new();
    let weights = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let mut peer = DeepSeekV2::new(&peer_config(q_lora_rank), weights.clone())?;
    for (name, variable) in variables.data().lock().unwrap().iter() {
        let shape = variable.shape();
        let last = shape.dims().last().copied().unwrap_or(1) as f64;
        variable.set(&if name == "lm_head.weight" {
            Tensor::eye(HIDDEN, DType::F32, &device)?
        } else if name.contains("down_proj") {
            Tensor::zeros(shape, DType::F32, &device)?
        } else if name.contains("norm") {
            Tensor::rand(0.5f32, 1.5, shape, &device)?
        } else if name.contains("q_") && !name.contains("q_a") {
            // Large enough for scores far from uniform.
            (Tensor::randn(0f32, 1.0, shape, &device)? * (3.0 / last.sqrt()))?
        } else {
            (Tensor::randn(0f32, 1.0, shape, &device)? * (1.0 / last.sqrt()))?
        })?;
    }

    let block = weights.pp("model.layers.0");
    let mut ours = MlaAttention::new(
        Config {
            hidden: HIDDEN,
            heads: HEADS,
            q_lora_rank,
            dims: MlaDims::new(64, HeadDims::new(24, 16, 40)),
            rms_norm_eps: EPS,
            rope_theta: 10000.0,
            batch: BATCH,
            max_len: MAX_LEN,
        },
        block.pp("self_attn"),
    )?;
    let embeddings = weights.get((HIDDEN, HIDDEN), "model.embed_tokens.weight")?;
    let before = rms_norm(HIDDEN, EPS, block.pp("input_layernorm"))?;
    let after = rms_norm(HIDDEN, EPS, weights.pp("model.norm"))?;

    // A prompt, a second piece of it on the first's context, and then token by token.
    let mut offset = 0;
    let mut largest = 0f32;
    for len in [33, 20, 1, 1, 1, 5, 1] {
        let tokens: Vec<u32> = (0..BATCH * len)
            .map(|at| ((offset * 31 + at * 17 + 5) % HIDDEN) as u32)
            .collect();
        let tokens = Tensor::from_vec(tokens, (BATCH, len), &device)?;
        let expected = peer.forward(&tokens, offset)?;

        let embedded = embeddings
            .index_select(&tokens.flatten_all()?, 0)?
            .reshape((BATCH, len, HIDDEN))?;
        let attended = ours.forward(&before.forward(&embedded)?, offset)?;
        let sum = (&attended + &embedded)?.narrow(1, len - 1, 1)?;
        let given = after.forward(&sum.squeeze(1)?.contiguous()?)?;
        let difference = (&given - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(difference < 2e-5, "{difference} at {offset} + {len}");
        // The attention is a good part of what is compared.
        let share = attended.sqr()?.mean_all()?.to_scalar::<f32>()?;
        assert!(share > 0.01, "{share}");
        largest = largest.max(difference);
        offset += len;
    }
    println!("largest difference of a normalised output: {largest:.1e}");
    Ok(())
}

#[test]
fn queries_of_one_projection() -> Result<()> {
    check(None)
}

#[test]
fn queries_of_two_projections() -> Result<()> {
    check(Some(32))
}
