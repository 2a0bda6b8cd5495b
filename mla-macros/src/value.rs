//! Values that are texts, and which values a key takes.

use heck::ToShoutySnakeCase;

use crate::capability;
use crate::dims;
use crate::errors::Fault;
use crate::key::{self, Key};
use crate::list::{self, quoted};
use crate::priority;
use crate::vocabulary::{self, Name};

/// The value of `name`.
pub(crate) fn name(text: &str, faults: &mut Vec<Fault>) -> String {
    if !is_upper_snake(text) {
        let meant = text.to_shouty_snake_case();
        let meant = is_upper_snake(&meant).then_some(meant);
        faults.push(Fault::new(quoted(text), key::NAME.accepted).meant(meant));
    }
    text.to_owned()
}

/// Whether a text is capitals, digits and single underscores, as backends are named.
pub(crate) fn is_upper_snake(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_uppercase())
        && text.split('_').all(|word| {
            !word.is_empty()
                && word
                    .bytes()
                    .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit())
        })
}

/// The value of `feature`.
pub(crate) fn feature(text: &str, faults: &mut Vec<Fault>) -> Vec<String> {
    let accepted = key::FEATURE.accepted;
    list::distinct(text, accepted, faults, |element| {
        let fits = |c: char| c.is_alphanumeric() || "-_+.".contains(c);
        if !element.text.is_empty() && element.text.chars().all(fits) {
            Ok(element.text.to_owned())
        } else {
            Err(element.fault(accepted))
        }
    })
}

/// The value of `provider`.
pub(crate) fn provider(text: &str, faults: &mut Vec<Fault>) -> String {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if text.is_empty() || !text.bytes().all(fits) {
        faults.push(Fault::new(quoted(text), key::PROVIDER.accepted));
    }
    text.to_owned()
}

/// Whether `text` is a value that `key` takes, so that a hint does not recommend an error.
pub(crate) fn accepts(key: &Key, text: &str) -> bool {
    let mut faults = Vec::new();
    let names = |names: &[Name], faults: &mut Vec<Fault>| {
        list::distinct(text, key.accepted, faults, |element| {
            list::name(element, names, key.accepted)
        });
    };
    match *key {
        key::SM => drop(capability::sm(text, &mut faults)),
        key::DTYPES => names(vocabulary::DTYPES, &mut faults),
        key::DIMS => drop(dims::head(text, &mut faults)),
        key::CACHE_DIMS => drop(dims::cache(text, &mut faults)),
        key::HEADS => drop(dims::heads(text, &mut faults)),
        key::KV => names(vocabulary::KV_FORMATS, &mut faults),
        key::PAGE_SIZES => drop(dims::page_sizes(text, &mut faults)),
        key::QUERY_LEN => drop(list::only(text, vocabulary::QUERY_LENS, "", &mut faults)),
        key::MAX_QUERY_LEN | key::MAX_LIST_WIDTH => {
            dims::any_or_positive(text, &mut faults);
        }
        key::ALIGNMENT => drop(dims::power_of_two(text, &mut faults)),
        key::QUERY_FORMAT => drop(list::only(text, vocabulary::QUERY_FORMATS, "", &mut faults)),
        key::KEY_LAYOUT => drop(list::only(text, vocabulary::KEY_LAYOUTS, "", &mut faults)),
        key::GRAPHS => drop(list::only(text, vocabulary::GRAPHS, "", &mut faults)),
        key::LSE => drop(list::only(text, vocabulary::LSES, "", &mut faults)),
        key::LSE_PRECISION => drop(list::only(
            text,
            vocabulary::LSE_PRECISIONS,
            "",
            &mut faults,
        )),
        key::SPARSE => drop(list::only(text, vocabulary::SPARSE, "", &mut faults)),
        key::FEATURES => names(vocabulary::FEATURES, &mut faults),
        key::FEATURE => drop(feature(text, &mut faults)),
        key::NAME => drop(name(text, &mut faults)),
        key::PROVIDER => drop(provider(text, &mut faults)),
        key::PRIORITY => drop(priority::parse(text, &mut faults)),
        _ => return false,
    }
    faults.is_empty()
}
