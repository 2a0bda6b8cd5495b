//! The names of cases and contenders.

use std::collections::BTreeMap;

use crate::bench::settings::Settings;

/// The keys with several values that tell cases apart, and those that tell contenders apart: what
/// is to be computed makes a case, how it is done competes within one.
pub(super) fn compared(settings: &Settings) -> [Vec<&'static str>; 2] {
    fn several<T>(list: &Option<Vec<T>>) -> bool {
        list.as_ref().is_some_and(|list| list.len() > 1)
    }
    let of_case = [
        ("model", several(&settings.model)),
        ("dims", several(&settings.dims)),
        ("dtype", several(&settings.dtype)),
        ("heads", several(&settings.heads)),
        ("kv", several(&settings.kv)),
        ("topk", several(&settings.topk)),
        ("lists", several(&settings.lists)),
        ("valid", several(&settings.valid)),
    ];
    let of_contender = [
        ("page", several(&settings.page)),
        ("threshold", several(&settings.threshold)),
        ("query_chunk", several(&settings.query_chunk)),
        ("rows", several(&settings.rows)),
        ("num_splits", several(&settings.num_splits)),
    ];
    [&of_case[..], &of_contender].map(|axes| {
        let several = axes.iter().filter(|(_, several)| *several);
        several.map(|(name, _)| *name).collect()
    })
}

/// A name with the values of these keys behind it.
pub(super) fn with_values(
    name: &str,
    keys: &[&'static str],
    values: &BTreeMap<&'static str, String>,
) -> String {
    let values = keys.iter().filter_map(|key| Some((key, values.get(key)?)));
    values.fold(name.to_owned(), |text, (key, value)| {
        format!("{text} {key}={value}")
    })
}
