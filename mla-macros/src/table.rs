//! The support table in a backend's documentation.

use crate::capability::Capabilities;
use crate::dims::{Heads, PageSizes};
use crate::place::Phase;
use crate::spec::Spec;
use crate::vocabulary::Name;

/// The spec as a table of two columns, in two parts. The provider goes between them, because only
/// the compiler knows the default provider.
pub(crate) fn markdown(spec: &Spec) -> [String; 2] {
    let yes_or_no = |yes| if yes { "yes" } else { "no" }.to_owned();
    let dims = |[p, r, v]: [u32; 3]| format!("({p},{r},{v})");
    let row = |[l, r]: [u32; 2]| format!("({l},{r})");
    let planner = if spec.plans_on_host {
        "the host"
    } else {
        "the device"
    };
    let mut rows = vec![
        ("phase", spec.phase.variant().to_lowercase()),
        ("capability", sm(spec)),
        ("dtype", names(&spec.dtypes)),
        ("dims (P,R,V)", any_or(&spec.dims, dims)),
        ("heads", heads(&spec.heads)),
    ];
    rows.extend(match spec.phase {
        Phase::Prefill => vec![("keys", spec.key_layout.text.to_owned())],
        Phase::Decode => vec![
            ("cache row (L,R)", any_or(&spec.cache_dims, row)),
            ("kv format", names(&spec.kv)),
            ("page size", page_sizes(&spec.page_sizes)),
            (
                "query lengths",
                limited(spec.query_len, "at most", spec.max_query_len),
            ),
            ("queries", spec.query_format.text.to_owned()),
            (
                "sparse",
                limited(spec.sparse, "lists of at most", spec.max_list_width),
            ),
            ("plans on", planner.to_owned()),
        ],
    });
    rows.extend([
        ("alignment", alignment(spec)),
        ("CUDA graphs", spec.graphs.text.to_owned()),
        ("dependent launch", yes_or_no(spec.dependent_launch)),
        ("log-sum-exp", lse(spec)),
        ("quantised output", yes_or_no(spec.quant_output)),
        ("features", names(&spec.features)),
        ("priority", priority(spec)),
    ]);
    if !spec.features_of_cargo.is_empty() {
        rows.push(("Cargo feature", spec.features_of_cargo.join(" or ")));
    }
    // The text begins with an empty line, because the author's own documentation may precede the
    // table.
    let head = format!("\n| backend | `{}` |\n|---|---|", spec.name);
    let rows = rows
        .iter()
        .map(|(name, value)| format!("| {name} | {value} |\n"));
    [head, rows.collect()]
}

fn sm(spec: &Spec) -> String {
    match &spec.sm {
        Some(sets) => join(sets, |set| dotted(*set)),
        None => "what it is compiled for".to_owned(),
    }
}

fn join<T>(items: &[T], text: impl Fn(&T) -> String) -> String {
    if items.is_empty() {
        return "none".to_owned();
    }
    items.iter().map(text).collect::<Vec<_>>().join(", ")
}

fn names(names: &[Name]) -> String {
    join(names, |name| name.text.to_owned())
}

fn any_or<T: Copy>(list: &Option<Vec<T>>, text: impl Fn(T) -> String) -> String {
    match list {
        None => "any".to_owned(),
        Some(list) => join(list, |item| text(*item)),
    }
}

fn heads(heads: &Heads) -> String {
    match heads {
        Heads::Any => "any".to_owned(),
        Heads::Range(min, max) => format!("{min} to {max}"),
        Heads::List(counts) => join(counts, u32::to_string),
    }
}

fn page_sizes(sizes: &PageSizes) -> String {
    match sizes {
        PageSizes::Any => "any".to_owned(),
        PageSizes::MultipleOf(unit) => format!("multiples of {unit}"),
        PageSizes::List(sizes) => join(sizes, u32::to_string),
    }
}

fn alignment(spec: &Spec) -> String {
    match spec.alignment {
        1 => "an element's".to_owned(),
        bytes => format!("{bytes} bytes"),
    }
}

/// A name, and the limit beside it if there is one.
fn limited(name: Name, limit: &str, max: Option<u32>) -> String {
    match max {
        None => name.text.to_owned(),
        Some(max) => format!("{}, {limit} {max}", name.text),
    }
}

fn lse(spec: &Spec) -> String {
    let base = spec.lse.text;
    match spec.lse_precision.text {
        "dtype" => format!("{base}, as exact as the dtype"),
        _ => base.to_owned(),
    }
}

fn priority(spec: &Spec) -> String {
    let otherwise = spec.priority.otherwise.unwrap_or(0);
    let mut parts: Vec<String> = spec
        .priority
        .by_capability
        .iter()
        .map(|(set, priority)| format!("{priority} on {}", dotted(*set)))
        .collect();
    parts.push(match parts.as_slice() {
        [] => otherwise.to_string(),
        _ => format!("{otherwise} elsewhere"),
    });
    parts.join(", ")
}

// Writes capabilities with a dot, as the command line and reasons do.
fn dotted(set: Capabilities) -> String {
    match set {
        Capabilities::Any => "any".to_owned(),
        Capabilities::Exact(only) => format!("{}.{}", only.major, only.minor),
        Capabilities::Family(major) => format!("{major}.x"),
        Capabilities::Floor(min) => format!("{}.{}+", min.major, min.minor),
    }
}
