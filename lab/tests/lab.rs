//! Tests of `cargo lab` on the CPU at toy sizes, and of its refusals.

#[path = "../../mla-cli/tests/refused/mod.rs"]
mod refused;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command.args(line.split_whitespace());
    command
}

fn temporary(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Returns the output, the JSON and the log of a command that succeeds.
fn lab(name: &str, line: &str) -> (String, Value, String) {
    let path = temporary(&format!("{name}.json"));
    let output = command(&format!("{line} --json {}", path.display()))
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let report = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    (String::from_utf8(output.stdout).unwrap(), report, stderr)
}

#[test]
fn ceilings_are_measured_and_written() {
    let (text, known, _) = lab("ceilings", "ceilings --edge 64 --mib 4 --samples 2");
    assert!(
        text.starts_with(known["device"].as_str().unwrap()),
        "{text}"
    );
    for field in ["flop_per_second", "bytes_per_second"] {
        assert!(known[field].as_f64().unwrap() > 0.0, "{known}");
    }
}

#[test]
fn helpers_are_timed_with_what_they_move() {
    let line = "helpers --device cpu --only 1 --tokens 128 --samples 2 --warm-up 0";
    let (text, report, _) = lab("helpers", line);
    let row = |name: &str| {
        let mut rows = report["rows"].as_array().unwrap().iter();
        let row = rows.find(|row| row["name"] == name);
        row.unwrap_or_else(|| panic!("{name}: {report:#}"))
    };
    // Rows of 576 values in bf16 are read and written, and their slots are read.
    let write = row("cache write bf16, 128 tokens");
    assert_eq!(write["bytes"], json!(128.0 * (4.0 * 576.0 + 8.0)));
    row("cache write fp8_ds_mla, 128 tokens, rotary, 16 heads");
    let product = row("W_UK and W_UV, 16 heads, 1 tokens");
    assert_eq!(product["flop"], json!(2.0 * 2.0 * 16.0 * 512.0 * 128.0));
    assert!(product["time"]["median"].as_f64().unwrap() > 0.0);
    assert!(
        text.contains("merge bf16, 128 tokens x 128 heads x 512"),
        "{text}"
    );
}

#[test]
fn arguments_that_make_no_sense_are_refused_before_anything_runs() {
    let nothing = temporary("nothing.json");
    fs::write(&nothing, "{}").unwrap();
    let nothing = nothing.display().to_string();
    refused::lines(include_str!("refused.txt"), |line| {
        command(&line.replace("{nothing}", &nothing))
    });
}

/// A small model with an indexer whose lists are shorter than the test's contexts.
const SPARSE: &str = r#"{
    "kv_lora_rank": 128, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 40,
    "num_attention_heads": 3, "torch_dtype": "bfloat16", "q_lora_rank": 48,
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 20, "indexer_rope_interleave": true
}"#;

#[test]
fn a_sparse_layer_is_timed_part_by_part() {
    let config = temporary("bench_sparse.json");
    fs::write(&config, SPARSE).unwrap();
    let line = format!(
        "indexer --config {} --batch 3q1s70_2q4s133_q9s64 --kv fp8_ds_mla --samples 3 \
         --warm-up 0 --check 4",
        config.display()
    );
    let (text, report, stderr) = lab("bench_indexer", &line);
    let parts = report["parts"].as_array().unwrap();
    let names: Vec<&str> = parts
        .iter()
        .map(|part| part["name"].as_str().unwrap())
        .collect();
    let expected = [
        "rows of both caches",
        "index queries",
        "logits",
        "lists of slots",
        "the whole selection",
        "the layer by shared lists",
        "the layer with its indexer",
    ];
    assert_eq!(names, expected);
    // A pipe gets a line for each part when it begins. Parts that take long may add further lines.
    let told = expected.map(|name| format!("timing {name}"));
    let parts_told = stderr.lines().filter(|line| line.starts_with("timing "));
    assert_eq!(parts_told.collect::<Vec<_>>(), told);
    for part in parts {
        assert!(part["time"]["median"].as_f64().unwrap() > 0.0, "{part}");
        assert!(text.contains(part["name"].as_str().unwrap()), "{text}");
    }
    // Three tokens see all of 70 positions, four see 130 to 133 in each of two requests, and nine
    // see 56 to 64.
    let pairs = 3.0 * 70.0 + 2.0 * (130 + 131 + 132 + 133) as f64 + 9.0 * 60.0;
    assert_eq!(report["rows"], 20);
    assert_eq!(parts[2]["flop"], json!(pairs * 2.0 * 4.0 * 32.0));
    // There are keys of 32 values and a scale, and logits.
    let cached = 3.0 * 70.0 + 2.0 * 133.0 + 64.0;
    assert_eq!(parts[2]["bytes"], json!(cached * 36.0 + pairs * 4.0));
    assert_eq!(report["pass"], true, "{report:#}");
    assert_eq!(report["lists"]["lists"], 4);
    assert!(report["largest_error"].as_f64().unwrap() > 0.0);
    assert!(text.ends_with("All agree.\n"), "{text}");
}

// A program that always succeeds stands in for a Python with torch.
#[test]
#[cfg(all(unix, not(feature = "gpu")))]
fn peers_are_refused_without_a_kernel_feature_before_they_are_loaded() {
    assert_eq!(
        refused::message(&mut command("peers --python true")),
        "error: GPU: given none, because none of the features `sm80`, `sm90`, `sm100` of \
         mla-kernels is on, accepted one that the built-in backends run on: build with \
         `--features` and one of these: sm80, sm90, sm100\n"
    );
}
