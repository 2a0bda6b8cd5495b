//! Strict numbers: ASCII digits without sign or leading zero.

use crate::errors::{Fault, quoted};
use crate::list::Element;

/// Reads a number of type `T`, if `text` is one.
pub(crate) fn read<T: std::str::FromStr>(text: &str) -> Option<T> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let canonical = digits && (text == "0" || !text.starts_with('0'));
    canonical.then(|| text.parse().ok())?
}

/// The number that `1_024`, `0x10`, `064`, `+16`, `16.0` or `16 bytes` probably means.
pub(crate) fn meant(text: &str) -> Option<String> {
    let plain = text.trim().to_ascii_lowercase().replace(['_', '\''], "");
    let number = match plain.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?,
        None => {
            let plain = plain.strip_prefix('+').unwrap_or(&plain);
            let units = ["bytes", "byte", "tokens", "token", "heads", "b", ".0"];
            let digits = units.iter().find_map(|unit| plain.strip_suffix(unit));
            digits.unwrap_or(plain).trim().parse().ok()?
        }
    };
    Some(number.to_string())
}

/// Reads a number from 1 up. Its text is `element` or a part of it.
pub(crate) fn positive(text: &str, element: Element<'_>, accepted: &str) -> Result<u32, Fault> {
    match read::<u32>(text) {
        Some(0) => Err(element
            .fault(accepted)
            .hint(format!("{} is zero, the minimum is 1", quoted(text)))),
        Some(number) => Ok(number),
        None => Err(element.fault(accepted)),
    }
}
