//! Lists in strings. `|` or `,` outside parentheses separates the elements.

use crate::errors::{Fault, quoted};
use crate::key::{self, Key};
use crate::vocabulary::Name;

/// An element of a list, and its position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Element<'a> {
    /// The text without the spaces around it.
    pub(crate) text: &'a str,
    index: usize,
    whole: &'a str,
}

impl<'a> Element<'a> {
    /// The element of a text that is not a list.
    pub(crate) fn alone(text: &'a str) -> Self {
        Self {
            text: text.trim_matches(' '),
            index: 0,
            whole: text,
        }
    }

    /// The element as an error message names it. A string has only one span, so the message says
    /// which element is wrong.
    pub(crate) fn given(&self) -> String {
        if self.text == self.whole {
            quoted(self.text)
        } else {
            format!(
                "{} (element {} of {})",
                quoted(self.text),
                self.index + 1,
                quoted(self.whole)
            )
        }
    }

    pub(crate) fn fault(&self, accepted: &str) -> Fault {
        let fault = Fault {
            text: Some(self.text.to_owned()),
            ..Fault::new(self.given(), accepted)
        };
        if self.text.is_empty() {
            fault.hint("an element is missing before or after a separator")
        } else if !self.text.is_ascii() {
            fault.hint("only ASCII is accepted")
        } else {
            fault
        }
    }
}

/// Splits `text` into its elements. An empty text gives none, and a fault.
pub(crate) fn elements<'a>(
    text: &'a str,
    accepted: &str,
    faults: &mut Vec<Fault>,
) -> Vec<Element<'a>> {
    if text.trim_matches(' ').is_empty() {
        faults.push(Fault::new("an empty list", accepted));
        return Vec::new();
    }
    let mut depth = 0i32;
    text.split(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        depth <= 0 && matches!(c, '|' | ',')
    })
    .enumerate()
    .map(|(index, part)| Element {
        text: part.trim_matches(' '),
        index,
        whole: text,
    })
    .collect()
}

/// Reads a list of distinct values. `parse` returns the value of an element or its fault.
pub(crate) fn distinct<'a, T: PartialEq>(
    text: &'a str,
    accepted: &str,
    faults: &mut Vec<Fault>,
    parse: impl Fn(Element<'a>) -> Result<T, Fault>,
) -> Vec<T> {
    let mut values = Vec::new();
    for element in elements(text, accepted, faults) {
        match parse(element) {
            Ok(value) if values.contains(&value) => faults.push(twice(element)),
            Ok(value) => values.push(value),
            Err(fault) => faults.push(fault),
        }
    }
    values
}

fn twice(element: Element<'_>) -> Fault {
    Fault::new(
        format!(
            "{} twice, in {}",
            quoted(element.text),
            quoted(element.whole)
        ),
        "each element once",
    )
}

/// Reads a name that the key takes.
fn name(element: Element<'_>, key: &Key) -> Result<Name, Fault> {
    let found = key::names(key)
        .iter()
        .find(|name| name.text == element.text);
    found.copied().ok_or_else(|| element.fault(key.accepted))
}

/// Reads the names that `text` lists.
pub(crate) fn names(text: &str, key: &Key, faults: &mut Vec<Fault>) -> Vec<Name> {
    distinct(text, key.accepted, faults, |element| name(element, key))
}

/// Reads the names that `text` lists; empty if it is `none`.
pub(crate) fn none_or_names(text: &str, key: &Key, faults: &mut Vec<Fault>) -> Vec<Name> {
    if text.trim_matches(' ') == "none" {
        return Vec::new();
    }
    distinct(text, key.accepted, faults, |element| match element.text {
        "none" => Err(element.fault(key.accepted).hint("`none` stands alone")),
        _ => name(element, key),
    })
}

/// Reads the one name that `text` is. If it is none of the key's, returns the first of them and
/// adds a fault.
pub(crate) fn only(text: &str, key: &Key, faults: &mut Vec<Fault>) -> Name {
    let element = Element::alone(text);
    let read = if element.text.is_empty() {
        Err(Fault::new("an empty string", key.accepted))
    } else if text.contains(['|', ',']) {
        Err(element.fault(key.accepted).hint("one alone, not a list"))
    } else {
        name(element, key)
    };
    read.unwrap_or_else(|fault| {
        faults.push(fault);
        key::names(key)[0]
    })
}
