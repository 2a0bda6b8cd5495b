//! The numbers that a name in a batch spec stands for.

use crate::batch::shortened;

/// The maximum number of specs that one template may expand to.
pub(crate) const MAX_SPECS: usize = 1 << 16;

/// Reads a range: numbers joined by commas, or all numbers from a start up to a stop by a step or a
/// factor. The stop is included if a step reaches it.
///
/// Returns the numbers in order, of which there are 1 to [`MAX_SPECS`].
pub(crate) fn read_range(text: &str) -> Result<Vec<u32>, String> {
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u32>().ok().filter(|_| digits)
    };
    let refused = || {
        let given = shortened(text);
        format!(
            "range: given {given:?}, accepted numbers joined by commas, or start..stop with +step \
             or *factor behind it: 1,8,32 or 1..16 or 0..64+16 or 1..128*2"
        )
    };
    let numbers = match text.split_once("..") {
        None => {
            let numbers: Option<Vec<u32>> = text.split(',').map(number).collect();
            numbers.ok_or_else(refused)?
        }
        Some((start, rest)) => {
            let (stop, by) = rest.split_once(['+', '*']).unwrap_or((rest, "1"));
            let (Some(start), Some(stop), Some(by)) = (number(start), number(stop), number(by))
            else {
                return Err(refused());
            };
            stepped(start, stop, by, rest.contains('*'))?
        }
    };
    match numbers.len() {
        1..=MAX_SPECS => Ok(numbers),
        _ => Err(format!(
            "range: given more than {MAX_SPECS} numbers, accepted 1 to {MAX_SPECS} numbers"
        )),
    }
}

fn stepped(start: u32, stop: u32, by: u32, multiplies: bool) -> Result<Vec<u32>, String> {
    let (given, accepted) = match multiplies {
        false if by == 0 => ("a step of 0".to_owned(), "a step of 1 and up"),
        true if start == 0 || by < 2 => (
            match start {
                0 => "a start of 0".to_owned(),
                _ => format!("a factor of {by}"),
            },
            "a start of 1 and up and a factor of 2 and up",
        ),
        _ if start > stop => (
            format!("{start}..{stop}"),
            "a start that is at most the stop",
        ),
        _ => {
            let next = |number: &u32| match multiplies {
                true => number.checked_mul(by),
                false => number.checked_add(by),
            };
            let numbers = std::iter::successors(Some(start), next);
            let numbers = numbers.take_while(|number| *number <= stop);
            return Ok(numbers.take(MAX_SPECS + 1).collect());
        }
    };
    Err(format!("range: given {given}, accepted {accepted}"))
}
