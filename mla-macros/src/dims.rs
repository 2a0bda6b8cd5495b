//! Dimensions, head counts and page sizes.

use crate::errors::{Fault, quoted};
use crate::key;
use crate::list::{self, Element};
use crate::number;
use crate::synonym::Meant;

/// Reads the value of `max_query_len` or `max_list_width`: a number from 1 up, or `None` for `any`.
pub(crate) fn any_or_positive(text: &str, faults: &mut Vec<Fault>) -> Option<u32> {
    let accepted = key::MAX_QUERY_LEN.accepted;
    if text.trim_matches(' ') == "any" {
        return None;
    }
    let element = Element::alone(text);
    let number = number::positive(element.text, element, accepted);
    number.map_err(|fault| faults.push(fault)).ok()
}

/// Reads the value of `alignment`.
pub(crate) fn power_of_two(text: &str, faults: &mut Vec<Fault>) -> u32 {
    let (element, accepted) = (Element::alone(text), key::ALIGNMENT.accepted);
    match number::positive(element.text, element, accepted) {
        Ok(number) if number.is_power_of_two() => return number,
        Ok(_) => faults.push(element.fault(accepted)),
        Err(fault) => faults.push(fault),
    }
    1
}

/// Reads a list of tuples, or `None` for `any`. The numbers at the indices `zeroable` may be zero.
fn tuples<const N: usize>(
    text: &str,
    accepted: &str,
    zeroable: &[usize],
    faults: &mut Vec<Fault>,
) -> Option<Vec<[u32; N]>> {
    if text.trim_matches(' ') == "any" {
        return None;
    }
    if let Some(fault) = bare::<N>(text, accepted) {
        faults.push(fault);
        return None;
    }
    Some(list::distinct(text, accepted, faults, |element| {
        tuple(element, accepted, zeroable)
    }))
}

// The fault of a text without parentheses, such as `128,64,128` or `[128, 64, 128]`, as a whole.
fn bare<const N: usize>(text: &str, accepted: &str) -> Option<Fault> {
    if text.contains(['(', ')']) || text.trim_matches(' ').is_empty() {
        return None;
    }
    let fault = Fault::of(text, accepted);
    let numbers = numbers(text).unwrap_or_default().concat();
    Some(match numbers.len() % N {
        0 => fault,
        _ => fault.hint(format!(
            "{N} numbers stand in parentheses, with a comma between"
        )),
    })
}

// Reads a text that contains only numbers and punctuation. Returns the numbers of each part between
// two `|`.
fn numbers(text: &str) -> Option<Vec<Vec<u32>>> {
    let is_mark = |c: char| c.is_whitespace() || "()[]{}<>,;:x*×/-".contains(c);
    let part = |part: &str| {
        let digits = part.split(is_mark).filter(|digits| !digits.is_empty());
        digits.map(number::read::<u32>).collect::<Option<Vec<_>>>()
    };
    text.split('|').map(part).collect()
}

/// The tuples that numbers between other punctuation probably mean.
pub(crate) fn meant_tuples<const N: usize>(text: &str) -> Option<Meant> {
    let parts = numbers(text)?;
    let tuples = parts.iter().flat_map(|part| part.chunks(N));
    let tuple = |numbers: &[u32]| {
        let numbers: Vec<_> = numbers.iter().map(u32::to_string).collect();
        format!("({})", numbers.join(","))
    };
    let meant = tuples.map(tuple).collect::<Vec<_>>().join("|");
    Some(Meant::Value(meant.into()))
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
            let number = number::positive(part, element, accepted);
            let number = number.and_then(|number| up_to(MAX_DIM, number, element, accepted));
            number.map_err(|fault| match fault.hint {
                Some(_) => fault,
                None => fault.hint(format!("{} is no number up to {MAX_DIM}", quoted(part))),
            })?
        };
    }
    Ok(numbers)
}

/// The largest dimension or number of heads, and the largest page, in the runtime's problems.
const MAX_DIM: u32 = 65_536;
const MAX_PAGE: u32 = i32::MAX as u32;

// Accepts only numbers that some problem can have.
fn up_to(max: u32, number: u32, element: Element<'_>, accepted: &str) -> Result<u32, Fault> {
    match number <= max {
        true => Ok(number),
        false => Err(element
            .fault(accepted)
            .hint(format!("no problem has {number}, the largest is {max}"))),
    }
}

/// Reads the value of `dims`: (P, R, V). R may be zero in a model without rotary embedding.
pub(crate) fn head(text: &str, faults: &mut Vec<Fault>) -> Option<Vec<[u32; 3]>> {
    tuples(text, key::DIMS.accepted, &[1], faults)
}

/// Reads the value of `cache_dims`: (L, R).
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

/// Reads the value of `heads`.
pub(crate) fn heads(text: &str, faults: &mut Vec<Fault>) -> Heads {
    let accepted = key::HEADS.accepted;
    if text.trim_matches(' ') == "any" {
        return Heads::Any;
    }
    if let Some((min, max)) = text.split_once("..")
        && !text.contains(['|', ','])
    {
        return range(min.trim_matches(' '), max.trim_matches(' '), text).unwrap_or_else(|fault| {
            faults.push(fault);
            Heads::Any
        });
    }
    Heads::List(counts(text, accepted, MAX_DIM, faults, |range| {
        let ends = range.split_once("..");
        ends.is_some_and(|(min, max)| self::range(min.trim(), max.trim(), range).is_ok())
    }))
}

// Reads `min..=max`; `max` still begins with the `=`.
fn range(min: &str, max: &str, text: &str) -> Result<Heads, Fault> {
    let fault = || Fault::of(text, key::HEADS.accepted);
    let Some(included) = max.strip_prefix('=') else {
        let meant = format!("{min}..={max}");
        let both = heads(&meant, &mut Vec::new()) != Heads::Any;
        return Err(match both {
            true => fault().hint(format!("both ends belong to a range: write `{meant}`")),
            false => fault(),
        });
    };
    let (Some(min), Some(included)) = (
        number::read::<u32>(min),
        number::read::<u32>(included.trim_matches(' ')),
    ) else {
        return Err(fault());
    };
    if min == 0 || included == 0 {
        return Err(fault().hint("a range begins at 1 or more"));
    }
    if min > MAX_DIM {
        return Err(fault().hint(format!(
            "no problem has {min} heads, the maximum is {MAX_DIM}"
        )));
    }
    if min > included {
        return Err(fault().hint(format!(
            "the range is reversed, did you mean `{included}..={min}`?"
        )));
    }
    Ok(Heads::Range(min, included))
}

/// The range that `1-128`, `..=128`, `<=128` and the like probably mean.
pub(crate) fn meant_heads(text: &str) -> Option<Meant> {
    const TWO_ENDS: &str = "a range has two ends, the smaller one first, as in `1..=128`";
    let text = text.replace(' ', "");
    let range = |min: &str, max: &str| Some(Meant::Value(format!("{min}..={max}").into()));
    for mark in ["..=", "<=", "..", "<", ">=", ">"] {
        match (text.strip_prefix(mark), text.strip_suffix(mark)) {
            (Some(min), _) if mark.starts_with('>') && is_number(min) => {
                return Some(Meant::Advice(TWO_ENDS.into()));
            }
            (Some(max), _) if is_number(max) => return range("1", max),
            (_, Some(min)) if is_number(min) => return Some(Meant::Advice(TWO_ENDS.into())),
            _ => {}
        }
    }
    if text.strip_suffix('+').is_some_and(is_number) {
        return Some(Meant::Advice(TWO_ENDS.into()));
    }
    if meant_page_sizes(&text).is_some_and(|meant| matches!(meant, Meant::Value(_))) {
        let advice = "multiples are no value of `heads`: a range or a list names the numbers";
        return Some(Meant::Advice(advice.into()));
    }
    let (min, max) = ends(&text)?;
    range(min, max)
}

// Splits a range into its ends, in the notations of several languages.
fn ends(text: &str) -> Option<(&str, &str)> {
    ["..=", "...", "..", "-", "–", "~", ":", "to"]
        .iter()
        .filter_map(|mark| text.split_once(mark))
        .find(|(min, max)| is_number(min) && is_number(max))
}

fn is_number(text: &str) -> bool {
    number::read::<u32>(text).is_some()
}

/// The runtime's `PageSizes`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum PageSizes {
    Any,
    MultipleOf(u32),
    List(Vec<u32>),
}

/// Reads the value of `page_sizes`.
pub(crate) fn page_sizes(text: &str, faults: &mut Vec<Fault>) -> PageSizes {
    let accepted = key::PAGE_SIZES.accepted;
    let trimmed = text.trim_matches(' ');
    if trimmed == "any" {
        return PageSizes::Any;
    }
    if let Some(unit) = trimmed.strip_prefix('x') {
        match number::read::<u32>(unit) {
            Some(0) => {
                faults
                    .push(Fault::new(quoted(text), accepted).hint("the smallest multiple is `x1`"));
            }
            Some(unit) if unit > MAX_PAGE => {
                let hint = format!("no problem has pages of {unit}, the largest is {MAX_PAGE}");
                faults.push(Fault::new(quoted(text), accepted).hint(hint));
            }
            Some(unit) => return PageSizes::MultipleOf(unit),
            None => faults.push(Fault::of(text, accepted)),
        }
        return PageSizes::Any;
    }
    PageSizes::List(counts(text, accepted, MAX_PAGE, faults, |multiple| {
        multiple
            .strip_prefix('x')
            .is_some_and(|unit| number::read::<u32>(unit).is_some())
    }))
}

/// The value that `16x`, `*16`, `multiples of 16` and the like probably mean.
pub(crate) fn meant_page_sizes(text: &str) -> Option<Meant> {
    let text = text.replace(' ', "").to_lowercase();
    let words = [
        "multiplesof",
        "multipleof",
        "anymultipleof",
        "x",
        "*",
        "%",
        "n*",
    ];
    let before = words.iter().find_map(|word| text.strip_prefix(word));
    let behind = ["x", "*", "n", "*n", "*k"]
        .iter()
        .find_map(|word| text.strip_suffix(word));
    if let Some(unit) = before.or(behind).filter(|unit| is_number(unit)) {
        return Some(Meant::Value(format!("x{unit}").into()));
    }
    let is_open = |mark: &&str| {
        let min = text.strip_prefix(*mark).or(text.strip_suffix(*mark));
        min.is_some_and(is_number)
    };
    let is_range =
        ends(&text).is_some() || ["+", ">=", "<=", "..=", "..", ">", "<"].iter().any(is_open);
    let advice = "a range of sizes is no value: a list names each, and `x16` every multiple of 16";
    is_range.then(|| Meant::Advice(advice.into()))
}

// Reads a list of numbers from 1 up. `any` and some other values are accepted only alone.
fn counts(
    text: &str,
    accepted: &str,
    max: u32,
    faults: &mut Vec<Fault>,
    stands_alone: impl Fn(&str) -> bool,
) -> Vec<u32> {
    list::distinct(text, accepted, faults, |element| {
        if element.text == "any" || stands_alone(element.text) {
            return Err(element
                .fault(accepted)
                .hint(format!("{} stands alone", quoted(element.text))));
        }
        let number = number::positive(element.text, element, accepted)?;
        up_to(max, number, element, accepted)
    })
}
