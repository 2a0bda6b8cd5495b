//! Checks the models of many configurations. Each is either planned, or refused with the name of
//! the missing property.

use std::path::Path;

use mla_cpu::{CpuDecode, CpuPrefill};
use mla_runtime::Error;
use mla_runtime::model::{DType, ModelConfig, PRESETS, Preset, RotaryStyle};
use mla_runtime::plan::memory::{self, MemoryNeeds};
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Problem, Target};

/// One public model per line. A model that cannot be planned has the name of the property that is
/// missing, and its description. The others have these columns: the number of layers that attend to
/// a cache, of layers with linear attention, and of layers for drafts; H; L; (P, R, V); the rank of
/// the query projection; the length of a sparse list, and the number of layers with an indexer; θ
/// and the maximum number of positions; the softmax scale; and the words of [`facts`].
const NUMBERS: &str = "
deepseek-v2-lite 27+0+0 16 512 (128,64,128) - - - 1e4 163840 0.114721387
deepseek-v2 60+0+0 128 512 (128,64,128) 1536 - - 1e4 163840 0.114721387
deepseek-v3 61+0+1 128 512 (128,64,128) 1536 - - 1e4 163840 0.135233779
deepseek-r1 61+0+1 128 512 (128,64,128) 1536 - - 1e4 163840 0.135233779
deepseek-v3.1 61+0+1 128 512 (128,64,128) 1536 - - 1e4 163840 0.135233779
deepseek-v3.2 61+0+1 128 512 (128,64,128) 1536 2048 61 1e4 163840 0.135233779
deepseek-v4 model_type: compressed caches and windows beside them
deepseek-v4.1 model_type: compressed caches and windows beside them
deepseek-vl2 30+0+0 32 512 (128,64,128) - - - 1e4 4096 0.072168784
deepseek-vl2-tiny use_mla: keys and values of every head in the cache
kimi-k2 61+0+0 64 512 (128,64,128) 1536 - - 5e4 131072 0.130860800
kimi-k2.5 61+0+0 64 512 (128,64,128) 1536 - - 5e4 262144 0.144679626
kimi-k2.6 61+0+0 64 512 (128,64,128) 1536 - - 5e4 262144 0.144679626
kimi-k2.7 61+0+0 64 512 (128,64,128) 1536 - - 5e4 262144 0.144679626
kimi-k3 24+69+0 96 512 (128,64,128) 1536 - - 1e4 1048576 0.072168784 gate still
kimi-linear-48b 7+20+0 32 512 (128,64,128) - - - 1e4 1048576 0.072168784 still
moonlight-16b 27+0+0 16 512 (128,64,128) - - - 5e4 8192 0.072168784
glm-4.7-flash 47+0+1 20 512 (192,64,256) 768 - - 1e6 202752 0.062500000
glm-5 78+0+1 64 512 (192,64,256) 2048 2048 78 1e6 202752 0.062500000
glm-5.1 78+0+1 64 512 (192,64,256) 2048 2048 78 1e6 202752 0.062500000
glm-5.2 78+0+1 64 512 (192,64,256) 2048 2048 21 8e6 1048576 0.062500000
glm-5.3 78+0+1 64 512 (192,64,256) 2048 2048 21 8e6 1048576 0.062500000
glm-5.3-flash 11+34+1 64 512 (256,0,256) 1536 2048 11 1e4 1048576 0.062500000 still
hy4-preview 78+0+1 64 512 (192,64,256) 2048 2048 21 1e7 1048576 0.062500000 gate sinks indexer
dots3-note sliding_window_size: a sliding window
mistral-large-3 61+0+0 128 512 (128,64,128) 1536 - - 1e4 294912 0.072168784 positions
mistral-small-4 36+0+0 32 256 (64,64,128) 1024 - - 1e4 1048576 0.194969495 positions
longcat-flash 56+0+0 64 512 (128,64,128) 1536 - - 1e7 131072 0.072168784 latents
longcat-flash-lite 28+0+0 32 512 (128,64,128) 1536 - - 5e6 327680 0.072168784 latents
longcat-flash-lite-sparse 28+0+1 32 512 (128,64,128) 1536 2048 14 1e6 983040 0.157811416 latents \
    indexer
ling-2.6-flash 4+28+0 32 512 (128,64,128) 1536 - - 6e6 131072 0.072168784
ling-3.0-tiny 6+18+0 16 512 (128,64,128) 256 - - 6e6 131072 0.072168784 gate/head
ling-3.0-flash 7+35+0 32 512 (128,64,128) - - - 6e6 262144 0.072168784 gate/head
gigachat-3.5 10+30+0 64 512 (128,64,128) 1536 - - 1e5 131072 0.072168784 gate latents
openpangu-ultra-moe 61+0+0 128 512 (128,64,128) 1536 - - 2.56e7 131072 0.072168784 halves
openpangu-2-flash param_sink_number: learnt tokens that every query sees
minicpm3 62+0+0 40 256 (64,32,64) 768 - - 1e4 32768 0.102062073 halves
axk1 61+0+1 64 512 (128,64,128) 1536 - - 1e4 131072 0.072168784
sarvam-105b 32+0+0 64 512 (128,64,128) - - - 1e4 131072 0.135233779
step-5 att_impl_type: another attention than Multi-head Latent Attention
";

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// The facts about a model that an engine must know, a word for each. For example, "still" means
/// that queries and keys are not rotated, and "positions" that the position scales the query.
fn facts(model: &ModelConfig) -> Vec<&'static str> {
    let gate = match model.output_gate {
        Some(1) => "gate/head",
        _ => "gate",
    };
    let scaled = model.scaled_query_latents && model.scaled_latents;
    let all = [
        (model.output_gate.is_some(), gate),
        (model.sinks, "sinks"),
        (!model.rope.rotates, "still"),
        (model.rope.style == RotaryStyle::Halves, "halves"),
        (model.query_factor(0).is_some(), "positions"),
        (scaled, "latents"),
        (model.foreign_indexer.is_some(), "indexer"),
    ];
    all.into_iter()
        .filter_map(|(has, word)| has.then_some(word))
        .collect()
}

fn numbers(preset: &Preset) -> String {
    let name = preset.name;
    let model = match preset.config() {
        Ok(model) => model,
        Err(Error::Unsupported { field, missing, .. }) => {
            let field = field.rsplit('.').next().unwrap();
            return format!("{name} {field}: {missing}");
        }
        Err(error) => panic!("{name}: {error}"),
    };
    let layers = model.layers.unwrap();
    let head = model.dims.head;
    let indexers = model.index_topk.map(|_| model.indexers(layers));
    let mut words = vec![
        name.to_owned(),
        format!("{layers}+{}+{}", model.other_layers, model.draft_layers),
        model.heads.to_string(),
        model.dims.latent.to_string(),
        format!("({},{},{})", head.nope, head.rope, head.v),
        or_dash(model.q_lora_rank),
        or_dash(model.index_topk),
        or_dash(indexers),
        format!("{:e}", model.rope.theta),
        or_dash(model.rope.max_positions),
        format!("{:.9}", model.softmax_scale()),
    ];
    words.extend(facts(&model).into_iter().map(str::to_owned));
    words.join(" ")
}

#[test]
fn presets_have_published_numbers() {
    let given: Vec<String> = PRESETS.iter().map(numbers).collect();
    let expected: Vec<&str> = NUMBERS.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(given, expected);
}

#[test]
fn preset_files_and_unconfirmed_fields() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let json = std::fs::read_to_string(&path).unwrap();
        assert!(
            PRESETS.iter().any(|preset| preset.json == json),
            "{}",
            path.display()
        );
    }
    for preset in PRESETS {
        for field in preset.unconfirmed {
            let key = format!("\"{field}\":");
            assert!(preset.json.contains(&key), "{}: {field}", preset.name);
        }
    }
}

#[test]
fn public_models_are_planned() {
    let registry = Registry::of::<(CpuPrefill, ()), (CpuDecode, ())>().unwrap();
    for preset in PRESETS {
        let name = preset.name;
        let Ok(model) = preset.config() else {
            continue;
        };
        // The plan is for one of eight ranks, or of fewer if eight do not divide the heads.
        let ranks = [8, 4, 1]
            .into_iter()
            .find(|ranks| model.heads.is_multiple_of(*ranks));
        let heads = model.heads_per_rank(ranks.unwrap()).unwrap();
        let problem =
            Problem::new(model.dims, heads, DType::BF16).with_sparse(model.index_topk.is_some());
        let needs = MemoryNeeds::of(&problem)
            .unwrap()
            .with_layers(model.layers.unwrap())
            .with_pages(16)
            .with_absorbed_tokens(8)
            .with_expanded_tokens(64)
            .with_rows(128);
        let plan = memory::plan(&needs).unwrap_or_else(|error| panic!("{name}: {error}"));
        let row = 2 * u64::from(model.dims.row());
        let cache = u64::from(model.layers.unwrap()) * 16 * 64 * row;
        let first = &plan.regions[0];
        assert_eq!((first.name(), first.bytes), ("kv_cache", cache), "{name}");
        registry
            .select(&SelectionRequest::new(Target::CPU, problem))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        // Without a rotation every angle is 0.
        if !model.rope.rotates {
            let [cos, sin] = model.rope.cos_sin(model.dims.head.rope, 3).unwrap();
            assert!(cos.iter().all(|cos| *cos == 1.0) && sin.iter().all(|sin| *sin == 0.0));
        }
    }
}
