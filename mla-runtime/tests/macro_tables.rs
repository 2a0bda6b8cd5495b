//! Checks that the attribute's names are those of the runtime.

// A macro crate can export only macros, so its table of names is included as a module.
#[path = "../../mla-macros/src/vocabulary.rs"]
mod vocabulary;

use std::fmt::Debug;

use mla_runtime::model::{DType, KvFormat};
use mla_runtime::spec::{
    Feature, GraphSupport, KeyLayout, LseOutput, LsePrecision, QueryFormat, QueryLen, SparseSupport,
};
use vocabulary::Name;

fn check<T: Copy + Debug>(names: &[Name], all: &[T], name: fn(T) -> &'static str) {
    let ours: Vec<_> = names
        .iter()
        .map(|name| (name.text, name.variant.to_owned()))
        .collect();
    let theirs: Vec<_> = all
        .iter()
        .map(|item| (name(*item), format!("{item:?}")))
        .collect();
    assert_eq!(ours, theirs);
}

#[test]
fn names_are_those_of_the_enums() {
    check(vocabulary::DTYPES, DType::ALL, DType::name);
    check(vocabulary::KV_FORMATS, KvFormat::ALL, KvFormat::name);
    check(vocabulary::QUERY_LENS, QueryLen::ALL, QueryLen::name);
    check(
        vocabulary::QUERY_FORMATS,
        QueryFormat::ALL,
        QueryFormat::name,
    );
    check(vocabulary::KEY_LAYOUTS, KeyLayout::ALL, KeyLayout::name);
    check(vocabulary::GRAPHS, GraphSupport::ALL, GraphSupport::name);
    check(vocabulary::LSES, LseOutput::ALL, LseOutput::name);
    check(
        vocabulary::LSE_PRECISIONS,
        LsePrecision::ALL,
        LsePrecision::name,
    );
    check(vocabulary::SPARSE, SparseSupport::ALL, SparseSupport::name);
    check(vocabulary::FEATURES, Feature::ALL, Feature::name);
    // A backend that names no cache formats gets those with the names and variants of its dtypes.
    for dtype in vocabulary::DTYPES {
        assert!(vocabulary::KV_FORMATS.contains(dtype), "{}", dtype.text);
    }
    assert_eq!(vocabulary::RAGGED.text, QueryLen::Ragged.name());
}
