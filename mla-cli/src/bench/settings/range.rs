//! The numbers that a name in a batch spec stands for.

use std::str::FromStr;

/// The maximum number of specs that one template may expand to.
pub(crate) const MAX_SPECS: usize = 1 << 16;

/// The numbers that a name stands for, in order. There is at least one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Range {
    pub(crate) numbers: Vec<u32>,
}

impl Range {
    /// Makes a range of these numbers.
    ///
    /// # Errors
    ///
    /// If there are none.
    pub(crate) fn list(numbers: Vec<u32>) -> Result<Self, String> {
        Self { numbers }.checked()
    }

    /// Makes the range `start`, `start + step` and so on up to `stop`. It includes `stop` if a step
    /// reaches it.
    ///
    /// # Errors
    ///
    /// If `start` is above `stop`, the step is 0, or there are more than [`MAX_SPECS`] numbers.
    pub(crate) fn stepped(start: u32, stop: u32, step: u32) -> Result<Self, String> {
        if step == 0 {
            return Err("range: given a step of 0, accepted a step of 1 and up".to_owned());
        }
        ordered(start, stop)?;
        let numbers = (start..=stop).step_by(step as usize);
        Self {
            numbers: numbers.take(MAX_SPECS + 1).collect(),
        }
        .checked()
    }

    /// Makes the range `start`, `start · factor` and so on up to `stop`. It includes `stop` if a
    /// step reaches it.
    ///
    /// # Errors
    ///
    /// If `start` is 0 or above `stop`, or the factor is below 2.
    pub(crate) fn multiplied(start: u32, stop: u32, factor: u32) -> Result<Self, String> {
        for (what, given, min) in [("start", start, 1), ("factor", factor, 2)] {
            if given < min {
                return Err(format!(
                    "range: given a {what} of {given}, accepted a start of 1 and up and a factor \
                     of 2 and up"
                ));
            }
        }
        ordered(start, stop)?;
        let numbers = std::iter::successors(Some(start), |number| number.checked_mul(factor));
        Self {
            numbers: numbers.take_while(|number| *number <= stop).collect(),
        }
        .checked()
    }

    fn checked(self) -> Result<Self, String> {
        let given = match self.numbers.len() {
            0 => "no number".to_owned(),
            1..=MAX_SPECS => return Ok(self),
            _ => format!("more than {MAX_SPECS} numbers"),
        };
        Err(format!("range: given {given}, accepted 1 to 65536 numbers"))
    }
}

/// Returns at most the first 40 characters, so that an error stays readable for any input.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn ordered(start: u32, stop: u32) -> Result<(), String> {
    if start <= stop {
        return Ok(());
    }
    Err(format!(
        "range: given {start}..{stop}, accepted a start that is at most the stop"
    ))
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse::<u32>().ok().filter(|_| digits)
        };
        let refused = || {
            let given = shortened(text);
            format!(
                "range: given {given:?}, accepted numbers joined by commas, or start..stop with \
                 +step or *factor behind it: 1,8,32 or 1..16 or 0..64+16 or 1..128*2"
            )
        };
        let Some((start, rest)) = text.split_once("..") else {
            let numbers: Option<Vec<u32>> = text.split(',').map(number).collect();
            return Self::list(numbers.ok_or_else(refused)?);
        };
        let start = number(start).ok_or_else(refused)?;
        let read = |stop, by| Some((number(stop)?, number(by)?));
        if let Some((stop, factor)) = rest.split_once('*') {
            let (stop, factor) = read(stop, factor).ok_or_else(refused)?;
            Self::multiplied(start, stop, factor)
        } else if let Some((stop, step)) = rest.split_once('+') {
            let (stop, step) = read(stop, step).ok_or_else(refused)?;
            Self::stepped(start, stop, step)
        } else {
            Self::stepped(start, number(rest).ok_or_else(refused)?, 1)
        }
    }
}
