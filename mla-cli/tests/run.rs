//! Tests of `mla run` on a model small enough for unoptimised code.

mod refused;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A model with widths that no kernel has, but with a latent that every cache format can store.
const CONFIG: &str = r#"{
    "kv_lora_rank": 128, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 40,
    "num_attention_heads": 3, "torch_dtype": "bfloat16"
}"#;

/// The same model with an indexer, whose lists are shorter than most contexts of the test.
const SPARSE: &str = r#"{
    "kv_lora_rank": 128, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 40,
    "num_attention_heads": 3, "torch_dtype": "bfloat16", "q_lora_rank": 48,
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 20, "indexer_rope_interleave": true
}"#;

/// The same model with pools of four tokens, and rows without a rotary part.
const POOLED: &str = r#"{
    "kv_lora_rank": 128, "qk_nope_head_dim": 24, "qk_rope_head_dim": 0, "v_head_dim": 40,
    "num_attention_heads": 3, "torch_dtype": "bfloat16", "q_lora_rank": 48,
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 20, "index_kpool": 4
}"#;

fn mla(name: &str, arguments: &str) -> Output {
    mla_of(CONFIG, name, arguments)
}

fn mla_of(config: &str, name: &str, arguments: &str) -> Output {
    command(config, name, arguments).output().unwrap()
}

fn command(config: &str, name: &str, arguments: &str) -> Command {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("run_{name}.json"));
    fs::write(&path, config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_mla"));
    command.args(["run", "--config"]).arg(path);
    command.args(arguments.split_whitespace());
    command
}

fn printed(name: &str, arguments: &str) -> String {
    let output = mla(name, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments}: {stderr}");
    assert!(stderr.starts_with("running "), "{arguments}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(name: &str, arguments: &str) -> Value {
    let text = printed(name, &format!("{arguments} --repeat 1 --format json"));
    serde_json::from_str(&text).unwrap()
}

fn phases(report: &Value) -> Vec<(&str, u64, u64)> {
    let phase = |phase: &'static str| move |value: &Value| value[phase].as_u64().unwrap();
    report["phases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|value| {
            (
                value["phase"].as_str().unwrap(),
                phase("requests")(value),
                phase("tokens")(value),
            )
        })
        .collect()
}

#[test]
fn every_dtype_and_cache_format_agrees_with_the_reference() {
    for (dtype, kv) in [
        ("f32", "f32"),
        ("f16", "f16"),
        ("bf16", "bf16"),
        ("bf16", "bf16 --split-cache"),
        ("bf16", "fp8"),
        ("f16", "fp8 --split-cache"),
        ("f16", "fp8_ds_mla"),
        ("bf16", "fp8_ds_mla"),
        ("f16", "fp8_per_token"),
        ("bf16", "fp8_per_token"),
    ] {
        let report = json(
            &format!("{dtype}_{kv}"),
            &format!(
                "--batch 3q1s70_2q4s33_q90_q60s200 --threshold 8 --page 16 --rows 48 \
                 --dtype {dtype} --kv {kv}"
            ),
        );
        assert_eq!(
            phases(&report),
            [("decode", 5, 11), ("prefill", 2, 150), ("total", 7, 161)]
        );
        assert_eq!(report["context_chunks"], 3, "{dtype} {kv}");
        assert_eq!(report["split_cache"], kv.contains("split"), "{dtype} {kv}");
        assert_eq!(report["pass"], true, "{dtype} {kv}: {report:#}");
        for phase in &report["phases"].as_array().unwrap()[..2] {
            assert_eq!(phase["rows"], 64.min(phase["tokens"].as_u64().unwrap() * 3));
            assert!(phase["relative"].as_f64() <= phase["tolerance"].as_f64());
            // Rounding leaves differences. If nothing differed, nothing would have been compared.
            assert!(phase["absolute"].as_f64().unwrap() > 0.0);
            assert!(phase["seconds"].as_f64().unwrap() > 0.0);
        }
    }
}

/// Runs a mixed batch of a model whose indexer selects 20 tokens, checks the report, and returns
/// the shapes of the index cache and of the lists.
fn shapes_of_listed(config: &str, name: &str, dtype: &str, kv: &str) -> [String; 2] {
    let arguments = format!(
        "--batch 3q1s70_2q4s33_q90_q60s200 --page 16 --dtype {dtype} --kv {kv} --repeat 1 \
         --format json"
    );
    let output = mla_of(config, name, &arguments);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    // Every token takes the absorbed path.
    assert_eq!(phases(&report), [("decode", 7, 161), ("total", 7, 161)]);
    assert_eq!(report["pass"], true, "{report:#}");
    let lists = &report["lists"];
    assert_eq!((&lists["topk"], &lists["lists"]), (&20.into(), &64.into()));
    // A value that may be rounded to either of two codes is rare.
    assert!(lists["identical"].as_u64().unwrap() >= 60, "{lists}");
    assert!(lists["seconds"].as_f64().unwrap() > 0.0);
    let regions = report["memory"]["regions"].as_array().unwrap();
    ["index_cache", "slot_lists"].map(|name| {
        let region = regions.iter().find(|r| r["name"] == name).unwrap();
        region["shape"].to_string()
    })
}

#[test]
fn a_model_with_an_indexer_attends_to_its_lists() {
    for (dtype, kv) in [
        ("f32", "f32"),
        ("bf16", "bf16"),
        ("f16", "f16 --split-cache"),
        ("bf16", "fp8_ds_mla"),
    ] {
        // There are 5, 5, 5, 3, 3, 6 and 13 pages of 16 keys, with 32 values and a scale for each
        // key.
        let shapes = shapes_of_listed(SPARSE, &format!("sparse_{dtype}_{kv}"), dtype, kv);
        assert_eq!(shapes, ["[1,40,16,36]", "[161,20]"]);
    }
    let dense = mla_of(
        SPARSE,
        "sparse_dense",
        "--batch q90 --dense --repeat 1 --format json",
    );
    let report: Value = serde_json::from_slice(&dense.stdout).unwrap();
    assert_eq!(
        (&report["lists"], &report["pass"]),
        (&Value::Null, &true.into())
    );
    let table = mla_of(SPARSE, "sparse_table", "--batch 2q1s50 --repeat 1");
    let text = String::from_utf8(table.stdout).unwrap();
    let sentence = "The indexer has 4 heads of 32 and chooses 20 tokens";
    assert!(text.contains(sentence), "{text}");
    let refused = |arguments| refused::message(&mut command(SPARSE, "sparse_refused", arguments));
    assert_eq!(
        refused("--batch q4 --threshold 3"),
        "error: --threshold: given 3 for a sparse layer, accepted nothing, as every token is on \
         the absorbed path; or --dense\n"
    );
    #[cfg(not(feature = "gpu"))]
    assert_eq!(
        refused("--batch q4 --device cuda"),
        "error: --device: given cuda for a model with an indexer, but feature `sm90` of mla-cli is \
         off, accepted cpu, or --dense; for cuda, build with `--features sm90`\n"
    );
}

#[test]
fn a_model_with_pooled_index_keys_attends_to_its_lists() {
    for (dtype, kv) in [("f32", "f32"), ("bf16", "bf16"), ("bf16", "fp8_ds_mla")] {
        // A page has 4 keys of 32 values and a scale, and the keys and gates of 8 tokens.
        let shapes = shapes_of_listed(POOLED, &format!("pooled_{dtype}_{kv}"), dtype, kv);
        assert_eq!(shapes, ["[1,40,1168]", "[161,23]"]);
    }
}

#[test]
fn a_pipe_is_told_what_runs_before_it_ends() {
    let mut run = command(CONFIG, "told", "--batch q1k --repeat 1000")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(run.stderr.take().unwrap()).lines();
    let first = lines.next().expect("a line at once").unwrap();
    assert!(first.starts_with("running q1k of /"), "{first}");
    assert!(first.contains("run_told.json on cpu ("), "{first}");
    run.kill().unwrap();
    // This line came before there was a result.
    let output = run.wait_with_output().unwrap();
    assert!(output.stdout.is_empty(), "{output:?}");
}

#[test]
fn a_batch_may_have_one_phase_only() {
    let decode = json("decode", "--batch 4q1s100 --page 7");
    assert_eq!(phases(&decode), [("decode", 4, 4), ("total", 4, 4)]);
    let prefill = json("prefill", "--batch q40_2q30s50 --threshold 0");
    assert_eq!(phases(&prefill), [("prefill", 3, 100), ("total", 3, 100)]);
    assert_eq!(
        (&decode["pass"], &prefill["pass"]),
        (&true.into(), &true.into())
    );
}

#[test]
fn the_memory_is_planned_for_the_batch() {
    let report = json(
        "memory",
        "--batch 2q1s65_q100s200 --threshold 1 --page 32 --rows 33",
    );
    let memory = &report["memory"];
    let region = |name: &str| {
        let regions = memory["regions"].as_array().unwrap().iter();
        let bytes = regions
            .filter(|r| r["name"] == name)
            .map(|r| r["bytes"].as_u64());
        bytes.flatten().sum::<u64>()
    };
    // There are 3 + 3 + 7 pages of 32 rows of 136 values in bf16. Rows are rounded up to whole
    // pages.
    assert_eq!(region("kv_cache"), 13 * 32 * 136 * 2);
    assert_eq!(region("context_latent"), 64 * 128 * 2);
    let parts = [
        "cache_bytes",
        "workspace_bytes",
        "step_bytes",
        "backend_bytes",
    ];
    let sum: u64 = parts
        .iter()
        .map(|part| memory[part].as_u64().unwrap())
        .sum();
    assert_eq!(memory["total_bytes"], sum);
}

#[test]
fn the_same_seed_gives_the_same_errors() {
    let errors = |seed: u32| {
        let report = json("seed", &format!("--batch 2q1s50_q30 --seed {seed}"));
        report["phases"][0]["absolute"].as_f64().unwrap()
    };
    assert_eq!(errors(7), errors(7));
    assert_ne!(errors(7), errors(8));
}

#[test]
fn the_table_says_what_was_chosen_and_found() {
    let text = printed(
        "table",
        "--batch 2q1s50_q30s90 --threshold 1 --repeat 2 --rows 64",
    );
    for part in [
        "3 heads, bf16",
        "bf16 cache in pages of 64, on cpu (",
        "1 extend (1xq30kv90), 2 decode (2x50)",
        "decode: CPU, ",
        "prefill: CPU, ",
        "planned",
        "tokens/s",
        "GFLOP/s",
        "verdict",
        "pass",
        "median of 2 runs",
        "Context was expanded in 1 chunk of at most 64 rows.",
    ] {
        assert!(text.contains(part), "{part:?} is missing in\n{text}");
    }
    assert!(!text.contains("FAIL"), "{text}");
    // The first line has the path of the configuration.
    for line in text.lines().skip(1) {
        assert!(
            line.chars().count() <= 80,
            "{line:?} is wider than 80 columns"
        );
    }
}

#[test]
fn bad_input_is_refused_in_one_line() {
    refused::lines(include_str!("refused/run.txt"), |arguments| {
        command(CONFIG, "refused", arguments)
    });
}

#[test]
#[cfg(not(feature = "gpu"))]
fn without_a_kernel_feature_the_gpu_is_refused_with_the_feature() {
    assert_eq!(
        refused::message(&mut command(CONFIG, "cuda", "--batch q4 --device cuda")),
        "error: --device: given cuda, but none of the features `sm80`, `sm90`, `sm100` of mla-cli \
         is on, accepted cpu; for cuda, build with `--features` and one of these: sm80, sm90, \
         sm100\n"
    );
}
