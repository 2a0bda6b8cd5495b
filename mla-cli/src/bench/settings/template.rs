//! Many batch specs in one line: a spec with names in braces, and the numbers that each stands for.
//!
//! `{b}q1s{s}k` with b = 1, 8 and s = 4, 16 is `1q1s4k`, `1q1s16k`, `8q1s4k`, `8q1s16k`: every
//! combination, the first name varying slowest. A name is one or more letters a to z and stands for
//! the same number wherever it occurs. Numbers come as a [`Range`]. Errors are sentences.

use std::str::FromStr;

use crate::batch::{BatchSpec, BatchSpecError};

/// The max number of specs that one template may expand to.
pub(crate) const MAX_SPECS: usize = 1 << 16;

/// A batch spec with names in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Template {
    text: String,
    /// The text before, between and behind the names: one more than `places`.
    literals: Vec<String>,
    /// The name at each place.
    places: Vec<usize>,
    names: Vec<String>,
}

/// The numbers that a name stands for, in order: not empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Range {
    pub(crate) numbers: Vec<u32>,
}

impl Template {
    /// The names, in the order in which they first occur.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Every combination, the first name varying slowest.
    ///
    /// # Errors
    ///
    /// If there is not one range for each name, there are more than [`MAX_SPECS`] combinations, or
    /// one of them is no batch spec.
    pub(crate) fn expand(&self, ranges: &[Range]) -> Result<Vec<BatchSpec>, String> {
        if ranges.len() != self.names.len() {
            let (given, accepted) = (ranges.len(), self.names.len());
            return Err(format!(
                "ranges: given {given}, accepted {accepted}, one for each name"
            ));
        }
        let count = ranges.iter().fold(1usize, |count, range| {
            count.saturating_mul(range.numbers.len())
        });
        if count > MAX_SPECS {
            let text = shortened(&self.text);
            return Err(format!(
                "batch spec {text:?}: given {count} combinations, accepted at most {MAX_SPECS}"
            ));
        }
        (0..count)
            .map(|index| self.combination(ranges, index))
            .collect()
    }

    fn combination(&self, ranges: &[Range], mut index: usize) -> Result<BatchSpec, String> {
        let mut values = vec![0; ranges.len()];
        for (value, range) in values.iter_mut().zip(ranges).rev() {
            *value = range.numbers[index % range.numbers.len()];
            index /= range.numbers.len();
        }
        let mut text = self.literals[0].clone();
        for (place, literal) in self.places.iter().zip(&self.literals[1..]) {
            text += &values[*place].to_string();
            text += literal;
        }
        text.parse().map_err(|error: BatchSpecError| {
            if values.is_empty() {
                return error.to_string();
            }
            let pairs = self.names.iter().zip(&values);
            let pairs: Vec<_> = pairs
                .map(|(name, value)| format!("{name} = {value}"))
                .collect();
            let text = shortened(&self.text);
            format!("{text:?} with {}: {error}", pairs.join(", "))
        })
    }
}

impl FromStr for Template {
    type Err = String;

    /// Finds the names; whether the rest is a batch spec shows when it is expanded.
    fn from_str(text: &str) -> Result<Self, String> {
        let (mut literals, mut places, mut names) = (Vec::new(), Vec::new(), Vec::<String>::new());
        let mut from = 0;
        while let Some(brace) = text[from..].find(['{', '}']).map(|at| from + at) {
            let inner = text[brace..].strip_prefix('{');
            let name = inner
                .and_then(|inner| inner.split_once('}'))
                .map(|(name, _)| name);
            let is_name = |name: &&str| {
                !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase())
            };
            let Some(name) = name.filter(is_name) else {
                let (text, given) = (shortened(text), shortened(&text[brace..]));
                return Err(format!(
                    "batch spec {text:?}, byte {brace}: given {given:?}, accepted a name of \
                     letters a to z in braces, such as {{b}}"
                ));
            };
            literals.push(text[from..brace].to_owned());
            let place = names.iter().position(|known| known == name);
            places.push(place.unwrap_or(names.len()));
            if place.is_none() {
                names.push(name.to_owned());
            }
            from = brace + name.len() + "{}".len();
        }
        literals.push(text[from..].to_owned());
        Ok(Self {
            text: text.to_owned(),
            literals,
            places,
            names,
        })
    }
}

impl Range {
    /// These numbers.
    ///
    /// # Errors
    ///
    /// If there are none.
    pub(crate) fn list(numbers: Vec<u32>) -> Result<Self, String> {
        Self { numbers }.checked()
    }

    /// `start`, `start + step` and so on up to `stop`, which is one of them if the steps meet it.
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

    /// `start`, `start · factor` and so on up to `stop`, which is one of them if they meet it.
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

/// At most the first 40 characters, so that an error stays readable whatever was given.
fn shortened(text: &str) -> String {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn expand(template: &str, ranges: &[&str]) -> Result<Vec<String>, String> {
        let template: Template = template.parse()?;
        let ranges: Result<Vec<Range>, String> = ranges.iter().map(|range| range.parse()).collect();
        let specs = ranges.and_then(|ranges| template.expand(&ranges));
        Ok(specs?.iter().map(BatchSpec::to_string).collect())
    }

    #[test]
    fn combinations_are_in_order() {
        let cases: [(&str, &[&str], &[&str]); 7] = [
            (
                "{b}q1s{s}k",
                &["1..8*8", "4,16"],
                &["q1s4k", "q1s16k", "8q1s4k", "8q1s16k"],
            ),
            (
                "q2k_{b}q1s1k",
                &["2..4"],
                &["q2k_2q1s1k", "q2k_3q1s1k", "q2k_4q1s1k"],
            ),
            ("q{n}_q{n}s{m}", &["1,2", "9"], &["q1_q1s9", "q2_q2s9"]),
            ("q{q}s1k", &["0..8+3"], &[]),
            ("q{q}s1k", &["1..9+3"], &["q1s1k", "q4s1k", "q7s1k"]),
            ("q{q}s1k", &["3..100*4"], &["q3s1k", "q12s1k", "q48s1k"]),
            ("8q1s1k", &[], &["8q1s1k"]),
        ];
        for (template, ranges, expected) in cases {
            match expand(template, ranges) {
                Ok(specs) => assert_eq!(specs, expected, "{template}"),
                Err(error) => assert!(expected.is_empty(), "{template}: {error}"),
            }
        }
    }

    fn refused(template: &str, ranges: &[&str], message: &str) {
        let error = expand(template, ranges).unwrap_err();
        assert_eq!(error, message, "{template} {ranges:?}");
    }

    #[test]
    fn braces_without_a_name_are_refused() {
        for (template, offset, given) in [("q{b", 1, "{b"), ("q}1", 1, "}1"), ("q{B}", 1, "{B}")] {
            let message = format!(
                "batch spec {template:?}, byte {offset}: given {given:?}, accepted a name of \
                 letters a to z in braces, such as {{b}}"
            );
            refused(template, &[], &message);
        }
    }

    #[test]
    fn ranges_that_are_none_or_have_no_end_are_refused() {
        for range in ["", "1;2", "-1", "1..2..3"] {
            let message = format!(
                "range: given {range:?}, accepted numbers joined by commas, or start..stop with \
                 +step or *factor behind it: 1,8,32 or 1..16 or 0..64+16 or 1..128*2"
            );
            refused("q{b}", &[range], &message);
        }
        for (range, message) in [
            (
                "2..1",
                "given 2..1, accepted a start that is at most the stop",
            ),
            (
                "9..8*2",
                "given 9..8, accepted a start that is at most the stop",
            ),
            ("1..9+0", "given a step of 0, accepted a step of 1 and up"),
            (
                "1..9*1",
                "given a factor of 1, accepted a start of 1 and up and a factor of 2 and up",
            ),
        ] {
            refused("q{b}", &[range], &format!("range: {message}"));
        }
    }

    #[test]
    fn combinations_that_are_too_many_or_no_specs_are_refused() {
        let message = "ranges: given 0, accepted 1, one for each name";
        refused("{b}q1", &[], message);
        let message = "batch spec \"q{b}s{c}\": given 1000000 combinations, accepted at most 65536";
        refused("q{b}s{c}", &["1..1000", "1..1000"], message);
        let message = "\"q{q}s{s}\" with q = 8, s = 4: batch spec, segment 1 \"q8s4\", byte 3: \
                       given a kv length of 4, accepted at least the query length, 8, which is \
                       part of it";
        refused("q{q}s{s}", &["8", "4"], message);
    }

    proptest! {
        /// The combinations are those of nested loops.
        #[test]
        fn combinations_are_those_of_nested_loops(
            a in proptest::collection::vec(1u32..50, 1..6),
            b in proptest::collection::vec(50u32..99, 1..6),
        ) {
            let template: Template = "{a}q{a}s{b}_{b}q1s9k".parse().unwrap();
            let ranges = [Range::list(a.clone()).unwrap(), Range::list(b.clone()).unwrap()];
            let specs = template.expand(&ranges).unwrap();
            let mut expected = Vec::new();
            for a in &a {
                for b in &b {
                    let spec: BatchSpec = format!("{a}q{a}s{b}_{b}q1s9k").parse().unwrap();
                    expected.push(spec);
                }
            }
            prop_assert_eq!(specs, expected);
        }

        /// A range has the numbers that its definition says, and no others.
        #[test]
        fn ranges_have_the_numbers_of_their_definition(
            start in 1u32..500, stop in 1u32..500, by in 2u32..9,
        ) {
            let stepped: Vec<u32> =
                (start..=stop).filter(|number| (number - start).is_multiple_of(by)).collect();
            let range = format!("{start}..{stop}+{by}").parse::<Range>();
            prop_assert_eq!(range.map(|range| range.numbers).unwrap_or_default(), stepped);
            let multiplied: Vec<u32> = (0..9)
                .map(|power| u64::from(start) * u64::from(by).pow(power))
                .filter(|number| *number <= stop.into())
                .map(|number| number as u32)
                .collect();
            let range = format!("{start}..{stop}*{by}").parse::<Range>();
            prop_assert_eq!(range.map(|range| range.numbers).unwrap_or_default(), multiplied);
        }

        /// A template without names is its spec.
        #[test]
        fn text_without_names_is_itself(text in "[0-9qsk_]{0,16}") {
            let template: Template = text.parse().unwrap();
            let expanded = template.expand(&[]).map(|mut specs| specs.remove(0));
            match text.parse::<BatchSpec>() {
                Ok(spec) => prop_assert_eq!(expanded, Ok(spec)),
                Err(_) => prop_assert!(expanded.is_err()),
            }
        }

        #[test]
        fn any_text_is_taken_or_refused(text in "\\PC*|[0-9qsk_{}a-c.,*+]{0,24}") {
            if let Ok(template) = text.parse::<Template>() {
                let ranges = vec![Range::list(vec![1, 2]).unwrap(); template.names().len().min(4)];
                let _ = template.expand(&ranges);
            }
            let _ = text.parse::<Range>();
        }
    }
}
