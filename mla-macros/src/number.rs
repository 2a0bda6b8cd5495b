//! Strict numbers: ASCII digits without sign or leading zero.

use crate::errors::Fault;
use crate::list::{Element, quoted};

/// A number of type `T`, if `text` is one.
pub(crate) fn read<T: std::str::FromStr>(text: &str) -> Option<T> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let canonical = digits && (text == "0" || !text.starts_with('0'));
    canonical.then(|| text.parse().ok())?
}

/// A number from 1 up, of which `element` is or holds the text.
pub(crate) fn positive(text: &str, element: Element<'_>, accepted: &str) -> Result<u32, Fault> {
    match read::<u32>(text) {
        Some(0) => Err(element
            .fault(accepted)
            .hint(format!("{} is zero, the least is 1", quoted(text)))),
        Some(number) => Ok(number),
        None => Err(element.fault(accepted)),
    }
}
