//! Batch specs: a batch of attention requests in one word.
//!
//! Segments are joined by `_`, each of the form `[count]q<len>[k][s<len>[k]]`:
//!
//! | part | meaning |
//! |---|---|
//! | `count` | number of such requests; 1 if left out |
//! | `q<len>` | query length: the new tokens of each request |
//! | `s<len>` | kv length, with the query tokens; the query length if left out |
//! | `k` | multiplies the length before it by 1024 |
//!
//! For example, `2q2k_32q1s1k` has 34 requests. Its label is `2 prefill (2x2k), 32 decode (32x1k)`.
//!
//! Nothing else is accepted: no space, no sign, no upper case, no digit outside ASCII, no count or
//! length of zero, and no kv length below the query length.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::str::FromStr;

use mla_runtime::batch::Request;
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

/// The longest query or kv length: lengths are 32-bit signed integers on devices.
pub(crate) const MAX_LEN: u32 = i32::MAX as u32;

/// The maximum number of requests of a spec. It is far beyond any engine's batch, and small enough
/// for a list in memory.
pub(crate) const MAX_REQUESTS: usize = 1 << 20;

/// The kind of a request, by its lengths.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RequestKind {
    /// No context: q = kv.
    Prefill,
    /// Several new tokens after cached context: 1 < q < kv.
    Extend,
    /// One new token after cached context: q = 1 < kv.
    Decode,
}

impl RequestKind {
    /// All kinds, in the order in which labels list them.
    pub(crate) const ALL: [Self; 3] = [Self::Prefill, Self::Extend, Self::Decode];
}

impl fmt::Display for RequestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Extend => "extend",
            Self::Decode => "decode",
        })
    }
}

/// Returns the kind of a request. A single token without context is a prefill.
pub(crate) const fn kind(request: Request) -> RequestKind {
    if request.q == request.kv {
        RequestKind::Prefill
    } else if request.q == 1 {
        RequestKind::Decode
    } else {
        RequestKind::Extend
    }
}

/// A batch of requests, as written in a [batch spec](self).
///
/// `Display` writes the shortest spec of the same requests in the same order. As JSON, it is
/// `{"requests": [{"q", "kv"}], "decode", "extend", "prefill", "label"}`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct BatchSpec {
    requests: Vec<Request>,
}

impl BatchSpec {
    /// Makes the spec of these requests, of which there must be at least one.
    #[cfg(feature = "bench")]
    pub(crate) const fn new(requests: Vec<Request>) -> Self {
        Self { requests }
    }

    /// Returns the requests in the order of the spec. There is at least one.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Counts the requests of a kind.
    pub(crate) fn count(&self, of: RequestKind) -> usize {
        self.requests.iter().filter(|r| kind(**r) == of).count()
    }

    /// Returns the number of new tokens of the whole batch.
    pub fn query_tokens(&self) -> u64 {
        self.requests.iter().map(|r| u64::from(r.q)).sum()
    }

    /// Returns the number of tokens of the whole batch that are attended to, cached and new ones.
    pub fn kv_tokens(&self) -> u64 {
        self.requests.iter().map(|r| u64::from(r.kv)).sum()
    }

    /// Describes the batch in words: `2 prefill (2x2k), 8 extend (8xq4kv1k), 32 decode (16x1k,
    /// 16x2k)`.
    ///
    /// The kinds come in order. The sizes of each kind are in the order in which they first appear.
    pub fn label(&self) -> String {
        let mut label = String::new();
        for of in RequestKind::ALL {
            let mut sizes: Vec<(Request, usize)> = Vec::new();
            let mut index = HashMap::new();
            for &request in self.requests.iter().filter(|r| kind(**r) == of) {
                let at = *index.entry(request).or_insert(sizes.len());
                match sizes.get_mut(at) {
                    Some((_, count)) => *count += 1,
                    None => sizes.push((request, 1)),
                }
            }
            if sizes.is_empty() {
                continue;
            }
            if !label.is_empty() {
                label.push_str(", ");
            }
            let total: usize = sizes.iter().map(|(_, count)| count).sum();
            let sizes: Vec<String> = sizes
                .into_iter()
                .map(|(Request { q, kv, .. }, count)| match of {
                    RequestKind::Extend => format!("{count}xq{}kv{}", Len(q), Len(kv)),
                    RequestKind::Prefill | RequestKind::Decode => format!("{count}x{}", Len(kv)),
                })
                .collect();
            // Writing to a string cannot fail.
            let _ = write!(label, "{total} {of} ({})", sizes.join(", "));
        }
        label
    }
}

impl Serialize for BatchSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut spec = serializer.serialize_struct("BatchSpec", 5)?;
        spec.serialize_field("requests", &self.requests)?;
        spec.serialize_field("decode", &self.count(RequestKind::Decode))?;
        spec.serialize_field("extend", &self.count(RequestKind::Extend))?;
        spec.serialize_field("prefill", &self.count(RequestKind::Prefill))?;
        spec.serialize_field("label", &self.label())?;
        spec.end()
    }
}

/// A length. It is written with `k` if it is a multiple of 1024.
struct Len(u32);

impl fmt::Display for Len {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            len if len > 0 && len.is_multiple_of(1024) => write!(f, "{}k", len / 1024),
            len => write!(f, "{len}"),
        }
    }
}

impl fmt::Display for BatchSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.requests.chunk_by(|a, b| a == b);
        for (index, run) in runs.enumerate() {
            let Request { q, kv, .. } = run[0];
            if index > 0 {
                f.write_str("_")?;
            }
            if run.len() > 1 {
                write!(f, "{}", run.len())?;
            }
            write!(f, "q{}", Len(q))?;
            if kv != q {
                write!(f, "s{}", Len(kv))?;
            }
        }
        Ok(())
    }
}

/// The part of a batch spec that is wrong, and the reason.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "batch spec, segment {number} {text:?}, byte {offset}: given {given}, accepted {accepted}",
    number = .segment + 1
)]
pub struct BatchSpecError {
    /// The index of the segment, from zero.
    pub segment: usize,
    /// The segment as it was given, shortened if it is very long.
    pub text: String,
    /// The first byte of the wrong part, counted from the start of the whole spec.
    pub offset: usize,
    /// The wrong part, shortened if it is very long.
    pub given: String,
    /// The parts that are accepted at this point.
    pub accepted: String,
}

impl FromStr for BatchSpec {
    type Err = BatchSpecError;

    fn from_str(spec: &str) -> Result<Self, BatchSpecError> {
        let mut requests = Vec::new();
        let mut offset = 0;
        for (segment, text) in spec.split('_').enumerate() {
            let parsed = Segment::new(text).parse();
            let (count, request) = parsed
                .and_then(|(count, request)| {
                    let given = requests.len() + count;
                    match given <= MAX_REQUESTS {
                        true => Ok((count, request)),
                        false => Err(Problem {
                            at: 0,
                            given: format!("{given} requests up to here"),
                            accepted: format!("at most {MAX_REQUESTS}"),
                        }),
                    }
                })
                .map_err(|problem| BatchSpecError {
                    segment,
                    text: shortened(text),
                    offset: offset + problem.at,
                    given: problem.given,
                    accepted: problem.accepted,
                })?;
            requests.extend(std::iter::repeat_n(request, count));
            offset += text.len() + "_".len();
        }
        Ok(Self { requests })
    }
}

/// Returns at most the first 40 characters, so that an error stays readable for any input.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A wrong part and its offset in the segment.
struct Problem {
    at: usize,
    given: String,
    accepted: String,
}

/// A segment that is being read from left to right.
struct Segment<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Segment<'a> {
    const fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    /// Returns the count and the request that it counts.
    fn parse(mut self) -> Result<(usize, Request), Problem> {
        if self.text.is_empty() {
            return Err(Problem {
                at: 0,
                given: "nothing".to_owned(),
                accepted: "[count]q<len>[k][s<len>[k]], such as 8q1s1k".to_owned(),
            });
        }
        let count = match self.peek() {
            Some('q') => 1,
            Some('0'..='9') => self.number("count", MAX_REQUESTS as u64, false)? as usize,
            _ => return Err(self.unexpected("a count or q<len>")),
        };
        if !self.skip('q') {
            return Err(self.unexpected("q<len>"));
        }
        let q = self.length("query length")?;
        if self.peek().is_none() {
            return Ok((count, Request::new(q, q)));
        }
        if !self.skip('s') {
            return Err(self.unexpected("a further digit, k, s<len>, or _ and another segment"));
        }
        let kv_at = self.at;
        let kv = self.length("kv length")?;
        if self.peek().is_some() {
            return Err(self.unexpected("a further digit, k, or _ and another segment"));
        }
        if kv < q {
            return Err(Problem {
                at: kv_at,
                given: format!("a kv length of {kv}"),
                accepted: format!("at least the query length, {q}, which is part of it"),
            });
        }
        Ok((count, Request::new(q, kv)))
    }

    fn length(&mut self, part: &'static str) -> Result<u32, Problem> {
        if !matches!(self.peek(), Some('0'..='9')) {
            return Err(self.unexpected("a length of one or more digits 0 to 9"));
        }
        // The number is at most MAX_LEN, so it fits 32 bits.
        Ok(self.number(part, MAX_LEN.into(), true)? as u32)
    }

    /// Parses a number from 1 to `max`: digits, and then a `k` if `with_k` allows it.
    fn number(&mut self, part: &'static str, max: u64, with_k: bool) -> Result<u64, Problem> {
        let start = self.at;
        let rest = &self.text[start..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        self.at += digits;
        let unit = if with_k && self.skip('k') { 1024 } else { 1 };
        rest[..digits]
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(unit))
            .filter(|number| (1..=max).contains(number))
            .ok_or_else(|| Problem {
                at: start,
                given: format!("a {part} of {}", shortened(&self.text[start..self.at])),
                accepted: format!("1 to {max}"),
            })
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn skip(&mut self, expected: char) -> bool {
        let found = self.peek() == Some(expected);
        if found {
            self.at += expected.len_utf8();
        }
        found
    }

    fn unexpected(&self, accepted: &'static str) -> Problem {
        let given = match self.peek() {
            Some(given) => format!("{given:?}"),
            None => "the end of the segment".to_owned(),
        };
        Problem {
            at: self.at,
            given,
            accepted: accepted.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(spec: &str) -> BatchSpec {
        spec.parse()
            .unwrap_or_else(|error| panic!("{spec}: {error}"))
    }

    #[test]
    fn specs_and_labels() {
        // A spec, its requests as (count, q, kv), and its label.
        type Runs = &'static [(usize, u32, u32)];
        let cases: [(&str, Runs, &str); 14] = [
            ("q2k", &[(1, 2048, 2048)], "1 prefill (1x2k)"),
            ("2q2k", &[(2, 2048, 2048)], "2 prefill (2x2k)"),
            ("8q1s1k", &[(8, 1, 1024)], "8 decode (8x1k)"),
            ("32q1s1k", &[(32, 1, 1024)], "32 decode (32x1k)"),
            ("8q4s1k", &[(8, 4, 1024)], "8 extend (8xq4kv1k)"),
            (
                "2q1k_32q1s1k",
                &[(2, 1024, 1024), (32, 1, 1024)],
                "2 prefill (2x1k), 32 decode (32x1k)",
            ),
            (
                "4q2k_8q4s1k_64q1s2k",
                &[(4, 2048, 2048), (8, 4, 1024), (64, 1, 2048)],
                "4 prefill (4x2k), 8 extend (8xq4kv1k), 64 decode (64x2k)",
            ),
            // Labels are ordered by kind in any order of the spec. Sizes keep their order.
            (
                "3q1s2k_q5_q1s1025_2q1s2k",
                &[(3, 1, 2048), (1, 5, 5), (1, 1, 1025), (2, 1, 2048)],
                "1 prefill (1x5), 6 decode (5x2k, 1x1025)",
            ),
            // One token without context is a prefill.
            ("q1", &[(1, 1, 1)], "1 prefill (1x1)"),
            ("q1s1", &[(1, 1, 1)], "1 prefill (1x1)"),
            ("q1ks1k", &[(1, 1024, 1024)], "1 prefill (1x1k)"),
            ("q1ks4k", &[(1, 1024, 4096)], "1 extend (1xq1kkv4k)"),
            ("007q01s0010", &[(7, 1, 10)], "7 decode (7x10)"),
            (
                "q2147483647",
                &[(1, 2_147_483_647, 2_147_483_647)],
                "1 prefill (1x2147483647)",
            ),
        ];
        for (text, runs, label) in cases {
            let spec = parse(text);
            let expected: Vec<Request> = runs
                .iter()
                .flat_map(|&(count, q, kv)| std::iter::repeat_n(Request::new(q, kv), count))
                .collect();
            assert_eq!(spec.requests(), expected, "{text}");
            assert_eq!(spec.label(), label, "{text}");
            assert_eq!(parse(&spec.to_string()), spec, "{text}");
        }
    }

    #[test]
    fn displays_the_shortest_spec() {
        for (given, shortest) in [
            ("1q1024s2048", "q1ks2k"),
            ("q5s5_q5_2q5", "4q5"),
            ("q1s2_q3_q1s2", "q1s2_q3_q1s2"),
            ("q1025s10240", "q1025s10k"),
        ] {
            assert_eq!(parse(given).to_string(), shortest);
        }
    }

    #[test]
    fn totals() {
        let spec = parse("4q2k_8q4s1k_64q1s2k");
        assert_eq!(spec.requests().len(), 76);
        assert_eq!(RequestKind::ALL.map(|kind| spec.count(kind)), [4, 8, 64]);
        assert_eq!(spec.query_tokens(), 4 * 2048 + 8 * 4 + 64);
        assert_eq!(spec.kv_tokens(), 4 * 2048 + 8 * 1024 + 64 * 2048);
        assert_eq!(spec.requests()[4].context_len(), 1020);
    }

    #[test]
    fn serialises_in_the_documented_form() {
        assert_eq!(
            serde_json::to_string(&parse("2q1s1k_q3")).unwrap(),
            concat!(
                r#"{"requests":[{"q":1,"kv":1024},{"q":1,"kv":1024},{"q":3,"kv":3}],"#,
                r#""decode":2,"extend":0,"prefill":1,"label":"1 prefill (1x3), 2 decode (2x1k)"}"#
            )
        );
    }

    #[test]
    fn long_input_makes_no_long_message() {
        let error = format!("q{}", "9".repeat(100_000))
            .parse::<BatchSpec>()
            .unwrap_err();
        assert!(error.to_string().len() < 300);
        assert_eq!(parse("1048576q1").requests().len(), MAX_REQUESTS);
    }

    fn requests() -> impl Strategy<Value = Vec<Request>> {
        let len = prop_oneof![1u32..20, (1u32..20).prop_map(|k| k * 1024), 1..=MAX_LEN];
        let request = (len.clone(), len).prop_map(|(a, b)| Request::new(a.min(b), a.max(b)));
        proptest::collection::vec((request, 1usize..5), 1..8).prop_map(|runs| {
            runs.into_iter()
                .flat_map(|(request, count)| std::iter::repeat_n(request, count))
                .collect()
        })
    }

    proptest! {
        #[test]
        fn display_parses_back(requests in requests()) {
            let spec = BatchSpec { requests };
            prop_assert_eq!(spec.to_string().parse(), Ok(spec));
        }

        /// Every request belongs to one kind, and is counted in the label.
        #[test]
        fn kinds_partition_the_batch(requests in requests()) {
            let spec = BatchSpec { requests };
            let total: usize = RequestKind::ALL.map(|kind| spec.count(kind)).iter().sum();
            prop_assert_eq!(total, spec.requests().len());
            let label = spec.label();
            let labelled: usize = label
                .split("), ")
                .map(|part| part.split(' ').next().unwrap().parse::<usize>().unwrap())
                .sum();
            prop_assert_eq!(labelled, total);
        }

        #[test]
        fn any_text_is_parsed_or_refused(spec in "\\PC*|[0-9qsk_]{0,24}") {
            match spec.parse::<BatchSpec>() {
                Ok(parsed) => prop_assert!(
                    parsed.requests().iter().all(|r| 1 <= r.q && r.q <= r.kv)
                ),
                Err(error) => {
                    // The offset is that of a character in the named segment, or of its end.
                    let start: usize =
                        spec.split('_').take(error.segment).map(|text| text.len() + 1).sum();
                    let text = spec.split('_').nth(error.segment).unwrap();
                    prop_assert!(text.is_char_boundary(error.offset - start));
                }
            }
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = String::from_utf8_lossy(&bytes).parse::<BatchSpec>();
        }
    }
}
