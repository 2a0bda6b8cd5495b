//! Property tests: no arguments make the macro panic, and accepted values keep their meaning.

use proc_macro2::{Ident, Literal, Span, TokenStream, TokenTree};
use proptest::prelude::*;
use quote::quote;

use crate::arguments::Arguments;
use crate::capability::{self, Capabilities};
use crate::dims::{self, Heads, PageSizes};
use crate::errors::Errors;
use crate::expansion::expand;
use crate::key::{Form, KEYS, Key};
use crate::place::{Phase, Place};
use crate::priority;
use crate::reader;

fn decode_block() -> TokenStream {
    quote! { impl DecodeBackend for Flash {} }
}

// A block that may have the key.
fn block_for(key: &Key) -> TokenStream {
    match key.only {
        Some(Phase::Prefill) => quote! { impl PrefillBackend for Flash {} },
        _ => decode_block(),
    }
}

// The errors of a use of the attribute on such a block.
fn errors(key: &Key, arguments: TokenStream) -> Vec<String> {
    let mut errors = Errors::default();
    let arguments = Arguments::parse(arguments, &mut errors);
    let place = Place::parse(block_for(key), &mut errors);
    reader::read(&arguments, place.as_ref().ok(), &mut errors);
    errors.texts().into_iter().map(str::to_owned).collect()
}

// Arbitrary texts, and texts that are almost right.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[0-9xo+.|,:()=* a-f_-]{0,24}",
        "(any|f32|f16|bf16|fp8|fp8_ds_mla|fp8_per_token|90|10x|80\\+|x16|1..=128|\\*:1)\
         ([|, ](f16|bf16|fp8|100|90|\\*)){0,3}",
    ]
}

// Values without their quotes, in brackets, and as sums and ranges.
fn hinted() -> impl Strategy<Value = TokenStream> {
    let texts = vec![
        "[90, 100]",
        "(f16, bf16)",
        "SM",
        "5 - 3",
        "16 ..",
        ".. 16",
        "16 .. 1",
        "[\"90\", \"100\"]",
        "90 | 100",
        "9.0",
        "'a'",
        "-5",
        "1.5",
        "(128, 64, 128)",
        "[(128, 64, 128)]",
        "ragged",
        "{ 90 }",
        "None",
        "\"90\"u8",
        "16u32",
        "hopper",
        "sm_90a",
        "[sm_90, h200]",
        "b\"log2\"",
        "Some(8)",
        "i32::MAX",
        "1 ..= 16",
        "false",
        "fp16",
        "deepseek_r1",
        "env!(\"CARGO_PKG_NAME\")",
    ];
    proptest::sample::select(texts).prop_map(|text| text.parse().expect("tokens"))
}

fn ident(text: &str) -> TokenTree {
    Ident::new(text, Span::call_site()).into()
}

fn token() -> impl Strategy<Value = TokenTree> {
    prop_oneof![
        text().prop_map(|text| Literal::string(&text).into()),
        any::<u64>().prop_map(|number| Literal::u64_unsuffixed(number).into()),
        any::<char>().prop_map(|c| Literal::character(c).into()),
        proptest::sample::select(vec![',', '=', '-', ':', '|', '<', '#'])
            .prop_map(|c| proc_macro2::Punct::new(c, proc_macro2::Spacing::Alone).into()),
        proptest::sample::select(KEYS.iter().map(|key| key.name).collect::<Vec<_>>())
            .prop_map(ident),
        proptest::sample::select(vec!["true", "false", "impl", "for", "DecodeBackend", "T"])
            .prop_map(ident),
    ]
}

proptest! {
    #[test]
    fn any_text_for_any_key(index in 0..KEYS.len(), text in text()) {
        let key = Ident::new(KEYS[index].name, Span::call_site());
        let tokens = expand(quote!(sm = "90", dtypes = "bf16", #key = #text), decode_block());
        prop_assert!(syn::parse2::<syn::File>(tokens).is_ok());
    }

    #[test]
    fn any_tokens(
        arguments in proptest::collection::vec(token(), 0..16),
        item in proptest::collection::vec(token(), 0..8),
    ) {
        let arguments: TokenStream = arguments.into_iter().collect();
        expand(arguments.clone(), decode_block());
        expand(arguments, item.into_iter().collect());
    }

    // A value that a hint recommends is never an error.
    #[test]
    fn hints_are_accepted(index in 0..KEYS.len(), value in hinted()) {
        let key = Ident::new(KEYS[index].name, Span::call_site());
        let mut found = Errors::default();
        Arguments::parse(quote!(#key = #value), &mut found);
        for message in found.texts() {
            let Some((_, meant)) = message.rsplit_once("write `") else { continue };
            let (meant, _) = meant.split_once('`').expect("it ends");
            // A sentence may recommend another key, or a constant with it.
            if !meant.starts_with(KEYS[index].name) { continue }
            let meant: TokenStream = meant.parse().unwrap();
            let mut errors = Errors::default();
            let arguments = Arguments::parse(meant, &mut errors);
            reader::read(&arguments, None, &mut errors);
            let own = |text: &&str| text.starts_with(&format!("{}:", KEYS[index].name));
            prop_assert_eq!(errors.texts().into_iter().find(own), None, "{}", message);
        }
    }

    #[test]
    fn capabilities_read_as_they_are_written(major in 1u8.., minor in 0u8..10) {
        let only = capability::Capability { major, minor };
        for set in [
            Capabilities::Exact(only),
            Capabilities::Family(major),
            Capabilities::Floor(only),
        ] {
            prop_assert_eq!(capability::read(&set.to_string()), Some(set));
        }
    }

    #[test]
    fn wider_sets_include_narrower(
        text in "([1-9][0-9]{1,2}|[1-9][0-9]?x|[1-9][0-9]{1,2}\\+)",
        other in "([1-9][0-9]{1,2}|[1-9][0-9]?x|[1-9][0-9]{1,2}\\+)",
    ) {
        let has = |set: Capabilities, number: u16| match set {
            Capabilities::Any => true,
            Capabilities::Exact(_) => set.to_string() == number.to_string(),
            Capabilities::Family(major) => u16::from(major) == number / 10,
            Capabilities::Floor(_) => {
                set.to_string().trim_end_matches('+').parse::<u16>().unwrap() <= number
            }
        };
        let (set, other) = (capability::read(&text).unwrap(), capability::read(&other).unwrap());
        let numbers = || 10..2600u16;
        prop_assert_eq!(
            set.covers(other),
            numbers().all(|number| has(set, number) || !has(other, number))
        );
        prop_assert_eq!(
            set.overlaps(other),
            numbers().any(|number| has(set, number) && has(other, number))
        );
    }

    #[test]
    fn lists_keep_their_order(
        numbers in proptest::collection::hash_set(1u32..=65_536, 1..6),
        separator in proptest::sample::select(vec!["|", ",", " | ", ", "]),
    ) {
        let numbers: Vec<u32> = numbers.into_iter().collect();
        let texts: Vec<String> = numbers.iter().map(u32::to_string).collect();
        let text = texts.join(separator);
        let mut faults = Vec::new();
        prop_assert_eq!(dims::heads(&text, &mut faults), Heads::List(numbers.clone()));
        prop_assert_eq!(dims::page_sizes(&text, &mut faults), PageSizes::List(numbers.clone()));
        prop_assert!(faults.is_empty());

        dims::heads(&format!("{text}|{}", numbers[0]), &mut faults);
        prop_assert_eq!(faults.len(), 1, "a number twice");
    }

    #[test]
    fn priorities_read_as_they_are_written(everywhere: i32, hopper: i32, rest: i32) {
        let mut faults = Vec::new();
        let one = priority::parse(&everywhere.to_string(), &mut faults);
        prop_assert_eq!(one.otherwise, Some(everywhere));
        let several = priority::parse(&format!("90:{hopper},*:{rest}"), &mut faults);
        prop_assert_eq!(several.by_capability[0].1, hopper);
        prop_assert_eq!(several.otherwise, Some(rest));
        prop_assert!(faults.is_empty());
    }
}

#[test]
fn table_examples_are_accepted() {
    for key in KEYS {
        let example: TokenStream = key.example.parse().expect("an example is tokens");
        let name = Ident::new(key.name, Span::call_site());
        // Some examples need other keys as well.
        let beside = match key.name {
            "sm" => quote!(dtypes = "bf16"),
            "compiled" | "feature" => quote!(sm = "90", dtypes = "bf16"),
            "dtypes" => quote!(sm = "any"),
            "graphs" | "max_query_len" => {
                quote!(sm = "any", dtypes = "bf16", query_len = "uniform")
            }
            "priority" => quote!(sm = "90|100", dtypes = "bf16"),
            "max_list_width" => quote!(sm = "any", dtypes = "bf16", sparse = "optional"),
            _ => quote!(sm = "any", dtypes = "bf16"),
        };
        assert_eq!(
            errors(key, quote!(#beside, #name = #example)),
            [""; 0],
            "{}",
            key.name
        );
    }
}

#[test]
fn defaults_match_the_table() {
    for key in KEYS {
        let (Some(default), Form::Text | Form::Flag) = (key.default, key.form) else {
            continue;
        };
        let value: TokenStream = match key.name {
            // These defaults are described in words.
            "kv" | "name" | "feature" | "provider" => continue,
            _ if key.form == Form::Flag => default.parse().expect("a flag is a token"),
            _ => quote!(#default),
        };
        let name = Ident::new(key.name, Span::call_site());
        let with = quote!(sm = "90", dtypes = "bf16", #name = #value);
        let without = quote!(sm = "90", dtypes = "bf16");
        assert_eq!(
            expand(with, block_for(key)).to_string(),
            expand(without, block_for(key)).to_string(),
            "{}",
            key.name
        );
    }
}
