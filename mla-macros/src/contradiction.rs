//! Pairs of keys that contradict each other although each is valid alone.

use crate::capability::Capabilities;
use crate::errors::Fault;
use crate::key::{self, Key};
use crate::place::Phase;
use crate::priority;
use crate::spec::Spec;
use crate::vocabulary::{self, Name};

/// The features that only calls with lists of slots have.
const FEATURES_OF_LISTS: &[&str] = &["dense_requests", "second_cache"];

/// A contradiction between `key` and `beside`.
pub(crate) struct Contradiction {
    pub(crate) key: Key,
    pub(crate) beside: Key,
    pub(crate) fault: Fault,
}

/// Every contradiction in a spec.
pub(crate) fn find(spec: &Spec) -> Vec<Contradiction> {
    let mut found = Vec::new();
    let mut add = |key: Key, beside: Key, fault: Fault| {
        found.push(Contradiction { key, beside, fault });
    };
    if let Some(sm) = &spec.sm {
        for fault in priority::outside(&spec.priority, sm) {
            add(key::PRIORITY, key::SM, fault);
        }
        if !spec.compiled.is_empty() && sm == &[Capabilities::Any] {
            let fault = Fault::new(
                "a value beside `sm = \"any\"`",
                "the capabilities that it runs on",
            );
            let hint = "`sm = \"compiled\"` takes them from the constants";
            add(key::COMPILED, key::SM, fault.hint(hint));
        }
    }
    // Features of sparse calls on a backend without sparse calls.
    let has_lists = spec.phase == Phase::Decode && spec.sparse.text != "never";
    let of_lists = spec
        .features
        .iter()
        .filter(|it| FEATURES_OF_LISTS.contains(&it.text));
    for name in of_lists.filter(|_| !has_lists) {
        let given = match spec.phase {
            Phase::Decode => format!("`{}` beside `sparse = \"never\"`", name.text),
            Phase::Prefill => format!("`{}` on `impl PrefillBackend`", name.text),
        };
        let hint = "only a call with lists of slots has it: a decode backend that takes them says \
                    `sparse = \"optional\"` or `\"required\"`";
        let fault = Fault::new(given, "the other features").hint(hint);
        add(key::FEATURES, key::SPARSE, fault);
    }
    match spec.phase {
        Phase::Prefill => prefill(spec, &mut add),
        Phase::Decode => {
            caches(spec, &mut add);
            queries(spec, &mut add);
        }
    }
    found
}

type Add<'a> = &'a mut dyn FnMut(Key, Key, Fault);

// A prefill backend gets keys and values, so the kind of cache does not concern it.
fn prefill(spec: &Spec, add: Add<'_>) {
    if spec.features.iter().any(|name| name.text == "split_cache") {
        let given = "`split_cache` on `impl PrefillBackend`";
        let hint = "only decode reads the cache: prefill runs beside every kind of it";
        let fault = Fault::new(given, "the other features").hint(hint);
        add(key::FEATURES, key::FEATURES, fault);
    }
    if spec.lse.text == "none" {
        let fault = Fault::new("`none` on `impl PrefillBackend`", "ln or log2");
        let hint = "context chunks merge by their log-sum-exp";
        add(key::LSE, key::LSE, fault.hint(hint));
    }
}

fn caches(spec: &Spec, add: Add<'_>) {
    // An unquantised cache has the dtype of the queries.
    let unquantised = |format: &&Name| vocabulary::DTYPES.contains(format);
    for format in spec.kv.iter().filter(unquantised) {
        if !spec.dtypes.contains(format) {
            let given = format!("`{}`, which is not among `dtypes`", format.text);
            let accepted = format!("quantised formats, or the dtypes: {}", texts(&spec.dtypes));
            let hint = "an unquantised cache holds the dtype of the queries";
            add(key::KV, key::DTYPES, Fault::new(given, accepted).hint(hint));
        }
    }
    if spec.kv.iter().all(|format| unquantised(&format)) {
        for dtype in spec.dtypes.iter().filter(|dtype| !spec.kv.contains(dtype)) {
            let given = format!("no format for the dtype `{}`", dtype.text);
            let accepted = format!("`{}`, or a quantised format beside the others", dtype.text);
            let hint = "add one, or take the dtype out of `dtypes`";
            add(key::KV, key::DTYPES, Fault::new(given, accepted).hint(hint));
        }
    }
    // The formats that require latent widths to be multiples of a number, each with the reason.
    let multiples = [
        ("fp8_ds_mla", 128, "each group of 128 values shares a scale"),
        (
            "fp8_per_token",
            4,
            "what follows a latent is aligned to 4 bytes",
        ),
    ];
    for [latent, rope] in spec.cache_dims.iter().flatten() {
        for (format, multiple, hint) in multiples {
            let listed = spec.kv.iter().any(|name| name.text == format);
            if !listed || latent.is_multiple_of(multiple) {
                continue;
            }
            let given = format!("`({latent},{rope})` beside the kv format `{format}`");
            let accepted = format!("a latent width that is a multiple of {multiple}");
            let fault = Fault::new(given, accepted).hint(hint);
            add(key::CACHE_DIMS, key::KV, fault);
        }
    }
    // R is a width of heads and of rows. No problem can ask for a row whose R no head has.
    let (Some(dims), Some(rows)) = (&spec.dims, &spec.cache_dims) else {
        return;
    };
    let ropes: Vec<_> = dims.iter().map(|[_, head, _]| head.to_string()).collect();
    for [latent, rope] in rows {
        if !dims.iter().any(|[_, head, _]| head == rope) {
            let given = format!("`({latent},{rope})`, whose R is that of no `dims`");
            let fault = Fault::new(given, format!("an R of {}", ropes.join(", ")));
            add(key::CACHE_DIMS, key::DIMS, fault);
        }
    }
    for [nope, head, v] in dims {
        if !rows.iter().any(|[_, rope]| head == rope) {
            let given = format!("no row for the dims `({nope},{head},{v})`");
            let accepted = format!("a row with R = {head}, such as `(512,{head})`");
            add(key::CACHE_DIMS, key::DIMS, Fault::new(given, accepted));
        }
    }
}

fn queries(spec: &Spec, add: Add<'_>) {
    // A batch that the backend refuses cannot be captured.
    let admitted = match spec.query_len.text {
        "single" => 1,
        "uniform" => 2,
        _ => 3,
    };
    let level = vocabulary::GRAPHS
        .iter()
        .position(|name| *name == spec.graphs);
    if level > Some(admitted) {
        let (graphs, query_len) = (spec.graphs.text, spec.query_len.text);
        let given = format!("`{graphs}` beside the query_len `{query_len}`");
        let hint = "batches that the backend refuses cannot be captured";
        let fault = Fault::new(given, texts(&vocabulary::GRAPHS[..=admitted])).hint(hint);
        add(key::GRAPHS, key::QUERY_LEN, fault);
    }
    let several = spec.max_query_len.filter(|max| *max > 1);
    if let Some(max) = several.filter(|_| spec.query_len.text == "single") {
        let given = format!("{max} beside the query_len `single`");
        let hint = "`query_len = \"uniform\"` or `\"ragged\"` says that a request may have several \
                    tokens";
        let fault = Fault::new(given, "1, or no value").hint(hint);
        add(key::MAX_QUERY_LEN, key::QUERY_LEN, fault);
    }
    if spec.sparse.text == "never" && spec.max_list_width.is_some() {
        let fault = Fault::new("a number beside `sparse = \"never\"`", "any");
        let hint =
            "`sparse = \"optional\"` or `\"required\"` says that it attends to lists of slots";
        add(key::MAX_LIST_WIDTH, key::SPARSE, fault.hint(hint));
    }
}

fn texts(names: &[Name]) -> String {
    let texts: Vec<_> = names.iter().map(|name| name.text).collect();
    texts.join(", ")
}
