//! The `mla` command as a user runs it: what it prints, and how it refuses.

mod refused;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::layer::MlaLayer;
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::plan::memory::max_pages;
use mla_runtime::spec::Problem;
use serde_json::{Value, json};

fn command<S: AsRef<OsStr>>(arguments: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mla"));
    command.args(arguments);
    command
}

fn mla<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    command(arguments).output().expect("the command starts")
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

// Returns the output of a command that succeeds.
fn printed(line: &str) -> String {
    let output = mla(&words(line));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*stderr), (Some(0), ""), "{line}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(line: &str) -> Value {
    serde_json::from_str(&printed(&format!("{line} --format json"))).unwrap()
}

fn assert_refused<S: AsRef<OsStr>>(arguments: &[S], parts: &[&str]) {
    let message = refused::message(&mut command(arguments));
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

fn temporary(name: &str, text: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn spec_as_json_has_the_requests_and_the_counts() {
    assert_eq!(
        json("spec 2q2k_1q4s1k_q1s1k"),
        json!({
            "requests": [
                {"q": 2048, "kv": 2048},
                {"q": 2048, "kv": 2048},
                {"q": 4, "kv": 1024},
                {"q": 1, "kv": 1024},
            ],
            "decode": 1,
            "extend": 1,
            "prefill": 2,
            "label": "2 prefill (2x2k), 1 extend (1xq4kv1k), 1 decode (1x1k)",
        })
    );
    let table = printed("spec 32q1s1k");
    assert!(
        table.contains("32 decode (32x1k)") && table.contains("1023"),
        "{table}"
    );
}

#[test]
fn specs_that_make_no_sense_are_refused_with_the_wrong_part() {
    refused::lines(include_str!("refused/specs.txt"), |spec| {
        let spec: String = serde_json::from_str(spec).unwrap();
        command(&["spec", &spec])
    });
}

#[cfg(unix)]
#[test]
fn arguments_that_are_no_text_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    assert_refused(
        &[OsStr::new("spec"), OsStr::from_bytes(b"q1\xff")],
        &["UTF-8"],
    );
}

#[test]
fn chunks_are_those_that_are_published() {
    for (lens, chunks) in [
        (
            "768,512,512",
            json!([
                {"request_start": 0, "request_end": 2, "starts": [0, 0], "seq_lens": [768, 256],
                 "is_continuation": false},
                {"request_start": 1, "request_end": 3, "starts": [256, 0], "seq_lens": [256, 512],
                 "is_continuation": true},
            ]),
        ),
        (
            "37,1000,5",
            json!([
                {"request_start": 0, "request_end": 2, "starts": [0, 0], "seq_lens": [37, 976],
                 "is_continuation": false},
                {"request_start": 1, "request_end": 3, "starts": [976, 0], "seq_lens": [24, 5],
                 "is_continuation": true},
            ]),
        ),
        ("0", json!([])),
    ] {
        let line = format!("plan chunks --context-lens {lens} --rows 1024 --align 16");
        assert_eq!(json(&line), json!({ "chunks": chunks }));
    }
    let table = printed("plan chunks --context-lens 768,512,512 --rows 1024 --align 16");
    assert!(table.contains("0: 0..768   1: 0..256"), "{table}");
}

#[test]
fn bad_plans_are_refused_with_the_wrong_part() {
    refused::lines(include_str!("refused/plans.txt"), |line| {
        command(&words(line))
    });
    // Without a subcommand, help is printed as an error.
    let output = mla(&["plan"]);
    assert_eq!((output.status.code(), &*output.stdout), (Some(2), &b""[..]));
    assert!(String::from_utf8(output.stderr).unwrap().contains("Usage"));
}

#[test]
fn memory_is_what_the_layer_allocates() {
    let config = LayerConfig::new(Problem::new(MlaDims::R1, 16, DType::BF16), 0.1);
    let layer = MlaLayer::<CpuPrefill, CpuDecode>::of(&Cpu::new(), &config).unwrap();
    for (rows, query_len) in [(1024, 1), (64, 4), (0, 2)] {
        let limits = StepLimits::new(64, 1000, 512)
            .with_decode_query_len(query_len)
            .with_context_rows(rows);
        let plan = layer.memory_plan(&limits, 61, 2).unwrap();
        let needs = layer.memory_needs(&limits, 61, 0).unwrap();
        let line = format!(
            "plan memory --model deepseek-v3 --heads 16 --requests 64 --step-tokens 1000 \
             --decode-query-len {query_len} --context-len 32768 --rows {rows}"
        );
        let planned = json(&format!("{line} --tokens 65"));
        assert_eq!(planned["regions"], json!(plan.regions));
        assert_eq!(planned["total_bytes"], plan.total_bytes);
        let fit = json(&format!("{line} --fit 10GiB"));
        assert_eq!(fit["pages"], max_pages(&needs, 10 << 30).unwrap());
    }
}

#[test]
fn memory_adds_up_and_what_fits_is_the_most_that_fits() {
    let line = "plan memory --model deepseek-v3 --heads 16 --requests 64 --step-tokens 1024";
    let plan = json(&format!("{line} --tokens 65 --rows 1024"));
    // The plan has 2 pages of 64 tokens, 61 layers, and rows of 1152 bytes.
    assert_eq!((&plan["pages"], &plan["tokens"]), (&json!(2), &json!(128)));
    assert_eq!(plan["cache_bytes"], 61 * 128 * 1152);
    let regions = plan["regions"].as_array().unwrap();
    let of = |allocation: &str| -> u64 {
        let of_allocation = regions.iter().filter(|r| r["allocation"] == allocation);
        of_allocation
            .map(|r| r["bytes"].as_u64().unwrap().next_multiple_of(256))
            .sum()
    };
    assert_eq!(of("cache"), plan["cache_bytes"]);
    assert_eq!(of("workspace"), plan["workspace_bytes"]);
    assert_eq!(of("step"), plan["step_bytes"]);
    assert_eq!(
        of("cache") + of("workspace") + of("step"),
        plan["total_bytes"]
    );

    let bytes = 2u64 << 30;
    let fit = json(&format!("{line} --rows 1024 --fit 2GiB"));
    let page = 61 * 64 * 1152;
    let total = fit["total_bytes"].as_u64().unwrap();
    assert!(total <= bytes && bytes < total + page, "{total}");
    let fit = json(&format!("{line} --tokens 65 --fit 2GiB"));
    assert!(fit["total_bytes"].as_u64().unwrap() <= bytes);
    let more = fit["rows"].as_u64().unwrap() + 64;
    let more = json(&format!("{line} --tokens 65 --rows {more}"));
    assert!(more["total_bytes"].as_u64().unwrap() > bytes);
    let table = printed("plan memory --tokens 64 --heads 1 --layers 1");
    assert!(table.contains("kv_cache"), "{table}");
    assert!(
        table.contains(": 1 head, 1 layer, ") && table.contains(": 1 page of 64\n"),
        "{table}"
    );
}

#[test]
fn memory_of_sparse_attention_has_the_index_caches_and_the_lists() {
    let line = "plan memory --tokens 65 --step-tokens 1000 --context-len 32768 --model";
    // In GLM-5.2, 21 of 78 layers have an indexer.
    for (model, layers, indexers) in [("deepseek-v3.2", 61, 61), ("glm-5.2", 78, 21)] {
        let plan = json(&format!("{line} {model}"));
        let regions = plan["regions"].as_array().unwrap();
        let bytes = |name: &str| {
            let region = regions.iter().find(|region| region["name"] == name);
            region.map(|region| region["bytes"].as_u64().unwrap())
        };
        // There are 2 pages of 64 tokens. An index key has 128 values of one byte, and a scale.
        assert_eq!(bytes("kv_cache"), Some(layers * 128 * 1152), "{model}");
        assert_eq!(bytes("index_cache"), Some(indexers * 128 * 132), "{model}");
        assert_eq!(bytes("slot_lists"), Some(1000 * 2048 * 4), "{model}");
        assert_eq!(bytes("expanded_kv"), None, "{model}");
        let of_indexers = plan["indexer_bytes"].as_u64().unwrap();
        assert!(
            plan["total_bytes"].as_u64().unwrap() > of_indexers,
            "{model}"
        );
    }
    let fits = json("plan memory --fit 80GiB --model deepseek-v3.2");
    assert!(fits["indexer_bytes"].as_u64().unwrap() > 0);
    assert!(fits["total_bytes"].as_u64().unwrap() <= 80 << 30);
    let table = printed("plan memory --tokens 65 --dense --model deepseek-v3.2");
    assert!(table.contains("--sparse counts what that takes"), "{table}");
    assert!(!table.contains("index_cache"), "{table}");
}

// Keeps only known backends among the candidates, since other linked ones depend on features.
fn known(mut report: Value) -> Value {
    for phase in ["prefill", "decode"] {
        let candidates = report[phase]["candidates"].as_array_mut().unwrap();
        candidates.retain(|candidate| candidate["provider"] != "native");
    }
    report
}

// Write the files again with `MLA_BLESS=1 cargo test -p mla-cli`, and review the changes.
#[test]
fn explanations_are_those_on_file() {
    for (file, line) in [
        ("sm80", "explain --sm 8.0"),
        (
            "sm89_glm5_fp8",
            "explain --sm 8.9 --model glm-5 --kv fp8 --page 32",
        ),
        (
            "sm103_f32_sinks",
            "explain --sm 103 --dtype f32 --feature sinks --query-len ragged",
        ),
        (
            "sm120_minicpm3_refused",
            "explain --sm 12.0 --model minicpm3 --decode FLASHMLA --page 16",
        ),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden")
            .join(format!("explain_{file}.json"));
        let found = known(json(line));
        if std::env::var_os("MLA_BLESS").is_some() {
            fs::write(&path, serde_json::to_string_pretty(&found).unwrap() + "\n").unwrap();
        }
        let expected = fs::read(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        assert_eq!(found, expected, "{line}: differs from {path:?}");
    }
}

#[test]
fn explain_defaults_to_this_machine_and_the_model_s_own_numbers() {
    let report = json("explain --sm 9.0");
    assert_eq!(
        report["target"],
        json!({"platform": "cuda", "capability": "9.0", "present": false})
    );
    let report = json("explain");
    assert_eq!(report["target"]["present"], true);
    assert_eq!(report["heads"], 128);
    assert_eq!(report["dtype"], "bf16");
    assert_eq!(report["kv_format"], "bf16");
    assert_eq!(report["page_size"], 64);
    let report = json("explain --model kimi-k2 --dtype f16 --page 128,64 --heads 8");
    assert_eq!(
        (&report["heads"], &report["kv_format"]),
        (&json!(8), &json!("f16"))
    );
}

/// True if a backend ran on both GPUs, at the same commit or at one each.
#[cfg(not(any(feature = "sm90", all(feature = "sm80", feature = "sm100"))))]
fn has_run_on_hopper(table: &str) -> bool {
    // The table breaks lines between any two words.
    let words: Vec<_> = table.split_whitespace().collect();
    let runs = words.join(" ");
    ["H200", "H100", "H200 and H100"]
        .iter()
        .any(|gpus| runs.contains(&format!("has run on {gpus} (sm 9.0; ")))
}

// With the portable family alone, its backends are selected on every GPU since Ampere. Without it,
// its feature is named.
#[test]
#[cfg(not(any(feature = "sm90", feature = "sm100")))]
fn the_portable_backends_are_selected_on_every_gpu_since_ampere() {
    for sm in ["8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"] {
        let table = printed(&format!("explain --sm {sm}"));
        let verdicts = match cfg!(feature = "sm80") {
            true => ["prefill: MMA_ATTN", "decode: MMA_MLA"],
            // On 9.0, the backends of Hopper's own family come first.
            false if sm == "9.0" => ["prefill: none that fits", "decode: none that fits"],
            false => [
                "MMA_ATTN would be chosen: build with `--features sm80`",
                "MMA_MLA would be chosen: build with `--features sm80`",
            ],
        };
        for verdict in verdicts {
            assert!(table.contains(verdict), "{sm}: {table}");
        }
        // The table has the backend's declarations, and the GPUs that it has run on.
        assert!(has_run_on_hopper(&table), "{sm}: {table}");
        // For a backend that cannot run on this GPU, or that is not for dense attention, the reason
        // suffices.
        let lines = table.lines();
        let refused: Vec<_> = lines
            .skip_while(|line| !line.starts_with(" WGMMA_MLA_SPARSE "))
            .enumerate()
            .take_while(|(number, line)| *number == 0 || line.starts_with("  "))
            .map(|(_, line)| line)
            .collect();
        let refused = refused.join("\n");
        assert!(refused.contains("dense: takes sparse"), "{table}");
        assert!(!refused.contains("has run on"), "{table}");
    }
    let table = printed("explain --sm 7.5");
    assert!(table.contains("decode: none fits"), "{table}");
}

#[test]
#[cfg(not(any(feature = "sm80", feature = "sm90")))]
fn explain_names_the_feature_that_a_backend_wants() {
    let table = printed("explain --sm 9.0");
    for line in [
        "prefill: none that fits is in this program; WGMMA_ATTN would be chosen: build with \
         `--features sm90`",
        "decode: none that fits is in this program; WGMMA_MLA would be chosen: build with \
         `--features sm90`",
    ] {
        assert!(table.lines().any(|given| given == line), "{table}");
    }
    // The backend has run, though it is not in this program.
    assert!(has_run_on_hopper(&table), "{table}");
    // Here, the number of heads is a further reason against them.
    let table = printed("explain --sm 9.0 --heads 200 --query-len ragged");
    assert!(table.contains("decode: none fits\n"), "{table}");
}

#[test]
fn a_configuration_file_is_read() {
    let config = json!({
        "architectures": ["SomethingV3"],
        "text_config": {
            "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
            "num_attention_heads": 40, "num_hidden_layers": 3, "torch_dtype": "float16",
        },
    });
    let path = temporary("nested.json", config.to_string().as_bytes());
    let path = path.to_str().unwrap();
    let report = json(&format!("explain --sm 9.0 --config {path}"));
    assert_eq!(
        report["dims"],
        json!({"latent": 256, "nope": 64, "rope": 32, "v": 64})
    );
    assert_eq!(
        (&report["heads"], &report["dtype"]),
        (&json!(40), &json!("f16"))
    );
    let plan = json(&format!("plan memory --config {path} --tokens 64 --rows 0"));
    assert_eq!(plan["cache_bytes"], 3 * 64 * (256 + 32) * 2);
}

#[test]
fn bad_configurations_are_refused_with_the_wrong_part() {
    for before in ["explain --sm 9.0", "plan memory --tokens 1"] {
        refused::lines(include_str!("refused/configs.txt"), |text| {
            let mut command = command(&words(before));
            command
                .arg("--config")
                .arg(temporary("refused_config.json", text.as_bytes()));
            command
        });
    }
}

#[test]
fn unknown_names_and_values_are_refused_with_what_exists() {
    refused::lines(include_str!("refused/names.txt"), |line| {
        command(&words(line))
    });
}

#[test]
fn a_refused_preference_is_explained_and_not_replaced() {
    let report = json("explain --sm 10.0 --prefill CUDNN --model glm-5");
    assert_eq!(report["prefill"]["selected"], Value::Null);
    let candidates = report["prefill"]["candidates"].as_array().unwrap();
    let cudnn = candidates
        .iter()
        .find(|candidate| candidate["name"] == "CUDNN")
        .unwrap();
    assert_eq!(cudnn["valid"], false);
    assert_eq!(cudnn["reasons"][0]["field"], "dims");
    assert_eq!(cudnn["reasons"][0]["given"], "(192,64,256)");
    assert_eq!(cudnn["reasons"][0]["accepted"], "(128,64,128)");
    let table = printed("explain --sm 10.0 --prefill CUDNN --model glm-5");
    assert!(
        table.contains("prefill: none, since CUDNN does not fit"),
        "{table}"
    );
    assert!(
        table.contains("dims (192,64,256): takes (128,64,128)"),
        "{table}"
    );
}

#[test]
fn a_reader_that_stops_early_is_no_error() {
    use std::process::Stdio;
    let mut child = Command::new(env!("CARGO_BIN_EXE_mla"))
        .args(["spec", "1000000q1s2", "--format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stderr, b"");
}

#[test]
fn help_and_version_go_to_standard_output() {
    for line in [
        "--help",
        "--version",
        "explain --help",
        "plan memory --help",
    ] {
        let output = mla(&words(line));
        assert_eq!(output.status.code(), Some(0), "{line}");
        assert!(
            !output.stdout.is_empty() && output.stderr.is_empty(),
            "{line}"
        );
    }
}

#[test]
fn a_folder_without_a_build_report_is_refused_with_what_makes_one() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-builds");
    let folder = folder.to_str().unwrap();
    assert_refused(
        &["build-report", "--target-dir", folder],
        &["--target-dir", folder, "--features sm90"],
    );
    let reports = Path::new(folder).join("mla-build");
    fs::create_dir_all(&reports).unwrap();
    assert_refused(
        &["build-report", "--target-dir", folder],
        &["--features sm90"],
    );
    fs::write(reports.join("broken.json"), "{}").unwrap();
    assert_refused(&["build-report", "--target-dir", folder], &["broken.json"]);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_processor_runs_every_model_and_is_no_fallback_for_a_gpu() {
    let selected = |report: &Value| {
        (
            report["prefill"]["selected"].clone(),
            report["decode"]["selected"].clone(),
        )
    };
    for model in ["deepseek-v2-lite", "deepseek-r1", "glm-5", "minicpm3"] {
        for rest in [
            "",
            "--dtype f16 --kv fp8",
            "--dtype f32 --kv fp8_ds_mla --sparse",
        ] {
            let report = json(&format!(
                "explain --model {model} --prefill CPU --decode CPU {rest}"
            ));
            // Without a GPU, these backends are those of this machine. With a GPU, they are
            // refused.
            match report["target"]["platform"].as_str() {
                Some("cpu") => assert_eq!(selected(&report), (json!("CPU"), json!("CPU"))),
                _ => assert_eq!(selected(&report), (Value::Null, Value::Null)),
            }
        }
    }
    let report = json("explain --sm 8.0");
    assert_eq!(selected(&report), (Value::Null, Value::Null));
    let candidates = report["decode"]["candidates"].as_array().unwrap();
    let cpu = candidates
        .iter()
        .find(|candidate| candidate["name"] == "CPU")
        .unwrap();
    assert_eq!(
        cpu["reasons"][0]["message"],
        "platform: given cuda, accepted cpu"
    );
}

#[test]
fn the_selftest_tries_every_backend_of_the_processor() {
    let output = mla(&words("selftest --device cpu"));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for (phase, topics) in [
        ("decode", mla_conformance::DecodeTopic::ALL.len()),
        ("prefill", mla_conformance::PrefillTopic::ALL.len()),
    ] {
        let right = format!(": {topics} topics right, in ");
        let of_cpu = format!("{phase} CPU (");
        let mut lines = text.lines().filter(|line| line.starts_with(&of_cpu));
        assert!(lines.any(|line| line.contains(&right)), "{text}");
    }
    assert!(!text.contains("not for this device"), "{text}");
    // Both attention alone and the layer are timed.
    for case in ["8q1s4k", "q2k", "2q100_8q1s1k"] {
        assert!(
            text.lines().any(|line| line.trim_start().starts_with(case)),
            "{text}"
        );
    }
    assert!(text.ends_with("\nAll is right.\n"), "{text}");
    // Meanwhile, its progress goes to standard error.
    let progress = String::from_utf8(output.stderr).unwrap();
    assert!(
        progress.lines().any(|line| line == "decode CPU: nan_rows"),
        "{progress}"
    );
}

// The refusal is one sentence. With a GPU, the selftest would run.
#[test]
#[cfg(not(feature = "gpu"))]
fn the_selftest_without_a_gpu_says_so() {
    let message = refused::message(&mut command(&["selftest"]));
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.contains("--device: given cuda, but"), "{message}");
}

#[test]
fn the_page_of_support_is_what_the_command_prints() {
    let page = printed("models");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/support.md");
    if std::env::var_os("MLA_BLESS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let advice = "run `cargo xtask goldens --bless`, and read what changed";
    assert_eq!(page, fs::read_to_string(&path).unwrap(), "{advice}");
    for preset in mla_runtime::model::PRESETS {
        let row = format!("| {} | {} |", preset.name, preset.source);
        assert!(page.contains(&row), "{row}");
    }
}

#[test]
fn models_as_json_are_those_that_run_and_those_that_are_refused() {
    let report = json("models");
    let names = ["models", "refused"].map(|list| report[list].as_array().unwrap());
    let names = names
        .into_iter()
        .flatten()
        .map(|model| model["name"].as_str().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    let mut presets: Vec<_> = mla_runtime::model::PRESETS
        .iter()
        .map(|it| it.name)
        .collect();
    presets.sort_unstable();
    assert_eq!(names, presets);
    let hardware = &report["models"][0]["hardware"][0];
    assert_eq!(hardware["capability"], "8.0");
    assert_eq!(hardware["decode"]["native"]["name"], "MMA_MLA");
}

#[test]
fn unconfirmed_fields_are_said() {
    for line in [
        "explain --sm 9.0 --model sarvam-105b",
        "plan memory --model sarvam-105b --tokens 64",
    ] {
        let text = printed(line);
        let note = "no file of the publisher's confirms rope_scaling, max_position_embeddings";
        assert!(text.contains(note), "{text}");
        assert!(!printed(&line.replace("sarvam-105b", "glm-5")).contains("confirms"));
    }
    // A model with sinks is explained with this feature.
    let report = json("explain --sm 9.0 --model hy4-preview");
    assert_eq!(report["features"], json!(["sinks"]));
}

#[test]
fn a_model_with_an_indexer_is_sparse_unless_dense_is_asked_for() {
    for (line, sparse) in [
        ("explain --sm 9.0 --model deepseek-v3.2", true),
        ("explain --sm 9.0 --model glm-5.2 --dense", false),
        ("explain --sm 9.0 --model glm-5 --sparse", true),
        ("explain --sm 9.0 --model deepseek-r1", false),
        ("explain --sm 9.0 --model deepseek-r1 --sparse", true),
    ] {
        assert_eq!(json(line)["sparse"], sparse, "{line}");
    }
}
