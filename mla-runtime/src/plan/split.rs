//! Chooses the requests of a batch that take the absorbed path, and orders the batch.
//!
//! Requests with few new tokens take the absorbed path, the others the expanded path. A batch is
//! ordered so that the requests of either path, and so their tokens, are consecutive:
//!
//! | place | new tokens | context | path |
//! |---|---|---|---|
//! | decode | 1 | any | absorbed |
//! | short extend | 2 to the threshold | any | absorbed |
//! | padding | any | none; kv is 0 | absorbed |
//! | without new tokens | 0 | any | absorbed |
//! | long extend | above the threshold | some | expanded |
//! | prefill | above the threshold | none | expanded |
//!
//! Within each place the requests keep their order. Padding is a request with a kv of 0, whose
//! tokens attend to nothing. Engines add it to fill a batch up to the size of a captured graph.
//!
//! Some kernels take only *uniform* queries, all of one length. Then the absorbed path gets the
//! short requests of the most frequent length. If two lengths are equally frequent, it is the
//! shorter one. The other short requests take the expanded path. No request is lost, and none is
//! padded. Padding counts as short and must have the uniform length, because the expanded path does
//! not accept padding.

use std::collections::BTreeMap;

use crate::batch::Request;
use crate::{Error, Result};

/// Orders a batch so that the requests on either path are consecutive. The [module](self) describes
/// the order. The request at place i of the ordered batch is number `order[i]` of the given batch.
///
/// `threshold` gives the maximum number of new tokens with which a request takes the absorbed path.
/// [`super::crossover`] computes a good threshold; in a sparse batch some requests have no expanded
/// form. `uniform` is true if all requests on the absorbed path must have the same number of new
/// tokens.
///
/// # Errors
///
/// If a request has more new tokens than tokens in all and is no padding, or if the length of
/// padding is not the uniform one.
pub fn order(
    requests: &[Request],
    threshold: impl Fn(&Request) -> u32,
    uniform: bool,
) -> Result<Vec<usize>> {
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
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&at| place_of(&requests[at]));
    Ok(order)
}

/// Refuses requests that contradict themselves, and padding whose length is not the uniform one.
/// `uniform_len` is `None` if lengths may differ. It is `Some(None)` if no request is short.
fn check(
    requests: &[Request],
    threshold: &impl Fn(&Request) -> u32,
    uniform_len: Option<Option<u32>>,
) -> Result<()> {
    let short = |(_, r): &(usize, &Request)| r.kv < r.q && !r.is_padding();
    if let Some((index, request)) = requests.iter().enumerate().find(short) {
        return Err(Error::argument(
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
            return Err(Error::argument(
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

/// The most frequent query length of the short requests. If several are equally frequent, it is the
/// shortest.
fn modal_len(requests: &[Request], threshold: &impl Fn(&Request) -> u32) -> Option<u32> {
    let mut counts = BTreeMap::<u32, usize>::new();
    let short = requests
        .iter()
        .filter(|r| (1..=threshold(r)).contains(&r.q));
    for request in short {
        *counts.entry(request.q).or_default() += 1;
    }
    // `max_by_key` returns the last of several maxima, so the lengths are tried from long to short.
    counts
        .into_iter()
        .rev()
        .max_by_key(|&(_, count)| count)
        .map(|(len, _)| len)
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

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
        let order_of = |batch: &[Request]| order(batch, |_| 8, false).unwrap();
        assert_eq!(order_of(&batch), [1, 5, 9, 4, 6, 10, 3, 8, 2, 0, 7]);
        let in_order = requests(&[(1, 9), (2, 9), (9, 10), (9, 9)]);
        assert_eq!(order_of(&in_order), [0, 1, 2, 3]);
        assert_eq!(order(&[], |_| 4, true).unwrap(), [0usize; 0]);
    }

    #[test]
    fn uniform_kernels_get_one_length() {
        // Threshold, batch, and its order. The requests on the absorbed path come first.
        type Case = (u32, &'static [(u32, u32)], &'static [usize]);
        let cases: [Case; 9] = [
            // A speculative batch, padded to the size of its graph.
            (4, &[(4, 90), (4, 80), (0, 0)], &[0, 1, 2]),
            (4, &[(4, 0), (4, 80), (4, 0)], &[1, 0, 2]),
            // The most frequent length wins. If two are equally frequent, the shorter one does.
            (4, &[(1, 9), (4, 90), (4, 80)], &[1, 2, 0]),
            (4, &[(4, 90), (1, 9), (4, 80), (1, 7)], &[1, 3, 0, 2]),
            // A length above the threshold cannot become the uniform length.
            (4, &[(5, 90), (5, 80), (2, 9)], &[2, 0, 1]),
            (4, &[(5, 90), (0, 3)], &[1, 0]),
            (0, &[(1, 90), (0, 3)], &[1, 0]),
            // A short request of another length is expanded. Its place depends on whether it has
            // context.
            (4, &[(1, 9), (3, 9), (1, 5), (2, 2)], &[0, 2, 1, 3]),
            (4, &[(2, 2), (1, 9), (3, 9), (1, 5)], &[1, 3, 2, 0]),
        ];
        for (threshold, lens, expected) in cases {
            let order = order(&requests(lens), |_| threshold, true).unwrap();
            assert_eq!(order, *expected, "{lens:?}");
        }
    }

    #[test]
    fn refuses_fewer_tokens_than_new_ones() {
        let error = order(&requests(&[(1, 9), (5, 4)]), |_| 1, false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "requests[1].kv: given 4, accepted at least its 5 new tokens"
        );
        let error = order(&requests(&[(2, 9), (2, 8), (1, 0)]), |_| 4, true).unwrap_err();
        assert_eq!(
            error.to_string(),
            "requests[2].q: given 1, accepted 2 for padding, as long as the others are"
        );
    }

    proptest! {
        /// Requests are in the order of the table's places. Within a place they keep the given
        /// order.
        #[test]
        fn orders_are_stable(
            lens in proptest::collection::vec((0u32..7, 0u32..9), 0..40),
            threshold in 0u32..6,
            uniform: bool,
        ) {
            let batch: Vec<Request> = lens
                .into_iter()
                .map(|(q, context)| Request { q, kv: q + context })
                .collect();
            let order = order(&batch, |_| threshold, uniform).unwrap();
            let count = |len: u32| batch.iter().filter(|r| r.q == len).count();
            let lens = (1..=threshold).filter(|&len| count(len) > 0);
            let modal = lens.max_by_key(|&len| (count(len), Reverse(len)));
            let place = |r: Request| match r.q {
                0 => 2,
                q if q > threshold || (uniform && Some(q) != modal) => 3 + u8::from(q == r.kv),
                q => u8::from(q > 1),
            };
            let places: Vec<(u8, usize)> = order.iter().map(|&at| (place(batch[at]), at)).collect();
            prop_assert!(places.is_sorted());
            let mut numbers = order;
            numbers.sort_unstable();
            prop_assert_eq!(numbers, (0..batch.len()).collect::<Vec<_>>());
        }
    }
}
