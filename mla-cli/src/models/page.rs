//! The page docs/support.md.

use std::fmt::Write as _;

use super::measured::{Form, Measured};
use super::{Adapted, HardwareReport, Indexer, ModelReport, Native, Ran, Refused, Report, Support};

const HEAD: &str = "\
# Support

`mla models` prints this page from the models that are known by name, and `cargo xtask goldens
--bless` writes it. Any other model is asked about by its own configuration, `mla explain --config
config.json --sm 9.0`, and every reason is said there.
";

const RUNS: &str = "\
## Backends

Two backends serve a dense model: one for prompts (prefill), and one for decodes. A sparse model
has one for both, which attends to the lists that an indexer makes.

- **native**: kernels of this project. A build has them with the feature that is named.
- **adapted**: other people's kernels, from the crate that is named: [adapters.md](adapters.md)
  says where each has run.
- **run**: all tests passed on the GPUs that are named; `mla explain` has the day and the commit.
  **declared**: the kernels are compiled for the GPU, and have run on none of its kind.
- **indexer**: the device makes the lists, with the feature that is named; or the engine does, as
  the device has no indexer there.

Every row is for bf16 and a cache of bf16; `mla explain --kv fp8` asks about another.
A cache of `fp8_per_token` is written and gathered on every device. `WGMMA_MLA_PER_TOKEN` and
`WGMMA_MLA_SPARSE` of `sm90` read it, and so do `MMA_MLA_SCALED` and `MMA_MLA_SPARSE` of `sm80`.
";

pub(super) fn write(report: &Report) -> String {
    let mut text = HEAD.to_owned();
    memory(&report.models, &mut text);
    engine(&report.models, &mut text);
    refused(&report.refused, &mut text);
    text.push('\n');
    text += RUNS;
    for models in groups(&report.models) {
        hardware(&models, &mut text);
    }
    measured(report, &mut text);
    sources(report, &mut text);
    text
}

// Writing to a string cannot fail.
macro_rules! line {
    ($text:expr, $($argument:tt)*) => { let _ = writeln!($text, $($argument)*); };
}

fn memory(models: &[ModelReport], text: &mut String) {
    *text += "
## Memory

Bytes of cache per token: in a layer, and in all layers of the model together. A sparse model's
layers with an indexer also keep its keys, here in pages of 64, which the model's bytes count.
`mla plan memory --model NAME --fit 80GiB` plans a whole card.

| model | heads | layers | (L, P, R, V) | softmax scale | context | slots | index | bf16 | model \
| fp8 | model | fp8_ds_mla | model |
|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
";
    for model in models {
        let [latent, nope, rope, v] = model.dims;
        let index = model.memory[0].index_bytes;
        let _ = write!(
            text,
            "| {} | {} | {} | ({latent}, {nope}, {rope}, {v}) | {:.6} | {} | {} | {} |",
            model.name,
            model.heads,
            model.layers,
            model.softmax_scale,
            or_dash(model.positions),
            or_dash(model.slots),
            or_dash((index > 0).then_some(index)),
        );
        for format in ["bf16", "fp8", "fp8_ds_mla"] {
            let _ = match model.memory.iter().find(|it| it.format == format) {
                Some(memory) => write!(text, " {} | {} |", memory.layer_bytes, memory.model_bytes),
                None => write!(text, " – | – |"),
            };
        }
        text.push('\n');
    }
}

fn engine(models: &[ModelReport], text: &mut String) {
    *text += "
## Left to the engine

A model may ask for work around its attention, and implementations may disagree about a number:
`mla explain` and `mla plan memory` say the same of any model.

| model | |
|---|---|
";
    let mut works: Vec<(Vec<&str>, String)> = Vec::new();
    for model in models {
        let work = model.config.engine_work().join("; ");
        match works.iter_mut().find(|(_, known)| *known == work) {
            Some((names, _)) => names.push(model.name),
            None => works.push((vec![model.name], work)),
        }
    }
    for (names, work) in works.iter().filter(|(_, work)| !work.is_empty()) {
        line!(text, "| {} | {work} |", names.join(", "));
    }
}

fn refused(refused: &[Refused], text: &mut String) {
    *text += "
## Refused

Models known by name that ask for what no backend here has.

| model | |
|---|---|
";
    for it in refused {
        line!(text, "| {} | `{}` |", it.name, it.reason);
    }
}

fn sources(report: &Report, text: &mut String) {
    *text += "
## Sources

The public files that have each model's numbers, and the fields that no file of its publisher's
confirms.

| model | source | unconfirmed |
|---|---|---|
";
    let models = report.models.iter();
    let models = models.map(|it| (it.name, it.source, it.unconfirmed));
    let refused = report.refused.iter();
    let refused = refused.map(|it| (it.name, it.source, it.unconfirmed));
    for (name, source, unconfirmed) in models.chain(refused) {
        let unconfirmed = (!unconfirmed.is_empty()).then(|| unconfirmed.join(", "));
        line!(text, "| {name} | {source} | {} |", or_dash(unconfirmed));
    }
}

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| value.to_string())
}

/// Groups models with the same support everywhere, in the order of the first model of each group.
fn groups(models: &[ModelReport]) -> Vec<Vec<&ModelReport>> {
    let mut groups: Vec<Vec<&ModelReport>> = Vec::new();
    for model in models {
        match groups
            .iter_mut()
            .find(|it| it[0].hardware == model.hardware)
        {
            Some(group) => group.push(model),
            None => groups.push(vec![model]),
        }
    }
    groups
}

fn hardware(models: &[&ModelReport], text: &mut String) {
    let names: Vec<_> = models.iter().map(|model| model.name).collect();
    line!(text, "\n### {}\n", names.join(", "));
    *text += match models[0].slots {
        None => "| hardware | prefill | decode |\n|---|---|---|\n",
        Some(_) => "| hardware | prefill and decode | indexer |\n|---|---|---|\n",
    };
    let rows = &models[0].hardware;
    for alike in rows.chunk_by(|a, b| cells(a) == cells(b)) {
        let names: Vec<_> = alike.iter().map(label).collect();
        let [first, second] = cells(&alike[0]);
        line!(text, "| {} | {first} | {second} |", names.join(", "));
    }
}

fn label(hardware: &HardwareReport) -> String {
    match &hardware.capability {
        Some(capability) => format!("{} ({capability})", hardware.name),
        None => hardware.name.to_owned(),
    }
}

fn cells(hardware: &HardwareReport) -> [String; 2] {
    let decode = support(&hardware.decode);
    match (&hardware.prefill, &hardware.indexer) {
        (Some(prefill), _) => [support(prefill), decode],
        (None, Some(Indexer::Native(Some(feature)))) => [decode, format!("device, `{feature}`")],
        (None, Some(Indexer::Native(None))) => [decode, "device".to_owned()],
        (None, Some(Indexer::Foreign(reason))) => [decode, format!("engine: {reason}")],
        (None, _) => [decode, "engine".to_owned()],
    }
}

fn support(support: &Support) -> String {
    let native = match &support.native {
        Some(native) => describe(native),
        None => format!("no native one ({})", support.reasons.join(", ")),
    };
    let adapted = |it: &Adapted| format!("{} ({})", it.name, it.package);
    let adapted: Vec<_> = support.adapted.iter().map(adapted).collect();
    match adapted.is_empty() {
        true => native,
        false => format!("{native}; adapted: {}", adapted.join(", ")),
    }
}

fn describe(native: &Native) -> String {
    let ran = match &native.run {
        Ran::Declared => "declared".to_owned(),
        Ran::On(gpus) if gpus.is_empty() => "run".to_owned(),
        Ran::On(gpus) => format!("run on {}", gpus.join(" and ")),
    };
    match native.feature {
        Some(feature) => format!("{} (`{feature}`), {ran}", native.name),
        None => format!("{}, {ran}", native.name),
    }
}

fn measured(report: &Report, text: &mut String) {
    *text += "
## Measured

Attention of one layer from end to end, in µs, with cold caches: [BENCHMARKS.md](../BENCHMARKS.md)
has the command, the protocol, and other libraries beside it. A shape is that of a rank whose
heads are what is left of the model's after tensor parallelism: \"kimi-k2 / 4\" is kimi-k2 on four
GPUs. `mla bench BATCH --model NAME --heads N --device cuda` times any other.

| form | batch | heads | cache | µs | GPU | models / ranks |
|---|---|---:|---|---:|---|---|
";
    for it in &report.measured {
        let form = match it.form {
            Form::Decode => "decode",
            Form::Prefill => "prefill",
            Form::Sparse => "sparse",
        };
        line!(
            text,
            "| {form} | {} | {} | {} | {} | {} ({}, {}) | {} |",
            it.batch,
            it.heads,
            it.kv_format,
            it.micros,
            it.gpu,
            it.date,
            it.commit,
            shapes_of(it, &report.models)
        );
    }
    let unmeasured = report.models.iter().filter(|model| {
        let shapes = |it: &Measured| it.ranks(&model.config);
        report.measured.iter().find_map(shapes).is_none()
    });
    let names: Vec<_> = unmeasured.map(|model| model.name).collect();
    line!(text, "\nNot measured yet: {}.", names.join(", "));
}

fn shapes_of(measured: &Measured, models: &[ModelReport]) -> String {
    let named = models.iter().filter_map(|model| {
        let ranks = measured.ranks(&model.config)?;
        Some(match ranks {
            1 => model.name.to_owned(),
            ranks => format!("{} / {ranks}", model.name),
        })
    });
    named.collect::<Vec<_>>().join(", ")
}
