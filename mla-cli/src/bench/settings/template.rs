//! Many batch specs in one line: a spec with names in braces, and the numbers of each name.
//!
//! `{b}q1s{s}k` with b = 1, 8 and s = 4, 16 is `1q1s4k`, `1q1s16k`, `8q1s4k`, `8q1s16k`. These are
//! all combinations, and the first name varies slowest. A name is one or more letters a to z and
//! stands for the same number wherever it occurs. Its numbers are a [range](super::range). Errors
//! are sentences.

use std::str::FromStr;

use super::range::MAX_SPECS;
use crate::batch::{BatchSpec, BatchSpecError, shortened};

/// A batch spec with names in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Template {
    text: String,
    /// The text before, between and behind the names, one piece more than `places` has entries.
    literals: Vec<String>,
    /// The name at each place, as an index.
    places: Vec<usize>,
    names: Vec<String>,
}

impl Template {
    /// Returns the names, in the order in which they first occur.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns every combination. The first name varies slowest.
    ///
    /// # Errors
    ///
    /// If the number of ranges is not that of the names, if there are more than [`MAX_SPECS`]
    /// combinations, or if one of them is not a batch spec.
    pub(crate) fn expand(&self, ranges: &[Vec<u32>]) -> Result<Vec<BatchSpec>, String> {
        if ranges.len() != self.names.len() {
            let (given, accepted) = (ranges.len(), self.names.len());
            return Err(format!(
                "ranges: given {given}, accepted {accepted}, one for each name"
            ));
        }
        let lens = ranges.iter().map(Vec::len);
        let count = lens.fold(1usize, usize::saturating_mul);
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

    fn combination(&self, ranges: &[Vec<u32>], mut index: usize) -> Result<BatchSpec, String> {
        let mut values = vec![0; ranges.len()];
        for (value, range) in values.iter_mut().zip(ranges).rev() {
            *value = range[index % range.len()];
            index /= range.len();
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

    /// Finds the names. The rest is checked as a batch spec only when it is expanded.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bench::settings::range::read_range;

    fn expand(template: &str, ranges: &[&str]) -> Result<Vec<String>, String> {
        let template: Template = template.parse()?;
        let ranges: Result<Vec<_>, String> = ranges.iter().map(|range| read_range(range)).collect();
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

    proptest! {
        /// The combinations are those of nested loops.
        #[test]
        fn combinations_are_those_of_nested_loops(
            a in proptest::collection::vec(1u32..50, 1..6),
            b in proptest::collection::vec(50u32..99, 1..6),
        ) {
            let template: Template = "{a}q{a}s{b}_{b}q1s9k".parse().unwrap();
            let specs = template.expand(&[a.clone(), b.clone()]).unwrap();
            let mut expected = Vec::new();
            for a in &a {
                for b in &b {
                    let spec: BatchSpec = format!("{a}q{a}s{b}_{b}q1s9k").parse().unwrap();
                    expected.push(spec);
                }
            }
            prop_assert_eq!(specs, expected);
        }

        /// A range has exactly the numbers of its definition.
        #[test]
        fn ranges_have_the_numbers_of_their_definition(
            start in 1u32..500, stop in 1u32..500, by in 2u32..9,
        ) {
            let stepped: Vec<u32> =
                (start..=stop).filter(|number| (number - start).is_multiple_of(by)).collect();
            let range = read_range(&format!("{start}..{stop}+{by}"));
            prop_assert_eq!(range.unwrap_or_default(), stepped);
            let multiplied: Vec<u32> = (0..9)
                .map(|power| u64::from(start) * u64::from(by).pow(power))
                .filter(|number| *number <= stop.into())
                .map(|number| number as u32)
                .collect();
            let range = read_range(&format!("{start}..{stop}*{by}"));
            prop_assert_eq!(range.unwrap_or_default(), multiplied);
        }

        /// A template without names expands to its text.
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
                let ranges = vec![vec![1, 2]; template.names().len().min(4)];
                let _ = template.expand(&ranges);
            }
            let _ = read_range(&text);
        }
    }
}
