//! Values that are texts: the values that a key accepts, and the probable meaning of other texts.

use heck::ToShoutySnakeCase;

use crate::capability;
use crate::dims;
use crate::errors::{Fault, nearest, quoted};
use crate::key::{self, Key};
use crate::list;
use crate::number;
use crate::priority;
use crate::synonym::{self, Meant};
use crate::vocabulary;

/// Words that stand for backends of any name, as in `--decode all`. No backend may have them as its
/// name.
const RESERVED_NAMES: &[&str] = &["ALL", "AUTO"];

/// Reads the value of `name`.
pub(crate) fn name(text: &str, faults: &mut Vec<Fault>) -> String {
    if let Some(fault) = reserved(text) {
        faults.push(fault);
    } else if !is_upper_snake(text) {
        faults.push(Fault::of(text, key::NAME.accepted));
    }
    text.to_owned()
}

/// The fault of a name that is reserved.
pub(crate) fn reserved(name: &str) -> Option<Fault> {
    let given = format!("{}, which stands for backends of any name", quoted(name));
    let is_reserved = RESERVED_NAMES.contains(&name);
    is_reserved.then(|| Fault::new(given, key::NAME.accepted).hint("write the name of one"))
}

/// Returns true if a text has only upper-case letters, digits and single underscores, like the
/// names of backends.
pub(crate) fn is_upper_snake(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit();
    text.starts_with(|c: char| c.is_ascii_uppercase())
        && text
            .split('_')
            .all(|word| !word.is_empty() && word.chars().all(fits))
}

/// Reads the value of `feature`.
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

/// The fault of a feature that is not in `declared`, the package's features. If the package has no
/// features, the compiler itself warns. There is then no fault, unless the feature is one of a
/// backend, which belongs to the key `features`.
pub(crate) fn undeclared(feature: &String, declared: &[String]) -> Option<Fault> {
    if declared.contains(feature) {
        return None;
    }
    let accepted = match declared {
        [] => key::FEATURE.accepted.to_owned(),
        _ => format!("the Cargo features of the package: {}", declared.join(", ")),
    };
    let fault = Fault::new(quoted(feature), accepted);
    if vocabulary::FEATURES.iter().any(|name| name.text == feature) {
        return Some(fault.hint(format!(
            "what a backend can do is another key: write `features = \"{feature}\"`"
        )));
    }
    let meant = nearest(feature, declared.iter().map(String::as_str));
    (!declared.is_empty()).then(|| fault.meant(meant))
}

/// Reads the value of `provider`.
pub(crate) fn provider(text: &str, faults: &mut Vec<Fault>) -> String {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if text.is_empty() || !text.bytes().all(fits) {
        faults.push(Fault::of(text, key::PROVIDER.accepted));
    }
    text.to_owned()
}

/// Returns true if `key` accepts `text`. A hint must not recommend a value that is an error.
pub(crate) fn accepts(key: &Key, text: &str) -> bool {
    let mut faults = Vec::new();
    match *key {
        key::SM => drop(capability::sm(text, &mut faults)),
        key::DIMS => drop(dims::head(text, &mut faults)),
        key::CACHE_DIMS => drop(dims::cache(text, &mut faults)),
        key::HEADS => drop(dims::heads(text, &mut faults)),
        key::PAGE_SIZES => drop(dims::page_sizes(text, &mut faults)),
        key::MAX_QUERY_LEN | key::MAX_LIST_WIDTH => {
            dims::any_or_positive(text, &mut faults);
        }
        key::ALIGNMENT => drop(dims::power_of_two(text, &mut faults)),
        key::FEATURES => drop(list::none_or_names(text, key, &mut faults)),
        key::DTYPES | key::KV => drop(list::names(text, key, &mut faults)),
        key::FEATURE => drop(feature(text, &mut faults)),
        key::NAME => drop(name(text, &mut faults)),
        key::PROVIDER => drop(provider(text, &mut faults)),
        key::PRIORITY => drop(priority::parse(text, &mut faults)),
        _ if !key::names(key).is_empty() => drop(list::only(text, key, &mut faults)),
        _ => return false,
    }
    faults.is_empty()
}

/// Adds a hint to the fault of a value, if one is known.
pub(crate) fn explained(key: &Key, whole: &str, fault: Fault) -> Fault {
    let (None, Some(text)) = (&fault.hint, &fault.text) else {
        return fault;
    };
    match meant(key, text) {
        // An element of a list may mean a value that is accepted only alone.
        Some(Meant::Value(value)) if text != whole.trim_matches(' ') && is_alone(key, &value) => {
            fault.hint(format!("`{value}` stands alone"))
        }
        Some(Meant::Value(value)) => fault.meant(Some(value)),
        Some(Meant::Advice(advice)) => fault.hint(advice),
        None if is_list(key) && text.contains([' ', ';', '/', '&', '\t', '\n']) => {
            fault.hint("elements stand between `|` or `,`")
        }
        None => fault,
    }
}

fn is_list(key: &Key) -> bool {
    matches!(*key, key::FEATURE | key::PRIORITY) || key.accepted.contains("list")
}

fn is_alone(key: &Key, value: &str) -> bool {
    value == "any" || matches!(*key, key::HEADS if value.contains("..")) || value.starts_with('x')
}

/// The meaning of a text that `key` does not accept.
pub(crate) fn meant(key: &Key, text: &str) -> Option<Meant> {
    let value = |value: String| Meant::Value(value.into());
    let accepted = |text: String| accepts(key, &text).then_some(text);
    synonym::of_value(key, text)
        .or_else(|| with_separators(text).and_then(accepted).map(value))
        .or_else(|| spelled(key, text))
        .or_else(|| number::meant(text).and_then(accepted).map(value))
        .or_else(|| {
            let names = key::names(key).iter().map(|name| name.text);
            nearest(text, names).map(|name| value(name.to_owned()))
        })
}

// The meaning of a text from its form, key by key.
fn spelled(key: &Key, text: &str) -> Option<Meant> {
    let meant = match *key {
        key::SM => capability::meant(text).map(|set| Meant::Value(set.to_string().into())),
        key::DIMS => dims::meant_tuples::<3>(text),
        key::CACHE_DIMS => dims::meant_tuples::<2>(text),
        key::HEADS => dims::meant_heads(text),
        key::PAGE_SIZES => dims::meant_page_sizes(text),
        key::QUERY_LEN => {
            let number = number::read::<u32>(text)?;
            let advice = format!("a number stands in `max_query_len = {number}`");
            Some(Meant::Advice(advice.into()))
        }
        key::NAME => Some(Meant::Value(text.to_shouty_snake_case().into())),
        _ => None,
    };
    meant.filter(|meant| match meant {
        Meant::Value(value) => accepts(key, value),
        Meant::Advice(_) => true,
    })
}

// Replaces other separators by `|`.
fn with_separators(text: &str) -> Option<String> {
    let words = text.split(|c: char| c.is_whitespace() || ";/&|,".contains(c));
    let words: Vec<_> = words
        .filter(|word| !matches!(*word, "" | "and" | "or"))
        .collect();
    (words.len() > 1).then(|| words.join("|"))
}

/// An accepted value that `text` probably means. Each element may be corrected.
pub(crate) fn mended(key: &Key, text: &str) -> Option<Meant> {
    if accepts(key, text) {
        return Some(Meant::Value(text.to_owned().into()));
    }
    let whole = meant(key, text);
    if let Some(Meant::Value(value)) = &whole
        && accepts(key, value)
    {
        return whole;
    }
    let mended = |text: &str| match meant(key, text) {
        Some(Meant::Value(value)) if !accepts(key, text) => value.into_owned(),
        _ => text.to_owned(),
    };
    let elements = list::elements(text, "", &mut Vec::new());
    let mended: Vec<_> = elements
        .iter()
        .map(|element| mended(element.text))
        .collect();
    let mended = mended.join("|");
    match accepts(key, &mended) {
        true => Some(Meant::Value(mended.into())),
        false => whole.filter(|meant| matches!(meant, Meant::Advice(_))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Form;

    #[test]
    fn synonyms_have_hints() {
        for (key, table) in synonym::VALUES {
            for (texts, meant) in *table {
                let takes = |text: &str| match key.form {
                    Form::Flag => matches!(text, "true" | "false"),
                    _ => accepts(key, text),
                };
                if let Meant::Value(value) = meant {
                    assert!(takes(value), "{}: {value}", key.name);
                }
                for text in texts.split(' ') {
                    assert!(
                        key.form == Form::Flag || !takes(text),
                        "{}: {text}",
                        key.name
                    );
                    assert_eq!(
                        synonym::of_value(key, text).as_ref(),
                        Some(meant),
                        "{}: {text}",
                        key.name
                    );
                }
            }
        }
    }

    #[test]
    fn unknown_feature_is_a_fault() {
        let hint = |feature: &str, declared: &[&str]| {
            let declared: Vec<_> = declared.iter().map(|it| (*it).to_owned()).collect();
            undeclared(&feature.to_owned(), &declared).map(|fault| fault.hint.unwrap_or_default())
        };
        assert_eq!(hint("sm90", &["sm80", "sm90"]), None);
        assert_eq!(
            hint("sm9O", &["sm80", "sm90"]).as_deref(),
            Some("did you mean `sm90`?")
        );
        assert_eq!(hint("fast", &["sm80"]).as_deref(), Some(""));
        // The package has no features. The compiler may not have been told about them.
        assert_eq!(hint("sm90", &[]), None);
        let other_key = "what a backend can do is another key: write `features = \"sinks\"`";
        assert_eq!(hint("sinks", &[]).as_deref(), Some(other_key));
        assert_eq!(hint("sinks", &["sinks"]), None);
    }
}
