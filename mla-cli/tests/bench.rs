//! Tests of `mla bench` on the CPU at toy sizes: shipped sweeps, their output, and refusals.

mod refused;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// These sizes take a fraction of a second.
const TOY: &str = "--dims 32x16x8x16 --heads 2 --samples 3 --warm-up 0 --cold-cache off --check 4";

fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mla"));
    command.args(line.split_whitespace());
    command
}

fn mla(line: &str) -> Output {
    command(line).output().expect("the command starts")
}

fn temporary(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Returns the output and the JSON of a benchmark that succeeds.
fn bench(name: &str, line: &str) -> (String, Value) {
    let json = temporary(&format!("{name}.json"));
    let output = mla(&format!("bench {line} --json {}", json.display()));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{line}: {stderr}");
    let report: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    // A pipe gets a line for each row when it begins. Rows that take long may add further lines.
    let rows = rows(&report).len();
    let told: Vec<&str> = stderr
        .lines()
        .filter(|line| line.starts_with("row "))
        .collect();
    assert_eq!(told.len(), rows, "{line}: {stderr}");
    for (index, told) in told.into_iter().enumerate() {
        let begin = format!("row {} of {rows}: ", index + 1);
        assert!(told.starts_with(&begin), "{line}: {told}");
    }
    (String::from_utf8(output.stdout).unwrap(), report)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().unwrap()
}

fn column<'a>(report: &'a Value, name: &str) -> Vec<&'a Value> {
    rows(report).iter().map(|row| &row[name]).collect()
}

/// Returns the rows, all of which agree with the reference.
fn right(report: &Value) -> &[Value] {
    let rows = rows(report);
    assert!(!rows.is_empty());
    for row in rows {
        assert_eq!(row["errors"]["pass"], true, "{row}");
    }
    rows
}

/// Returns the drawing of a benchmark that succeeds.
fn drawing(name: &str, line: &str) -> String {
    let svg = temporary(&format!("{name}.svg"));
    bench(name, &format!("{line} {TOY} --plot {}", svg.display()));
    fs::read_to_string(&svg).unwrap()
}

#[test]
fn every_shipped_sweep_runs() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sweeps");
    // Ranges that make each sweep small. A sweep without an entry here fails below.
    let ranges = [
        ("crossover", "--range b=1 --range q=8,16 --range s=1"),
        ("decode", "--range b=1,3 --range s=1"),
        ("heads", "--range b=1,2"),
        ("mixed", "--range s=1 --range q=1"),
        ("models", ""),
        ("page", "--range s=1"),
        ("prefill", "--range q=1"),
        (
            "sparse",
            "--kv bf16 --range b=2 --range s=1 --topk 40 --valid 9,40",
        ),
        ("speculative", "--range b=1 --range q=1,8"),
        ("threshold", ""),
    ];
    let mut found = 0;
    for file in fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let (_, ranges) = ranges
            .iter()
            .find(|(known, _)| *known == name)
            .unwrap_or_else(|| panic!("{name} has no toy ranges"));
        let line = format!("--config {} {TOY} {ranges}", path.display());
        let (text, report) = bench(&format!("sweep-{name}"), &line);
        right(&report);
        assert!(report["settings"]["description"].is_string(), "{name}");
        assert!(text.contains("µs"), "{name}");
        found += 1;
    }
    assert_eq!(found, ranges.len());
}

#[test]
fn ranges_expand_to_rows_in_order_with_labels() {
    let (_, report) = bench(
        "ranges",
        &format!(
            "{{b}}q1s{{s}} q{{s}}_2q4s1k --range b=1..4*4 --range s=64,96 {TOY} --measure layer"
        ),
    );
    let columns = ["id", "batch", "requests", "max_kv_len", "kind"];
    let given = rows(&report)
        .iter()
        .map(|row| columns.map(|name| &row[name]));
    let golden = json!([
        ["q1s64", "1 decode (1x64)", 1, 64, "layer"],
        ["q1s96", "1 decode (1x96)", 1, 96, "layer"],
        ["4q1s64", "4 decode (4x64)", 4, 64, "layer"],
        ["4q1s96", "4 decode (4x96)", 4, 96, "layer"],
        [
            "q64_2q4s1k",
            "1 prefill (1x64), 2 extend (2xq4kv1k)",
            3,
            1024,
            "layer"
        ],
        [
            "q96_2q4s1k",
            "1 prefill (1x96), 2 extend (2xq4kv1k)",
            3,
            1024,
            "layer"
        ],
    ]);
    assert_eq!(json!(given.collect::<Vec<_>>()), golden);
}

#[test]
fn an_interrupted_run_leaves_the_rows_up_to_there() {
    let [json, csv] = ["interrupted.json", "interrupted.csv"].map(temporary);
    let toy = TOY.replace("--samples 3", "--samples 2000");
    let line = format!(
        "bench q1s64 q1s96 q1s256k {toy} --json {} --csv {}",
        json.display(),
        csv.display()
    );
    let mut child = Command::new(env!("CARGO_BIN_EXE_mla"))
        .args(line.split_whitespace())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the command starts");
    let told = BufReader::new(child.stderr.take().expect("it is a pipe"));
    let third = told
        .lines()
        .map_while(Result::ok)
        .find(|told| told.starts_with("row 3 of 3: "));
    // The last row takes seconds.
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success());
    assert!(third.is_some());
    let report: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(column(&report, "id"), ["q1s64", "q1s96"]);
    assert_eq!(report["missing"], 1);
    assert_eq!(fs::read_to_string(csv).unwrap().lines().count(), 3);
}

#[test]
#[cfg(target_os = "linux")]
fn a_result_that_cannot_be_saved_is_shown_all_the_same() {
    let output = mla(&format!("bench q1s64 {TOY} --json /dev/full"));
    let text = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(text.contains(" CPU "), "{text}");
    let error = stderr.lines().last().unwrap();
    assert!(
        error.starts_with("error: output: \"/dev/full\": cannot be written: "),
        "{stderr}"
    );
}

#[test]
fn a_reader_of_the_log_that_stops_early_ends_nothing() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_mla"))
        .args(format!("bench {{b}}q1s64 --range b=1..3 {TOY}").split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("3q1s64"));
}

#[test]
fn parameters_compete_and_models_do_not() {
    let (text, report) = bench(
        "pages",
        &format!("2q1s64 2q1s128 --page 16,64 --kv bf16,fp8 {TOY}"),
    );
    let ids = column(&report, "id");
    for id in [
        "2q1s64 kv=bf16",
        "2q1s128 kv=bf16",
        "2q1s64 kv=fp8",
        "2q1s128 kv=fp8",
    ] {
        assert_eq!(
            ids.iter().filter(|given| **given == id).count(),
            2,
            "{ids:?}"
        );
        // The case's row in the comparison names a winner, or two whose times are equal to the
        // nanosecond.
        let line = text
            .lines()
            .rfind(|line| line.trim().starts_with(id))
            .unwrap();
        let winners = line.matches('*').count();
        let cells: Vec<&str> = line[id.len() + 1..]
            .split_whitespace()
            .filter(|cell| *cell != "*")
            .collect();
        let tie = cells.len() == 2 && cells[0] == cells[1];
        assert!(winners == 1 || (winners == 2 && tie), "{line}");
    }
    assert!(
        text.contains("CPU page=16") && text.contains("CPU page=64"),
        "{text}"
    );
}

// Two forms of the cache compete, the batch-invariant mode with the free one, and rows in an order
// of the engine's own with those in the order of the step.
#[test]
fn both_values_of_a_switch_compete() {
    for (key, line, rows) in [
        ("split_cache", "2q1s64 2q3s40_q70 --kv bf16,fp8", 8),
        ("batch_invariant", "2q1s64 2q3s40_q70", 4),
        ("own_rows", "3q1s70_2q4s33_q30_q9s40 --threshold 8", 2),
    ] {
        let argument = key.replace('_', "-");
        let (text, report) = bench(key, &format!("{line} --{argument} off,on {TOY}"));
        assert_eq!(right(&report).len(), rows, "{key}");
        for switch in ["off", "on"] {
            let own = right(&report)
                .iter()
                .filter(|row| row["parameters"][key] == switch);
            assert_eq!(own.count(), rows / 2, "{key}");
            assert!(text.contains(&format!(" {key}={switch}")), "{text}");
        }
    }
}

#[test]
fn sparse_attention_is_that_to_listed_slots() {
    let lists = "--topk 24 --lists random,clustered,pages,sorted,shared --valid 24,7 --page 16";
    let line = format!("3q2s100_q4s9 {lists} {TOY} --kv f32,fp8 --dtype f32");
    let line = line.replace("--check 4", "--check 20");
    let (_, report) = bench("sparse", &line);
    let rows = right(&report);
    assert_eq!(rows.len(), 2 * 5 * 2);
    let mut ids: Vec<_> = rows.iter().map(|row| row["id"].as_str().unwrap()).collect();
    assert_eq!(ids[0], "3q2s100_q4s9 kv=f32 lists=random valid=24");
    ids.dedup();
    assert_eq!(ids.len(), rows.len());
    for row in rows {
        assert_eq!(row["kind"], "sparse");
        // Six lists have all their entries. Four tokens see 6 to 9 tokens.
        let pairs = match row["parameters"]["valid"].as_str().unwrap() {
            "24" => 6 * 24 + 6 + 7 + 8 + 9,
            _ => 6 * 7 + 6 + 7 + 7 + 7,
        };
        let flop = 2.0 * 2.0 * (64.0 + 8.0) * f64::from(pairs);
        assert_eq!(row["cost"]["flop"].as_f64(), Some(flop));
    }
}

#[test]
fn a_report_has_the_configuration_the_machine_and_every_figure() {
    let (_, report) = bench("figures", &format!("3q1s100 --layers 2 --seed 9 {TOY}"));
    assert_eq!(report["settings"]["layers"], 2);
    assert_eq!(report["settings"]["batches"], json!(["3q1s100"]));
    assert_eq!(
        report["protocol"],
        json!({"samples": 3, "warm_up": 0, "cold_cache": false, "graphs": false})
    );
    let environment = &report["environment"];
    for field in ["git_commit", "git_dirty", "rustc", "mla"] {
        assert!(environment["versions"][field].is_string(), "{field}");
    }
    assert!(environment["machine"]["threads"].as_u64().unwrap() > 0);
    let row = &report["rows"][0];
    assert_eq!(row["samples_us"].as_array().unwrap().len(), 3);
    let us = |name: &str| number(&row["us"][name]);
    assert!(us("min") <= us("median") && us("median") <= us("max"));
    assert!(us("min") <= us("mean") && us("mean") <= us("max"));
    let seconds = us("median") / 1e6;
    let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    assert!(close(number(&row["tokens_per_second"]), 3.0 / seconds));
    // 2·H·(2L + R) for each of 3 · 100 pairs.
    let flop = 2.0 * 2.0 * (64.0 + 8.0) * 300.0;
    assert_eq!(row["cost"]["flop"].as_f64(), Some(flop));
    assert!(close(number(&row["tflops"]), flop / seconds / 1e12));
    assert!(row["planned_us"].is_number() && row["e2e_us"] == row["us"]["median"]);
}

#[test]
fn limits_are_those_of_the_ceilings_and_drawn() {
    let [ceilings, csv, svg, png] = ["c.json", "c.csv", "c.svg", "c.png"].map(temporary);
    let (_, report) = bench("device", &format!("1q1s32 {TOY}"));
    let known = json!({
        "device": report["device"], "dtype": "bf16", "flop_per_second": 1e11,
        "bytes_per_second": 1e10, "source": "measured",
    });
    fs::write(&ceilings, known.to_string()).unwrap();
    let line = format!(
        "{{b}}q1s{{s}} --range b=1,2 --range s=32..128*2 {TOY} --ceilings {} --csv {} --plot",
        ceilings.display(),
        csv.display()
    );
    let (_, report) = bench("limits", &format!("{line} {}", svg.display()));
    let row = &report["rows"][0];
    let limit = (number(&row["cost"]["flop"]) / number(&known["flop_per_second"]))
        .max(number(&row["cost"]["bytes"]) / number(&known["bytes_per_second"]));
    let seconds = number(&row["us"]["median"]) / 1e6;
    assert!((number(&row["of_limit"]) / (limit / seconds) - 1.0).abs() < 1e-9);

    let drawn = fs::read_to_string(&svg).unwrap();
    for text in ["Roofline", "Time by kv length", "FLOP per byte", "q1s"] {
        assert!(drawn.contains(text), "{text}");
    }
    bench("limits-png", &format!("{line} {}", png.display()));
    assert!(fs::read(&png).unwrap().starts_with(b"\x89PNG"));

    let table = fs::read_to_string(&csv).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 1 + 6);
    assert!(lines[0].starts_with("case,kind,backend,batch,requests,tokens,median_us,"));
    assert!(lines[1].starts_with("q1s32,decode,CPU,1 decode (1x32),1,1,"));
}

#[test]
fn curves_are_named_in_the_order_of_their_numbers() {
    let drawn = drawing("order", "{b}q1s{s} --range b=1,2,16 --range s=32..256*2");
    let places = ["CPU, 1 request\n", "CPU, 2 requests", "CPU, 16 requests"].map(|name| {
        drawn
            .find(name)
            .unwrap_or_else(|| panic!("{name} is not drawn"))
    });
    assert!(places.is_sorted(), "{places:?}");
}

#[test]
fn prompts_of_all_lengths_are_one_curve() {
    let drawn = drawing("prompts", "q{q} --range q=16,32,64");
    assert!(
        drawn.contains("\nCPU\n") && !drawn.contains("CPU, q"),
        "{drawn}"
    );
}

#[test]
fn the_axis_is_what_varies() {
    for (line, caption, axis) in [
        ("{b}q1s64 --range b=1,2,4", "number of requests", "requests"),
        (
            "q1s{s} --range s=32,64,128",
            "kv length",
            "kv tokens per request",
        ),
        (
            "q{q}s64 --range q=2,4,8",
            "query length",
            "query tokens per request",
        ),
    ] {
        let drawn = drawing("axis", line);
        for text in [format!("Time by {caption}"), format!("\n{axis}\n")] {
            assert!(drawn.contains(&text), "{line}: {text:?} in {drawn}");
        }
    }
}

#[test]
fn cases_of_a_file_are_attention_in_a_dtype_or_steps_of_a_layer() {
    let cases = file(
        "cases.json",
        r#"{"protocol": "", "layer": [{"id": "l", "h": 1, "batch": "2q1s70_q20s90"}],
            "decode": [{"id": "d", "b": 2, "h": 1, "s_q": 1, "kv": 70, "dtype": "f32"},
                       {"id": "r", "b": 1, "h": 2, "s_q": 1, "kv": 9, "dims": "8x4x0x4"}],
            "prefill": [{"id": "p", "h": 2, "q": [5], "causal": true, "dims": "8x4x0x6"}]}"#,
    );
    let line = format!("--cases {cases} --samples 2 --warm-up 0 --cold-cache off --check 4");
    let (_, report) = bench("cases-of-a-file", &line);
    assert_eq!(column(&report, "id"), ["d", "r", "p", "l"]);
    assert_eq!(
        column(&report, "kind"),
        ["decode", "decode", "prefill", "layer"]
    );
    assert_eq!(column(&report, "tokens"), [2, 1, 5, 22]);
    // There are 2·H·(2L + R) FLOP for each of 140 pairs, and 4 bytes per element.
    let cost = &report["rows"][0]["cost"];
    assert_eq!(cost["flop"], json!(2.0 * (2.0 * 512.0 + 64.0) * 140.0));
    assert!(number(&cost["bytes"]) > 140.0 * 576.0 * 4.0);
    // There are 2·H·(2L) FLOP for each of 9 pairs, and 2·H·(P + V) for each of 15.
    let flops = [1, 2].map(|row| report["rows"][row]["cost"]["flop"].clone());
    assert_eq!(flops, [json!(4.0 * 16.0 * 9.0), json!(4.0 * 10.0 * 15.0)]);
    right(&report);
}

#[test]
fn a_crossover_is_found_between_the_paths() {
    let svg = temporary("crossover.svg");
    let (text, report) = bench(
        "crossover",
        &format!(
            "q{{q}}s300 --range q=1,8,200 --path absorbed,expanded --query-chunk 8 --dims \
             256x8x8x8 --heads 4 --samples 5 --cold-cache off --check 4 --dtype f32 --plot {}",
            svg.display()
        ),
    );
    let crossover = &report["crossovers"][0];
    assert_eq!(crossover["points"].as_array().unwrap().len(), 3);
    // The formula is L·d / (L·d/C + 2L − d) with C = 291, which a little more than 8 query tokens
    // leave of 300.
    let predicted = 4096.0 / (4096.0 / 291.0 + 512.0 - 16.0);
    assert!((number(&crossover["predicted_by_arithmetic"]) - predicted).abs() < 1e-9);
    assert!(text.contains("crossover of 1 x kv 300: "), "{text}");
    // For a CPU, the prediction comes from a short run, unless other work disturbed the run.
    match &crossover["basis"]["run"]["seconds"] {
        serde_json::Value::Number(seconds) => {
            assert!(seconds.as_f64().unwrap() > 0.0);
            assert!(
                text.contains(" s on this machine, by multiply-adds alone "),
                "{text}"
            );
        }
        _ => {
            assert_eq!(crossover["basis"], "nothing");
            assert!(text.contains("; no prediction for this machine"), "{text}");
        }
    }
    assert!(
        fs::read_to_string(svg)
            .unwrap()
            .contains("query tokens per request")
    );
}

#[test]
fn a_comparison_tells_changes_from_noise() {
    let (_, report) = bench("before", &format!("2q1s64 4q1s64 {TOY}"));
    let scaled = |name: &str, factors: [f64; 2]| {
        let mut report = report.clone();
        for (row, factor) in report["rows"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .zip(factors)
        {
            // The samples do not overlap, whatever the noise of this machine.
            let samples: Vec<f64> = (0..20)
                .map(|n| 100.0 * factor * (1.0 + f64::from(n) * 1e-4))
                .collect();
            row["samples_us"] = json!(samples);
            row["us"]["median"] = json!(100.0 * factor);
            // Results of earlier versions lack this error.
            row["errors"].as_object_mut().unwrap().remove("absolute");
        }
        let path = temporary(name);
        fs::write(&path, report.to_string()).unwrap();
        path.display().to_string()
    };
    let before = scaled("compare-before.json", [1.0, 1.0]);
    let cases = [
        ([1.0, 1.0], 0, json!(["same", "same"])),
        ([1.2, 1.0], 1, json!(["slower", "same"])),
        ([0.8, 1.0], 0, json!(["faster", "same"])),
        // The difference is significant, but too small to matter.
        ([1.01, 1.0], 0, json!(["same", "same"])),
    ];
    for (factors, status, verdicts) in cases {
        let after = scaled("compare-after.json", factors);
        let output = mla(&format!("bench compare {before} {after} --format json"));
        let comparison: Value = serde_json::from_slice(&output.stdout).unwrap();
        let given = column(&comparison, "verdict");
        assert_eq!(
            (output.status.code(), json!(given)),
            (Some(status), verdicts),
            "{factors:?}"
        );
    }
    // Three samples are too few, however large the difference is.
    let after = scaled("compare-few.json", [2.0, 1.0]);
    let mut few: Value = serde_json::from_str(&fs::read_to_string(&after).unwrap()).unwrap();
    few["rows"][0]["samples_us"] = json!([200.0, 200.1, 200.2]);
    fs::write(&after, few.to_string()).unwrap();
    let output = mla(&format!("bench compare {before} {after}"));
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_runs() {
    let nothing = file("nothing.json", "{}");
    let cases = file(
        "cases.json",
        r#"{"protocol": "", "decode": [{"id": "d", "b": 1, "h": 2, "s_q": 1, "kv": 9}]}"#,
    );
    let listed = file("listed.yaml", "batches: [8q1s1k]\nlists: sorted\n");
    let results = file("results.json", r#"{"schema": 1}"#);
    let files = [
        ("nothing", nothing),
        ("cases", cases),
        ("listed", listed),
        ("results", results),
        ("list", file("list.json", "[]")),
        ("empty", file("empty.json", "")),
        ("folder", env!("CARGO_TARGET_TMPDIR").to_owned()),
    ];
    refused::lines(include_str!("refused/bench.txt"), |line| {
        let line = files.iter().fold(line.to_owned(), |line, (name, path)| {
            line.replace(&format!("{{{name}}}"), path)
        });
        command(&format!("bench {line}"))
    });
}

#[test]
fn cases_that_make_no_sense_are_refused() {
    refused::lines(include_str!("refused/cases.txt"), |text| {
        command(&format!("bench --cases {}", file("refused.json", text)))
    });
}

#[cfg(unix)]
#[test]
fn what_a_link_leads_to_is_written_and_the_link_stays() {
    let folder = temporary("links");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir(&folder).unwrap();
    let mut line = format!("1q1s64 {TOY}");
    let outputs = [("csv", "csv"), ("plot", "svg")].map(|(argument, extension)| {
        let place = folder.join(format!("kept-{extension}"));
        fs::write(&place, "before").unwrap();
        let link = folder.join(format!("link.{extension}"));
        std::os::unix::fs::symlink(&place, &link).unwrap();
        line += &format!(" --{argument} {}", link.display());
        (place, link)
    });
    bench("links", &line);
    for (place, link) in outputs {
        assert!(link.is_symlink(), "{link:?}");
        assert_ne!(fs::read_to_string(&place).unwrap(), "before", "{place:?}");
    }
    // Only these four files are left.
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 4);
}

/// Writes a file for a test.
fn file(name: &str, text: &str) -> String {
    let path = temporary(name);
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn sweep_files_that_make_no_sense_are_refused_with_their_line() {
    refused::lines(include_str!("refused/sweeps.txt"), |text| {
        let path = file("refused.yaml", &text.replace('⏎', "\n"));
        command(&format!("bench --config {path}"))
    });
}
