//! Keys that cannot both be true, each of which reads well alone.

use crate::capability::Capabilities;
use crate::errors::Fault;
use crate::key::{self, Key};
use crate::place::Phase;
use crate::priority;
use crate::spec::Spec;
use crate::vocabulary::{self, Name};

/// The features of calls with lists of slots.
const FEATURES_OF_LISTS: &[&str] = &["dense_requests", "second_cache"];

/// The contradiction of `key` with `beside`.
pub(crate) struct Contradiction {
    pub(crate) key: Key,
    pub(crate) beside: Key,
    pub(crate) fault: Fault,
}

/// Every contradiction in a spec.
pub(crate) fn find(spec: &Spec) -> Vec<Contradiction> {
    let mut found = Vec::new();
    let mut add = |key: Key, beside: Key, faults: Vec<Fault>| {
        found.extend(
            faults
                .into_iter()
                .map(|fault| Contradiction { key, beside, fault }),
        );
    };
    if let Some(sm) = &spec.sm {
        add(
            key::PRIORITY,
            key::SM,
            priority::outside(&spec.priority, sm),
        );
        add(key::COMPILED, key::SM, kernels_without_gpu(spec, sm));
    }
    add(key::FEATURES, key::SPARSE, features_of_lists(spec));
    add(key::FEATURES, key::FEATURES, features_of_caches(spec));
    match spec.phase {
        Phase::Prefill => add(key::LSE, key::LSE, prefill_without_lse(spec)),
        Phase::Decode => {
            add(key::KV, key::DTYPES, caches_without_dtype(spec));
            add(key::KV, key::DTYPES, dtypes_without_cache(spec));
            add(key::CACHE_DIMS, key::KV, partial_groups(spec));
            add(key::CACHE_DIMS, key::DIMS, other_rope(spec));
            add(key::GRAPHS, key::QUERY_LEN, graphs_beyond_queries(spec));
            add(key::MAX_QUERY_LEN, key::QUERY_LEN, several_of_single(spec));
            add(key::MAX_LIST_WIDTH, key::SPARSE, width_without_lists(spec));
        }
    }
    found
}

fn kernels_without_gpu(spec: &Spec, sm: &[Capabilities]) -> Vec<Fault> {
    let any = !spec.compiled.is_empty() && sm == [Capabilities::Any];
    let fault = || {
        Fault::new(
            "a value beside `sm = \"any\"`",
            "the capabilities that it runs on",
        )
        .hint("`sm = \"compiled\"` takes them from the constants")
    };
    any.then(fault).into_iter().collect()
}

fn prefill_without_lse(spec: &Spec) -> Vec<Fault> {
    let without = spec.lse.text == "none";
    let fault = || {
        Fault::new("`none` on `impl PrefillBackend`", "ln or log2")
            .hint("context chunks merge by their log-sum-exp")
    };
    without.then(fault).into_iter().collect()
}

// An unquantised cache holds the dtype itself.
fn caches_without_dtype(spec: &Spec) -> Vec<Fault> {
    let unquantised = |format: &&Name| vocabulary::DTYPES.contains(format);
    spec.kv
        .iter()
        .filter(unquantised)
        .filter(|format| !spec.dtypes.contains(format))
        .map(|format| {
            Fault::new(
                format!("`{}`, which is not among `dtypes`", format.text),
                format!("fp8, fp8_ds_mla, or the dtypes: {}", texts(&spec.dtypes)),
            )
            .hint("an unquantised cache holds the dtype of the queries")
        })
        .collect()
}

fn dtypes_without_cache(spec: &Spec) -> Vec<Fault> {
    if spec
        .kv
        .iter()
        .any(|format| !vocabulary::DTYPES.contains(format))
    {
        return Vec::new();
    }
    spec.dtypes
        .iter()
        .filter(|dtype| !spec.kv.contains(dtype))
        .map(|dtype| {
            Fault::new(
                format!("no format for the dtype `{}`", dtype.text),
                format!("`{}`, fp8 or fp8_ds_mla beside the others", dtype.text),
            )
            .hint("add one, or take the dtype out of `dtypes`")
        })
        .collect()
}

// Features of sparse calls, on a backend that is given none.
fn features_of_lists(spec: &Spec) -> Vec<Fault> {
    if spec.phase == Phase::Decode && spec.sparse.text != "never" {
        return Vec::new();
    }
    let given = |name: &Name| match spec.phase {
        Phase::Decode => format!("`{}` beside `sparse = \"never\"`", name.text),
        Phase::Prefill => format!("`{}` on `impl PrefillBackend`", name.text),
    };
    let features = spec.features.iter();
    features
        .filter(|name| FEATURES_OF_LISTS.contains(&name.text))
        .map(|name| {
            Fault::new(given(name), "the other features").hint(
                "only a call with lists of slots has it: a decode backend that takes them says \
                 `sparse = \"optional\"` or `\"required\"`",
            )
        })
        .collect()
}

// Prefill is given keys and values, whatever the cache is.
fn features_of_caches(spec: &Spec) -> Vec<Fault> {
    let given =
        spec.phase == Phase::Prefill && spec.features.iter().any(|name| name.text == "split_cache");
    let fault = || {
        Fault::new(
            "`split_cache` on `impl PrefillBackend`",
            "the other features",
        )
        .hint("only decode reads the cache: prefill runs beside every kind of it")
    };
    given.then(fault).into_iter().collect()
}

fn several_of_single(spec: &Spec) -> Vec<Fault> {
    let several = spec.max_query_len.filter(|max| *max > 1);
    let several = several.filter(|_| spec.query_len.text == "single");
    let fault =
        |max| {
            Fault::new(format!("{max} beside the query_len `single`"), "1, or no value").hint(
            "`query_len = \"uniform\"` or `\"ragged\"` says that a request may have several tokens",
        )
        };
    several.map(fault).into_iter().collect()
}

fn width_without_lists(spec: &Spec) -> Vec<Fault> {
    let without = spec.sparse.text == "never" && spec.max_list_width.is_some();
    let fault = || {
        Fault::new("a number beside `sparse = \"never\"`", "any").hint(
            "`sparse = \"optional\"` or `\"required\"` says that it attends to lists of slots",
        )
    };
    without.then(fault).into_iter().collect()
}

fn partial_groups(spec: &Spec) -> Vec<Fault> {
    const GROUP: u32 = 128;
    if !spec.kv.iter().any(|format| format.text == "fp8_ds_mla") {
        return Vec::new();
    }
    let rows = spec.cache_dims.iter().flatten();
    rows.filter(|[latent, _]| !latent.is_multiple_of(GROUP))
        .map(|[latent, rope]| {
            Fault::new(
                format!("`({latent},{rope})` beside the kv format `fp8_ds_mla`"),
                format!("a latent width that is a multiple of {GROUP}"),
            )
            .hint("each group of 128 values shares a scale")
        })
        .collect()
}

// R is a width of both: a row whose R no head has can never be asked for.
fn other_rope(spec: &Spec) -> Vec<Fault> {
    let (Some(dims), Some(rows)) = (&spec.dims, &spec.cache_dims) else {
        return Vec::new();
    };
    let row = rows
        .iter()
        .filter(|[_, rope]| !dims.iter().any(|[_, head, _]| head == rope))
        .map(|[latent, rope]| {
            let ropes: Vec<_> = dims.iter().map(|[_, head, _]| head.to_string()).collect();
            Fault::new(
                format!("`({latent},{rope})`, whose R is that of no `dims`"),
                format!("an R of {}", ropes.join(", ")),
            )
        });
    let head = dims
        .iter()
        .filter(|[_, head, _]| !rows.iter().any(|[_, rope]| head == rope))
        .map(|[nope, head, v]| {
            Fault::new(
                format!("no row for the dims `({nope},{head},{v})`"),
                format!("a row with R = {head}, such as `(512,{head})`"),
            )
        });
    row.chain(head).collect()
}

// A batch that the backend refuses cannot be captured.
fn graphs_beyond_queries(spec: &Spec) -> Vec<Fault> {
    let admitted = match spec.query_len.text {
        "single" => 1,
        "uniform" => 2,
        _ => 3,
    };
    let level = vocabulary::GRAPHS
        .iter()
        .position(|name| *name == spec.graphs);
    if level <= Some(admitted) {
        return Vec::new();
    }
    vec![
        Fault::new(
            format!(
                "`{}` beside the query_len `{}`",
                spec.graphs.text, spec.query_len.text
            ),
            texts(&vocabulary::GRAPHS[..=admitted]),
        )
        .hint("batches that the backend refuses cannot be captured"),
    ]
}

fn texts(names: &[Name]) -> String {
    let texts: Vec<_> = names.iter().map(|name| name.text).collect();
    texts.join(", ")
}
