//! Lists on the host for the requests of a step.

use mla_runtime::Result;
use mla_runtime::room::with_room;

/// Number of lists of a call. Each has one entry more than there are requests.
pub(crate) const LISTS: usize = 7;

/// Makes lists with room for the query and key lengths of `requests` requests.
pub(crate) fn lens(requests: usize) -> Result<[Vec<u32>; 2]> {
    Ok([with_room(requests)?, with_room(requests)?])
}

/// Makes a list with room for all lists of a call.
pub(crate) fn scratch(requests: usize) -> Result<Vec<i32>> {
    with_room(LISTS.saturating_mul(requests.saturating_add(1)))
}

#[cfg(test)]
mod tests {
    use mla_runtime::Error;

    use super::*;

    #[test]
    fn limits_that_the_host_has_no_memory_for_are_an_error() {
        for requests in [usize::MAX, 1 << 61] {
            let refused = [lens(requests).map(drop), scratch(requests).map(drop)];
            for refused in refused {
                assert!(
                    matches!(refused, Err(Error::OutOfMemory { .. })),
                    "{requests} requests: {refused:?}"
                );
            }
        }
        assert!(lens(3).unwrap().iter().all(|list| list.capacity() >= 3));
        assert!(scratch(3).unwrap().capacity() >= 4 * LISTS);
    }
}
