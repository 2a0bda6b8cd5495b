//! Chooses the requests of a batch that take the absorbed path, and orders the batch.
//!
//! Requests with few new tokens take the absorbed path, the others the expanded one. For each path
//! to work on consecutive requests, and so on consecutive tokens, a batch is ordered:
//!
//! | place | new tokens | context | path |
//! |---|---|---|---|
//! | decode | 1 | any | absorbed |
//! | short extend | 2 to the threshold | any | absorbed |
//! | padding | any | no tokens at all, its new ones included | absorbed |
//! | without new tokens | 0 | any | absorbed |
//! | long extend | above the threshold | some | expanded |
//! | prefill | above the threshold | none | expanded |
//!
//! Within each place the requests keep their order. Padding is what engines fill a batch up with
//! to the size of a captured graph: a request with a kv of 0, whose tokens attend to nothing.
//!
//! A kernel whose queries must be *uniform* takes one length only. Then the absorbed path gets the
//! short requests of the most frequent length (the shorter one of two that are equally frequent),
//! and the other short ones take the expanded path. No request is lost, and none is padded. Padding
//! counts among the short ones, and has to have the length of the others, since the expanded path
//! has no use for it.

use std::collections::BTreeMap;
use std::ops::Range;

use super::PlanError;
use crate::batch::Request;

/// The order of a batch, and the parts of it on each path.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BatchSplit {
    /// The permutation: the request at place i of the ordered batch is number `order[i]` of the
    /// batch as it was given.
    pub order: Vec<usize>,
    /// The places of the requests with one new token, on the absorbed path.
    pub decode: Range<usize>,
    /// The places of the requests with several new tokens, on the absorbed path.
    pub short_extend: Range<usize>,
    /// The places of padding, and behind it of the requests without new tokens.
    pub padding: Range<usize>,
    /// The places of the requests with context, on the expanded path.
    pub long_extend: Range<usize>,
    /// The places of the requests without context, on the expanded path.
    pub prefill: Range<usize>,
    /// The new tokens on the absorbed path; they come first.
    pub absorbed_tokens: u64,
    /// The new tokens on the expanded path; they follow.
    pub expanded_tokens: u64,
    /// The query length of every request on the absorbed path that has new tokens, where they have
    /// the same.
    pub uniform_len: Option<u32>,
}

impl BatchSplit {
    /// The places of the requests on the absorbed path.
    pub fn absorbed(&self) -> Range<usize> {
        self.decode.start..self.padding.end
    }

    /// The places of the requests on the expanded path.
    pub fn expanded(&self) -> Range<usize> {
        self.long_extend.start..self.prefill.end
    }

    /// Returns true if the batch was in order already.
    pub fn is_in_order(&self) -> bool {
        self.order
            .iter()
            .enumerate()
            .all(|(place, &at)| place == at)
    }

    /// The inverse permutation: where each request of the batch as it was given now stands.
    pub fn places(&self) -> Vec<usize> {
        let mut places = vec![0; self.order.len()];
        for (place, &request) in self.order.iter().enumerate() {
            places[request] = place;
        }
        places
    }
}

/// Orders a batch and divides it between the two paths; the [module](self) says how.
///
/// `threshold` is the max number of new tokens of a request on the absorbed path
/// ([`super::crossover`] says which threshold pays), `uniform` whether the requests there must all
/// have the same number of them.
///
/// # Errors
///
/// If a request has fewer tokens in all than new ones, and is no padding; if padding has another
/// length than the uniform one.
pub fn split(requests: &[Request], threshold: u32, uniform: bool) -> Result<BatchSplit, PlanError> {
    split_by(requests, |_| threshold, uniform)
}

/// [`split`] with a threshold of each request's own: of a sparse batch, some have no expanded form.
///
/// # Errors
///
/// Same as [`split`].
pub fn split_by(
    requests: &[Request],
    threshold: impl Fn(&Request) -> u32,
    uniform: bool,
) -> Result<BatchSplit, PlanError> {
    let uniform_len = if uniform {
        modal_len(requests, &threshold)
    } else {
        None
    };
    check(requests, &threshold, uniform.then_some(uniform_len))?;
    let place_of = |request: &Request| {
        let short = request.q <= threshold(request) && (!uniform || Some(request.q) == uniform_len);
        match (request.q, short) {
            (0, _) => 3,
            _ if request.is_padding() => 2,
            (1, true) => 0,
            (_, true) => 1,
            (_, false) if request.q < request.kv => 4,
            (_, false) => 5,
        }
    };
    let mut places: [Vec<usize>; 6] = Default::default();
    let mut tokens = [0u64; 6];
    for (index, request) in requests.iter().enumerate() {
        let place = place_of(request);
        places[place].push(index);
        tokens[place] += u64::from(request.q);
    }
    let mut end = 0;
    let [decode, short_extend, padding, without, long_extend, prefill] =
        places.each_ref().map(|place| {
            let start = end;
            end += place.len();
            start..end
        });
    let order = places.concat();
    let mut absorbed = order[decode.start..padding.end]
        .iter()
        .map(|&at| requests[at].q);
    let first_len = absorbed.next();
    Ok(BatchSplit {
        uniform_len: first_len.filter(|&len| absorbed.all(|other| other == len)),
        order,
        decode,
        short_extend,
        padding: padding.start..without.end,
        long_extend,
        prefill,
        absorbed_tokens: tokens[..3].iter().sum(),
        expanded_tokens: tokens[4..].iter().sum(),
    })
}

/// Refuses requests that contradict themselves, and padding whose length is not the uniform one.
/// `None`: lengths may differ; `Some(None)`: no request is short.
fn check(
    requests: &[Request],
    threshold: &impl Fn(&Request) -> u32,
    uniform_len: Option<Option<u32>>,
) -> Result<(), PlanError> {
    let short = |(_, r): &(usize, &Request)| r.kv < r.q && !r.is_padding();
    if let Some((index, request)) = requests.iter().enumerate().find(short) {
        return Err(PlanError::invalid(
            format!("requests[{index}].kv"),
            request.kv,
            format!("at least its {} new tokens", request.q),
        ));
    }
    let Some(uniform_len) = uniform_len else {
        return Ok(());
    };
    let is_padding = |(_, r): &(usize, &Request)| r.is_padding() && r.q > 0;
    for (index, request) in requests.iter().enumerate().filter(is_padding) {
        if uniform_len != Some(request.q) {
            return Err(PlanError::invalid(
                format!("requests[{index}].q"),
                request.q,
                match uniform_len {
                    Some(len) => format!("{len} for padding, as long as the others are"),
                    None => format!(
                        "at most the threshold of {} for padding",
                        threshold(request)
                    ),
                },
            ));
        }
    }
    Ok(())
}

/// The query length that most of the short requests have; of equally frequent ones the shortest.
fn modal_len(requests: &[Request], threshold: &impl Fn(&Request) -> u32) -> Option<u32> {
    let mut counts = BTreeMap::<u32, usize>::new();
    let short = requests
        .iter()
        .filter(|r| (1..=threshold(r)).contains(&r.q));
    for request in short {
        *counts.entry(request.q).or_default() += 1;
    }
    // The last of several maxima wins, so the lengths come from long to short.
    counts
        .into_iter()
        .rev()
        .max_by_key(|&(_, count)| count)
        .map(|(len, _)| len)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn requests(lens: &[(u32, u32)]) -> Vec<Request> {
        lens.iter().map(|&(q, kv)| Request { q, kv }).collect()
    }

    #[test]
    fn orders_by_place_and_keeps_order_within() {
        let batch = requests(&[
            (100, 100), // 0: prefill
            (1, 50),    // 1: decode
            (9, 70),    // 2: long extend
            (0, 0),     // 3: without new tokens
            (4, 90),    // 4: short extend
            (1, 1),     // 5: decode, without context
            (2, 80),    // 6: short extend
            (9, 9),     // 7: prefill
            (0, 12),    // 8: without new tokens
            (1, 60),    // 9: decode
            (3, 0),     // 10: padding
        ]);
        let split = split(&batch, 8, false).unwrap();
        assert_eq!(split.order, [1, 5, 9, 4, 6, 10, 3, 8, 2, 0, 7]);
        assert_eq!(split.decode, 0..3);
        assert_eq!(split.short_extend, 3..5);
        assert_eq!(split.padding, 5..8);
        assert_eq!(split.long_extend, 8..9);
        assert_eq!(split.prefill, 9..11);
        assert_eq!((split.absorbed(), split.expanded()), (0..8, 8..11));
        assert_eq!((split.absorbed_tokens, split.expanded_tokens), (12, 118));
        assert_eq!(split.uniform_len, None);
        assert!(!split.is_in_order());
        assert_eq!(split.places(), [9, 0, 8, 6, 3, 1, 4, 10, 7, 2, 5]);
    }

    #[test]
    fn uniform_kernels_get_one_length() {
        // Threshold, batch, and which requests the absorbed path gets, of what length.
        type Case = (u32, &'static [(u32, u32)], &'static [usize], Option<u32>);
        let cases: [Case; 8] = [
            // A speculative batch, padded to the size of its graph.
            (4, &[(4, 90), (4, 80), (0, 0)], &[0, 1, 2], Some(4)),
            (4, &[(4, 0), (4, 80), (4, 0)], &[1, 0, 2], Some(4)),
            // The majority wins, ties go to the shorter.
            (4, &[(1, 9), (4, 90), (4, 80)], &[1, 2], Some(4)),
            (4, &[(4, 90), (1, 9), (4, 80), (1, 7)], &[1, 3], Some(1)),
            // A length above the threshold is none to choose.
            (4, &[(5, 90), (5, 80), (2, 9)], &[2], Some(2)),
            (4, &[(5, 90)], &[], None),
            (4, &[(0, 3)], &[0], None),
            (0, &[(1, 90)], &[], None),
        ];
        for (threshold, lens, absorbed, len) in cases {
            let split = split(&requests(lens), threshold, true).unwrap();
            assert_eq!(split.order[split.absorbed()], *absorbed, "{lens:?}");
            assert_eq!(split.uniform_len, len, "{lens:?}");
        }
        // A short request of another length is expanded, ordered by its having context.
        let split = split(&requests(&[(1, 9), (3, 9), (1, 5), (2, 2)]), 4, true).unwrap();
        assert_eq!(split.order, [0, 2, 1, 3]);
        assert_eq!((split.long_extend, split.prefill), (2..3, 3..4));
    }

    #[test]
    fn a_batch_in_order_stays() {
        let split = split(&requests(&[(1, 9), (2, 9), (9, 10), (9, 9)]), 4, false).unwrap();
        assert!(split.is_in_order());
        assert_eq!(super::split(&[], 4, true).unwrap().order, [0usize; 0]);
    }

    #[test]
    fn refuses_fewer_tokens_than_new_ones() {
        let error = split(&requests(&[(1, 9), (5, 4)]), 1, false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "requests[1].kv: given 4, accepted at least its 5 new tokens"
        );
        let error = split(&requests(&[(2, 9), (2, 8), (1, 0)]), 4, true).unwrap_err();
        assert_eq!(
            error.to_string(),
            "requests[2].q: given 1, accepted 2 for padding, as long as the others are"
        );
    }

    proptest! {
        #[test]
        fn splits_are_stable_partitions(
            lens in proptest::collection::vec((0u32..7, 0u32..9), 0..40),
            threshold in 0u32..6,
            uniform: bool,
        ) {
            let batch: Vec<Request> = lens
                .into_iter()
                .map(|(q, context)| Request { q, kv: q + context })
                .collect();
            let split = split(&batch, threshold, uniform).unwrap();

            // A permutation, and its inverse.
            let places = split.places();
            prop_assert_eq!(split.order.len(), batch.len());
            for (request, &place) in places.iter().enumerate() {
                prop_assert_eq!(split.order[place], request);
            }
            // The places follow on each other and keep the order within.
            let mut end = 0;
            for range in [
                &split.decode, &split.short_extend, &split.padding, &split.long_extend,
                &split.prefill,
            ] {
                prop_assert_eq!(range.start, end);
                end = range.end;
                prop_assert!(split.order[range.clone()].is_sorted());
            }
            prop_assert_eq!(end, batch.len());

            let at = |range: Range<usize>| split.order[range].iter().map(|&at| batch[at]);
            prop_assert!(at(split.decode.clone()).all(|r| r.q == 1));
            prop_assert!(at(split.short_extend.clone()).all(|r| r.q > 1));
            prop_assert!(at(split.padding.clone()).all(|r| r.q == 0 || r.is_padding()));
            prop_assert!(at(split.long_extend.clone()).all(|r| r.q < r.kv));
            prop_assert!(at(split.prefill.clone()).all(|r| r.q == r.kv));
            prop_assert!(at(split.absorbed()).all(|r| r.q <= threshold));
            prop_assert!(at(split.expanded()).all(|r| r.q > 0));
            let tokens = |range| at(range).map(|r| u64::from(r.q)).sum::<u64>();
            prop_assert_eq!(split.absorbed_tokens, tokens(split.absorbed()));
            prop_assert_eq!(split.expanded_tokens, tokens(split.expanded()));

            let absorbed: Vec<u32> = at(split.absorbed()).map(|r| r.q).filter(|&q| q > 0).collect();
            prop_assert_eq!(
                split.uniform_len,
                absorbed.first().copied().filter(|len| absorbed.iter().all(|q| q == len))
            );
            if uniform {
                prop_assert!(absorbed.is_empty() || split.uniform_len.is_some());
                // No other length would have taken more requests.
                for len in 1..=threshold {
                    let count = batch.iter().filter(|r| r.q == len).count();
                    prop_assert!(count <= absorbed.len());
                }
            } else {
                prop_assert!(at(split.expanded()).all(|r| r.q > threshold));
            }
        }
    }
}
