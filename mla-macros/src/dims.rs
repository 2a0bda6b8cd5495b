//! Dimensions, head counts and page sizes.

use crate::errors::Fault;
use crate::key;
use crate::list::{self, Element, quoted};
use crate::number;

/// A number from 1 up, or `None` for `any`: the value of `max_query_len` and `max_list_width`.
pub(crate) fn any_or_positive(text: &str, faults: &mut Vec<Fault>) -> Option<u32> {
    let accepted = key::MAX_QUERY_LEN.accepted;
    if text.trim_matches(' ') == "any" {
        return None;
    }
    let element = Element::alone(text);
    let number = number::positive(element.text, element, accepted);
    number.map_err(|fault| faults.push(fault)).ok()
}

/// The value of `alignment`.
pub(crate) fn power_of_two(text: &str, faults: &mut Vec<Fault>) -> u32 {
    let (element, accepted) = (Element::alone(text), key::ALIGNMENT.accepted);
    match number::positive(element.text, element, accepted) {
        Ok(number) if number.is_power_of_two() => return number,
        Ok(_) => faults.push(element.fault(accepted)),
        Err(fault) => faults.push(fault),
    }
    1
}

/// A list of tuples, or `None` for `any`. The numbers at `zeroable` may be zero.
fn tuples<const N: usize>(
    text: &str,
    accepted: &str,
    zeroable: &[usize],
    faults: &mut Vec<Fault>,
) -> Option<Vec<[u32; N]>> {
    if text.trim_matches(' ') == "any" {
        return None;
    }
    if let Some(fault) = bare::<N>(text, accepted, zeroable) {
        faults.push(fault);
        return None;
    }
    Some(list::distinct(text, accepted, faults, |element| {
        tuple(element, accepted, zeroable)
    }))
}

// Tuples without their parentheses, as in `128,64,128`, would be a list of numbers.
fn bare<const N: usize>(text: &str, accepted: &str, zeroable: &[usize]) -> Option<Fault> {
    let is_number = |part: &str| number::read::<u32>(part.trim()).is_some();
    let bare = !text.contains(['(', ')']) && text.split([',', '|']).all(is_number);
    let tuples: Vec<String> = text.split('|').map(|tuple| format!("({tuple})")).collect();
    let meant = tuples.join("|");
    let mut faults = Vec::new();
    list::distinct(&meant, accepted, &mut faults, |element| {
        tuple::<N>(element, accepted, zeroable)
    });
    let fault = Fault::new(quoted(text), accepted);
    bare.then(|| match faults.is_empty() {
        true => fault.hint(format!("parentheses are missing, did you mean `{meant}`?")),
        false => fault.hint(format!(
            "{N} numbers stand in parentheses, with a comma between"
        )),
    })
}

fn tuple<const N: usize>(
    element: Element<'_>,
    accepted: &str,
    zeroable: &[usize],
) -> Result<[u32; N], Fault> {
    if element.text == "any" {
        return Err(element.fault(accepted).hint("`any` stands alone"));
    }
    let inner = element
        .text
        .strip_prefix('(')
        .and_then(|text| text.strip_suffix(')'))
        .ok_or_else(|| element.fault(accepted))?;
    let parts: Vec<&str> = inner
        .split(',')
        .map(|part| part.trim_matches(' '))
        .collect();
    if parts.len() != N {
        return Err(element
            .fault(accepted)
            .hint(format!("it has {} numbers, not {N}", parts.len())));
    }
    let mut numbers = [0; N];
    for (index, (part, number)) in parts.iter().zip(&mut numbers).enumerate() {
        *number = if zeroable.contains(&index) && *part == "0" {
            0
        } else {
            number::positive(part, element, accepted).map_err(|fault| match fault.hint {
                Some(_) => fault,
                None => fault.hint(format!("{} is no number up to {}", quoted(part), u32::MAX)),
            })?
        };
    }
    Ok(numbers)
}

/// The value of `dims`: (P, R, V). R may be zero, in a model without rotary embedding.
pub(crate) fn head(text: &str, faults: &mut Vec<Fault>) -> Option<Vec<[u32; 3]>> {
    tuples(text, key::DIMS.accepted, &[1], faults)
}

/// The value of `cache_dims`: (L, R).
pub(crate) fn cache(text: &str, faults: &mut Vec<Fault>) -> Option<Vec<[u32; 2]>> {
    tuples(text, key::CACHE_DIMS.accepted, &[1], faults)
}

/// The runtime's `HeadCounts`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Heads {
    Any,
    Range(u32, u32),
    List(Vec<u32>),
}

/// The value of `heads`.
pub(crate) fn heads(text: &str, faults: &mut Vec<Fault>) -> Heads {
    let accepted = key::HEADS.accepted;
    if text.trim_matches(' ') == "any" {
        return Heads::Any;
    }
    if let Some((least, most)) = text.split_once("..")
        && !text.contains(['|', ','])
    {
        return range(least.trim_matches(' '), most.trim_matches(' '), text).unwrap_or_else(
            |fault| {
                faults.push(fault);
                Heads::Any
            },
        );
    }
    Heads::List(counts(text, accepted, faults, |range| {
        let ends = range.split_once("..");
        ends.is_some_and(|(least, most)| self::range(least.trim(), most.trim(), range).is_ok())
    }))
}

// `least..=most`; `most` still has its `=`.
fn range(least: &str, most: &str, text: &str) -> Result<Heads, Fault> {
    let fault = || Fault::new(quoted(text), key::HEADS.accepted);
    let Some(included) = most.strip_prefix('=') else {
        let meant = format!("{least}..={most}");
        let both = heads(&meant, &mut Vec::new()) != Heads::Any;
        return Err(fault().hint(match both {
            true => format!("both ends belong to a range: write `{meant}`"),
            false => "a range has two ends, the smaller one first, as in `1..=128`".to_owned(),
        }));
    };
    let (Some(least), Some(included)) = (
        number::read::<u32>(least),
        number::read::<u32>(included.trim_matches(' ')),
    ) else {
        return Err(fault());
    };
    if least == 0 || included == 0 {
        return Err(fault().hint("a range begins at 1 or more"));
    }
    if least > included {
        return Err(fault().hint(format!(
            "the range is reversed, did you mean `{included}..={least}`?"
        )));
    }
    Ok(Heads::Range(least, included))
}

/// The runtime's `PageSizes`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum PageSizes {
    Any,
    MultipleOf(u32),
    List(Vec<u32>),
}

/// The value of `page_sizes`.
pub(crate) fn page_sizes(text: &str, faults: &mut Vec<Fault>) -> PageSizes {
    let accepted = key::PAGE_SIZES.accepted;
    let trimmed = text.trim_matches(' ');
    if trimmed == "any" {
        return PageSizes::Any;
    }
    if let Some(unit) = trimmed.strip_prefix('x') {
        match number::read::<u32>(unit) {
            Some(0) => {
                faults.push(Fault::new(quoted(text), accepted).hint("the least multiple is `x1`"));
            }
            Some(unit) => return PageSizes::MultipleOf(unit),
            None => faults.push(Fault::new(quoted(text), accepted)),
        }
        return PageSizes::Any;
    }
    PageSizes::List(counts(text, accepted, faults, |multiple| {
        multiple
            .strip_prefix('x')
            .is_some_and(|unit| number::read::<u32>(unit).is_some())
    }))
}

// A list of numbers from 1 up. Beside `any`, some other values stand alone.
fn counts(
    text: &str,
    accepted: &str,
    faults: &mut Vec<Fault>,
    stands_alone: impl Fn(&str) -> bool,
) -> Vec<u32> {
    list::distinct(text, accepted, faults, |element| {
        if element.text == "any" || stands_alone(element.text) {
            return Err(element
                .fault(accepted)
                .hint(format!("{} stands alone", quoted(element.text))));
        }
        number::positive(element.text, element, accepted)
    })
}
