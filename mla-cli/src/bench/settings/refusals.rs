//! Limits of the settings, from arguments as well as from a file.

use serde_json::Value;

use super::{OF_CASE, OF_CONTENDER, Settings};
use crate::args::{MAX_LIST_WIDTH, MAX_SAMPLES};
use crate::error::CliError;

/// The arguments for properties that a file of cases itself defines.
const BESIDE_CASES: [&str; 17] = [
    "--measure",
    "--model",
    "--dims",
    "--heads",
    "--dtype",
    "--kv",
    "--page",
    "--split-cache",
    "--batch-invariant",
    "--topk",
    "--lists",
    "--valid",
    "--path",
    "--threshold",
    "--query-chunk",
    "--rows",
    "--own-rows",
];

/// The keys with numbers, and the minimum and maximum of each.
const BOUNDS: [(&str, u32, u32); 10] = [
    ("heads", 1, u32::MAX),
    ("page", 1, u32::MAX),
    ("topk", 1, MAX_LIST_WIDTH),
    ("valid", 1, MAX_LIST_WIDTH),
    ("query_chunk", 1, u32::MAX),
    ("rows", 1, u32::MAX),
    ("layers", 1, u32::MAX),
    ("samples", 1, MAX_SAMPLES),
    ("warm_up", 0, MAX_SAMPLES),
    ("check", 1, u32::MAX),
];

impl Settings {
    /// Refuses settings for properties that a file of cases itself defines.
    pub fn refuse_beside_cases(&self) -> Result<(), CliError> {
        let keys = self.keys();
        let has = |argument: &str| keys.contains_key(&argument[2..].replace('-', "_"));
        let given = if !self.batches.is_empty() {
            Some("SPEC")
        } else if !self.range.is_empty() || !self.ranges.is_empty() {
            Some("--range")
        } else {
            BESIDE_CASES.into_iter().find(|argument| has(argument))
        };
        match given {
            None => Ok(()),
            Some(argument) => Err(CliError::argument(
                argument,
                "a value beside --cases",
                "one of the two: the file says what its cases are",
            )),
        }
    }

    /// Checks the settings of a file against the ranges that the parser checks for arguments.
    /// Returns the first refused number with the reason.
    pub fn number_out_of_range(&self) -> Option<String> {
        let keys = self.keys();
        BOUNDS.into_iter().find_map(|(key, min, max)| {
            let value = keys.get(key)?;
            let numbers = value
                .as_array()
                .map_or(std::slice::from_ref(value), Vec::as_slice);
            let is_refused = |number: &u64| !(u64::from(min)..=max.into()).contains(number);
            let given = numbers.iter().filter_map(Value::as_u64).find(is_refused)?;
            Some(match max {
                u32::MAX => format!("{key}: given {given}, accepted {min} and up"),
                _ => format!("{key}: given {given}, accepted {min} to {max}"),
            })
        })
    }

    /// Refuses a value that occurs twice on an axis, since it would give equal rows.
    pub fn refuse_repetitions(&self) -> Result<(), CliError> {
        let keys = self.keys();
        let others = ["backends", "prefill", "decode", "path"];
        for key in OF_CASE.into_iter().chain(OF_CONTENDER).chain(others) {
            let values = keys.get(key).and_then(Value::as_array);
            let values = values.map_or(&[][..], Vec::as_slice);
            let mut places = values.iter().enumerate();
            if let Some((_, twice)) = places.find(|(at, value)| values[..*at].contains(value)) {
                let name = twice
                    .as_str()
                    .map_or_else(|| twice.to_string(), str::to_owned);
                let given = format!("{name} twice");
                return Err(CliError::argument(key, given, "each value once"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_distinguishes_rows_stands_beside_a_file_of_cases() {
        for key in OF_CASE.into_iter().chain(OF_CONTENDER) {
            let argument = format!("--{}", key.replace('_', "-"));
            assert!(BESIDE_CASES.contains(&&*argument), "{argument}");
        }
    }
}
